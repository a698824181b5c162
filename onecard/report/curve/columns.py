"""Columns of a log as findings want them: without what is not said, and few enough rows to look at twice."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import compress

from onecard.report.log import Columns

MOST_ROWS = 4000


def said(columns: Columns, name: str) -> tuple[Sequence[float], Sequence[float]]:
    """(steps, values) wherever a column says something, infinite values among them."""
    values: array[float] = getattr(columns, name)
    if not math.isnan(sum(values)):
        return columns.step, values
    chosen = [not math.isnan(value) for value in values]
    return array("d", compress(columns.step, chosen)), array("d", compress(values, chosen))


def finite(columns: Columns, name: str) -> tuple[Sequence[float], Sequence[float]]:
    """The same of finite values alone."""
    values: array[float] = getattr(columns, name)
    if math.isfinite(sum(values)):
        return columns.step, values
    chosen = [math.isfinite(value) for value in values]
    return array("d", compress(columns.step, chosen)), array("d", compress(values, chosen))


def thinned(columns: Columns, name: str) -> list[tuple[int, float]]:
    """(step, value) of finite values: every nth row and the last, where there are very many."""
    steps, values = finite(columns, name)
    every = -(-len(values) // MOST_ROWS) or 1
    rows = [(int(step), value) for step, value in zip(steps[::every], values[::every], strict=True)]
    if rows and (len(values) - 1) % every:
        rows.append((int(steps[-1]), values[-1]))
    return rows
