"""Plan's answer about one config on one card, as figures: show.py makes sentences of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from onecard.arch.records import RECORDS
from onecard.arch.shapes import GPT2_VOCABULARY, PRETRAINED
from onecard.config.dataset import data_facts
from onecard.config.resolve import resolve, setting_of
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.language import _
from onecard.plan.bill import CHECKPOINTS_AT_ONCE, checkpoint_bytes
from onecard.plan.cost import Cost, Training, cost_of, rounded
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.options import Options
from onecard.plan.rates import rates_of
from onecard.plan.scaling import (
    VOCABULARIES,
    LossRange,
    counted_parameters,
    effective_tokens,
    in_bits_per_byte,
    predicted_loss,
)
from onecard.plan.search import (
    AS_FAST,
    Choice,
    Question,
    by_kind,
    chosen,
    kind,
    low_bit_is_pinned,
    settings,
    stages,
)
from onecard.plan.texts import FITTED, Text, known_text

_ABOUT_AS_MUCH = 1.08  # memory of the card: nobody's run depends on less


@dataclass(frozen=True)
class Answer:
    question: Question
    target: Target
    options: Options
    given: Choice  # as the config has it
    choice: Choice | None  # the fastest that fits; None: nothing does
    nearest: Choice  # of all settings the one that is least short
    now: datetime

    @property
    def config(self) -> RunConfig:
        return self.question.config

    @property
    def fits(self) -> bool:
        """Would train run it? With auto_fit off it changes nothing, whatever else would fit."""
        return self.choice is not None if self.config.auto_fit else self.given.fits

    def cost(self, choice: Choice) -> Cost | None:
        return cost_of_choice(choice, self.target, self.options)

    def micro_batches(self, choice: Choice) -> int:
        """Micro-batches of a step; the last one may be smaller."""
        return -(-self.config.sequences_per_step // choice.setting.micro_batch)

    def checkpoint(self, choice: Choice) -> int:
        return checkpoint_of(choice)

    @property
    def data_bytes(self) -> int:
        """Tokens of one pass over the whole run, as prepare writes them."""
        return self.tokens * (2 if self.question.shape.vocab_size <= 2**16 else 4)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.config.max_iters * self.config.tokens_per_step

    @cached_property
    def data_tokens(self) -> int | None:
        """What there is to train on; None where the data is not there yet."""
        return data_facts(self.config.dataset).train_tokens

    @property
    def passes(self) -> float | None:
        """How often the run reads its data."""
        return self.tokens / self.data_tokens if self.data_tokens else None

    @property
    def text(self) -> Text | None:
        """What the run reads; None where the dataset's name does not say it."""
        return known_text(self.config.dataset)

    @property
    def loss(self) -> LossRange | None:
        """What such a run ends at on FineWeb, in bits per byte where the tokens are not GPT-2's. Text read
        again is worth less than fresh text.

        None where they are characters or bytes, of which nothing is known, where the text is known to be of
        another kind, or the model is not a new one.
        """
        shape = self.question.shape
        if self.config.init_from in PRETRAINED or not comparable(shape.vocab_size):
            return None
        if self.text is not None and not self.text.is_web:
            return None
        family = RECORDS[shape.arch].family
        worth = effective_tokens(self.tokens, self.data_tokens or math.inf)
        return for_vocabulary(
            predicted_loss(counted_parameters(shape), worth, family=family), shape.vocab_size
        )

    def alternatives(self) -> list[tuple[str, Choice]]:
        """The Pareto table: no row that another one beats.

        What is chosen stands for its kind, though another micro-batch may be a little faster; it stays, and
        so does what does not fit, which shows what is short.
        """
        mine = kind(self.choice.setting) if self.choice is not None else None
        rows = [
            (name, self.choice if self.choice is not None and name == mine else choice)
            for name, choice in by_kind(self.question)
        ]
        kept = list(rows)
        # One at a time, the most intricate first: what beats it has to be there still.
        for name, choice in reversed(rows):
            rivals = [other for _name, other in kept if other is not choice and other.fits]
            plain = name in ("exact", "low-bit")
            if name != mine and choice.fits and any(beats(other, choice, plain=plain) for other in rivals):
                kept.remove((name, choice))
        # Of what does not fit, the plain one and the one that needs least are enough.
        misses = [row for row in kept if not row[1].fits]
        kept_misses = {id(row) for row in (*misses[:2], *sorted(misses, key=lambda r: r[1].short)[:2])}
        return [row for row in kept if row[1].fits or id(row) in kept_misses]

    def stages(self) -> list[tuple[str, Choice]]:
        return stages(self.question, self.choice) if self.choice is not None else []

    def loss_to_json(self) -> dict[str, Any] | None:
        """With the text that it holds for, and the one that the run reads."""
        loss = self.loss
        if loss is None:
            return None
        return loss.to_json() | {"text": FITTED, "text_of_run": self.text.name if self.text else None}

    def host_to_json(self) -> dict[str, Any]:
        return {
            "allowed_gib": round(self.target.host / GIB, 3) if self.target.host is not None else None,
            "kept_for_system_gib": round(self.target.host_kept / GIB, 3),
            "assumed": self.target.host_assumed,
        }

    def to_json(self) -> dict[str, Any]:
        shown = self.choice or self.nearest
        step, cost = shown.step, self.cost(shown)
        rates = self.question.rates
        return {
            "fits": self.fits,
            "model": {
                "arch": self.question.shape.arch, "parameters": self.question.shape.parameters,
                "flops_per_token": self.question.shape.flops_per_token,
                "tokens_per_step": self.config.tokens_per_step, "max_iters": self.config.max_iters,
                "steps_done": self.options.steps_done,
            },
            "gpu": {
                "name": self.target.card.name, "capacity_gib": round(self.target.capacity / GIB, 3),
                "allowed_gib": round(self.target.allowed / GIB, 3), "dtype": self.question.dtype,
            },
            "host": self.host_to_json(),
            "settings": shown.setting.to_json() | {"gradient_accumulation_steps": self.micro_batches(shown)},
            "memory": shown.bill.to_json() | {
                "short_gib": round(max(0, shown.short) / GIB, 4),
                "host_short_gib": round(max(0, shown.host_short) / GIB, 4),
            },
            "as_given": brief("as given", self.given, None),
            "speed": {
                "tokens_per_s": round(step.tokens_per_s, 1) if step else None,
                **(shown.spread.to_json(step.tokens_per_s) if step and shown.spread else {}),
                "step_s": round(step.seconds, 4) if step else None,
                "mfu": round(step.mfu, 4) if step and step.mfu else None,
                "tflops": round(shown.tflops, 2) if step else None,
                "parts_s": {k: round(v, 4) for k, v in step.parts().items()} if step else None,
                "source": rates.source if rates else None,
                "calibrated": rates.calibrated if rates else None,
            },
            **(cost.to_json(self.now) if cost else {"time": None, "energy": None, "cost": None}),
            "disk": {
                "checkpoint_gb": round(self.checkpoint(shown) / 1e9, 3),
                "checkpoints_kept": CHECKPOINTS_AT_ONCE - 1, "checkpoints_at_once": CHECKPOINTS_AT_ONCE,
                "data_gb_one_pass": round(self.data_bytes / 1e9, 3),
                "data_tokens": self.data_tokens, "passes": round(self.passes, 2) if self.passes else None,
            },
            "loss": self.loss_to_json(),
            "alternatives": [brief(name, c, self.cost(c)) for name, c in self.alternatives()],
            "stages": [brief(name, c, None) for name, c in self.stages()],
        }  # fmt: skip


