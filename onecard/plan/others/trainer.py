"""What other people's trainers have in common on paper: their steps, and the bill that comes of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from onecard.language import N_
from onecard.plan.lines import Line, total
from onecard.plan.others.caching_allocator import CachingAllocator, RanOutError
from onecard.plan.others.nanogpt_step import EVALUATED, EVALUATION, LOADING, UPDATE

# From the third step on nothing changes: the optimizer's states exist, and what fits where has settled. Of
# the micro-batches of a step the first finds no gradients, the second does, the third finds what it left.
STEPS = 3
MICRO_BATCHES = 3
# Where memory is short, what lies where settles later: a few that get so far still end.
SHORT_STEPS = 8
SHORT_MICRO_BATCHES = 12
UNCONFIRMED = 0.15  # so far off a bill may be that no card has confirmed


class Trainer(ABC):
    """A trainer's memory over its steps. With a limit it may end with RanOutError."""

    def __init__(self, limit: float) -> None:
        self.heap = CachingAllocator(limit)
        self.adds = False  # a micro-batch after the first of its step

    def run(self, steps: int, accumulation: int, *, evaluates: bool = False) -> CachingAllocator:
        """Whole steps, with or without the evaluation before them."""
        self.heap.moment = LOADING
        self.load()
        if evaluates:
            self.heap.moment = EVALUATION
            for _ in range(EVALUATED):
                self.evaluate()
        for step in range(steps):
            for micro in range(accumulation):
                self.adds = micro > 0
                self.micro_batch()
            self.heap.moment = UPDATE
            self.update(is_first=step == 0)
        return self.heap

    @abstractmethod
    def load(self) -> None:
        """The model, and the first batch."""

    @abstractmethod
    def evaluate(self) -> None:
        """Forward of one batch without a backward to come."""

    @abstractmethod
    def micro_batch(self) -> None:
        """Forward and backward of one."""

    @abstractmethod
    def update(self, *, is_first: bool) -> None:
        """The optimizer's step, and gradients cleared."""


@dataclass(frozen=True)
class Confined:
    """Steps with so much memory for PyTorch: where they end, or how often its cache is emptied."""

    memory: int
    ran_out: RanOutError | None
    retries: int

    @property
    def in_pieces(self) -> bool:
        """There was room for what it tried to allocate, but not in one piece."""
        return self.ran_out is not None and self.ran_out.allocated + self.ran_out.tensor <= self.memory


class Played(Protocol):
    """What a bill needs of a trainer."""

    heap: CachingAllocator

    def run(self, steps: int, accumulation: int, *, evaluates: bool = False) -> CachingAllocator: ...


@dataclass(frozen=True)
class TrainerBill:
    """The peak of a training run, after the first steps."""

    lines: tuple[Line, ...]  # largest first; add up to `allocated`
    allocated: int
    reserved: int  # what PyTorch takes from the card for it
    moment: str  # where in the step the peak is; English, a key
    step: Callable[[float], Played] = field(compare=False, repr=False)  # the same in so many bytes
    accumulation: int = field(compare=False, repr=False)
    evaluates: bool = field(default=False, compare=False, repr=False)  # before the first step
    confirmed: bool = True  # False: no card has run it, or one like it

    @property
    def most(self) -> int:
        """What may be reserved: where no card has confirmed the bill, it may be so much off."""
        return self.reserved if self.confirmed else round(self.reserved * (1 + UNCONFIRMED))

    def within(self, memory: int) -> Confined:
        """Does it run where PyTorch may take so many bytes?

        Where tensors alone fit and their segments do not, PyTorch gives free segments back and tries again.
        That does not help unless little is missing: most have a tensor in them that stays.
        """
        if self.reserved <= memory:
            return Confined(memory, None, 0)
        step = self.step(memory)
        try:
            step.run(SHORT_STEPS, min(self.accumulation, SHORT_MICRO_BATCHES), evaluates=self.evaluates)
        except RanOutError as error:
            return Confined(memory, error.with_traceback(None), step.heap.retries)
        return Confined(memory, None, step.heap.retries)


def played(
    step: Callable[[float], Played], accumulation: int, *, evaluates: bool = False, confirmed: bool = True
) -> TrainerBill:
    """The bill of a trainer whose steps are those of step(limit)."""
    heap = step(math.inf).run(STEPS, min(accumulation, MICRO_BATCHES), evaluates=evaluates)
    return TrainerBill(
        lines_of(heap), heap.peak_allocated, heap.peak_reserved, heap.peak_moment, step, accumulation,
        evaluates, confirmed,
    )  # fmt: skip


def lines_of(heap: CachingAllocator) -> tuple[Line, ...]:
    """What was alive at the highest point, by name, largest first."""
    terms: dict[str, list[tuple[int, str]]] = {}
    for (what, factors), count in heap.alive_at_peak.items():
        product = "·".join(str(factor) for factor in factors)
        text = product if count == 1 else f"{count} × {product}"
        terms.setdefault(what, []).append((count * prod(factors), text))
    lines = [
        Line(
            what,
            sum(size for size, _text in parts),
            " + ".join(text for _size, text in sorted(parts, reverse=True)),
        )
        for what, parts in terms.items()
    ]
    lines.sort(key=lambda line: line.bytes, reverse=True)
    rest = heap.peak_allocated - total(lines)
    return (*lines, Line(N_("rounding to whole blocks"), rest, str(rest)))
