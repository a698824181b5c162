"""Signals: what asks a run to stop lets it save, what asks it to save lets it go on."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from onecard.errors import EndedAtOnce
from onecard.train import interrupt
from onecard.train.interrupt import StopRequest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")


POWER = "SIGPWR" if hasattr(signal, "SIGPWR") else "SIGXCPU"  # Linux has it


def send(*names: str) -> None:
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize(
    "names",
    [("SIGHUP", "SIGHUP"), ("SIGTERM", "SIGHUP"), ("SIGHUP", "SIGTERM", "SIGHUP"), ("SIGINT", "SIGHUP"),
     ("SIGINT", "SIGTERM"), ("SIGXCPU", "SIGXCPU", "SIGXCPU"), (POWER, "SIGTERM", "SIGHUP"),
     ("SIGXCPU", "SIGINT", "SIGTERM")],
)  # fmt: skip
def test_a_closed_terminal_and_polite_kills_only_ask(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell passes a hang-up on and the kernel sends it again; a shutdown sends both kinds, a batch system
    one after the other, and the kernel repeats that CPU time is over."""
    clock = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    with StopRequest() as stop:
        assert not stop()
        for name in names:
            send(name)
            clock[0] += 5
            assert stop() and stop.count == 1


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


def test_a_second_polite_kill_quits_unless_it_is_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    for before in ([], ["SIGINT"], ["SIGXCPU"], ["SIGHUP"]):
        with StopRequest() as stop:
            for name in before:
                send(name)
                clock[0] += 30
            send("SIGTERM", "SIGTERM")  # to the process, and to its group
            clock[0] += 0.9
            send("SIGTERM")
            assert stop() and stop.count == 1
            clock[0] += 0.2
            with pytest.raises(EndedAtOnce) as ended:
                send("SIGTERM")
            assert ended.value.exit_code == 143 and isinstance(ended.value, KeyboardInterrupt)
            send("SIGTERM")  # what is being tidied up is not interrupted by the same one


def test_a_ctrl_c_after_another_kind_is_the_first_of_its_own_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    with StopRequest() as stop:
        send("SIGXCPU")
        clock[0] += 10
        send("SIGINT", "SIGINT")  # a key held down
        assert stop.count == 1
        clock[0] += 1.1
        with pytest.raises(EndedAtOnce) as ended:
            send("SIGINT")
        assert ended.value.exit_code == 130


def test_asked_to_save_is_not_asked_to_stop() -> None:
    with StopRequest() as stop:
        assert not stop.asked_to_save()
        send("SIGUSR1", "SIGUSR1", "SIGUSR1")
        assert not stop() and stop.count == 0
        assert stop.asked_to_save() and not stop.asked_to_save(), "three before the save are one"
        send("SIGUSR1")
        assert stop.asked_to_save()


# --- waiting for an answer
def later(seconds: float, *names: str) -> threading.Timer:
    timer = threading.Timer(seconds, send, names)
    timer.start()
    return timer


def test_waiting_ends_with_the_time_or_with_the_first_request() -> None:
    with StopRequest() as stop:
        began = time.monotonic()
        assert not stop.wait(0.1)
        assert 0.1 <= time.monotonic() - began < 5
        for name in ("SIGUSR1", "SIGHUP"):
            later(0.05, name)
            assert stop.wait(0.5 if name == "SIGUSR1" else 60) == (name == "SIGHUP")
        assert time.monotonic() - began < 30 and stop.count == 1
        later(0.05, "SIGHUP")
        assert not stop.wait(0.3), "a hang-up never adds up"
        assert stop.asked_to_save(), "it is not forgotten"


