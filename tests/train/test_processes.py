"""benchmarks/processes.py: what a measurement in a fork can do wrong stays in its row."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    import importlib

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("processes")


def test_each_in_a_process_of_its_own(processes: Any) -> None:
    works = [lambda: {"pid": os.getpid()}] * 5
    found = dict(processes.side_by_side(works, 2, 60.0))
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert len({row["pid"] for row in found.values()} | {os.getpid()}) == 6


def test_several_at_a_time_and_no_more(processes: Any, tmp_path: Path) -> None:
    def work() -> dict[str, int]:
        mine = tmp_path / str(os.getpid())
        mine.touch()
        time.sleep(0.3)
        beside = len(list(tmp_path.iterdir()))
        mine.unlink()
        return {"beside": beside}

    most = max(row["beside"] for _, row in processes.side_by_side([work] * 6, 3, 60.0))
    assert 1 < most <= 3


def test_what_fails_is_reported(processes: Any) -> None:
    def raises() -> dict[str, int]:
        raise ValueError("no such figure")

    row = processes.in_own_process(raises, 60.0)
    assert row["error"] == "no result: exit code 1" and "no such figure" in row["trace"]


def test_what_takes_too_long_is_stopped(processes: Any) -> None:
    began = time.monotonic()
    row = processes.in_own_process(lambda: time.sleep(600) or {}, 0.5)
    assert row["error"] == "no result: stopped after 0.5 s"
    assert time.monotonic() - began < 300


def test_what_was_known_before_it_was_stopped_is_kept(processes: Any) -> None:
    def work() -> dict[str, int]:
        for done in range(1000):
            processes.so_far({"done": done, "left": 1000 - done})
            time.sleep(0.05)
        return {}

    row = processes.in_own_process(work, 1.0)
    assert row["done"] > 0 and row["done"] + row["left"] == 1000 and "error" not in row


def test_the_next_is_asked_for_when_there_is_a_lane(processes: Any) -> None:
    ended: list[int] = []
    asked_after: list[int] = []

    def works() -> Iterator[Callable[[], dict[str, int]] | None]:
        for number in range(4):
            while number == 2 and len(ended) < 2:
                yield None  # the third would not want to be beside the first two
            asked_after.append(len(ended))
            yield dict

    for number, _ in processes.side_by_side(works(), 2, 60.0):
        ended.append(number)
    assert sorted(ended) == [0, 1, 2, 3]
    assert asked_after[:3] == [0, 0, 2]


def test_interrupted_while_a_row_is_read_the_others_are_ended_all_the_same(
    processes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def goes_on() -> dict[str, Any]:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)
        return {}

    def ends() -> dict[str, Any]:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        return {}

    def interrupted(text: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes.json, "loads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(processes.side_by_side([ends, goes_on], 2, 60.0))
    assert not _runs(int((tmp_path / "pid").read_text()))


# --- turns ------------------------------------------------------------------------------------------


def together_then_alone(processes: Any, file: Path, seconds: float = 0.1) -> dict[str, Any]:
    turns = processes.Turns(file)
    turns.together()
    ready = [time.monotonic()]
    time.sleep(seconds)
    ready.append(time.monotonic())
    turns.alone()
    alone = [time.monotonic()]
    time.sleep(seconds)
    return {"ready": ready, "alone": [*alone, time.monotonic()], "waited": turns.waited}


def apart(one: list[float], other: list[float]) -> bool:
    return one[1] <= other[0] or other[1] <= one[0]


def test_who_measures_is_alone_and_all_get_their_turn(processes: Any, tmp_path: Path) -> None:
    works = [lambda: together_then_alone(processes, tmp_path / "turns")] * 9
    rows = [row for _, row in processes.side_by_side(works, 3, 60.0)]
    assert len(rows) == 9 and not any("error" in row for row in rows)
    for one, other in itertools.permutations(rows, 2):
        assert apart(one["alone"], other["alone"])
        assert apart(one["alone"], other["ready"])
    pairs = itertools.combinations(rows, 2)
    assert any(not apart(one["ready"], other["ready"]) for one, other in pairs), (
        "nothing went on side by side"
    )


def test_who_dies_lets_go(processes: Any, tmp_path: Path) -> None:
    def dies() -> dict[str, Any]:
        processes.Turns(tmp_path / "turns").alone()
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    works = [dies, lambda: together_then_alone(processes, tmp_path / "turns")]
    found = dict(processes.side_by_side(works, 2, 60.0))
    assert found[0]["error"] == "no result: exit code -9"
    assert "alone" in found[1]


def test_waiting_for_a_turn_is_not_counted(processes: Any, tmp_path: Path) -> None:
    """The first never ends by itself; who waits for it is there for longer than the limit."""

    def hangs() -> dict[str, Any]:
        processes.Turns(tmp_path / "turns").alone()
        (tmp_path / "hangs").touch()
        time.sleep(600)
        return {}

    def waits() -> dict[str, Any]:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        return together_then_alone(processes, tmp_path / "turns", 0.75)

    found = dict(processes.side_by_side([hangs, waits], 2, 2.5))
    assert found[0]["error"] == "no result: stopped after 2.5 s"
    assert found[1]["waited"] > 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="by a promise of Linux")
def test_nobody_is_left_behind_when_the_parent_is_ended(tmp_path: Path) -> None:
    """A time limit from outside ends the parent alone; what it began must not go on beside what is next."""
    reported = tmp_path / "pid"
    script = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
sys.path.insert(0, {str(ROOT)!r})
from processes import in_own_process
def work():
    fresh = Path({str(reported)!r} + ".new")
    fresh.write_text(str(os.getpid()))
    fresh.rename({str(reported)!r})
    time.sleep(60)
in_own_process(work, 60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        until = time.monotonic() + 60
        while not reported.exists():
            assert time.monotonic() < until and parent.poll() is None
            time.sleep(0.05)
        child = int(reported.read_text())
        os.kill(child, 0)  # it is there
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < until, "still there"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
