"""The one update of a step: every region by its rule, from flat buffers (optim/held.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from onecard.arch.layout import (
    BLOCK,
    EAGER_PIECE,
    REHEARSED,
    SMALL,
    Temporaries,
    adamw_temporaries,
    muon_temporaries,
    per_element,
)
from onecard.model.rounding import noise_key
from onecard.optim.held import Batch, Held, Storage
from onecard.optim.lowbit import Hyper, Int8State, adamw_chunk_
from onecard.optim.muon import Muon, MuonHyper, Piece
from onecard.optim.offload import LayerTotals, check_host_memory
from onecard.optim.regions import split_regions
from onecard.optim.rules import AdamWRule, MuonRule, Rates, Rules
from onecard.optim.saved import State, export_moment, import_moment

# In few bits, elements at a time: beyond 2**31 the compiler would make another kernel.
_COMPILED_PIECE = 2**30


class Optimizer:
    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        layer_matrices: Collection[str],
        rules: Rules,
        device: str,
        compute: torch.dtype,
        storage: Storage,
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        self.seed, self.storage, self.device = seed, storage, device
        self.steps = 0  # updates made
        regions = split_regions({n: p.shape for n, p in parameters.items()}, layer_matrices, rules)
        if storage.offload != "none":
            dtype = str(compute).removeprefix("torch.")
            each = ((r, per_element(r.kind, storage, dtype, by_muon=r.by_muon)) for r in regions)
            needed = sum(region.size * kept.at_home for region, kept in each if kept.on_host)
            check_host_memory(int(needed), "master weights and optimizer states")
        self._held = [Held(region, storage, device, compute) for region in regions]
        self._low_bit_update: Callable[..., None] = adamw_chunk_
        self._compiled, self._piece = compiled, EAGER_PIECE
        if compiled:
            self._low_bit_update = torch.compile(adamw_chunk_, dynamic=False, fullgraph=True)
            self._piece = _COMPILED_PIECE  # one kernel, without copies
        # Numbers that change from step to step, on the device so that they do not compile anew.
        self._hyper = Hyper(*torch.zeros(len(Hyper._fields), device=device).unbind())
        self._muon_hyper = MuonHyper(*torch.zeros(len(MuonHyper._fields), device=device).unbind())
        self._count = torch.zeros((), device=device)
        self._key = torch.zeros((), dtype=torch.int32, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._muon = self._new_muon(device, compute, compiled)
        every = [t for held in self._held for t in self._temporaries_of(held, compiled)]
        # Of one batch at a time: each at its most.
        self.temporaries = Temporaries(*(max(bytes_) for bytes_ in zip(*every, strict=True)))
        self._rehearsed = False
        self.load_weights(parameters)

    def _new_muon(self, device: str, compute: torch.dtype, compiled: bool) -> Muon | None:
        rules = {h.region.rule for h in self._held if isinstance(h.region.rule, MuonRule)}
        if not rules:
            return None
        together = {(batch.matrix, len(batch.slots)) for held in self._held for batch in held.batches}
        refined = {rule.refined for rule in rules}
        assert len(refined) == 1, "one kind of Muon at a time"
        # In bf16 where the model computes in it: not every card has it, and a CPU has no use for it.
        fast = compute == torch.bfloat16 and device.startswith("cuda")
        work = compute if fast else torch.promote_types(compute, torch.float32)
        return Muon(together, device, work, refined=refined.pop(), compiled=compiled)

    def _temporaries_of(self, held: Held, compiled: bool) -> Iterator[Temporaries]:
        kept = self.storage
        if self._muon is not None:
            size = self._muon.dtype.itemsize
            for batch in held.batches:
                yield muon_temporaries(
                    *batch.matrix, len(batch.slots), kept, compiled=compiled, iterates_in=size
                )
        if held.low_bit and not held.batches:
            yield adamw_temporaries(held.region.size, kept, compiled=compiled)

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

    # --- before an update
    def rehearse(self) -> None:
        """Every kernel of an update once, on zeros of their own: what compiling and loading them takes is
        taken before the first update, which must not be broken off."""
        if self._rehearsed:
            return
        for number in (*self._hyper, *self._muon_hyper):
            number.fill_(1.0)
        for held in self._held:
            if held.batches:
                self._rehearse_muon(held)
            else:
                self._rehearse_adamw(held)
        self._rehearsed = True

    def _rehearse_muon(self, held: Held) -> None:
        assert self._muon is not None
        for batch in {(batch.matrix, len(batch.slots)): batch for batch in held.batches}.values():
            grad, master, states = held.zeros(batch.matrix.place)
            pieces = [Piece(grad, master, states[0], first) for first in batch.firsts]
            variance = None if batch.variance is None else torch.zeros_like(batch.variance)
            self._muon.step(batch.matrix, pieces, variance, self._muon_hyper, self._key)
            del grad, master, states, pieces  # not two at a time

    def _rehearse_adamw(self, held: Held) -> None:
        if not held.low_bit:
            assert isinstance(held.region.rule, AdamWRule)
            self._full_update(*held.zeros(BLOCK), held.region.rule, 1.0)
            return
        # Compiled for any number of blocks: whole regions are far longer than what it is tried out on. One
        # block is a number of its own to the compiler.
        counts = {min(count, REHEARSED) for _, count in self._spans_of(held)}
        for count in {max(counts), *(counts & {BLOCK})}:
            grad, master, states = held.zeros(count)
            numbers = [_in_blocks(t) for t in (grad, master, *states)]
            if count > BLOCK and self._compiled:
                for tensor in (t for n in numbers for t in (n if isinstance(n, Int8State) else (n,))):
                    torch._dynamo.mark_dynamic(tensor, 0)
            self._low_bit_update(*numbers, self._hyper, self._key, self._first)
            del grad, master, states, numbers

    def make_ready(self) -> None:
        """Memory for what an update takes in passing, from the driver into the allocator's hands: if there is
        none it shows here, before anything has changed."""
        taken = self.temporaries
        if not taken.vectors:
            return
        sizes = [taken.on_host]
        if self.device.startswith("cuda"):
            small = taken.vectors + taken.small_copies
            sizes = [SMALL] * (1 + small // SMALL) + [taken.copies] * bool(taken.copies)
            if self._muon is not None:
                self._muon.take_workspace()
        room = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        del room  # all at a time; free again, and kept by the allocator for the update

    # --- the update
    def norm(self) -> Tensor:
        """Of all gradients together, fp32."""
        return torch.linalg.vector_norm(torch.stack([held.norm() for held in self._held]))

    def update(self, rates: Rates, grad_scale: Tensor) -> None:
        """One step; gradients are divided by grad_scale (0-dim) first. Totals are left to `clear`."""
        self.steps += 1
        self._key.fill_(noise_key(self.seed, self.steps))
        for held in self._held:
            if held.layer_totals is not None:
                held.layer_totals.settle()
            if isinstance(held.region.rule, MuonRule):
                self._update_by_muon(held, held.region.rule, rates, grad_scale)
            else:
                self._update_by_adamw(held, held.region.rule, rates.lr, grad_scale)

    def _update_by_adamw(self, held: Held, rule: AdamWRule, rate: float, grad_scale: Tensor) -> None:
        beta1, beta2 = rule.betas
        values = {
            "lr": rate * rule.lr, "beta1": beta1, "beta2": beta2, "eps": rule.epsilon,
            "bias_correction1": 1 - beta1**self.steps, "bias_correction2": 1 - beta2**self.steps,
            "weight_decay": rule.weight_decay,
        }  # fmt: skip
        for name, value in values.items():
            getattr(self._hyper, name).fill_(value)
        self._hyper.grad_scale.copy_(grad_scale)

        def update(grad: Tensor, master: Tensor, states: list[State], first: int) -> None:
            if held.low_bit:
                self._first.fill_(first)
                in_blocks = (_in_blocks(t) for t in (grad, master, *states))
                self._low_bit_update(*in_blocks, self._hyper, self._key, self._first)
            else:
                grad.div_(grad_scale)
                self._full_update(grad, master, states, rule, rate)

        self._over(held, self._spans_of(held), update)

    def _full_update(
        self, grad: Tensor, master: Tensor, states: list[State], rule: AdamWRule, rate: float
    ) -> None:
        """In full precision; gradients are divided already."""
        exp_avg, exp_avg_sq = states
        assert isinstance(exp_avg, Tensor) and isinstance(exp_avg_sq, Tensor)
        self._count.fill_(self.steps - 1)  # counted up inside
        beta1, beta2 = rule.betas
        fused_adamw(
            [master], [grad], [exp_avg], [exp_avg_sq], [], [self._count], fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=rate * rule.lr, weight_decay=rule.weight_decay, eps=rule.epsilon,
            maximize=False,
        )  # fmt: skip

    def _spans_of(self, held: Held) -> Sequence[tuple[int, int]]:
        """First and count of what AdamW takes at a time; pieces that visit the card are what they are."""
        if held.shuttle is not None:
            return held.shuttle.spans
        size = held.region.size
        piece = self._piece if held.low_bit else size
        return [(first, min(piece, size - first)) for first in range(0, size, piece)]

    def _update_by_muon(self, held: Held, rule: MuonRule, rates: Rates, grad_scale: Tensor) -> None:
        assert self._muon is not None
        muon, hyper = self._muon, self._muon_hyper
        values = {
            "lr": rates.lr * rule.lr, "weight_decay": rates.decay * rule.weight_decay,
            "momentum": rates.momentum,
        }  # fmt: skip
        for name, value in values.items():
            getattr(hyper, name).fill_(value)
        hyper.grad_scale.copy_(grad_scale)

        def step(batch: Batch, parts: Iterable[tuple[Tensor, Tensor, list[State]]]) -> None:
            pieces = [
                Piece(grad, master, states[0], first)
                for (grad, master, states), first in zip(parts, batch.firsts, strict=True)
            ]
            muon.step(batch.matrix, pieces, batch.variance, hyper, self._key)

        if held.shuttle is not None:
            visiting = {batch.slots[0].first: batch for batch in held.batches}  # of one matrix each

            def visit(grad: Tensor, master: Tensor, states: list[State], first: int) -> None:
                step(visiting[first], [(grad, master, states)])

            self._over(held, held.region.spans(), visit)
            return
        for batch in held.batches:
            step(batch, (held.part(slot.first, slot.last - slot.first) for slot in batch.slots))
        if held.working is not held.master:
            held.working.copy_(held.master)

    def _over(
        self,
        held: Held,
        spans: Sequence[tuple[int, int]],
        update: Callable[[Tensor, Tensor, list[State], int], None],
    ) -> None:
        """The update on every piece, wherever it lives; the working copy follows."""

        def work(grad: Tensor, master: Tensor, states: list[State], first: int) -> None:
            update(grad, master, states, first)
            if held.working is not held.master:
                held.working[first : first + len(master)].copy_(master)

        if held.shuttle is not None:
            held.shuttle.run(lambda flats, first, count: work(*held.visitors(flats, first, count), first))
            return
        for first, count in spans:
            work(*held.part(first, count), first)

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
        """States by parameter name as they are stored, so that a continued run continues exactly."""
        if not self.steps:
            return {}
        tensors: dict[str, Tensor] = {"steps": torch.tensor(self.steps)}
        for held in self._held:
            held.settle()
            for slot in held.region.slots:
                for name, state in held.states.items():
                    tensors |= export_moment(slot, name, state)
            tensors |= {f"variance.{name}": t for name, t in held.variances.items()}
        return tensors

    def import_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse, from whatever storage it was saved with. Nothing saved: as in step 1."""
        if "steps" not in tensors:
            return
        self.steps = int(tensors["steps"])
        for held in self._held:
            held.settle()
            for slot in held.region.slots:
                for name, state in held.states.items():
                    import_moment(slot, name, state, tensors)
            for name, variance in held.variances.items():
                variance.copy_(tensors[f"variance.{name}"])


def _in_blocks(state: State) -> State:
    """In this shape the compiler makes one kernel of a low-bit update."""
    if isinstance(state, Int8State):
        return Int8State(state.codes.view(-1, BLOCK), state.scales)
    return state.view(-1, BLOCK)
