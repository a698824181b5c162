"""Which setting: the fastest that fits, with tokens per step and what the user pinned left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from onecard.arch.layout import OFFLOAD, RECOMPUTE, Setting, default_chunk
from onecard.arch.shapes import Shape
from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.language import _
from onecard.plan.bill import Bill, bill_of, graph_bytes, host_lines
from onecard.plan.lines import total
from onecard.plan.ranges import Spread, spread_of
from onecard.plan.rates import ANY_CARD, Rates
from onecard.plan.speed import StepTime, step_time
from onecard.plan.update import update_bytes

LOW_BIT = ("bf16", "int8")
# Of another's speed: as fast, for all that is known. Compared with each other, settings of one model are
# predicted more surely than models are: 33 of GPT-2 124M that offload nothing with a deviation of 1.6%.
AS_FAST = 0.99
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Question:
    """One run on one card: what every setting is judged by."""

    config: RunConfig
    shape: Shape
    dtype: str
    rates: Rates | None  # None: how fast is not known
    allowed: int  # bytes the process may take of the card
    host_allowed: int | None  # bytes of host memory there are; None: not known
    compute_capability: tuple[int, int] | None
    l2_bytes: int | None = None  # of this very card, where it is known

    def answer(self, setting: Setting) -> Choice:
        return Choice(self, setting)


@dataclass(frozen=True)
class Choice:
    """One setting with its bill and its speed."""

    question: Question
    setting: Setting

    @cached_property
    def bill(self) -> Bill:
        q = self.question
        return bill_of(q.config, q.shape, self.setting, q.dtype, q.compute_capability, q.l2_bytes)

    @cached_property
    def step(self) -> StepTime | None:
        q = self.question
        if q.rates is None:
            return None
        setting = self.setting
        if setting.cuda_graphs is None and not self.has_room_to_capture:
            setting = dataclasses.replace(setting, cuda_graphs=False)
        config = q.config
        return step_time(
            q.shape, setting, q.dtype, q.rates, config.sequences_per_step, by_muon=config.by_muon,
            dropout=config.dropout,
        )  # fmt: skip

    @property
    def spread(self) -> Spread | None:
        """How far off the speed may be; None where it is not known."""
        if self.step is None or self.question.rates is None:
            return None
        calibrated = self.question.rates.calibrated
        return spread_of(self.step, self.question.shape, self.setting.micro_batch, calibrated=calibrated)

    @property
    def has_room_to_capture(self) -> bool:
        """For a graph on top of the bill, which has none where the trainer decides whether to capture one."""
        return self.capture_bytes <= -self.short

    @cached_property
    def capture_bytes(self) -> int:
        """Bytes of a graph, with what an update takes in passing: a graph keeps all its memory meanwhile."""
        q, setting = self.question, self.setting
        graph = graph_bytes(q.shape, setting, q.dtype, dropout=q.config.dropout, last=self.last_micro_batch)
        return graph + update_bytes(q.shape, setting, q.dtype, by_muon=q.config.by_muon)

    @property
    def fits(self) -> bool:
        return self.short <= 0 and self.host_short <= 0

    @property
    def short(self) -> int:
        """Bytes of the card that are missing."""
        return self.bill.process - self.question.allowed

    @property
    def host_short(self) -> int:
        q = self.question
        if q.host_allowed is None or not self.bill.host:
            return 0  # what any training takes of the host is not the setting's doing
        return self.host_bytes - q.host_allowed

    @property
    def last_micro_batch(self) -> int:
        """Sequences of a step's last one where it is smaller than the others, else none."""
        return self.question.config.sequences_per_step % self.setting.micro_batch

    @property
    def described(self) -> str:
        """The flags and what they cannot say, before a run and in the reader's language."""
        return " ".join(filter(None, (self.flags, f"({self.split})" if self.split else "")))

    @property
    def split(self) -> str:
        """How train divides a step that is no whole number of micro-batches; else empty."""
        if not self.last_micro_batch:
            return ""
        text = _("micro-batches of {n}, the last of {last}, which train makes by itself")
        return text.format(n=self.setting.micro_batch, last=self.last_micro_batch)

    @property
    def flags(self) -> str:
        """Those that put the same step into this setting, behind the user's own."""
        given = self.question.config
        same = given.batch_size == self.setting.micro_batch
        said = self.setting.words(None if same else given.sequences_per_step)
        usual = given.loss_chunk or default_chunk(self.question.shape.vocab_size)
        chunk = "" if self.setting.loss_chunk == usual else f"--loss_chunk={self.setting.loss_chunk}"
        return " ".join(filter(None, (said, chunk)))

    @property
    def host_bytes(self) -> int:
        """Host memory in all, where the setting uses it for what the card would hold."""
        return total(host_lines(self.bill)) if self.bill.host else 0

    @property
    def tokens_per_s(self) -> float:
        return self.step.tokens_per_s if self.step is not None else 0.0

    @property
    def tflops(self) -> float:
        """Effective: of the model's own work, which does not count what is computed again."""
        return self.tokens_per_s * self.question.shape.flops_per_token / 1e12


