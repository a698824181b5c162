"""The planner held against real cards: the grid, the arithmetic of errors, and what was measured."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2Shape, NanochatShape
from onecard.hardware.cards import find_card
from onecard.hardware.measured import AttentionRate, MatmulRate, Measured
from onecard.plan.bill import GIB, Facts, training_bill
from onecard.plan.rates import rates_of
from onecard.plan.speed import step_time

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "plan_accuracy.py"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("plan_accuracy_*.json"))
assert RESULTS, "a grid that was measured is in the repository"
USUAL = {
    "recompute": "none", "offload": "none", "master_weights": "fp32", "optim_states": "fp32",
    "compile": True, "cuda_graphs": False, "loss_chunk": 0, "optimizer": "", "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def accuracy() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPT.parent))
    import accuracy_errors
    import accuracy_grid

    yield types.SimpleNamespace(**{**vars(accuracy_grid), **vars(accuracy_errors)})
    sys.path[:] = before


@pytest.fixture(scope="module")
def cases(accuracy: Any) -> list[Any]:
    return accuracy.grid()


# --- the grid ---------------------------------------------------------------------------------------


def test_the_grid_spans_families_and_sizes(cases: list[Any]) -> None:
    assert 80 <= len({case.hash for case in cases}) == len({case.name for case in cases}) == len(cases)
    for family in ("gpt2", "nanochat-2025", "nanochat-2026"):
        assert sum(case.family == family for case in cases) >= 20
    sizes = [case.shape.parameters for case in cases]
    assert min(sizes) <= 10e6
    assert max(sizes) >= 1.8e9
    assert {case.block for case in cases} >= {256, 512, 1024, 2048, 4096}
    assert {case.micro_batch for case in cases} >= {1, 2, 4, 8, 16, 32}
    assert {case.dtype for case in cases} == {"bfloat16", "float16", "float32"}


SETTINGS = [
    ("recompute", "mlp"), ("recompute", "block"), ("offload", "optimizer"), ("offload", "gradients"),
    ("master_weights", "bf16"), ("optim_states", "int8"), ("optim_states", "bf16"), ("compile", False),
    ("cuda_graphs", True), ("loss_chunk", 512), ("optimizer", "muon"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_every_setting_appears_alone_and_in_company(cases: list[Any], name: str, value: object) -> None:
    others = [
        {n for n, usual in USUAL.items() if n != name and getattr(case, n) != usual}
        for case in cases
        if getattr(case, name) == value
    ]
    assert set() in others
    assert sum(len(names) >= 1 for names in others) >= 2


def test_a_fifth_is_held_out_whatever_is_measured(accuracy: Any, cases: list[Any]) -> None:
    held_out = [case for case in cases if case.held_out]
    assert 0.13 <= len(held_out) / len(cases) <= 0.27
    assert {case.family for case in held_out} == {case.family for case in cases}
    # By the configuration alone: these were decided before the first measurement.
    first = accuracy.Case("gpt2", 12, 768, 16, 1024)
    assert first.hash.startswith("74aaf2a7")
    assert not first.held_out
    assert dataclasses.replace(first, optim_states="int8").held_out
    assert accuracy.case_of(json.loads(json.dumps(first.to_json()))) == first


def test_everything_fits_the_machine_it_is_meant_for(cases: list[Any]) -> None:
    for case in cases:
        bill = case.bill((9, 0))
        assert bill.process <= 120 * GIB, case.name
        assert bill.host <= 60 * GIB, case.name


def test_a_part_of_the_order_covers_all_families_and_code_is_shared(accuracy: Any, cases: list[Any]) -> None:
    order = accuracy.in_order(cases)
    assert sorted(case.name for case in order) == sorted(case.name for case in cases)
    assert {case.family for case in order[:20]} == {case.family for case in cases}
    seen: list[object] = []
    for case in order:
        if case.code is not None and (not seen or seen[-1] != case.code):
            assert case.code not in seen, case.name
            seen.append(case.code)


# --- errors -----------------------------------------------------------------------------------------


def a_call(launch_us: float = 5.0) -> dict[str, Any]:
    bench = Measured(
        card="NVIDIA H200", date="2026-11-16T00:00:00+00:00", dtype="bfloat16", ceiling_size=8192,
        ceiling_tflops=780.0, copy_gbps=4300.0, reduce_gbps=4000.0, h2d_gbps=50.0, d2h_gbps=40.0,
        launch_us=launch_us, matmuls=(MatmulRate(4096, 768, 768, 400.0, 400.0, 400.0),),
        attention=(AttentionRate(64, 1024, 300.0, 300.0),), memory_gib=139.8,
    )  # fmt: skip
    return {
        "card": "NVIDIA H200", "memory_gib": 139.8, "compute_capability": [9, 0], "torch": "2.11",
        "date": "2026-11-16", "matmul_tflops": 780.0, "bench": json.loads(json.dumps(bench.to_json())),
    }  # fmt: skip


def a_row(accuracy: Any, case: Any, measured: dict[str, float], **more: Any) -> dict[str, Any]:
    return accuracy.as_row(case) | {"call": 0, "measured": measured} | more


def test_errors_are_those_of_the_formulas(accuracy: Any) -> None:
    """Two configurations priced here by hand, measured a tenth above, and a twentieth below."""
    plain = rates_of(find_card("H200 SXM"), "bfloat16")
    assert plain is not None
    rates = dataclasses.replace(plain, to_card=50e9, to_host=40e9)
    small = Setting(1, 4096, "none", "optimizer", compile=False)
    shape = GPT2Shape(12, 12, 768, 50304, 1024, False)
    bill, seconds = training_bill(shape, small), step_time(shape, small, "bfloat16", rates, 2).seconds
    chat, by_muon = NanochatShape(12, 6, 768, 65536, 2048), Setting(8, 3072, "block", "none", "bf16", "int8")
    chat_bill = training_bill(chat, by_muon, facts=Facts(by_muon=True))
    chat_seconds = step_time(chat, by_muon, "bfloat16", rates, 16, by_muon=True).seconds
    gpt2 = accuracy.Case("gpt2", 12, 768, 1, 1024, offload="optimizer", compile=False)
    nanochat = accuracy.Case("nanochat-2025", 12, 768, 8, 2048, "block", "none", "bf16", "int8")
    rows = [
        a_row(accuracy, gpt2, {"allocated": bill.allocated * 1.1, "reserved": bill.reserved * 1.1,
              "seconds": seconds * 1.1}, ran_under_cap=True, cap_bytes=bill.need, ran_in_bytes=bill.need),
        a_row(accuracy, nanochat, {"allocated": chat_bill.allocated * 0.95,
              "reserved": chat_bill.reserved * 0.95, "seconds": chat_seconds * 0.5},
              ran_under_cap=False, cap_bytes=chat_bill.need),
        {**accuracy.as_row(gpt2), "error": "out of memory", "call": 0},
    ]  # fmt: skip
    found = accuracy.recompute({"calls": [a_call()], "rows": rows})
    assert [row["name"] for row in found] == [gpt2.name, nanochat.name]
    for row, error in zip(found, (1 / 1.1 - 1, 1 / 0.95 - 1), strict=True):
        assert row["error_allocated"] == pytest.approx(error)
        assert row["error_reserved"] == pytest.approx(error)
    assert [row["error_seconds"] for row in found] == pytest.approx([1 / 1.1 - 1, 1.0])
    assert [row["within_seconds"] for row in found] == [True, False]
    assert [row["within_allocated"] for row in found] == [False, True]
    assert [row["ran_under_cap"] for row in found] == [True, False]


def test_the_host_is_a_quiet_one_unless_the_bench_is_asked(accuracy: Any) -> None:
    """A model of one sequence waits for the host: by the bench, twice the cost of a launch is nearly twice
    the time. From the card's figures it is the same in every hour."""
    case = accuracy.Case("gpt2", 12, 768, 1, 1024, compile=False)
    fast, slow = (accuracy.predict(case, a_call(us), "bench")["seconds"] for us in (20.0, 40.0))
    assert 1.8 < slow / fast <= 2.0
    quiet, busy = (accuracy.predict(case, a_call(us))["seconds"] for us in (20.0, 40.0))
    assert quiet == busy < fast
    # So a row measured three times counts with the least, and is predicted whatever its call found.
    measured = {"allocated": 1.0, "reserved": 1.0, "seconds": 2 * quiet}
    again = a_row(accuracy, case, measured, earlier_seconds=[3 * quiet, quiet])
    for call in (a_call(90.0), a_call(5.0)):
        (row,) = accuracy.recompute({"calls": [call], "rows": [again]})
        assert row["predicted_seconds"] == row["measured_seconds"] == quiet and row["error_seconds"] == 0


