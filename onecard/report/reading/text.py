"""Text of a log, whatever wrote the file, in blocks of whole lines without a terminal's doings.

Each step works line by line, so that how a file is cut into blocks never shows in what is read from it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from io import BytesIO
from typing import Protocol

BLOCK = 1 << 18  # bytes
LONGEST = 1 << 20  # characters: a longer line is none of a log, or JSON in one piece

# Colours and cursor movements, and titles of windows.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_ERASED = re.compile(r".?\x08")
_NEXT_OBJECT = re.compile(r"\} {0,4}, {0,4}\{")
# What of a byte order mark or of UTF-8 is seen where it was read in another encoding.
_MISREAD = re.compile(r"[^\x00-\x7f]{2,}")
_FIRST_IN_LATIN = "\u00c2\u00c3\u00c4\u00c5\u00ce\u00cf\u00e2\u00ef\u00f0"
# Of UTF-8's first bytes what those encodings show.
_SIGNS_OF_IT = re.compile("[\u221a\u201a\u00ac\u00c2\u00c3\u00e2\uf8ff\u00f0\u2248\u0192]")
_UNKNOWN = "\ufffd"  # stands for bytes that are no text
_SAME = (
    ("\u00a0", " "), ("\u202f", " "), ("\u2009", " "), ("\u2212", "-"), ("\u2502", "|"), ("\u2503", "|"),
    ("\ufeff", ""), ("\u2044", "/"), ("\u2026", "..."),
)  # fmt: skip


class Stream(Protocol):
    """What gives bytes, such as an open file."""

    def read(self, size: int = -1, /) -> bytes | None: ...


def blocks(source: bytes | Stream, size: int = BLOCK) -> Iterator[str]:
    """Cleaned text in pieces that end where a line ends; only the last may have no line feed behind it."""
    stream = BytesIO(source) if isinstance(source, bytes) else source
    first = stream.read(max(size, 4000)) or b""
    if is_binary(first):
        return
    decoder = codecs.getincrementaldecoder(encoding_of(first))(errors="replace")
    waiting, chunk = "", first
    while chunk:
        waiting += decoder.decode(chunk)
        chunk = stream.read(size) or b""
        if not chunk:
            waiting = (waiting + decoder.decode(b"", final=True)).rstrip(_UNKNOWN)
        ready, waiting = _whole_lines(waiting, ends=not chunk)
        if ready:
            yield _without_long_lines(clean(ready))


def encoding_of(start: bytes) -> str:
    """Name of the encoding: PowerShell's `>` writes UTF-16, others anything."""
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    head = start[:4000]
    # Without the mark in front: Latin text in UTF-16 has a zero in every other byte.
    for offset, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(head) >= 8 and head[offset::2].count(0) > 0.4 * len(head) > 2.5 * head[1 - offset :: 2].count(
            0
        ):
            return name
    return "utf-8-sig"


def is_binary(start: bytes) -> bool:
    """Is this the beginning of something else than text?"""
    text = start[: 1 << 16].decode(encoding_of(start), errors="replace")
    strange = text.count(_UNKNOWN) + sum(text.count(chr(code)) for code in (*range(8), 14, 15, 16, 17, 127))
    return len(text) > 64 and 8 * strange > len(text)


def _whole_lines(text: str, *, ends: bool) -> tuple[str, str]:
    """(lines that are complete, the rest)."""
    if ends:
        return _line_feeds(text), ""
    # A carriage return at the end may be half of a line's end.
    text = _line_feeds(text[:-1]) + text[-1:] if text.endswith("\r") else _line_feeds(text)
    cut = text.rfind("\n") + 1
    if not cut and len(text) > LONGEST:
        cut = len(text) // LONGEST * LONGEST
    return text[:cut], text[cut:]


def _line_feeds(text: str) -> str:
    """A progress bar's states are lines that overwrite each other; objects of a JSON list are lines too."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _NEXT_OBJECT.sub("},\n{", text) if "}" in text else text


def clean(text: str) -> str:
    """The same without what steers a terminal, and with what was read in a wrong encoding put right."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\x08" in text:
        text = _ERASED.sub("", text)
    if "\x00" in text:
        text = text.replace("\x00", "")
    if text.isascii():
        return text
    if _SIGNS_OF_IT.search(text) and 50 * text.count(_UNKNOWN) < len(text):
        text = _MISREAD.sub(_put_right, text)
    for seen, meant in _SAME:
        if seen in text:
            text = text.replace(seen, meant)
    return text


def _put_right(found: re.Match[str]) -> str:
    """UTF-8 that was read as one byte a character: only where all of it is valid UTF-8 again."""
    # What UTF-8 begins with looks otherwise in each: what is an accented letter here is none there.
    if found[0][0] in _FIRST_IN_LATIN:
        # Windows leaves five bytes without a character, and programs then keep the byte.
        pieces = (c.encode("latin-1" if "\x80" <= c <= "\x9f" else "cp1252", "replace") for c in found[0])
        single = b"".join(pieces)
    else:
        single = found[0].encode("mac_roman", "replace")
    try:
        return found[0] if b"?" in single else single.decode("utf-8")
    except UnicodeError:
        return found[0]


def _without_long_lines(text: str) -> str:
    if len(text) <= LONGEST or all(len(line) <= LONGEST for line in text.split("\n")):
        return text
    pieces = (
        line[at : at + LONGEST] for line in text.split("\n") for at in range(0, max(len(line), 1), LONGEST)
    )
    return "\n".join(pieces)
