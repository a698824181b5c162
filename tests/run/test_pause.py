"""A running job lets go of the card when asked, and goes on as if nothing had been."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from onecard.cli import main
from onecard.errors import UserError
from onecard.run.checkpoint import list_checkpoints
from onecard.run.directory import RunDirectory
from onecard.run.metrics import read_metrics
from onecard.run.pause import PauseRequest, ask_to_pause

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
    assert "it holds nothing of the card" in capsys.readouterr().out
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
    assert "there is no run" in capsys.readouterr().err
    (workplace / "out").mkdir()
    for wish in ("--pause", "--resume-now"):
        assert main(["train", wish, "--out_dir=out"]) == 1
        assert "nobody is training" in capsys.readouterr().err
    assert not (workplace / "out" / "pause").exists()


def test_a_job_that_does_not_answer_is_told(workplace: Path) -> None:
    directory = RunDirectory("out")
    with directory.claimed(fresh=False), pytest.raises(UserError, match="has not let go"):
        ask_to_pause(directory, patience=0.2)
    assert (workplace / "out" / "pause").exists(), "the wish stands"
    assert not PauseRequest(directory)(), "a new run does not heed old wishes"
