"""The fit of `onecard/report/forecast/learnt.json`, and forecasts without the run, or without its family."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forecast_stack import Stack

from onecard.report.forecast import law, learnt, plain
from onecard.report.forecast.learnt import Learnt
from onecard.report.forecast.predict import corrected
from onecard.report.forecast.rates import Rates, table
from onecard.report.forecast.seen import noise_of, seen_of, smoothed_end

SHARES = (0.3, 0.5, 0.7)  # of the run, that are scored
MOMENTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85)  # that are learnt from
LATE_START = 0.2  # curves that begin later than this are cut from their own beginning
# Weights of what is assumed before a fit: none of the constant, then as `learnt.gain_features`.
GAIN_BEFORE, GAIN_RIDGE = (-1.7, 0.4, 0.0, 0.2, 0.0), (1e-6, 10.0, 5.0, 5.0, 1.0)
GAIN_SCATTER = 0.15
# Of the correction, in standard deviations of the law: what a family, a run and a moment have of their own.
FAMILY, RUN, MOMENT = 0.12, 0.24, 0.55
FURTHEST = 4.0
COVERED = 0.8


@dataclass(frozen=True)
class Run:
    name: str
    family: str
    points: list[tuple[float, float]]
    rates: Rates
    end: float
    target: float
    plain_target: float  # the mean of the last 2%, however noisy
    unsure: float  # standard error of the target
    noise: float
    group: str | None
    source: str
    licence: str

    def cut(self, share: float) -> list[tuple[float, float]]:
        first = self.points[0][0] if self.points[0][0] > LATE_START * self.end else 0.0
        last = first + share * (self.end - first)
        return [(s, y) for s, y in self.points if s <= last]


@dataclass(frozen=True)
class Moment:
    run: Run
    share: float
    evidence: law.Evidence
    rate: float | None


@dataclass(frozen=True)
class Outcome:
    moment: Moment
    loss: float
    found: law.Posterior
    nearest: float

    @property
    def family(self) -> str:
        return self.moment.run.family

    @property
    def off(self) -> float:
        return self.loss - self.moment.run.target

    @property
    def width(self) -> tuple[float, ...]:
        return learnt.width_features(self.found, self.nearest, self.moment.evidence)


def runs_in(folder: Path) -> list[Run]:
    lines = (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()
    return [_run(folder, json.loads(line)) for line in lines if line]


def _run(folder: Path, line: dict[str, Any]) -> Run:
    with (folder / line["file"]).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    column = f"loss_{line['primary_loss']}"
    points = [(float(row["step"]), float(row[column])) for row in rows if row[column]]
    rates = table([(float(row["step"]), float(row["lr"])) for row in rows if row["lr"]])
    assert rates is not None, line["id"]
    noise, end = noise_of(points), points[-1][0]
    target = smoothed_end(points, line["noise_sd"])
    last = [y for s, y in points if s >= 0.98 * end]
    widest = (
        max(len(last), 1)
        if line["noise_sd"] / math.sqrt(len(last)) <= 0.01
        else len([s for s, _ in points if s >= 0.9 * end])
    )
    return Run(
        line["id"], line["family"], points, rates, max(float(rows[-1]["step"]), end), target,
        math.fsum(last) / len(last), max(line["noise_sd"] / math.sqrt(widest), 1e-3), noise,
        line["horizon_group"], line["source"]["repo"], line["licence"],
    )  # fmt: skip


def moments_of(runs: Sequence[Run], shares: Sequence[float]) -> list[Moment]:
    return [
        Moment(
            run,
            share,
            law.evidence_of(seen_of(run.cut(share), run.rates), run.rates, run.rates, run.end),
            learnt.rate_feature(run.rates),
        )
        for run in runs
        for share in shares
    ]


class Fit:
    """All that is known of the runs, from which a fit may leave some out."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.moments = moments_of(runs, MOMENTS)
        self.stack = Stack([m.evidence for m in self.moments], [m.rate for m in self.moments])
        whole = {m.run.name: m for m in moments_of(runs, (1.0,))}
        self.gains = {
            name: law.posterior(m.evidence, math.log(learnt.FIRST_GAIN), 5.0)
            for name, m in whole.items()
            if m.run.rates.falls and m.run.points[0][0] <= LATE_START * m.run.end
        }
        self.rows = [
            (m, self._gain_row(m)) for m in self.moments if m.share in SHARES and m.run.name in self.gains
        ]

    def _gain_row(self, m: Moment) -> tuple[float, ...]:
        first = law.posterior(m.evidence, math.log(learnt.FIRST_GAIN))
        return learnt.gain_features(
            m.evidence, learnt.sound_slope(m.evidence, first.slope), first.level, m.rate
        )

    def gain(self, kept: Callable[[Run], bool]) -> tuple[float, ...]:
        """Coefficients of log gain: a ridge regression in which families weigh the same."""
        rows = [(m, row) for m, row in self.rows if kept(m.run)]
        found = [self.gains[m.run.name] for m, _ in rows]
        x = np.array([row for _, row in rows])
        y = np.log(np.maximum([f.gain for f in found], 0.01))
        families = [m.run.family for m, _ in rows]
        spread = np.array([(f.gain_width / max(f.gain, 0.01)) ** 2 for f in found])
        weight = np.array([1 / families.count(f) for f in families]) / (GAIN_SCATTER**2 + spread)
        weight *= len(set(families)) / weight.sum()
        ridge, before = np.array(GAIN_RIDGE), np.array(GAIN_BEFORE)
        solved = np.linalg.solve(
            x.T @ (x * weight[:, None]) + np.diag(ridge), x.T @ (weight * y) + ridge * before
        )
        return tuple(float(v) for v in solved)

    def without(self, kept: Callable[[Run], bool]) -> tuple[Learnt, list[law.Posterior]]:
        """Gain and correction from the runs that are kept, and the law's posterior of all moments by them.

        The width is fitted to outcomes later.
        """
        gain = self.gain(kept)
        posteriors = self.stack.with_usual_gain(gain)
        chosen = [(m, found) for m, found in zip(self.moments, posteriors, strict=True) if kept(m.run)]
        rows = [features_of(m, found) for m, found in chosen]
        off = np.array([(m.run.target - found.loss) / found.width for m, found in chosen])
        noise = np.array([MOMENT**2 + (m.run.unsure / found.width) ** 2 for m, found in chosen])
        families = np.array([m.run.family for m, _ in chosen])
        names = np.array([m.run.name for m, _ in chosen])
        matrix = learnt.SIZE**2 * likenesses(rows) + np.diag(noise)
        matrix += FAMILY**2 * (families[:, None] == families) + RUN**2 * (names[:, None] == names)
        weights = np.linalg.solve(matrix, np.clip(off, -FURTHEST, FURTHEST))
        known = Learnt(gain, tuple(rows), tuple(float(w) for w in weights), ())
        return known, posteriors


