"""What a person names to be read: a file, a run's folder, or - for what is pasted."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from onecard.errors import UserError
from onecard.files import open_plain
from onecard.language import _
from onecard.terminal import say

_KEPT = 2**20  # bytes of the beginning and of the end of a log


class Source(io.RawIOBase):
    """A log while it is read: its beginning and its end are kept, for it may be larger than memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._begin, self._end, self._length = b"", b"", 0

    def read(self, size: int = -1) -> bytes:
        piece = self._stream.read(size) or b""
        self._length += len(piece)
        kept = self._end + piece
        if len(self._begin) < _KEPT:
            more = _KEPT - len(self._begin)
            self._begin, kept = self._begin + kept[:more], kept[more:]
        self._end = kept[-_KEPT:]
        return piece

    @property
    def content(self) -> bytes:
        """What was read, without the middle of a long log."""
        return self._begin + self._end


@contextmanager
def opened(source: str, verb: str = "eta") -> Iterator[Source]:
    """UserError where it cannot be read; `verb` is the one that reads it."""
    if source == "-":
        yield Source(_paste())
        return
    path = Path(source)
    of_a_run = path.is_dir() and (path / "log.txt").exists()
    try:
        # A person may name a pipe, such as <(ssh HOST cat LOG); in a run's folder none belongs.
        with open_plain(path / "log.txt") if of_a_run else path.open("rb") as file:
            yield Source(file)
    except FileNotFoundError:
        hint = _("`onecard {verb} -` reads what you paste").format(verb=verb)
        raise UserError(_("there is no log {path}").format(path=source), hint=hint) from None
    except (OSError, ValueError) as error:
        raise UserError(
            _("{path} cannot be read").format(path=source), str(getattr(error, "strerror", None) or error)
        ) from None


class _Again(io.RawIOBase):
    """What somebody has looked at already, and then the rest."""

    def __init__(self, begin: bytes, rest: BinaryIO) -> None:
        self._begin, self._rest = begin, rest

    def read(self, size: int = -1) -> bytes:
        if not self._begin:
            return self._rest.read(size) or b""
        if size < 0:
            size = len(self._begin)
        piece, self._begin = self._begin[:size], self._begin[size:]
        return piece


# A paste can be read once, and `onecard -` looks at it before the verb that answers does.
_seen: list[tuple[Any, bytes]] = []


def look_at_paste(most: int) -> bytes:
    """Its first bytes; `opened("-")` gives them once more."""
    begin = _paste().read(most)
    while len(begin) < most and (piece := sys.stdin.buffer.read(most - len(begin))):
        begin += piece
    _seen[:] = [(sys.stdin, begin)]
    return begin


def _paste() -> BinaryIO:
    if _seen and _seen[0][0] is sys.stdin:
        again: Any = _Again(_seen.pop()[1], sys.stdin.buffer)
        return again
    if sys.stdin.isatty():
        say(_("paste it, then press Ctrl-D (on Windows Ctrl-Z and Enter)"))
    return sys.stdin.buffer


def named(source: str) -> str:
    return _("what was pasted") if source == "-" else source
