"""The learning rate of a run by step: what its log shows, what its schedule says, and what is usual."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onecard.report.curve.columns import finite
from onecard.report.curve.rates import rate_at
from onecard.report.forecast.rates import Rates, table
from onecard.report.run_facts import RunFacts, Schedule

NODES = 200  # of a schedule
WARM_SHARE = 0.02  # of an assumed schedule
LOW = 0.1  # of its peak: where an assumed cosine ends
COOL_SHARE = 0.2
SAME = 2.0  # a schedule whose peak is so many times off the logged one is in another unit


@dataclass(frozen=True)
class Course:
    """A run's rates until its last step; `known`: nobody had to guess them."""

    rates: Rates
    end: int
    known: bool


def course_of(facts: RunFacts) -> Course | None:
    """None where the rates still to come are not known."""
    seen, schedule = _logged(facts), facts.schedule
    planned = [(float(step), rate) for step, rate in facts.log.planned.pairs("lr") if math.isfinite(rate)]
    if planned:
        whole = table([*(seen or _by_schedule(schedule, 0, facts.step)), *planned])
        return Course(whole, max(int(planned[-1][0]), facts.step), True) if whole is not None else None
    if schedule is None or schedule.kind == "unknown":
        return None
    end = facts.last_step or (schedule.table[-1][0] if schedule.table else schedule.horizon)
    if end is None:
        return None
    end = max(int(end), facts.step)
    if seen and schedule.peak and not 1 / SAME < max(r for _, r in seen) / schedule.peak < SAME:
        seen = []
    begin = seen[-1][0] + 1 if seen else 0
    rates = table([*seen, *_by_schedule(schedule, begin, end)])
    return Course(rates, end, not schedule.assumed) if rates is not None else None


def past_of(facts: RunFacts) -> Rates | None:
    """The rates until now, where the log or an unfinished schedule shows them."""
    schedule = facts.schedule
    rows = _logged(facts) or (list(schedule.table) if schedule is not None else [])
    return table([(float(step), rate) for step, rate in rows]) if len(rows) >= 3 else None


def _logged(facts: RunFacts) -> list[tuple[float, float]]:
    """(step, rate) of steps and evaluations, the log's own words."""
    found: dict[float, float] = {}
    for columns in (facts.log.evaluations, facts.log.steps):
        steps, rates = finite(columns, "lr")
        every = max(len(rates) // 4000, 1)
        found.update(zip(steps[::every], rates[::every], strict=True))
    rows = sorted((step, rate) for step, rate in found.items() if rate >= 0)
    return rows if len(rows) >= 3 and any(rate > 0 for _, rate in rows) else []


def _by_schedule(schedule: Schedule | None, begin: float, end: float) -> list[tuple[float, float]]:
    if schedule is None:
        return []
    corners = [0, schedule.warmup_steps, schedule.decay_start, schedule.horizon, end]
    steps = {float(c) for c in corners if c is not None} | {float(s) for s, _ in schedule.table}
    low, high = max(begin, schedule.warmup_steps), min(end, schedule.horizon or end)
    if schedule.kind == "wsd" and schedule.decay_start is not None:
        low = max(low, schedule.decay_start)
    steps |= {low + (high - low) * i / NODES for i in range(NODES + 1) if high > low}
    known = schedule if schedule.peak is not None or schedule.table else _of_peak_one(schedule)
    rows = [(step, rate_at(known, step)) for step in sorted(steps) if begin <= step <= end]
    return [(step, rate) for step, rate in rows if rate is not None]


def _of_peak_one(schedule: Schedule) -> Schedule:
    return Schedule(
        schedule.kind, 1.0, schedule.final or 0.0, schedule.warmup_steps, schedule.horizon,
        schedule.decay_start, schedule.decay_shape,
    )  # fmt: skip


def cosine(end: float, peak: float = 1.0) -> Rates:
    """Down to a tenth at `end`: what most do."""
    return _made(Schedule("cosine", peak, LOW * peak, int(WARM_SHARE * end), int(end)), end)


def cooled(past: Rates | None, now: float, end: float) -> Rates:
    """The past, its last rate on, and down to nothing over the last fifth."""
    down = max(end - COOL_SHARE * end, now)
    rows = _until(past, now)
    return _table([*rows, (down, rows[-1][1]), (end, 0.0)])


def going_on(past: Rates, now: float, end: float) -> Rates:
    """The past, and its last rate on."""
    rows = _until(past, now)
    return _table([*rows, (end, rows[-1][1])])


def _until(past: Rates | None, now: float) -> list[tuple[float, float]]:
    if past is None:
        return [(0.0, 0.0), (WARM_SHARE * now, 1.0), (now, 1.0)]
    return [*((s, r) for s, r in zip(past.steps, past.rates, strict=True) if s < now), (now, past.at(now))]


def stretched(rates: Rates, end: float, new_end: float) -> Rates:
    """The same schedule over more steps, its warm-up as long as before."""
    warm = rates.warm_at
    by = (new_end - warm) / max(end - warm, 1.0)
    rows = zip(rates.steps, rates.rates, strict=True)
    return _table([(s if s <= warm else warm + (s - warm) * by, r) for s, r in rows if s <= end])


def restarted(rates: Rates, end: float, new_end: float) -> Rates:
    """These rates to their end, and then the same schedule again over the steps that are left."""
    rows = [(s, r) for s, r in zip(rates.steps, rates.rates, strict=True) if s <= end]
    again = stretched(rates, end, max(new_end - end, rates.warm_at + 1))
    return _table([*rows, *((end + 1 + s, r) for s, r in zip(again.steps, again.rates, strict=True))])


def _made(schedule: Schedule, end: float) -> Rates:
    return _table(_by_schedule(schedule, 0, end))


def _table(rows: list[tuple[float, float]]) -> Rates:
    made = table(rows)
    assert made is not None
    return made
