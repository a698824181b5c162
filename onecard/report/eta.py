"""When a run will be done, from the first lines of its log.

The time of a step is the median of those that are nothing but steps: the first ones of a process compile
and tune, and nanoGPT's time of a step after an evaluation includes the evaluation. What evaluations take
is added again for those still to come.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise

from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.language import _
from onecard.report.known import Known, flops_per_token_of, peak_of, setting_of, tokens_per_step_of
from onecard.report.logs import HUGGINGFACE, NANOCHAT, NANOCHAT_2025, NANOGPT, ONECARD, Log
from onecard.report.mfu import disagreement, explain, flops_by_log
from onecard.report.steps import Steps

# nanoGPT waits as long before it believes its own MFU.
WARM_UP_STEPS = 5
# No error bar is smaller, whatever the spread: cards slow down by some percent as they warm up, and other
# programs come and go. (lines used, share of the step)
FLOORS = ((5, 0.10), (20, 0.05), (math.inf, 0.02))
# Standard deviation of a normal spread from its median absolute deviation, and what the standard error of
# a median is to that of a mean.
SIGMA_PER_MAD, MEDIAN_TO_MEAN = 1.4826, 1.2533
EVALUATION_TOKENS = {NANOCHAT: 80 * 524_288, NANOCHAT_2025: 20 * 524_288}  # nanochat's defaults
EVALUATION_EVERY = 250
LARGEST_FLOPS_PER_TOKEN = 3e10  # of 5B parameters; the largest nanochat there has been has 2.2B
NANOGPT_EVERY, NANOGPT_BLOCKS = 2000, 200  # and nanoGPT's: eval_interval and eval_iters


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


@dataclass(frozen=True)
class Eta:
    log: Log
    step_ms: Range
    steps_used: int
    tokens_per_step: int | None
    tokens_per_s: float | None
    flops_per_s: float | None  # of all cards together
    card: Card | None
    peak_flops: float | None  # of one card
    mfu: float | None
    log_mfu: float | None
    mfu_explanation: str
    last_step: (
        int | None
    )  # how long the run is: a nanochat log's total, max_iters of the others; None: unsaid
    steps_left: int
    evaluations_left: int
    evaluation_s: Range
    remaining_s: Range | None
    notes: tuple[str, ...]

    @property
    def loss(self) -> float | None:
        loss = next((loss for loss in reversed(self.log.steps.losses) if loss is not None), None)
        return loss if loss is not None and math.isfinite(loss) else None


def estimate(log: Log, known: Known) -> Eta:
    """The run's speed, true MFU and remaining time; UserError where something needed is missing."""
    notes: list[str] = []
    steady = steady_steps(log, known)
    step_ms = step_range(steady.ms)
    tokens_per_step, tokens_per_s, flops_per_s = _speed(log, known, steady, step_ms.mid, notes)
    last_step, steps_left = _horizon(log, known, tokens_per_step)
    count, evaluation = 0, Range(0.0, 0.0, 0.0)
    remaining: Range | None = None
    if last_step is not None:
        count, evaluation = _evaluations(log, known, step_ms, tokens_per_s, last_step, notes)
        remaining = step_ms.times(steps_left / 1000) + evaluation.times(count)
    log_mfu = next((mfu for mfu in reversed(log.steps.mfus) if mfu is not None), None)
    peak = peak_of(log, known)
    mfu = flops_per_s / (peak * log.cards) if flops_per_s and peak else None
    if mfu is None and log.format == ONECARD:
        shown = [mfu for mfu in steady.mfus if mfu is not None and mfu > 0]
        mfu = statistics.median(shown) if shown else None
    if mfu is None:
        notes.append(_how_to_get_mfu(log, known, flops_per_s))
    if (loss := log.steps[-1].loss) is not None and not math.isfinite(loss):
        notes.append(_("the last loss is {loss}: the run has diverged").format(loss=loss))
    return Eta(
        log=log,
        step_ms=step_ms,
        steps_used=len(steady),
        tokens_per_step=tokens_per_step,
        tokens_per_s=tokens_per_s,
        flops_per_s=flops_per_s,
        card=known.card,
        peak_flops=peak,
        mfu=mfu,
        log_mfu=log_mfu,
        mfu_explanation=explain(log, log_mfu, mfu, known.card, peak),
        last_step=last_step,
        steps_left=steps_left,
        evaluations_left=count,
        evaluation_s=evaluation,
        remaining_s=remaining,
        notes=tuple(notes),
    )


