"""When a run will be done, from the first lines of its log.

What evaluations take is added again for those still to come. Where the log has no step yet that shows the
pace, plan's figure for the trainer stands in.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.language import _
from onecard.report.eta.evaluations import evaluations_left
from onecard.report.eta.mfu import cards_by_mfu, disagreement, explain, flops_by_log, peak_of, shown
from onecard.report.eta.pace import NOTHING, Range, steady, step_range, timed
from onecard.report.eta.predicted import Prediction, predicted
from onecard.report.gathering.gather import is_of_cpu
from onecard.report.gathering.known import NANOCHAT_2025, NANOCHATS, ONECARD
from onecard.report.log import Log, Start, Steps
from onecard.report.run_facts import RunFacts

LARGEST_FLOPS_PER_TOKEN = 3e10  # of 5B parameters; the largest nanochat there has been has 2.2B


@dataclass(frozen=True)
class Eta:
    facts: RunFacts
    step_ms: Range
    steps_used: int
    tokens_per_step: int | None
    tokens_per_s: float | None
    flops_per_s: float | None  # of all cards together
    peak_flops: float | None  # of one card
    mfu: float | None
    log_mfu: float | None
    mfu_explanation: str
    steps_left: int
    evaluations_left: int
    evaluation_s: Range
    remaining_s: Range | None
    notes: tuple[str, ...]
    prediction: Prediction | None = None  # where the log's own steps do not show the pace

    @property
    def log(self) -> Log:
        return self.facts.log

    @property
    def card(self) -> Card | None:
        return self.facts.card

    @property
    def last_step(self) -> int | None:
        """How long the run is: a nanochat log's total, max_iters of the others; None: unsaid."""
        return self.facts.last_step

    @property
    def last_seen(self) -> int:
        """The last step of which there is a line."""
        return _seen(self.facts)

    @property
    def all_peak(self) -> float:
        """FLOPs per second of all cards at best."""
        return (self.peak_flops or 0.0) * self.facts.cards

    @property
    def floor_ms(self) -> float | None:
        """What a step takes at least: its FLOPs at the cards' peak."""
        if self.prediction is not None:
            return self.prediction.floor_ms
        if not self.tokens_per_step or not self.flops_per_s or not self.tokens_per_s or not self.all_peak:
            return None
        return 1000 * self.tokens_per_step * self.flops_per_s / self.tokens_per_s / self.all_peak

    @property
    def floor_flops(self) -> float:
        """Of a step."""
        return (self.floor_ms or 0.0) / 1000 * self.all_peak

    @property
    def loss(self) -> float | None:
        loss = next((loss for loss in reversed(self.log.last.steps.loss) if not math.isnan(loss)), math.inf)
        return loss if math.isfinite(loss) else None


@dataclass(frozen=True)
class _Speed:
    tokens_per_step: int | None
    tokens_per_s: float | None
    flops_per_s: float | None


def estimate(facts: RunFacts) -> Eta:
    """The run's speed, true MFU and remaining time; UserError where something needed is missing."""
    notes = list(facts.notes)
    start, used = _shown_pace(facts, notes)
    prediction = None
    if len(used):
        step_ms = step_range(used.ms)
        facts, speed = _speed(facts, step_ms.mid, notes)
    else:
        prediction = predicted(facts, timed(facts.log.last, facts.tokens_per_step))
        if prediction is None:
            raise _only_first(facts)
        step_ms = prediction.step_ms
        notes += prediction.notes
        speed = _Speed(facts.tokens_per_step, prediction.tokens_per_s, prediction.flops_per_s)
    steps_left = _steps_left(facts)
    count, evaluation, remaining = 0, NOTHING, None
    if facts.last_step is not None:
        count, evaluation = evaluations_left(facts, start, step_ms, speed.tokens_per_s, _seen(facts), notes)
        remaining = step_ms.times(steps_left / 1000) + evaluation.times(count)
    peak, without = peak_of(facts)
    mfu = speed.flops_per_s / (peak * facts.cards) if speed.flops_per_s and peak else None
    if mfu is None and facts.log.format == ONECARD:
        mfu = statistics.median(shown(used)) if shown(used) else None
    if mfu is None:
        notes.append(_how_to_get_mfu(facts, speed.flops_per_s))
    elif without:
        notes.append(without)
    last = facts.log.last.steps
    if len(last) and math.isinf(last.loss[-1]):
        notes.append(_("the last loss is no number: the run has diverged"))
    log_mfu = next((mfu for mfu in reversed(last.mfu) if not math.isnan(mfu)), None)
    return Eta(
        facts=facts,
        step_ms=step_ms,
        steps_used=len(used),
        tokens_per_step=speed.tokens_per_step,
        tokens_per_s=speed.tokens_per_s,
        flops_per_s=speed.flops_per_s,
        peak_flops=peak,
        mfu=mfu,
        log_mfu=log_mfu,
        mfu_explanation=explain(facts, log_mfu, mfu, peak),
        steps_left=steps_left,
        evaluations_left=count,
        evaluation_s=evaluation,
        remaining_s=remaining,
        notes=tuple(notes),
        prediction=prediction,
    )


