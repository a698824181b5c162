"""A run as its log has it: steps and evaluations in columns, and what its head says.

A log of 200 MB has millions of steps: an object for each would take longer to make than its line to read,
and most questions (a median, a maximum) are about one column. In a column NaN is "not said"; a loss or a norm
that the log shows as NaN or infinite is math.inf.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, ClassVar, Self

NOT_SAID = math.nan


class Columns:
    """Numbers in columns of equal length; `step` is the first."""

    NAMES: ClassVar[tuple[str, ...]] = ("step",)
    step: array[float]

    def __init__(self, **columns: Sequence[float]) -> None:
        """Columns that are not given are "not said"."""
        length = max((len(column) for column in columns.values()), default=0)
        assert set(columns) <= set(self.NAMES), columns
        for name in self.NAMES:
            column = array("d", columns.get(name, ()))
            assert len(column) in (0, length), name
            setattr(self, name, column if len(column) == length else array("d", [NOT_SAID]) * length)

    def append(self, **row: float) -> None:
        for name in self.NAMES:
            getattr(self, name).append(row.get(name, NOT_SAID))

    def where(self, chosen: Sequence[bool]) -> Self:
        """The rows at whose place `chosen` is true."""
        if all(chosen):
            return self
        return type(self)(**{name: array("d", compress(getattr(self, name), chosen)) for name in self.NAMES})

    def part(self, begin: int | None, end: int | None) -> Self:
        return type(self)(**{name: getattr(self, name)[begin:end] for name in self.NAMES})

    def pairs(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever the column says something."""
        return [
            (int(s), value)
            for s, value in zip(self.step, getattr(self, name), strict=True)
            if not math.isnan(value)
        ]

    def has(self, name: str) -> bool:
        """Does any row say it?"""
        return any(not math.isnan(value) for value in getattr(self, name))

    def __len__(self) -> int:
        return len(self.step)

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        return zip(*(getattr(self, name) for name in self.NAMES), strict=True)

    def __eq__(self, other: object) -> bool:
        """The same numbers, "not said" in the same places."""
        if type(other) is not type(self):
            return NotImplemented
        return all(
            a == b or (math.isnan(a) and math.isnan(b))
            for name in self.NAMES
            for a, b in zip(getattr(self, name), getattr(other, name), strict=False)
        ) and len(self) == len(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


class Steps(Columns):
    """Lines about training steps."""

    NAMES = ("step", "ms", "loss", "mfu", "tokens_per_s", "lr", "grad_norm", "tokens")
    ms: array[float]
    loss: array[float]  # of the training text
    mfu: array[float]  # as the log says it, 1.0 for 100%
    tokens_per_s: array[float]
    lr: array[float]
    grad_norm: array[float]
    tokens: array[float]  # seen since the run began


class Evaluations(Columns):
    """Evaluations, in nats a token; `bpb` is the validation loss in bits per byte."""

    NAMES = ("step", "train", "val", "bpb", "tokens", "lr")
    train: array[float]
    val: array[float]
    bpb: array[float]
    tokens: array[float]
    lr: array[float]


class Planned(Columns):
    """Rows without a loss, of steps still to come: the schedule."""

    NAMES = ("step", "tokens", "lr")
    tokens: array[float]
    lr: array[float]


@dataclass(frozen=True)
class Start:
    """One process's part of a log: from its first step on."""

    steps: Steps
    evaluations: Evaluations


@dataclass(frozen=True)
class Log:
    """All that a log says. `steps` and `evaluations` are the run's curve: all starts, each taken until the
    step where the next one goes on."""

    format: str  # a name of formats.py
    steps: Steps
    evaluations: Evaluations
    settings: Mapping[str, int | float | str] = field(
        default_factory=dict
    )  # knobs, as the trainer names them
    facts: Mapping[str, Any] = field(default_factory=dict)
    starts: tuple[Start, ...] = ()  # in the order of the log; the last one is the newest
    planned: Planned = field(default_factory=Planned)
    # Sentences that a reader may want: what was passed over, what was taken for what.
    remarks: tuple[str, ...] = ()
    # Of each setting and fact that stands in prose or in a command line: the words it was read from.
    evidence: Mapping[str, str] = field(default_factory=dict)

    @property
    def last(self) -> Start:
        """The newest start that trained: its pace is the run's."""
        return self.starts[-1] if self.starts else Start(self.steps, self.evaluations)
