"""The part of a curve that is seen: which column, without the warm-up, thinned, and how noisy it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.report.forecast.rates import Rates

FORGET = 0.15  # of the steps seen: what is before says little about the end
MOST = 60  # points of a fit
FEWEST = 5
LEAST_NOISE = 2e-4
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Seen:
    """Thinned points of a curve."""

    steps: list[float]
    losses: list[float]
    counts: list[int]  # points that each stands for
    noise: float  # standard deviation of one point


def seen_of(points: Points, rates: Rates) -> Seen:
    """The points that a law is fitted to; fewer than FEWEST where there are no more."""
    last = points[-1][0]
    begin = max(FORGET * last, rates.warm_at, 1.0)
    kept = [(s, y) for s, y in points if s >= begin]
    if len(kept) < FEWEST:
        kept = [(s, y) for s, y in points if s >= max(1.0, min(rates.warm_at, 0.3 * last) / 2)][-FEWEST * 2 :]
    noise = noise_of(kept)
    steps, losses, counts = thinned(kept)
    return Seen(steps, losses, counts, noise)


def noise_of(points: Points) -> float:
    """The standard deviation of a point, from each one's distance to the line between those around it."""
    if len(points) < FEWEST:
        return 0.01
    off = []
    for (s0, y0), (s1, y1), (s2, y2) in zip(points, points[1:], points[2:], strict=False):
        share = (s1 - s0) / (s2 - s0)
        off.append((y1 - y0 * (1 - share) - y2 * share) / math.sqrt(1 + share**2 + (1 - share) ** 2))
    off = off[len(off) // 3 :]
    middle = median(off)
    return max(1.4826 * median([abs(o - middle) for o in off]), LEAST_NOISE)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def thinned(points: Points, most: int = MOST) -> tuple[list[float], list[float], list[int]]:
    """Means of the points in bins of equal ratios of steps; (steps, losses, counts)."""
    if len(points) <= most:
        return [s for s, _ in points], [y for _, y in points], [1] * len(points)
    first, ratio = points[0][0], math.log(points[-1][0] * 1.0001 / points[0][0])
    bins: dict[int, list[tuple[float, float]]] = {}
    for step, loss in points:
        bins.setdefault(int(most * math.log(step / first) / ratio), []).append((step, loss))
    groups = [bins[b] for b in sorted(bins)]
    return (
        [math.fsum(s for s, _ in g) / len(g) for g in groups],
        [math.fsum(y for _, y in g) / len(g) for g in groups],
        [len(g) for g in groups],
    )


def smoothed_end(points: Points, noise: float) -> float:
    """The loss at the end of a curve: the mean of its last 2%, of up to 10% where it is noisy."""
    last = points[-1][0]
    tail: list[float] = []
    for share in (0.02, 0.04, 0.06, 0.08, 0.1):
        tail = [y for s, y in points if s >= (1 - share) * last]
        if noise / math.sqrt(len(tail)) <= 0.01:
            break
    return math.fsum(tail) / len(tail)
