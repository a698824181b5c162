"""Cures of an out-of-memory error: settings that plan says fit, in their trainer and here, and what does
not help.

A cure keeps the tokens of a step. None is shown that the memory model refuses; where it knows one, one
is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from onecard.arch.shapes import GPT2Shape
from onecard.config.run import RunConfig
from onecard.language import _
from onecard.plan.answer import question_of
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.others.bills import TRAINERS, bill_of_trainer
from onecard.plan.others.nanogpt_speed import nanogpt_step_time
from onecard.plan.others.trainer import TrainerBill
from onecard.plan.search import Choice, Question, chosen

# What a desktop, a browser and their changes take of a card: with less to spare a run that fits may still
# die.
COMFORT = GIB // 2
DESKTOP = GIB


@dataclass(frozen=True)
class Line:
    """One line of a config: `batch_size = 8   # was 16`."""

    name: str
    value: object
    was: object | None = None

    def __str__(self) -> str:
        value = repr(self.value) if isinstance(self.value, str) else str(self.value)
        return f"{self.name} = {value}" + (f"   # was {self.was}" if self.was is not None else "")


@dataclass(frozen=True)
class Cure:
    trainer: str  # nanogpt, nanochat, onecard
    lines: tuple[Line, ...]  # of the config; none: as it is
    bytes: int  # of the card, CUDA's own included
    spare: int  # bytes left
    tokens_per_s: float | None
    share: float | None  # of the speed of the config as it was meant
    quality: str = "same"  # same, exact, low-bit
    command: str = ""

    @property
    def is_comfortable(self) -> bool:
        return self.spare >= COMFORT


@dataclass(frozen=True)
class Folklore:
    """Something that is said to help, with what it does in figures."""

    advice: str  # as people write it: compile=False
    text: str
    bytes: int | None = None  # more (positive) or less memory
    share: float | None = None  # of the speed before


# What others call a micro-batch's sequences; they find the accumulation themselves, or it keeps its name.
_BATCH = {"nanochat": "device_batch_size", "huggingface": "per_device_train_batch_size"}


@dataclass(frozen=True)
class InTheirs:
    """Their own trainer on this card, asked setting by setting."""

    question: Question
    target: Target
    trainer: str = "nanogpt"
    _bills: dict[tuple[int, bool, str], TrainerBill] = field(default_factory=dict, compare=False, repr=False)

    @property
    def config(self) -> RunConfig:
        return self.question.config

    def bill(self, batch: int, *, compiled: bool, dtype: str | None = None) -> TrainerBill:
        key = (batch, compiled, dtype or self.question.dtype)
        if key not in self._bills:
            self._bills[key] = bill_of_trainer(
                self.trainer, self.question.shape, batch, dtype=key[2], compiled=compiled,
                dropout=self.config.dropout, gradient_accumulation_steps=self.accumulation(batch),
            )  # fmt: skip
        return self._bills[key]

    def accumulation(self, batch: int) -> int:
        return max(1, self.config.sequences_per_step // batch)

    def spare(self, bill: TrainerBill, reserve: int = 0) -> int:
        return self.target.allowed - reserve - CONTEXT - bill.most

    def runs(self, batch: int, *, compiled: bool, reserve: int = 0, dtype: str | None = None) -> bool:
        """Does it run at all, with so many bytes left to others?"""
        memory = self.target.allowed - reserve - CONTEXT
        bill = self.bill(batch, compiled=compiled, dtype=dtype)
        if not bill.confirmed:  # by any card: with as much to spare as it may be off
            return bill.most <= memory
        return bill.within(memory).ran_out is None

    def speed(self, batch: int, *, compiled: bool) -> float | None:
        question = self.question
        if question.rates is None or self.trainer != "nanogpt":
            return None  # of other trainers nobody has measured a speed
        assert isinstance(question.shape, GPT2Shape)
        step = nanogpt_step_time(
            question.shape, batch, question.config.sequences_per_step, question.rates, compiled=compiled,
            dtype=question.dtype,
        )  # fmt: skip
        return step.tokens_per_s

    def batches(self) -> list[int]:
        """Of a step's sequences, whole divisors from the config's own down."""
        most, asked = self.config.sequences_per_step, self.config.batch_size
        return [n for n in range(asked, 0, -1) if most % n == 0]


def in_theirs(config: RunConfig, target: Target, trainer: str = "nanogpt") -> InTheirs | None:
    """None where there is no bill of this trainer, or the model is not one that it trains."""
    question = question_of(config, target)
    if trainer not in TRAINERS or not isinstance(question.shape, TRAINERS[trainer].shapes):
        return None
    return InTheirs(question, target, trainer)


def cures_there(
    theirs: InTheirs, *, compiled: bool, can_compile: bool = True, reserve: int = 0
) -> list[Cure]:
    """Settings of their trainer that run: comfortable ones first, then the fastest; at most three."""
    found = list(_candidates(theirs, compiled, can_compile, reserve))
    found.sort(key=lambda cure: (not cure.is_comfortable, -(cure.tokens_per_s or 0), len(cure.lines)))
    best: list[Cure] = []
    for cure in found:
        # A slower one is only worth showing where it is the first that leaves room.
        if not best or (cure.is_comfortable and not any(c.is_comfortable for c in best)):
            best.append(cure)
    tight = next((c for c in found if not c.is_comfortable and c not in best), None)
    if tight is not None and best and (tight.tokens_per_s or 0) > 1.01 * (best[0].tokens_per_s or 0):
        best.append(tight)
    return best[:3]


def _candidates(theirs: InTheirs, compiled: bool, can_compile: bool, reserve: int) -> Iterator[Cure]:
    config = theirs.config
    meant = theirs.speed(config.batch_size, compiled=compiled)
    turns = (True, False) if can_compile else (False,)
    for turn in turns if theirs.trainer == "nanogpt" else (compiled,):
        comfortable = False
        for batch in theirs.batches():
            if comfortable:
                break  # a smaller batch is slower, and no safer than safe
            same = batch == config.batch_size and turn == compiled
            if not theirs.runs(batch, compiled=turn, reserve=reserve):
                continue
            bill = theirs.bill(batch, compiled=turn)
            speed = theirs.speed(batch, compiled=turn)
            spare = theirs.spare(bill, reserve)
            lines = _changes(theirs, batch, turn, compiled)
            if lines or same:
                yield Cure(
                    theirs.trainer, lines, bill.reserved + CONTEXT, spare, speed,
                    speed / meant if speed and meant else None,
                )  # fmt: skip
            comfortable = spare >= COMFORT


def _changes(theirs: InTheirs, batch: int, turn: bool, compiled: bool) -> tuple[Line, ...]:
    """Lines as their trainer has them."""
    config, lines = theirs.config, []
    if batch != config.batch_size:
        lines.append(Line(_BATCH.get(theirs.trainer, "batch_size"), batch, config.batch_size))
        if theirs.trainer != "nanochat":  # which keeps total_batch_size
            was = config.gradient_accumulation_steps
            lines.append(Line("gradient_accumulation_steps", theirs.accumulation(batch), was))
    if turn != compiled:
        lines.append(Line("compile", turn, compiled))
    return tuple(lines)


def cure_here(question: Question, command: str) -> Cure | None:
    """The setting that `onecard train` would run the same config in; None where it has none."""
    choice, _exact = chosen(question)
    if choice is None:
        return None
    setting = choice.setting
    quality = "exact" if setting.exact else "low-bit"
    lines = _here(choice)
    return Cure(
        "onecard", lines, choice.bill.process, -choice.short, choice.tokens_per_s or None, None,
        quality, command,
    )  # fmt: skip


def _here(choice: Choice) -> tuple[Line, ...]:
    config = choice.question.config
    if choice.setting.micro_batch == config.batch_size or choice.last_micro_batch:
        return ()
    accumulation = config.sequences_per_step // choice.setting.micro_batch
    return (
        Line("batch_size", choice.setting.micro_batch, config.batch_size),
        Line("gradient_accumulation_steps", accumulation, config.gradient_accumulation_steps),
    )


# --- what does not help ---------------------------------------------------------------------------


def folklore_of(theirs: InTheirs, *, compiled: bool, short: int | None, spare: int | None) -> list[Folklore]:
    """Advice that people get, computed for this config. `spare`: bytes reserved and not allocated, as shown;
    `short`: bytes that were missing for what was tried."""
    config = theirs.config
    batch = config.batch_size
    with_, without = (theirs.bill(batch, compiled=turn) for turn in (True, False))
    found = []
    fast, slow = theirs.speed(batch, compiled=True), theirs.speed(batch, compiled=False)
    more = without.reserved - with_.reserved
    if compiled and more > 0:
        text = _("compile=False: {gib:+.1f} GiB, not less").format(gib=more / GIB)
        share = slow / fast if fast and slow else None
        if share is not None:
            text = _("compile=False: {gib:+.1f} GiB, {percent:+.0f}% speed").format(
                gib=more / GIB, percent=100 * (share - 1)
            )
        found.append(Folklore("compile=False", text, more, share))
    if theirs.trainer == "nanogpt" and theirs.question.dtype in ("bfloat16", "float16"):
        found.append(
            Folklore(
                "dtype='float16'",
                _("float16 in place of bfloat16: 0 GiB; both have 16 bits, and float16 needs a gradient "
                  "scaler"),
                0, 1.0,
            )
        )  # fmt: skip
    if spare is not None and short is not None:
        found.append(_segments(spare, short))
    return found


def _segments(spare: int, short: int) -> Folklore:
    values = {"spare": spare / GIB, "short": short / GIB}
    if spare >= short:
        text = _(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help (Linux, WSL): {spare:.2f} GiB are "
            "reserved "
            "and not allocated, {short:.2f} GiB are short"
        )
    else:
        text = _(
            "expandable_segments:True cannot help: {spare:.2f} GiB are reserved and not allocated, "
            "{short:.2f} GiB "
            "are short"
        )
    return Folklore("expandable_segments:True", text.format(**values), -spare if spare >= short else 0)


def with_card_as_said(target: Target, capacity: int | None, others: int) -> Target:
    """The card as the message has it, with what others hold of it."""
    if capacity is None:
        return dataclasses.replace(target, allowed=target.allowed - others) if others else target
    return dataclasses.replace(target, capacity=capacity, allowed=min(target.allowed, capacity) - others)
