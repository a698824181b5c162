"""A loss curve of characters: braille's dots where the encoding has them, else dots, stars and colons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from onecard.report.pages.plotting import (
    Column,
    Curves,
    Pairs,
    Scale,
    by_column,
    mean_line,
    short,
    tick_labels,
)

Segments = list[tuple[str, str]]  # text and its style, of one line

# Bits of a braille sign by row and column of its eight dots.
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800
_TRAIN, _EXPECTED, _VAL = 1, 2, 3  # what is in a cell: of several the last one gives the style
STYLES = {_TRAIN: "dim", _EXPECTED: "yellow", _VAL: "bold cyan"}
_ASCII = {0: " ", _TRAIN: ".", _EXPECTED: ":", _VAL: "*"}


@dataclass(frozen=True)
class Signs:
    """What a curve is drawn with."""

    braille: bool

    @property
    def dots(self) -> tuple[int, int]:
        """Across and down, of one character."""
        return (2, 4) if self.braille else (1, 1)

    @property
    def axis(self) -> tuple[str, str, str, str]:
        """Beside the curve, beside it at a label, the corner, below it."""
        return ("│", "┤", "└", "─") if self.braille else ("|", "+", "+", "-")


def signs_for(encoding: str | None) -> Signs:
    try:
        "⣿┤└".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return Signs(False)
    return Signs(True)


class _Canvas:
    """Dots of a grid of characters, and what each character shows."""

    def __init__(self, wide: int, high: int, signs: Signs) -> None:
        self.signs = signs
        self.across, self.down = signs.dots
        self.columns, self.rows = wide * self.across, high * self.down
        self._dots = [[0] * wide for _row in range(high)]
        self._kinds = [[0] * wide for _row in range(high)]

    def fill(self, x: int, low: float, high: float, kind: int, every: int = 1) -> None:
        """A column of dots between two shares of the height."""
        top = min(self.rows - 1, max(0, self._row(high)))
        for y in range(top, min(self.rows - 1, max(top, self._row(low))) + 1):
            if (x + y) % every == 0:
                line, at = y // self.down, x // self.across
                self._dots[line][at] |= _BITS[y % 4][x % 2]
                self._kinds[line][at] = max(self._kinds[line][at], kind)

    def _row(self, share: float) -> int:
        return round((1 - share) * (self.rows - 1))

    def lines(self) -> Iterator[Segments]:
        for dots, kinds in zip(self._dots, self._kinds, strict=True):
            line: Segments = []
            for bits, kind in zip(dots, kinds, strict=True):
                sign = _ASCII[kind] if not self.signs.braille else chr(_BRAILLE + bits) if bits else " "
                style = STYLES.get(kind, "")
                if line and line[-1][1] == style:
                    line[-1] = (line[-1][0] + sign, style)
                else:
                    line.append((sign, style))
            yield line


def drawn(curves: Curves, wide: int, high: int, signs: Signs, *, log_x: bool = False) -> list[Segments]:
    """The curve with its axes in `high` lines. Other horizons would leave it half of the columns."""
    curves = curves if curves.fans else replace(curves, points=())
    steps, losses = curves.steps(log_x), curves.losses(log_x)
    labels = _loss_labels(losses, high - 2)
    gutter = max(map(len, labels.values()), default=0)
    inside = max(10, wide - gutter - 2)
    canvas = _Canvas(inside, high - 2, signs)
    # Training beside validation is a shade behind it; alone it is the curve.
    if curves.main is not curves.train:
        _draw(canvas, mean_line(curves.train, canvas.columns // 2), (steps, losses), _TRAIN)
    elif len(curves.train) > 4 * canvas.columns:
        _band(canvas, by_column(curves.train, steps, canvas.columns), losses)
        _draw(canvas, mean_line(curves.train, canvas.columns // 2), (steps, losses), _VAL)
    if curves.main is not curves.train or len(curves.train) <= 4 * canvas.columns:
        _draw(canvas, curves.main, (steps, losses), _VAL)
    _draw_expected(canvas, curves, (steps, losses))
    beside, labelled, corner, below = signs.axis
    lines: list[Segments] = []
    for row, line in enumerate(canvas.lines()):
        label = labels.get(row, "")
        lines.append([(f"{label:>{gutter}} {labelled if label else beside}", "dim"), *line])
    lines.append([(" " * gutter + f" {corner}" + _ruler(curves, steps, inside, below), "dim")])
    lines.append([(" " * (gutter + 2) + _step_labels(steps, inside), "dim")])
    return lines


def _loss_labels(losses: Scale, rows: int) -> dict[int, str]:
    """Labels by row; fewer than rows, and at rows of their own."""
    ticks = losses.ticks(max(3, rows // 2))
    ticks = ticks if len(ticks) > 1 else losses.ticks(rows)
    return dict(zip((round((1 - losses.at(t)) * (rows - 1)) for t in ticks), tick_labels(ticks), strict=True))


def _ruler(curves: Curves, steps: Scale, wide: int, sign: str) -> str:
    """The axis of steps, with a mark where a process went on and where an alarm began."""
    ruler = [sign] * wide
    for step in curves.starts:
        ruler[min(wide - 1, int(steps.at(step) * wide))] = "^"
    for step in curves.marks:
        ruler[min(wide - 1, int(steps.at(step) * wide))] = "!"
    return "".join(ruler)


def _step_labels(steps: Scale, wide: int) -> str:
    line = ""
    for tick in steps.ticks(max(2, wide // 16)):
        text = short(tick)
        at = round(steps.at(tick) * (wide - 1)) - len(text) // 2
        at = min(max(at, 0), wide - len(text))
        if not line or at > len(line):
            line = line.ljust(at) + text
    return line


def _draw(canvas: _Canvas, pairs: Pairs, scales: tuple[Scale, Scale], kind: int) -> None:
    """A line through the points, in every column of dots from its lowest to its highest value there."""
    steps, losses = scales
    columns = by_column(pairs, steps, canvas.columns)
    for x, low, high in _joined(columns):
        if low <= losses.high:  # above the scale nothing is drawn
            canvas.fill(x, losses.at(low), losses.at(min(high, losses.high)), kind)


def _band(canvas: _Canvas, columns: Iterable[Column], losses: Scale) -> None:
    for column in columns:
        if column.low <= losses.high:
            canvas.fill(column.at, losses.at(column.low), losses.at(column.high), _TRAIN, every=2)


def _joined(columns: list[Column]) -> Iterator[tuple[int, float, float]]:
    """(column, lowest, highest) of the line, also between points that are columns apart."""
    if columns:
        yield columns[0].at, columns[0].low, columns[0].high
    for before, after in pairwise(columns):
        wide = after.at - before.at
        previous = before.last
        for x in range(before.at + 1, after.at):
            value = before.last + (after.low - before.last) * (x - before.at) / wide
            yield x, min(previous, value), max(previous, value)
            previous = value
        yield after.at, min(after.low, previous), max(after.high, min(previous, after.high))


def _draw_expected(canvas: _Canvas, curves: Curves, scales: tuple[Scale, Scale]) -> None:
    """A fan to the end of the schedule."""
    steps, losses = scales
    finite = [pair for pair in curves.main if math.isfinite(pair[1])]
    if not curves.points or not finite:
        return
    point, (step, loss) = curves.points[0], finite[-1]
    begin, end = (int(steps.at(s) * (canvas.columns - 1)) for s in (step, point.step))
    for x in range(begin + 1, end + 1):
        share = (x - begin) / max(1, end - begin)
        low, high = (loss + share * (bound - loss) for bound in (point.low, point.high))
        canvas.fill(x, losses.at(low), losses.at(high), _EXPECTED, every=2)
