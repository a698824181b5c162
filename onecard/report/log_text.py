"""The text of a log, whatever wrote the file, in blocks of whole lines without a terminal's doings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from onecard.errors import UserError
from onecard.language import _

MAX_BYTES = 200_000_000  # months of lines; more is a data file given by mistake
BLOCK = 1 << 18  # characters: lists of all lines of a large log would take several times its size


def decode(content: bytes) -> str:
    """Text of a file whatever wrote it: PowerShell's `>` writes UTF-16, others anything."""
    if len(content) > MAX_BYTES:
        raise UserError(
            _("this is too large for a log"),
            _("it has more than {n:,} bytes").format(n=MAX_BYTES),
            "tail -n 2000 LOG | onecard eta -",
        )
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", errors="replace")
    start = content[:4000]
    # Without the mark in front: Latin text in UTF-16 has a zero in every other byte.
    for offset, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(start) >= 8 and start[offset::2].count(0) > 0.4 * len(start):
            return content.decode(name, errors="replace")
    return content.decode("utf-8-sig", errors="replace")


# Colours and cursor movements, titles of windows; and characters a bar erased.
_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]"
TERMINAL = re.compile(_ESCAPES + r"|.?\x08|\x00")
# The same without the erased ones: it begins with one character, for which text is searched far faster.
_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def clean(text: str) -> str:
    """Without what steers a terminal, every line ended by a line feed."""
    if "\x08" in text:
        text = TERMINAL.sub("", text)
    else:
        if "\x1b" in text:
            text = _COLOURS.sub("", text)
        if "\x00" in text:
            text = text.replace("\x00", "")
    if "\r" in text:
        # A progress bar's states are lines that overwrite each other.
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def blocks(text: str, size: int = BLOCK) -> Iterator[str]:
    """The cleaned text in pieces that together have the same lines: a line feed belongs between two."""
    begin, wanted = 0, size
    while begin < len(text):
        end = _end_of_a_line(text, begin, begin + wanted)
        if end == begin:
            wanted *= 2
            continue
        piece = clean(text[begin:end])
        yield piece if end == len(text) else piece[:-1]
        begin, wanted = end, size


def _end_of_a_line(text: str, begin: int, end: int) -> int:
    """Where the last line that ends before `end` does; `begin` where the text cannot be cut yet."""
    if end >= len(text):
        return len(text)
    last = text.rfind("\n", begin, end) + 1
    if not last:
        # A bar's carriage return, where nothing that is erased behind it can be a part of its line's end.
        last = text.rfind("\r", begin, end) + 1
        while last and (text[last] in "\n\x00\x08\x1b" or text[last + 1 : last + 2] == "\x08"):
            last = text.rfind("\r", begin, last - 1) + 1
    if not last:
        return begin
    title = text.rfind("\x1b]", begin, last)
    if title >= 0 and all(text.find(mark, title + 2, last) < 0 for mark in ("\x07", "\x1b")):
        return begin  # the title of a window may go on over the end of the line
    return last
