"""When a run will be done, from the first lines of its log.

The time of a step is the median of those that are nothing but steps: the first ones of a process compile
and tune, and nanoGPT's time of a step after an evaluation includes the evaluation. What evaluations take
is added again for those still to come.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from onecard.config import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.language import _
from onecard.report.logs import HUGGINGFACE, NANOCHAT, NANOCHAT_2025, NANOGPT, ONECARD, Log, Step
from onecard.report.mfu import disagreement, explain, flops_by_log
from onecard.shapes import GPT2Shape

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
class Known:
    """What the reader of the log adds to it; None is "see the log"."""

    max_iters: int | None = None
    tokens: int | None = None
    batch_size: int | None = None
    block_size: int | None = None
    gradient_accumulation_steps: int | None = None
    config: RunConfig | None = None
    card: Card | None = None


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
    last_step: int  # the number of the last step there will be, counted like the log's
    steps_left: int
    evaluations_left: int
    evaluation_s: Range
    remaining_s: Range
    notes: tuple[str, ...]

    @property
    def loss(self) -> float | None:
        loss = next((step.loss for step in reversed(self.log.steps) if step.loss is not None), None)
        return loss if loss is not None and math.isfinite(loss) else None


def estimate(log: Log, known: Known) -> Eta:
    """The run's speed, true MFU and remaining time; UserError where something needed is missing."""
    notes: list[str] = []
    steady = steady_steps(log, known)
    step_ms = step_range([step.ms for step in steady])
    tokens_per_step = _tokens_per_step(log, known, steady, notes)
    flops_per_token = _flops_per_token(log, known, notes)
    shown = [step.mfu for step in steady if step.mfu is not None and step.mfu > 0]
    by_log = flops_by_log(log, known.card, step_ms.mid)
    tokens_per_s = tokens_per_step / step_ms.mid * 1000 if tokens_per_step else None
    if tokens_per_s is None and flops_per_token and by_log:
        tokens_per_s = by_log / flops_per_token
    flops_per_s = by_log
    if flops_per_token and tokens_per_s:
        flops_per_s = flops_per_token * tokens_per_s
        if by_log and (told := disagreement(flops_per_s, by_log, log)):
            notes.append(told)
    if tokens_per_s is None:
        notes.append(
            _(
                "tokens/s need the tokens of an iteration: add --batch-size, --block-size and "
                "--gradient-accumulation-steps, or --config FILE"
            )
        )
    last_step, steps_left = _horizon(log, known, tokens_per_step)
    count, evaluation = _evaluations(log, known, step_ms, tokens_per_s, last_step, notes)
    log_mfu = next((step.mfu for step in reversed(log.steps) if step.mfu is not None), None)
    peak = _peak(log, known)
    mfu = flops_per_s / (peak * log.cards) if flops_per_s and peak else None
    if mfu is None and log.format == ONECARD and shown:
        mfu = statistics.median(shown)
    if mfu is None:
        notes.append(_how_to_get_mfu(known, flops_per_s))
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
        remaining_s=step_ms.times(steps_left / 1000) + evaluation.times(count),
        notes=tuple(notes),
    )


# --- the time of a step -------------------------------------------------------------------------


def steady_steps(log: Log, known: Known) -> list[Step]:
    """The steps that show the pace: neither of the warm-up nor with an evaluation in them."""
    first = log.steps[0].number
    # A log whose first lines are missing (a paste, a tail) has no warm-up in it, or only an outlier more.
    begins = first == 0 or log.starts > 1 or any((step.mfu or 0) < 0 for step in log.steps)
    warm = first + WARM_UP_STEPS if begins else first
    plain = [step for step in log.steps if not _inflated(step, log, known)]
    settled = [step for step in plain if step.number >= warm]
    if not settled:  # few lines so far: any but the very first is better than none
        settled = [step for step in plain if step.number > first]
    if settled:
        return settled
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


def _inflated(step: Step, log: Log, known: Known) -> bool:
    if log.format != NANOGPT:
        return False  # the others keep evaluations out of their times
    interval = _setting(log, known, "eval_interval")
    return step.after_evaluation or bool(interval and step.number % interval == 0)


