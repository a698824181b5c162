"""How far off a predicted speed may be: a little at shapes that were measured, more away from them.

    faster   a base, and a share more for every doubling (octave) of width, layers, block or micro-batch by
             which the nearest measured shape differs, after the first half
    slower   the same; and where the CPU launches kernels hardly faster than the card is done with them, what
             a CPU that is slower or shared makes of it

A step whose kernels are launched in a share q of its time takes q·s of that time at least where the CPU is s
times slower. On the measured machine, a shared one, s was between 0.9 and 1.9. Measured runs left out of the
fits, and whole shapes left out of nanoGPT's, lie inside (tests/plan/test_ranges.py, docs/speed.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onecard.arch.shapes import Shape
from onecard.plan.speed import StepTime

ENGINES = ("onecard", "nanogpt", "other")
# Of cards whose speed was measured, of others, and of a trainer whose speed nobody has measured.
_MEASURED, _ESTIMATED, _OTHER_TRAINER = 0.15, 0.25, 0.35
_AN_OCTAVE, _NEAR = 0.04, 0.5
_SLOW_CPU = 1.8
_MOST = 0.6
# Width, layers, block, tokens of a micro-batch: what benchmarks/results have of either trainer.
_GPT2 = (
    (128, 6, 256, 16384), (256, 6, 512, 16384), (256, 6, 2048, 16384), (384, 6, 256, 16384),
    (384, 12, 512, 8192), (384, 12, 1024, 16384), (576, 12, 1024, 16384), (768, 12, 1024, 1024),
    (768, 12, 1024, 8192), (768, 12, 1024, 16384), (768, 12, 2048, 16384), (1024, 24, 1024, 8192),
    (1024, 24, 2048, 8192), (1280, 36, 1024, 4096), (1600, 48, 1024, 2048),
)  # fmt: skip
_OURS = (
    (320, 6, 256, 4096), (768, 12, 256, 16384), (768, 12, 4096, 16384), (768, 12, 1024, 32768),
    (1600, 48, 1024, 4096),
)  # fmt: skip
_NANOCHAT = (
    (256, 4, 512, 4096), (512, 8, 2048, 8192), (768, 12, 2048, 2048), (768, 12, 2048, 16384),
    (768, 12, 512, 16384), (768, 12, 256, 8192), (1280, 20, 2048, 8192), (2048, 32, 2048, 8192),
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """Shares that a speed may be lower and higher than predicted."""

    slower: float
    faster: float

    def seconds(self, predicted: float) -> tuple[float, float]:
        """The least and the most that a predicted time may turn out to be."""
        return predicted / (1 + self.faster), predicted / (1 - self.slower)

    def to_json(self, tokens_per_s: float) -> dict[str, float]:
        low, high = tokens_per_s * (1 - self.slower), tokens_per_s * (1 + self.faster)
        return {"low_tokens_per_s": round(low, 1), "high_tokens_per_s": round(high, 1)}


def spread_of(
    step: StepTime, shape: Shape, micro_batch: int, *, calibrated: bool, engine: str = "onecard"
) -> Spread:
    """Of one step's prediction, for this engine: onecard's, nanoGPT's, or another trainer's that is priced
    like one of them."""
    assert engine in ENGINES
    base = _MEASURED if calibrated else _ESTIMATED
    if engine == "other":
        base = max(base, _OTHER_TRAINER)
    away = max(0.0, distance(shape, micro_batch, engine) - _NEAR)
    width = min(_MOST, base + _AN_OCTAVE * away)
    held_up = _SLOW_CPU * step.launches / step.seconds
    return Spread(min(_MOST, max(width, 1 - 1 / max(1.0, held_up))), width)


def is_launch_bound(spread: Spread) -> bool:
    """Does the CPU decide how slow it may be?"""
    return spread.slower > spread.faster + 0.01


def distance(shape: Shape, micro_batch: int, engine: str = "onecard") -> float:
    """Octaves to the nearest measured shape: of width, layers, block and tokens of a micro-batch together."""
    measured: tuple[tuple[int, int, int, int], ...] = _GPT2
    if shape.arch != "gpt2":
        measured = _NANOCHAT
    elif engine == "onecard":
        measured = _GPT2 + _OURS
    sizes = (shape.n_embd, shape.n_layer, shape.block_size, micro_batch * shape.block_size)
    here = [math.log2(size) for size in sizes]
    return min(math.dist(here, [math.log2(size) for size in there]) for there in measured)