def pinned(config: RunConfig) -> dict[str, str]:
    """Knobs of a setting that the user has set himself."""
    names = ("recompute", "offload", "master_weights", "optim_states")
    return {n: getattr(config, n) for n in names if config.is_set(n) and getattr(config, n) is not None}


def low_bit_is_pinned(config: RunConfig) -> bool:
    """Has the user decided about bits himself?"""
    return bool({"master_weights", "optim_states"} & set(pinned(config)))


def micro_batches(config: RunConfig) -> list[int]:
    """The user's own and a handful of others, none larger than a step.

    Those that divide a step evenly, so that flags can say it; any, where hardly one does and the trainer may
    split it as it likes.
    """
    most = config.sequences_per_step
    sizes = {n for n in (*_MICRO_BATCHES, config.batch_size) if n <= most}
    even = {n for n in sizes if most % n == 0}
    return sorted(even if len(even) > 2 or not config.auto_fit else sizes)


def settings(config: RunConfig, shape: Shape, *, low_bit: bool = False) -> Iterator[Setting]:
    """Every setting that the user's own values leave open."""
    fixed = pinned(config)
    chunk = default_chunk(shape.vocab_size)
    chunks = [config.loss_chunk] if config.loss_chunk else [chunk, max(128, chunk // 8)]
    masters, states = LOW_BIT if low_bit else ("fp32", "fp32")
    for recompute in _open(fixed, "recompute", RECOMPUTE):
        for offload in _open(fixed, "offload", OFFLOAD):
            for micro_batch in micro_batches(config):
                for rows in chunks:
                    yield Setting(
                        micro_batch, rows, recompute, offload,
                        fixed.get("master_weights", masters), fixed.get("optim_states", states),
                        config.compile, config.cuda_graphs,
                    )  # fmt: skip


def _open(fixed: dict[str, str], name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    return (fixed[name],) if name in fixed else values


def fastest(choices: Iterable[Choice]) -> Choice | None:
    """The fastest of those that fit; where several are as fast within a hundredth, the plainest."""
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        return None
    best = max(choice.tokens_per_s for choice in fitting)
    near = [choice for choice in fitting if choice.tokens_per_s >= AS_FAST * best]
    return min(near, key=_plainness)


def _plainness(choice: Choice) -> tuple[int, int, bool, bool, int]:
    """Nothing offloaded, nothing computed twice, the user's own batch; then what needs least."""
    setting, config = choice.setting, choice.question.config
    usual = default_chunk(choice.question.shape.vocab_size)
    return (
        OFFLOAD.index(setting.offload), RECOMPUTE.index(setting.recompute),
        setting.micro_batch != config.batch_size, setting.loss_chunk != usual, choice.bill.process,
    )  # fmt: skip


def smallest(choices: Iterable[Choice]) -> Choice:
    return min(choices, key=lambda choice: (choice.bill.process, choice.bill.host))


def chosen(question: Question) -> tuple[Choice | None, list[Choice]]:
    """The setting to run in, and the exact ones looked at: plan shows it, train uses it.

    The config unchanged, where that fits and is as fast as anything; else the fastest exact setting
    that fits. Low-bit training is another training: only where nothing exact fits.
    """
    config, shape = question.config, question.shape
    exact = [question.answer(s) for s in settings(config, shape)]
    found = fastest(exact)
    if found is None and not low_bit_is_pinned(config):
        found = fastest(question.answer(s) for s in settings(config, shape, low_bit=True))
    given = question.answer(setting_of(config, shape))
    # Of a card that is not known, what is faster is not known either.
    known = question.rates is not None and question.rates is not ANY_CARD
    faster = found is not None and known and AS_FAST * found.tokens_per_s > given.tokens_per_s
    return given if given.fits and not (faster and config.auto_fit) else found, exact


def by_kind(question: Question) -> list[tuple[str, Choice]]:
    """The best of every kind, fitting or (if none does) the one that comes nearest: the table to compare."""
    rows: list[tuple[str, Choice]] = []
    config = question.config
    for low_bit in (False, True):
        if low_bit and low_bit_is_pinned(config):
            continue
        groups: dict[str, list[Choice]] = {}
        for setting in settings(config, question.shape, low_bit=low_bit):
            groups.setdefault(kind(setting), []).append(question.answer(setting))
        for name, choices in groups.items():
            rows.append((name, fastest(choices) or smallest(choices)))
    return rows


def kind(setting: Setting) -> str:
    parts = ["exact" if setting.exact else "low-bit"]
    if setting.recompute != "none":
        parts.append(f"recompute {setting.recompute}")
    if setting.offload != "none":
        parts.append(f"offload {setting.offload}")
    return ", ".join(parts)


def stages(question: Question, target: Choice) -> list[tuple[str, Choice]]:
    """Steps from the smallest setting to the fastest that fits: what to turn on again, in which order.

    Each stage changes one thing and is kept only if it fits and is no slower.
    """
    config, goal = question.config, target.setting
    # In the precision of the goal, some of which the user may have set himself.
    every = (
        dataclasses.replace(s, master_weights=goal.master_weights, optim_states=goal.optim_states)
        for s in settings(config, question.shape)
    )
    start = smallest([c for c in map(question.answer, every) if c.fits] or [target]).setting
    uncompiled = question.answer(dataclasses.replace(start, compile=False))
    if not config.is_set("compile") and uncompiled.fits:  # which may need more than the compiled
        start = uncompiled.setting
    found = [("start", question.answer(start))]
    moves: list[tuple[str, dict[str, object]]] = []
    if goal.compile and not start.compile:
        moves.append(("compile", {"compile": True}))
    if goal.offload != start.offload:
        name = "nothing offloaded" if goal.offload == "none" else f"offload {goal.offload}"
        moves.append((name, {"offload": goal.offload}))
    for size in [n for n in micro_batches(config) if start.micro_batch < n <= goal.micro_batch]:
        moves.append((f"micro-batch {size}", {"micro_batch": size}))
    if goal.recompute != start.recompute:
        name = "nothing computed twice" if goal.recompute == "none" else f"recompute {goal.recompute}"
        moves.append((name, {"recompute": goal.recompute}))
    if goal.loss_chunk != start.loss_chunk:
        moves.append((f"loss chunk {goal.loss_chunk:,}", {"loss_chunk": goal.loss_chunk}))
    for name, change in moves:
        choice = question.answer(dataclasses.replace(found[-1][1].setting, **change))  # type: ignore[arg-type]
        if choice.fits and choice.tokens_per_s >= AS_FAST * found[-1][1].tokens_per_s:
            found.append((name, choice))
    if found[-1][1].setting != goal:  # what was in the way of one move may be gone after another
        found.append(("the rest", target))
    return _worth_a_row(found)


def _worth_a_row(found: list[tuple[str, Choice]]) -> list[tuple[str, Choice]]:
    """All stages but micro-batches in a row that gain little; the last of them stays."""
    kept = found[:1]
    for at, (name, choice) in enumerate(found[1:], 1):
        last = at == len(found) - 1 or not found[at + 1][0].startswith("micro-batch")
        if not name.startswith("micro-batch") or last or choice.tokens_per_s > 1.1 * kept[-1][1].tokens_per_s:
            kept.append((name, choice))
    return kept
