"""Whole runs on a small data set, in the working folder nanoGPT's commands expect."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_bins

from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.data.tokenizer import make_tokenizer
from onecard.errors import UserError
from onecard.files import file_sha256
from onecard.optim.optimizer import Optimizer
from onecard.run.directory import RunDirectory, load_run_config
from onecard.run.load import checkpoint_of_run
from onecard.run.metrics import read_metrics
from onecard.run.stored import best_checkpoint, list_checkpoints
from onecard.train import engine as engine_module
from onecard.train import evaluate_only as evaluate_only_module
from onecard.train import journal as journal_module
from onecard.train import loop as loop_module
from onecard.train import saving
from onecard.train.evaluate import Evaluation
from onecard.train.loop import train
from onecard.train.progress import PlainDisplay, Status
from onecard.train.start import open_run
from onecard.train.step import LossScale, Stepper

TINY = [
    "--dataset=tiny", "--vocab_size=61", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=2", "--learning_rate=1e-2", "--min_lr=1e-3",
    "--warmup_iters=3", "--lr_decay_iters=20", "--max_iters=20", "--eval_interval=10", "--eval_iters=2",
    "--device=cpu", "--no-compile", "--sample_tokens=0", "--out_dir=out",
]  # fmt: skip

CONFIGS = Path(__file__).resolve().parents[2] / "config"


def config(*more: str) -> RunConfig:
    return load_config(RunConfig, [*TINY, *more])


def losses(out_dir: str = "out") -> dict[int, float]:
    return {x["step"]: x["loss"] for x in read_metrics(Path(out_dir) / "metrics.jsonl") if "loss" in x}


def final_weights(out_dir: str = "out") -> dict[str, torch.Tensor]:
    return list_checkpoints(Path(out_dir) / "checkpoints")[-1].model_tensors()


def test_a_run_learns_and_leaves_all_its_files(workplace: Path) -> None:
    summary = train(config())
    assert summary.values["val_loss"] < summary.values["first_val_loss"] - 0.5
    out = workplace / "out"
    assert [c.step for c in list_checkpoints(out / "checkpoints")] == [10, 20]
    log = (out / "log.txt").read_text().splitlines()
    assert log[0].startswith("step 0: train loss 4.1")
    assert log[1].startswith("iter 0: loss 4.1")
    assert [line for line in log if line.startswith("step ")][-1].startswith("step 20:")
    metrics = [x for x in read_metrics(out / "metrics.jsonl") if "loss" in x]
    assert [x["step"] for x in metrics] == list(range(20))
    assert metrics[-1]["tokens"] == 20 * 4 * 2 * 16
    assert all(x["grad_norm"] > 0 and x["tokens_per_second"] > 0 and x["memory_gib"] > 0 for x in metrics)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()[1:]]
    assert [e["event"] for e in events] == ["started", "saved", "saved", "finished"]
    assert json.loads((out / "config.json").read_text())["values"]["n_layer"] == 2
    text = summary.text()
    assert "done at step 20 of 20" in text
    assert "guessing by frequency alone" in text


@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_a_resumed_run_is_the_run_it_would_have_been_bit_for_bit(workplace: Path, dropout: str) -> None:
    whole = train(config(f"--dropout={dropout}", "--out_dir=straight"))
    train(config(f"--dropout={dropout}", "--out_dir=halves", "--max_iters=10"))
    resumed = train(config(f"--dropout={dropout}", "--out_dir=halves", "--init_from=resume"))
    assert "tokens/s on average" in whole.text()
    assert "tokens/s since it was continued" in resumed.text()  # tokens and time are the whole run's
    assert losses("straight") == losses("halves")
    straight, halves = final_weights("straight"), final_weights("halves")
    assert all(torch.equal(straight[name], halves[name]) for name in straight)


def test_the_same_command_again_continues_and_then_has_nothing_to_do(workplace: Path) -> None:
    train(config("--max_iters=20"))
    before = final_weights()
    again = train(config("--max_iters=20"))
    assert again.values["step"] == 20
    assert all(torch.equal(before[n], t) for n, t in final_weights().items())


def test_ctrl_c_saves_the_last_completed_step_at_once_and_the_next_start_goes_on(
    workplace: Path,
) -> None:
    """The signal comes inside step 7, between its micro-batches; the step must not count."""
    calls = 0
    real = Stepper.backward

    def backward(self: Stepper, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 7 * 2 + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "backward", backward)
        summary = train(config("--out_dir=cut"))
    assert summary.interrupted
    assert "continue with the same command" in summary.text()
    assert calls == 7 * 2 + 1  # the second micro-batch of that step was not computed
    assert [c.step for c in list_checkpoints(Path("cut/checkpoints"))] == [7]
    train(config("--out_dir=cut"))
    train(config("--out_dir=straight"))
    assert losses("cut") == losses("straight")


def test_a_second_ctrl_c_quits_at_once(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Stepper.backward

    def backward(self: Stepper, *args: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return real(self, *args)

    monkeypatch.setattr(Stepper, "backward", backward)
    monkeypatch.setattr("onecard.train.interrupt._ONE_REQUEST_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train(config())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_batch_split_changes_neither_data_nor_losses(workplace: Path) -> None:
    train(config("--out_dir=a"))
    train(config("--out_dir=b", "--batch_size=8", "--gradient_accumulation_steps=1", "--eval_iters=1"))
    a, b = losses("a"), losses("b")
    assert a.keys() == b.keys()
    assert all(a[step] == pytest.approx(b[step], abs=2e-5) for step in a)
    evaluations = [
        [x["val_loss"] for x in read_metrics(Path(d) / "metrics.jsonl") if "val_loss" in x] for d in "ab"
    ]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=2e-5)


def test_a_resumed_run_may_be_split_otherwise(workplace: Path) -> None:
    train(config("--out_dir=a"))
    train(config("--out_dir=b", "--max_iters=10"))
    train(config("--out_dir=b", "--init_from=resume", "--batch_size=3", "--gradient_accumulation_steps=1"))
    # 8 sequences a step, then 3: the data goes on where it was.
    state = list_checkpoints(Path("b/checkpoints"))[-1].state["position"]["data"]
    assert state["sequences"] == 10 * 8 + 10 * 3


def test_naming_the_folder_is_enough_to_continue(workplace: Path) -> None:
    train(config("--max_iters=10"))
    bare = ["--out_dir=out", "--device=cpu"]
    assert train(load_run_config(bare)).values["step"] == 10
    assert train(load_run_config([*bare, "--init_from=resume", "--max_iters=20"])).values["step"] == 20
    assert len(losses()) == 20
    assert json.loads(Path("out/config.json").read_text())["set_by_user"]["n_layer"] == "command line"
    # Checked with the run's own values: its min_lr is 1e-3, not the default.
    with pytest.raises(UserError, match=r"min_lr 0.001 is above learning_rate 0.0005"):
        load_run_config([*bare, "--learning_rate=5e-4"])
    # A config file speaks for itself: what it no longer says is a change.
    Path("c.py").write_text("dataset = 'tiny'\nout_dir = 'out'\ndevice = 'cpu'\n")
    with pytest.raises(UserError, match="different model"):
        train(load_run_config(["c.py"]))


def test_a_new_horizon_replaces_the_runs_own(workplace: Path) -> None:
    arguments = [a for a in TINY if not a.startswith(("--max_iters", "--lr_decay", "--warmup"))]
    assert train(load_run_config([*arguments, "--tokens=1000"])).values["step"] == 8
    more = ["--out_dir=out", "--init_from=resume", "--extend=stay"]
    assert train(load_run_config([*more, "--tokens=2000"])).values["step"] == 16
    assert train(load_run_config([*more, "--max_iters=18"])).values["step"] == 18
    assert load_run_config([*more, "--tokens=3000"]).max_iters == 24


def test_a_checkpoints_shorter_block_counts_for_the_horizon_and_for_the_next_start(workplace: Path) -> None:
    fixture = Path(__file__).parent.parent / "fixtures" / "nanogpt" / "ckpt.pt"
    write_bins(workplace / "data" / "twenty", train=4_000, val=800, vocab=21)
    Path("out").mkdir()
    Path("out/ckpt.pt").write_bytes(fixture.read_bytes())
    Path("c.py").write_text(
        "out_dir = 'out'\ndataset = 'twenty'\nbatch_size = 4\ngradient_accumulation_steps = 1\n"
        "compile = False\ndevice = 'cpu'\ntokens = 64 * 35\neval_iters = 1\nsample_tokens = 0\n"
    )
    assert train(load_run_config(["c.py"])).values["step"] == 35  # blocks of 16, not of 1024
    assert train(load_run_config(["c.py"])).values["step"] == 35


def test_best_is_judged_on_the_data_of_now(workplace: Path) -> None:
    """On other data the loss is higher; the model of the old data must not stay 'best'."""
    train(config("--max_iters=10", "--always_save_checkpoint=False"))
    noise = np.random.default_rng(0).integers(0, 61, 3_000).astype(np.uint16)
    (workplace / "data" / "noise").mkdir()
    for split in ("train", "val"):
        noise.tofile(workplace / "data" / "noise" / f"{split}.bin")
    summary = train(
        config("--init_from=resume", "--dataset=noise", "--always_save_checkpoint=False", "--max_iters=40")
    )
    assert summary.values["first_val_loss"] > 4.0
    best = best_checkpoint(list_checkpoints(Path("out/checkpoints")))
    assert best is not None
    assert best.step > 10


def test_other_data_is_refused_with_another_seed_too(workplace: Path) -> None:
    train(config("--max_iters=10"))
    write_bins(workplace / "data" / "tiny", train=6_001, val=1_500)
    with pytest.raises(UserError, match="not the data this run began with"):
        train(config("--init_from=resume", "--seed=5"))


def test_a_signal_that_was_ignored_stays_ignored(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup sets SIGHUP to be ignored before it starts a program."""
    real = Stepper.backward

    def backward(self: Stepper, *args: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGHUP)
        return real(self, *args)

    monkeypatch.setattr(Stepper, "backward", backward)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(config("--max_iters=3")).values["step"] == 3
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_person_who_watches_sees_the_present_loss_between_log_lines(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []

    class Watching(PlainDisplay):
        watched = True

        def __init__(self, status: Status) -> None:
            super().__init__()
            self.status = status

        def inside(self, what: str, done: int, total: int) -> None:
            if what == "":
                seen.append(self.status.loss)

    monkeypatch.setattr(journal_module, "open_display", Watching)
    monkeypatch.setattr(loop_module, "GLANCE_SECONDS", -1.0)
    train(config("--log_interval=1000"))
    assert len(seen) == 18  # all but the first and the last, which are logged
    assert len(set(seen)) == 18
    assert sorted(losses()) == [0, 19]


def test_scratch_refuses_a_used_folder_and_fresh_sets_it_aside(workplace: Path) -> None:
    train(config("--max_iters=10"))
    with pytest.raises(UserError, match="already holds a run") as refused:
        train(config("--init_from=scratch"))
    assert "--fresh" in refused.value.hint
    train(config("--fresh", "--max_iters=10", "--n_layer=1"))
    assert [c.step for c in list_checkpoints(Path("out.before-1/checkpoints"))] == [10]
    assert list_checkpoints(Path("out/checkpoints"))[-1].state["shape"]["n_layer"] == 1


def test_a_different_config_in_a_used_folder_is_shown_not_run(workplace: Path) -> None:
    train(config("--max_iters=10"))
    before = sorted(p.name for p in Path("out").iterdir())
    with pytest.raises(UserError, match="different config") as refused:
        train(config("--max_iters=10", "--learning_rate=5e-3"))
    assert "learning_rate: 0.01 there, 0.005 now" in refused.value.why
    assert "--init_from=resume" in refused.value.hint
    with pytest.raises(UserError, match="different model") as refused:
        train(config("--max_iters=10", "--learning_rate=5e-3", "--n_layer=3"))
    assert "n_layer: 2 there, 3 now" in refused.value.why
    assert "resume" not in refused.value.hint, "it would train the model of two layers"
    assert "--fresh" in refused.value.hint and "--out_dir" in refused.value.hint
    assert sorted(p.name for p in Path("out").iterdir()) == before


def test_resume_keeps_the_checkpoints_architecture_and_says_so(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config("--max_iters=10"))
    train(config("--init_from=resume", "--n_layer=5"))
    assert "n_layer is 2 in the checkpoint; 5 is not used" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config())
    newest = list_checkpoints(Path("out/checkpoints"))[-1]
    (newest.path / "model.safetensors").write_bytes(b"oops")
    expected = losses()
    train(config())
    assert "step-00000020 is damaged" in capsys.readouterr().err
    assert losses() == expected


