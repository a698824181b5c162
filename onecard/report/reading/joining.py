"""Lines that go on in the next: wrapped by a narrow window, spread by a program, continued by a shell."""

from __future__ import annotations

import re

from onecard.report.reading import head
from onecard.report.reading.formats import WRAPPED

_WRAPS = 3  # a line of nanochat's has 160 characters: two breaks in a narrow window, three in a tiny one
_LONGEST_JOINED = 1000
_OBJECT_LINES = 60
_BEGINS = re.compile(
    r"\bstep\s+\d{1,12}:\s*train loss|\bStep\s+\d{1,12}\s*\||^\s*step:\d|^\s*\{", re.IGNORECASE
)
_MAY_BEGIN = re.compile(r"iter|step|\{")
_OBJECT = re.compile(r"\{\s*$")


def joined(lines: list[str], index: int, *, ends: bool) -> tuple[str, int] | None:
    """(a line as its program wrote it, the index of what follows); None where the next lines are needed."""
    line = lines[index]
    if _OBJECT.search(line):
        return _object(lines, index, ends)
    if line.endswith("\\") and head.MAY_BE_COMMAND.search(line):
        more = index
        while more < len(lines) and lines[more].endswith("\\") and more - index < _OBJECT_LINES:
            more += 1
        if more >= len(lines) and not ends:
            return None
        return " ".join(part.rstrip("\\ ") for part in lines[index : more + 1]), more + 1
    for begins, whole, enough in WRAPPED if _MAY_BEGIN.search(line) else ():
        found = begins.search(line)
        if not found or whole.search(line):
            continue
        best = line if enough.search(line) else None
        for more in range(1, _WRAPS + 1):
            if index + more >= len(lines):
                if not ends:
                    return None
                break
            following = lines[index + more]
            piece = "".join(lines[index : index + more + 1])
            if not following.strip() or len(piece) > _LONGEST_JOINED or _is_beginning(following):
                break
            if whole.search(piece):
                return piece, index + more + 1
            if best is None and enough.search(piece):
                best = piece
        return best or line, index + 1
    return line, index + 1


def _is_beginning(line: str) -> bool:
    """Is this no continuation, but a line of its own?"""
    return bool(
        _BEGINS.search(line) or head.START.search(line) or any(begins.search(line) for begins, *_ in WRAPPED)
    )


def _object(lines: list[str], index: int, ends: bool) -> tuple[str, int] | None:
    """A JSON object that is spread over lines, as one; of nested ones the innermost."""
    for more in range(index + 1, index + _OBJECT_LINES):
        if more >= len(lines):
            if not ends:
                return None
            break
        if _OBJECT.search(lines[more]):
            break
        if "}" in lines[more]:
            pieces = [
                lines[index][lines[index].rindex("{") :].strip(),
                *(line.strip() for line in lines[index + 1 : more + 1]),
            ]
            return " ".join(pieces), more + 1
    return lines[index], index + 1
