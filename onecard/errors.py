"""UserError, the one kind of error a person may cause, and how it is shown.

All that a person can get wrong ends in a UserError: what happened, why, and a hint with the command that
helps. Anything else that escapes is a bug in onecard and keeps its traceback.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from onecard.language import _
from onecard.terminal import hanging, visible


class UserError(Exception):
    """A mistake or a circumstance outside onecard, in words that a person can act on, in his language."""

    def __init__(self, what: str, why: str = "", hint: str = "", *, exit_code: int = 2) -> None:
        """exit_code 2: wrong use; 1: nothing was used wrongly, but the answer is no."""
        super().__init__(what)
        self.exit_code = exit_code
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        return self.within(sys.maxsize)

    def within(self, width: int) -> str:
        """Readable without colour: `error:` what, why indented under it, `hint:` last. Lines that are too
        long go on below themselves, except hints with a command or flags to paste."""
        error, hint = _("error:") + " ", _("hint:") + " "
        # A file's name may hold line breaks: what happened is one line.
        lines = hanging(error + visible(self.what).replace("\n", "\\n"), width, len(error))
        for line in visible(self.why).splitlines():
            lines += hanging("  " + line, width, 2)
        for number, line in enumerate(visible(self.hint).splitlines()):
            shown = (hint if number == 0 else " " * len(hint)) + line
            whole = "onecard " in line or line.startswith("--") or ": --" in line
            lines += [shown] if whole else hanging(shown, width, len(hint))
        return "\n".join(lines)


class EndedAtOnce(KeyboardInterrupt):
    """A second Ctrl-C or polite kill: nothing more is saved. Its exit code is a shell's for that signal."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.exit_code = 128 + signal_number


def install_command(extra: str) -> str:
    """From a clone the clone is installed; pip has no other onecard to offer."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'onecard[{extra}]'"
    if (root / ".venv").is_dir() and not sys.prefix.startswith(str(root)):
        command = f". {root / '.venv' / 'bin' / 'activate'}"
        return _("use the clone's own Python: {command}").format(command=command)
    return f"pip install -e '{root}[{extra}]'"


def missing_package(package: str, extra: str, needed_for: str) -> UserError:
    """The base install is torch-free; the hint names the extra that brings the missing package."""
    what = _("{task} needs the package '{package}', which is not installed")
    return UserError(what.format(task=needed_for, package=package), hint=install_command(extra))


def need_package(package: str, extra: str, needed_for: str) -> None:
    """Raise missing_package unless the package can be imported; importing it is left to the caller."""
    if find_spec(package) is None:
        raise missing_package(package, extra, needed_for)


def first_line(error: BaseException) -> str:
    """Of a message that may be pages long, the line that says it."""
    if isinstance(error, UserError):
        return error.what
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
