"""The pace of a run: the time of a step that is nothing but a step.

The first steps of a process compile and tune, and nanoGPT's time of a step after an evaluation includes the
evaluation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.report.gathering.known import HUGGINGFACE, NANOCHATS, NANOGPT, ONECARD
from onecard.report.log import Log, Start, Steps
from onecard.report.run_facts import RunFacts

# nanoGPT waits as long before it believes its own MFU.
WARM_UP_STEPS = 5
# No error bar is smaller, whatever the spread: cards slow down by some percent as they warm up, and other
# programs come and go. (lines used, share of the step)
FLOORS = ((5, 0.10), (20, 0.05), (math.inf, 0.02))
# Standard deviation of a normal spread from its median absolute deviation, and what the standard error of
# a median is to that of a mean.
SIGMA_PER_MAD, MEDIAN_TO_MEAN = 1.4826, 1.2533
# Their times are of steps alone; of other formats nobody knows.
_WITHOUT_EVALUATIONS = (*NANOCHATS, ONECARD, HUGGINGFACE)


@dataclass(frozen=True)
class Range:
    """A value and the bounds it is expected within."""

    mid: float
    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.mid + other.mid, self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> Range:
        return Range(self.mid * factor, self.low * factor, self.high * factor)


NOTHING = Range(0.0, 0.0, 0.0)


def timed(start: Start, tokens_per_step: int | None) -> Steps:
    """The steps with a time: the log's own, or what its tokens a second come to."""
    steps = start.steps
    if not steps.has("ms") and tokens_per_step and steps.has("tokens_per_s"):
        ms = [1000 * tokens_per_step / speed if speed > 0 else math.nan for speed in steps.tokens_per_s]
        steps = Steps(**{name: getattr(steps, name) for name in Steps.NAMES if name != "ms"}, ms=ms)
    return steps.where([0 < ms < math.inf for ms in steps.ms])


def begins(log: Log, start: Start) -> bool:
    """Is a process's warm-up in these lines? One whose first lines are missing (a paste, a tail) has none, or
    only an outlier more."""
    steps = start.steps
    return bool(len(steps)) and (
        steps.step[0] == 0 or len(log.starts) > 1 or any(mfu < 0 for mfu in steps.mfu)
    )


def steady(facts: RunFacts, start: Start) -> Steps:
    """The steps that show the pace: neither of the warm-up nor with an evaluation in them. None where there
    is but the first one."""
    steps = timed(start, facts.tokens_per_step)
    if not len(steps):
        return steps
    first = steps.step[0]
    warm = first + WARM_UP_STEPS if begins(facts.log, start) else first
    more = inflated(facts, start, steps)
    settled = steps.where([step >= warm and not extra for step, extra in zip(steps.step, more, strict=True)])
    if len(settled):
        return settled
    # Few lines so far: any but the very first is better than none.
    return steps.where([step > first and not extra for step, extra in zip(steps.step, more, strict=True)])


def inflated(facts: RunFacts, start: Start, steps: Steps) -> list[bool]:
    """Of each step: is an evaluation in its time?"""
    if facts.log.format in _WITHOUT_EVALUATIONS:
        return [False] * len(steps)
    evaluated, interval = set(start.evaluations.step), facts.eval_every
    if facts.log.format != NANOGPT or not interval:
        return [step in evaluated for step in steps.step]
    return [step in evaluated or step % interval == 0 for step in steps.step]


def step_range(ms: Sequence[float]) -> Range:
    """The median, and what the average of the coming steps may be.

    Two standard errors of the median, by the median absolute deviation, but not less than the floor. The
    last third's median and the mean lie inside as well: the mean has the hiccups that the median leaves
    out, each as three steps at most, for a machine that slept will not sleep at every thirtieth step.
    """
    in_order = sorted(ms)  # and so nearly are the deviations, which makes a large log's median cheap
    median = statistics.median(in_order)
    deviation = statistics.median([abs(value - median) for value in in_order])
    error = 2 * MEDIAN_TO_MEAN * SIGMA_PER_MAD * deviation / math.sqrt(len(ms))
    floor = next(share for lines, share in FLOORS if len(ms) < lines)
    half, most = max(error, floor * median), 3 * median
    bounds = [
        max(median - half, 0.0),
        median + half,
        statistics.fmean([min(value, most) for value in ms] if in_order[-1] > most else ms),
    ]
    if len(ms) >= 9:
        bounds.append(statistics.median(ms[-(len(ms) // 3) :]))
    return Range(median, min(bounds), max(bounds))