def _speed(
    log: Log, known: Known, steady: Steps, step_ms: float, notes: list[str]
) -> tuple[int | None, float | None, float | None]:
    """Tokens per step and per second, and FLOPs per second, as far as log and reader say them."""
    tokens_per_step = tokens_per_step_of(log, known, steady, notes)
    flops_per_token = flops_per_token_of(log, known, notes)
    by_log = flops_by_log(log, known.card, step_ms)
    if tokens_per_step and flops_per_token is None and by_log and log.format == NANOCHAT_2025:
        # Without a head nothing but the log's own figures tell whether they count whole steps.
        implied = by_log / (tokens_per_step / step_ms * 1000)
        if implied > LARGEST_FLOPS_PER_TOKEN:
            notes[:] = [
                _(
                    "the log's tok/sec and its MFU together would be a model of {n:.0f}B parameters: its "
                    "tok/sec is of one micro-batch, as nanochat's was until 2025-10-26"
                ).format(n=implied / 6e9)
            ]
            tokens_per_step = None
    tokens_per_s = tokens_per_step / step_ms * 1000 if tokens_per_step else None
    if tokens_per_s is None and flops_per_token and by_log:
        tokens_per_s = by_log / flops_per_token
    flops_per_s = by_log
    if flops_per_token and tokens_per_s:
        flops_per_s = flops_per_token * tokens_per_s
        if by_log and (note := disagreement(flops_per_s, by_log, log)):
            notes.append(note)
    if tokens_per_s is None:
        notes.append(
            _(
                "tokens/s need the tokens of an iteration: add --batch-size, --block-size and "
                "--gradient-accumulation-steps, or --config FILE"
            )
        )
    return tokens_per_step, tokens_per_s, flops_per_s


# --- the time of a step -------------------------------------------------------------------------


def steady_steps(log: Log, known: Known) -> Steps:
    """The steps that show the pace: neither of the warm-up nor with an evaluation in them."""
    first = log.steps[0].number
    # A log whose first lines are missing (a paste, a tail) has no warm-up in it, or only an outlier more.
    begins = first == 0 or log.starts > 1 or any((mfu or 0) < 0 for mfu in log.steps.mfus)
    warm = first + WARM_UP_STEPS if begins else first
    inflated = _inflated(log, known)
    settled = log.steps.where(
        [number >= warm and not more for number, more in zip(log.steps.numbers, inflated, strict=True)]
    )
    if not settled:  # few lines so far: any but the very first is better than none
        settled = log.steps.where(
            [number > first and not more for number, more in zip(log.steps.numbers, inflated, strict=True)]
        )
    if settled:
        return settled
    if len(log.steps) > 1:
        raise UserError(
            _("every line of this log has an evaluation in its time"),
            _("nanoGPT shows a step together with the evaluation before it, and here it shows no others"),
            _("log more often than you evaluate: --log_interval=1"),
            exit_code=1,
        )
    why = _(
        "its {seconds:.1f} s say nothing about the others: compilation, tuning, CUDA's start and the first "
        "data are in it, and with nanoGPT a whole evaluation"
    )
    raise UserError(
        _("only the first iteration is in this log"),
        why.format(seconds=log.steps[0].ms / 1000),
        _("let it run to iteration 10 or so, and ask again"),
        exit_code=1,
    )


def _inflated(log: Log, known: Known) -> list[bool]:
    """Of each step: is an evaluation in its time?"""
    steps = log.steps
    if log.format != NANOGPT:
        return [False] * len(steps)  # the others keep evaluations out of their times
    interval = setting_of(log, known, "eval_interval")
    if not interval:
        return steps.after_evaluation
    return [
        after or number % interval == 0
        for number, after in zip(steps.numbers, steps.after_evaluation, strict=True)
    ]


def step_range(ms: list[float]) -> Range:
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


# --- how far it is ------------------------------------------------------------------------------


def _how_to_get_mfu(log: Log, known: Known, flops_per_s: float | None) -> str:
    if log.is_of_cpu:
        return _("the run is on a CPU, whose peak nobody states: no MFU")
    if known.card is None:
        return _('MFU needs the card: add --gpu "RTX 4070" or another name that `onecard gpus` knows')
    if flops_per_s is None:
        return _("MFU needs the model's shape: add --config FILE, or the head of the log")
    return _("MFU is left out: {card} has no peak for this dtype").format(card=known.card.name)


