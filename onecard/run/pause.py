"""Asking a job to let go of the card for a while: small files in its run folder.

`pause` is there while somebody wishes it, `paused` while the card is free, and says what is left on it.
`job.json` is the job's own word on anything else: why it refuses, that it waits for memory, that it is
ending. Files rather than signals: they work from another terminal, another user's shell and on Windows, and
tell their own story if something dies.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from onecard.errors import UserError
from onecard.files import AlreadyLockedError, exclusive_lock, parse_json, read_bounded
from onecard.run.directory import RunDirectory

_LOOK_EVERY = 0.05  # seconds: a look at the disk costs little, but not nothing
_ASK_EVERY = 0.02  # a person, or a script, is waiting
_ALIVE_EVERY = 0.5
_PATIENCE, _WORTH_TELLING = 60.0, 0.5
_MOST_SAID = 2**16  # bytes of a word between the two
# Windows does not remove a file while another process reads it, which takes an instant.
_REMOVALS, _REMOVE_EVERY = 5, 0.02


class PauseRequest:
    """The job's side."""

    def __init__(self, directory: RunDirectory) -> None:
        self._wish, self._done, self._word = _files(directory)
        self._looked, self._wanted, self._granted, self._unheard = -_LOOK_EVERY, False, False, False
        self._refusing = False  # is the last word a refusal?
        for left_behind in (self._wish, self._done):  # a wish to a run that is no more
            _remove(left_behind)
        self.says("training")

    def __call__(self) -> bool:
        """As of a moment ago: this is asked between any two micro-batches."""
        return self._wanted if time.monotonic() - self._looked < _LOOK_EVERY else self.requested()

    def requested(self) -> bool:
        """As of now."""
        try:
            there = self._wish.exists()
        except OSError:  # a folder out of reach for a moment: no reason to stop, nor to end
            there = False
        self._unheard = self._unheard and there
        self._looked, self._wanted = time.monotonic(), there and not self._unheard
        if self._wanted and self._refusing:
            self._refusing = False
            self.says("training")  # what was said to an earlier wish is no answer to this one
        return self._wanted

    def granted(self, left: str = "") -> None:
        """The card is free, but for what is `left`, in words."""
        if not self._granted:
            self._granted = True
            self.says("paused")
            # A full disk: the card is free all the same.
            if not _write(self._done, left):
                with contextlib.suppress(OSError):
                    self._done.touch()

    def says(self, state: str, text: str = "") -> None:
        _write(self._word, json.dumps({"state": state, "text": text}))

    def refused(self, why: str) -> None:
        """Not now; training goes on as before."""
        self.says("refused", why)
        self._refusing = True
        _remove(self._wish)
        self._wanted, self._unheard = False, False
        with contextlib.suppress(OSError):  # where it cannot be removed: not once more in every step
            self._unheard = self._wish.exists()

    def going_on(self) -> None:
        """The card is about to be taken again. Whoever wishes a pause from here on waits for another one; who
        did so just before has been told that the card is free, so look once more."""
        if self._granted:
            self._granted = False
            self.says("resuming")
            _remove(self._done)

    def over(self) -> None:
        """Training again. A wish that has come meanwhile is another one, and stands."""
        self.says("training")
        _remove(self._done)
        self._looked, self._granted = -_LOOK_EVERY, False

    def ending(self) -> None:
        """Nobody looks at wishes any more."""
        self.says("ending")

    def ended(self) -> None:
        for path in (self._wish, self._done, self._word):
            _remove(path)


def ask_to_pause(
    directory: RunDirectory, patience: float = _PATIENCE, tell: Callable[[str], None] = lambda text: None
) -> str:
    """Returns when the card is free. `tell` is for whoever waits until then."""
    _need_a_job(directory)
    wish, done, _ = _files(directory)
    began = time.monotonic()
    if _word(directory)[0] == "ending":
        raise _has_ended(directory)
    try:
        wish.touch()
    except OSError as error:
        raise UserError(f"the wish cannot be left in {directory.path}", str(error), exit_code=1) from None
    alive = _Alive(directory)

    def answered() -> bool:
        return done.exists() or not wish.exists() or _word(directory)[0] == "ending" or not alive()

    if not _until(answered, min(patience, _WORTH_TELLING)):
        tell("waiting for the step in progress, half a minute if it is being compiled")
        _until(answered, patience - _WORTH_TELLING)
    if done.exists():
        left = _text(done) or "the card is free"
        return f"paused after {time.monotonic() - began:.1f} s: {left}; --resume-now goes on"
    state, why = _word(directory)
    if state == "ending" or not alive() or not (state or wish.exists()):
        _remove(wish)
        raise _has_ended(directory)
    if wish.exists():
        raise UserError(
            f"the job in {directory.path} has not let go of the card after {patience:.0f} s",
            "it does so between two micro-batches; the wish stands",
            exit_code=1,
        )
    if state == "refused":
        raise UserError(f"the job in {directory.path} cannot pause, and trains on", why, exit_code=1)
    raise UserError("the wish was taken back by somebody else", hint="ask again", exit_code=1)


