"""nanoGPT begins with an evaluation: where that already fails, plan says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peers_measured import name_of, peers, shape_of

from onecard.arch.shapes import GPT2Shape
from onecard.cli import main
from onecard.plan.lines import GIB
from onecard.plan.others.nanogpt import nanogpt_bill
from onecard.plan.others.nanogpt_step import EVALUATION
from onecard.plan.others.trainer import TrainerBill

EVALUATED = [row for row in peers("nanogpt") if row["job"]["evaluates"]]
CAPPED = [row for row in EVALUATED if row["job"]["cap_gib"]]
FINISHED = [row for row in EVALUATED if not row["job"]["cap_gib"]]


def bill_of(job: dict[str, Any], *, evaluates: bool = True) -> TrainerBill:
    return nanogpt_bill(
        shape_of(job), job["batch"], compiled=job["compile"], evaluates=evaluates,
        gradient_accumulation_steps=job["accumulation"],
    )  # fmt: skip


def test_rows_are_there() -> None:
    assert len(CAPPED) == 9 and len(FINISHED) == 6
    assert {row["ran_out"].partition(":")[0] for row in CAPPED} == {"evaluation", "training"}


@pytest.mark.parametrize("row", FINISHED, ids=name_of)
def test_an_evaluations_peaks(row: dict[str, Any]) -> None:
    bill = bill_of(row["job"])
    heap = bill.step(float("inf")).run(0, 1, evaluates=True)
    measured = row["peaks"]["evaluation"]
    assert heap.peak_moment == EVALUATION
    assert heap.peak_allocated == pytest.approx(measured["allocated"], rel=0.001)
    # Compiled, the allocator has small pieces of Inductor's own.
    assert heap.peak_reserved == pytest.approx(measured["reserved"], rel=0.04)


@pytest.mark.parametrize("row", FINISHED, ids=name_of)
def test_what_it_leaves_in_the_cache_changes_what_training_reserves(row: dict[str, Any]) -> None:
    measured, job = row["peaks"]["steady"], row["job"]
    assert bill_of(job).reserved == pytest.approx(measured["reserved"], rel=0.02)
    assert bill_of(job).allocated == pytest.approx(measured["allocated"], rel=0.002)
    without = bill_of(job, evaluates=False).reserved
    if not job["compile"] and job["n_layer"] < 24:
        assert abs(without / measured["reserved"] - 1) > 0.12


@pytest.mark.parametrize("row", CAPPED, ids=name_of)
def test_under_a_cap_it_fails_where_the_bill_says(row: dict[str, Any]) -> None:
    moment, _, error = row["ran_out"].partition(": ")
    failed = bill_of(row["job"]).within(int(row["job"]["cap_gib"] * GIB)).ran_out
    assert failed is not None
    assert (failed.moment == EVALUATION) == (moment == "evaluation")
    tried = error.split("Tried to allocate ")[1].split(" GiB")[0]
    assert f"{failed.tried / GIB:.2f}" == tried


def test_plan_names_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--as=nanogpt", "--gpu=RTX 4070", "--batch_size=32", "--no-compile", "--max_iters=1000"]
    assert main([*words, "--vram_limit=8"]) == 1
    assert "first evaluation" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--vram_limit=8", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["runs_out"]["moment"] == EVALUATION
    # More memory, and it is training that fails.
    assert main([*words, "--gpu=RTX 4090", "--vram_limit=22", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["runs_out"]["moment"] != EVALUATION


def test_float32_has_no_copies() -> None:
    shape = GPT2Shape(4, 4, 256, 512, 256, False)
    for compiled in (True, False):
        step = nanogpt_bill(shape, 8, dtype="float32", compiled=compiled).step(float("inf"))
        heap = step.run(0, 1, evaluates=True)
        assert heap.allocated < heap.peak_allocated
        left = {what for (what, _), count in heap.alive.items() if count}
        assert left == {"weights", "tokens and targets", "cuBLAS workspaces"}
