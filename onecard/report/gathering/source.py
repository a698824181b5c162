"""What a person names to be read: a file, a run's folder, or - for what is pasted."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
def opened(source: str) -> Iterator[Source]:
    """UserError where it cannot be read."""
    if source == "-":
        if sys.stdin.isatty():
            say(_("paste the log, then press Ctrl-D (on Windows Ctrl-Z and Enter)"))
        yield Source(sys.stdin.buffer)
        return
    path = Path(source)
    of_a_run = path.is_dir() and (path / "log.txt").exists()
    try:
        # A person may name a pipe, such as <(ssh HOST cat LOG); in a run's folder none belongs.
        with open_plain(path / "log.txt") if of_a_run else path.open("rb") as file:
            yield Source(file)
    except FileNotFoundError:
        raise UserError(
            _("there is no log {path}").format(path=source), hint=_("`onecard eta -` reads what you paste")
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            _("{path} cannot be read").format(path=source), str(getattr(error, "strerror", None) or error)
        ) from None


def named(source: str) -> str:
    return _("what was pasted") if source == "-" else source