def step_range(ms: list[float]) -> Range:
    """The median, and what the average of the coming steps may be.

    Two standard errors of the median, by the median absolute deviation, but not less than the floor. The
    last third's median and the mean (with hiccups, which the median leaves out) lie inside as well.
    """
    median = statistics.median(ms)
    deviation = statistics.median(abs(value - median) for value in ms)
    error = 2 * MEDIAN_TO_MEAN * SIGMA_PER_MAD * deviation / math.sqrt(len(ms))
    floor = next(share for lines, share in FLOORS if len(ms) < lines)
    half = max(error, floor * median)
    bounds = [max(median - half, 0.0), median + half, statistics.fmean(ms)]
    if len(ms) >= 9:
        bounds.append(statistics.median(ms[-(len(ms) // 3) :]))
    return Range(median, min(bounds), max(bounds))


# --- what the log and its reader know together --------------------------------------------------


def _setting(log: Log, known: Known, name: str) -> int | None:
    """A whole number from the log's head, else from the config; None where neither tells."""
    value = log.settings.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**15:
        return value
    return getattr(known.config, name) if known.config is not None else None


def _tokens_per_step(log: Log, known: Known, steady: list[Step], notes: list[str]) -> int | None:
    names = ("batch_size", "block_size", "gradient_accumulation_steps")
    given = [getattr(known, name) for name in names]
    if any(value is not None for value in given):
        filled = [
            value if value is not None else _setting(log, known, name)
            for name, value in zip(names, given, strict=True)
        ]
        missing = [
            f"--{name.replace('_', '-')}" for name, value in zip(names, filled, strict=True) if not value
        ]
        if missing:
            raise UserError(
                _("the tokens of an iteration need all three of its factors"),
                "batch_size × gradient_accumulation_steps × block_size",
                _("add {options}").format(options=", ".join(missing)),
            )
        return math.prod(value for value in filled if value)
    speeds = [step.tokens_per_s * step.ms / 1000 for step in steady if step.tokens_per_s]
    # onecard's figure is a moving one beside a step's own time: near, not exact.
    by_speed = statistics.median(speeds) if speeds and log.format in (NANOCHAT, NANOCHAT_2025) else None
    printed = log.tokens_per_step
    if printed and by_speed and printed > 1.5 * by_speed:
        notes.append(
            _(
                "the log's tok/sec is too small by {factor:.0f}, its accumulation steps: nanochat counted "
                "one micro-batch until 2025-10-26"
            ).format(factor=printed / by_speed)
        )
    if printed:
        return printed
    if known.config is not None:
        return known.config.tokens_per_step
    if all(name in log.settings for name in names):
        factors = [_setting(log, known, name) for name in names]
        return math.prod(f for f in factors if f) if all(factors) else None
    if by_speed is None:
        return None
    if log.format == NANOCHAT_2025:
        notes.append(
            _(
                "tok/sec is taken as printed; before 2025-10-26 nanochat's was too small by the accumulation "
                "steps: --batch-size, --block-size and --gradient-accumulation-steps settle it"
            )
        )
    return max(1, round(by_speed / 1024) * 1024 if by_speed > 32_768 else round(by_speed))


def _flops_per_token(log: Log, known: Known, notes: list[str]) -> float | None:
    if printed := log.facts.get("flops_per_token"):
        return float(printed)
    printed_count = log.facts.get("parameters")
    if known.config is not None:
        vocab = known.config.vocab_size or log.facts.get("vocab_size") or 50_304
        shape = known.config.shape(vocab)
        count = shape.parameters - (shape.block_size * shape.n_embd if shape.arch == "gpt2" else 0)
        if not printed_count or abs(count / printed_count - 1) <= 0.02:
            return float(shape.flops_per_token)
        notes.append(
            _(
                "the config's model has {config:.2f}M parameters, the log's {log:.2f}M: it is another run's, "
                "and its shape is not used"
            ).format(config=count / 1e6, log=printed_count / 1e6)
        )
    shape = _printed_shape(log)
    if shape is None:
        return None
    count = shape.parameters - shape.block_size * shape.n_embd
    if printed_count and abs(count / printed_count - 1) > 0.02:
        return None  # the log does not print all of it: its own MFU has to do
    return float(shape.flops_per_token)


def _printed_shape(log: Log) -> GPT2Shape | None:
    """nanoGPT's model, where its head is in the log: what is not printed there is at its default."""
    if log.format != NANOGPT or not ("parameters" in log.facts or "n_embd" in log.settings):
        return None
    usual: Mapping[str, Any] = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}
    sizes = {name: _setting(log, Known(), name) or default for name, default in usual.items()}
    vocab = _setting(log, Known(), "vocab_size") or log.facts.get("vocab_size") or 50_304
    bias = log.settings.get("bias", False) is True
    if any(size > 2**24 for size in (*sizes.values(), vocab)):
        return None
    return GPT2Shape(
        sizes["n_layer"], sizes["n_head"], sizes["n_embd"], vocab, sizes["block_size"], bias
    )  # fmt: skip


def _peak(log: Log, known: Known) -> float | None:
    if known.card is None:
        return None
    dtype = log.facts.get("dtype") or log.settings.get("dtype") or getattr(known.config, "dtype", None)
    tflops = known.card.peak_tflops(dtype if dtype in ("float16", "float32") else "bfloat16")
    return tflops * 1e12 if tflops else None


def _how_to_get_mfu(known: Known, flops_per_s: float | None) -> str:
    if known.card is None:
        return _('MFU needs the card: add --gpu "RTX 4070" or another name that `onecard gpus` knows')
    if flops_per_s is None:
        return _("MFU needs the model's shape: add --config FILE, or the head of the log")
    return _("MFU is left out: {card} has no peak for this dtype").format(card=known.card.name)


def _horizon(log: Log, known: Known, tokens_per_step: int | None) -> tuple[int, int]:
    """(how many steps in all, how many are left)."""
    last = known.max_iters
    if known.tokens is not None:
        if tokens_per_step is None:
            raise UserError(
                _("a horizon in tokens needs the tokens of an iteration"),
                _("the log does not tell them"),
                _("add --batch-size, --block-size and --gradient-accumulation-steps, or use --max-iters"),
            )
        last = -(-known.tokens // tokens_per_step)
    if last is None:
        last = log.facts.get("last_step") or _setting(log, known, "max_iters")
    if last is None:
        raise UserError(
            _("this log does not say how long the run is"),
            _("neither a total of steps nor max_iters is in it"),
            _("add --max-iters 6000, --tokens 3.2B or --config FILE"),
        )
    seen = log.steps[-1].number
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
    interval = _setting(log, known, "eval_interval") or _seen_interval(log)
    taken = _evaluation_seconds(log, known, step_ms, tokens_per_s)
    if interval is None and log.format in EVALUATION_TOKENS:
        interval = EVALUATION_EVERY
        if log.evaluations:
            notes.append(_("evaluations are taken to come every 250 steps, nanochat's default"))
        else:
            taken = Range(0.0, 0.0, taken.high)
            notes.append(_("no evaluation is in the log: nanochat's usual ones are in the upper bound alone"))
    if interval is None:
        notes.append(_("evaluations are not counted: fewer than two are in the log (--config FILE tells)"))
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


def _evaluation_seconds(log: Log, known: Known, step_ms: Range, tokens_per_s: float | None) -> Range:
    """Seen in the log where it shows; else computed: a forward pass is a third of a step's work."""
    extra = [(s.number, (s.ms - step_ms.mid) / 1000) for s in log.steps if _inflated(s, log, known)]
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
        blocks = _setting(log, known, "eval_iters")
        micros = _setting(log, known, "gradient_accumulation_steps")
        if blocks and micros:
            computed = 2 * blocks / micros * step_ms.mid / 3000
    if computed is None:
        return Range(0.0, 0.0, bound if math.isfinite(bound) and bound > 0 else 0.0)
    mid = min(computed, bound) if bound > 0 else computed
    return Range(mid, 0.5 * mid, max(mid, min(1.5 * computed, bound)))
