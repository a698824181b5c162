"""Logs as people paste them: nanoGPT's, nanochat's, onecard's own and Hugging Face's, read into one shape.

A log may carry colours, timestamps, progress bars, tracebacks, cut and wrapped lines: what is not
understood is passed over. One file may hold several starts of a run; the last that trained counts, for
the steps after a new start belong to another process with a warm-up of its own.

Lines just as their program wrote them are read many at a time (log_patterns.PLAIN_ITER, PLAIN_STEP); all
others one by one, and only by the patterns whose words are in them. Both ways give the same.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onecard.report.log_patterns import (
    BAR,
    BITS_PER_BYTE,
    EVALUATED,
    FACTS,
    HEAD_WORDS,
    ITER,
    ITER_BEGINS,
    PLAIN_ITER,
    PLAIN_STEP,
    SETTING,
    START,
    STEP,
    STEP_BEGINS,
    TRAINER,
    WANTED,
    number,
    setting,
)  # fmt: skip
from onecard.report.log_text import BLOCK, blocks
from onecard.report.steps import LoggedStep, Steps

NANOGPT, NANOCHAT, NANOCHAT_2025 = "nanogpt", "nanochat", "nanochat-2025"
ONECARD, HUGGINGFACE = "onecard", "huggingface"

_WRAPS = 3  # a line of nanochat's has 160 characters: two breaks in a narrow window, three in a tiny one
_LEAST_MS, _MOST_MS = 1e-3, 1e12
# -100% is nanoGPT's "not yet"; no card does a hundred times the peak of the one it is divided by.
_LEAST_MFU, _MOST_MFU = -1.0, 100.0
# What the groups of PLAIN_ITER and PLAIN_STEP are, by the names they have in ITER and STEP.
_OF_ITER = ("line", "step", "loss", "ms", "mfu", "speed")
_OF_STEP = ("line", "step", "last", "loss", "ms", "speed", "field", "mfu", "rest")


@dataclass(frozen=True)
class Log:
    """The last start that trained, and what its head says."""

    format: str
    steps: Steps
    evaluations: tuple[int, ...]
    settings: Mapping[str, int | float | str]  # nanoGPT's and nanochat's knobs, as far as printed
    facts: Mapping[str, Any]  # see FACTS
    starts: int = 1  # how often training began in this log

    @property
    def tokens_per_step(self) -> int | None:
        return self.facts.get("tokens_per_step")

    @property
    def is_of_cpu(self) -> bool:
        """As far as its head says."""
        return str(self.facts.get("device") or self.settings.get("device", "")).lower() == "cpu"

    @property
    def cards(self) -> int:
        """Cards the run is on: nanochat says what each takes of a micro-batch and what all take together."""
        mine, all_of_them = self.facts.get("tokens_of_one_card"), self.facts.get("tokens_of_all_cards")
        return max(1, round(all_of_them / mine)) if mine and all_of_them else 1


def read_log(text: str, block: int = BLOCK) -> Log | None:
    """What there is to know from these lines; None where no training line is among them."""
    reader = _Reader()
    for piece in blocks(text, block):
        reader.read(piece)
    reader.finish()
    return reader.log()


@dataclass
class _Start:
    """One process's part of the log."""

    steps: dict[str, Steps] = field(default_factory=dict)  # by kind of line
    evaluations: list[int] = field(default_factory=list)
    settings: dict[str, int | float | str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    of_onecard: bool = False


class _Reader:
    """Takes a log block by block."""

    def __init__(self) -> None:
        self._starts = [_Start()]
        self._bars: dict[int, dict[int, float]] = {}  # by their number of steps: a step's time
        self._trainer_loss: float | None = None
        self._waiting: list[str] = []  # the last lines, which may go on in the next block

    def read(self, block: str) -> None:
        if self._waiting:
            block = "\n".join([*self._waiting, block])
            self._waiting = []
        plain = PLAIN_STEP if "| dt: " in block else PLAIN_ITER
        width = plain.groups + 1
        # What stands between two plain lines, then the first one's groups, and so on.
        parts = plain.split(block)
        between = parts[::width]
        others = "".join(between)
        heads = any(word in others for word in HEAD_WORDS)
        begin = 0
        for index, text in enumerate(between[:-1]):
            if text == "\n" or (index and not heads and not self._may_matter(text)):
                continue
            self._many(plain, parts[begin * width + 1 : index * width])
            begin = index
            lines = (text[1:] if index else text).split("\n")
            if _may_have_loss(lines[-1].lower()):
                # Another line about a step may stand before this one: it is not plain after all.
                self._lines([*lines[:-1], lines[-1] + parts[index * width + 1]], heads)
                begin += 1
            elif len(lines) > 1:
                self._lines(lines[:-1], heads)
        self._many(plain, parts[begin * width + 1 : -1])
        if len(between) == 1 or between[-1]:
            lines = (between[-1][1:] if len(between) > 1 else block).split("\n")
            self._waiting = lines[self._lines(lines, heads, ends=False) :]

    def finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._lines(waiting, heads=True)

    # --- many lines at once -----------------------------------------------------------------------

    def _many(self, plain: re.Pattern[str], parts: list[str]) -> None:
        """Plain lines that follow each other, by what PLAIN_ITER and PLAIN_STEP capture."""
        kind, names = ("iter", _OF_ITER) if plain is PLAIN_ITER else ("step", _OF_STEP)
        column = {name: parts[place :: plain.groups + 1] for place, name in enumerate(names)}
        steps = Steps()
        steps.numbers = list(map(int, column["step"]))
        steps.ms = list(map(float, column["ms"]))
        steps.losses = list(map(float, column["loss"]))
        mfus = [percent / 100 for percent in map(float, column["mfu"])]
        believable = not mfus or (min(mfus) >= _LEAST_MFU and max(mfus) <= _MOST_MFU)
        steps.mfus = list(mfus) if believable else [_believable(mfu) for mfu in mfus]
        if any(column["speed"]):
            steps.speeds = [float(n.replace(",", "")) or None if n else None for n in column["speed"]]
        else:
            steps.speeds = [None] * len(steps)
        steps.after_evaluation = [False] * len(steps)
        at_once = len(steps) > 2 and self._only_go_on(steps)
        # The first one may be of another start, and what the last one says besides is what counts.
        for place in (0, len(steps) - 1) if at_once else range(len(steps)):
            if at_once and place:
                here = self._starts[-1]
                here.steps[kind].extend(steps[1:-1])
                here.of_onecard |= kind == "iter" and any(steps.speeds)
            self._add(kind, steps[place], {name: column[name][place] for name in names})

    def _only_go_on(self, steps: Steps) -> bool:
        """Are they steps of one start, with times that mean something and no evaluation before any?"""
        evaluations = self._starts[-1].evaluations
        return (
            all(map(operator.lt, steps.numbers, steps.numbers[1:]))
            and min(steps.ms) >= _LEAST_MS
            and max(steps.ms) < _MOST_MS
            and not (evaluations and evaluations[-1] in steps.numbers[1:])
        )

    def _may_matter(self, text: str) -> bool:
        """Is there anything in these lines, none of a head? Of bars, not once there are steps."""
        small = text.lower()
        return (
            _may_have_loss(small) or "step" in small or "bpb" in small or "=" in text
            or ("<" in text and not any(start.steps for start in self._starts[-2:]))
        )  # fmt: skip

    # --- one by one -------------------------------------------------------------------------------

    def _lines(self, lines: list[str], heads: bool, *, ends: bool = True) -> int:
        """How many were read: all, or while it does not end here, those that cannot go on behind the last.

        A line about a step that a narrow window wrapped or a copy cut is put together again.
        """
        index, last = 0, len(lines) if ends else len(lines) - _WRAPS
        while index < last:
            line = lines[index]
            index += 1
            small = line.lower()
            if not _may_have_loss(small) and "step" not in line:
                if heads or "=" in line or "<" in line or "bpb" in small:
                    self._line(line, small, heads)
                continue
            for begins, whole in ((ITER_BEGINS, ITER), (STEP_BEGINS, STEP)):
                if not begins.search(line):
                    continue
                for more in range(_WRAPS + 1):
                    piece = "".join(lines[index - 1 : index + more])
                    if more and (_begins(lines, index + more - 1) or len(piece) > 1000):
                        break
                    found = whole.search(piece)
                    if found and found["mfu"] is not None:
                        line, index = piece, index + more
                        break
                    if found and not whole.search(line):
                        line = piece  # what is there without its MFU is better than nothing
                break
            self._line(line, line.lower(), heads)
        return index

    def _line(self, line: str, small: str, heads: bool) -> None:
        """`heads`: may it be one of a log's head?"""
        here = self._starts[-1]
        has_loss = _may_have_loss(small)
        if has_loss and (found := ITER.search(line)):
            self._add("iter", _step_of(found), found)
        elif has_loss and (found := STEP.search(line)):
            self._add("step", _step_of(found), found)
        elif (has_loss or "bpb" in small) and (found := EVALUATED.search(line)):
            here.evaluations.append(int(found[1] or found[2]))
            here.of_onecard |= bool(here.steps.get("iter")) and bool(BITS_PER_BYTE.search(line))
        elif has_loss and (found := TRAINER.search(line)):
            self._trainer_loss = number(found[1])
        elif "<" in line and (found := BAR.search(line)):
            rate = float(found[3])
            if rate > 0:
                ms = 1000 * rate if found[4] == "s/it" else 1000 / rate
                self._bars.setdefault(int(found[2]), {})[int(found[1])] = ms
        else:
            if heads and START.search(line):
                if here.steps:
                    here = _Start()
                    self._starts.append(here)
                here.of_onecard |= "training tokens in " in line
            _read_head(line, here, heads)

    def _add(
        self, kind: str, step: LoggedStep | None, said: re.Match[str] | Mapping[str, str | None]
    ) -> None:
        here = self._starts[-1]
        if step is None or not _LEAST_MS <= step.ms < _MOST_MS:
            return
        earlier = here.steps.get(kind)
        if earlier and step.number == earlier.numbers[-1]:
            return  # the same line twice: two ranks, or a screen and a file in one
        if earlier and step.number < earlier.numbers[-1]:
            # Continued from a checkpoint, or begun anew: the head may be missing, what it said still holds.
            evaluations = [n for n in here.evaluations[-1:] if n == step.number]
            here = _Start({}, evaluations, dict(here.settings), dict(here.facts), here.of_onecard)
            self._starts.append(here)
        if kind == "step":
            if last := said["last"]:
                here.facts["last_step"] = int(last)
            if name := said["field"]:
                here.facts["mfu_field"] = name.lower()
                here.facts["has_epoch"] = "epoch:" in (said["rest"] or "")
        elif step.tokens_per_s is not None:
            here.of_onecard = True
        if here.evaluations and here.evaluations[-1] == step.number:
            step = replace(step, after_evaluation=True)
        here.steps.setdefault(kind, Steps()).append(step)

    # --- the answer -------------------------------------------------------------------------------

    def log(self) -> Log | None:
        trained = [start for start in self._starts if start.steps]
        if trained:
            return _log_of(trained[-1], len(trained))
        if self._trainer_loss is not None and self._bars:
            return _trainer_log(self._bars, self._trainer_loss)
        return None


def _may_have_loss(small: str) -> bool:
    """Is a loss in this text in small letters? Beyond ASCII another letter counts as an s too."""
    return "loss" in small or ("lo" in small and not small.isascii())


def _begins(lines: list[str], index: int) -> bool:
    """Is this no continuation, but a line of its own (or the end)?"""
    if index >= len(lines) or not lines[index].strip():
        return True
    return any(p.search(lines[index]) for p in (ITER_BEGINS, STEP_BEGINS, EVALUATED, START))


def _step_of(found: re.Match[str]) -> LoggedStep | None:
    ms, percent, loss = number(found["ms"]), number(found["mfu"]), number(found["loss"])
    if ms is None:
        return None
    mfu = _believable(percent / 100) if percent is not None else None
    speed = number(found["speed"])
    return LoggedStep(int(found["step"]), ms, loss, mfu, speed if speed and math.isfinite(speed) else None)


def _believable(mfu: float) -> float | None:
    """None for what no run can have shown: a damaged line must not become a card's speed."""
    return mfu if _LEAST_MFU <= mfu <= _MOST_MFU else None


def _read_head(line: str, here: _Start, heads: bool) -> None:
    if "=" in line and (found := SETTING.match(line)):
        if found[1] in WANTED:
            value = setting(found[2], here.settings)
            if value is not None:
                here.settings[found[1]] = value
        return
    for name, pattern, reader in FACTS if heads else ():
        if (match := pattern.search(line)) and (value := reader(match[1])) is not None:
            here.facts[name] = value


def _log_of(start: _Start, count: int) -> Log:
    kind = max(start.steps, key=lambda kind: len(start.steps[kind]))
    steps = start.steps[kind]
    if kind == "step":
        old = start.facts.get("mfu_field") == "mfu" and not start.facts.get("has_epoch")
        name = NANOCHAT_2025 if old else NANOCHAT
    else:
        # nanoGPT shows -100% at first and an MFU always; onecard never the one and not always the other.
        waited = any(mfu is not None and mfu < 0 for mfu in steps.mfus)
        without = all(mfu is None for mfu in steps.mfus) or (
            steps.numbers[0] == 0 and steps.mfus[0] is not None
        )
        name = ONECARD if not waited and (start.of_onecard or without) else NANOGPT
    return Log(name, steps, tuple(start.evaluations), start.settings, start.facts, count)


def _trainer_log(bars: Mapping[int, Mapping[int, float]], loss: float) -> Log:
    """The bar with the most steps is the training's; others are evaluations and downloads."""
    total = max(bars)
    steps = Steps()
    steps.numbers = sorted(bars[total])
    steps.ms = [bars[total][number] for number in steps.numbers]
    steps.losses = [*[None] * (len(steps) - 1), loss]
    steps.mfus, steps.speeds = [None] * len(steps), [None] * len(steps)
    steps.after_evaluation = [False] * len(steps)
    return Log(HUGGINGFACE, steps, (), {}, {"last_step": total})
