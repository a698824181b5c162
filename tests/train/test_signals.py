"""Whole runs that are sent signals: from inside, at a known moment, and as a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.run.directory import RunDirectory
from onecard.run.stored import damage, list_checkpoints
from onecard.train import evaluate as evaluate_module
from onecard.train import loop as loop_module
from onecard.train import refit as refit_module
from onecard.train import saving
from onecard.train.loop import train
from onecard.train.step import Stepper
from onecard.train.summary import Summary

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="has no such signals"),
    pytest.mark.usefixtures("little_garbage"),
]

WORDS = [
    "--dataset=tiny", "--vocab_size=61", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=2", "--learning_rate=1e-2", "--warmup_iters=3",
    "--lr_decay_iters=20", "--max_iters=20", "--eval_interval=10", "--eval_iters=2", "--device=cpu",
    "--no-compile", "--sample_tokens=0",
]  # fmt: skip
CHECKPOINTS = Path("out/checkpoints")


def config(*more: str) -> RunConfig:
    return load_config(RunConfig, [*WORDS, "--out_dir=out", *more])


@pytest.mark.parametrize("when", ["begins", "has ended"])
def test_a_request_to_save_while_a_run_begins_or_has_ended_is_answered(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], when: str
) -> None:
    where, name = (loop_module, "open_run") if when == "begins" else (Summary, "text")
    real = getattr(where, name)

    def asked(*rest: Any) -> Any:
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            pytest.fail("it would end the run")
        send("SIGUSR1")
        return real(*rest)

    monkeypatch.setattr(where, name, asked)
    assert main(["train", *WORDS, "--out_dir=out"]) == 0
    assert "asked by SIGUSR1 to save: there is nothing to save now" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def at_micro_batch(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None], *numbers: int) -> None:
    """Counted from 1; each step has two."""
    real, calls = Stepper.backward, 0

    def backward(self: Stepper, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in numbers:
            do()
        return real(self, *args)

    monkeypatch.setattr(Stepper, "backward", backward)


def events(kind: str, out_dir: str = "out") -> list[int]:
    path = Path(out_dir) / "events.jsonl"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return [event["step"] for line in lines if (event := json.loads(line))["event"] == kind]


def same_weights(one: str, other: str) -> bool:
    a, b = (list_checkpoints(Path(name) / "checkpoints")[-1] for name in (one, other))
    return a.step == b.step and all(
        torch.equal(tensor, b.model_tensors()[name]) for name, tensor in a.model_tensors().items()
    )


# --- saves, and trains on
def test_asked_to_save_a_run_saves_the_step_in_progress_and_trains_on(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config("--out_dir=quiet"))
    at_micro_batch(monkeypatch, lambda: send("SIGUSR1"), 5, 6, 25)
    assert not train(config()).interrupted
    assert events("saved") == [3, 10, 13, 20], "two in one step are one"
    said = capsys.readouterr().err
    assert (
        "\nsaved step 3, as asked by SIGUSR1\n" in said and "\nsaved step 13, as asked by SIGUSR1\n" in said
    )
    assert same_weights("out", "quiet")
    kept = list_checkpoints(CHECKPOINTS)
    assert len(kept) == 2 and all(damage(checkpoint) is None for checkpoint in kept)


def test_asked_in_an_evaluation_it_is_saved_after_it_and_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation at step 10 is worth a checkpoint itself; the one at step 0 has nothing to save."""
    real = evaluate_module.evaluate

    def evaluate(*args: Any, **more: Any) -> Any:
        send("SIGUSR1")
        return real(*args, **more)

    monkeypatch.setattr(evaluate_module, "evaluate", evaluate)
    train(config())
    assert events("saved") == [10, 20]
    assert list_checkpoints(CHECKPOINTS)[0].val_loss is not None
    said = capsys.readouterr().err
    assert "\nthere is no step to save yet, asked by SIGUSR1\n" in said
    assert "\nstep 10 is saved already, asked by SIGUSR1\n" in said