def _horizon(log: Log, known: Known, tokens_per_step: int | None) -> tuple[int | None, int]:
    """(how many steps in all, how many are left); None where nobody says."""
    last = known.max_iters
    if known.tokens is not None:
        if tokens_per_step is None:
            raise UserError(
                _("a horizon in tokens needs the tokens of an iteration"),
                _("the log does not have them"),
                _("add --batch-size, --block-size and --gradient-accumulation-steps, or use --max-iters"),
            )
        last = -(-known.tokens // tokens_per_step)
    if last is None:
        last = log.facts.get("last_step") or setting_of(log, known, "max_iters")
    if last is None:
        return None, 0
    seen = log.steps[-1].number
    if seen > last and (known.max_iters is not None or known.tokens is not None):
        raise UserError(
            _(
                "the log is past that end: its last line is of step {seen:,}, and {last:,} would be the last"
            ).format(seen=seen, last=last),
            hint=_("--max-iters and --tokens are those of the whole run"),
            exit_code=1,
        )
    # Steps count from 0, and nanoGPT takes one more than max_iters; a bar counts steps that are done.
    left = last - seen if log.format in (NANOGPT, HUGGINGFACE) else last - seen - 1
    return last, max(0, left)


# --- evaluations --------------------------------------------------------------------------------


def _evaluations(
    log: Log, known: Known, step_ms: Range, tokens_per_s: float | None, last_step: int, notes: list[str]
) -> tuple[int, Range]:
    """How many are to come, and the seconds that one takes."""
    nothing = Range(0.0, 0.0, 0.0)
    if log.format == HUGGINGFACE:
        return 0, nothing
    interval = setting_of(log, known, "eval_interval") or _seen_interval(log)
    taken = _evaluation_seconds(log, known, step_ms, tokens_per_s)
    if interval is None and log.format in EVALUATION_TOKENS:
        interval = EVALUATION_EVERY
        if log.evaluations:
            notes.append(_("evaluations are taken to come every 250 steps, nanochat's default"))
        else:
            taken = Range(0.0, 0.0, taken.high)
            notes.append(_("no evaluation is in the log: nanochat's usual ones are in the upper bound alone"))
    elif interval is None and log.format == NANOGPT and _may_be_usual(log):
        interval = max(NANOGPT_EVERY, _shortest_interval(log))
        micros = setting_of(log, known, "gradient_accumulation_steps") or known.gradient_accumulation_steps
        longest = 1.5 * 2 * NANOGPT_BLOCKS / (micros or 1) * step_ms.mid / 3000
        taken = Range(0.0, 0.0, min(taken.high, longest))
        text = _(
            "evaluations are in the upper bound alone: one every {n:,} steps is assumed, of {blocks} "
            "micro-batches of each split, nanoGPT's defaults (--config FILE has the run's own)"
        )
        notes.append(text.format(n=interval, blocks=NANOGPT_BLOCKS))
    elif interval is None and log.evaluations:
        interval, taken = _shortest_interval(log), Range(0.0, 0.0, taken.high)
        notes.append(
            _(
                "evaluations are in the upper bound alone: with one in the log it does not say how often "
                "they come (--config FILE does)"
            )
        )
    if interval is None:
        notes.append(_("evaluations are not counted: none is in the log (--config FILE says when they come)"))
        return 0, nothing
    seen = log.steps[-1].number
    count = max(0, last_step // interval - seen // interval)
    if log.format != NANOGPT and last_step % interval and seen < last_step - 1:
        count += 1  # the closing one
    return count, taken


def _seen_interval(log: Log) -> int | None:
    numbers = sorted(set(log.evaluations))
    between = [b - a for a, b in pairwise(numbers)]
    return statistics.mode(between) if between else None


def _may_be_usual(log: Log) -> bool:
    """Does the only evaluation in the log lie where nanoGPT's default interval has one?"""
    return bool(log.evaluations) and log.evaluations[-1] % NANOGPT_EVERY == 0


def _shortest_interval(log: Log) -> int:
    """The least that one evaluation among these steps allows: its number is a multiple of it."""
    number = log.evaluations[-1]
    alone = max(log.steps[-1].number - number, number - log.steps[0].number, 0) + 1
    # Searched among the first divisors alone, for numbers may be anything; any larger one is as good.
    return next((number // n for n in range(min(number // alone, 10_000), 0, -1) if number % n == 0), alone)


def _evaluation_seconds(log: Log, known: Known, step_ms: Range, tokens_per_s: float | None) -> Range:
    """Seen in the log where it shows; else computed: a forward pass is a third of a step's work."""
    inflated = log.steps.where(_inflated(log, known))
    extra = [(s.number, (s.ms - step_ms.mid) / 1000) for s in inflated]
    first = log.steps[0].number
    seen = [max(0.0, seconds) for number, seconds in extra if number != first]
    if len(seen) == 1:
        return Range(seen[0], 0.8 * seen[0], 1.2 * seen[0])
    if seen:
        return Range(statistics.median(seen), min(seen), max(seen))
    # With compilation in it, the first one is a bound.
    bound = max((seconds for _number, seconds in extra), default=math.inf)
    computed: float | None = None
    if log.format in EVALUATION_TOKENS:
        computed = EVALUATION_TOKENS[log.format] / tokens_per_s / 3 if tokens_per_s else None
    else:
        blocks = setting_of(log, known, "eval_iters")
        micros = setting_of(log, known, "gradient_accumulation_steps")
        if blocks and micros:
            computed = 2 * blocks / micros * step_ms.mid / 3000
    if computed is None:
        return Range(0.0, 0.0, bound if math.isfinite(bound) and bound > 0 else 0.0)
    mid = min(computed, bound) if bound > 0 else computed
    return Range(mid, 0.5 * mid, max(mid, min(1.5 * computed, bound)))
