"""Forecasts to compare with: the last value, and a power law in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onecard.report.forecast.rates import Rates
from onecard.report.forecast.seen import Points, noise_of, seen_of, smoothed_end

ALPHAS = tuple(0.05 * 1.2**i for i in range(21))


def last_value(points: Points) -> float:
    return smoothed_end(points, noise_of(points))


def power_law(points: Points, rates: Rates, end: float) -> float:
    """floor + height × step ** -alpha, by least squares, after the warm-up; it knows no rate."""
    seen = seen_of(points, rates)
    best = (math.inf, seen.losses[-1])
    last = seen.steps[-1]
    for alpha in ALPHAS:
        off, floor, height = least_squares([(step / last) ** -alpha for step in seen.steps], seen.losses)
        if height >= 0:
            best = min(best, (off, floor + height * (end / last) ** -alpha))
    return best[1]


def least_squares(column: Sequence[float], losses: Sequence[float]) -> tuple[float, float, float]:
    """(sum of squares left, constant, coefficient)."""
    n = len(losses)
    mean_x, mean_y = math.fsum(column) / n, math.fsum(losses) / n
    spread = math.fsum((x - mean_x) ** 2 for x in column) + 1e-12
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(column, losses, strict=True)) / spread
    constant = mean_y - slope * mean_x
    off = math.fsum((y - constant - slope * x) ** 2 for x, y in zip(column, losses, strict=True))
    return off, constant, slope
