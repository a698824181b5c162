"""The loss at the end of a schedule, from the part of the curve that is seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.report.forecast.law import evidence_of
from onecard.report.forecast.learnt import (
    SIZE,
    Learnt,
    features,
    learnt,
    likeness,
    rate_feature,
    sound_slope,
    width_features,
    with_usual_gain,
)
from onecard.report.forecast.rates import Rates
from onecard.report.forecast.seen import Points, seen_of


@dataclass(frozen=True)
class Prediction:
    """A loss, and half of the range that holds it four times in five."""

    loss: float
    half: float
    law: float  # the law's loss, before the correction by runs alike
    nearest: float  # how much the most similar published run is like this one, 0 to 1


def predict(
    points: Points, rates: Rates, end: float, later: Rates | None = None, by: Learnt | None = None
) -> Prediction:
    """The loss at step `end` under `later` (`rates` where it is the same run), given points under `rates`."""
    by = by or learnt()
    evidence = evidence_of(seen_of(points, rates), rates, later or rates, end)
    rate = rate_feature(rates)
    found = with_usual_gain(evidence, rate, by.gain)
    here = features(evidence, sound_slope(evidence, found.slope), found.level, rate)
    nearest, correction = corrected(here, by.rows, by.weights)
    half = math.exp(sum(map(float.__mul__, width_features(found, nearest, evidence), by.width)))
    return Prediction(found.loss + correction * found.width, half, found.loss, nearest)


def corrected(
    here: Sequence[float], rows: Sequence[Sequence[float]], weights: Sequence[float]
) -> tuple[float, float]:
    """(likeness of the nearest row, correction in standard deviations of the law)."""
    nearest = total = 0.0
    for row, weight in zip(rows, weights, strict=True):
        like = likeness(here, row)
        nearest = max(nearest, like)
        total += like * weight
    return nearest, SIZE**2 * total
