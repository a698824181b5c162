"""Mistakes in the learning rate's schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onecard.language import _
from onecard.report.curve.rates import logged_rates, rate_at
from onecard.report.findings import Mistake
from onecard.report.mistakes.knob_values import evidence_of, knob_value, line, numeric
from onecard.report.run_facts import RunFacts, Schedule

# A decay made for so many times the run's steps, and one that is over at so small a part of it.
TOO_LONG, TOO_SHORT = 1.1, 0.7
STILL_UP = 0.3  # of the peak, at the end: the decay has hardly come
USUAL_FINAL, ODD_FINAL = 0.1, 0.25  # of the peak
LONG_WARM_UP = 0.2  # of the run
SHORT_WARM_UP = 0.05
ROSE, FELL = 1.2, 0.8
STILL_HIGH = (0.05, 0.2)  # nats that a decay usually brings


def schedule_of(facts: RunFacts) -> Schedule | None:
    """The schedule that was set; of a bare set of knobs nanoGPT's cosine."""
    if facts.schedule is not None and facts.schedule.kind != "unknown":
        return facts.schedule
    peak, final = numeric(facts, "learning_rate"), numeric(facts, "min_lr")
    horizon, warmup = numeric(facts, "lr_decay_iters"), numeric(facts, "warmup_iters")
    if peak is None or horizon is None or knob_value(facts, "decay_lr") in (False, "False"):
        return None
    return Schedule("cosine", peak, final, int(warmup or 0), int(horizon))


def horizon(facts: RunFacts) -> Iterator[Mistake]:
    """lr_decay_iters and max_iters that disagree."""
    schedule, end = schedule_of(facts), facts.last_step
    if schedule is None or not end or schedule.horizon is None or schedule.kind not in ("cosine", "linear"):
        return
    if (
        not schedule.peak
        or not math.isfinite(schedule.peak)
        or schedule.assumed
        or _log_says_otherwise(facts, schedule)
    ):
        return
    reached = rate_at(schedule, end)
    if reached is None:
        return
    values = {
        "horizon": schedule.horizon, "end": end, "rate": reached, "peak": schedule.peak,
        "share": reached / schedule.peak, "low": STILL_HIGH[0], "high": STILL_HIGH[1],
    }  # fmt: skip
    evidence = evidence_of(facts, max_iters=end, lr_decay_iters=schedule.horizon, learning_rate=schedule.peak)
    change = line("lr_decay_iters", end, schedule.horizon)
    if (schedule.final or 0.0) > schedule.peak:
        return  # it rises: that is the mistake
    if schedule.horizon > TOO_LONG * end and reached > STILL_UP * schedule.peak:
        text = _(
            "The learning rate hardly falls: its decay is made for {horizon:,} steps and the run has "
            "{end:,}, so that it ends at {rate:.2g}, {share:.0%} of its peak."
        )
        costs = _("{low} to {high} nats usually, which a decay over the run's own steps brings").format(
            **values
        )
        yield Mistake("horizon-too-long", text.format(**values), evidence, change, costs, 70.0)
    elif schedule.horizon < TOO_SHORT * end and (schedule.final or 0.0) < ODD_FINAL * schedule.peak:
        text = _(
            "The learning rate is down after {horizon:,} of {end:,} steps: the rest is learned at "
            "{rate:.2g}, {share:.0%} of the peak, and slowly."
        )
        yield Mistake("horizon-too-short", text.format(**values), evidence, change, "", 40.0)


def _log_says_otherwise(facts: RunFacts, schedule: Schedule) -> bool:
    """Do the rates that the log shows follow another schedule than this one?"""
    for step, rate in logged_rates(facts)[-3:]:
        expected = rate_at(schedule, step)
        if expected is not None and schedule.peak and abs(rate - expected) > 0.1 * schedule.peak:
            return True
    return False


