"""benchmarks/processes.py: what a measurement in a fork can do wrong stays in its row."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    import importlib

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
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


def test_what_fails_is_told(processes: Any) -> None:
    def raises() -> dict[str, int]:
        raise ValueError("no such figure")

    row = processes.in_own_process(raises, 60.0)
    assert row["error"] == "no result: exit code 1" and "no such figure" in row["trace"]


def test_what_takes_too_long_is_stopped(processes: Any) -> None:
    began = time.monotonic()
    row = processes.in_own_process(lambda: time.sleep(600) or {}, 0.5)
    assert row["error"] == "no result: stopped after 0.5 s"
    assert time.monotonic() - began < 300
