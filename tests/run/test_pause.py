"""A running job lets go of the card when asked, and goes on as if nothing had been."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.files import AlreadyLockedError, exclusive_lock
from onecard.run.directory import RunDirectory
from onecard.run.metrics import read_metrics
from onecard.run.pause import PauseRequest, ask_to_go_on, ask_to_pause, is_paused
from onecard.run.stored import list_checkpoints

pytestmark = pytest.mark.usefixtures("little_garbage")

WORDS = [
    "--dataset=tiny", "--vocab_size=61", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=2", "--learning_rate=1e-2", "--warmup_iters=3",
    "--lr_decay_iters=400", "--max_iters=400", "--eval_interval=200", "--eval_iters=2", "--device=cpu",
    "--no-compile", "--sample_tokens=0",
]  # fmt: skip


def start(out_dir: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onecard", "train", *WORDS, f"--out_dir={out_dir}"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def steps(out_dir: str) -> int:
    path = Path(out_dir) / "metrics.jsonl"
    return sum("loss" in row for row in read_metrics(path)) if path.exists() else 0


def wait_for_steps(out_dir: str, count: int) -> None:
    end = time.monotonic() + 300  # on a machine with much else to do
    while steps(out_dir) < count:
        assert time.monotonic() < end, "no steps"
        time.sleep(0.05)


def weights(out_dir: str) -> dict[str, torch.Tensor]:
    return list_checkpoints(Path(out_dir) / "checkpoints")[-1].model_tensors()


@pytest.mark.slow
def test_a_paused_run_is_the_run_it_would_have_been(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    assert main(["train", *WORDS, "--out_dir=quiet"]) == 0
    job = start("out")
    wait_for_steps("out", 5)
    assert main(["train", "--pause", "--out_dir=out"]) == 0
    assert "nothing is computed" in capsys.readouterr().out
    time.sleep(0.3)  # what was written before is on disk now
    before = steps("out")
    assert before < 400
    time.sleep(1.0)
    assert steps("out") == before, "it does nothing"
    assert main(["train", "--resume-now", "--out_dir=out"]) == 0
    assert "going on" in capsys.readouterr().out
    assert job.wait(timeout=300) == 0
    for name, expected in weights("quiet").items():
        assert torch.equal(weights("out")[name], expected), name
    assert not (Path("out") / "pause").exists() and not (Path("out") / "paused").exists()


@pytest.mark.slow
def test_a_paused_run_that_is_stopped_keeps_its_steps(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    job = start("out")
    wait_for_steps("out", 5)
    assert main(["train", "--pause", "--out_dir=out"]) == 0
    job.terminate()
    assert job.wait(timeout=300) == 130
    (checkpoint,) = list_checkpoints(Path("out") / "checkpoints")
    assert checkpoint.step >= 5 and checkpoint.optimizer_tensors()


def test_nobody_to_ask(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--pause", "--out_dir=nowhere"]) == 1
    told = capsys.readouterr().err
    assert "there is no run in nowhere yet" in told and "ask again in a moment" in told
    assert "--out_dir=FOLDER" not in told, "it was given"
    (workplace / "out").mkdir()
    for wish in ("--pause", "--resume-now"):
        assert main(["train", wish, "--out_dir=out"]) == 1
        assert "nobody is training" in capsys.readouterr().err
    assert not (workplace / "out" / "pause").exists()


@pytest.mark.parametrize(
    ("done", "why", "hint"),
    [
        (
            400,
            "the run is finished: 400 of 400 steps are done",
            "what comes next: onecard plan --out_dir=out",
        ),
        (
            90,
            "the run was stopped: 90 of 400 steps are done",
            "onecard train --out_dir=out goes on from there",
        ),
    ],
)
def test_a_run_that_has_ended_cannot_pause(
    done: int, why: str, hint: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory("out")
    checkpoint = directory.checkpoints / f"step-{done:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    directory.write_config(load_config(RunConfig, [*WORDS, "--out_dir=out"]))
    for flag in ("--pause", "--resume-now"):
        assert main(["train", flag, "--out_dir=out"]) == 1
        said = capsys.readouterr().err
        assert f"  {why}\n" in said and f"hint: {hint}\n" in said


def test_a_second_request_says_that_it_is_paused_already(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the language of whoever asks, whatever the job's."""
    directory = RunDirectory("out")
    with directory.claimed(fresh=False):
        job = PauseRequest(directory)
        (directory.path / "pause").touch()
        job.granted("cpu")
        assert ask_to_pause(directory) == "it is paused already: nothing is computed; --resume-now goes on"
        monkeypatch.setenv("ONECARD_LANG", "es")
        said = ask_to_pause(directory)
        assert "nothing" not in said and "--resume-now" in said and said.startswith("ya ")


def test_a_job_that_does_not_answer_is_told(workplace: Path) -> None:
    directory = RunDirectory("out")
    with directory.claimed(fresh=False), pytest.raises(UserError, match="has not paused"):
        ask_to_pause(directory, patience=0.2)
    assert (workplace / "out" / "pause").exists(), "the wish stands"
    said: list[str] = []
    with directory.claimed(fresh=False), pytest.raises(UserError):
        ask_to_pause(directory, patience=0.1, say=said.append)
    assert len(said) == 1 and said[0].startswith("waiting for the step in progress")
    assert not PauseRequest(directory)(), "a new run does not heed old wishes"