@pytest.mark.parametrize("names", [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGHUP", "SIGINT")])
def test_waiting_a_second_signal_is_an_answer(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = names
    monkeypatch.setattr(interrupt, "_ONE_REQUEST_SECONDS", 0.2)
    with StopRequest() as stop:
        signal.raise_signal(getattr(signal, first))
        later(0.05, second)
        assert not stop.wait(0.15), "within a second: the same request"
        time.sleep(0.2)
        later(0.05, second)
        assert stop.wait(60) and stop.count == 2
        assert not stop.wait(0.01), "known by now"
        assert stop.wait(60, since=1), "came before the call, after the moment that is asked about"


def test_waiting_over_a_signal_raises_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_ONE_REQUEST_SECONDS", 0.0)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert not stop.wait(0.01)
        with pytest.raises(EndedAtOnce):
            signal.raise_signal(signal.SIGTERM)


def test_waiting_in_a_process_of_its_own() -> None:
    """Real signals from outside, a second and more apart."""
    script = """
from onecard.train.interrupt import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    print(stop.wait(60, since=0), stop.count, flush=True)
    print(stop.wait(60, since=1), stop.count, flush=True)
    stop.wait(60, since=9)
"""
    with python(script) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "True 1\n"
        child.send_signal(signal.SIGTERM)
        time.sleep(1.1)
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "True 2\n"
        child.kill()


def python(script: str) -> subprocess.Popen[str]:
    begin = "import signal; signal.signal(signal.SIGQUIT, signal.SIG_DFL)\n"  # ignored in the background
    return subprocess.Popen(
        [sys.executable, "-c", begin + script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip


# --- where it is stuck
STUCK = """
import ctypes, threading
from onecard.train.interrupt import StopRequest
libc = ctypes.PyDLL(None)  # keeps Python's own lock: no other bytecode is run
def beside():
    threading.Event().wait()
threading.Thread(target=beside, daemon=True).start()
with StopRequest() as stop:
    print("ready", flush=True)
    while True:
        libc.sleep(60)
"""


def test_quit_shows_all_stacks_even_where_python_is_stuck() -> None:
    with python(STUCK) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(0.2)  # it is in C by now
        child.send_signal(signal.SIGQUIT)
        _, shown = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGQUIT
    assert shown.count("Current thread 0x") == 1 and shown.count("Thread 0x") == 1
    assert " in beside\n" in shown


def test_a_job_in_the_background_that_ignores_quit_shows_its_stacks_and_goes_on() -> None:
    script = """
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
from onecard.train.interrupt import StopRequest
with StopRequest() as stop:
    for _ in range(2):
        signal.raise_signal(signal.SIGQUIT)
signal.raise_signal(signal.SIGQUIT)
"""
    with python(script) as child:
        _, shown = child.communicate(timeout=60)
    assert child.returncode == 0 and shown.count("Current thread 0x") == 2


def test_no_core_dump_meanwhile_and_all_as_it_was_afterwards() -> None:
    script = """
import resource
from onecard.train.interrupt import StopRequest
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
soft = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGQUIT"]
handlers = [signal.getsignal(name) for name in map(signal.Signals.__getitem__, names)]
with StopRequest():
    assert resource.getrlimit(resource.RLIMIT_CORE) == (0, hard)
assert resource.getrlimit(resource.RLIMIT_CORE) == (soft, hard)
assert handlers == [signal.getsignal(name) for name in map(signal.Signals.__getitem__, names)]
import faulthandler
assert not faulthandler.unregister(signal.SIGQUIT)
"""
    with python(script) as child:
        _, said = child.communicate(timeout=60)
    assert child.returncode == 0, said


def test_a_thread_has_no_signals_and_can_wait() -> None:
    before, found = signal.getsignal(signal.SIGUSR1), []

    def inside() -> None:
        with StopRequest() as stop:
            found.append((stop(), stop.asked_to_save(), stop.wait(0.01), signal.getsignal(signal.SIGUSR1)))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join(timeout=60)
    assert found == [(False, False, False, before)]


def test_a_stderr_that_is_no_file_only_costs_the_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with StopRequest() as stop:
        send("SIGTERM")
        assert stop()


def test_what_was_to_be_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            send("SIGHUP")
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
