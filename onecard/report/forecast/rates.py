"""A learning rate by step, relative to its peak, and what a run has walked under it.

Three figures of a schedule matter to a loss: how far the run has come (the sum of a power of the rate: a low
rate goes on learning faster than in proportion), how far the rate has fallen, and how much of each fall has
already shown in the loss. The last is the kernel of the multi-power law (arXiv 2503.12811).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

LARGEST_FALL = 0.02  # of one entry of `falls`
NODES = 400  # of a table that is computed or thinned
AT_PEAK = 0.999


class Shape(NamedTuple):
    """A law's constants that are the same for all runs."""

    power: float  # of the rate, in the sum that is progress
    kernel: float  # after so many steps a fall has shown by 1 - (1 + steps / memory) ** -kernel
    memory: float


@dataclass(frozen=True)
class Rates:
    """Rates at steps, linear in between, constant after the last."""

    steps: tuple[float, ...]  # from 0, rising
    rates: tuple[float, ...]

    @cached_property
    def peak(self) -> float:
        return max(self.rates)

    @cached_property
    def relative(self) -> list[float]:
        return [rate / self.peak for rate in self.rates]

    @cached_property
    def warm_at(self) -> float:
        """The first step at the peak."""
        return next(s for s, rate in zip(self.steps, self.relative, strict=True) if rate >= AT_PEAK)

    @cached_property
    def _areas(self) -> list[float]:
        return self._sums(1.0)

    @cached_property
    def _progress(self) -> dict[float, list[float]]:
        return {}

    def _sums(self, power: float) -> list[float]:
        """Of the rate's power, up to each node."""
        sums = [0.0]
        for i in range(len(self.steps) - 1):
            width, a, b = self.steps[i + 1] - self.steps[i], self.relative[i], self.relative[i + 1]
            sums.append(sums[-1] + width * _mean_power(a, b, power))
        return sums

    def _where(self, step: float) -> tuple[int, float, float]:
        """The node before a step, the steps since, and the relative rate there."""
        i = max(bisect_right(self.steps, step) - 1, 0)
        if i >= len(self.steps) - 1:
            return len(self.steps) - 1, step - self.steps[-1], self.relative[-1]
        share = (step - self.steps[i]) / (self.steps[i + 1] - self.steps[i])
        return i, step - self.steps[i], self.relative[i] + share * (self.relative[i + 1] - self.relative[i])

    def at(self, step: float) -> float:
        """The rate itself."""
        return self._where(step)[2] * self.peak

    def area(self, step: float) -> float:
        """Steps at the peak that have the same sum of rates."""
        i, since, rate = self._where(step)
        return self._areas[i] + since * (self.relative[i] + rate) / 2

    def progress(self, step: float, power: float) -> float:
        """Steps at the peak that bring a run as far."""
        sums = self._progress.get(power)
        if sums is None:
            sums = self._progress[power] = self._sums(power)
        i, since, rate = self._where(step)
        return sums[i] + since * _mean_power(self.relative[i], rate, power)

    @cached_property
    def falls(self) -> list[tuple[float, float, float]]:
        """(by how much, at which area, to which rate) after the warm-up; a rise is a negative fall."""
        found = []
        for i in range(len(self.steps) - 1):
            fall = self.relative[i] - self.relative[i + 1]
            if self.steps[i + 1] <= self.warm_at or abs(fall) < 1e-7:
                continue
            parts = max(math.ceil(abs(fall) / LARGEST_FALL), 1)
            for part in range(parts):
                share = (part + 0.5) / parts
                step = self.steps[i] + share * (self.steps[i + 1] - self.steps[i])
                found.append((fall / parts, self.area(step), max(self.relative[i] - fall * share, 1e-3)))
        return found

    def cooled(self, step: float, shape: Shape) -> float:
        """How much of the falls until a step shows in the loss: 0 at a constant rate, towards 1 at rate 0."""
        area = self.area(step)
        return sum(
            fall * (1 - (1 + (area - at) / (shape.memory * rate)) ** -shape.kernel)
            for fall, at, rate in self.falls
            if area > at
        )


def _mean_power(a: float, b: float, power: float) -> float:
    """The mean of rate ** power while the rate goes from a to b in a line."""
    a, b = max(a, 1e-6), max(b, 1e-6)
    if abs(b - a) < 1e-9:
        return a**power
    return (b ** (power + 1) - a ** (power + 1)) / ((power + 1) * (b - a))


def table(rows: Sequence[tuple[float, float]]) -> Rates | None:
    """Rates of (step, rate) rows, thinned where there are many; None where no rate is above zero."""
    seen: dict[float, float] = {}
    for step, rate in rows:
        if math.isfinite(step) and math.isfinite(rate) and rate >= 0 and step >= 0:
            seen[step] = rate
    ordered = sorted(seen.items())
    if not ordered or max(rate for _, rate in ordered) <= 0:
        return None
    if ordered[0][0] > 0:
        ordered.insert(0, (0.0, ordered[0][1]))
    kept = _without_lines(ordered)
    if len(kept) > NODES:
        kept = [kept[round(i * (len(kept) - 1) / (NODES - 1))] for i in range(NODES)]
    return Rates(tuple(s for s, _ in kept), tuple(r for _, r in kept))


def _without_lines(rows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The rows that are not on the line between those around them: a constant rate needs two."""
    kept = rows[:1]
    for i in range(1, len(rows) - 1):
        (s0, r0), (s1, r1), (s2, r2) = kept[-1], rows[i], rows[i + 1]
        if abs(r1 - (r0 + (r2 - r0) * (s1 - s0) / (s2 - s0))) > 1e-9 * max(r0, r1, r2):
            kept.append(rows[i])
    return [*kept, rows[-1]] if len(rows) > 1 else kept
