"""The flat buffers of one region: where they live and in which precision.

    accumulators  gradients, summed over the step's micro-batches
    master        the weights that learn: fp32, or bf16 rounded stochastically
    states        AdamW's moments exp_avg and exp_avg_sq: fp32, or int8 in blocks
                  Muon's momentum: fp32, bf16 or int8; with the refined rule, also a variance per neuron
    working       what the model computes with: cast from the master once per step, or the master itself
                  where both have the same dtype and live on the card

Everything is allocated at the beginning. An update's temporaries are small, and their memory is reserved
before it begins (Optimizer.make_ready), so that an update cannot run out of memory half-way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onecard.arch.layout import BLOCK, EAGER_PIECE, muon_batch
from onecard.optim.lowbit import Int8State
from onecard.optim.moments import State
from onecard.optim.muon import Matrix
from onecard.optim.offload import LayerAccumulators, StreamedBuffer, Streamer, host_empty
from onecard.optim.regions import Region, Slot
from onecard.optim.rules import MuonRule


@dataclass(frozen=True)
class Storage:
    """How masters and states are stored (the knobs of the same names)."""

    master_weights: str = "fp32"
    optim_states: str = "fp32"
    offload: str = "none"

    @property
    def low_bit(self) -> bool:
        return self.master_weights == "bf16" or self.optim_states != "fp32"


class Batch(NamedTuple):
    """Equal matrices that Muon updates together."""

    matrix: Matrix
    slots: tuple[Slot, ...]
    firsts: tuple[Tensor, ...]  # where the slots begin, on the device
    variance: Tensor | None  # of all matrices, where the rule has one


def _batches(region: Region, storage: Storage, device: str, variances: torch.dtype | None) -> list[Batch]:
    """Muon's batches: matrices of one shape on the card, one matrix each where they are streamed."""
    alike: dict[Matrix, list[Slot]] = {}
    for slot in region.slots:
        alike.setdefault(Matrix.of(slot.name, slot.shape), []).append(slot)
    found = []
    for matrix, slots in alike.items():
        count = muon_batch(matrix.parts, matrix.rows, matrix.columns, len(slots), storage)
        for number in range(0, len(slots), count):
            some = tuple(slots[number : number + count])
            # In pairs: compiled code copies what does not begin at a multiple of 16 bytes.
            firsts = torch.tensor([(slot.first, 0) for slot in some], device=device)[:, 0].unbind()
            size = matrix.variances(len(some))
            variance = None if variances is None else torch.zeros(size, dtype=variances, device=device)
            found.append(Batch(matrix, some, firsts, variance))
    return found


