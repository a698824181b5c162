"""What a person reads: how wide it may be, and that a terminal obeys nothing in it.

Names of files, text of models and excerpts of logs may hold what a terminal takes for commands. All that the
package writes to stdout and stderr goes through here.

A table that is too wide would lose letters and figures if it were squeezed. Here first its headings are
broken and its notes continued below themselves; where that is not enough, a row's figures come on a line
below its name, and flags below the figures as a shell takes them: a line that goes on ends in a backslash.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SIZE = re.compile("0{0,9}[1-9][0-9]{0,4}")
# Control characters (C0, DEL, C1), and those that change the direction of what follows.
_OBEYED = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {9, 10}
_SPELLED_OUT = {sign: chr(sign).encode("unicode_escape").decode("ascii") for sign in _OBEYED}


def visible(text: str, *, exactly: bool = False) -> str:
    """Nothing in it moves the cursor, hides or turns what follows; such characters are spelled out.

    Line breaks stay, and tabs. `exactly`: tabs are spelled out too, and so is what has no width or looks like
    a space and is none.
    """
    if not exactly:
        return text.replace("\r\n", "\n").translate(_SPELLED_OUT)
    return "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )


def say(text: object) -> None:
    """A line on stderr, at once: progress, notes and errors."""
    print(visible(str(text)), file=sys.stderr, flush=True)


def show(text: object) -> None:
    """A line on stdout: what was asked for."""
    print(visible(str(text)))


def show_json(text: str) -> None:
    """As json.dumps makes it: only ASCII, of which a terminal would still obey the last."""
    print(text.replace("\x7f", "\\u007f"))


def write(text: str) -> None:
    """A part of a line to stdout; into a pipe exactly as it is.

    What the encoding there lacks becomes a question mark instead of an exception.
    """
    stdout = sys.stdout
    if stdout.isatty():
        text = visible(text)
    encoding = stdout.encoding or "utf-8"
    stdout.write(text.encode(encoding, "replace").decode(encoding))


def console(file: TextIO | Any, **settings: Any) -> Console:
    """rich's, which would pass on what its texts hold; its own colours and cursor movements stay."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Careful(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Any:
            for part in super().render(renderable, options):
                yield part if part.control else Segment(visible(part.text), part.style)

        def on_broken_pipe(self) -> None:
            """`| head`: rich would end the program with 1, which means no."""
            raise BrokenPipeError

    return Careful(file=file, **settings)


def forget_unusable_sizes() -> None:
    """COLUMNS and LINES that are no size out of the environment: rich reads them too, and fails at `²`,
    which is a digit to isdigit() and no number to int()."""
    for name in ("COLUMNS", "LINES"):
        if not _SIZE.fullmatch(os.environ.get(name, "1")):
            del os.environ[name]


def columns(of_a_pipe: int, stream: TextIO | None = None) -> int:
    """Of the terminal that is written to, which is stdout's unless another `stream` is named. A pipe has none
    of its own, unless COLUMNS says how many."""
    forget_unusable_sizes()
    if said := os.environ.get("COLUMNS"):
        return int(said)
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else of_a_pipe


def folded(text: str) -> str:
    """Lines as long as a terminal is wide, each going on below where it began; a pipe's stay as they are.

    A line that ends in a command has it on a line of its own, whole: broken, it could not be pasted.
    """
    width = columns(of_a_pipe=sys.maxsize)
    lines = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        label, command, rest = line.partition(": onecard ")
        if command and len(line) > width:
            lines += [f"{label}:", f"  onecard {rest}"]
        else:
            lines += hanging(line, width, indent)
    return "\n".join(lines)


def hanging(line: str, width: int, indent: int) -> list[str]:
    """A line that is too long goes on below itself, `indent` columns in. Words and flags stay whole."""
    if len(line) <= width or line.isspace():
        return [line]
    first = textwrap.wrap(
        line[indent:], max(20, width - indent), break_long_words=False, break_on_hyphens=False
    )
    return [line[:indent] + first[0], *(" " * indent + more for more in first[1:])]


# --- tables -------------------------------------------------------------------------------------------

_GAP = "  "
_GOES_ON = " \\"
_LEAST_FOR_NOTES = 24
_TOGETHER = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Row:
    name: str
    figures: tuple[str, ...]
    note: str = ""
    style: str = ""
    below: tuple[str, ...] = ()  # lines that follow it


def print_rows(
    console: Console, title: str, names: str, headings: Sequence[str], rows: Sequence[Row], notes: str = "",
    *, pasted: bool = False,
) -> None:  # fmt: skip
    """`names` and `notes` are the headings of the first column and the last; `pasted` notes are flags."""
    from rich.text import Text

    if title:
        console.print(Text(title, style="bold"))
    for text, style in lines_of(console.width, names, headings, rows, notes, pasted=pasted):
        shown = Text(text.replace(_TOGETHER, " ").rstrip(), style=style)
        console.print(shown, no_wrap=True, overflow="ignore", crop=False)


def lines_of(
    width: int, names: str, headings: Sequence[str], rows: Sequence[Row], notes: str = "",
    *, pasted: bool = False,
) -> list[tuple[str, str]]:  # fmt: skip
    """The lines with their styles: one a row where that fits, else as little more as possible."""
    cells = [[row.figures[n] for row in rows] for n in range(len(headings))]
    plain = [max(map(_wide, [name, *column])) for name, column in zip(headings, cells, strict=True)]
    broken = [max(map(_wide, [*name.split(), *column])) for name, column in zip(headings, cells, strict=True)]
    first = max(map(_wide, [names, *(row.name for row in rows)]))
    noted = max(map(_wide, [notes, *(row.note for row in rows)]))
    for widths in (plain, broken):
        left = width - first - _spread(widths)
        room = left - len(_GAP) if noted else 0
        may_wrap = widths is broken and not pasted
        if left >= 0 and (room >= noted or (may_wrap and room >= _for_notes(rows))):
            return list(_table(names, headings, rows, notes, first, widths, min(noted, room)))
    if pasted:
        return lines_of(width, names, headings, [_with_flags_below(row, width) for row in rows])
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
        yield from ((line, row.style) for line in row.below)


def _by_twos(
    width: int, headings: Sequence[str], rows: Sequence[Row], widths: list[int]
) -> Iterator[tuple[str, str]]:
    for line in _headings(headings, widths):
        yield line, "bold"
    for row in rows:
        whole = row.name + (f" · {row.note}" if row.note else "")
        yield from ((text, row.style) for text in _wrapped(whole, width))
        yield _figures(row.figures, widths), row.style
        yield from ((line, row.style) for line in row.below)


def _with_flags_below(row: Row, width: int) -> Row:
    """As a shell takes them. Words in brackets behind the flags are for people, and not continued."""
    flags, bracket, words = row.note.partition(" (")
    *before, last = _wrapped(flags, width - len(_GAP) - len(_GOES_ON))
    lines = [*(line + _GOES_ON for line in before), last]
    lines += _wrapped(f"({words}", width - len(_GAP)) if bracket else []
    return replace(row, note="", below=tuple(_GAP + line for line in lines))


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
