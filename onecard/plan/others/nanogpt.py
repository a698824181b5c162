"""What nanoGPT's own trainer needs on a GPU, line by line: why a present run dies.

The bill is not a fitted formula. nanogpt_step.py plays nanoGPT's training step through, tensor by tensor, on
the allocator of caching_allocator.py; the bill is what was alive at the highest point. Structure is: which
tensors exist, in which precision and how long (model.py, train.py, autocast's lists, the compiler's choice
of what to keep), and the allocator's rules. No number is fitted, but two choices among possible structures
were made because the measured peaks decide for them: the order of the driver's addresses (see there), and
that the compiled backward holds its zeros to its end. The compiler's order of kernels where the peak is at
the end of backward (wide models, few tokens) has not been measured. Not modelled: CUDA's own 0.5 to 0.8 GiB
outside PyTorch, a desktop, other versions of the compiler, its padding of a vocabulary that is no multiple
of 8, attention other than flash attention, its padding of heads that are no multiple of 8 wide.

Measured runs that it is held against are in peers.toml and benchmarks/results/*peers*. float16 differs from
bfloat16 by a gradient scaler alone, which is nothing to speak of.

train.py begins with an evaluation. It needs less than training, the same logits without saved activations and
gradients; but where even that is not there, it is what fails, before any training. And training finds what it
has left in the allocator's cache, so that more or less is reserved than without it (41M, 16×1024, not
compiled: 16.7 GiB without, 19.2 with it, as measured).

What is reserved follows from which tensor finds which free block, so it can jump by a copy of the logits
between two neighbouring settings, in the bill as on a card.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from onecard.arch.shapes import GPT2Shape
from onecard.language import N_
from onecard.plan.lines import Line, total
from onecard.plan.others.caching_allocator import CachingAllocator, RanOutError
from onecard.plan.others.nanogpt_compiled import CompiledStep
from onecard.plan.others.nanogpt_eager import EagerStep
from onecard.plan.others.nanogpt_step import Step

DTYPES = ("bfloat16", "float16", "float32")

# From the third step on nothing changes: AdamW's averages exist, and what fits where has settled. Of the
# micro-batches of a step the first finds no gradients, the second does, the third finds what it left.
STEPS = 3
MICRO_BATCHES = 3
# Where memory is short, what lies where settles later: a few that get so far still end.
SHORT_STEPS = 8
SHORT_MICRO_BATCHES = 12


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


@dataclass(frozen=True)
class NanoGPTBill:
    """The peak of a training run, after the first steps."""

    lines: tuple[Line, ...]  # largest first; add up to `allocated`
    allocated: int
    reserved: int  # what PyTorch takes from the card for it
    moment: str  # where in the step the peak is; English, a key
    step: Callable[[float], Step] = field(compare=False, repr=False)  # the same in so many bytes
    accumulation: int = field(compare=False, repr=False)
    evaluates: bool = field(compare=False, repr=False)  # before the first step

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
            return Confined(memory, error, step.heap.retries)
        return Confined(memory, None, step.heap.retries)


@lru_cache(maxsize=64)  # a step is played tensor by tensor: what is asked again is not played again
def nanogpt_bill(
    shape: GPT2Shape, batch_size: int, *, dtype: str = "bfloat16", compiled: bool = True,
    dropout: float = 0.0, gradient_accumulation_steps: int = 40, evaluates: bool = True,
) -> NanoGPTBill:  # fmt: skip
    """The bill for train.py's settings of these names. With one micro-batch a step forward has no gradients.

    bfloat16 by default: train.py's own choice on every card that has it. `evaluates`: before the first step,
    as train.py does; without, its step alone.
    """
    kind = CompiledStep if compiled else EagerStep

    def step(limit: float) -> Step:
        return kind(shape, batch_size, half=dtype != "float32", dropout=dropout > 0, limit=limit)

    accumulation = min(gradient_accumulation_steps, MICRO_BATCHES)
    heap = step(math.inf).run(STEPS, accumulation, evaluates=evaluates)
    return NanoGPTBill(
        _lines(heap), heap.peak_allocated, heap.peak_reserved, heap.peak_moment, step,
        gradient_accumulation_steps, evaluates,
    )  # fmt: skip


def _lines(heap: CachingAllocator) -> tuple[Line, ...]:
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