def beats(one: Choice, other: Choice, *, plain: bool = False) -> bool:
    """Does one leave no reason to run the other?

    Because it is as fast, within what can be distinguished, and no worse in memory of the card, in host
    memory and in exactness. Or because it is faster in about as much memory of the card, unless the other is
    a plain one.
    """
    if one.setting.exact < other.setting.exact:
        return False
    faster = one.tokens_per_s > other.tokens_per_s
    mine, theirs = ((c.bill.process, c.host_bytes, not c.setting.exact) for c in (one, other))
    if all(a <= b for a, b in zip(mine, theirs, strict=True)) and (faster or mine != theirs):
        return one.tokens_per_s >= AS_FAST * other.tokens_per_s
    smaller = one.bill.process < other.bill.process
    as_fast = faster or (smaller and one.tokens_per_s == other.tokens_per_s)
    return not plain and as_fast and one.bill.process < _ABOUT_AS_MUCH * other.bill.process


def brief(name: str, choice: Choice, cost: Cost | None) -> dict[str, Any]:
    return {
        "name": name,
        "fits": choice.fits,
        "settings": choice.setting.to_json(),
        "total_gib": round(choice.bill.process / GIB, 4),
        "host_gib": round(choice.host_bytes / GIB, 3),
        "short_gib": round(max(0, choice.short) / GIB, 4),
        "host_short_gib": round(max(0, choice.host_short) / GIB, 4),
        "tokens_per_s": round(choice.tokens_per_s, 1) if choice.step else None,
        "flags": choice.flags,
        "days": round(cost.days, 3) if cost else None,
        "kwh": rounded(cost.pc_kwh, 2) if cost else None,
        "amount": rounded(cost.amount, 2) if cost else None,
    }


