"""The update of a step: every region by its rule, in flat buffers (optim/region_buffers.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from onecard.arch.layout import (
    BLOCK,
    EAGER_PIECE,
    SMALL,
    WARM_UP_ELEMENTS,
    Temporaries,
    adamw_temporaries,
    muon_temporaries,
    per_element,
)
from onecard.model.rounding import noise_key
from onecard.optim.lowbit import Hyper, Int8State, adamw_chunk_
from onecard.optim.moments import State, export_moment, import_moment
from onecard.optim.muon import Muon, MuonHyper, Piece
from onecard.optim.offload import LayerAccumulators, check_host_memory
from onecard.optim.region_buffers import Batch, RegionBuffers, Storage
from onecard.optim.regions import split_regions
from onecard.optim.rules import AdamWRule, MuonRule, Rules
from onecard.optim.schedule import StepRates

# Elements of one low-bit update: beyond 2**31 the compiler would build another kernel.
_COMPILED_PIECE = 2**30


class Optimizer:
    """The buffers of all regions, and the update of a step.

    The model computes with `working`; its backward pass adds to `accumulators`.
    """

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
            sizes = ((r.size, per_element(r.kind, storage, dtype, by_muon=r.by_muon)) for r in regions)
            needed = sum(size * each.offloaded for size, each in sizes if each.on_host)
            check_host_memory(int(needed))
        self._buffers = [RegionBuffers(region, storage, device, compute) for region in regions]
        self._low_bit_update: Callable[..., None] = adamw_chunk_
        self._compiled, self._piece = compiled, EAGER_PIECE
        if compiled:
            self._low_bit_update = torch.compile(adamw_chunk_, dynamic=False, fullgraph=True)
            self._piece = _COMPILED_PIECE  # one kernel, without copies
        # Numbers that change from step to step are tensors: Python numbers would be compiled in.
        self._hyper = Hyper(*torch.zeros(len(Hyper._fields), device=device).unbind())
        self._muon_hyper = MuonHyper(*torch.zeros(len(MuonHyper._fields), device=device).unbind())
        self._count = torch.zeros((), device=device)
        self._key = torch.zeros((), dtype=torch.int32, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._muon = self._new_muon(device, compute, compiled)
        every = [t for buffers in self._buffers for t in self._temporaries_of(buffers, compiled)]
        # One batch is updated at a time: the largest of each kind counts.
        self.temporaries = Temporaries(*(max(bytes_) for bytes_ in zip(*every, strict=True)))
        self._warm = False
        self.load_weights(parameters)

    def _new_muon(self, device: str, compute: torch.dtype, compiled: bool) -> Muon | None:
        rules = {b.region.rule for b in self._buffers if isinstance(b.region.rule, MuonRule)}
        if not rules:
            return None
        together = {(batch.matrix, len(batch.slots)) for b in self._buffers for batch in b.batches}
        refined = {rule.refined for rule in rules}
        assert len(refined) == 1, "one kind of Muon at a time"
        # bf16 only where the model computes in it: not every card has it, and a CPU gains nothing from it.
        fast = compute == torch.bfloat16 and device.startswith("cuda")
        work = compute if fast else torch.promote_types(compute, torch.float32)
        return Muon(together, device, work, refined=refined.pop(), compiled=compiled)

    def _temporaries_of(self, buffers: RegionBuffers, compiled: bool) -> Iterator[Temporaries]:
        storage = self.storage
        if self._muon is not None:
            size = self._muon.dtype.itemsize
            for batch in buffers.batches:
                yield muon_temporaries(
                    *batch.matrix, len(batch.slots), storage, compiled=compiled, iterates_in=size
                )
        if buffers.low_bit and not buffers.batches:
            yield adamw_temporaries(buffers.region.size, storage, compiled=compiled)

    # --- what the model computes with
    @property
    def working(self) -> dict[str, Tensor]:
        """Working copies by parameter name."""
        return {n: t for buffers in self._buffers for n, t in buffers.region.views(buffers.working).items()}

    @property
    def accumulators(self) -> dict[str, Tensor]:
        """Gradient accumulators by parameter name."""
        return {n: t for buffers in self._buffers for n, t in buffers.accumulator_views.items()}

    @property
    def layer_accumulators(self) -> LayerAccumulators | None:
        """The layers' accumulators, where they are in host memory and are fetched layer by layer."""
        return next((b.layer_accumulators for b in self._buffers if b.layer_accumulators is not None), None)

    @property
    def needs_noise(self) -> bool:
        """Whether there are bf16 accumulators, which are rounded stochastically."""
        return any(buffers.accumulator_dtype == torch.bfloat16 for buffers in self._buffers)

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(b.streamer.host_bytes() for b in self._buffers if b.streamer is not None)

    def clear(self) -> None:
        for buffers in self._buffers:
            buffers.clear()

    # --- before an update
    def warm_up(self) -> None:
        """Run every kernel of an update once, on zeros. Compiling and loading them may run out of memory, and
        the first update must not be interrupted by that."""
        if self._warm:
            return
        for number in (*self._hyper, *self._muon_hyper):
            number.fill_(1.0)
        for buffers in self._buffers:
            if buffers.batches:
                self._warm_up_muon(buffers)
            else:
                self._warm_up_adamw(buffers)
        self._warm = True

    def _warm_up_muon(self, buffers: RegionBuffers) -> None:
        assert self._muon is not None
        for batch in {(batch.matrix, len(batch.slots)): batch for batch in buffers.batches}.values():
            grad, master, states = buffers.zeros(batch.matrix.place)
            pieces = [Piece(grad, master, states[0], first) for first in batch.firsts]
            variance = None if batch.variance is None else torch.zeros_like(batch.variance)
            self._muon.step(batch.matrix, pieces, variance, self._muon_hyper, self._key)
            del grad, master, states, pieces  # before the next are allocated

    def _warm_up_adamw(self, buffers: RegionBuffers) -> None:
        if not buffers.low_bit:
            assert isinstance(buffers.region.rule, AdamWRule)
            self._full_update(*buffers.zeros(BLOCK), buffers.region.rule, 1.0)
            return
        # Compiled for any number of blocks: regions are far longer than the warm-up. The compiler treats a
        # single block as a case of its own.
        counts = {min(count, WARM_UP_ELEMENTS) for _, count in self._spans_of(buffers)}
        for count in {max(counts), *(counts & {BLOCK})}:
            grad, master, states = buffers.zeros(count)
            numbers = [_in_blocks(t) for t in (grad, master, *states)]
            if count > BLOCK and self._compiled:
                for tensor in (t for n in numbers for t in (n if isinstance(n, Int8State) else (n,))):
                    torch._dynamo.mark_dynamic(tensor, 0)
            self._low_bit_update(*numbers, self._hyper, self._key, self._first)
            del grad, master, states, numbers

    def make_ready(self) -> None:
        """Have the allocator reserve memory for the update's temporaries. If there is not enough, this fails
        here, before anything has changed."""
        taken = self.temporaries
        if not taken.vectors:
            return
        sizes = [taken.on_cpu]
        if self.device.startswith("cuda"):
            small = taken.vectors + taken.small_copies
            sizes = [SMALL] * (1 + small // SMALL) + [taken.copies] * bool(taken.copies)
            if self._muon is not None:
                self._muon.take_workspace()
        room = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        del room  # free again, all of it; the allocator keeps it for the update

    # --- the update
    def norm(self) -> Tensor:
        """The norm of all gradients together, in fp32."""
        return torch.linalg.vector_norm(torch.stack([buffers.norm() for buffers in self._buffers]))

    def update(self, rates: StepRates, grad_scale: Tensor) -> None:
        """One step. Gradients are divided by grad_scale (0-dim) first; `clear` resets the accumulators."""
        self.steps += 1
        self._key.fill_(noise_key(self.seed, self.steps))
        for buffers in self._buffers:
            if buffers.layer_accumulators is not None:
                buffers.layer_accumulators.wait_for_copies()
            if isinstance(buffers.region.rule, MuonRule):
                self._update_by_muon(buffers, buffers.region.rule, rates, grad_scale)
            else:
                self._update_by_adamw(buffers, buffers.region.rule, rates.lr, grad_scale)

    def _update_by_adamw(
        self, buffers: RegionBuffers, rule: AdamWRule, rate: float, grad_scale: Tensor
    ) -> None:
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
            if buffers.low_bit:
                self._first.fill_(first)
                in_blocks = (_in_blocks(t) for t in (grad, master, *states))
                self._low_bit_update(*in_blocks, self._hyper, self._key, self._first)
            else:
                grad.div_(grad_scale)
                self._full_update(grad, master, states, rule, rate)

        self._over(buffers, self._spans_of(buffers), update)

    def _full_update(
        self, grad: Tensor, master: Tensor, states: list[State], rule: AdamWRule, rate: float
    ) -> None:
        """AdamW in full precision, on gradients that are already divided."""
        exp_avg, exp_avg_sq = states
        assert isinstance(exp_avg, Tensor) and isinstance(exp_avg_sq, Tensor)
        self._count.fill_(self.steps - 1)  # fused_adamw adds one
        beta1, beta2 = rule.betas
        fused_adamw(
            [master], [grad], [exp_avg], [exp_avg_sq], [], [self._count], fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=rate * rule.lr, weight_decay=rule.weight_decay, eps=rule.epsilon,
            maximize=False,
        )  # fmt: skip

    def _spans_of(self, buffers: RegionBuffers) -> Sequence[tuple[int, int]]:
        """First and count of AdamW's pieces: those of the streamer, or as long as its kernels allow."""
        if buffers.streamer is not None:
            return buffers.streamer.spans
        size = buffers.region.size
        piece = self._piece if buffers.low_bit else size
        return [(first, min(piece, size - first)) for first in range(0, size, piece)]

    def _update_by_muon(
        self, buffers: RegionBuffers, rule: MuonRule, rates: StepRates, grad_scale: Tensor
    ) -> None:
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

        if buffers.streamer is not None:
            by_first = {batch.slots[0].first: batch for batch in buffers.batches}  # of one matrix each

            def update(grad: Tensor, master: Tensor, states: list[State], first: int) -> None:
                step(by_first[first], [(grad, master, states)])

            self._over(buffers, buffers.region.spans(), update)
            return
        for batch in buffers.batches:
            step(batch, (buffers.part(slot.first, slot.last - slot.first) for slot in batch.slots))
        if buffers.working is not buffers.master:
            buffers.working.copy_(buffers.master)

    def _over(
        self,
        buffers: RegionBuffers,
        spans: Sequence[tuple[int, int]],
        update: Callable[[Tensor, Tensor, list[State], int], None],
    ) -> None:
        """Update every piece, streamed or on the card, and then its working copy."""

        def work(grad: Tensor, master: Tensor, states: list[State], first: int) -> None:
            update(grad, master, states, first)
            if buffers.working is not buffers.master:
                buffers.working[first : first + len(master)].copy_(master)

        if buffers.streamer is not None:
            buffers.streamer.run(
                lambda pieces, first, count: work(*buffers.unpacked(pieces, first, count), first)
            )
            return
        for first, count in spans:
            work(*buffers.part(first, count), first)

    # --- what a checkpoint saves
    def load_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the masters, and the working copies with them."""
        for buffers in self._buffers:
            buffers.synchronize()
            for slot in buffers.region.slots:
                slot.view(buffers.master).copy_(parameters[slot.name])
                if buffers.working is not buffers.master:
                    slot.view(buffers.working).copy_(slot.view(buffers.master))

    def export_weights(self) -> dict[str, Tensor]:
        """Masters by parameter name, as views of the buffers."""
        for buffers in self._buffers:
            buffers.synchronize()
        return {n: t for buffers in self._buffers for n, t in buffers.region.views(buffers.master).items()}

    def export_state(self) -> dict[str, Tensor]:
        """States by parameter name as they are stored, so that a continued run continues exactly."""
        if not self.steps:
            return {}
        tensors: dict[str, Tensor] = {"steps": torch.tensor(self.steps)}
        for buffers in self._buffers:
            buffers.synchronize()
            for slot in buffers.region.slots:
                for name, state in buffers.states.items():
                    tensors |= export_moment(slot, name, state)
            tensors |= {f"variance.{name}": t for name, t in buffers.variances.items()}
        return tensors

    def import_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load states that were exported with any storage. Without saved states, begin as in step 1."""
        if "steps" not in tensors:
            return
        self.steps = int(tensors["steps"])
        for buffers in self._buffers:
            buffers.synchronize()
            for slot in buffers.region.slots:
                for name, state in buffers.states.items():
                    import_moment(slot, name, state, tensors)
            for name, variance in buffers.variances.items():
                variance.copy_(tensors[f"variance.{name}"])


def _in_blocks(state: State) -> State:
    """The state as (n / BLOCK, BLOCK), from which the compiler makes one kernel of a low-bit update."""
    if isinstance(state, Int8State):
        return Int8State(state.codes.view(-1, BLOCK), state.scales)
    return state.view(-1, BLOCK)
