"""Figures of a run as inline SVG, with labels in HTML around it.

A figure is stretched to the width that it has: on a telephone its lines stay as thin, and its labels as
large, as on a desk. By the extremes of each column of pixels it has some 16 KB, however long the log is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from onecard.language import number
from onecard.report.pages.plotting import (
    LATE_OF_A_PICTURE,
    Column,
    Curves,
    Pairs,
    Scale,
    by_column,
    mean_line,
    short,
    tick_labels,
)

_SIDE = 1000  # of the picture's own coordinates, both ways
_COLUMNS, _STRIP_COLUMNS, _MEANS = 480, 240, 160
_SEPARATE = 40  # points and fewer are marked one by one


@dataclass(frozen=True)
class Words:
    """What a figure is called, and said to somebody who cannot see it."""

    name: str  # of the figure on its page, for references
    title: str
    description: str


def loss_figure(curves: Curves, words: Words, *, log_x: bool = False) -> str:
    steps, losses = curves.steps(log_x), curves.losses(log_x, LATE_OF_A_PICTURE)
    parts = [_grid(steps, losses, 6, 8)]
    parts += [_upright(steps.at(step), "start") for step in curves.starts]
    parts += [_upright(steps.at(step), "alarm") for step in curves.marks]
    place = (steps, losses)
    beside = curves.main is not curves.train
    if len(curves.train) > _COLUMNS // 2:
        parts.append(_band(by_column(curves.train, steps, _COLUMNS), losses, _COLUMNS, "band"))
    parts.append(_line(mean_line(curves.train, _MEANS), place, "train" if beside else "val"))
    if beside:
        parts += [_line(curves.val, place, "val"), _dots(curves.val, place, "val")]
    parts += _expected(curves, place)
    return _figure("loss", parts, words, _y_labels(losses, 6) + _x_labels(steps))


def strip(pairs: Pairs, steps: Scale, words: Words, kind: str) -> str:
    """A low figure of one line below the loss, on its axis of steps: the learning rate, the speed."""
    pairs = [pair for pair in pairs if steps.low <= pair[0] <= steps.high and math.isfinite(pair[1])]
    values = [value for _step, value in pairs] or [0.0]
    high = max(values) or 1.0
    low = 0.0 if kind == "rate" else min(0.0, *values)
    scale = Scale(low, 1.12 * high)
    columns = by_column(pairs, steps, _STRIP_COLUMNS)
    parts = [_grid(steps, scale, 1, 8)]
    if len(pairs) > _STRIP_COLUMNS:
        parts.append(_band(columns, scale, _STRIP_COLUMNS, "band"))
        pairs = mean_line(pairs, _MEANS) if kind != "rate" else [_middle(c, steps) for c in columns]
    parts.append(_line(pairs, (steps, scale), kind))
    label = number(high, ".2g") if high < 1 else short(float(f"{high:.3g}"))
    return _figure(kind, parts, words, _y_label(scale.at(high), label) + _y_label(scale.at(0.0), "0"))


def _middle(column: Column, steps: Scale) -> tuple[float, float]:
    share = (column.at + 0.5) / _STRIP_COLUMNS
    if steps.log:
        return steps.low * (steps.high / steps.low) ** share, column.last
    return steps.low + share * (steps.high - steps.low), column.last


def overlay(named: Sequence[tuple[str, Pairs]], scales: tuple[Scale, Scale], words: Words) -> str:
    """Curves of several runs over each other; their kinds are run0, run1, ..."""
    steps, losses = scales
    parts = [_grid(steps, losses, 6, 8)]
    for at, (_name, pairs) in enumerate(named):
        parts.append(
            _line(pairs if len(pairs) <= _COLUMNS else mean_line(pairs, _MEANS), scales, f"run{at % 6}")
        )
    return _figure("loss", parts, words, _y_labels(losses, 6) + _x_labels(steps))


# --- the picture ----------------------------------------------------------------------------------------


def _figure(kind: str, parts: Iterable[str], words: Words, labels: str) -> str:
    name = escape(words.name)
    return (
        f'<div class="plot {kind}"><svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(words.title)}</title>'
        f'<desc id="{name}-d">{escape(words.description)}</desc>{"".join(parts)}</svg>'
        f'<div class="labels" aria-hidden="true">{labels}</div></div>'
    )


def _xy(share_x: float, share_y: float) -> tuple[int, int]:
    return round(share_x * _SIDE), round((1 - share_y) * _SIDE)


def _path(points: Iterable[tuple[int, int]]) -> str:
    """Through the points, by what each differs from the one before, which takes fewest letters."""
    text, before = "", (0, 0)
    for x, y in points:
        if not text:
            text = f"M{x} {y}l"
        elif (x, y) != before:
            step = f"{x - before[0]} {y - before[1]}"
            text += step if text[-1] == "l" or step[0] == "-" else " " + step
        before = (x, y)
    return text if text and text[-1] != "l" else text + "0 0" * bool(text)


def _line(pairs: Pairs, scales: tuple[Scale, Scale], kind: str) -> str:
    steps, losses = scales
    if len(pairs) > _COLUMNS:
        columns = by_column(pairs, steps, _COLUMNS)
        parts = [
            [
                _xy((column.at + 0.5) / _COLUMNS, losses.at(value))
                for column in columns
                for value in ((column.high, column.low) if column.high > column.low else (column.last,))
            ]
        ]
    else:
        finite = [pair for pair in pairs if math.isfinite(pair[1])]
        parts = [[_xy(steps.at(s), losses.at(v)) for s, v in part] for part in _below(finite, losses.high)]
    path = "".join(map(_path, parts))
    return f'<path class="{kind}" d="{path}"/>' if path else ""


def _below(pairs: Pairs, high: float) -> list[list[tuple[float, float]]]:
    """The parts of a line that are below the top of the scale, each to the point where it crosses it."""
    parts: list[list[tuple[float, float]]] = [[]]
    before: tuple[float, float] | None = None
    for step, value in pairs:
        if before is not None and (before[1] > high) != (value > high):
            share = (high - before[1]) / (value - before[1])
            crossing = (before[0] + share * (step - before[0]), high)
            if value > high:
                parts[-1].append(crossing)
                parts.append([])
            else:
                parts[-1] = [crossing]
        if value <= high:
            parts[-1].append((step, value))
        before = (step, value)
    return parts


def _dots(pairs: Pairs, scales: tuple[Scale, Scale], kind: str) -> str:
    """Lines of no length with round ends: round however the picture is stretched."""
    steps, losses = scales
    if len(pairs) > _SEPARATE:
        return ""
    shown = [_xy(steps.at(s), losses.at(v)) for s, v in pairs if math.isfinite(v) and v <= losses.high]
    return f'<path class="dot {kind}" d="{"".join(f"M{x} {y}h0" for x, y in shown)}"/>' if shown else ""


def _band(columns: Sequence[Column], scale: Scale, count: int, kind: str) -> str:
    columns = [column for column in columns if column.low <= scale.high]
    above = [_xy((c.at + 0.5) / count, scale.at(c.high)) for c in columns]
    below = [_xy((c.at + 0.5) / count, scale.at(c.low)) for c in reversed(columns)]
    return f'<path class="{kind}" d="{_path([*above, *below])}z"/>' if len(columns) > 1 else ""


def _expected(curves: Curves, scales: tuple[Scale, Scale]) -> list[str]:
    steps, losses = scales
    finite = [pair for pair in curves.main if math.isfinite(pair[1])]
    if not curves.points or not finite:
        return []
    parts = []
    if curves.fans:
        step, loss = finite[-1]
        begin, point = _xy(steps.at(step), losses.at(loss)), curves.points[0]
        ends = [_xy(steps.at(point.step), losses.at(v)) for v in (point.high, point.low)]
        parts.append(f'<path class="fan" d="{_path([begin, *ends])}z"/>')
        parts.append(
            f'<path class="expected" d="{_path([begin, _xy(steps.at(point.step), losses.at(point.loss))])}"/>'
        )
    for point in curves.points:
        x = steps.at(point.step)
        parts.append(
            f'<path class="range" d="{_path([_xy(x, losses.at(v)) for v in (point.low, point.high)])}"/>'
        )
        x_at, y_at = _xy(x, losses.at(point.loss))
        parts.append(f'<path class="dot fandot" d="M{x_at} {y_at}h0"/>')
    return parts


def _upright(share: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{round(share * _SIDE)} 0v{_SIDE}"/>'


def _grid(steps: Scale, losses: Scale, high: int, wide: int) -> str:
    across = "".join(f"M0 {_xy(0, losses.at(tick))[1]}h{_SIDE}" for tick in losses.ticks(high))
    down = "".join(f"M{_xy(steps.at(tick), 0)[0]} 0v{_SIDE}" for tick in steps.ticks(wide))
    return f'<path class="grid" d="{across}{down}"/>'


# --- labels -----------------------------------------------------------------------------------------------


def _y_labels(scale: Scale, about: int) -> str:
    ticks = scale.ticks(about)
    labels = zip(ticks, tick_labels(ticks), strict=True)
    return "".join(_y_label(scale.at(tick), label) for tick, label in labels)


def _y_label(share: float, text: str) -> str:
    return f'<span class="y" style="bottom:{100 * share:.1f}%">{escape(text)}</span>'


def _x_labels(scale: Scale) -> str:
    """On a narrow screen every second one is enough."""
    labels = []
    for at, tick in enumerate(scale.ticks(8)):
        kind = "x odd" if at % 2 else "x"
        labels.append(
            f'<span class="{kind}" style="left:{100 * scale.at(tick):.1f}%">{escape(short(tick))}</span>'
        )
    return "".join(labels)
