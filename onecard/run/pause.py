"""Asking a job to let go of the card for a while: two small files in its run folder.

`pause` is there while somebody wishes it, `paused` while the card is free. Files rather than signals: they
work from another terminal, another user's shell and on Windows, and tell their own story if something dies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from onecard.errors import UserError
from onecard.files import AlreadyLockedError, exclusive_lock
from onecard.run.directory import RunDirectory

_LOOK_EVERY = 0.2  # seconds: a look at the disk costs little, but not nothing
_PATIENCE = 60.0


class PauseRequest:
    """The job's side."""

    def __init__(self, directory: RunDirectory) -> None:
        self._wish, self._done = directory.path / "pause", directory.path / "paused"
        self._looked, self._wanted = -_LOOK_EVERY, False
        for left_behind in (self._wish, self._done):  # a wish to a run that is no more
            _remove(left_behind)

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY:
            self._looked, self._wanted = now, self._wish.exists()
        return self._wanted

    def granted(self) -> None:
        """The card is free."""
        with contextlib.suppress(OSError):  # a full disk: the card is free all the same
            self._done.touch()

    def over(self) -> None:
        """Training again, or gone."""
        for path in (self._wish, self._done):
            _remove(path)
        self._wanted = False


def ask_to_pause(directory: RunDirectory, patience: float = _PATIENCE) -> str:
    """Returns when the card is free."""
    _need_a_job(directory)
    began = time.monotonic()
    (directory.path / "pause").touch()
    if not _until(lambda: (directory.path / "paused").exists(), patience):
        raise UserError(
            f"the job in {directory.path} has not let go of the card after {patience:.0f} s",
            "it does so between two micro-batches; the wish stands",
            exit_code=1,
        )
    took = time.monotonic() - began
    return f"paused after {took:.1f} s: it holds nothing of the card; --resume-now goes on"


def ask_to_go_on(directory: RunDirectory, patience: float = _PATIENCE) -> str:
    _need_a_job(directory)
    if not any((directory.path / name).exists() for name in ("pause", "paused")):
        return "it is not paused"
    _remove(directory.path / "pause")
    if not _until(lambda: not (directory.path / "paused").exists(), patience):
        raise UserError(
            f"the job in {directory.path} does not go on", "is the memory it needs free?", exit_code=1
        )
    return "going on"


def _need_a_job(directory: RunDirectory) -> None:
    try:
        if not directory.path.is_dir():
            raise UserError(f"there is no run in {directory.path}", hint="--out_dir=FOLDER", exit_code=1)
        with exclusive_lock(directory.path / ".lock"):
            pass
    except AlreadyLockedError:
        return
    raise UserError(f"nobody is training in {directory.path}", hint="--out_dir=FOLDER", exit_code=1)


def _until(true: Callable[[], bool], patience: float) -> bool:
    end = time.monotonic() + patience
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