def test_a_save_on_a_full_disk_is_reported_and_forgiven(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = saving.save_checkpoint

    def full(folder: Path, step: int, *args: Any) -> Path:
        if step == 3:
            raise UserError("the checkpoint of step 3 could not be written", "No space left on device")
        return real(folder, step, *args)

    monkeypatch.setattr(saving, "save_checkpoint", full)
    at_micro_batch(monkeypatch, lambda: send("SIGUSR1"), 5, 9)
    assert train(config()).values["step"] == 20
    assert events("save failed") == [3] and events("saved") == [5, 10, 20]
    said = capsys.readouterr().err
    assert "No space left on device" in said and "saved step 3" not in said


def test_asked_for_while_paused_it_is_answered(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pause has saved its step; where it could not, the save comes when the run goes on."""
    request, fails = RunDirectory("out").path / "pause", [True, False]
    real_rest, real_save = refit_module.rest_until_taken_back, saving.save_checkpoint

    def rest(*args: Any) -> bool:
        send("SIGUSR1")
        request.unlink()
        return real_rest(*args)

    def save(*args: Any) -> Path:
        if fails and fails.pop(0):
            raise UserError("the disk is full")
        return real_save(*args)

    monkeypatch.setattr(refit_module, "rest_until_taken_back", rest)
    monkeypatch.setattr(saving, "save_checkpoint", save)
    monkeypatch.setattr("onecard.run.pause._LOOK_EVERY", 0.0)
    at_micro_batch(monkeypatch, request.touch, 6, 15)
    train(config())
    said = capsys.readouterr().err
    first, second = events("paused")
    assert events("save failed") == [first] and f"saved step {first}, as asked by SIGUSR1" in said
    assert f"step {second} is saved already, asked by SIGUSR1" in said
    assert events("saved") == sorted({first, second, 10, 20})


def test_an_evaluation_alone_has_nothing_to_save(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = evaluate_module.evaluate

    def evaluate(*args: Any, **more: Any) -> Any:
        send("SIGUSR1")
        return real(*args, **more)

    monkeypatch.setattr(evaluate_module, "evaluate", evaluate)
    train(config("--eval_only"))
    assert "an evaluation has nothing to save" in capsys.readouterr().err


def test_training_in_a_thread_has_no_signals_and_works(workplace: Path) -> None:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(train(config()).values["step"]))
    thread.start()
    thread.join(timeout=120)
    assert done == [20]


# --- saves, and ends
@pytest.mark.parametrize("name", ["SIGTERM", "SIGXCPU", "SIGPWR"])
def test_what_is_about_to_be_killed_saves_and_can_go_on(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(signal, name):
        name = "SIGXCPU"  # SIGPWR is Linux's
    train(config("--out_dir=quiet"))
    with pytest.MonkeyPatch.context() as patch:
        at_micro_batch(patch, lambda: send(name), 13, 14)
        assert main(["train", *WORDS, "--out_dir=out"]) == 130
    assert [checkpoint.step for checkpoint in list_checkpoints(CHECKPOINTS)] == [6]
    assert train(config()).values["step"] == 20
    assert same_weights("out", "quiet")


# --- as processes
# What a script starts in the background ignores Ctrl-C and SIGQUIT: not so here.
BEGIN = """
import signal, sys, time
for name in ("SIGINT", "SIGQUIT"):
    signal.signal(getattr(signal, name), {"SIGINT": signal.default_int_handler}.get(name, signal.SIG_DFL))
from onecard.cli import main
"""
ENDLESS = ("--max_iters=100000", "--eval_interval=100000", "--log_interval=1000")
RUN = BEGIN + "sys.exit(main(sys.argv[1:]))"


def start(script: str, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, "train", *WORDS, "--out_dir=out", *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip


def has_begun() -> bool:
    path = Path("out/log.txt")
    return path.exists() and "iter 0" in path.read_text()


def wait_for(true: Callable[[], Any], job: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120  # on a machine with much else to do
    while not true():
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_process_saves_twice_and_ends_like_one_that_was_left_alone(workplace: Path) -> None:
    # No evaluation on the way, which would save too.
    long = ("--max_iters=500", "--eval_interval=500", "--lr_decay_iters=500", "--log_interval=10")
    train(config(*long, "--out_dir=quiet"))
    job = start(RUN, *long)
    wait_for(has_begun, job)
    job.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(events("saved")) == 1, job)
    job.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(events("saved")) == 2, job)
    _, said = job.communicate(timeout=120)
    assert job.returncode == 0 and said.count("as asked by SIGUSR1") == 2
    assert same_weights("out", "quiet")


@pytest.mark.slow
def test_a_process_that_is_quit_shows_its_stacks_and_can_go_on(workplace: Path) -> None:
    job = start(RUN, *ENDLESS)
    wait_for(has_begun, job)
    job.send_signal(signal.SIGUSR1)
    wait_for(lambda: events("saved"), job)
    job.send_signal(signal.SIGQUIT)
    _, said = job.communicate(timeout=60)
    assert job.returncode == -signal.SIGQUIT
    assert "Current thread 0x" in said and " in _until_changed\n" in said
    (saved,) = list_checkpoints(CHECKPOINTS)
    assert not list(Path().glob("core*"))
    again = train(config(f"--max_iters={saved.step + 2}", "--init_from=resume", "--eval_interval=100000"))
    assert again.values["step"] == saved.step + 2 and damage(saved) is None


SLOW_SAVE = BEGIN + """
from onecard.run import checkpoint
real = checkpoint.write_tensors
def write_tensors(path, tensors):
    written = real(path, tensors)
    print("half", flush=True)
    time.sleep(100)
    return written
checkpoint.write_tensors = write_tensors
sys.exit(main(sys.argv[1:]))
"""  # fmt: skip


@pytest.mark.slow
def test_a_second_polite_kill_ends_a_process_at_once_and_leaves_no_half_checkpoint(workplace: Path) -> None:
    job = start(SLOW_SAVE, *ENDLESS)
    wait_for(has_begun, job)
    job.terminate()
    assert job.stdout is not None and job.stdout.readline() == "half\n"
    job.terminate()  # within a second: the same
    time.sleep(1.1)
    assert job.poll() is None
    began = time.monotonic()
    job.terminate()
    _, said = job.communicate(timeout=60)
    assert job.returncode == 143 and time.monotonic() - began < 30
    assert said.endswith("interrupted\n") and "Traceback" not in said
    assert list(CHECKPOINTS.iterdir()) == []