def features_of(m: Moment, found: law.Posterior) -> tuple[float, ...]:
    slope = learnt.sound_slope(m.evidence, found.slope)
    return learnt.features(m.evidence, slope, found.level, m.rate)


def likenesses(rows: Sequence[Sequence[float]]) -> Any:
    """`learnt.likeness` of every row with every other."""
    scaled = np.array(rows) / np.array(learnt.LENGTHS)
    square = (scaled**2).sum(1)
    return np.exp(-0.5 * np.maximum(square[:, None] + square - 2 * scaled @ scaled.T, 0))


def outcome(m: Moment, by: Learnt, found: law.Posterior | None = None) -> Outcome:
    found = found or learnt.with_usual_gain(m.evidence, m.rate, by.gain)
    nearest, correction = corrected(features_of(m, found), by.rows, by.weights)
    return Outcome(m, found.loss + correction * found.width, found, nearest)


def left_out(fit: Fit, by: Callable[[Run], str]) -> list[Outcome]:
    """Forecasts of all moments, each by what is learnt from the runs with another `by`."""
    outcomes = []
    for key in sorted({by(run) for run in fit.runs}):
        known, posteriors = fit.without(lambda run, key=key: by(run) != key)  # type: ignore[misc]
        pairs = zip(fit.moments, posteriors, strict=True)
        outcomes += [outcome(m, known, found) for m, found in pairs if by(m.run) == key]
    return outcomes


