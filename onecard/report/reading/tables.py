"""Tables as people and programs have them: CSV, TSV, markdown, aligned by spaces, and lists with slashes.

A header names a step and at least one column more; rows follow until a line that is none.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from onecard.report.reading.formats import CSV, TABLE
from onecard.report.reading.lines import Row, decimals, value_of
from onecard.report.reading.names import column_of, words
from onecard.report.reading.numbers import cell

_HEADER = re.compile(r"st[e]p|iter|paso|schritt|update", re.IGNORECASE)
_HEADERS_OTHER = re.compile(r"loss|rdida|verlust|val|train|entren|bpb|lr|rate|token", re.IGNORECASE)
_LONGEST_HEADER = 20_000
_RULE = re.compile(r"[\s|+:=_\u2500-\u257f-]*")
_WIDE, _NARROW = re.compile(r"\s{2,}|\t"), re.compile(r"\s+")
_COUNTS = ("step", "tokens", "tokens_per_s")
_MOST_CELLS = 400
_MOST_WORDS = 12
_LOSSES = ("loss", "train", "val", "bpb")
_UNIT_BEHIND = re.compile(r"[(\[]\s*(?:b|m|k|%|nats)\s*[)\]]\s*$", re.IGNORECASE)
_MARKS = re.compile(r"[*`\"']")
_UNITS = {"b": 1e9, "m": 1e6, "k": 1e3}


@dataclass
class Table:
    """A header that was met."""

    separator: str  # one of "|", "\t", ";", ",", "wide" (two spaces or more), "narrow"
    columns: dict[str, tuple[int, float]]  # by name: which cell, and its factor
    width: int
    lines_without_rows: int = 0
    decimals: int = -1  # of the last cell, in the row before
    several: bool = False  # are there losses of several runs, as in W&B's exports?
    is_left_out: bool = False

    @property
    def losses(self) -> set[str]:
        return set(_LOSSES) & set(self.columns)

    @property
    def format(self) -> str:
        return CSV if self.separator in ("\t", ";", ",") else TABLE

    def row(self, line: str, *, cut: bool = False) -> Row | None:
        """`cut`: is it the text's last line, whose last number may have lost its end?"""
        cells = split(line, self.separator, self.width)
        at = self.columns["step"][0]
        if cells is None or at >= len(cells) or (step := cell(cells[at], counts=True)) is None:
            return None
        if step < 0 or not float(step).is_integer() or step > 1e12:
            return None
        before, self.decimals = self.decimals, decimals(cells[-1].strip())
        if cut and (len(cells) < self.width or not _is_whole(cells[-1].strip(), before)):
            return None
        row: Row = {"step": step}
        for name, (index, factor) in self.columns.items():
            if name == "step" or index >= len(cells):
                continue
            value = cell(cells[index], counts=name in _COUNTS)
            if value is not None and (sound := value_of(name, repr(value), factor)) is not None:
                row[name] = sound
        return row

    def many(self, lines: Sequence[str]) -> dict[str, list[float]] | None:
        """Columns of many lines at once; None where one of them is not plain."""
        if self.separator not in ("\t", ",") or any("_" in line for line in lines):
            return None
        rows = [line.split(self.separator) for line in lines]
        width = len(rows[0])
        if any(len(row) != width for row in rows) or any(i >= width for i, _ in self.columns.values()):
            return None
        turned = list(zip(*rows, strict=True))
        found: dict[str, list[float]] = {}
        try:
            for name, (index, factor) in self.columns.items():
                texts = turned[index]
                if "" in texts:
                    values = [float(text) if text else math.nan for text in texts]
                else:
                    values = list(map(float, texts))
                    if not all(map(math.isfinite, values)):
                        return None
                if name in ("ms", "mfu", "tokens_per_s"):
                    said = [value_of(name, text, factor) if text else None for text in texts]
                    values = [math.nan if value is None else value for value in said]
                elif factor != 1.0:
                    values = [value * factor for value in values]
                found[name] = values
        except ValueError:
            return None
        steps = found["step"]
        if not all(0 <= step <= 1e12 and step.is_integer() for step in steps):
            return None
        return found


def _is_whole(text: str, decimals_before: int) -> bool:
    """Of the last cell of a text: is nothing of it lost?"""
    if text[-1:].isdigit():
        if "e" in text.lower():
            return False  # an exponent may have lost a digit
        return decimals(text) > 0 and decimals(text) == decimals_before
    return text[-1:] not in ".,+-"


