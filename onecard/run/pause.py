"""Pause requests: small files in a run's folder, by which a job is asked to free the card for a while.

`pause` is the request, there until it is withdrawn. `paused` is there while the card is free, and says what
is left on it. `job.json` is the job's answer to anything else: why it refuses, that it waits for memory, that
it is ending. Files rather than signals: they work from another terminal, another user's shell and on Windows,
and can still be read after a crash.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from onecard.errors import UserError
from onecard.files import AlreadyLockedError, exclusive_lock, parse_json, read_bounded
from onecard.language import _
from onecard.run.directory import RunDirectory

_LOOK_EVERY = 0.05  # seconds: a look at the disk costs little, but not nothing
_ASK_EVERY = 0.02  # a person, or a script, is waiting
_ALIVE_EVERY = 0.5
_PATIENCE, _QUIET = 60.0, 0.5  # a wait longer than the second is reported
_MOST_SAID = 2**16  # bytes of an answer
# Windows does not remove a file while another process reads it, which takes an instant.
_REMOVALS, _REMOVE_EVERY = 5, 0.02


class PauseRequest:
    """The job's side: is a pause requested, and what it answers."""

    def __init__(self, directory: RunDirectory) -> None:
        self._request, self._done, self._answer = _files(directory)
        self._looked, self._wanted, self._granted, self._unheard = -_LOOK_EVERY, False, False, False
        self._refusing = False  # is the last answer a refusal?
        for left_behind in (self._request, self._done):  # a request to a run that is no more
            _remove(left_behind)
        self.says("training")

    def __call__(self) -> bool:
        """As of a moment ago: this is asked between any two micro-batches."""
        return self._wanted if time.monotonic() - self._looked < _LOOK_EVERY else self.requested()

    def requested(self) -> bool:
        """As of now."""
        try:
            there = self._request.exists()
        except OSError:  # a folder out of reach for a moment: no reason to stop, nor to end
            there = False
        self._unheard = self._unheard and there
        self._looked, self._wanted = time.monotonic(), there and not self._unheard
        if self._wanted and self._refusing:
            self._refusing = False
            self.says("training")  # the answer to an earlier request is none to this one
        return self._wanted

    def granted(self, left: str = "") -> None:
        """The card is free, except for what is `left` (left_in_words)."""
        if not self._granted:
            self._granted = True
            self.says("paused")
            # A full disk: the card is free all the same.
            if not _write(self._done, left):
                with contextlib.suppress(OSError):
                    self._done.touch()

    def says(self, state: str, text: str = "") -> None:
        _write(self._answer, json.dumps({"state": state, "text": text}))

    def refused(self, why: str) -> None:
        """Not now; training goes on as before."""
        self.says("refused", why)
        self._refusing = True
        _remove(self._request)
        self._wanted, self._unheard = False, False
        with contextlib.suppress(OSError):  # where it cannot be removed: not once more in every step
            self._unheard = self._request.exists()

    def going_on(self) -> None:
        """The card is about to be taken again. Whoever asks for a pause from here on waits for another one.
        Who did so just before has seen that the card is free: look once more."""
        if self._granted:
            self._granted = False
            self.says("resuming")
            _remove(self._done)

    def over(self) -> None:
        """Training again. A request that has come meanwhile is another one, and still active."""
        self.says("training")
        _remove(self._done)
        self._looked, self._granted = -_LOOK_EVERY, False

    def ending(self) -> None:
        """Nobody looks at requests any more."""
        self.says("ending")

    def ended(self) -> None:
        for path in (self._request, self._done, self._answer):
            _remove(path)


def ask_to_pause(
    directory: RunDirectory, patience: float = _PATIENCE, say: Callable[[str], None] = lambda text: None
) -> str:
    """Returns when the card is free. `say` is for whoever waits until then."""
    _need_a_job(directory)
    request, done, _answer_file = _files(directory)
    began, before = time.monotonic(), done.exists() and request.exists()
    if _answer(directory)[0] == "ending":
        raise _has_ended(directory)
    try:
        request.touch()
    except OSError as error:
        raise UserError(
            _("the pause request cannot be written to {path}").format(path=directory.path),
            str(error),
            exit_code=1,
        ) from None
    alive = _Alive(directory)

    def answered() -> bool:
        return done.exists() or not request.exists() or _answer(directory)[0] == "ending" or not alive()

    if not _until(answered, min(patience, _QUIET)):
        say(_("waiting for the step in progress, half a minute if it is being compiled"))
        _until(answered, patience - _QUIET)
    if done.exists():
        left, seconds = left_in_words(_text(done)), time.monotonic() - began
        if before:
            return _("it is paused already: {left}; --resume-now goes on").format(left=left)
        return _("paused after {seconds:.1f} s: {left}; --resume-now goes on").format(
            seconds=seconds, left=left
        )
    state, why = _answer(directory)
    if state == "ending" or not alive() or not (state or request.exists()):
        _remove(request)
        raise _has_ended(directory)
    if request.exists():
        raise UserError(
            _("the run in {path} has not paused after {patience:.0f} s").format(
                path=directory.path, patience=patience
            ),
            _("it pauses between micro-batches; the request is still active"),
            exit_code=1,
        )
    if state == "refused":
        raise UserError(
            _("the run in {path} cannot pause and trains on").format(path=directory.path), why, exit_code=1
        )
    raise UserError(_("somebody else has withdrawn the pause request"), hint=_("ask again"), exit_code=1)


