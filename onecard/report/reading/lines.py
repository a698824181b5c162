"""Rows in lines of names and numbers: `iter 200: loss 6.1234, time 4321.12ms, mfu 11.52%` and all its kin.

The text between a line's numbers is its shape; lines of one program have few. What the numbers of a shape are
is worked out once, by the names in it, and lines of a shape that comes often are read many at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from onecard.report.reading.formats import HUGGINGFACE, JSONL, KEY_VALUE, Format, format_of
from onecard.report.reading.names import column_of
from onecard.report.reading.numbers import NUMBERS, number

Row = dict[str, float]  # columns of a line by name; "step" is one of them

_MOST_SHAPES = 512
_OFTEN = 6
_MOST_NUMBERS = 80
_LEAST_MS, _MOST_MS = 1e-3, 1e12
# -100% is nanoGPT's "not yet"; no card does a hundred times the peak of the one it is divided by.
_LEAST_MFU, _MOST_MFU = -1.0, 100.0
_MOST_STEP = 1e12
COUNTS = ("step", "last", "micro", "tokens", "tokens_per_s", "ms")

_UNIT_BEHIND = re.compile(r"^(?:ms|secs?|s|min|m|h|%|[kKMBGT]i?B?|tok/s|it/s|s/it|x|z)(?=[\s,;|)\]}/]|$)")
_TAIL = re.compile(r"[,;|(){}\[\]\t]|\s{3,}| - | / ")
_UNIT = re.compile(r"\s?(%|(?:ms|secs?|s|[kKMBT])(?![A-Za-z]))")
_NESTED = re.compile(r"[\"'](\w{1,40})[\"']\s*:\s*\{\s*[\"']([\w/]{1,40})[\"']\s*:\s*[\"']?$")
_FACTORS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# Numbers whose names stand behind them.
_NAME_BEHIND = (
    (re.compile(r"\s*ms\s*(?:[|,;)]|$)"), "ms", 1.0),
    (re.compile(r"\s?%\s?(?:\w{2,5} )?MFU\b", re.IGNORECASE), "mfu", 0.01),
    (re.compile(r"\s*tok(?:ens)?/s(?:ec)?\b"), "tokens_per_s", 1.0),
)
# A number alone at the beginning of a line is a step if a loss follows.
_BARE_FRONT = re.compile(r"[\s>*#`\u2022\u00b7|(-]*")
_BARE_BEHIND = re.compile(r"\s*(?:[:|=>\u2192\u2013\u2014-]|(?:train|val|loss|valid|eval)\b)", re.IGNORECASE)
_LOSSES = ("loss", "train", "val", "bpb")
_OF_A_STEP = ("ms", "mfu", "tokens_per_s", "grad_norm")


@dataclass
class RowPlan:
    """Where the columns of a row stand among a line's numbers, and their factors."""

    columns: dict[str, tuple[int, float]] = field(default_factory=dict)
    bare: bool = False  # is its step a number without a name?
    unsure: tuple[int, ...] = ()  # numbers that are losses only if they have decimals

    def is_one(self, entry: Format) -> bool:
        """Does it say something about a step?"""
        has = self.columns
        if "step" not in has:
            return "val" in has or "epoch" in has or ("loss" in has and entry.name == HUGGINGFACE)
        if any(name in has for name in _LOSSES):
            return True
        return (entry.name != KEY_VALUE and "ms" in has) or (
            entry.name == JSONL and ("lr" in has or "tokens" in has)
        )