def header(line: str) -> Table | None:
    """The table that this line begins."""
    if len(line) > _LONGEST_HEADER or not (_HEADER.search(line) and _HEADERS_OTHER.search(line)):
        return None
    for separator in ("|", "\t", ";", ",", "wide", "narrow"):
        cells = split(line, separator)
        if separator == "narrow" and cells is not None and len(cells) > _MOST_WORDS:
            continue
        if cells is None or len(cells) < 2 or not any(_name_of(text) == "step" for text in cells):
            continue
        columns = _columns(cells)
        if "step" in columns and len(columns) > 1 and (set(_LOSSES) | {"lr", "tokens"}) & set(columns):
            if separator == "narrow" and len(columns) < len(cells):
                continue  # a sentence with these words in it
            names = [_name_of(text) for text in cells if " - " in text]
            several = any(names.count(name) > 1 for name in set(names) & set(_LOSSES))
            return Table(separator, columns, len(cells), several=several)
    return None


def is_rule(line: str) -> bool:
    """Is it a line between a header and its rows, or an empty one?"""
    return _RULE.fullmatch(line) is not None


def _columns(cells: Sequence[str]) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    for index, text in enumerate(cells):
        if (name := _name_of(text)) is None:
            continue
        plain = _MARKS.sub("", text).strip()
        unit = match[1].lower() if (match := re.search(r"[(\[]\s*(\w+|%)\s*[)\]]\s*$", plain)) else ""
        if len(words(plain)) > 6:
            continue
        factor = _UNITS.get(unit, 1.0) if name == "tokens" else 1.0
        if name == "mfu" and ("%" in plain or "perc" in plain.lower() or "pct" in plain.lower()):
            factor = 0.01
        if name in ("ms", "s"):
            if name == "ms" and unit != "s" and not re.search(r"(?<![a-z])ms(?![a-z])", plain.lower()):
                continue
            name, factor = "ms", 1000.0 if name == "s" or unit == "s" else 1.0
        found.setdefault(name.rstrip("?"), (index, factor))
    return found


@lru_cache(maxsize=4096)
def _name_of(text: str) -> str | None:
    """What a header's cell names."""
    return (
        column_of(_UNIT_BEHIND.sub("", _MARKS.sub("", text).strip()), whole=True) if len(text) < 120 else None
    )


def split(line: str, separator: str, width: int = 0) -> list[str] | None:
    """A line's cells; None where it cannot be of such a table."""
    if separator == "|":
        return line.strip().strip("|").split("|") if "|" in line else None
    if separator in ("wide", "narrow"):
        cells = (_WIDE if separator == "wide" else _NARROW).split(line.strip())
        if width and len(cells) != width and separator == "wide":
            narrow = _NARROW.split(line.strip())
            cells = narrow if len(narrow) == width else cells
        return cells if len(cells) <= _MOST_CELLS else None
    if separator not in line:
        return None
    if '"' in line:
        try:
            return next(csv.reader([line], delimiter=separator), None)
        except csv.Error:
            return None
    return line.split(separator)


# --- lists with slashes -------------------------------------------------------------------------

_ITEM = r"[~\u2248]?[0-9]++(?:[.,][0-9]++)?k?"
_LIST = re.compile(rf"(?<![\w./,]){_ITEM}(?:\s?(?:/|\u2192|->)\s?{_ITEM}){{2,200}}(?![\w/])")


class SlashLists:
    """`0/500/1000: 10.9/5.9/5.0`, and steps in one line with losses in the next ones."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def rows(self) -> list[Row]:
        """Those of the lines taken so far, which are done with that."""
        rows, self._rows = self._rows, []
        return [row for row in rows if len(row) > 1]

    def take(self, line: str, *, cut: bool = False) -> bool:
        """Are there such lists in this line?"""
        lists = list(_LIST.finditer(line))
        if not lists or (cut and not line[lists[-1].end() :].strip(" .,/")):
            return bool(lists) and bool(self._rows)
        labels = [line[begin:end].strip(" :=(\t,;") for begin, end in _between(lists)]
        values = [_items(found[0]) for found in lists]
        place = next((n for n, label in enumerate(labels) if column_of(label) == "step"), None)
        if place is None and not self._rows and len(values) > 1 and _are_steps(values[0]):
            place = 0
        if place is not None:
            if self._rows or not _are_steps(values[place]):
                return False
            self._rows = [{"step": step} for step in values[place]]
        for n, (label, column) in enumerate(zip(labels, values, strict=True)):
            if n == place or len(column) != len(self._rows):
                continue
            name = (column_of(label) or ("loss" if place is not None else "")).rstrip("?")
            if name in _LOSSES:
                for row, value in zip(self._rows, column, strict=True):
                    row.setdefault(name, value)
        return bool(self._rows)


def _between(lists: Sequence[re.Match[str]]) -> list[tuple[int, int]]:
    """Where the text in front of each stands."""
    begins = [0, *(found.end() for found in lists[:-1])]
    return [(begin, found.start()) for begin, found in zip(begins, lists, strict=True)]


def _items(text: str) -> list[float]:
    values = [cell(item, counts=False) for item in re.split(r"\s?(?:/|\u2192|->)\s?", text)]
    return [math.nan if value is None else value for value in values]


def _are_steps(values: Sequence[float]) -> bool:
    whole = all(value.is_integer() for value in values)
    return whole and all(a < b for a, b in pairwise(values))