# --- the job's word
def test_a_wish_outlives_the_end_of_the_pause_before_it(workplace: Path) -> None:
    directory = RunDirectory("out")
    with directory.claimed(fresh=False):
        job, wish = PauseRequest(directory), directory.path / "pause"
        wish.touch()
        assert job.requested()
        job.granted("0.53")
        assert "apart from 0.53 GiB" in ask_to_pause(directory, patience=0.1)
        wish.unlink()
        job.going_on()
        assert not (directory.path / "paused").exists()
        wish.touch()
        job.over()
        assert job() and wish.exists(), "it is another one"
        job.ended()
        assert not wish.exists()


def test_a_refusal_is_told_once_and_the_next_wish_is_heard(workplace: Path) -> None:
    directory = RunDirectory("out")
    with directory.claimed(fresh=False):
        job = PauseRequest(directory)

        def answers() -> None:
            while not job.requested():
                time.sleep(0.01)
            job.refused("the host has no room")

        thread = threading.Thread(target=answers)
        thread.start()
        with pytest.raises(UserError, match="cannot pause") as refused:
            ask_to_pause(directory, patience=30)
        thread.join()
        assert refused.value.why == "the host has no room" and refused.value.exit_code == 1
        assert not job.requested()
        with pytest.raises(UserError, match="has not paused"):
            ask_to_pause(directory, patience=0.1)  # not the refusal of before
        assert job.requested()


def test_a_refused_wish_that_cannot_be_removed_is_not_heard_again(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory("out")
    with directory.claimed(fresh=False):
        job, wish = PauseRequest(directory), directory.path / "pause"
        wish.touch()
        monkeypatch.setattr("onecard.run.pause._remove", lambda path: None)
        job.refused("no")
        assert not job.requested()
        wish.unlink()
        assert not job.requested()
        wish.touch()
        assert job.requested()


def test_a_job_that_ends_meanwhile_is_not_waited_for(workplace: Path) -> None:
    directory, began = RunDirectory("out"), time.monotonic()
    claimed = directory.claimed(fresh=False)
    claimed.__enter__()
    PauseRequest(directory)
    killed = threading.Timer(0.3, claimed.__exit__, (None, None, None))  # nothing is tidied up
    killed.start()
    with pytest.raises(UserError, match="is ending"):
        ask_to_pause(directory, patience=60)
    assert time.monotonic() - began < 20
    killed.join()
    assert not (directory.path / "pause").exists()


def test_going_on_is_told_when_the_card_is_taken_and_not_before(workplace: Path) -> None:
    directory = RunDirectory("out")
    with directory.claimed(fresh=False):
        job = PauseRequest(directory)
        assert ask_to_go_on(directory) == "it is not paused"
        job.granted()
        job.going_on()
        job.says("resuming", "5.00 GiB are needed, 2.00 GiB are free")
        with pytest.raises(UserError, match="waits for memory") as told:
            ask_to_go_on(directory, patience=0.1)
        assert "2.00 GiB are free" in told.value.why and "by itself" in told.value.hint
        threading.Timer(0.2, job.over).start()
        assert ask_to_go_on(directory, patience=30) == "going on"
        assert json.loads((directory.path / "job.json").read_text())["state"] == "training"


# --- Windows
class LocksOfWindows(SimpleNamespace):
    """msvcrt's locks as far as they are used: a byte of a file belongs to whoever has locked it, until that
    one closes the file."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__(held={})

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        assert mode == self.LK_NBLCK and count == 1
        status = os.fstat(descriptor)
        byte = status.st_dev, status.st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        holder = self.held.get(byte)
        if holder is not None and holder != descriptor and _is_open(holder, status):
            raise PermissionError(errno.EACCES, "Permission denied")
        self.held[byte] = descriptor


def _is_open(descriptor: int, of: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), of)
    except OSError:
        return False


def test_a_job_is_seen_on_windows_too(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no fcntl: every job was taken for absent there."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", LocksOfWindows())
    directory = RunDirectory("out")
    with directory.claimed(fresh=False):
        PauseRequest(directory).granted()
        assert "paused after" in ask_to_pause(directory, patience=1)
        with pytest.raises(AlreadyLockedError):
            exclusive_lock(directory.path / ".lock")
    with pytest.raises(UserError, match="nobody is training"):
        ask_to_pause(directory, patience=1)


def test_a_folder_out_of_reach_is_no_wish_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network drive that is gone for a moment."""
    directory = RunDirectory(str(tmp_path))
    job = PauseRequest(directory)

    def gone(path: Path) -> bool:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", gone)
        assert job.requested() is False
    (tmp_path / "pause").touch()
    assert job.requested() is True


def test_after_a_refusal_the_next_wish_is_heard(tmp_path: Path) -> None:
    job, wish = PauseRequest(RunDirectory(str(tmp_path))), tmp_path / "pause"
    wish.touch()
    assert job.requested()
    job.refused("no room")
    assert not job(), "not once more"
    wish.touch()  # before the job has looked again
    assert job.requested()
    assert '"training"' in (tmp_path / "job.json").read_text(), "the refusal of before is no answer to it"


def test_a_paused_job_that_was_killed_goes_on_by_another_command(workplace: Path) -> None:
    directory = RunDirectory("out")
    with directory.claimed(fresh=False):
        PauseRequest(directory).granted("the card is free")
    with pytest.raises(UserError, match="has ended") as gone:
        ask_to_go_on(directory, patience=1)
    assert "onecard train --out_dir=out" in gone.value.hint


def test_a_run_is_paused_only_while_its_job_is_there(workplace: Path) -> None:
    directory = RunDirectory("out")
    assert not is_paused(directory)
    with directory.claimed(fresh=False):
        job = PauseRequest(directory)
        assert not is_paused(directory)
        (directory.path / "pause").touch()
        job.granted("cpu")
        assert is_paused(directory)
    assert not is_paused(directory), "its job died, and left the file behind"
