"""The steps of a log, column by column.

A log of 50 MB has a million of them: an object for each would take longer to make than its line to read, and
most questions (a median, a maximum) are about one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import overload


@dataclass(frozen=True)
class LoggedStep:
    """One line about a training step."""

    number: int
    ms: float
    loss: float | None = None
    mfu: float | None = None  # as the log says it, 1.0 for 100%
    tokens_per_s: float | None = None
    # nanoGPT's time of such a step includes the evaluation and the checkpoint.
    after_evaluation: bool = False


class Steps(Sequence[LoggedStep]):
    """As a sequence of LoggedStep, each made when it is asked for."""

    def __init__(self, steps: Iterable[LoggedStep] = ()) -> None:
        self.numbers: list[int] = []
        self.ms: list[float] = []
        self.losses: list[float | None] = []
        self.mfus: list[float | None] = []
        self.speeds: list[float | None] = []  # tokens a second
        self.after_evaluation: list[bool] = []
        for step in steps:
            self.append(step)

    def append(self, step: LoggedStep) -> None:
        self.numbers.append(step.number)
        self.ms.append(step.ms)
        self.losses.append(step.loss)
        self.mfus.append(step.mfu)
        self.speeds.append(step.tokens_per_s)
        self.after_evaluation.append(step.after_evaluation)

    def extend(self, more: Steps) -> None:
        self.numbers += more.numbers
        self.ms += more.ms
        self.losses += more.losses
        self.mfus += more.mfus
        self.speeds += more.speeds
        self.after_evaluation += more.after_evaluation

    def where(self, chosen: Sequence[bool]) -> Steps:
        """Those at whose place `chosen` is true."""
        if all(chosen):
            return self
        found = Steps()
        found.numbers = list(compress(self.numbers, chosen))
        found.ms = list(compress(self.ms, chosen))
        found.losses = list(compress(self.losses, chosen))
        found.mfus = list(compress(self.mfus, chosen))
        found.speeds = list(compress(self.speeds, chosen))
        found.after_evaluation = list(compress(self.after_evaluation, chosen))
        return found

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> LoggedStep: ...
    @overload
    def __getitem__(self, index: slice) -> Steps: ...
    def __getitem__(self, index: int | slice) -> LoggedStep | Steps:
        if isinstance(index, slice):
            found = Steps()
            found.numbers, found.ms, found.losses = self.numbers[index], self.ms[index], self.losses[index]
            found.mfus, found.speeds = self.mfus[index], self.speeds[index]
            found.after_evaluation = self.after_evaluation[index]
            return found
        return LoggedStep(
            self.numbers[index], self.ms[index], self.losses[index], self.mfus[index], self.speeds[index],
            self.after_evaluation[index],
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        """To any sequence of the same steps."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"Steps({list(self)!r})"
