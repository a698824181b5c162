"""Signals that ask a run to stop: it saves, and is not kept from saving."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from onecard.train import interrupt
from onecard.train.interrupt import StopRequest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")


def send(*names: str) -> None:
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize(
    "names",
    [("SIGHUP", "SIGHUP"), ("SIGTERM", "SIGHUP"), ("SIGTERM", "SIGTERM", "SIGTERM"), ("SIGINT", "SIGHUP"),
     ("SIGINT", "SIGTERM")],
)  # fmt: skip
def test_a_closed_terminal_and_polite_kills_only_ask(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell passes a hang-up on and the kernel sends it again; a shutdown sends both kinds."""
    clock = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    with StopRequest() as stop:
        assert not stop()
        for name in names:
            send(name)
            clock[0] += 5
            assert stop()


def test_a_second_ctrl_c_quits_unless_it_is_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    with StopRequest() as stop:
        send("SIGINT", "SIGINT")  # a key held down
        clock[0] += 0.9
        send("SIGINT")
        assert stop()
        clock[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            send("SIGINT")
    with StopRequest() as stop:
        send("SIGTERM")
        clock[0] += 2
        with pytest.raises(KeyboardInterrupt):
            send("SIGINT")


def test_what_was_to_be_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            send("SIGHUP")
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
