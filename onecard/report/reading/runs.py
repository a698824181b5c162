"""Rows put together to the starts of a run and its whole curve, in columns that stay within bounds.

A step that is smaller than the one before is another start's: the run was begun anew or went on from a
checkpoint. The same step again is the same line twice, or a line with other columns of that step.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from operator import lt
from typing import Any, TypeVar

from onecard.report.log import NOT_SAID, Columns, Evaluations, Start, Steps
from onecard.report.reading.lines import Row

# Rows of one start that are kept. Beyond that every second one is left out, but never the largest and
# smallest values of a stretch, nor the last rows.
MOST_ROWS = 200_000
MOST_ROWS_OF_ALL = 600_000
MOST_STARTS = 256
_STRETCH, _LAST = 512, 1024
_EXTREMES = ("loss", "grad_norm", "ms", "train", "val", "bpb")
_OF_A_STEP = ("ms", "mfu", "tokens_per_s", "grad_norm")

C = TypeVar("C", bound=Columns)


@dataclass
class OneStart:
    """One process's part of a log, while it is read."""

    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)
    evaluations: Evaluations = field(default_factory=Evaluations)
    evaluated: int = 0  # evaluations there were when the last step came

    def __len__(self) -> int:
        return len(self.steps) + len(self.evaluations)


