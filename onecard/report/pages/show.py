"""A report on one screen of a terminal: verdict, curve, reasons, figures; `--full` has the rest."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.language import _
from onecard.report.answer import Report, heaviest
from onecard.report.findings import Finding
from onecard.report.pages.drawing import Segments, Signs, drawn
from onecard.report.pages.plotting import curves_of
from onecard.report.pages.rows import Row, rows_of, run_line, run_parts, step_lines, unsaid
from onecard.report.pages.tables import sections
from onecard.report.verdict import verdict_of

NOTABLE = 30.0  # of a mistake's weight: it is worth a line of the first screen
LINES = 20  # of the first screen: 24 have room for the command and the next prompt
WIDEST = 110  # a line longer than that is hard to read
_CURVE, _TALLEST, _FULL_CURVE = 7, 10, 18  # lines of the curve with its axis
_COLOURS = {"healthy": "green", "healthy-but": "yellow", "not-healthy": "red", "unknown": "yellow"}
_FIGURE = re.compile(r"[\d(–±-]|$")
_SIGNS = {True: ("+", "green"), False: ("-", "red"), None: ("·", "")}


@dataclass(frozen=True)
class Piece:
    """Lines of the first screen; of several the least `rank` is taken first, while there is room."""

    rank: int
    kind: str
    lines: list[Segments]


def first_screen(report: Report, width: int, signs: Signs, *, log_x: bool = False) -> list[Segments]:
    """At most LINES lines, where the words are few enough: the curve takes what they leave, within bounds."""
    width = min(width, WIDEST)
    has_curve = len(curves_of(report.facts).main) > 1
    pieces = _pieces(report, width, signs)
    left = LINES - (_CURVE if has_curve else 0)
    taken: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: each.rank):
        if piece.rank == 0 or len(piece.lines) <= left:
            taken.append(piece)
            left -= len(piece.lines)
    # What room is left goes to empty lines between the parts, then to the curve.
    parts = list(dict.fromkeys(piece.kind for piece in pieces if piece in taken))
    spaced = left > len(parts) - 2
    left -= len(parts) - 2 if spaced else 0
    lines: list[Segments] = []
    for kind in parts:
        lines += [[]] if spaced and kind not in (parts[0], parts[-1]) else []
        lines += [line for piece in pieces if piece in taken and piece.kind == kind for line in piece.lines]
        if kind == "verdict" and has_curve:
            lines += _curve(report, width, min(_TALLEST, _CURVE + max(0, left)), signs, log_x)
    return lines


def _pieces(report: Report, width: int, signs: Signs) -> list[Piece]:
    """In the order in which they are shown."""
    said = " ".join(verdict_of(report))
    found = [Piece(0, "verdict", [*_verdict(report, width), *_run(report, width)])]
    wrong = [Finding(each.key, each.text, False, None, each.weight) for each in heaviest(report.mistakes)]
    # What can be mended comes before what is well; what is only to be known waits its turn.
    first = [each for each in wrong[:1] if each.weight >= NOTABLE]
    rest = sorted((*report.findings, *wrong[len(first) :]), key=lambda each: -each.weight)
    every = [*report.alarms, *first, *rest]
    for rank, each in enumerate(each for each in every if each.text.rstrip(".") not in said):
        lines = _bullet(each.text, each.good, width, signs)
        found.append(Piece(4 if rank else 2, "reasons", lines))
    rows = rows_of(report)
    for row, lines in zip(rows, _rows(rows, width), strict=True):
        if lines:
            found.append(Piece({"speed": 3, "time": 3, "forecast": 3}.get(row.key, 6), "figures", lines))
    for rank, (text, command) in zip((1, 5), step_lines(report, brief=True), strict=False):
        # What is long to paste waits for the whole report; half of it would be worse than none.
        shown = command if len(command.splitlines()) < 3 and len(command) + 4 <= width else ""
        found.append(Piece(rank, "next", _item(text, shown, width)))
    if text := unsaid(report):
        found.append(Piece(3, "more", paragraph(text, width, style="dim")))
    return [*found, Piece(0, "more", _more(report, width))]


def whole(report: Report, width: int, signs: Signs, *, log_x: bool = False) -> list[Segments]:
    width = min(width, WIDEST)
    lines = [*_verdict(report, width), *paragraph(run_line(report), width, style="dim")]
    if len(curves_of(report.facts).main) > 1:
        lines += [[], *_curve(report, width, _FULL_CURVE, signs, log_x)]
    reasons = [line for each in report.reasons for line in _bullet(each.text, each.good, width, signs)]
    lines += _headed(_("What the log shows"), reasons)
    figures = [row for row in rows_of(report) if row.key not in ("place", "forecast")]
    lines += _headed(_("In figures"), [line for row in _rows(figures, width, whole=True) for line in row])
    for section in sections(report):
        body = [line for text in section.texts for line in paragraph(text, width - 2, indent=2)]
        if section.headings:
            body += table_lines(section.headings, section.rows, width)
        for item in section.items:
            body += _item(item.text, item.code, width)
            body += [line for more in item.details for line in paragraph(more, width, indent=4)]
        lines += _headed(section.title, body)
    return lines


def _verdict(report: Report, width: int) -> list[Segments]:
    first, second = verdict_of(report)
    style = f"bold {_COLOURS[report.health]}"
    return [*paragraph(first, width, style=style), *paragraph(second, width, style="bold")]


def _curve(report: Report, width: int, high: int, signs: Signs, log_x: bool) -> list[Segments]:
    curves = curves_of(report.facts, report.alarms, report.forecast)
    return drawn(curves, width, high, signs, log_x=log_x)


def _more(report: Report, width: int) -> list[Segments]:
    source = report.facts.source or "-"
    text = _("More: onecard report {source} --full, or --html FILE").format(source=quoted(source))
    if len(text) > width:
        text = _("More: the same with --full, or with --html FILE")
    return paragraph(text, width, style="dim")


def quoted(source: str) -> str:
    import shlex

    return shlex.quote(source)


def _headed(title: str, lines: list[Segments]) -> list[Segments]:
    return [[], [(title, "bold")], *lines] if lines else []


def _rows(rows: list[Row], width: int, *, whole: bool = False) -> list[list[Segments]]:
    """The lines of each row, all at one indent; on the first screen its brief text alone."""
    wide = max((len(row.name) for row in rows), default=0) + 2
    found: list[list[Segments]] = []
    for row in rows:
        text = row.text if whole else row.brief
        first, *rest = _wrapped(text, width - wide)
        head: Segments = [(f"{row.name:<{wide}}", "bold"), (first, "")]
        found.append([head, *([(" " * wide + more, "")] for more in rest)] if text else [])
    return found


def _run(report: Report, width: int) -> list[Segments]:
    """Which run it is, in one line: what has no room there is left out."""
    parts = run_parts(report)
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts.pop()
    return [[(" · ".join(parts)[:width], "dim")]]


def _bullet(text: str, good: bool | None, width: int, signs: Signs) -> list[Segments]:
    sign, style = _SIGNS[good]
    first, *rest = _wrapped(text, width - 2)
    shown = sign if signs.braille or sign.isascii() else " "
    return [[(f"{shown} ", style), (first, "")], *([("  " + more, "")] for more in rest)]


def _item(text: str, code: str, width: int) -> list[Segments]:
    """What to do, and below it the command or the config lines, unbroken, to be pasted."""
    lines = [[(line, "")] for line in hung(f"> {text}", width, 2)]
    return [*lines, *([("    " + line, "cyan")] for line in code.splitlines())]


def hung(text: str, width: int, indent: int) -> list[str]:
    before = len(text) - len(text.lstrip())
    first, *rest = _wrapped(text.lstrip(), width - indent)
    return [" " * before + first, *(" " * indent + more for more in rest)]


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Segments]:
    """Words on the left, figures on the right; where it is too wide, long words go on below themselves."""
    plain = [headings, *rows]
    widths = [max(len(row[n]) for row in plain) for n in range(len(headings))]
    figures = [all(_FIGURE.match(row[n]) for row in rows) for n in range(len(headings))]
    words = [n for n, right in enumerate(figures) if not right] or [0]
    widest = max(words, key=widths.__getitem__)
    over = sum(widths) + 2 * len(widths) - width
    widths[widest] = min(widths[widest], max(16, widths[widest] - max(0, over)))
    if sum(widths) + 2 * len(widths) > width:
        return _stacked(headings, rows, width)
    lines: list[Segments] = []
    for at, row in enumerate(plain):
        cells = [_wrapped(cell, widths[n], 16) if n == widest else [cell] for n, cell in enumerate(row)]
        for deep in range(len(cells[widest])):
            parts = [cell[deep] if deep < len(cell) else "" for cell in cells]
            shown = (
                f"{part:>{wide}}" if right else f"{part:<{wide}}"
                for part, wide, right in zip(parts, widths, figures, strict=True)
            )
            lines.append([(("  " + "  ".join(shown)).rstrip(), "" if at else "dim")])
    return lines


def _stacked(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Segments]:
    """What is too wide for a table: each row's cells below its first one, with their headings."""
    lines: list[Segments] = []
    for first, *cells in rows:
        lines.append([(f"  {headings[0]}: {first}", "bold")])
        for heading, cell in zip(headings[1:], cells, strict=True):
            if cell:
                lines += [[(line, "")] for line in hung(f"    {heading}: {cell}", width, 6)]
    return lines


def paragraph(text: str, width: int, *, indent: int = 0, style: str = "") -> list[Segments]:
    return [[(" " * indent + line, style)] for line in _wrapped(text, width - indent)] if text else []


def _wrapped(text: str, width: int, least: int = 20) -> list[str]:
    lines = textwrap.wrap(str(text), max(least, width), break_on_hyphens=False)
    return lines or [""]