def last_rate(facts: RunFacts) -> Iterator[Mistake]:
    """min_lr above learning_rate, or far from a tenth of it."""
    schedule = schedule_of(facts)
    if schedule is None or schedule.assumed or schedule.kind not in ("cosine", "linear"):
        return
    peak, final = schedule.peak, schedule.final
    if not peak or not math.isfinite(peak) or final is None or _log_says_otherwise(facts, schedule):
        return
    evidence = evidence_of(facts, learning_rate=peak, min_lr=final)
    change = line("min_lr", USUAL_FINAL * peak, final)
    values = {"peak": peak, "final": final, "share": final / peak}
    if final > peak:
        text = _(
            "min_lr {final:g} is above learning_rate {peak:g}: the rate rises through the run instead of "
            "falling."
        )
        yield Mistake("min-lr-above", text.format(**values), evidence, change, "", 80.0)
    elif final > ODD_FINAL * peak:
        text = _(
            "The learning rate falls to {share:.0%} of its peak only: a tenth or less at the end is usual, "
            "and the last part of the fall brings most."
        )
        yield Mistake("min-lr-high", text.format(**values), evidence, change, "", 35.0)


def warmup(facts: RunFacts) -> Iterator[Mistake]:
    """A warm-up in another unit than steps, or far too long."""
    schedule, end = schedule_of(facts), facts.last_step
    if schedule is None or schedule.assumed or not end or not schedule.warmup_steps:
        return
    steps = schedule.warmup_steps
    if _log_says_otherwise(facts, schedule):
        return
    evidence = evidence_of(facts, warmup_iters=steps, max_iters=end)
    change = line("warmup_iters", max(10, round(SHORT_WARM_UP * end)), steps)
    values = {"steps": steps, "end": end, "share": steps / end}
    tokens = facts.tokens_per_step
    if steps >= end and tokens and steps >= 100 * end:
        text = _(
            "The warm-up of {steps:,} is counted in steps, and the run has {end:,}: in tokens it would be "
            "{right:,} steps."
        ).format(right=max(1, round(steps / tokens)), **values)
        yield Mistake(
            "warmup-unit",
            text,
            evidence,
            line("warmup_iters", max(1, round(steps / tokens)), steps),
            "",
            75.0,
        )
    elif steps >= end:
        text = _(
            "The warm-up is as long as the run ({steps:,} of {end:,} steps): the learning rate never gets "
            "up to its peak."
        )
        yield Mistake("warmup-too-long", text.format(**values), evidence, change, "", 72.0)
    elif steps > LONG_WARM_UP * end:
        text = _(
            "The warm-up takes {share:.0%} of the run ({steps:,} of {end:,} steps): some hundred steps, or a "
            "twentieth of the run, are enough."
        )
        yield Mistake("warmup-long", text.format(**values), evidence, change, "", 32.0)


def raised(facts: RunFacts) -> Iterator[Mistake]:
    """A rate that rose again after it had fallen, at a resume with a longer horizon."""
    for old, new in zip(facts.log.starts, facts.log.starts[1:], strict=False):
        rates = [columns.pairs("lr") for columns in (old.steps, new.steps)]
        if not rates[0] or len(rates[1]) < 2:
            continue
        at, first = rates[1][0]
        before = [rate for step, rate in rates[0] if step <= at]
        highest = max(rate for _step, rate in rates[0])
        if not before or at <= 1 or before[-1] > FELL * highest:
            continue
        jump = max(rate for _step, rate in rates[1][:200])
        if jump > ROSE * before[-1] and first > 0.1 * highest:
            text = _(
                "At the resume at step {step:,} the learning rate rose from {old:.2g} to {new:.2g}: the "
                "schedule was made longer, and what its decay had brought was lost again."
            ).format(step=at, old=before[-1], new=jump)
            evidence = _("lr {old:.3g} before step {step:,}, {new:.3g} after").format(
                old=before[-1], step=at, new=jump
            )
            change = line("learning_rate", before[-1]) + "   # decay_lr = False, or onecard's --extend=decay"
            yield Mistake("rate-raised", text, evidence, change, "", 50.0)
            return