class Runs:
    """Starts in the order of the log."""

    def __init__(self) -> None:
        self.starts: list[OneStart] = []
        self.rows = 0
        self._again = Evaluations()  # of steps that were evaluated before: of a start to come, or nothing new
        self._fresh = True  # does the next row begin a start?

    @property
    def is_fresh(self) -> bool:
        return self._fresh

    def begin(self) -> None:
        """A process starts: rows that follow are its own."""
        self._fresh = True

    def add(
        self, row: Row, settings: dict[str, Any], facts: dict[str, Any], *, evaluated: bool = False
    ) -> None:
        """`evaluated`: is it an evaluation even if only of the training text?"""
        self.rows += 1
        if evaluated or "val" in row or "bpb" in row:
            self._evaluation(row, settings, facts)
            if not any(name in row for name in _OF_A_STEP):
                return
        step = {name: row[name] for name in Steps.NAMES if name in row}
        if "train" in row and "loss" not in row:
            step["loss"] = row["train"]
        self._step(step, settings, facts)

    def add_many(
        self, columns: Mapping[str, list[float]], settings: dict[str, Any], facts: dict[str, Any]
    ) -> None:
        """Rows that all may have the same columns."""
        steps = columns["step"]
        if not self._goes_on(steps, facts):
            for index in range(len(steps)):
                row = {name: column[index] for name, column in columns.items()}
                self.add({name: v for name, v in row.items() if not math.isnan(v)}, settings, facts)
            return
        self.rows += len(steps)
        here, count = self.starts[-1], len(steps)
        evaluated = [False] * count
        for name in {"val", "bpb"} & set(columns):
            evaluated = [now or not math.isnan(v) for now, v in zip(evaluated, columns[name], strict=True)]
        if any(evaluated):
            rows = {
                name: list(compress(columns[name], evaluated))
                for name in columns
                if name in Evaluations.NAMES
            }
            if "loss" in columns:
                rows.setdefault("train", list(compress(columns["loss"], evaluated)))
            extend(here.evaluations, rows, sum(evaluated))
        trained = [not one for one in evaluated]
        for name in set(_OF_A_STEP) & set(columns) if any(evaluated) else ():
            trained = [now or not math.isnan(v) for now, v in zip(trained, columns[name], strict=True)]
        named = {name: list(compress(columns[name], trained)) for name in columns if name in Steps.NAMES}
        if "train" in columns:
            named.setdefault("loss", list(compress(columns["train"], trained)))
        extend(here.steps, named, sum(trained))
        here.evaluated = len(here.evaluations)

    def _goes_on(self, steps: list[float], facts: dict[str, Any]) -> bool:
        """Do these steps only follow each other and what is there?"""
        if self._fresh or not self.starts or len(self._again) or not all(map(lt, steps, steps[1:])):
            return False
        here = self.starts[-1]
        seen = [columns.step[-1] for columns in (here.steps, here.evaluations) if len(columns)]
        return here.facts is facts and all(steps[0] > step for step in seen)

    def _new(self, settings: dict[str, Any], facts: dict[str, Any]) -> OneStart:
        self._fresh = False
        self.starts.append(OneStart(settings, facts))
        if len(self.starts) > MOST_STARTS:
            go_on(self.starts[0], self.starts.pop(1))
        many = len(self.starts) > 1 and len(self.starts[-2]) > MOST_ROWS_OF_ALL // MOST_STARTS
        if many and sum(map(len, self.starts)) > MOST_ROWS_OF_ALL:
            for start in self.starts:
                thin(start.steps)
                thin(start.evaluations)
        return self.starts[-1]

    def _here(self, settings: dict[str, Any], facts: dict[str, Any]) -> OneStart:
        return self._new(settings, facts) if self._fresh or not self.starts else self.starts[-1]

    def _step(self, row: Row, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        here = self._here(settings, facts)
        if len(here.steps) and row["step"] <= here.steps.step[-1]:
            if row["step"] == here.steps.step[-1]:
                _fill(here.steps, row)
                return
            before, here = here, self._new(settings, facts)
            _move_evaluations(before, here)
            if len(self._again) and self._again.step[0] <= row["step"]:
                extend(
                    here.evaluations,
                    {n: list(getattr(self._again, n)) for n in Evaluations.NAMES},
                    len(self._again),
                )
        if len(self._again):
            self._again = Evaluations()
        here.steps.append(**row)
        if len(here.steps) >= MOST_ROWS:
            thin(here.steps)
        here.evaluated = len(here.evaluations)

    def _evaluation(self, row: Row, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        here = self._here(settings, facts)
        values = {name: row[name] for name in Evaluations.NAMES if name in row}
        if "loss" in row:
            values.setdefault("train", row["loss"])
        done = here.evaluations
        if len(done) and values["step"] <= done.step[-1]:
            if len(here.steps) and (values["step"] < done.step[-1] or here.steps.step[-1] > values["step"]):
                again = self._again
                if len(again) and again.step[-1] == values["step"]:
                    _fill(again, values)
                elif len(again) < MOST_STARTS and (not len(again) or again.step[-1] < values["step"]):
                    again.append(**values)
                if values["step"] == done.step[-1]:
                    _fill(done, values)
                return
            if values["step"] == done.step[-1]:
                _fill(done, values)
                return
            here = self._new(settings, facts)
        here.evaluations.append(**values)
        if len(here.evaluations) >= MOST_ROWS:
            thin(here.evaluations)


def _fill(columns: Columns, row: Row) -> None:
    """What the last row does not say yet."""
    for name, value in row.items():
        column = getattr(columns, name)
        if math.isnan(column[-1]):
            column[-1] = value


def _move_evaluations(before: OneStart, here: OneStart) -> None:
    """Evaluations behind the last step of a start, and of steps it had passed, are the next one's."""
    done, last = before.evaluations, before.steps.step[-1]
    at = len(done)
    while at > before.evaluated and done.step[at - 1] < last:
        at -= 1
    here.evaluations = done.part(at, None)
    before.evaluations = done.part(None, at)


def extend(columns: Columns, more: Mapping[str, list[float]], count: int) -> None:
    """Appended, and thinned at the same places however many come at once."""
    begin = 0
    while begin < count:
        end = min(count, begin + MOST_ROWS - len(columns))
        for name in columns.NAMES:
            values = more.get(name)
            getattr(columns, name).extend(
                array("d", values[begin:end])
                if values is not None
                else array("d", [NOT_SAID]) * (end - begin)
            )
        begin = end
        if len(columns) >= MOST_ROWS:
            thin(columns)


def thin(columns: Columns) -> None:
    """Leaves out every second row, but neither extremes nor the last rows."""
    size = len(columns) - _LAST
    if size < _STRETCH:
        return
    keep = [place % 2 == 0 or place >= size for place in range(len(columns))]
    for name in _EXTREMES:
        column = getattr(columns, name, None)
        if column is None:
            continue
        for begin in range(0, size, _STRETCH):
            stretch = column[begin : min(begin + _STRETCH, size)]
            said = [value for value in stretch if not math.isnan(value)]
            if said:
                keep[begin + stretch.index(max(said))] = True
                keep[begin + stretch.index(min(said))] = True
    kept = columns.where(keep)
    for name in columns.NAMES:
        setattr(columns, name, getattr(kept, name))


def go_on(first: OneStart, then: OneStart) -> None:
    """`first` until where `then` goes on, and `then`."""
    begins = [columns.step[0] for columns in (then.steps, then.evaluations) if len(columns)]
    if len(then.steps):
        _continue(first.steps, then.steps, then.steps.step[0])
    if begins:
        _continue(first.evaluations, then.evaluations, min(begins))


def _continue(first: Columns, then: Columns, begin: float) -> None:
    at = bisect_left(first.step, begin)
    for name in first.NAMES:
        column = getattr(first, name)
        del column[at:]
        column.extend(getattr(then, name))
    if len(first) >= MOST_ROWS:
        thin(first)


def whole_curve(starts: list[OneStart]) -> Start:
    """Of all starts, each taken until the step where the next one goes on."""
    if len(starts) == 1:
        return Start(starts[0].steps, starts[0].evaluations)
    curve = OneStart()
    for start in starts:
        go_on(curve, start)
    return Start(curve.steps, curve.evaluations)
