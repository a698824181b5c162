"""What a person names to be read: a file, a run's folder, or - for what is pasted."""

from __future__ import annotations

import sys
from pathlib import Path

from onecard.errors import UserError
from onecard.files import open_plain
from onecard.language import _
from onecard.terminal import say

MAX_BYTES = 200_000_000  # months of lines; more is a data file given by mistake


def content_of(source: str) -> bytes:
    """All of it; UserError where it cannot be read or is too large for a log."""
    content = _content(source)
    if len(content) > MAX_BYTES:
        raise UserError(
            _("this is too large for a log"),
            _("it has more than {n:,} bytes").format(n=MAX_BYTES),
            "tail -n 2000 LOG | onecard eta -",
        )
    return content


def _content(source: str) -> bytes:
    """One byte more than a log may have is enough to refuse it."""
    if source == "-":
        return _paste()
    path = Path(source)
    of_a_run = path.is_dir() and (path / "log.txt").exists()
    try:
        # A person may name a pipe, such as <(ssh HOST cat LOG); in a run's folder none belongs.
        with open_plain(path / "log.txt") if of_a_run else path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(
            _("there is no log {path}").format(path=source), hint=_("`onecard eta -` reads what you paste")
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            _("{path} cannot be read").format(path=source), str(getattr(error, "strerror", None) or error)
        ) from None


# What was pasted can be read once, and `onecard -` looks at it before the verb that answers does.
_pasted: tuple[object, bytes] | None = None


def _paste() -> bytes:
    global _pasted
    if _pasted is None or _pasted[0] is not sys.stdin:
        if sys.stdin.isatty():
            say(_("paste it, then press Ctrl-D (on Windows Ctrl-Z and Enter)"))
        _pasted = (sys.stdin, sys.stdin.buffer.read(MAX_BYTES + 1))
    return _pasted[1]


def named(source: str) -> str:
    return _("what was pasted") if source == "-" else source
