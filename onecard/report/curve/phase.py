"""The learning rate at a step, over its peak: whether a run has come down, or is still high."""

from __future__ import annotations

import math

from onecard.report.log import Columns
from onecard.report.run_facts import RunFacts, Schedule


def share_of_peak(facts: RunFacts, step: int) -> float | None:
    """By the log's own rates, else by the schedule; None where neither says it."""
    logged = [(columns, columns.pairs("lr")) for columns in (facts.log.steps, facts.log.evaluations)]
    peak = max((rate for _columns, pairs in logged for _step, rate in pairs), default=0.0)
    if peak > 0:
        columns, pairs = max(logged, key=lambda one: len(one[1]))
        before = [rate for at, rate in pairs if at <= step]
        if before and _is_near(columns, pairs[len(before) - 1][0], step):
            return min(1.0, before[-1] / peak)
    schedule = facts.schedule
    if schedule is None or schedule.kind == "unknown":
        return None
    return share_of_schedule(schedule, step)


def _is_near(columns: Columns, at: int, step: int) -> bool:
    """Not so far back that the rate has changed since."""
    first, last = columns.step[0], columns.step[-1]
    return step - at <= max(1.0, 0.02 * (last - first))


def share_of_schedule(schedule: Schedule, step: int) -> float | None:
    """The schedule's rate at a step over its peak."""
    if schedule.kind == "table":
        rates = [rate for at, rate in schedule.table if at <= step]
        peak = max((rate for _at, rate in schedule.table), default=0.0)
        return rates[-1] / peak if rates and peak else None
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    final = (schedule.final or 0.0) / schedule.peak if schedule.peak else 0.0
    if schedule.kind == "constant" or schedule.horizon is None:
        return 1.0
    begins = schedule.warmup_steps
    if schedule.kind == "wsd":
        begins = schedule.decay_start if schedule.decay_start is not None else begins
    done = (step - begins) / max(1, schedule.horizon - begins)
    done = min(max(done, 0.0), 1.0)
    shape = schedule.decay_shape if schedule.kind == "wsd" else schedule.kind
    return final + (1 - final) * _left(shape, done)


def _left(shape: str, done: float) -> float:
    """Of the way from the peak down to the final rate."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - math.sqrt(done) if shape == "sqrt" else 1 - done
