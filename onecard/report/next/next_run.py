"""What a next step gains and takes: what all of them share. A gain is in nats of validation loss at the end,
as a range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, GPT2_VOCABULARY
from onecard.config.run import RunConfig
from onecard.language import _
from onecard.plan.options import Options
from onecard.plan.scaling import JOINT_LAW, LAW, MANY_EPOCHS
from onecard.report.findings import Forecast, ForecastPoint, Mistake, NextStep
from onecard.report.next.offers import (
    Price,
    by_nanogpt,
    by_onecard,
    config_of,
    measured_step_seconds,
    nanogpt_splits,
    price_of_hours,
)
from onecard.report.run_facts import RunFacts

NANOGPT, NANOCHAT, ONECARD = "nanogpt", "nanochat", "onecard"
_ANYBODYS = ("table", "csv", "jsonl", "key-value")  # formats of no trainer in particular
LONGER = 3  # times the steps
_LEAST_PACE, _MOST_PACE = 0.5, 3.0  # beyond these something else is wrong
UNSURE = 0.02  # nats, to both sides of a difference of the law


@dataclass(frozen=True)
class Run:
    """What the steps are made of."""

    facts: RunFacts
    trainer: str
    config: RunConfig | None
    options: Options
    loss: float | None  # the last of validation
    steps: int  # of the whole run
    mistakes: Sequence[Mistake]

    @property
    def tokens(self) -> int:
        return self.steps * (self.facts.tokens_per_step or 0)

    @property
    def passes_allow(self) -> float:
        """Times the run that its text is enough for, without being read too often."""
        there = self.facts.train_tokens
        return MANY_EPOCHS * there / self.tokens if there and self.tokens else float("inf")


def run_of(facts: RunFacts, mistakes: Sequence[Mistake], options: Options) -> Run:
    losses = facts.log.evaluations.pairs("val")
    steps = max(facts.last_step or 0, facts.step, 1)
    if facts.schedule is not None and facts.schedule.assumed and facts.log.format != ONECARD:
        steps = max(facts.step, 1)  # nobody means nanoGPT's default of 600,000
    return Run(
        facts,
        trainer_of(facts),
        config_of(facts),
        options,
        losses[-1][1] if losses else None,
        steps,
        mistakes,
    )


def trainer_of(facts: RunFacts) -> str:
    """Whose config lines and commands the reader knows; "" where it is none of these three."""
    name = facts.log.format
    for trainer in (NANOGPT, NANOCHAT, ONECARD):
        if name.startswith(trainer):
            return trainer
    if name not in _ANYBODYS:
        return ""
    # A table, prose or lines by key and value: the names of its settings say whose they are.
    by_settings = {"n_embd", "n_layer", "gradient_accumulation_steps", "out_dir"} & set(facts.log.settings)
    if by_settings or "nanogpt" in " ".join(facts.log.evidence.values()).lower():
        return NANOGPT
    return ""


def step_of(text: str, command: str, trainer: str, price: Price, **others: object) -> NextStep:
    return NextStep(text, command, trainer, hours=price.hours, kwh=price.kwh, cost=price.amount, **others)  # type: ignore[arg-type]


def own_trainer(run: Run) -> str:
    return "onecard" if run.trainer == ONECARD else "theirs"


def law_gain(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float] | None:
    """From (parameters, tokens) to others, by both forms of the law; None where nothing is gained."""
    gains = [law.loss(*before) - law.loss(*after) for law in (LAW, JOINT_LAW)]
    low, high = min(gains) - UNSURE, max(gains) + UNSURE
    return (max(low, 0.0), high) if high > UNSURE else None


def by_the_law() -> str:
    return _("the law fitted to published runs (docs/scaling.md)")


def forecast_gain(run: Run, point: ForecastPoint, of: str = "val") -> tuple[float, float] | None:
    """`of`: the losses that the forecast is of, of validation or of training."""
    loss = run.loss if of == "val" else _training_loss(run.facts)
    if loss is None or loss <= point.low:
        return None
    return max(loss - point.high, 0.0), loss - point.low


def _training_loss(facts: RunFacts) -> float | None:
    """The level of the last tenth: single steps scatter."""
    pairs = max((facts.log.steps.pairs("loss"), facts.log.evaluations.pairs("train")), key=len)
    tail = [loss for _step, loss in pairs[-max(1, min(100, len(pairs) // 10)) :] if math.isfinite(loss)]
    return math.fsum(tail) / len(tail) if tail else None


def further(run: Run, forecast: Forecast, steps: int) -> ForecastPoint | None:
    """The forecast's point of a longer run nearest this one."""
    points = [point for point in forecast.points if point.step > 1.2 * run.steps]
    return min(points, key=lambda point: abs(point.step - steps), default=None)


def hours_more(run: Run, steps: int) -> Price:
    """Of so many steps as the run has taken already."""
    seconds = measured_step_seconds(run.facts)
    if seconds is not None:
        return price_of_hours(seconds * steps / 3600, run.facts.card, run.options, run.facts.cards)
    if run.config is None or run.facts.card is None or run.facts.cards > 1:
        return Price()
    config = dataclasses.replace(run.config, max_iters=steps)
    by_trainer = by_nanogpt if run.trainer == NANOGPT else by_onecard
    offer = by_trainer(config, run.facts.card, run.options)
    return offer[1] if offer is not None else Price()


def times_longer(run: Run) -> float:
    return min(float(LONGER), run.passes_allow)


def gain_of_length(run: Run, steps: int) -> tuple[float, float] | None:
    if not run.tokens or run.facts.parameters is None:
        return None
    tokens = steps * (run.facts.tokens_per_step or 0)
    return law_gain((run.facts.parameters, run.tokens), (run.facts.parameters, tokens))


def round_steps(steps: float) -> int:
    """To two digits, as people write them."""
    return int(float(f"{steps:.2g}")) if steps >= 100 else max(1, int(steps))


def is_gpt2s(facts: RunFacts) -> bool:
    """Are the tokens GPT-2's, for all that is said?"""
    by_size = facts.vocab_size is None or GPT2_VOCABULARY <= facts.vocab_size <= GPT2_PADDED_VOCABULARY
    return facts.tokenizer == "gpt2" or (facts.tokenizer is None and by_size)


def pace(run: Run) -> float:
    """How many times as long this run's steps take as plan says of nanoGPT's: another model's may, too."""
    seconds, card = measured_step_seconds(run.facts), run.facts.card
    if seconds is None or card is None or run.config is None:
        return 1.0
    whole = dataclasses.replace(run.config, max_iters=1000)
    own = [price for split, price in nanogpt_splits(whole, card, run.options)
           if split.batch_size == run.config.batch_size]  # fmt: skip
    if not own or not own[0].hours or run.facts.compiled is False:
        return 1.0
    return min(max(seconds * 1000 / 3600 / own[0].hours, _LEAST_PACE), _MOST_PACE)
