"""What published runs have taught: what a cool-down usually brings, where the law errs, how wide a range is.

`learnt.json` is fitted by `benchmarks/forecast.py --fit`; it names the runs' repositories and licences. A run
that is like none of them gets the law alone, and a wider range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onecard.report.forecast.law import Evidence, Posterior, posterior
from onecard.report.forecast.rates import Rates

# An AdamW rate says how large a cool-down's gain is; a Muon rate, or one relative to its peak, does not.
ADAMW_RATES = (5e-5, 3.2e-3)
FIRST_GAIN = 0.15  # before the slope is known
TURNS = 2  # the usual gain depends on the slope, and the slope on the gain
# How near a run is to a published one, by feature; from leave-family-out cross validation.
LENGTHS = (0.22, 0.4, 1.0, 0.5, 8.0, 0.21, 0.24, 0.1, 8.0)
SIZE = 0.84  # of the correction, in standard deviations of the law


@dataclass(frozen=True)
class Learnt:
    gain: tuple[float, ...]  # of log gain, by `gain_features`
    rows: tuple[tuple[float, ...], ...]  # features of published runs at several moments
    weights: tuple[float, ...]  # of the correction
    width: tuple[float, ...]  # of the log of the range's half, by `width_features`
    horizons: float = 1.0  # a run of another length: the range is as much wider


@cache
def learnt() -> Learnt:
    stored = json.loads((Path(__file__).parent / "learnt.json").read_text(encoding="utf-8"))
    rows = tuple(tuple(row[1:]) for row in stored["rows"])
    return Learnt(
        tuple(stored["gain"]),
        rows,
        tuple(row[0] for row in stored["rows"]),
        tuple(stored["width"]),
        stored["horizons"],
    )


def rate_feature(rates: Rates) -> float | None:
    low, high = ADAMW_RATES
    return math.log(rates.peak / 1e-3) if low <= rates.peak <= high else None


def gain_features(evidence: Evidence, slope: float, level: float, rate: float | None) -> tuple[float, ...]:
    return (
        1.0,
        math.log(max(slope, 0.004) / 0.1),
        math.log(evidence.progress / 1e4),
        rate or 0.0,
        math.log(max(level, 0.05) / 3.2),
    )


def features(evidence: Evidence, slope: float, level: float, rate: float | None) -> tuple[float, ...]:
    """By which a run, at some moment of it, is like another."""
    return (
        math.log(evidence.progress_end / evidence.progress),
        evidence.cooled_end - evidence.cooled,
        evidence.cooled,
        math.log(max(slope, 0.005) / 0.1),
        math.log(evidence.progress / 1e4),
        rate or 0.0,
        float(rate is not None),
        math.log(max(level, 0.05) / 3.2),
        math.log(evidence.noise / 1e-3),
    )


def sound_slope(evidence: Evidence, slope: float) -> float:
    """The law's slope, within reach of the one that the points show."""
    return min(max(slope, 0.4 * evidence.slope), 2 * evidence.slope)


def with_usual_gain(evidence: Evidence, rate: float | None, gain: Sequence[float]) -> Posterior:
    """The law's posterior with the gain that a cool-down usually brings to such a run."""
    found = posterior(evidence, math.log(FIRST_GAIN))
    for _ in range(TURNS):
        known = gain_features(evidence, sound_slope(evidence, found.slope), found.level, rate)
        found = posterior(evidence, sum(map(float.__mul__, known, map(float, gain))))
    return found


def likeness(a: Sequence[float], b: Sequence[float]) -> float:
    """1.0 for the same features, towards 0 for runs that have nothing in common."""
    return math.exp(-0.5 * sum(((x - y) / size) ** 2 for x, y, size in zip(a, b, LENGTHS, strict=True)))


def width_features(found: Posterior, nearest: float, evidence: Evidence) -> tuple[float, ...]:
    return (1.0, math.log(max(found.width, 1e-4) / 0.02), 1 - nearest, math.log(evidence.noise / 1e-3))