def comparable(vocabulary: int) -> bool:
    """Are its tokens so long that a run sees as much text in as many of them as with GPT-2's?"""
    return VOCABULARIES[0] <= vocabulary <= VOCABULARIES[1]


def for_vocabulary(loss: LossRange, vocabulary: int) -> LossRange:
    """Nats a token say nothing where a token is another one."""
    same = GPT2_VOCABULARY <= vocabulary <= GPT2_VOCABULARY + 256
    return loss if same else in_bits_per_byte(loss)


def cost_of_choice(choice: Choice, target: Target, options: Options) -> Cost | None:
    """The whole run in this setting, or what is left of it; None where its speed is not known."""
    if choice.step is None:
        return None
    run = training_of(choice)
    left = max(run.config.max_iters - options.steps_done, 0)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, max_iters=left))
    return cost_of(run, target.card, options.prices(target.card))


def training_of(choice: Choice) -> Training:
    """The run as its time is counted."""
    assert choice.step is not None
    question = choice.question
    return Training(
        question.config, choice.step, checkpoint_of(choice), compiled=choice.setting.compile,
        kinds_of_layers=question.shape.layer_kinds,
    )  # fmt: skip


def checkpoint_of(choice: Choice) -> int:
    return checkpoint_bytes(choice.question.shape, choice.setting, choice.question.config.by_muon)


def question_of(config: RunConfig, target: Target) -> Question:
    card, resolved = target.card, resolve(config)
    config = resolved.config
    dtype = config.dtype or ("bfloat16" if card.bf16 is not None or card.fp16acc is None else "float16")
    rates = rates_of(card, dtype, target.measured)
    return Question(
        config, resolved.shape, dtype, rates, target.allowed, target.host, card.compute_capability,
        card.l2_bytes,
    )  # fmt: skip


def check_horizon(config: RunConfig) -> None:
    if config.max_iters < 1:
        raise UserError(
            _("this run has no steps to plan"),
            _("max_iters is {n}").format(n=config.max_iters),
            _("--max_iters=6000, or a horizon in tokens: --tokens=3.1B"),
        )


def answer(config: RunConfig, target: Target, options: Options, now: datetime) -> Answer:
    check_horizon(config)
    question = question_of(config, target)
    choice, exact = chosen(question)
    given = question.answer(setting_of(question.config, question.shape))
    if choice is None and not low_bit_is_pinned(question.config):
        exact += [question.answer(s) for s in settings(question.config, question.shape, low_bit=True)]
    return Answer(question, target, options, given, choice, _nearest(exact), now)


def _nearest(choices: list[Choice]) -> Choice:
    """The one that is least short of whatever is short."""
    return min(
        choices, key=lambda choice: (max(choice.short, 0) + max(choice.host_short, 0), choice.bill.process)
    )