def ask_to_go_on(directory: RunDirectory, patience: float = _PATIENCE) -> str:
    """Returns when the job has its card again."""
    request, done, _answer_file = _files(directory)
    if done.exists() and not _somebody_trains(directory):
        raise UserError(
            _("the paused run in {path} has ended").format(path=directory.path),
            _("what it had learned is in its last checkpoint"),
            _("{command} goes on from there").format(command=f"onecard train --out_dir={directory.path}"),
            exit_code=1,
        )
    _need_a_job(directory)

    def paused() -> bool:
        # In this order: a job says that it is resuming before it takes `paused` away.
        return done.exists() or _answer(directory)[0] == "resuming"

    if not request.exists() and not paused():
        return _("it is not paused")
    _remove(request)
    alive = _Alive(directory)
    if _until(lambda: not paused() or request.exists() or not alive(), patience) and not request.exists():
        if not alive(at_once=True):
            raise _has_ended(directory)
        return _("going on")
    state, text = _answer(directory)
    if request.exists():
        raise UserError(
            _("somebody has requested another pause"), hint=_("use --resume-now once more"), exit_code=1
        )
    if state == "resuming":
        raise UserError(
            _("the run in {path} waits for memory of the card").format(path=directory.path),
            text,
            _("it tries again every few seconds and goes on by itself as soon as there is enough"),
            exit_code=1,
        )
    raise UserError(
        _("the run in {path} has not gone on after {patience:.0f} s").format(
            path=directory.path, patience=patience
        ),
        text or _("the request is still active"),
        exit_code=1,
    )


def left_in_words(held: str) -> str:
    """What a paused run still has of its card. The job writes it without words, for readers of any language:
    GiB as a number, "cuda" where nobody knows how many, "cpu" where there is no card."""
    if held == "cpu":
        return _("nothing is computed")
    if held == "cuda":
        text = _("the card is free, apart from {low:g} to {high:g} GiB that CUDA itself keeps")
        return text.format(low=0.5, high=1)
    try:
        gib = float(held)
    except ValueError:
        return held or _("the card is free")
    return _("the card is free, apart from {n:.2f} GiB that CUDA itself keeps").format(n=gib)


def is_paused(directory: RunDirectory) -> bool:
    """Does a job wait there, with the card free? A `paused` without a job was left by a crash."""
    try:
        return _files(directory)[1].exists() and _somebody_trains(directory)
    except UserError:
        return False  # somebody else's folder: nobody knows


def _files(directory: RunDirectory) -> tuple[Path, Path, Path]:
    return directory.path / "pause", directory.paused, directory.path / "job.json"


def _answer(directory: RunDirectory) -> tuple[str, str]:
    """The job's state and its explanation; empty where it has said nothing."""
    try:
        said = parse_json(_text(_files(directory)[2]))
        return str(said["state"]), str(said["text"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def _has_ended(directory: RunDirectory) -> UserError:
    return UserError(
        _("the run in {path} is ending").format(path=directory.path),
        _("the card will be free in a moment"),
        exit_code=1,
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
        raise UserError(
            _("the run folder {path} cannot be used").format(path=directory.path), str(error), exit_code=1
        ) from None


def _need_a_job(directory: RunDirectory) -> None:
    # A run takes its folder once data and model are ready, some seconds after its start.
    soon = _("if a run has just been started there, ask again in a moment; --out_dir names another folder")
    if not directory.path.is_dir():
        raise UserError(
            _("there is no run in {path} yet").format(path=directory.path), hint=soon, exit_code=1
        )
    if not _somebody_trains(directory):
        why, next_command = _of_a_run_that_ended(directory)
        hint = "\n".join(filter(None, (next_command, soon)))
        raise UserError(_("nobody is training in {path}").format(path=directory.path), why, hint, exit_code=1)


def _of_a_run_that_ended(directory: RunDirectory) -> tuple[str, str]:
    """Where it ended, and what comes next; empty where it never got as far as a checkpoint."""
    step, config = directory.newest_step(), directory.read_config()
    if not step or config is None:
        return "", ""
    command = f"--out_dir={shlex.quote(str(directory.path))}"
    if step >= config.max_iters:
        why = _("the run is finished: {done:,} of {steps:,} steps are done")
        hint = _("what comes next: {command}").format(command=f"onecard plan {command}")
    else:
        why = _("the run was stopped: {done:,} of {steps:,} steps are done")
        hint = _("{command} goes on from there").format(command=f"onecard train {command}")
    return why.format(done=step, steps=config.max_iters), hint


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
    for _attempt in range(_REMOVALS):
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
    for _attempt in range(_REMOVALS):
        try:
            path.unlink(missing_ok=True)
            return
        except PermissionError:
            time.sleep(_REMOVE_EVERY)
        except OSError:
            return
