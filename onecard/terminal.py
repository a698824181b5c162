"""How wide what a person reads may be: lines, and tables that 80 columns show whole.

A table that is too wide would lose letters and figures if it were squeezed. Here first its headings are
broken and its notes continued below themselves; where that is not enough, a row's figures come on a line
below its name.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SIZE = re.compile("0{0,9}[1-9][0-9]{0,4}")


def forget_unusable_sizes() -> None:
    """COLUMNS and LINES that are no size out of the environment: rich reads them too, and fails at `²`,
    which is a digit to isdigit() and no number to int()."""
    for name in ("COLUMNS", "LINES"):
        if not _SIZE.fullmatch(os.environ.get(name, "1")):
            del os.environ[name]


def columns(of_a_pipe: int) -> int:
    """Of the terminal that is written to. A pipe has none of its own, unless COLUMNS says how many."""
    forget_unusable_sizes()
    if said := os.environ.get("COLUMNS"):
        return int(said)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else of_a_pipe


def folded(text: str) -> str:
    """Lines as long as a terminal is wide, each going on below where it began; a pipe's stay as they are."""
    width = columns(of_a_pipe=sys.maxsize)
    lines = ((line, len(line) - len(line.lstrip())) for line in text.split("\n"))
    return "\n".join(part for line, indent in lines for part in hanging(line, width, indent))


def hanging(line: str, width: int, indent: int) -> list[str]:
    """A line that is too long goes on below itself, `indent` columns in. Words and flags stay whole."""
    if len(line) <= width:
        return [line]
    first = textwrap.wrap(
        line[indent:], max(20, width - indent), break_long_words=False, break_on_hyphens=False
    )
    return [line[:indent] + first[0], *(" " * indent + more for more in first[1:])]


# --- tables -------------------------------------------------------------------------------------------

_GAP = "  "
_LEAST_FOR_NOTES = 24
_TOGETHER = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Row:
    name: str
    figures: tuple[str, ...]
    note: str = ""
    style: str = ""


def print_rows(
    console: Console, title: str, names: str, headings: Sequence[str], rows: Sequence[Row], notes: str = ""
) -> None:
    """`names` and `notes` are the headings of the first column and the last."""
    from rich.text import Text

    if title:
        console.print(Text(title, style="bold"))
    for text, style in lines_of(console.width, names, headings, rows, notes):
        shown = Text(text.replace(_TOGETHER, " ").rstrip(), style=style)
        console.print(shown, no_wrap=True, overflow="ignore", crop=False)


def lines_of(
    width: int, names: str, headings: Sequence[str], rows: Sequence[Row], notes: str = ""
) -> list[tuple[str, str]]:
    """The lines with their styles: one a row where that fits, else as little more as possible."""
    cells = [[row.figures[n] for row in rows] for n in range(len(headings))]
    plain = [max(map(_wide, [name, *column])) for name, column in zip(headings, cells, strict=True)]
    broken = [max(map(_wide, [*name.split(), *column])) for name, column in zip(headings, cells, strict=True)]
    first = max(map(_wide, [names, *(row.name for row in rows)]))
    noted = max(map(_wide, [notes, *(row.note for row in rows)]))
    for widths in (plain, broken):
        left = width - first - _spread(widths)
        room = left - len(_GAP) if noted else 0
        if left >= 0 and (room >= noted or (widths is broken and room >= _for_notes(rows))):
            return list(_table(names, headings, rows, notes, first, widths, min(noted, room)))
    return list(_by_twos(width, headings, rows, plain if _spread(plain) <= width else broken))


def _spread(widths: list[int]) -> int:
    return sum(len(_GAP) + each for each in widths)


def _for_notes(rows: Sequence[Row]) -> int:
    """What a column of notes needs to be read: their longest word, and not one word a line."""
    return max(_LEAST_FOR_NOTES, *(_wide(word) for row in rows for word in row.note.split()))


def _table(
    names: str,
    headings: Sequence[str],
    rows: Sequence[Row],
    notes: str,
    first: int,
    widths: list[int],
    room: int,
) -> Iterator[tuple[str, str]]:
    for at, line in enumerate(lines := _headings(headings, widths)):
        last = at == len(lines) - 1
        yield _padded(names if last else "", first) + line + (_GAP + notes if last else ""), "bold"
    for row in rows:
        note = _wrapped(row.note, room)
        yield _padded(row.name, first) + _figures(row.figures, widths) + _GAP + note[0], row.style
        indent = " " * (first + _spread(widths)) + _GAP
        yield from ((indent + more, row.style) for more in note[1:])


def _by_twos(
    width: int, headings: Sequence[str], rows: Sequence[Row], widths: list[int]
) -> Iterator[tuple[str, str]]:
    for line in _headings(headings, widths):
        yield line, "bold"
    for row in rows:
        whole = row.name + (f" · {row.note}" if row.note else "")
        yield from ((text, row.style) for text in _wrapped(whole, width))
        yield _figures(row.figures, widths), row.style


def _headings(headings: Sequence[str], widths: list[int]) -> list[str]:
    """Broken to the widths of their columns, and level at the bottom."""
    parts = [_wrapped(heading, each) for heading, each in zip(headings, widths, strict=True)]
    deep = max(map(len, parts), default=1)
    level = [[""] * (deep - len(part)) + part for part in parts]
    return [_figures([part[n] for part in level], widths) for n in range(deep)]


def _figures(figures: Sequence[str], widths: list[int]) -> str:
    return "".join(
        _GAP + " " * (each - _wide(text)) + text for text, each in zip(figures, widths, strict=True)
    )


def _wrapped(text: str, width: int) -> list[str]:
    """What is better kept together is broken only where it would not fit a line at all."""
    for each in (text, text.replace(_TOGETHER, " ")):
        lines = textwrap.wrap(each, max(1, width), break_long_words=False, break_on_hyphens=False)
        if all(_wide(line) <= width for line in lines):
            break
    return lines or [""]


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _wide(text))


def _wide(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def terms_together(formula: str) -> str:
    """A sum that goes to the next line breaks between its terms, not inside one."""
    return _TOGETHER.join(formula.split(" ")).replace(f"{_TOGETHER}+{_TOGETHER}", f"{_TOGETHER}+ ")


def print_parts(console: Console, parts: Sequence[Text], between: str) -> None:
    """One line of several parts; where they are too many for it, it breaks between two of them."""
    from rich.text import Text

    line = Text()
    for part in parts:
        if line and line.cell_len + len(between) + part.cell_len > console.width:
            console.print(line, highlight=False)
            line = Text()
        line = line.append(between).append_text(part) if line else part.copy()
    console.print(line, highlight=False)
