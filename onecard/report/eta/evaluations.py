"""Evaluations still to come, and what each takes.

What the log shows counts, and so does what a config or an option says. What is only assumed widens the upper
bound, is said, and has an option.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from onecard.language import _
from onecard.report.eta.pace import NOTHING, Range, inflated, timed
from onecard.report.gathering.known import HUGGINGFACE, NANOCHAT, NANOCHAT_2025, NANOGPT, ONECARD
from onecard.report.log import Start
from onecard.report.run_facts import RunFacts

# Defaults of the trainers: tokens of an evaluation and steps between two.
NANOCHATS_TOKENS = {NANOCHAT: 80 * 524_288, NANOCHAT_2025: 20 * 524_288}
NANOCHATS_EVERY = 250
NANOGPT_EVERY, NANOGPT_BLOCKS = 2000, 200
# A forward pass is a third of a step's work.
_FORWARD = 3


def evaluations_left(
    facts: RunFacts, start: Start, step_ms: Range, tokens_per_s: float | None, seen: int, notes: list[str]
) -> tuple[int, Range]:
    """How many are to come, and the seconds that one takes."""
    last_step = facts.last_step
    if last_step is None or facts.log.format == HUGGINGFACE or facts.eval_every == 0:
        return 0, NOTHING
    interval = facts.eval_every or _seen_interval(start)
    taken = _seconds(facts, start, step_ms, tokens_per_s)
    if facts.log.format in NANOCHATS_TOKENS:
        interval, taken = _of_nanochat(facts, start, interval, tokens_per_s, notes)
    elif interval is None and facts.log.format == NANOGPT and _may_be_usual(start):
        interval = max(NANOGPT_EVERY, _shortest_interval(start))
        longest = 1.5 * 2 * NANOGPT_BLOCKS / (facts.gradient_accumulation_steps or 1) * step_ms.mid / 3000
        taken = Range(0.0, 0.0, min(taken.high or longest, longest))
        text = _(
            "evaluations are in the upper bound alone: one every {n:,} steps is assumed, of {blocks} "
            "micro-batches of each split, nanoGPT's defaults (--config FILE has the run's own)"
        )
        notes.append(text.format(n=interval, blocks=NANOGPT_BLOCKS))
    elif interval is None and len(start.evaluations):
        interval, taken = _shortest_interval(start), Range(0.0, 0.0, taken.high)
        notes.append(
            _(
                "evaluations are in the upper bound alone: with one in the log it does not say how often "
                "they come (--eval-every N or --config FILE does)"
            )
        )
    if interval is None:
        notes.append(
            _(
                "evaluations are not counted: none is in the log (--eval-every N or --config FILE says when "
                "they come)"
            )
        )
        return 0, NOTHING
    count = max(0, last_step // interval - seen // interval)
    if facts.log.format != NANOGPT and last_step % interval and seen < last_step - 1:
        count += 1  # the closing one
    return count, taken


def _of_nanochat(
    facts: RunFacts, start: Start, interval: int | None, tokens_per_s: float | None, notes: list[str]
) -> tuple[int, Range]:
    """Its times leave evaluations out, so that a log shows when they come and never how long they take."""
    usual = NANOCHATS_TOKENS[facts.log.format]
    mid = (facts.eval_tokens or usual) / tokens_per_s / _FORWARD if tokens_per_s else 0.0
    taken = Range(mid, 0.5 * mid, 1.5 * mid)
    seen = interval is not None
    if interval is None:
        interval = NANOCHATS_EVERY
        if len(start.evaluations):
            interval = max(interval, _shortest_interval(start))
    if seen and (facts.eval_tokens is not None or not tokens_per_s):
        return interval, taken
    if not seen and facts.eval_tokens is None:
        text = _(
            "evaluations are in the upper bound alone: nanochat's defaults are assumed, one of {tokens:,} "
            "tokens every {every:,} steps (--eval-tokens N and --eval-every N say it)"
        )
    elif seen:
        text = _(
            "evaluations are in the upper bound alone: the log does not say how many tokens one has, and "
            "nanochat's default of {tokens:,} is assumed (--eval-tokens N says it)"
        )
    else:
        text = _(
            "evaluations are in the upper bound alone: one every {every:,} steps is assumed, nanochat's "
            "default (--eval-every N says it)"
        )
    notes.append(text.format(tokens=usual, every=interval))
    return interval, Range(0.0, 0.0, taken.high)


def _seen_interval(start: Start) -> int | None:
    numbers = sorted({int(step) for step in start.evaluations.step})
    between = [b - a for a, b in pairwise(numbers)]
    return statistics.mode(between) if between else None


def _may_be_usual(start: Start) -> bool:
    """Does the only evaluation in the log lie where nanoGPT's default interval has one?"""
    return bool(len(start.evaluations)) and start.evaluations.step[-1] % NANOGPT_EVERY == 0


def _shortest_interval(start: Start) -> int:
    """The least that one evaluation among these steps allows: its number is a multiple of it."""
    number, steps = int(start.evaluations.step[-1]), start.steps.step
    ends: Sequence[int] = (int(steps[0]), int(steps[-1])) if len(steps) else (number, number)
    alone = max(ends[1] - number, number - ends[0], 0) + 1
    # Searched among the first divisors alone, for numbers may be anything; any larger one is as good.
    return next((number // n for n in range(min(number // alone, 10_000), 0, -1) if number % n == 0), alone)


def _seconds(facts: RunFacts, start: Start, step_ms: Range, tokens_per_s: float | None) -> Range:
    """Seen in the log where it shows; else computed: nanoGPT and onecard read both splits."""
    steps = timed(start, facts.tokens_per_step)
    more = steps.where(inflated(facts, start, steps))
    extra = [(step, (ms - step_ms.mid) / 1000) for step, ms in zip(more.step, more.ms, strict=True)]
    first = steps.step[0] if len(steps) else 0
    seen = [max(0.0, seconds) for step, seconds in extra if step != first]
    if len(seen) == 1:
        return Range(seen[0], 0.8 * seen[0], 1.2 * seen[0])
    if seen:
        return Range(statistics.median(seen), min(seen), max(seen))
    # With compilation in it, the first one is a bound.
    bound = max((seconds for _step, seconds in extra), default=math.inf)
    computed: float | None = None
    if facts.log.format in (NANOGPT, ONECARD) and facts.eval_tokens and tokens_per_s:
        # nanoGPT evaluates on the first of several cards alone.
        computed = 2 * facts.eval_tokens * facts.cards / tokens_per_s / _FORWARD
    if computed is None:
        return Range(0.0, 0.0, bound if math.isfinite(bound) and bound > 0 else 0.0)
    mid = min(computed, bound) if bound > 0 else computed
    return Range(mid, 0.5 * mid, max(mid, min(1.5 * computed, bound)))