def test_eval_only_evaluates_and_writes_nothing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = train(config("--eval_only"))
    assert not Path("out").exists()
    assert 4.0 < summary.values["val_loss"] < 4.3
    assert "step 0: train loss" in capsys.readouterr().err
    train(config("--max_iters=10"))
    trained = train(config("--eval_only", "--init_from=resume"))
    assert trained.values["val_loss"] < summary.values["val_loss"]


def test_evaluating_takes_no_memory_for_training(workplace: Path) -> None:
    train(config("--max_iters=10"))
    run = open_run(config("--eval_only", "--init_from=resume", "--offload=optimizer", "--optim_states=int8"))
    assert run.stepper is None
    assert not run.model._accumulators
    trained = train(config("--eval_only", "--init_from=resume"))
    assert trained.values["val_loss"] == list(read_metrics(Path("out/metrics.jsonl")))[-1]["val_loss"]


def test_running_out_before_the_first_step_is_reported_like_later(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*args: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine_module, "Stepper", too_much)
    with pytest.raises(UserError, match="out of memory") as stopped:
        train(config())
    assert "--recompute=block" in stopped.value.hint


def test_running_out_while_only_evaluating_is_reported_too(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*args: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(evaluate_only_module, "evaluate_both", too_much)
    with pytest.raises(UserError, match="out of memory") as stopped:
        train(config("--eval_only=True"))
    assert "evaluates as much in smaller pieces" in stopped.value.hint


def test_a_shape_that_was_not_used_is_not_written_down(workplace: Path) -> None:
    train(config("--max_iters=2"))
    train(config("--max_iters=3", "--n_embd=48", "--init_from=resume"))
    before = RunDirectory("out").read_config()
    assert before is not None
    assert before.n_embd == config().n_embd
    train(config("--max_iters=3"))  # the run's own width is not refused


LOW_BIT = ["--master_weights=bf16", "--optim_states=int8", "--recompute=block"]


@pytest.mark.parametrize("storage", [[], LOW_BIT, ["--offload=gradients"]])
@pytest.mark.parametrize(
    "arch", [["--generation=2025"], ["--generation=2026"], ["--arch=gpt2", "--optimizer=muon"]]
)
def test_muon_resumes_exactly(workplace: Path, storage: list[str], arch: list[str]) -> None:
    """Through the whole house: dial, rules, Muon, checkpoint."""
    arguments = [a for a in TINY if "lr" not in a]
    if "--arch=gpt2" not in arch:
        arguments += ["--arch=nanochat", "--depth=2", "--warmdown_ratio=0"]

    def weights(*more: str) -> dict[str, torch.Tensor]:
        train(load_config(RunConfig, [*arguments, *arch, *storage, "--eval_interval=4", *more]))
        return list_checkpoints(Path("out/checkpoints"))[-1].model_tensors()

    whole = weights("--max_iters=8", "--fresh")
    weights("--max_iters=4", "--fresh")
    resumed = weights("--max_iters=8", "--init_from=resume")
    assert whole.keys() == resumed.keys()
    changing = "2026" in arch[0]  # its decay follows the horizon: near, not equal
    for name, tensor in whole.items():
        if changing:
            torch.testing.assert_close(resumed[name], tensor, atol=0.02, rtol=0.1)
        else:
            assert torch.equal(resumed[name], tensor), name


def test_a_nanochat_checkpoint_decides_depth_and_block(workplace: Path) -> None:
    small = ["--dataset=tiny", "--vocab_size=61", "--device=cpu", "--no-compile", "--sample_tokens=0",
             "--eval_iters=2", "--batch_size=4", "--gradient_accumulation_steps=2",
             "--max_iters=2"]  # fmt: skip
    wide = ["--depth=3", "--n_embd=32", "--n_head=2", "--block_size=16"]
    train(load_config(RunConfig, [*small, *wide, "--out_dir=first"]))
    train(load_config(RunConfig, [*small, "--init_from=./first", "--out_dir=second"]))
    config = RunDirectory("second").read_config()
    assert config is not None
    assert (config.arch, config.generation, config.depth, config.n_layer) == ("nanochat", 2026, 3, 3)
    assert (config.n_embd, config.block_size) == (32, 16)
    # By its folder alone, without a word about the architecture.
    summary = train(load_run_config(["--out_dir=second", "--max_iters=3", "--init_from=resume"]))
    assert summary.values["step"] == 3


def test_a_run_without_a_checkpoint_lends_nothing_to_another(workplace: Path) -> None:
    RunDirectory("out").path.mkdir()
    RunDirectory("out").write_config(config("--n_embd=48", "--init_from=./elsewhere"))
    again = load_run_config(["--out_dir=out"])
    assert (again.n_embd, again.init_from) == (48, "./elsewhere")
    other = load_run_config(["--out_dir=out", "--n_layer=3"])
    assert (other.n_embd, other.n_layer, other.init_from) == (768, 3, "auto")


@pytest.mark.parametrize("always", [True, False])
def test_the_newest_two_are_kept_beside_the_best_however_the_loss_goes(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    """A validation loss that rises is no reason to lose the steps since its best."""
    scripted = iter([5.0, 4.0, 4.5, 4.6, 4.7])
    monkeypatch.setattr(loop_module, "evaluate_both", lambda *_: Evaluation(3.0, next(scripted), 0.1, 0.1))
    train(config(f"--always_save_checkpoint={always}", "--eval_interval=5"))
    assert [c.step for c in list_checkpoints(Path("out/checkpoints"))] == [5, 15, 20]
    sampled, _ = checkpoint_of_run(RunDirectory("out"), None)
    assert sampled.step == (20 if always else 5)


def test_the_horizon_in_tokens_ends_the_run(workplace: Path) -> None:
    arguments = [a for a in TINY if not a.startswith(("--max_iters", "--lr_decay", "--warmup"))]
    summary = train(load_config(RunConfig, [*arguments, "--tokens=1000"]))
    assert summary.values["step"] == 8  # 128 tokens a step, rounded up
    assert summary.values["tokens"] == 1024


def diverging_after(micro_batches: int) -> Any:
    real = Stepper.backward
    calls = 0

    def backward(self: Stepper, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        share = real(self, *args)
        return share * float("nan") if calls > micro_batches else share

    return backward


def test_a_diverged_run_stops_with_a_reason_and_exit_code_1(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stepper, "backward", diverging_after(24))
    with pytest.raises(UserError, match="the loss became nan at step 12") as stopped:
        train(config())
    assert stopped.value.exit_code == 1
    assert "of step 10" in stopped.value.why
    assert stopped.value.hint.startswith("go on from step 10, bit for bit: onecard train --out_dir=out\n")
    assert read_metrics(Path("out/metrics.jsonl"))[-1]["loss"] is None


def test_weights_that_are_no_longer_numbers_are_never_saved(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log line that would show the NaN is far away; evaluations and checkpoints come before it."""
    monkeypatch.setattr(Stepper, "backward", diverging_after(24))
    with pytest.raises(UserError, match="the loss became nan at step 12"):
        train(config("--log_interval=1000", "--eval_interval=5"))
    assert [c.step for c in list_checkpoints(Path("out/checkpoints"))] == [5, 10]
    monkeypatch.setattr(loop_module, "evaluate_both", lambda *_: Evaluation(1.0, float("nan"), 0.1, 0.1))
    with pytest.raises(UserError, match="validation loss is nan"):
        train(config("--out_dir=other"))


@pytest.mark.parametrize("horizon", ["--max_iters=20", "--tokens=2560"])
def test_without_its_config_json_a_run_is_still_the_experiment_it_was(workplace: Path, horizon: str) -> None:
    """Every checkpoint has the values too: by its folder alone it goes on with them."""
    words = [word for word in TINY if not word.startswith("--max_iters")]
    train(load_config(RunConfig, [*words, horizon]))
    before = RunDirectory("out").read_config()
    Path("out/config.json").unlink()
    again = load_run_config(["--out_dir=out", "--init_from=resume", "--max_iters=24", "--extend=stay"])
    assert before is not None and again.sequences_per_step == before.sequences_per_step == 8
    assert (again.learning_rate, again.n_embd, again.dataset) == (1e-2, 32, "tiny")
    with pytest.raises(UserError, match="a different config") as refused:
        train(load_config(RunConfig, [*words, horizon, "--learning_rate=0.5"]))
    assert "learning_rate: 0.01 there, 0.5 now" in refused.value.why
    assert train(again).values["step"] == 24


def test_a_last_save_that_fails_says_what_is_left(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = saving.save_checkpoint

    def save(folder: Path, step: int, *more: Any) -> Path:
        if step > 10:
            raise UserError("the disk is full", "20 bytes are missing", "make room")
        return real(folder, step, *more)

    monkeypatch.setattr(saving, "save_checkpoint", save)
    with pytest.raises(UserError, match="the disk is full") as failed:
        train(config())
    assert failed.value.why is not None
    assert failed.value.why.endswith("the checkpoint of step 10 is kept; 10 steps after it are lost")


def test_a_gradient_that_is_no_number_has_spoilt_the_weights_before_any_loss_shows_it(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run is asked to save right then."""
    real, done = Optimizer.norm, 0

    def norm(optimizer: Optimizer) -> torch.Tensor:
        nonlocal done
        done += 1
        if done == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(optimizer) * (float("nan") if done == 13 else 1.0)

    monkeypatch.setattr(Optimizer, "norm", norm)
    with pytest.raises(UserError, match="the gradient became nan at step 12"):
        train(config())
    assert [c.step for c in list_checkpoints(Path("out/checkpoints"))] == [10]


def test_a_memory_error_in_the_log_of_an_evaluation_costs_no_checkpoint(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = journal_module.Journal.evaluated, list[int]()

    def evaluated(journal: Any, step: int, *more: Any) -> None:
        if step == 10 and not failed:
            failed.append(step)
            raise MemoryError
        real(journal, step, *more)

    monkeypatch.setattr(journal_module.Journal, "evaluated", evaluated)
    train(config())
    assert failed and [c.step for c in list_checkpoints(Path("out/checkpoints"))] == [10, 20]


def test_what_fails_in_the_middle_keeps_the_steps_before_it(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Stepper.backward
    calls = 0

    def backward(self: Stepper, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2 * 13 + 1:
            raise RuntimeError("the card fell off the bus")
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "backward", backward)
        with pytest.raises(RuntimeError, match="fell off"):
            train(config("--out_dir=cut"))
    assert "saved step 13" in capsys.readouterr().err
    train(config("--out_dir=cut"))
    train(config("--out_dir=straight"))
    assert losses("cut") == losses("straight")


def test_fresh_touches_nothing_when_the_new_run_cannot_start(workplace: Path) -> None:
    train(config("--max_iters=10"))
    with pytest.raises(UserError, match="nowhere"):
        train(config("--fresh", "--dataset=nowhere"))
    assert [c.step for c in list_checkpoints(Path("out/checkpoints"))] == [10]
    assert not list(workplace.glob("out.before*"))


def test_a_run_may_go_on_in_another_precision(workplace: Path) -> None:
    train(config("--max_iters=10"))
    summary = train(config("--init_from=resume", "--dtype=bfloat16"))
    assert summary.values["step"] == 20
    # float16 needs a GPU and becomes float32 here, but its loss scaling must not stumble on the state.
    state = list_checkpoints(Path("out/checkpoints"))[-1].state["scaler"]
    assert state == {}
    stepper = open_run(config("--init_from=resume", "--dtype=bfloat16")).stepper
    stepper.loss_scale = LossScale(enabled=True)
    stepper.restore({}, state)
    assert stepper.loss_scale.value == 65536.0


@pytest.mark.parametrize(
    "memory",
    [
        ["--recompute=mlp"],
        ["--recompute=block", "--loss_chunk=7"],
        ["--gradient_checkpointing=True", "--offload=optimizer"],
        ["--recompute=block", "--offload=gradients", "--loss_chunk=1"],
    ],
    ids=" ".join,
)
def test_what_only_saves_memory_changes_no_loss(workplace: Path, memory: list[str]) -> None:
    train(config("--out_dir=plain"))
    train(config("--out_dir=lean", *memory))
    plain, lean = losses("plain"), losses("lean")
    assert lean.keys() == plain.keys()
    assert max(abs(lean[step] - plain[step]) for step in plain) < 1e-5


LOW_BIT = ["--master_weights=bf16", "--optim_states=int8"]


@pytest.mark.parametrize("settings", [LOW_BIT, [*LOW_BIT, "--offload=gradients"]], ids=" ".join)
def test_a_low_bit_run_learns_and_resumes_bit_for_bit(workplace: Path, settings: list[str]) -> None:
    exact = train(config("--out_dir=exact"))
    whole = train(config("--out_dir=straight", *settings))
    assert whole.values["val_loss"] == pytest.approx(exact.values["val_loss"], abs=0.1)
    train(config("--out_dir=halves", "--max_iters=10", *settings))
    train(config("--out_dir=halves", "--init_from=resume", *settings))
    assert losses("straight") == losses("halves") != losses("exact")
    straight, halves = final_weights("straight"), final_weights("halves")
    assert all(torch.equal(straight[name], halves[name]) for name in straight)
    assert straight["transformer.wte.weight"].dtype == torch.bfloat16
    assert straight["transformer.ln_f.weight"].dtype == torch.float32


def test_an_exact_run_goes_on_in_low_bits_and_back_when_asked(workplace: Path) -> None:
    train(config("--max_iters=10"))
    with pytest.raises(UserError, match="different config") as refused:
        train(config(*LOW_BIT))
    assert "optim_states: None there, 'int8' now" in refused.value.why
    train(config("--max_iters=15", "--init_from=resume", *LOW_BIT))
    assert final_weights()["transformer.wte.weight"].dtype == torch.bfloat16
    summary = train(config("--init_from=resume", "--master_weights=fp32", "--optim_states=fp32"))
    assert final_weights()["transformer.wte.weight"].dtype == torch.float32
    assert summary.values["val_loss"] < summary.values["first_val_loss"] - 0.5


def test_a_low_bit_run_is_sampled_and_exported(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(*LOW_BIT))
    assert main(["export", "out", "nano/ckpt.pt", "--to", "nanogpt"]) == 0
    saved = torch.load("nano/ckpt.pt", weights_only=True)
    assert saved["model"]["transformer.wte.weight"].dtype == torch.float32
    assert saved["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32
    assert main(["export", "out", "hf"]) == 0
    assert Path("hf/model.safetensors").is_file()


def test_what_is_about_a_card_is_noted_on_a_cpu(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config("--vram_limit=11", "--max_iters=1"))
    assert "this run computes on the CPU" in capsys.readouterr().err


def test_the_evaluation_set_outlives_another_split_and_more_data(workplace: Path) -> None:
    train(config("--max_iters=10"))
    before = open_run(config("--init_from=resume")).evaluation
    for split in ("train", "val"):
        path = workplace / "data" / "tiny" / f"{split}.bin"
        path.write_bytes(path.read_bytes() * 2)
    halved = config("--init_from=resume", "--batch_size=2", "--gradient_accumulation_steps=4")
    after = open_run(halved).evaluation
    for name in ("train", "val"):
        assert np.array_equal(before[name].gather(0, 99), after[name].gather(0, 99))


def test_a_shorter_block_continues_with_the_moments_cut_as_well(workplace: Path) -> None:
    train(config("--max_iters=10"))
    summary = train(config("--init_from=resume", "--block_size=8"))
    assert summary.values["step"] == 20
    moments = list_checkpoints(Path("out/checkpoints"))[-1].optimizer_tensors()
    assert moments["exp_avg.transformer.wpe.weight"].shape == (8, 32)


def test_a_full_disk_at_an_evaluation_does_not_end_the_run_but_at_the_end_it_is_an_error(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = saving.save_checkpoint

    def full_at_ten(folder: Path, step: int, *rest: Any) -> Path:
        if step == 10:
            raise UserError("the checkpoint of step 10 could not be written", "no space")
        return real(folder, step, *rest)

    monkeypatch.setattr(saving, "save_checkpoint", full_at_ten)
    assert train(config()).values["step"] == 20
    assert "step 10 could not be written" in capsys.readouterr().err
    with pytest.raises(UserError, match="step 10"):
        train(config("--out_dir=short", "--max_iters=10"))


def test_wandb_gets_the_run_when_installed_and_one_hint_when_not(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(config("--wandb_log=True", "--max_iters=10"))
    assert capsys.readouterr().err.count("wandb_log=True needs wandb") == 1

    logged: list[dict[str, Any]] = []
    started: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=logged.append, finish=lambda: started.append({"finished": True}))

    def not_logged_in(**_: Any) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=not_logged_in))
    train(config("--wandb_log=True", "--max_iters=2", "--out_dir=offline"))
    assert "wandb did not start (api_key not configured)" in capsys.readouterr().err

    fake = types.SimpleNamespace(init=lambda **kw: started.append(kw) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(config("--wandb_log=True", "--wandb_project=p", "--wandb_run_name=r", "--out_dir=w"))
    assert started[0]["project"] == "p"
    assert started[0]["name"] == "r"
    assert started[-1] == {"finished": True}
    assert [x["iter"] for x in logged if "val/loss" in x] == [0, 10, 20]
    assert len([x for x in logged if "train/loss_step" in x]) == 20

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = types.SimpleNamespace(log=full, finish=full)
    summary = train(config("--wandb_log=True", "--out_dir=full"))
    assert summary.values["step"] == 20
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_samples_are_written_at_evaluations(workplace: Path) -> None:
    from onecard.data.prepare.command import prepare
    from onecard.data.prepare.options import PrepareOptions

    Path("text.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    prepare(["text.txt"], PrepareOptions(tokenizer="byte"), progress=False)
    arguments = [a for a in TINY if not a.startswith(("--vocab", "--dataset", "--sample"))]
    train(load_config(RunConfig, [*arguments, "--dataset=text", "--sample_tokens=40"]))
    samples = sorted(p.name for p in Path("out/samples").iterdir())
    assert samples == ["step-00000010.txt", "step-00000020.txt"]
    assert 10 < len((Path("out/samples") / samples[-1]).read_text()) <= 42
    state = list_checkpoints(Path("out/checkpoints"))[-1].state
    assert state["tokenizer"]["name"] == "byte"
    assert state["shape"]["vocab_size"] == 320  # 257 rounded up to a multiple of 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset=missing"], "missing"),
        (["--block_size=2000"], "block_size"),
        (["--vocab_size=50"], "vocab"),
        (["--init_from=resume"], "no run folder"),
        (["--init_from=./nowhere/ckpt.pt"], "nothing at"),
        (["--n_layer=1024", "--n_embd=65536"], "cannot be trained here"),
        (["--device=cuda:7"], "cuda:7"),
        (["--recompute=layer"], "recompute"),
        (["--gradient_checkpointing=perhaps"], "gradient_checkpointing takes True or False"),
        (["--loss_chunk=0"], "loss_chunk"),
        (["--offload=disk"], "offload"),
    ],
)
def test_what_cannot_work_is_one_clear_error_and_leaves_nothing(
    workplace: Path, arguments: list[str], message: str
) -> None:
    if arguments == ["--device=cuda:7"] and torch.cuda.device_count() > 7:
        pytest.skip("this machine has eight cards")
    with pytest.raises(UserError, match=message) as error:
        train(config(*arguments))
    assert error.value.hint or error.value.why
    assert not Path("out").exists()


def test_torchrun_is_reported_that_this_is_one_card(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="one card"):
        train(config())


def test_data_that_shrank_under_a_run_is_refused_and_data_that_grew_is_taken(workplace: Path) -> None:
    train(config("--max_iters=10"))
    grown = workplace / "data" / "tiny" / "train.bin"
    grown.write_bytes(grown.read_bytes() * 2)
    # 6,000 tokens are 374 blocks: the 80 sequences seen and the 40 to come are of the first epoch, as before.
    train(config("--max_iters=15", "--init_from=resume"))
    write_bins(workplace / "data" / "tiny", train=6_000, val=1_500)
    train(config("--max_iters=15", "--out_dir=undisturbed"))
    assert losses() == losses("undisturbed")
    np.zeros(500, dtype=np.uint16).tofile(workplace / "data" / "tiny" / "train.bin")
    with pytest.raises(UserError, match="shorter"):
        train(config("--init_from=resume"))


def test_other_data_under_the_same_name_is_refused(workplace: Path) -> None:
    train(config("--max_iters=10"))
    write_bins(workplace / "data" / "tiny", train=9_000, val=1_500)
    with pytest.raises(UserError, match="not the data this run began with"):
        train(config("--init_from=resume"))


def test_another_dataset_begins_at_its_start_and_with_its_own_evaluation(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config("--max_iters=10"))
    write_bins(workplace / "data" / "small", train=1_000, val=300)
    summary = train(config("--init_from=resume", "--dataset=small"))
    assert "it begins data/small from the start" in capsys.readouterr().err
    assert summary.values["step"] == 20
    assert list_checkpoints(Path("out/checkpoints"))[-1].state["position"]["data"]["epoch"] == 1


def test_two_damaged_checkpoints_do_not_cost_the_run(workplace: Path) -> None:
    """The best one is old; the two newer ones are damaged. Going on from it and stopping early keeps it."""
    train(config("--eval_interval=5"))
    expected = losses()
    folder = Path("out/checkpoints")
    train(config("--out_dir=old", "--max_iters=10", "--eval_interval=5"))
    shutil.copytree("old/checkpoints/step-00000010", folder / "step-00000010")
    for checkpoint in list_checkpoints(folder)[1:]:
        (checkpoint.path / "model.safetensors").write_bytes(b"")
    train(config("--max_iters=13", "--init_from=resume", "--eval_interval=5"))
    assert [c.step for c in list_checkpoints(folder)] == [10, 13]
    train(config("--init_from=resume", "--eval_interval=5"))
    assert losses() == expected


def test_out_of_memory_says_what_to_change(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Stepper.backward
    calls = 0

    def backward(self: Stepper, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.54 GiB.")
        return real(self, *args)

    monkeypatch.setattr(Stepper, "backward", backward)
    with pytest.raises(UserError, match="out of memory") as stopped:
        train(config("--auto_fit=False"))
    by_itself, recompute, split, low_bit, _ = stopped.value.hint.splitlines()
    assert by_itself.startswith("--auto_fit=True")
    assert "not the same training" in low_bit
    assert recompute.startswith("--recompute=block")
    assert split.startswith("--batch_size=2 --gradient_accumulation_steps=4")
    assert stopped.value.exit_code == 1
    assert [c.step for c in list_checkpoints(Path("out/checkpoints"))] == [3]
    with pytest.raises(
        UserError, match="even with --batch_size=1 --gradient_accumulation_steps=8 --recompute=block"
    ) as stopped:
        train(config("--fresh"))
    assert "recompute" not in stopped.value.hint, "what was tried is no advice"


def test_a_closed_terminal_saves_like_ctrl_c(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Stepper.backward
    calls = 0

    def backward(self: Stepper, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            os.kill(os.getpid(), signal.SIGHUP)
        return real(self, *args)

    monkeypatch.setattr(Stepper, "backward", backward)
    assert train(config()).interrupted
    assert [c.step for c in list_checkpoints(Path("out/checkpoints"))] == [4]


def test_a_reader_that_leaves_does_not_end_the_run(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    assert train(config()).values["step"] == 20


def test_a_nanogpt_checkpoint_in_out_dir_is_continued(workplace: Path) -> None:
    """The fixture was written by nanoGPT's own train.py; its vocabulary of 21 needs data of its own."""
    fixture = Path(__file__).parent.parent / "fixtures" / "nanogpt" / "ckpt.pt"
    write_bins(workplace / "data" / "twenty", train=4_000, val=800, vocab=21)
    Path("out").mkdir()
    Path("out/ckpt.pt").write_bytes(fixture.read_bytes())
    summary = train(config("--dataset=twenty", "--init_from=resume", "--max_iters=40"))
    assert summary.values["step"] == 40
    assert sorted(losses()) == list(range(30, 40))  # it had been saved at iteration 30
    moments = list_checkpoints(Path("out/checkpoints"))[-1].optimizer_tensors()
    assert moments["steps"].item() == 40


def test_a_program_gets_the_figures_as_json(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["step"] == 20
    assert figures["val_loss"] < figures["first_val_loss"]
    assert figures["saved_step"] == 20


@pytest.mark.parametrize("words", [["--n_layer=2", "--n_head=2", "--n_embd=32"], ["--depth=2"]])
def test_the_same_command_continues_as_often_as_one_likes(workplace: Path, words: list[str]) -> None:
    """What the checkpoint decided (the vocabulary, of the data) is no difference the next time."""
    write_bins(workplace / "data" / "letters", train=6_000, val=1_500)
    letters = {"stoi": {chr(65 + n): n for n in range(61)}, "itos": {n: chr(65 + n) for n in range(61)}}
    (workplace / "data" / "letters" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 61, **letters}))
    asked = [
        "--arch=nanochat", "--dataset=letters", "--block_size=16", "--batch_size=4",
        "--gradient_accumulation_steps=2", "--max_iters=9", "--eval_interval=3", "--eval_iters=1",
        "--device=cpu", "--no-compile", "--sample_tokens=0", "--out_dir=again", *words,
    ]  # fmt: skip
    for _ in range(4):
        assert train(load_config(RunConfig, asked)).values["step"] == 9
    with pytest.raises(UserError, match="different model") as stopped:
        train(load_config(RunConfig, [*asked, "--vocab_size=128"]))
    assert "vocab_size: 61 there, 128 now" in stopped.value.why


def test_a_finished_run_says_so_and_how_to_go_further(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in TINY if word != "--no-compile"]
    assert main(["train", *words]) == 0
    shown = capsys.readouterr()
    assert "compiling" in shown.err and "finished already" not in shown.out
    assert main(["train", *words]) == 0
    shown = capsys.readouterr()
    assert "compiling" not in shown.err
    assert "finished already, at step 20 of 20" in shown.out and "done at step" not in shown.out
    (further,) = (line for line in shown.out.splitlines() if line.startswith("to train further: onecard "))
    assert main(further.split()[4:]) == 0
    shown = capsys.readouterr()
    assert "done at step 40 of 40" in shown.out


def test_a_run_past_its_end_says_how_to_go_beyond_where_it_is(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *TINY]) == 0
    capsys.readouterr()
    assert main(["train", "--out_dir=out", "--init_from=resume", "--max_iters=5"]) == 0
    shown = capsys.readouterr()
    assert "finished already, at step 20 of 5" in shown.out
    (further,) = (line for line in shown.out.splitlines() if line.startswith("to train further: onecard "))
    assert main(further.split()[4:]) == 0
    assert "done at step 40 of 40" in capsys.readouterr().out


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_resume_that_trains_nothing_leaves_what_describes_the_run(workplace: Path, evaluated: bool) -> None:
    train(config())
    if not evaluated:  # as of a run that Ctrl-C ended between two evaluations
        (state,) = Path("out").glob("checkpoints/step-00000020/state.json")
        content = json.loads(state.read_text())
        content["position"]["evaluated_step"] = 10
        state.write_text(json.dumps(content))
        manifest = state.with_name("manifest.json")
        files = json.loads(manifest.read_text())
        files["files"]["state.json"] = {"bytes": state.stat().st_size, "sha256": file_sha256(state)}
        manifest.write_text(json.dumps(files))
    described = [Path("out") / name for name in ("config.json", "plan.json")]
    before = [path.read_text() for path in described]
    assert train(config("--init_from=resume", "--max_iters=5")).values["step"] == 20
    assert [path.read_text() for path in described] == before
    assert train(config()).values["step"] == 20, "the command it was begun with is still its own"


def test_a_run_past_its_end_that_goes_over_to_other_blocks_is_described_anew(workplace: Path) -> None:
    """Its checkpoint is written again with fewer positions: config.json must not promise more."""
    train(config())
    train(config("--init_from=resume", "--block_size=8"))
    assert json.loads((Path("out") / "config.json").read_text())["values"]["block_size"] == 8
    assert train(load_run_config(["--out_dir=out"])).values["step"] == 20


def test_a_config_that_is_gone_is_written_even_if_nothing_is_trained(workplace: Path) -> None:
    train(config())
    (Path("out") / "config.json").unlink()
    train(config())
    assert json.loads((Path("out") / "config.json").read_text())["values"]["max_iters"] == 20


def test_the_learning_rate_shown_before_the_first_step_is_the_schedules(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config("--max_iters=10"))
    seen: list[float] = []

    def display(status: Status) -> PlainDisplay:
        seen.append(status.learning_rate)
        return PlainDisplay()

    monkeypatch.setattr(journal_module, "open_display", display)
    train(config("--init_from=resume"))
    rates = {x["step"]: x["lr"] for x in read_metrics(Path("out") / "metrics.jsonl") if "loss" in x}
    assert seen == [rates[10]] and rates[10] > 1e-3


def test_missing_data_is_named_in_the_tokens_the_config_needs(workplace: Path) -> None:
    described = workplace / "d2.py"
    recipe = "onecard prepare fineweb --name thirty --tokens 1B --train-tokenizer 32768"
    described.write_text(f"# Its data: {recipe}\ndataset = 'thirty'\narch = 'nanochat'\ndepth = 2\n")
    for words, hint in (
        (["d2.py"], recipe),
        (["--depth=2", "--dataset=mine"], "FILES-OR-FOLDER --name mine --train-tokenizer 32768"),
        (["--depth=2", "--generation=2025", "--dataset=mine"], "--name mine --train-tokenizer 65536"),
        (["--vocab_size=8192", "--dataset=mine"], "--name mine --train-tokenizer 8192"),
        (["--vocab_size=50304", "--dataset=mine"], "--name mine\n"),
        (["--depth=2", "--dataset=stdlib"], "onecard prepare stdlib\n"),
        (["--vocab_size=320", "--dataset=mine"], "--name mine --tokenizer byte\n"),
        (["--vocab_size=65", "--dataset=mine"], "--name mine --tokenizer char\n"),
        ([str(CONFIGS / "demo.py"), "--dataset=mine"], "--name mine --tokenizer byte\n"),
        (
            [str(CONFIGS / "train_d12.py"), "--depth=2", "--dataset=mine"],
            "--name mine --train-tokenizer 32768\n",
        ),
        ([str(CONFIGS / "train_fineweb.py"), "--dataset=mine"], "--name mine\n"),
    ):
        given = load_config(RunConfig, [*words, "--n_layer=2", "--n_embd=128", "--n_head=2", "--device=cpu"])
        with pytest.raises(UserError, match="there is no dataset") as caught:
            open_run(given)
        assert hint in caught.value.hint + "\n", words


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ([str(CONFIGS / "train_fineweb.py")], "about 9.0 GB"),  # 3.2B tokens at 2.8 bytes of parquet each
        (["--dataset=openwebtext"], "about 24.4 GB"),  # 9.04B at 2.7
        (["--dataset=shakespeare"], ""), (["--dataset=stdlib"], ""), (["--dataset=mine"], ""),
    ],
)  # fmt: skip
def test_a_hint_to_download_says_how_much(words: list[str], size: str, workplace: Path) -> None:
    with pytest.raises(UserError, match="there is no dataset") as caught:
        open_run(load_config(RunConfig, [*words, "--device=cpu", "--n_layer=1", "--dtype=float32"]))
    assert ("downloads" in caught.value.hint) == bool(size) and size in caught.value.hint


def test_data_in_other_tokens_than_the_configs_is_reported(workplace: Path) -> None:
    write_bins(workplace / "data" / "thirty", train=6_000, val=1_500)
    meta = {"schema": 1, "dtype": "uint16", "tokenizer": make_tokenizer("byte").facts()}
    (workplace / "data" / "thirty" / "meta.json").write_text(json.dumps(meta))
    recipe = "onecard prepare fineweb --name thirty --train-tokenizer 2048"
    small = "batch_size = 2\nblock_size = 16\ngradient_accumulation_steps = 1\nn_embd = 32\nn_head = 2\n"
    (workplace / "d2.py").write_text(
        f"# Its data: {recipe}\ndataset = 'thirty'\narch = 'nanochat'\ndepth = 2\n{small}compile = False\n"
    )

    def reported(*words: str) -> list[str]:
        notes = open_run(load_config(RunConfig, [*words, "--device=cpu", "--max_iters=500"])).notes
        return [note for note in notes if "in its vocabulary" in note]

    (note,) = reported("d2.py")
    assert "257" in note and "2,048" in note and "another model" in note and recipe in note
    (note,) = reported("d2.py", "--vocab_size=1024")
    assert "257" in note and "1,024" in note
    assert reported("d2.py", "--vocab_size=320") == [], "that is padding"
    assert reported("d2.py", "--dataset=tiny", "--vocab_size=64") == [], "nobody knows its tokenizer"
