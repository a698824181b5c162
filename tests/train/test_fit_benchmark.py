"""benchmarks/fit.py in its tiny mode: every path runs, its requirements hold, and it can tell when not."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.long
def test_the_tiny_mode_runs_and_all_requirements_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "found.json"
    tiny = ["--device", "cpu", "--tiny", "--out", str(file)]
    done = script(*tiny)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(file)
    parts = {"start", "pause", "caps", "sweep", "inject", "ballast"}
    assert {c["part"] for c in found["checks"]} == parts
    assert all(c["ok"] for c in found["checks"])
    assert "FAIL" not in done.stdout and done.stdout.count("PASS") == len(found["checks"])
    settings = {name: row["began_with"] for name, row in found["rows"]["caps"].items()}
    assert len(set(settings.values())) >= 3, "less memory, other settings"
    assert sum(found["rows"]["inject"]["loud"]["raised"].values()) >= 30
    swept = [s for row in found["rows"]["sweep"].values() for s in row["settings"]]
    assert sum(s["drawn"] for s in swept) == 3, "also of those the planner would not try"
    climbed = [r for r in found["rows"]["ballast"]["run"]["refitted"] if r["where"] == "climb"]
    assert climbed, "memory that has come back is used again"
    assert str(tmp_path) not in file.read_text(), "results name no folder of this machine"

    # A size whose time was over goes on where it stopped.
    size, row = max(found["rows"]["sweep"].items(), key=lambda item: len(item[1]["settings"]))
    gone, *kept = row["settings"]
    row |= {"settings": kept, "unmeasured": [gone["setting"]]}
    file.write_text(json.dumps(found))
    again = script(*tiny, "--parts", "sweep", "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stderr.count("sweep, ") == 1 and size in again.stderr
    found = results(file)
    *others, new = found["rows"]["sweep"][size]["settings"]
    assert others == kept and (new["setting"], new["loss_chunk"]) == (gone["setting"], gone["loss_chunk"])

    # What is there is not run again; a requirement that does not hold is reported, and decides the exit code.
    found["rows"]["caps"]["tiny 0"]["val_loss"] += 0.02
    del found["rows"]["ballast"]
    file.write_text(json.dumps(found))
    again = script(*tiny, "--parts", "caps", "--resume")
    assert again.returncode == 1
    assert [line for line in again.stdout.splitlines() if line.startswith("FAIL caps: tiny 0: validation")]
    assert "caps, tiny" not in again.stderr, "nothing was run"
    assert results(file)["resumed"] == [*found["resumed"], found["command"]]
    report = script("--report", str(file))
    assert report.returncode == 1 and report.stdout == again.stdout


def test_a_cpu_cannot_stand_in_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = script("--device", "cpu")
    assert done.returncode == 2 and "--tiny" in done.stderr


# --- what the judges must not let pass
@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    names = ("fit", "fit_parts", "fit_sweep", "fit_disturbed", "fit_runs", "fit_trouble")
    return {name: importlib.import_module(name) for name in names}


CARD = Namespace(tiny=False, slower=0.2, caps=[11.0, 2.0], steps=200, inject_steps=200, parts=["caps"])


def verdicts(checks: list[dict[str, Any]], word: str) -> list[bool]:
    return [c["ok"] for c in checks if word in c["what"]]


def capped_row(cap: float | None, **changes: Any) -> dict[str, Any]:
    must_be = {"rates": "a", "position": "b", "tokens": 1}
    row = {"asked": 200, "steps": 200, "cap_gib": cap, "peak_reserved_gib": 1.0, "setting": "s",
           "predicted_need_gib": 1.0, "began_with": "s", "exact": True, "val_loss": 4.0,
           "train": [(0, 1.0)], "refits": 0, "took": 1.0, "tokens_per_s": 100, "must_be": must_be,
           **must_be}  # fmt: skip
    return row | changes


def test_caps_that_did_not_run_are_failures(bench: dict[str, Any]) -> None:
    whole = {"uncapped": capped_row(None), "11 GiB": capped_row(11.0), "2 GiB": capped_row(2.0),
             "from outside: 2 GiB": capped_row(2.0)}  # fmt: skip
    judged = bench["fit"].judged
    assert all(c["ok"] for c in judged(CARD, {"caps": whole}))
    for gone in whole:
        rest = {name: row for name, row in whole.items() if name != gone}
        assert [c["what"] for c in judged(CARD, {"caps": rest}) if not c["ok"]] == [f"{gone}: ran"]
    assert {c["ok"] for c in judged(CARD, {})} == {False}
    torn = whole | {"2 GiB": {"took": 1.0}}
    assert [c["what"] for c in judged(CARD, {"caps": torn}) if not c["ok"]] == ["can be judged"]
    broken = whole | {"2 GiB": {"error": "ended", "took": 9.0}}
    assert [c["found"] for c in judged(CARD, {"caps": broken}) if not c["ok"]] == ["ended"]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"refits": 1}, "holds"), ({"position": "c"}, "data position"), ({"rates": "c"}, "learning rates"),
     ({"peak_reserved_gib": 2.1}, "peak reserved"), ({"steps": 199}, "ran to the end")],
)  # fmt: skip
def test_a_cap_that_was_not_held(bench: dict[str, Any], change: dict[str, Any], word: str) -> None:
    rows = {"uncapped": capped_row(None), "2 GiB": capped_row(2.0, **change)}
    found = bench["fit_parts"].judge_caps(CARD, rows, {})
    assert [c["what"].startswith("2 GiB") and word in c["what"] for c in found if not c["ok"]] == [True]


def sweep_rows(*settings: dict[str, Any]) -> dict[str, Any]:
    counts = {"unmeasured": [], "kept": len(settings), "drawn": 0, "of": 40}
    return {"micro-batch 1": {"settings": list(settings), **counts}}


def test_the_sweep_counts_what_runs_under_a_cap(bench: dict[str, Any]) -> None:
    judge = bench["fit_sweep"].judge_sweep
    caps = {"caps": {"11 GiB": capped_row(11.0), "2 GiB": capped_row(2.0, tokens_per_s=50)}}
    small = {"setting": "small", "tokens_per_s": 50, "peak_reserved_gib": 1.5}
    tight = {"setting": "tight", "tokens_per_s": 100, "peak_reserved_gib": 2.01}

    def found(*settings: dict[str, Any]) -> list[bool]:
        return verdicts(judge(CARD, sweep_rows(*settings), caps), "tokens/s")

    assert found(small, tight) == [True, True], "a setting that was not seen to run in 2 GiB is none"
    assert found(tight) == [True, False], "a cap with nothing to compare is no success"
    ran = tight | {"under_caps": [{"cap": 2.0, "ran": True, "tokens_per_s": 90}]}
    assert found(small, ran) == [True, False], "twice as fast, and it runs in 2 GiB"
    assert found(small, tight | {"under_caps": [{"cap": 2.0, "ran": False}]}) == [True, True]
    assert verdicts(judge(CARD, sweep_rows(small, tight), {}), "tokens/s") == [False, False]
    fewer = sweep_rows(small, tight)
    fewer["micro-batch 1"]["kept"] = 3
    assert verdicts(judge(CARD, fewer, caps), "worth measuring") == [False]


def test_a_ballast_that_takes_nothing_shows_nothing(bench: dict[str, Any]) -> None:
    def found(gib: float, **changes: Any) -> list[str]:
        moves = [{"did": f"took {gib:g} GiB of the 3 it wanted", "gib": gib}, {"did": "gave it back"}]
        row = capped_row(None) | {
            "phases": [1, 1, 1], "ballast": moves * 3, "least_gib": 0.5, "seconds_before": 1,
            "seconds_after": 1, "seconds_during": 1, "steps": 3, "logged": [0, 1, 2], "updates": 3,
            "refits": 1, "steps_until_as_fast": 0, "val": [(0, 9.0), (3, 8.0)],
        }  # fmt: skip
        judge = bench["fit_disturbed"].judge_ballast
        return [c["what"] for c in judge(CARD, {"run": row | changes}, {}) if not c["ok"]]

    assert found(3.0) == []
    assert ["taken and given back" in what for what in found(0.0)] == [True]
    assert ["data position" in what for what in found(3.0, position="c")] == [True]
    assert found(3.0, val=[(0, 9.0), (3, 9.5)]) == ["validation loss"]
    assert found(3.0, val=[(0, 9.0), (3, float("nan"))]) == ["validation loss"]


def test_errors_must_arrive_as_what_they_are(bench: dict[str, Any]) -> None:
    counts = bench["fit_trouble"].places(CARD)
    assert sum(counts.values()) == 100
    row = capped_row(None) | {
        "updates": 200, "logged": list(range(200)), "raised": counts, "arrived": {"OutOfMemoryError": 100},
        "in_a_row": {"evaluation": 3, "sampling": 2, "checkpoint": 2}, "weights": "w",
    }  # fmt: skip
    nothing = {"allocations": 0, "bytes_above": 0, "bytes_asked_of_the_driver": 0}
    muon = {"update_allocations": {"allocations": 9, "bytes_above": 9, "bytes_asked_of_the_driver": 0}}
    quiet = row | {"update_allocations": nothing}

    def found(muon: dict[str, Any] = muon, **changes: Any) -> list[str]:
        rows = {"quiet": quiet, "loud": row | changes, "same setting": row, "quiet, muon": muon}
        judge = bench["fit_disturbed"].judge_inject
        return [c["what"] for c in judge(CARD, rows, {}) if not c["ok"]]

    assert found() == []
    assert found(arrived={"OutOfMemoryError": 99, "RuntimeError": 1}) == ["loud: arrive as what they are"]
    assert found(in_a_row=row["in_a_row"] | {"sampling": 1}) == ["loud: in a row at one step"]
    asked = {"update_allocations": nothing | {"bytes_asked_of_the_driver": 2**21}}
    assert [what.startswith("Muon") for what in found(muon=asked)] == [True]


# --- how it measures
def test_peaks_before_the_figures_begin_anew_are_kept(
    bench: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"peak": 0}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: now["peak"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now["peak"] // 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: now.update(peak=0))
    peaks = bench["fit_runs"].Peaks()
    peaks.watch()
    for peak in (2 * 2**30, 3 * 2**30, 2**30):
        now["peak"] = peak
        torch.cuda.reset_peak_memory_stats("cuda")
        assert now["peak"] == 0
    assert peaks.told() == {"peak_allocated_gib": 1.5, "peak_reserved_gib": 3.0}


def test_a_setting_is_tried_under_a_cap_that_is_lifted_again(
    bench: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    parts, runs, shares = bench["fit_sweep"], bench["fit_runs"], list[float]()
    options = Namespace(tiny=True, eager=True, device="cpu", dataset="none", work=tmp_path, seed=1,
                        sweep_steps=4)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    class Stepper:
        model = Namespace(compiled=False)

        def release(self) -> None:
            pass

        def use_graphs(self, graphs: bool | None) -> None:
            assert graphs is False

    question = runs.question_of(options)
    choice = question.answer(next(iter(importlib.import_module("onecard.plan.search").settings(
        question.config, question.shape))))  # fmt: skip
    monkeypatch.setattr(parts, "measured_speed", lambda *_: 70)
    assert parts.under_cap(options, 2.0, choice, Stepper(), None) == {
        "cap": 2.0, "ran": True, "tokens_per_s": 70,
    }  # fmt: skip

    def full(*_: Any) -> int:
        assert shares[-1] == pytest.approx(0.02)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(parts, "measured_speed", full)
    assert parts.under_cap(options, 2.0, choice, Stepper(), None) == {"cap": 2.0, "ran": False}
    assert shares[1::2] == [1.0, 1.0]


def test_a_job_that_hangs_is_ended() -> None:
    program = "import fit_runs, time; fit_runs.STALLED_SECONDS = 0.3; fit_runs.PULSE.beat(); time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1 and "line 1 in <module>" in done.stderr, "and it reports where it stood"
