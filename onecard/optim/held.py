"""The buffers of one region: what lives where, in which precision, and what it takes.

    total     gradients, summed over the step's micro-batches
    master    the weights that learn: fp32, or bf16 rounded stochastically
    states    AdamW's moments exp_avg and exp_avg_sq: fp32, or int8 in blocks
              Muon's momentum: fp32, bf16 or int8; refined, also a variance per neuron
    working   what the model computes with: cast from the master once per step; the master itself where
              both have the same dtype and live on the card

Everything is allocated at the beginning. What an update takes in passing is little, and there before it
begins (Optimizer.make_ready), so that it cannot run out of memory half-way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onecard.arch.layout import BLOCK, EAGER_PIECE, muon_batch
from onecard.optim.lowbit import Int8State
from onecard.optim.muon import Matrix
from onecard.optim.offload import LayerTotals, Shuttle, Traveller, host_empty
from onecard.optim.regions import Region, Slot
from onecard.optim.rules import MuonRule
from onecard.optim.saved import State


@dataclass(frozen=True)
class Storage:
    """How masters and states are kept (the knobs of the same names)."""

    master_weights: str = "fp32"
    optim_states: str = "fp32"
    offload: str = "none"

    @property
    def low_bit(self) -> bool:
        return self.master_weights == "bf16" or self.optim_states != "fp32"


class Batch(NamedTuple):
    """Equal matrices that Muon takes together."""

    matrix: Matrix
    slots: tuple[Slot, ...]
    firsts: tuple[Tensor, ...]  # of the slots, on the device
    variance: Tensor | None  # of all of them, where the rule keeps one


def _batches(region: Region, storage: Storage, device: str, variances: torch.dtype | None) -> list[Batch]:
    """Visitors from the host come one by one; what is on the card is taken by shape."""
    alike: dict[Matrix, list[Slot]] = {}
    for slot in region.slots:
        alike.setdefault(Matrix.of(slot.name, slot.shape), []).append(slot)
    found = []
    for matrix, slots in alike.items():
        count = muon_batch(matrix.parts, matrix.rows, matrix.columns, len(slots), storage)
        for number in range(0, len(slots), count):
            some = tuple(slots[number : number + count])
            # Two numbers for each: compiled code copies what does not begin at a multiple of 16 bytes.
            firsts = torch.tensor([(slot.first, 0) for slot in some], device=device)[:, 0].unbind()
            kept = matrix.variances(len(some))
            variance = None if variances is None else torch.zeros(kept, dtype=variances, device=device)
            found.append(Batch(matrix, some, firsts, variance))
    return found


class Held:
    """One region's buffers."""

    def __init__(self, region: Region, storage: Storage, device: str, compute: torch.dtype) -> None:
        full = torch.promote_types(compute, torch.float32)
        self.region, self.device = region, device
        self.on_host = storage.offload != "none" and not region.is_vectors
        bf16 = storage.master_weights == "bf16" and not region.is_vectors
        states = "fp32" if region.is_vectors else storage.optim_states
        # Totals at home are fp32: the host has the room, and nothing is then rounded between micro-batches.
        small = bf16 and region.kind == "layers" and storage.offload != "gradients"
        self.total_dtype = torch.bfloat16 if small else full
        self.layer_totals: LayerTotals | None = None
        if storage.offload == "gradients" and region.kind == "layers":
            self.layer_totals = LayerTotals(region, self.total_dtype, device)
            self.total = self.layer_totals.home
            self.total_views = self.layer_totals.views
        else:
            self.total = torch.zeros(region.size, dtype=self.total_dtype, device=device)
            self.total_views = region.views(self.total)
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
        self.shuttle = Shuttle(self._travellers(), region.spans(), device) if self.on_host else None

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

    def _travellers(self) -> list[Traveller]:
        travellers = [Traveller(self.master)]
        for state in self.states.values():
            if isinstance(state, Int8State):
                travellers += [Traveller(state.codes), Traveller(state.scales, per=BLOCK)]
            else:
                travellers.append(Traveller(state))
        if self.layer_totals is not None:
            travellers.append(Traveller(self.layer_totals.home, returns=False))
        return travellers

    def visitors(self, flats: list[Tensor], first: int, count: int) -> tuple[Tensor, Tensor, list[State]]:
        """Gradient, master and states out of what the shuttle brought, in the order of _travellers."""
        master, *rest = flats
        grad = rest.pop() if self.layer_totals is not None else self.total[first : first + count]
        states = [
            Int8State(rest.pop(0), rest.pop(0)) if isinstance(state, Int8State) else rest.pop(0)
            for state in self.states.values()
        ]
        return grad, master, states

    def part(self, first: int, count: int) -> tuple[Tensor, Tensor, list[State]]:
        """The same where all of it is on the card."""
        here = slice(first, first + count)
        blocks = slice(first // BLOCK, (first + count) // BLOCK)
        states = [
            Int8State(s.codes[here], s.scales[blocks]) if isinstance(s, Int8State) else s[here]
            for s in self.states.values()
        ]
        return self.total[here], self.master[here], states

    def zeros(self, count: int) -> tuple[Tensor, Tensor, list[State]]:
        """The same of nothing, on the card: to try an update out on."""

        def some(like: Tensor, per: int = 1) -> Tensor:
            return torch.zeros(count // per, dtype=like.dtype, device=self.device)

        states = [
            Int8State(some(s.codes), some(s.scales, BLOCK)) if isinstance(s, Int8State) else some(s)
            for s in self.states.values()
        ]
        return torch.zeros(count, dtype=self.total_dtype, device=self.device), some(self.master), states

    @property
    def variances(self) -> dict[str, Tensor]:
        """By parameter; empty where the rule keeps none."""
        return {
            slot.name: batch.variance[number * batch.matrix.parts : (number + 1) * batch.matrix.parts]
            for batch in self.batches
            if batch.variance is not None
            for number, slot in enumerate(batch.slots)
        }

    def norm(self) -> Tensor:
        if self.layer_totals is not None:
            return self.layer_totals.norm()
        wide = torch.promote_types(self.total_dtype, torch.float32)
        if self.total.is_cuda:
            return torch.linalg.vector_norm(self.total, dtype=wide)
        # A GPU sums in a tree. A CPU adds one after the other: in fp32 it loses a percent over 10^8 elements.
        pieces = torch.split(self.total, EAGER_PIECE)
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
