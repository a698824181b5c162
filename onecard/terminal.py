"""What a person reads: how wide it may be, and that a terminal obeys nothing in it.

Names of files, text of models and excerpts of logs may hold what a terminal takes for commands. All that the
package writes to stdout and stderr goes through here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

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
