from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from onecard.run.directory import RunDirectory
from onecard.run.metrics import Recorder, evaluation_line, iteration_line, read_metrics


def recorder(tmp_path: Path) -> tuple[Recorder, RunDirectory]:
    directory = RunDirectory(tmp_path / "run")
    with directory.claimed(fresh=False):
        return Recorder(directory), directory


def test_the_lines_are_nanogpts() -> None:
    assert (
        iteration_line(200, 6.12341, 4.32112, 0.1152) == "iter 200: loss 6.1234, time 4321.12ms, mfu 11.52%"
    )
    assert iteration_line(0, 6.1, 0.5, None) == "iter 0: loss 6.1000, time 500.00ms"
    assert evaluation_line(500, 5.86, 5.861) == "step 500: train loss 5.8600, val loss 5.8610"


def test_after_a_resume_the_later_lines_win_and_abandoned_ones_go(tmp_path: Path) -> None:
    with recorder(tmp_path)[0] as files:
        for step in range(6):
            files.metrics(step=step, loss=float(step))
        files.metrics(step=4, val_loss=9.0)
    with recorder(tmp_path)[0] as files:  # resumed at step 3
        files.metrics(step=3, loss=30.0)
        files.metrics(step=3, val_loss=8.0)
    lines = read_metrics(RunDirectory(tmp_path / "run").metrics_path)
    assert [(x["step"], x["loss"]) for x in lines if "loss" in x] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert [(x["step"], x["val_loss"]) for x in lines if "val_loss" in x] == [(3, 8.0)]


def test_a_line_cut_short_by_a_crash_is_skipped_and_not_glued_to_the_next(tmp_path: Path) -> None:
    files, directory = recorder(tmp_path)
    with files:
        files.metrics(step=0, loss=1.0)
    with directory.metrics_path.open("a") as file:
        file.write('{"step": 1, "lo')
    with Recorder(directory) as again:
        again.metrics(step=1, loss=2.0)
    assert [x["loss"] for x in read_metrics(directory.metrics_path)] == [1.0, 2.0]


def test_what_is_damaged_is_left_out_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps({"step": step, "loss": 1.0}).encode() for step in (1, 2)]
    bad = [b'{"step": null}', b'{"loss": 2}', b"\xff\xfe{", b"\0\0\0", b'{"step": "3"}', b"[]"]
    path.write_bytes(b"\n".join([good[0], *bad, good[1]]) + b"\n")
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_every_file_carries_its_schema_and_is_valid_json_even_for_a_diverged_run(tmp_path: Path) -> None:
    files, directory = recorder(tmp_path)
    with files:
        files.metrics(step=0, loss=float("nan"), grad_norm=float("inf"))
        files.event("started", step=0)
    for path in (directory.metrics_path, directory.events_path):
        first, second = (
            json.loads(line, parse_constant=lambda _: 1 / 0) for line in path.read_text().splitlines()
        )
        assert first == {"schema": 1}
        assert second["step"] == 0
    assert read_metrics(directory.metrics_path)[0]["loss"] is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_not_the_run_and_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    directory = RunDirectory(tmp_path / "run")
    with directory.claimed(fresh=False), Recorder(directory, said.append) as files:
        full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails as well
        files._metrics, kept = full, files._metrics
        files.metrics(step=0, loss=1.0)
        files.metrics(step=1, loss=1.0)
        files._metrics = kept
        with contextlib.suppress(OSError):
            full.close()
        files.metrics(step=2, loss=1.0)
    (note,) = said
    assert "No space left" in note
    assert [x["step"] for x in read_metrics(directory.metrics_path)] == [2]