class Shape:
    """All lines with the same text between their numbers."""

    def __init__(self, gaps: tuple[str, ...]) -> None:
        self.gaps = gaps
        skeleton = " ".join("0".join(gaps).split())
        self.format = format_of(skeleton)
        self.plans = tuple(plan for plan in _plans(gaps, self.format) if plan.is_one(self.format))
        marks = self.format.whole_step
        self.is_whole_step = marks is None or marks in skeleton
        self.seen = 0
        self.decimals = -1  # of the last number, in the line before
        self._pattern: re.Pattern[str] | None = None

    @property
    def may_be_many(self) -> bool:
        """Can its lines be read many at a time?"""
        return self.seen >= _OFTEN and len(self.plans) == 1 and self.is_whole_step and self._is_plain

    @property
    def _is_plain(self) -> bool:
        (plan,) = self.plans
        return "step" in plan.columns and not plan.bare and not plan.unsure

    @property
    def pattern(self) -> re.Pattern[str]:
        """Finds whole lines of this shape; its groups are the numbers of `used`."""
        if self._pattern is None:
            plain = r"[-+]?[0-9]++(?:[,_][0-9]{3})*+(?![0-9_])(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]{1,3}(?!\w))?+"
            pieces = ["^", re.escape(self.gaps[0])]
            for index, gap in enumerate(self.gaps[1:]):
                pieces += [f"({plain})" if index in self.used else plain, re.escape(gap)]
            self._pattern = re.compile("".join([*pieces, "$"]), re.MULTILINE)
        return self._pattern

    @property
    def used(self) -> list[int]:
        return sorted({index for plan in self.plans for index, _ in plan.columns.values()})

    def rows(self, numbers: Sequence[str], *, cut: bool = False) -> list[Row]:
        """What these numbers say. `cut`: is the line the text's last, which may end in the middle of one?"""
        last = len(numbers) - 1
        lost = cut and not self.gaps[-1].strip(".,+-eE") and not self._is_as_long(numbers)
        self.decimals = decimals(numbers[-1])
        rows = []
        for plan in self.plans:
            if any(decimals(numbers[index]) <= 0 for index in plan.unsure):
                continue
            row = {
                name: value
                for name, (index, factor) in plan.columns.items()
                if not (lost and index == last)
                and (value := value_of(name, numbers[index], factor)) is not None
            }
            # Of an evaluation of which a part is lost, the other part would look like a step.
            lacks = (cut and "train" in row and "val" not in row) or (
                "val" in plan.columns and "val" not in row
            )
            if not lacks and ("step" in row or "step" not in plan.columns):
                rows.append(row)
        return rows

    def without_beginning(self, row: Row) -> Row:
        """A row without what stands in front of its step: in a text's first line it may be another step's."""
        columns = self.plans[0].columns
        step = columns.get("step", (0, 1.0))[0]
        return {name: value for name, value in row.items() if columns.get(name, (step, 1.0))[0] >= step}

    def _is_as_long(self, numbers: Sequence[str]) -> bool:
        """Is the last number a loss with as many decimals as its like?"""
        if "{" in self.gaps[0] or "e" in numbers[-1].lower():
            return False  # decimals vary there
        mine = decimals(numbers[-1])
        losses = {
            index for plan in self.plans for name, (index, _f) in plan.columns.items() if name in _LOSSES
        }
        others = {decimals(numbers[index]) for index in losses if index != len(numbers) - 1}
        known = {self.decimals} if self.decimals >= 0 else others
        return not self.gaps[-1] and mine > 0 and len(numbers) - 1 in losses and mine in known

    def many(self, parts: list[list[str]]) -> dict[str, list[float]] | None:
        """Columns of many lines at once, by the groups of `pattern`; None where one of them is odd."""
        (plan,) = self.plans
        place = {index: n for n, index in enumerate(self.used)}
        columns: dict[str, list[float]] = {}
        for name, (index, factor) in plan.columns.items():
            texts = parts[place[index]]
            try:
                values = list(map(float, texts))
            except ValueError:
                read = [number(text, thousands=name in COUNTS) for text in texts]
                values = [math.nan if value is None else value for value in read]
            if not _all_sound(name, values, factor):
                return None
            columns[name] = values if factor == 1.0 else [value * factor for value in values]
        return columns


def value_of(name: str, text: str, factor: float = 1.0) -> float | None:
    """The number as this column has it; None for what no run can have shown."""
    value = number(text, thousands=name in COUNTS)
    if value is None:
        return None
    value *= factor
    if name in ("loss", "train", "val", "bpb", "grad_norm"):
        return value if math.isfinite(value) else math.inf
    if not math.isfinite(value):
        return None
    if name in ("step", "last", "micro"):
        if "e" in text or "E" in text:
            return None
        return value if 0 <= value <= _MOST_STEP and value.is_integer() else None
    if name == "ms":
        return value if _LEAST_MS <= value < _MOST_MS else None
    if name == "mfu":
        return value if _LEAST_MFU <= value <= _MOST_MFU else None
    return value if value or name != "tokens_per_s" else None


def _all_sound(name: str, values: list[float], factor: float) -> bool:
    low, high = min(values) * factor, max(values) * factor
    if name == "ms":
        return low >= _LEAST_MS and high < _MOST_MS
    if name == "mfu":
        return low >= _LEAST_MFU and high <= _MOST_MFU
    if name in ("step", "last", "micro"):
        return low >= 0 and high <= _MOST_STEP and all(map(float.is_integer, values))
    return math.isfinite(low) and math.isfinite(high) and (low != 0 or name != "tokens_per_s")


def decimals(text: str) -> int:
    """Digits behind the point; -1 without one."""
    digits = re.split("[eE]", text)[0].replace(",", ".")
    return len(digits.rpartition(".")[2]) if "." in digits else -1


