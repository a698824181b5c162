"""Early alarms of a run: diverging, stuck, memorising, not a number, each with the step at which it began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from onecard.language import _
from onecard.report.curve.columns import said
from onecard.report.curve.detectors import (
    DIVERGING,
    FIRST_NOTHING,
    FIRST_UNTAUGHT,
    FLAT_SHARE,
    LEAST_INITIAL,
    MEMORISING,
    NOT_A_NUMBER,
    NOTHING,
    RISE,
    RISE_SHARE,
    STUCK,
    UNLEARNED,
    UNTAUGHT,
    UNTAUGHT_FALL,
    Alarm,
    Levels,
    Memorising,
    block_size,
    watch_losses,
)
from onecard.report.curve.noise import evaluation_error
from onecard.report.curve.rates import peak_of, rates_of
from onecard.report.findings import Finding
from onecard.report.run_facts import RunFacts

# Fewer logged losses than these make no levels worth watching; the evaluations are watched instead.
FEWEST_LOSSES = 60
WEIGHTS = {NOT_A_NUMBER: 100.0, DIVERGING: 95.0, UNLEARNED: 90.0, MEMORISING: 80.0, STUCK: 75.0}
PASSED_WEIGHT = 20.0
# A loss of a model that has the most frequent tokens right and no more, in GPT-2's tokens.
UNIGRAM = 7.5
TABLE_FALL = 0.25


def alarms_of(facts: RunFacts) -> list[Finding]:
    """What is wrong with a run now, and what was and is no more; the heaviest first."""
    steps, losses = said(facts.log.steps, "loss")
    if len(losses) >= FEWEST_LOSSES:
        found, levels = watch_losses(steps, losses, facts.vocab_size, block_size(steps))
        last = losses[-1]
    else:
        found, last = _few(facts)
        levels = Levels(1)
    found = [alarm for alarm in found if alarm.kind != STUCK or not _evaluations_fall(facts, alarm)]
    kinds = {alarm.kind for alarm in found}
    if not kinds & {DIVERGING, UNLEARNED, NOT_A_NUMBER}:
        found += _memorising(facts, levels)
    if UNLEARNED in kinds:
        found = [alarm for alarm in found if alarm.kind != STUCK]
    sentences = [_finding(alarm, facts, last, levels) for alarm in found]
    return sorted(sentences, key=lambda finding: -finding.weight)


def _few(facts: RunFacts) -> tuple[list[Alarm], float]:
    """Of a table, or of evaluations alone, the same questions asked of single values; and the last value."""
    log = facts.log
    columns = (log.evaluations.pairs("train"), log.evaluations.pairs("val"), log.steps.pairs("loss"))
    points = max(columns, key=len)
    if not points:
        return [], math.nan
    last = points[-1][1]
    lost = next(((step, loss) for step, loss in points if not math.isfinite(loss)), None)
    if lost is not None:
        return [Alarm(NOT_A_NUMBER, lost[0], lost[0], 0.0, lost[1])], last
    alarm = _risen(points) or _flat(points, facts.vocab_size) if len(points) >= 3 else None
    return [alarm] if alarm is not None else [], last


def _risen(points: Sequence[tuple[int, float]]) -> Alarm | None:
    """Are the last two values far above the lowest one before them?"""
    (_before, second), (step, last) = points[-2:]
    best_step, best = min(points[:-1], key=lambda point: point[1])
    if best_step == points[-2][0] or min(second, last) - best <= max(RISE, RISE_SHARE * best):
        return None
    return Alarm(DIVERGING, best_step, step, best, last)


def _flat(points: Sequence[tuple[int, float]], vocabulary: int | None) -> Alarm | None:
    step, now = points[-1]
    first, loss = points[0]
    ceiling = math.log(vocabulary) if vocabulary else None
    if ceiling is None and first <= 1 and loss >= LEAST_INITIAL:
        ceiling = loss
    if (
        ceiling is not None
        and step >= FIRST_NOTHING
        and min(loss for _step, loss in points) > NOTHING * ceiling
    ):
        return Alarm(UNLEARNED, 0, step, ceiling, now)
    early, middle = (_read_off(points, step / n) for n in (4, 2))
    if early is None or middle is None:
        return None
    if (
        ceiling is not None
        and step >= FIRST_UNTAUGHT
        and now > UNTAUGHT * ceiling
        and early - now < UNTAUGHT_FALL
    ):
        return Alarm(
            UNLEARNED, next(s for s, loss in points if loss <= now + UNTAUGHT_FALL), step, ceiling, now
        )
    if early - middle < TABLE_FALL or middle - now > FLAT_SHARE * (early - middle):
        return None
    began = next(s for s, loss in points if loss <= now + 0.1 * (early - middle))
    return Alarm(STUCK, began, step, early - middle, now)


def _read_off(points: Sequence[tuple[int, float]], step: float) -> float | None:
    """The loss at a step between two rows, on a line over the logarithm of the step."""
    for (a, before), (b, after) in pairwise(points):
        if 0 < a <= step <= b:
            return before + (after - before) * math.log(step / a) / math.log(b / a)
    return None


def _evaluations_fall(facts: RunFacts, alarm: Alarm) -> bool:
    """Does the validation loss go on falling? Then the training text has become harder, and nothing is
    stuck."""
    vals = [(step, val) for step, val in facts.log.evaluations.pairs("val") if step >= alarm.began]
    return len(vals) >= 3 and vals[0][1] - vals[-1][1] > max(0.02, 2 * FLAT_SHARE * alarm.before)


def _memorising(facts: RunFacts, levels: Levels) -> list[Alarm]:
    error = evaluation_error(facts)
    # The same text every time: the evaluations of one run differ by much less than by their error.
    watched = Memorising(error.of_a_change if error is not None and not error.assumed else 0.0)
    evaluations = facts.log.evaluations
    for step, train, val in zip(evaluations.step, evaluations.train, evaluations.val, strict=True):
        if not math.isfinite(val):
            continue
        own = train if math.isfinite(train) else levels.around(step)
        alarm = watched.add(int(step), own if own is not None else math.nan, val)
        if alarm is not None:
            return [alarm]
    return []


def _finding(alarm: Alarm, facts: RunFacts, last: float, levels: Levels) -> Finding:
    if _is_over(alarm, facts, last, levels):
        return Finding(alarm.kind + "-passed", _passed(alarm), None, alarm.began, PASSED_WEIGHT)
    text = {
        NOT_A_NUMBER: _not_a_number, DIVERGING: _diverging, UNLEARNED: _unlearned, MEMORISING: _memorised,
        STUCK: _stuck,
    }[alarm.kind](alarm, facts)  # fmt: skip
    return Finding(alarm.kind, text, False, alarm.began, WEIGHTS[alarm.kind])


def _is_over(alarm: Alarm, facts: RunFacts, last: float, levels: Levels) -> bool:
    """Has the run got better since? An alarm that was right then is history now."""
    if alarm.kind == MEMORISING:
        return facts.log.evaluations.pairs("val")[-1][1] <= alarm.before
    if alarm.kind == NOT_A_NUMBER:
        return math.isfinite(last)
    end = levels.around(levels.steps[-1]) if levels.steps else last
    if end is None:
        return False
    if alarm.kind == DIVERGING:
        return end <= alarm.before + 0.1
    return end < alarm.now - 0.2


def _passed(alarm: Alarm) -> str:
    texts = {
        NOT_A_NUMBER: _("The loss was not a number at step {step:,}; the run went on from before it."),
        DIVERGING: _("The loss rose from {before:.2f} to {now:.2f} after step {step:,} and came down again."),
        MEMORISING: _("The validation loss rose for a while after step {step:,} and has fallen below since."),
    }
    usual = _("The loss stood still from step {step:,} on, at {now:.2f}, and fell again later.")
    return texts.get(alarm.kind, usual).format(step=alarm.began, before=alarm.before, now=alarm.now)


def _not_a_number(alarm: Alarm, facts: RunFacts) -> str:
    text = _(
        "The loss is not a number since step {step:,}: nothing is learned after it, and checkpoints written "
        "since are of no use."
    )
    if facts.dtype == "float16":
        text = _(
            "The loss is not a number since step {step:,}: nothing is learned after it; float16 overflows "
            "where bfloat16 does not."
        )
    return text.format(step=alarm.began)


def _diverging(alarm: Alarm, facts: RunFacts) -> str:
    return _(
        "The run diverges since step {step:,}: the loss was down at {before:.2f} and had risen to "
        "{now:.2f} by step {seen:,}. A checkpoint from before and half the learning rate are the usual "
        "cure."
    ).format(step=alarm.began, before=alarm.before, now=alarm.now, seen=alarm.seen)


def _unlearned(alarm: Alarm, facts: RunFacts) -> str:
    if alarm.now > NOTHING * alarm.before:
        return _(
            "Nothing is learned: at step {seen:,} the loss is {now:.2f}, and a model that guesses blindly "
            "has {before:.2f}, ln(vocabulary). Is the learning rate too small, or do targets and text not "
            "belong together?"
        ).format(seen=alarm.seen, now=alarm.now, before=alarm.before)
    return _(
        "The loss is stuck at {now:.2f} since step {step:,}: about what is had by knowing how frequent "
        "each token is and nothing else (some {unigram:.1f} for GPT-2's tokens). The usual causes are a "
        "learning rate that is far too high, or targets that do not belong to the text."
    ).format(now=alarm.now, step=alarm.began, unigram=UNIGRAM)


def _stuck(alarm: Alarm, facts: RunFacts) -> str:
    rate, peak = rates_of(facts)(alarm.began), peak_of(facts)
    if rate is not None and peak and rate < 0.02 * peak:
        return _(
            "The loss no longer falls since step {step:,}, at {now:.2f}: the learning rate is down at "
            "{rate:.2g}, and nothing more is learned at it."
        ).format(step=alarm.began, now=alarm.now, rate=rate)
    return _(
        "The loss is stuck at {now:.2f} since step {step:,}, where a healthy run still falls: over as "
        "large a growth of the steps it had fallen by {before:.2f} before."
    ).format(now=alarm.now, step=alarm.began, before=alarm.before)


def _memorised(alarm: Alarm, facts: RunFacts) -> str:
    return _(
        "The model memorises its text since step {step:,}: the validation loss was {before:.3f} there and "
        "is {now:.3f} at step {seen:,}, while the training loss falls. The checkpoint of step "
        "{step:,} is the best there is."
    ).format(step=alarm.began, before=alarm.before, now=alarm.now, seen=alarm.seen)
