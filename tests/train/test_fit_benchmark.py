"""benchmarks/fit.py in its tiny mode: every path runs, its requirements hold, and it can tell when not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "fit.py"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="its jobs are forks")


def script(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=environment, capture_output=True, text=True, timeout=300
    )


def results(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_the_tiny_mode_runs_and_all_requirements_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "found.json"
    tiny = ["--device", "cpu", "--tiny", "--out", str(file)]
    parts = ["caps", "inject", "pause", "start"]
    done = script(*tiny, "--parts", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(file)
    assert {c["part"] for c in found["checks"]} == set(parts)
    assert all(c["ok"] for c in found["checks"])
    assert "FAIL" not in done.stdout and done.stdout.count("PASS") == len(found["checks"])
    settings = {name: row["began_with"] for name, row in found["rows"]["caps"].items()}
    assert len(set(settings.values())) >= 3, "less memory, other settings"
    assert sum(found["rows"]["inject"]["loud"]["raised"].values()) >= 30
    assert str(tmp_path) not in file.read_text(), "results name no folder of this machine"

    # What is there is not run again; a requirement that does not hold is told, and decides the exit code.
    found["rows"]["caps"]["tiny 0"]["val_loss"] += 0.02
    file.write_text(json.dumps(found))
    again = script(*tiny, "--parts", "caps", "--resume")
    assert again.returncode == 1
    assert [line for line in again.stdout.splitlines() if line.startswith("FAIL caps: tiny 0: validation")]
    assert "caps, tiny" not in again.stderr, "nothing was run"
    assert results(file)["resumed"] == [found["command"]]
    report = script("--report", str(file))
    assert report.returncode == 1 and report.stdout == again.stdout


def test_a_cpu_cannot_stand_in_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = script("--device", "cpu")
    assert done.returncode == 2 and "--tiny" in done.stderr