def fitted_width(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    """Coefficients of log half-width such that the range holds COVERED of the outcomes.

    Quantile regression of log |error|, by reweighted least squares. A family weighs as the square root of
    its runs: alike, ten runs of a family would say as much as one; each, one family would set the range.
    """
    x = np.array([o.width for o in outcomes])
    y = np.log(np.maximum([abs(o.off) for o in outcomes], 5e-4))
    families = [o.moment.run.family for o in outcomes]
    weight = np.array([families.count(f) ** -0.5 for f in families])
    solved = np.array([math.log(0.03), 1.0, 0.0, 0.0])
    before, ridge = np.array([0.0, 1.0, 0.0, 0.0]), np.array([1e-6, 0.05, 0.05, 0.05]) * weight.sum()
    for _ in range(200):
        off = y - x @ solved
        w = weight * np.where(off > 0, COVERED, 1 - COVERED) / np.maximum(np.abs(off), 0.02)
        solved = np.linalg.solve(x.T @ (x * w[:, None]) + np.diag(ridge), x.T @ (w * y) + ridge * before)
    return tuple(float(v) for v in solved)


def half_of(o: Outcome, width: Sequence[float]) -> float:
    return math.exp(sum(a * b for a, b in zip(o.width, width, strict=True)))


def plain_forecasts(run: Run, share: float) -> dict[str, float]:
    points = run.cut(share)
    return {
        "last value": plain.last_value(points),
        "power law": plain.power_law(points, run.rates, run.end),
    }


# --- a finished run to a longer one ---------------------------------------------------------------------

LONGER = (1.9, 3.3)


@dataclass(frozen=True)
class Extension:
    """The end of `long`, forecast from a finished run by what other families teach."""

    outcome: Outcome
    long: Run
    power_law: float

    @property
    def family(self) -> str:
        return self.long.family

    @property
    def off(self) -> float:
        return self.outcome.loss - self.long.target


def extensions(fit: Fit) -> list[Extension]:
    found, known = [], {}
    for short in fit.runs:
        for long in fit.runs:
            times = long.end / short.end
            if short.group is None or short.group != long.group or not LONGER[0] <= times <= LONGER[1]:
                continue
            family = short.family
            if family not in known:
                known[family] = fit.without(lambda run, family=family: run.family != family)[0]  # type: ignore[misc]
            evidence = law.evidence_of(seen_of(short.points, short.rates), short.rates, long.rates, long.end)
            moment = Moment(short, 1.0, evidence, learnt.rate_feature(short.rates))
            by_power = plain.power_law(short.points, short.rates, long.end)
            found.append(Extension(outcome(moment, known[family]), long, by_power))
    return found


def fitted_horizons(pairs: Sequence[Extension], width: Sequence[float]) -> float:
    """How much wider a range must be to hold COVERED of the longer runs; families weigh the same."""
    families = [pair.family for pair in pairs]
    ratios = sorted(
        (abs(pair.off) / half_of(pair.outcome, width), 1 / families.count(pair.family)) for pair in pairs
    )
    reached, whole = 0.0, math.fsum(weight for _, weight in ratios)
    for ratio, weight in ratios:
        reached += weight
        if reached >= COVERED * whole:
            return max(ratio, 1.0)
    return 1.0
