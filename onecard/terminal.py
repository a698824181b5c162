"""How wide what a person reads may be."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap

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
