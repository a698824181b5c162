"""The learning rate of a run at a step: as its log shows it, else as its schedule says."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from onecard.report.curve.columns import thinned
from onecard.report.run_facts import RunFacts, Schedule

WARM_UP, HIGH, DECAYING, FLOOR, CONSTANT = "warm-up", "high", "decaying", "floor", "constant"
# Of the peak: above it a rate is still high, and within so much of the final one it is down.
STILL_HIGH, DOWN = 0.9, 0.02
USUAL_FLOOR = 0.11  # where nobody says the end: a tenth is usual


def rate_at(schedule: Schedule, step: float) -> float | None:
    """The rate at a step, in the schedule's own unit; None where the schedule does not say."""
    rate = _rate_at(schedule, step)
    return rate if rate is not None and math.isfinite(rate) and rate >= 0 else None


def _rate_at(schedule: Schedule, step: float) -> float | None:
    if schedule.kind == "table" and schedule.table:
        return _between(schedule.table, step)
    peak, final = schedule.peak, schedule.final if schedule.final is not None else 0.0
    if peak is None or schedule.kind == "unknown":
        return None
    if schedule.warmup_steps and step < schedule.warmup_steps:
        return peak * (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant" or schedule.horizon is None:
        return peak
    begin = schedule.decay_start if schedule.kind == "wsd" else schedule.warmup_steps
    if begin is None:
        return None
    done = min(1.0, max(0.0, (step - begin) / max(1, schedule.horizon - begin)))
    shape = (
        "cosine"
        if schedule.kind == "cosine"
        else schedule.decay_shape
        if schedule.kind == "wsd"
        else "linear"
    )
    left = _SHAPES.get(shape, _SHAPES["linear"])(done)
    if shape == "exponential" and final > 0:
        return float(peak * (final / peak) ** done)
    return final + (peak - final) * left


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 1 - done,
}


def logged_rates(facts: RunFacts) -> list[tuple[int, float]]:
    """(step, rate) as the log shows them, of steps or else of evaluations."""
    rows = thinned(facts.log.steps, "lr") or thinned(facts.log.evaluations, "lr")
    return [(step, rate) for step, rate in rows if rate >= 0]


def rates_of(facts: RunFacts) -> Callable[[float], float | None]:
    """The rate by step: the log's where it shows rates, else the schedule's."""
    logged = logged_rates(facts)
    schedule = facts.schedule

    def rate(step: float) -> float | None:
        # The last evaluation may be a step later than the last rate.
        if logged and logged[0][0] <= step <= 1.01 * logged[-1][0] + 1:
            return _between(logged, step)
        if schedule is not None:
            return rate_at(schedule, step)
        return None

    return rate


def peak_of(facts: RunFacts) -> float | None:
    """The highest rate of the run, seen or planned."""
    logged = max((rate for _step, rate in logged_rates(facts)), default=None)
    schedule = facts.schedule
    if schedule is None:
        return logged
    planned = schedule.peak
    if schedule.kind == "table" and schedule.table:
        planned = max(rate for _step, rate in schedule.table)
    rates = [rate for rate in (logged, planned) if rate and 0 < rate < math.inf]
    return max(rates, default=None)


def last_planned(facts: RunFacts) -> tuple[int, float] | None:
    """The step at which the run ends and its rate there, where both are known."""
    schedule = facts.schedule
    if schedule is None or schedule.kind == "unknown":
        return None
    end = facts.last_step
    if end is None:
        end = schedule.table[-1][0] if schedule.table else schedule.horizon
    rate = rate_at(schedule, end) if end is not None else None
    return (end, rate) if end is not None and rate is not None else None


def phase_at(facts: RunFacts, step: int) -> str | None:
    """Where in its schedule a run is; None where its rate is not known."""
    rate, peak = rates_of(facts)(step), peak_of(facts)
    if rate is None or not peak:
        return None
    schedule = facts.schedule
    if schedule is not None and not schedule.table and step < schedule.warmup_steps:
        return WARM_UP
    before = rates_of(facts)(max(0.0, 0.7 * step))
    going_up = schedule is None or (schedule.horizon is None and schedule.kind != "constant")
    if before is not None and rate > 1.05 * before and (rate < 0.99 * peak or going_up):
        return WARM_UP
    end = last_planned(facts)
    if schedule is not None and schedule.kind == "constant":
        return CONSTANT
    if end is not None and rate <= end[1] + DOWN * peak:
        return FLOOR if end[1] < STILL_HIGH * peak else CONSTANT
    if end is None and rate <= USUAL_FLOOR * peak:
        return FLOOR
    if rate >= STILL_HIGH * peak:
        return HIGH
    return DECAYING


def _between(table: Sequence[tuple[int, float]], step: float) -> float:
    """A straight line between the rows on either side."""
    at = bisect_right(table, step, key=lambda row: row[0])
    if at == 0:
        return table[0][1]
    if at == len(table):
        return table[-1][1]
    (a, low), (b, high) = table[at - 1], table[at]
    return low + (high - low) * (step - a) / max(1, b - a)
