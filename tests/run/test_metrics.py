from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.run.directory import RunDirectory
from onecard.run.metrics import Recorder, evaluation_line, iteration_line, read_metrics, rewind


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


@pytest.mark.parametrize("left", range(1, 30))
def test_a_line_of_the_log_cut_short_goes_when_the_run_goes_on(tmp_path: Path, left: int) -> None:
    files, directory = recorder(tmp_path)
    whole = iteration_line(0, 1.0, 0.5, None)
    with files:
        files.log(whole)
    with directory.log_path.open("a") as file:
        file.write(iteration_line(123, 2.0, 0.5, None)[:left])
    rewind(directory, 1, evaluated=False)
    assert directory.log_path.read_text() == whole + "\n"


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
def test_a_full_disk_costs_nothing_once_there_is_room_and_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    directory = RunDirectory(tmp_path / "run")
    with directory.claimed(fresh=False), Recorder(directory, said.append) as files:
        files.metrics(step=0, loss=1.0)
        lines = files._files[0]
        with Path("/dev/full").open("wb", buffering=0) as full:
            lines.file, kept = full, lines.file
            files.metrics(step=1, loss=1.0)
            files.metrics(step=2, loss=1.0)
        assert files.disk_error is None
        lines.file = kept
        files.metrics(step=3, loss=1.0)
    (note,) = said
    assert "No space left" in note
    assert [x["step"] for x in read_metrics(directory.metrics_path)] == [0, 1, 2, 3]


def steps_in(directory: RunDirectory) -> tuple[list[int], list[int], list[str]]:
    """As the files have them: steps of training, of evaluations, and the log."""
    lines = [json.loads(line) for line in directory.metrics_path.read_text().splitlines()][1:]
    training = [line["step"] for line in lines if "loss" in line]
    return (
        training,
        [line["step"] for line in lines if "val_loss" in line],
        directory.log_path.read_text().splitlines(),
    )


@pytest.mark.parametrize("evaluated", [True, False])
def test_after_a_resume_each_step_stands_in_the_files_once(tmp_path: Path, evaluated: bool) -> None:
    files, directory = recorder(tmp_path)
    with files:
        for step in range(12):
            if step % 5 == 0:
                files.log(evaluation_line(step, 2.0, 2.0))
                files.log(f"Step {step:05d} | Validation bpb: 1.0")
                files.metrics(step=step, train_loss=2.0, val_loss=2.0)
            files.log(iteration_line(step, 1.0, 0.1, None))
            files.metrics(step=step, loss=1.0)
        files.log("a line of somebody else")
    with directory.metrics_path.open("ab") as file:
        file.write(b'{"step": 11, "lo')
    rewind(directory, 10, evaluated=evaluated)
    training, evaluations, log = steps_in(directory)
    assert training == list(range(10))
    assert evaluations == ([0, 5, 10] if evaluated else [0, 5])
    assert [line for line in log if line.startswith("iter")] == [
        iteration_line(n, 1.0, 0.1, None) for n in range(10)
    ]
    assert sum(line.startswith(("step 10:", "Step 00010")) for line in log) == (2 if evaluated else 0)
    assert log[-1] == "a line of somebody else"
    before = [path.read_bytes() for path in (directory.metrics_path, directory.log_path)]
    rewind(directory, 10, evaluated=evaluated)
    assert [path.read_bytes() for path in (directory.metrics_path, directory.log_path)] == before


def test_steps_that_an_older_version_wrote_twice_stand_there_once(tmp_path: Path) -> None:
    files, directory = recorder(tmp_path)
    with files:
        for step in (0, 1, 2, 3, 4, 2, 3):
            files.metrics(step=step, loss=float(step))
    rewind(directory, 4, evaluated=False)
    assert steps_in(directory)[0] == [0, 1, 2, 3]


def test_files_without_anything_to_drop_are_not_written_again(tmp_path: Path) -> None:
    files, directory = recorder(tmp_path)
    with files:
        files.metrics(step=0, loss=1.0)
    before = directory.metrics_path.stat().st_ino
    rewind(directory, 1, evaluated=False)
    assert directory.metrics_path.stat().st_ino == before
    rewind(RunDirectory(tmp_path / "nowhere"), 1, evaluated=False)


def test_lines_are_on_the_disk_when_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = recorder(tmp_path)
    flushed: list[str] = []

    def fsync(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    with files:
        monkeypatch.setattr(os, "fsync", fsync)
        files.flush()
    assert flushed == ["metrics.jsonl", "events.jsonl", "log.txt"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "log.txt", ".lock", "config.json.part"])
def test_a_fifo_in_the_place_of_a_file_holds_nothing_up(tmp_path: Path, name: str) -> None:
    directory = RunDirectory(tmp_path)
    os.mkfifo(tmp_path / name)
    if name == "config.json.part":
        directory.write_config(RunConfig())
        assert directory.read_config() == RunConfig()
    else:
        with (
            pytest.raises(UserError, match=r"not an ordinary file|cannot be used|not a run's"),
            directory.claimed(fresh=False),
        ):
            Recorder(directory)


def test_a_disk_that_fails_is_told_from_a_full_one(tmp_path: Path) -> None:
    files, _ = recorder(tmp_path)
    with files:
        os.close(files._files[0].file.fileno())
        files.metrics(step=0, loss=1.0)
        assert files.disk_error is not None
        files._files[0].file = (tmp_path / "other").open("ab", buffering=0)


def test_in_another_folder_the_lines_are_all_there(tmp_path: Path) -> None:
    files, directory = recorder(tmp_path)
    with files:
        files.metrics(step=0, loss=1.0)
        files.log("one")
        shutil.rmtree(directory.path)
        other = RunDirectory(tmp_path / "other")
        with other.claimed(fresh=False):
            files.move(other)
            files.metrics(step=1, loss=1.0)
            files.log("two")
    assert [x["step"] for x in read_metrics(other.metrics_path)] == [0, 1]
    assert other.log_path.read_text() == "one\ntwo\n"
    assert other.metrics_path.read_text().count("schema") == 1