class RegionBuffers:
    """The buffers of one region."""

    def __init__(self, region: Region, storage: Storage, device: str, compute: torch.dtype) -> None:
        full = torch.promote_types(compute, torch.float32)
        self.region, self.device = region, device
        self.on_host = storage.offload != "none" and not region.is_vectors
        bf16 = storage.master_weights == "bf16" and not region.is_vectors
        states = "fp32" if region.is_vectors else storage.optim_states
        # Offloaded accumulators are fp32: host memory is large, and nothing is rounded between micro-batches.
        small = bf16 and region.kind == "layers" and storage.offload != "gradients"
        self.accumulator_dtype = torch.bfloat16 if small else full
        self.layer_accumulators: LayerAccumulators | None = None
        if storage.offload == "gradients" and region.kind == "layers":
            self.layer_accumulators = LayerAccumulators(region, self.accumulator_dtype, device)
            self.accumulators = self.layer_accumulators.host_copy
            self.accumulator_views = self.layer_accumulators.views
        else:
            self.accumulators = torch.zeros(region.size, dtype=self.accumulator_dtype, device=device)
            self.accumulator_views = region.views(self.accumulators)
        self.master = self._empty(region.size, torch.bfloat16 if bf16 else full).zero_()
        self.states: dict[str, State] = {}
        self.batches: list[Batch] = []
        if isinstance(region.rule, MuonRule):
            self.states["momentum"] = self._new_state(states, full, signed=True)
            variances = full if region.rule.refined else None
            self.batches = _batches(region, storage, device, variances)
        else:
            # bf16 is Muon's alone: a second moment needs more bits, or a code of its own.
            states = "int8" if states == "int8" else "fp32"
            self.states["exp_avg"] = self._new_state(states, full, signed=True)
            self.states["exp_avg_sq"] = self._new_state(states, full, signed=False)
        self.low_bit = bf16 or states == "int8"
        # Norms and biases compute in full precision: there is nothing to gain by rounding them.
        working = full if region.is_vectors else compute
        shared = self.master.dtype == working and not self.on_host
        self.working = self.master if shared else torch.zeros(region.size, dtype=working, device=device)
        self.streamer = Streamer(self._streamed_buffers(), region.spans(), device) if self.on_host else None

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        if self.on_host:
            return host_empty(count, dtype, self.device)
        return torch.empty(count, dtype=dtype, device=self.device)

    def _new_state(self, kind: str, full: torch.dtype, *, signed: bool) -> State:
        if kind != "int8":
            return self._empty(self.region.size, torch.bfloat16 if kind == "bf16" else full).zero_()
        return Int8State(
            self._empty(self.region.size, torch.int8 if signed else torch.uint8).zero_(),
            self._empty(self.region.size // BLOCK, torch.float32).zero_(),
        )

    def _streamed_buffers(self) -> list[StreamedBuffer]:
        buffers = [StreamedBuffer(self.master)]
        for state in self.states.values():
            if isinstance(state, Int8State):
                buffers += [StreamedBuffer(state.codes), StreamedBuffer(state.scales, per=BLOCK)]
            else:
                buffers.append(StreamedBuffer(state))
        if self.layer_accumulators is not None:
            buffers.append(StreamedBuffer(self.layer_accumulators.host_copy, writes_back=False))
        return buffers

    def unpacked(self, pieces: list[Tensor], first: int, count: int) -> tuple[Tensor, Tensor, list[State]]:
        """Gradient, master and states of one span from its pieces, in the order of _streamed_buffers."""
        master, *rest = pieces
        grad = rest.pop() if self.layer_accumulators is not None else self.accumulators[first : first + count]
        states = [
            Int8State(rest.pop(0), rest.pop(0)) if isinstance(state, Int8State) else rest.pop(0)
            for state in self.states.values()
        ]
        return grad, master, states

    def part(self, first: int, count: int) -> tuple[Tensor, Tensor, list[State]]:
        """Gradient, master and states of one span, where all buffers are on the card."""
        here = slice(first, first + count)
        blocks = slice(first // BLOCK, (first + count) // BLOCK)
        states = [
            Int8State(s.codes[here], s.scales[blocks]) if isinstance(s, Int8State) else s[here]
            for s in self.states.values()
        ]
        return self.accumulators[here], self.master[here], states

    def zeros(self, count: int) -> tuple[Tensor, Tensor, list[State]]:
        """Gradient, master and states of zeros on the card, to warm up an update's kernels."""

        def some(like: Tensor, per: int = 1) -> Tensor:
            return torch.zeros(count // per, dtype=like.dtype, device=self.device)

        states = [
            Int8State(some(s.codes), some(s.scales, BLOCK)) if isinstance(s, Int8State) else some(s)
            for s in self.states.values()
        ]
        return torch.zeros(count, dtype=self.accumulator_dtype, device=self.device), some(self.master), states

    @property
    def variances(self) -> dict[str, Tensor]:
        """Variances by parameter; empty where the rule has none."""
        return {
            slot.name: batch.variance[number * batch.matrix.parts : (number + 1) * batch.matrix.parts]
            for batch in self.batches
            if batch.variance is not None
            for number, slot in enumerate(batch.slots)
        }

    def norm(self) -> Tensor:
        """The norm of the region's gradients, in fp32 or wider."""
        if self.layer_accumulators is not None:
            return self.layer_accumulators.norm()
        wide = torch.promote_types(self.accumulator_dtype, torch.float32)
        if self.accumulators.is_cuda:
            return torch.linalg.vector_norm(self.accumulators, dtype=wide)
        # A GPU sums in a tree. A CPU adds in sequence, and in fp32 loses a percent over 10^8 elements.
        pieces = torch.split(self.accumulators, EAGER_PIECE)
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        return torch.linalg.vector_norm(torch.stack(norms)).to(wide)

    def clear(self) -> None:
        """Set the accumulators to zero, before a new step."""
        if self.layer_accumulators is not None:
            self.layer_accumulators.clear()
        else:
            self.accumulators.zero_()

    def synchronize(self) -> None:
        """Wait until host memory is up to date, before anything but the streamer reads it."""
        if self.streamer is not None:
            self.streamer.synchronize()
