"""Signals: Ctrl-C, a polite kill and their like save and end, SIGUSR1 saves and trains on, SIGQUIT shows
where a run is stuck and ends it.

Handlers only write down what was asked. The loop does it, where a step has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType

from onecard.errors import EndedAtOnce
from onecard.language import _

# Ctrl-C, a polite kill, a terminal that is closed, a batch system's limit of CPU time, a power supply on its
# battery. Windows has the first two only.
_STOP = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGPWR")
_SAVE = "SIGUSR1"
# What ends a run at once, if one of these has come before.
_INSISTS = {"SIGINT": {"SIGINT", "SIGTERM", "SIGHUP"}, "SIGTERM": {"SIGTERM"}}
# Two signals so close together are one request: a key held down, a terminal and a shell that both pass it on.
_ONE_REQUEST_SECONDS = 1.0
_LOOK_EVERY = 0.05


class StopRequest:
    """While active, signals ask the loop to stop; a second Ctrl-C, or a second polite kill, ends it at once.

    Only those: whoever closes a terminal sends a hang-up twice (the shell, then the kernel), a system that is
    shut down a polite kill and a hang-up, and the kernel says every second that CPU time is over. What they
    ask for is the same, and it is being done. So are the Ctrl-C and the polite kill that a batch system sends
    some seconds apart, after the end of CPU time or without it: it leaves a run time to save.
    """

    def __init__(self) -> None:
        self.count = 0  # signals that asked for something new: to stop, and then to stop at once
        self._at = float("-inf")  # when the last of them came
        self._heard: set[str] = set()
        self._save_asked = self._waiting = False
        self._undo = ExitStack()

    def __call__(self) -> bool:
        return self.count > 0

    def asked_to_save(self) -> bool:
        """Has SIGUSR1 come since this was last asked?"""
        if not self._save_asked:
            return False
        self._save_asked = False  # not in any case: one that comes between two lines would be forgotten
        return True

    def wait(self, seconds: float, since: int | None = None) -> bool:
        """True as soon as there is a new request to stop, False when none has come in this time.

        New is one that is not among the first `since` of `count`; by default, one that comes during the call.
        A second Ctrl-C or polite kill is an answer here and raises nothing, whichever signal was the first.
        """
        until = time.monotonic() + seconds
        known = self.count if since is None else since
        self._waiting = True
        try:
            while self.count <= known and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, _LOOK_EVERY))
        finally:
            self._waiting = False
        return self.count > known

    def __enter__(self) -> StopRequest:
        for name in (*_STOP, _SAVE):
            number = getattr(signal, name, None)
            # Ignored: by nohup, or for a job in the background; it was asked to go on. None: not Python's.
            if number is None or (before := signal.getsignal(number)) in (signal.SIG_IGN, None):
                continue
            try:
                signal.signal(number, self._on_save if name == _SAVE else self._on_stop)
            except ValueError:
                # Signals belong to the main thread; elsewhere (a notebook, a test) there is none to catch.
                return self
            self._undo.callback(signal.signal, number, before)
        self._undo.enter_context(_stacks_on_quit())
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save_asked = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        insists = name in _INSISTS and bool(self._waiting or _INSISTS[name] & self._heard)
        another = insists and now - self._at >= _ONE_REQUEST_SECONDS
        if another or (not insists and name not in self._heard):
            self._at = now  # what comes twice is one request, also where something else had come long before
        self._heard.add(name)
        if self.count and not another:
            return
        self.count += 1
        if self.count > 1 and not self._waiting:
            raise EndedAtOnce(number)


@contextlib.contextmanager
def nothing_to_save() -> Iterator[None]:
    """SIGUSR1 while a run begins or has ended is answered, and ends nothing: whoever asks every hour cannot
    know that a large checkpoint is being read."""
    number = getattr(signal, _SAVE, None)
    if number is None or signal.getsignal(number) != signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(number, _say_nothing_to_save)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)


def _say_nothing_to_save(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # no print: it may have come in the middle of one
        note = _("note: {text}").format(text=_("asked by SIGUSR1 to save: there is nothing to save now"))
        os.write(2, f"{note}\n".encode(errors="replace"))


@contextlib.contextmanager
def _stacks_on_quit() -> Iterator[None]:
    r"""SIGQUIT (Ctrl-\) ends a run as ever, and shows before where each of its threads is.

    For a run that is stuck. Python's own handlers wait until Python has its turn; this one is C, and says
    nothing but the stacks for that reason.
    """
    number = getattr(signal, "SIGQUIT", None)
    # A job that a script has put in the background ignores it: shows its stacks, and goes on.
    if number is None or signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        yield
        return
    try:
        faulthandler.register(number, file=sys.stderr, all_threads=True, chain=True)
    except (AttributeError, OSError, RuntimeError, ValueError):  # a notebook's stderr is no file
        yield
        return
    try:
        with _no_core_dump():
            yield
    finally:
        faulthandler.unregister(number)


@contextlib.contextmanager
def _no_core_dump() -> Iterator[None]:
    """All of a run's memory in a file, many GB of it: nobody who asks where it is stuck wants that."""
    import resource  # not on Windows, which has no SIGQUIT either

    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