def test_a_small_model_may_be_64_mib_off_and_time_may_not(accuracy: Any) -> None:
    mib = 2**20
    assert accuracy._within("allocated", 463 * mib, 400 * mib)
    assert not accuracy._within("reserved", 465 * mib, 400 * mib)
    assert accuracy._within("allocated", 10_500 * mib, 10_000 * mib)
    assert not accuracy._within("allocated", 10_700 * mib, 10_000 * mib)
    assert not accuracy._within("seconds", 1.21, 1.0)


@pytest.mark.parametrize(
    ("ran", "tried", "needed", "answer"),
    [(True, 100, 100, True), (True, 100, 120, True), (True, 100, 96, True), (True, 100, 94, None),
     (False, 100, 100, False), (False, 100, 90, False), (False, 100, 120, None), (None, 0, 100, None)],
)  # fmt: skip
def test_a_cap_says_nothing_about_another_need(
    accuracy: Any, ran: bool | None, tried: int, needed: int, answer: bool | None
) -> None:
    row = {"ran_under_cap": ran, "cap_bytes": tried, "ran_in_bytes": 95 if ran else None}
    assert accuracy._ran(row, needed) is answer


def test_a_first_step_is_tried_with_nothing_compiled(
    accuracy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels are tried out in it, which a process that has just measured the same has done already."""
    import accuracy_measure
    import plan_accuracy

    first = accuracy.Case("gpt2", 1, 64, 1, 256, "block")  # nothing is as large as the buffer of a trial
    plain = accuracy.Case("gpt2", 12, 768, 8, 1024, compile=False)
    run = object.__new__(plan_accuracy.Run)
    run.options, run.began = argparse.Namespace(device="cpu", only="", lanes=2), time.monotonic()
    vars(run.options).update(limit_seconds=60.0, budget_seconds=1e9, count=-1, again=None)
    run.call, run.out = a_call() | {"memory_gib": 100.0}, tmp_path / "grid.json"
    there = {"ran_under_cap": True, "cap_in": "the same process", "ran_in_bytes": 1, "cap_bytes": 1}
    measured = {"allocated": 1.0, "reserved": 1.0, "seconds": 1.0}
    run.rows = [a_row(accuracy, case, measured, **there) for case in (first, plain)]
    run.results = {"calls": [a_call()], "rows": run.rows}
    assert [row["ran_under_cap"] for row in accuracy.recompute(run.results)] == [None, True]

    def run_capped(case: Any, device: str, need: int) -> dict[str, Any]:
        assert case == first
        return {"ran_under_cap": True, "cap_in": accuracy.COLD, "cap_bytes": need, "ran_in_bytes": need,
                "cap_problem": None, "took": 1.0}  # fmt: skip

    monkeypatch.setattr(accuracy_measure, "run_capped", run_capped)
    run.try_caps()
    assert [row["ran_under_cap"] for row in accuracy.recompute(run.results)] == [True, True]
    kept = json.loads(run.out.read_text())["rows"]
    assert kept[0]["cap_bytes"] == first.bill((9, 0)).need and kept[1]["cap_bytes"] == 1
    assert list(plan_accuracy.to_try_again(run.options, run.results)) == []
    run.options.again = "8x1024"
    assert [case for case, _ in plan_accuracy.to_try_again(run.options, run.results)] == [plain]


def test_what_was_free_and_of_no_use_is_told(accuracy: Any) -> None:
    import accuracy_measure

    sizes = [(3, "inactive"), (96, "active_allocated"), (40, "inactive"), (7, "active_pending_free")]
    blocks = [{"size": mib << 20, "state": state} for mib, state in sizes]
    assert accuracy_measure.free_pieces([{"blocks": blocks}, {"blocks": blocks}], most=3) == [40, 40, 3]


def entry(name: str, error: float | None, *, held_out: bool = False, within: bool = True) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "held_out": held_out, "ran_under_cap": None}
    for quantity in ("allocated", "reserved", "seconds"):
        row |= {f"error_{quantity}": error, f"within_{quantity}": None if error is None else within}
    return row


def test_what_is_held_out_is_told_apart(accuracy: Any) -> None:
    rows = [entry("a", 0.01), entry("b", -0.05), entry("c", 0.015),
            entry("d", 0.03, held_out=True), entry("e", None, held_out=True)]  # fmt: skip
    found = accuracy.summary(rows)
    assert found["fitted"]["configurations"] == 3
    assert found["fitted"]["allocated"]["median"] == pytest.approx(0.015)
    assert found["fitted"]["allocated"]["worst"] == pytest.approx(0.05)
    assert found["fitted"]["allocated"]["worst_name"] == "b"
    assert found["fitted"]["allocated"]["holds"]
    assert found["held_out"]["allocated"]["count"] == 1
    assert not found["held_out"]["allocated"]["holds"]  # a median of 3%
    assert found["held_out"]["seconds"]["holds"]
    assert found["held_out"]["not_tried"] == ["d", "e"]
    assert accuracy.summary(rows[:3])["held_out"]["seconds"] is None
    beyond = accuracy.summary([entry("a", 0.0), entry("b", 0.0), entry("c", 0.5, within=False)])
    assert beyond["fitted"]["seconds"]["beyond"] == ["c"]
    assert not beyond["fitted"]["seconds"]["holds"]


# --- what is started when --------------------------------------------------------------------------


@pytest.fixture
def lanes(accuracy: Any) -> Any:
    import accuracy_lanes

    return accuracy_lanes


def test_nothing_is_started_that_would_end_too_late(accuracy: Any, lanes: Any, cases: list[Any]) -> None:
    few = accuracy.estimates(dataclasses.replace(case, compile=False) for case in cases[:4])
    nothing = lanes.Lanes(few, lanes.Memory(None, None), lambda: 0.1, budget_s=0.0)
    assert list(nothing) == []
    assert nothing.left == [one.case.name for one in few]
    # Time for the first alone; the second would have to wait for it as well.
    enough = few[1].seconds + few[0].alone_s
    for budget, started in ((enough + 0.1, 2), (enough - 0.1, 1)):
        queue = lanes.Lanes(few[:2], lanes.Memory(None, None), lambda: 0.0, budget_s=budget)
        assert len(list(queue)) == started == 2 - len(queue.left)


def test_what_is_left_when_time_is_up_is_told(accuracy: Any, lanes: Any, cases: list[Any]) -> None:
    clock = [0.0]
    few = accuracy.estimates(cases[:4])
    queue = lanes.Lanes(few, lanes.Memory(None, None), lambda: clock[0], budget_s=1000.0, most=3)
    asked = iter(queue)
    assert next(asked) == few[0]
    clock[0] = 999.0
    assert next(asked, "the end") == "the end"
    assert queue.left == [one.case.name for one in few[1:]]


def test_only_what_the_memory_holds_runs_side_by_side(accuracy: Any, lanes: Any) -> None:
    small, large = accuracy.Case("gpt2", 6, 320, 1, 256), accuracy.Case("gpt2", 12, 768, 32, 1024)
    queued = accuracy.estimates([small, large, small])
    for memory in (
        lanes.Memory(large.bill().process / 0.85 + 1, None),  # enough for it alone
        lanes.Memory(None, large.bill().building.bytes / 0.85 + 1),
    ):
        queue = lanes.Lanes(queued, memory, lambda: 0.0, budget_s=1e9)
        asked = iter(queue)
        assert next(asked) == queued[0]
        assert next(asked) is None
        assert next(asked) is None
        queue.ended(small.name)
        assert next(asked) == queued[1]
        assert next(asked) is None
        queue.ended(large.name)
        assert next(asked) == queued[2]
    tiny_card = lanes.Lanes(queued[1:2], lanes.Memory(1.0, 1.0), lambda: 0.0, budget_s=1e9)
    assert next(iter(tiny_card)) == queued[1]  # alone, it is its own affair


def test_again_comes_after_what_is_missing_and_before_what_failed(
    accuracy: Any, lanes: Any, cases: list[Any]
) -> None:
    order = accuracy.in_order(cases)
    measured, older, failed, missing = order[0], order[1], order[2], order[3:]
    rows = [
        accuracy.as_row(measured) | {"call": 2},
        accuracy.as_row(older) | {"call": 1},
        accuracy.as_row(failed) | {"call": 0, "error": "no result"},
    ]
    options = argparse.Namespace(again=None, only="", tiny=False)
    assert lanes.waiting(options, rows) == [*missing, failed]
    options.again = ""
    assert lanes.waiting(options, rows) == [*missing, older, measured, failed]
    options.again = f"^{re.escape(older.name)}$"
    assert lanes.waiting(options, rows) == [*missing, older, failed]


# --- the script -------------------------------------------------------------------------------------


def run_script(*arguments: str, without_torch: bool = False) -> subprocess.CompletedProcess[str]:
    blocked = "sys.modules['torch'] = sys.modules['numpy'] = None;" if without_torch else ""
    code = f"import runpy, sys;{blocked}runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT,
    )  # fmt: skip


def test_listing_and_reporting_need_no_torch(accuracy: Any, tmp_path: Path) -> None:
    listed = run_script("--list", "--only", "^gpt2 12L384", without_torch=True)
    assert listed.returncode == 0, listed.stderr
    assert "gpt2 12L384 16x1024 none/none fp32/fp32 compiled graphs" in listed.stdout
    assert "minutes" in listed.stdout.splitlines()[-1]
    file = tmp_path / "results.json"
    case = accuracy.Case("gpt2", 12, 768, 16, 1024)
    said = accuracy.predict(case, a_call())
    measured = {"allocated": said["allocated"], "reserved": 1.02 * said["reserved"], "seconds": 1.0}
    row = a_row(accuracy, case, measured, ran_under_cap=True, ran_in_bytes=said["need"])
    file.write_text(json.dumps({"calls": [a_call()], "rows": [row]}))
    told = run_script("--report", str(file), "--worst", "1", without_torch=True)
    assert told.returncode == 0, told.stderr
    assert "seconds   median 9" in told.stdout
    assert "DOES NOT HOLD" in told.stdout
    assert "1 ran, 0 ran out" in told.stdout


@pytest.mark.slow
def test_the_whole_path_on_a_cpu(accuracy: Any, tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    words = ("--device=cpu", "--tiny", "--bench_seconds=0.2", f"--out={out}", "--only=block/", "--count=1")
    done = run_script(*words)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    (row,) = results["rows"]
    assert "error" not in row and row["measured"]["seconds"] > 0 and row["ran_under_cap"] is None
    assert results["unfinished"] and row["predicted"]["need"] > 0


@pytest.mark.long
def test_the_whole_path_on_a_cpu_and_going_on_from_there(accuracy: Any, tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    words = ("--device=cpu", "--tiny", "--bench_seconds=0.2", f"--out={out}", "--only=block/")
    first = run_script(*words, "--count=2")
    assert first.returncode == 0, first.stderr
    assert run_script(*words).returncode != 0  # never over an earlier file without being told to
    assert run_script(*words, "--resume", "--count=1").returncode == 0
    results = json.loads(out.read_text())
    assert len(results["calls"]) == 2
    assert [row["call"] for row in results["rows"]] == [0, 0, 1]
    assert len({row["name"] for row in results["rows"]}) == 3
    for row in results["rows"]:
        assert "error" not in row
        # The update is timed after the steps: whatever else runs then may make it slower than a whole step.
        assert row["measured"]["seconds"] > 0 and row["measured"]["update"] > 0
        assert row["ran_under_cap"] is None  # there is no card to cap
        assert row["predicted"]["need"] > 0
    assert results["unfinished"]
    found = accuracy.summary(accuracy.recompute(results))
    assert found["fitted"]["allocated"] is None  # nothing that was not measured counts as met


@pytest.mark.long
def test_lanes_measure_the_same_one_at_a_time(tmp_path: Path) -> None:
    words = ("--device=cpu", "--tiny", "--bench_seconds=0.2", "--count=3", "--only=block/")
    plain, beside = tmp_path / "plain.json", tmp_path / "beside.json"
    rows = {}
    for out, lanes in ((plain, "1"), (beside, "2")):
        run = run_script(*words, f"--out={out}", f"--lanes={lanes}")
        assert run.returncode == 0, run.stderr
        rows[out] = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert len(rows[plain]) == 3
    assert rows[plain].keys() == rows[beside].keys()
    for name, row in rows[beside].items():
        assert "error" not in row
        assert row.keys() == rows[plain][name].keys()
        assert len(row["measured"]["warm_up"]) == 5
        begin, end = row["alone"]
        each, update = row["measured"]["each"], row["measured"]["update"]
        assert row["measured"]["steps_of_each"] * sum(each) + update <= end - begin + 0.002
    for one, other in itertools.combinations(rows[beside].values(), 2):
        assert one["alone"][1] <= other["alone"][0] or other["alone"][1] <= one["alone"][0]


@pytest.mark.long
def test_again_replaces_and_no_budget_starts_nothing(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    words = ("--device=cpu", "--tiny", "--bench_seconds=0.2", f"--out={out}", "--only=block/", "--lanes=2")
    assert run_script(*words, "--count=2").returncode == 0
    before = json.loads(out.read_text())["rows"]
    name = before[0]["name"]
    again = (*words, f"--only=^{re.escape(name)}$", f"--again={re.escape(name)}")
    nothing = run_script(*again, "--budget_seconds=0")
    assert nothing.returncode == 0, nothing.stderr
    found = json.loads(out.read_text())
    assert found["rows"] == before
    assert found["unfinished"] == [name]
    killed = run_script(*again, "--limit_seconds=0")
    assert killed.returncode == 0, killed.stderr
    assert "stopped after 0 s" in killed.stderr
    assert json.loads(out.read_text())["rows"] == before, "a good row is not given up for a failure"
    assert run_script(*again).returncode == 0
    kept, replaced = json.loads(out.read_text())["rows"]
    assert kept == before[1]
    assert replaced["name"] == name
    assert replaced["call"] == 3
    assert "error" not in replaced
    assert replaced["earlier_seconds"] == [before[0]["measured"]["seconds"]]
    assert replaced["measured"]["launch_us"] > 0


# --- what was measured ------------------------------------------------------------------------------


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_the_bars_hold_for_what_was_held_out(accuracy: Any, file: Path) -> None:
    rows = accuracy.recompute(json.loads(file.read_text()))
    assert len(rows) >= 80, "a part of the grid only"
    found = accuracy.summary(rows)
    for quantity in ("allocated", "reserved", "seconds"):
        held_out = found["held_out"][quantity]
        assert held_out is not None, f"{quantity} was not measured"
        assert held_out["holds"], (quantity, held_out)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_none_runs_out_under_a_cap_of_its_need(accuracy: Any, file: Path) -> None:
    for split in accuracy.summary(accuracy.recompute(json.loads(file.read_text()))).values():
        assert not split["ran_out"], split["ran_out"]
        assert not split["not_tried"], ("--caps tries them again", split["not_tried"])