def ask_to_go_on(directory: RunDirectory, patience: float = _PATIENCE) -> str:
    """Returns when the job has its card again."""
    wish, done, _ = _files(directory)
    if done.exists() and not _somebody_trains(directory):
        raise UserError(
            f"the paused job in {directory.path} is no more", "what it had learned is in its last checkpoint",
            f"onecard train --out_dir={directory.path} goes on from there", exit_code=1,
        )  # fmt: skip
    _need_a_job(directory)

    def paused() -> bool:
        # In this order: a job says that it is resuming before it takes `paused` away.
        return done.exists() or _word(directory)[0] == "resuming"

    if not wish.exists() and not paused():
        return "it is not paused"
    _remove(wish)
    alive = _Alive(directory)
    if _until(lambda: not paused() or wish.exists() or not alive(), patience) and not wish.exists():
        if not alive(at_once=True):
            raise _has_ended(directory)
        return "going on"
    state, text = _word(directory)
    if wish.exists():
        raise UserError("somebody wishes it to be paused again", hint="--resume-now once more", exit_code=1)
    if state == "resuming":
        raise UserError(
            f"the job in {directory.path} waits for memory of the card",
            text,
            "it tries again every few seconds and goes on by itself when there is room",
            exit_code=1,
        )
    raise UserError(f"the job in {directory.path} has not gone on after {patience:.0f} s",
                    text or "the wish stands", exit_code=1)  # fmt: skip


def is_paused(directory: RunDirectory) -> bool:
    """Does a job wait there, with the card free? A `paused` without a job was left by one that died."""
    try:
        return _files(directory)[1].exists() and _somebody_trains(directory)
    except UserError:
        return False  # somebody else's folder: nobody can tell


def _files(directory: RunDirectory) -> tuple[Path, Path, Path]:
    return directory.path / "pause", directory.paused, directory.path / "job.json"


def _word(directory: RunDirectory) -> tuple[str, str]:
    """The job's state and what it says to it; empty where it has said nothing."""
    try:
        said = parse_json(_text(_files(directory)[2]))
        return str(said["state"]), str(said["text"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def _has_ended(directory: RunDirectory) -> UserError:
    return UserError(
        f"the run in {directory.path} is ending", "the card will be free in a moment", exit_code=1
    )


class _Alive:
    """Is the job still there? Looked at now and then: it takes the folder's lock for an instant."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory, self._looked, self._alive = directory, time.monotonic(), True

    def __call__(self, *, at_once: bool = False) -> bool:
        if at_once or time.monotonic() - self._looked > _ALIVE_EVERY:
            self._looked, self._alive = time.monotonic(), _somebody_trains(self._directory)
        return self._alive


def _somebody_trains(directory: RunDirectory) -> bool:
    try:
        with exclusive_lock(directory.path / ".lock"):
            return False
    except AlreadyLockedError:
        return True
    except OSError as error:  # somebody else's folder
        raise UserError(f"the run folder {directory.path} cannot be used", str(error), exit_code=1) from None


def _need_a_job(directory: RunDirectory) -> None:
    # A run takes its folder once data and model are ready, some seconds after its start.
    soon = "if a run has just been started there, ask again in a moment; another folder is another --out_dir"
    if not directory.path.is_dir():
        raise UserError(f"there is no run in {directory.path} yet", hint=soon, exit_code=1)
    if not _somebody_trains(directory):
        raise UserError(f"nobody is training in {directory.path}", hint=soon, exit_code=1)


def _until(true: Callable[[], bool], patience: float) -> bool:
    end = time.monotonic() + patience
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(_ASK_EVERY)
    return True


def _text(path: Path) -> str:
    try:
        return read_bounded(path, _MOST_SAID).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path, text: str) -> bool:
    """Whole or not at all, and without waiting for the disk: nobody needs it after a crash."""
    temporary = path.with_name(f".{path.name}.part")
    for _ in range(_REMOVALS):
        try:
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(path)
            return True
        except PermissionError:
            time.sleep(_REMOVE_EVERY)
        except OSError:
            break
    _remove(temporary)
    return False


def _remove(path: Path) -> None:
    for _ in range(_REMOVALS):
        try:
            path.unlink(missing_ok=True)
            return
        except PermissionError:
            time.sleep(_REMOVE_EVERY)
        except OSError:
            return
