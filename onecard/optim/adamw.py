"""AdamW over flat buffers: masters, moments, gradient totals and working copies of all parameters.

    total     gradients, summed over the step's micro-batches
    master    the weights that learn: fp32, or bf16 rounded stochastically
    exp_avg, exp_avg_sq    AdamW's moments: fp32, or int8 in blocks
    working   what the model computes with: cast from the master once per step; the master itself where
              both have the same dtype and live on the card

Everything is allocated at the beginning; an update allocates nothing, so that it cannot run out of
memory half-way. Groups are nanoGPT's: matrices and embeddings decay, norms and biases do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from onecard.model.rounding import noise_key
from onecard.optim.lowbit import BLOCK, Hyper, Int8State, adamw_chunk_
from onecard.optim.offload import LayerTotals, Shuttle, Traveller, check_host_memory, host_empty
from onecard.optim.regions import Region, split_regions
from onecard.optim.saved import MOMENTS, State, export_moment, import_moment

_EPSILON = 1e-8
# Eager low-bit arithmetic makes fp32 copies of what it works on: this many elements at a time.
_EAGER_PIECE = 2**20


@dataclass(frozen=True)
class Storage:
    """How masters and moments are kept (the knobs of the same names)."""

    master_weights: str = "fp32"
    optim_states: str = "fp32"
    offload: str = "none"

    @property
    def low_bit(self) -> bool:
        return self.master_weights == "bf16" or self.optim_states == "int8"


class Held:
    """One region's buffers."""

    def __init__(self, region: Region, storage: Storage, device: str, compute: torch.dtype) -> None:
        full = torch.promote_types(compute, torch.float32)
        self.region, self.device = region, device
        self.on_host = storage.offload != "none" and not region.is_vectors
        bf16 = storage.master_weights == "bf16" and not region.is_vectors
        int8 = storage.optim_states == "int8" and not region.is_vectors
        self.low_bit = bf16 or int8
        self.total_dtype = torch.bfloat16 if bf16 and region.name == "layers" else full
        self.layer_totals: LayerTotals | None = None
        if storage.offload == "gradients" and region.name == "layers":
            self.layer_totals = LayerTotals(region, self.total_dtype, device)
            self.total = self.layer_totals.home
            self.total_views = self.layer_totals.views
        else:
            self.total = torch.zeros(region.size, dtype=self.total_dtype, device=device)
            self.total_views = region.views(self.total)
        self.master = self._empty(region.size, torch.bfloat16 if bf16 else full).zero_()
        self.exp_avg, self.exp_avg_sq = (self._new_state(int8, full, signed) for signed in (True, False))
        # Norms and biases compute in full precision: there is nothing to gain by rounding them.
        working = full if region.is_vectors else compute
        shared = self.master.dtype == working and not self.on_host
        self.working = self.master if shared else torch.zeros(region.size, dtype=working, device=device)
        self.shuttle = Shuttle(self._travellers(), region.size, device) if self.on_host else None

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        if self.on_host:
            return host_empty(count, dtype, self.device)
        return torch.empty(count, dtype=dtype, device=self.device)

    def _new_state(self, int8: bool, full: torch.dtype, signed: bool) -> State:
        if not int8:
            return self._empty(self.region.size, full).zero_()
        return Int8State(
            self._empty(self.region.size, torch.int8 if signed else torch.uint8).zero_(),
            self._empty(self.region.size // BLOCK, torch.float32).zero_(),
        )

    def _travellers(self) -> list[Traveller]:
        travellers = [Traveller(self.master)]
        for state in (self.exp_avg, self.exp_avg_sq):
            if isinstance(state, Int8State):
                travellers += [Traveller(state.codes), Traveller(state.scales, per=BLOCK)]
            else:
                travellers.append(Traveller(state))
        if self.layer_totals is not None:
            travellers.append(Traveller(self.layer_totals.home, returns=False))
        return travellers

    def pieces(self, flats: list[Tensor], first: int, count: int) -> tuple[Tensor, Tensor, State, State]:
        """Gradient, master and moments out of what the shuttle brought, in the order of _travellers."""
        master, *rest = flats
        grad = rest.pop() if self.layer_totals is not None else self.total[first : first + count]
        states = [
            Int8State(rest.pop(0), rest.pop(0)) if isinstance(state, Int8State) else rest.pop(0)
            for state in (self.exp_avg, self.exp_avg_sq)
        ]
        return grad, master, states[0], states[1]

    def norm(self) -> Tensor:
        if self.layer_totals is not None:
            return self.layer_totals.norm()
        wide = torch.promote_types(self.total_dtype, torch.float32)
        if self.total.is_cuda:
            return torch.linalg.vector_norm(self.total, dtype=wide)
        # A GPU sums in a tree. A CPU adds one after the other: in fp32 it loses a percent over 10^8 elements.
        pieces = torch.split(self.total, _EAGER_PIECE)
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        return torch.linalg.vector_norm(torch.stack(norms)).to(wide)

    def clear(self) -> None:
        if self.layer_totals is not None:
            self.layer_totals.clear()
        else:
            self.total.zero_()

    def settle(self) -> None:
        """Host memory is what it should be: before anybody but the shuttle reads it."""
        if self.shuttle is not None:
            self.shuttle.settle()


class AdamW:
    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        layer_matrices: Collection[str],
        device: str,
        compute: torch.dtype,
        storage: Storage,
        betas: tuple[float, float],
        weight_decay: float,
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        self.betas, self.weight_decay, self.seed, self.storage = betas, weight_decay, seed, storage
        self.steps = 0  # updates made
        regions = split_regions({n: p.shape for n, p in parameters.items()}, layer_matrices)
        if storage.offload != "none":
            sizes = [r.size for r in regions if not r.is_vectors]
            check_host_memory(host_bytes(sum(sizes), storage), "master weights and optimizer states")
        self._held = [Held(region, storage, device, compute) for region in regions]
        self._low_bit_update: Callable[..., None] = adamw_chunk_
        self._piece: int | None = _EAGER_PIECE
        if compiled:
            self._low_bit_update = torch.compile(adamw_chunk_, dynamic=False, fullgraph=True)
            self._piece = None  # one kernel, without copies: as much as there is
        # Numbers that change from step to step, on the device so that they do not compile anew.
        self._hyper = Hyper(*torch.zeros(len(Hyper._fields), device=device).unbind())
        self._count = torch.zeros((), device=device)
        self._key = torch.zeros((), dtype=torch.int32, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self.load_weights(parameters)

    # --- what the model works with
    @property
    def working(self) -> dict[str, Tensor]:
        return {n: t for held in self._held for n, t in held.region.views(held.working).items()}

    @property
    def totals(self) -> dict[str, Tensor]:
        return {n: t for held in self._held for n, t in held.total_views.items()}

    @property
    def layer_totals(self) -> LayerTotals | None:
        """Who brings the totals of a layer to the card, if they live on the host."""
        return next((h.layer_totals for h in self._held if h.layer_totals is not None), None)

    @property
    def needs_noise(self) -> bool:
        """Are there bf16 totals, which are rounded stochastically?"""
        return any(held.total_dtype == torch.bfloat16 for held in self._held)

    @property
    def host_bytes(self) -> int:
        """Pinned host memory taken."""
        return sum(h.shuttle.bytes_at_home() for h in self._held if h.shuttle is not None)

    def clear(self) -> None:
        for held in self._held:
            held.clear()

    # --- the update
    def norm(self) -> Tensor:
        """Of all gradients together, fp32."""
        return torch.linalg.vector_norm(torch.stack([held.norm() for held in self._held]))

    def update(self, learning_rate: float, grad_scale: Tensor) -> None:
        """One step; gradients are divided by grad_scale (0-dim) first. Totals are left to `clear`."""
        self.steps += 1
        beta1, beta2 = self.betas
        values = {
            "lr": learning_rate, "beta1": beta1, "beta2": beta2, "eps": _EPSILON,
            "bias_correction1": 1 - beta1**self.steps, "bias_correction2": 1 - beta2**self.steps,
        }  # fmt: skip
        for name, value in values.items():
            getattr(self._hyper, name).fill_(value)
        self._hyper.grad_scale.copy_(grad_scale)
        self._key.fill_(noise_key(self.seed, self.steps))
        for held in self._held:
            decay = 0.0 if held.region.is_vectors else self.weight_decay
            self._hyper.weight_decay.fill_(decay)
            if held.layer_totals is not None:
                held.layer_totals.settle()
            if held.shuttle is not None:

                def work(flats: list[Tensor], first: int, count: int, held: Held = held) -> None:
                    pieces = held.pieces(flats, first, count)
                    self._update_piece(held, *pieces, first, learning_rate, grad_scale)

                held.shuttle.run(work)
                continue
            piece = self._piece if held.low_bit and self._piece else held.region.size
            for first in range(0, held.region.size, piece):
                count = min(piece, held.region.size - first)
                master = held.master[first : first + count]
                moments = _part(held.exp_avg, first, count), _part(held.exp_avg_sq, first, count)
                grad = held.total[first : first + count]
                self._update_piece(held, grad, master, *moments, first, learning_rate, grad_scale)

    def _update_piece(
        self, held: Held, grad: Tensor, master: Tensor, exp_avg: State, exp_avg_sq: State, first: int,
        learning_rate: float, grad_scale: Tensor,
    ) -> None:  # fmt: skip
        if held.low_bit:
            self._first.fill_(first)
            in_blocks = (_in_blocks(t) for t in (grad, master, exp_avg, exp_avg_sq))
            self._low_bit_update(*in_blocks, self._hyper, self._key, self._first)
        else:
            assert isinstance(exp_avg, Tensor) and isinstance(exp_avg_sq, Tensor)
            self._count.fill_(self.steps - 1)  # counted up inside
            grad.div_(grad_scale)
            fused_adamw(
                [master], [grad], [exp_avg], [exp_avg_sq], [], [self._count], fused=True, amsgrad=False,
                beta1=self.betas[0], beta2=self.betas[1], lr=learning_rate,
                weight_decay=0.0 if held.region.is_vectors else self.weight_decay, eps=_EPSILON,
                maximize=False,
            )  # fmt: skip
        if held.working is not held.master:
            held.working[first : first + len(master)].copy_(master)

    # --- what a checkpoint keeps
    def load_weights(self, parameters: Mapping[str, Tensor]) -> None:
        for held in self._held:
            held.settle()
            for slot in held.region.slots:
                slot.view(held.master).copy_(parameters[slot.name])
                if held.working is not held.master:
                    slot.view(held.working).copy_(slot.view(held.master))

    def export_weights(self) -> dict[str, Tensor]:
        for held in self._held:
            held.settle()
        return {n: t for held in self._held for n, t in held.region.views(held.master).items()}

    def export_state(self) -> dict[str, Tensor]:
        """Moments by parameter name as they are stored, so that a continued run continues exactly."""
        if not self.steps:
            return {}
        tensors: dict[str, Tensor] = {"steps": torch.tensor(self.steps)}
        for held in self._held:
            held.settle()
            for slot in held.region.slots:
                for moment in MOMENTS:
                    tensors |= export_moment(slot, moment, getattr(held, moment))
        return tensors

    def import_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse, from whatever storage it was saved with. Nothing saved: as in step 1."""
        if "steps" not in tensors:
            return
        self.steps = int(tensors["steps"])
        for held in self._held:
            held.settle()
            for slot in held.region.slots:
                for moment in MOMENTS:
                    import_moment(slot, moment, getattr(held, moment), tensors)


def host_bytes(parameters: int, storage: Storage) -> int:
    """Memory of masters and moments (and totals, if offloaded too), wherever they live."""
    master = 2 if storage.master_weights == "bf16" else 4
    states = 2 * (1 + 4 / BLOCK) if storage.optim_states == "int8" else 8
    totals = master if storage.offload == "gradients" else 0
    return int(parameters * (master + states + totals))


def card_bytes(parameters: int, storage: Storage, compute: torch.dtype) -> int:
    """Least memory on the card: working copies, gradient totals and, unless offloaded, the rest."""
    full = torch.promote_types(compute, torch.float32).itemsize
    master = 2 if storage.master_weights == "bf16" else full
    working = 0 if storage.offload == "none" and master == compute.itemsize else compute.itemsize
    total = 0 if storage.offload == "gradients" else 2 if storage.master_weights == "bf16" else full
    home = host_bytes(parameters, storage) if storage.offload == "none" else 0
    return parameters * (working + total) + home


def _in_blocks(state: State) -> State:
    """In this shape the compiler makes one kernel of a low-bit update."""
    if isinstance(state, Int8State):
        return Int8State(state.codes.view(-1, BLOCK), state.scales)
    return state.view(-1, BLOCK)


def _part(state: State, first: int, count: int) -> State:
    if isinstance(state, Int8State):
        return Int8State(
            state.codes[first : first + count], state.scales[first // BLOCK : (first + count) // BLOCK]
        )
    return state[first : first + count]