def _shown_pace(facts: RunFacts, notes: list[str]) -> tuple[Start, Steps]:
    """The newest start that shows the run's pace, and its steady steps: none of them where only first
    iterations are in the log."""
    newest = facts.log.last
    for start in reversed(facts.log.starts or (newest,)):
        used = steady(facts, start)
        if len(used):
            if start is not newest:
                text = _(
                    "of the newest start only the first iteration is in the log (step {step:,}): the pace is "
                    "that of the start before it"
                )
                notes.append(
                    text.format(step=int(newest.steps.step[-1]) if len(newest.steps) else facts.step)
                )
            return start, used
    steps = timed(newest, facts.tokens_per_step)
    if len(steps) > 1:
        raise UserError(
            _("every line of this log has an evaluation in its time"),
            _("nanoGPT shows a step together with the evaluation before it, and here it shows no others"),
            _("log more often than you evaluate: --log_interval=1"),
            exit_code=1,
        )
    return newest, steps.part(0, 0)


def _only_first(facts: RunFacts) -> UserError:
    """A refusal that says what would help: without the model's sizes and the card nothing can be computed."""
    needed = {
        "--config FILE": facts.tokens_per_step is None or (facts.shape is None and facts.parameters is None),
        '--gpu "RTX 4070"': facts.card is None,
    }
    hint = _("let it run to iteration 10 or so, and ask again")
    if missing := [flag for flag, lacks in needed.items() if lacks]:
        hint = _("with {flags} it is estimated now; or let it run to iteration 10 or so, and ask again")
        hint = hint.format(flags=", ".join(missing))
    steps = timed(facts.log.last, facts.tokens_per_step)
    if not len(steps):
        return UserError(_("no time of any step is in this log"), hint=hint, exit_code=1)
    why = _(
        "its {seconds:.1f} s say nothing about the others: compilation, tuning, CUDA's start and the first "
        "data are in it, and with nanoGPT a whole evaluation"
    )
    what = _("only the first iteration is in this log")
    if steps.step[0]:
        what = _("only the first iteration after a resume is in this log (step {step:,})")
    return UserError(
        what.format(step=int(steps.step[0])), why.format(seconds=steps.ms[0] / 1000), hint, exit_code=1
    )


def _speed(facts: RunFacts, step_ms: float, notes: list[str]) -> tuple[RunFacts, _Speed]:
    """Tokens per step and per second, and FLOPs per second, as far as log and reader say them; and the facts
    with the number of cards that these figures show."""
    tokens_per_step, of_a_token = facts.tokens_per_step, facts.flops_per_token
    by_log = flops_by_log(facts, step_ms)
    all_by_log = by_log * facts.cards if by_log else None
    if tokens_per_step and of_a_token is None and all_by_log and facts.log.format == NANOCHAT_2025:
        # Without a head nothing but the log's own figures tell whether they count whole steps.
        implied = all_by_log / (tokens_per_step / step_ms * 1000)
        if implied > LARGEST_FLOPS_PER_TOKEN:
            notes[:] = [
                _(
                    "the log's tok/sec and its MFU together would be a model of {n:.0f}B parameters: its "
                    "tok/sec is of one micro-batch, as nanochat's was until 2025-10-26"
                ).format(n=implied / 6e9)
            ]
            tokens_per_step = None
    tokens_per_s = tokens_per_step / step_ms * 1000 if tokens_per_step else None
    if tokens_per_s is None and of_a_token and all_by_log:
        tokens_per_s = all_by_log / of_a_token
    flops_per_s = all_by_log
    if of_a_token and tokens_per_s:
        flops_per_s = of_a_token * tokens_per_s
        if by_log and (many := cards_by_mfu(facts, flops_per_s, by_log)):
            facts = replace(facts, cards=many, origin={**facts.origin, "cards": "log"})
            text = _(
                "the log's own MFU is that of one of {n} cards: the run is taken to be on {n} (--gpus N says "
                "it otherwise)"
            )
            notes.append(text.format(n=many))
        elif all_by_log and (note := disagreement(facts, flops_per_s, all_by_log)):
            notes.append(note)
    if tokens_per_s is None:
        notes.append(
            _(
                "tokens/s need the tokens of an iteration: add --batch-size, --block-size and "
                "--gradient-accumulation-steps, or --config FILE"
            )
        )
    return facts, _Speed(tokens_per_step, tokens_per_s, flops_per_s)


def _how_to_get_mfu(facts: RunFacts, flops_per_s: float | None) -> str:
    if is_of_cpu(facts.log):
        return _("the run is on a CPU, whose peak nobody states: no MFU")
    if facts.card is None:
        return _('MFU needs the card: add --gpu "RTX 4070" or another name that `onecard gpus` knows')
    if flops_per_s is None:
        return _("MFU needs the model's shape: add --config FILE, or the head of the log")
    return _("MFU is left out: {card} has no peak for this dtype").format(card=facts.card.name)


def _steps_left(facts: RunFacts) -> int:
    last, seen = facts.last_step, _seen(facts)
    if last is None:
        return 0
    if seen > last and facts.origin.get("last_step") == "flag":
        raise UserError(
            _(
                "the log is past that end: its last line is of step {seen:,}, and {last:,} would be the last"
            ).format(seen=seen, last=last),
            hint=_("--max-iters and --tokens are those of the whole run"),
            exit_code=1,
        )
    # Steps count from 0, and nanoGPT takes one more than max_iters; others count steps that are done.
    done = seen + 1 if facts.log.format in (*NANOCHATS, ONECARD) else seen
    return max(0, last - (done if len(facts.log.steps) or len(facts.log.evaluations) else 0))


def _seen(facts: RunFacts) -> int:
    """The last step of which there is a line."""
    steps = facts.log.last.steps
    return int(steps.step[-1]) if len(steps) else facts.step