class Shapes:
    """Those met so far."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Shape] = {}

    def of(self, line: str) -> tuple[Shape, list[str]] | None:
        """The shape of a line and the line's numbers; None where no row is in it."""
        parts = NUMBERS.split(line)
        if not 3 <= len(parts) <= 2 * _MOST_NUMBERS:
            return None
        gaps = tuple(parts[::2])
        shape = self._known.get(gaps)
        if shape is None:
            if len(self._known) >= _MOST_SHAPES:
                self._known = {key: kept for key, kept in self._known.items() if kept.seen >= _OFTEN}
                if len(self._known) >= _MOST_SHAPES:
                    self._known.clear()
            shape = self._known[gaps] = Shape(gaps)
        shape.seen += 1
        return (shape, parts[1::2]) if shape.plans else None

    def most_frequent(self) -> Shape | None:
        """Of those whose lines can be read many at a time."""
        many = [shape for shape in self._known.values() if shape.plans and shape.may_be_many]
        return max(many, key=lambda shape: shape.seen, default=None)


# --- what the numbers of a shape are ------------------------------------------------------------


def _plans(gaps: tuple[str, ...], entry: Format) -> list[RowPlan]:
    """Rows of a line: several where lines were glued together."""
    rows, plan = [], RowPlan()
    for index in range(len(gaps) - 1):
        name, factor = _meaning(gaps, index, entry)
        if name is None:
            if gaps[index].strip() == "/" and plan.columns.get("step", (-1, 0.0))[0] == index - 1:
                plan.columns["last"] = (index, 1.0)
            elif gaps[index].strip() == "(" and gaps[index + 1].startswith("%)") and "step" in plan.columns:
                plan.columns.setdefault("progress", (index, 0.01))
            continue
        if name == "step" and "step" in plan.columns:
            if not any(loss in plan.columns for loss in _LOSSES):
                continue
            rows.append(plan)
            plan = RowPlan()
        if name.endswith("?"):
            name = name[:-1]
            if name in plan.columns:
                continue
            plan.unsure = (*plan.unsure, index)
        if name in plan.columns and plan.columns[name][0] < plan.columns.get("step", (0, 0.0))[0]:
            del plan.columns[name]  # it was the end of a line that began before this text
        plan.columns.setdefault(name, (index, factor))
    rows.append(plan)
    first = rows[0]
    is_bare = _BARE_FRONT.fullmatch(gaps[0]) and _BARE_BEHIND.match(gaps[1])
    if is_bare and "step" not in first.columns and 0 not in {index for index, _ in first.columns.values()}:
        first.columns["step"], first.bare = (0, 1.0), True
    return rows


def _meaning(gaps: tuple[str, ...], index: int, entry: Format) -> tuple[str | None, float]:
    """(column, factor) of a number by the text around it."""
    before, behind = gaps[index], gaps[index + 1]
    if before.rstrip()[-1:] in "\u00d7*+" and before.strip():
        return None, 1.0  # a factor, and the word in front is the unit of the other one
    if index:
        before = _UNIT_BEHIND.sub("", before)
    before = before.replace("(ms)", " ms").replace("(s)", " s ")
    if nested := _NESTED.search(before):
        key = f"{nested[1]} {nested[2]}"
    else:
        key = _TAIL.split(before.rstrip(" :=\t"))[-1].strip(" :=\"'<>*`#~\u2248")
    if not key or not any(c.isalpha() for c in key):
        for pattern, behind_it, factor in _NAME_BEHIND if not key else ():
            if pattern.match(behind):
                return behind_it, factor
        return None, 1.0
    name = column_of(key[-80:])
    if entry.micro and key.split()[-1].lower() == entry.micro:
        name = "micro"
    if (name or "").rstrip("?") in entry.columns and not (name == "val" and "val time" in "".join(gaps)):
        name = entry.columns[str(name).rstrip("?")]
    unit = found[1] if (found := _UNIT.match(behind)) else ""
    if name in ("ms", "s"):
        if unit == "ms" or (name == "ms" and re.search(r"(?<![a-z])ms(?![a-z])", key.lower())):
            return "ms", 1.0
        return ("ms", 1000.0) if unit in ("s", "sec", "secs") or name == "s" else (None, 1.0)
    if name == "mfu":
        percent = unit == "%" or entry.percent or "perc" in key.lower() or "pct" in key.lower()
        return name, 0.01 if percent else 1.0
    if name in ("tokens", "tokens_per_s"):
        return name, _FACTORS.get(unit, 1.0)
    if name in _LOSSES and unit == "%":
        return None, 1.0
    return name, 1.0
