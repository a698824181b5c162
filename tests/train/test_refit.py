"""Failures at the worst moments of a change: all in host memory, while saving, while text is generated."""

from __future__ import annotations

import json
import signal
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FULL, TINY, config, events, weights

from onecard.arch.layout import Setting
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.errors import UserError
from onecard.model.decoder import Decoder
from onecard.optim.optimizer import Optimizer
from onecard.plan.lines import GIB
from onecard.plan.rates import ANY_CARD
from onecard.plan.search import Question
from onecard.run.metrics import read_metrics
from onecard.train import host_copy as host_copy_module
from onecard.train import journal as journal_module
from onecard.train import loop as loop_module
from onecard.train import pausing as pausing_module
from onecard.train import refit as refit_module
from onecard.train import retries as retries_module
from onecard.train import saving
from onecard.train import start as start_module
from onecard.train.first_setting import open_fit
from onecard.train.fit import Fit
from onecard.train.loop import Training, train
from onecard.train.step import Stepper

pytestmark = pytest.mark.usefixtures("little_garbage")


def saved_steps(out_dir: str = "out") -> list[int]:
    return [event["step"] for event in events("saved", out_dir)]


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_fit.py."""
    monkeypatch.setattr(start_module, "choose_dtype", lambda requested, device: ("float64", ""))


def fail_from(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: range, error: Exception | None = None
) -> list[int]:
    """The calls in `calls` (counted from 0) raise; returns a list that grows with the failures."""
    plain, count, failed = getattr(owner, name), iter(range(2**62)), []

    def sometimes(*arguments: Any, **named: Any) -> Any:
        number = next(count)
        if number in calls:
            failed.append(number)
            raise error or torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    monkeypatch.setattr(owner, name, sometimes)
    return failed


@pytest.fixture
def to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way down is another place of masters and totals each time; for so small a model the planner has
    no reason to choose them."""
    left = iter(range(12))

    def down(fit: Fit, step: int, allocator: float | None = None) -> Setting | None:
        if next(left, None) is None:
            return None
        following = {"none": "optimizer", "optimizer": "gradients", "gradients": "none"}
        now = fit.setting
        fit.setting = replace(now, offload=following[now.offload], micro_batch=now.micro_batch % 3 + 1)
        return fit.setting

    monkeypatch.setattr(Fit, "down", down)
    monkeypatch.setattr(Fit, "may_offload", True)  # as on a card


def full_at_step(monkeypatch: pytest.MonkeyPatch, *steps: int) -> list[int]:
    """These steps run out as long as masters are on the card; returns a list that grows with the failures."""
    plain, failed = Stepper.run, []

    def run(stepper: Stepper, *arguments: Any, **named: Any) -> Any:
        if stepper.optimizer.steps in steps and stepper.optimizer.storage.offload == "none":
            failed.append(stepper.optimizer.steps)
            raise torch.OutOfMemoryError(FULL)
        return plain(stepper, *arguments, **named)

    monkeypatch.setattr(Stepper, "run", run)
    return failed


def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    plain = Training._step

    def stopped(training: Training, *arguments: Any) -> None:
        plain(training, *arguments)
        if training.position.step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Training, "_step", stopped)


def test_what_is_in_host_memory_is_saved_when_nothing_can_be_built_any_more(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, to_the_host: None
) -> None:
    train(config("--out_dir=quiet", "--max_iters=7", "--eval_interval=100", "--lr_decay_iters=40"))
    full_at_step(monkeypatch, 7)
    failed = fail_from(monkeypatch, host_copy_module, "new_stepper", range(10**6))
    with pytest.raises(UserError, match="out of memory"):
        train(config("--eval_interval=100"))
    assert failed, "the run was between two settings when it ended"
    assert saved_steps() == [7]
    for name, expected in weights("quiet").items():
        assert torch.equal(weights()[name], expected), name


def test_an_error_of_another_kind_while_in_host_memory_is_reported_and_the_steps_are_saved(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, to_the_host: None
) -> None:
    full_at_step(monkeypatch, 7)
    fail_from(monkeypatch, host_copy_module, "new_stepper", range(10**6), RuntimeError("the driver is gone"))
    with pytest.raises(RuntimeError, match="the driver is gone"):
        train(config("--eval_interval=100"))
    assert saved_steps() == [7]


@pytest.mark.parametrize("diverged", [False, True])
def test_a_card_lost_while_all_is_in_host_memory_costs_no_step(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, to_the_host: None, diverged: bool
) -> None:
    """The steps in flight cannot be asked for their losses any more, but the weights are in host memory."""
    lost = RuntimeError("CUDA error: unspecified launch failure")
    full_at_step(monkeypatch, 7)
    plain = host_copy_module.move_to_host

    def move_to_host(run: Any) -> Any:
        state = plain(run)
        fail_from(monkeypatch, torch, "stack", range(10**6), lost)
        if diverged:
            next(iter(state.weights.values()))[0] = torch.nan
        return state

    monkeypatch.setattr(host_copy_module, "move_to_host", move_to_host)
    fail_from(monkeypatch, host_copy_module, "new_stepper", range(10**6), lost)
    with pytest.raises(UserError, match="the card stopped working at step 7") as stopped:
        train(config("--eval_interval=100", "--log_interval=100"))
    assert saved_steps() == ([] if diverged else [7])
    reported = "7 steps after it are lost" if diverged else "the checkpoint of step 7 is kept"
    assert reported in stopped.value.why


@pytest.mark.parametrize("place", ["move_to_host", "new_stepper", "restore"])
@pytest.mark.parametrize("host", [False, True])
def test_a_change_that_fails_itself_is_tried_in_another_way(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    to_the_host: None,
    in_float64: None,
    place: str,
    host: bool,
) -> None:
    """Also where it is the host that has no room: that is a UserError (optim/offload.py)."""
    train(config("--out_dir=quiet"))
    full_at_step(monkeypatch, 6)
    owner = Stepper if place == "restore" else host_copy_module
    error = UserError("masters do not fit into this machine's memory") if host else MemoryError()
    tries = 1 if host else 4  # what the host refuses is not asked of it again
    failed = fail_from(monkeypatch, owner, place, range(tries), error)
    train(config())
    assert len(failed) == tries
    for name, expected in weights("quiet").items():
        assert (weights()[name] - expected).abs().max() < 1e-9, name


def test_a_sample_that_cannot_be_drawn_costs_a_note(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    prepare(["text.txt"], PrepareOptions(tokenizer="byte"), progress=False)
    words = [word for word in TINY if not word.startswith(("--vocab", "--dataset"))]
    train(load_config(RunConfig, [*words, "--dataset=text", "--out_dir=quiet"]))
    fail_from(monkeypatch, journal_module, "sample_text", range(10**6))
    summary = train(load_config(RunConfig, [*words, "--dataset=text", "--sample_tokens=8"]))
    assert "out of memory in sampling: no sample text" in "".join(capsys.readouterr())
    assert summary.values["refits"] == 0, "training is not made slower for it"
    assert saved_steps() == saved_steps("quiet") and len(saved_steps()) > 1
    reported = [x["step"] for x in read_metrics(Path("out") / "metrics.jsonl") if "val_loss" in x]
    assert reported == [0, 5, 10, 15, 20], "every evaluation once"


def test_a_checkpoint_that_ran_out_is_written_all_the_same(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config("--out_dir=quiet"))
    failed = fail_from(monkeypatch, saving, "save_checkpoint", range(0, 10**6, 2))
    train(config())
    assert len(failed) == 4
    assert saved_steps() == saved_steps("quiet")
    reported = [x["step"] for x in read_metrics(Path("out") / "metrics.jsonl") if "val_loss" in x]
    assert reported == [0, 5, 10, 15, 20], "no evaluation is repeated for it"
    assert not events("refitted"), "letting go of what training had left behind was enough"


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(FULL)])
def test_a_checkpoint_that_runs_out_again_and_again_is_left_out(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """As on a full disk: training is not made slower for it, and does not end."""
    train(config("--out_dir=quiet"))
    tries = retries_module._SAVES
    failed = fail_from(monkeypatch, saving, "save_checkpoint", range(tries + 2), error)
    assert train(config()).values["step"] == 20
    assert len(failed) == tries + 2
    assert saved_steps("quiet") == [5, 10, 15, 20] and saved_steps() == [10, 15, 20]
    (left_out,) = events("save failed")
    assert left_out["step"] == 5 and not events("refitted")
    assert "the checkpoint of step 5 could not be written: out of memory" in "".join(capsys.readouterr())


def test_the_last_checkpoint_is_not_left_out_in_silence(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_from(monkeypatch, saving, "save_checkpoint", range(10**6), MemoryError())
    with pytest.raises(UserError, match="checkpoint of step 6 could not be written: out of memory") as ended:
        train(config("--max_iters=6", "--eval_interval=100"))
    assert "6 steps after it are lost" in ended.value.why or "nothing had been saved" in ended.value.why
    assert "could not be saved: MemoryError" in "".join(capsys.readouterr())


def test_the_save_after_ctrl_c_may_run_out_too(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_at(monkeypatch, 7)
    failed = fail_from(monkeypatch, saving, "save_checkpoint", range(2))
    summary = train(config("--eval_interval=100"))
    assert len(failed) == 2 and summary.interrupted
    assert saved_steps() == [7]


def test_ctrl_c_during_a_change_ends_the_run_after_it(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, to_the_host: None
) -> None:
    full_at_step(monkeypatch, 7)
    plain = host_copy_module.move_to_host

    def move_to_host(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return plain(*arguments)

    monkeypatch.setattr(host_copy_module, "move_to_host", move_to_host)
    summary = train(config("--eval_interval=100"))
    assert summary.interrupted
    assert saved_steps() == [7]


def test_another_setting_decides_anew_what_is_captured(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing changes its place and the stepper stays."""
    recorded, settings = [], []
    plain = Stepper.use_graphs
    monkeypatch.setattr(
        Stepper, "use_graphs", lambda stepper, graphs: (recorded.append(graphs), plain(stepper, False))[1]
    )

    def chosen(asked: RunConfig, setting: Setting, device: str, **known: bool) -> bool:
        settings.append(setting)
        return True

    monkeypatch.setattr(host_copy_module, "graphs_of", chosen)
    fail_from(monkeypatch, Stepper, "run", range(7, 8))
    train(config())
    (changed,) = events("refitted")
    assert changed["before"]["offload"] == changed["after"]["offload"] == "none"
    assert recorded == [False, True]
    assert [setting.to_json() for setting in settings] == [changed["after"]]


@pytest.mark.parametrize("failures", [0, 2, 5])
def test_less_memory_after_a_pause_is_reported(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, to_the_host: None, in_float64: None, failures: int
) -> None:
    train(config("--out_dir=quiet"))
    monkeypatch.setattr(loop_module, "PauseRequest", lambda directory: ShortPause())
    monkeypatch.setattr(pausing_module, "_TRY_EVERY", 0.0)
    failed = fail_from(monkeypatch, host_copy_module, "new_stepper", range(failures))
    train(config())
    assert len(events("paused")) == len(events("went on")) == 1
    assert [event["where"] for event in events("refitted")] == ["pause"] * (failures > 3), (
        "as before, if it can be"
    )
    assert len(failed) == failures
    for name, expected in weights("quiet").items():
        assert (weights()[name] - expected).abs().max() < 1e-9, name


class ShortPause:
    """Requested after a while, and over as soon as it is granted."""

    def __init__(self) -> None:
        self._asked, self._was = 0, False

    def __call__(self) -> bool:
        self._asked += 1
        return self._asked > 40 and not self._was

    def requested(self) -> bool:
        return self()

    def granted(self, left: str) -> None:
        self._was = True

    def says(self, state: str, text: str = "") -> None: ...

    def going_on(self) -> None: ...

    def over(self) -> None: ...

    def ending(self) -> None: ...

    def ended(self) -> None: ...


SMALL_NANOCHAT = ["--arch=nanochat", "--depth=2", "--dataset=tiny", "--vocab_size=61",
    "--block_size=16", "--batch_size=4", "--total_batch_size=128", "--max_iters=20", "--eval_interval=5",
    "--eval_iters=2", "--device=cpu", "--no-compile", "--sample_tokens=0", "--out_dir=out"]  # fmt: skip
KINDS = {
    "muon": [*TINY, "--optimizer=muon"],
    "2025": [*SMALL_NANOCHAT, "--generation=2025"],
    "2026": [*SMALL_NANOCHAT, "--generation=2026"],
    "dropout": [*TINY, "--dropout=0.2"],
    "uneven": [*TINY, "--batch_size=3", "--gradient_accumulation_steps=3"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_changes_and_resuming_alter_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, to_the_host: None, in_float64: None, kind: str
) -> None:
    """Changed at step 3, interrupted at 7, continued, changed at 9: as one run without any of it."""
    train(load_config(RunConfig, [*KINDS[kind], "--out_dir=quiet"]))
    failed = full_at_step(monkeypatch, 3, 9)
    interrupted_at(monkeypatch, 7)
    asked = load_config(RunConfig, KINDS[kind])
    train(asked)
    before = json.loads((Path("out") / "config.json").read_text())
    train(asked)
    assert failed == [3, 9]
    # The setting of a step is not the run's config.
    after = json.loads((Path("out") / "config.json").read_text())
    assert after["values"] == before["values"]
    for name, expected in weights("quiet").items():
        assert (weights()[name] - expected).abs().max() < 1e-9, name


def test_a_low_bit_run_goes_on_from_every_bit(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding is drawn by the step and the element, so places make no difference either."""
    low = [*TINY, "--master_weights=bf16", "--optim_states=int8", "--offload=optimizer", "--batch_size=1"]
    train(load_config(RunConfig, [*low, "--out_dir=quiet"]))
    fail_from(monkeypatch, Stepper, "run", range(6, 7))
    seen = []

    def to_the_card(fit: Fit, step: int, allocator: float | None = None) -> Setting:
        seen.append(step)
        fit.setting = replace(fit.setting, offload="none")
        return fit.setting

    monkeypatch.setattr(Fit, "down", to_the_card)
    train(load_config(RunConfig, low))
    assert seen == [6]
    for name, expected in weights("quiet").items():
        assert torch.equal(weights()[name], expected), name


@pytest.mark.parametrize("words", [["--master_weights=bf16"], ["--optim_states=int8"]])
def test_bits_pinned_one_by_one_leave_ways_down(words: list[str]) -> None:
    asked = load_config(RunConfig, ["--max_iters=10", *words])
    question = Question(asked, asked.shape(50304), "bfloat16", ANY_CARD, 12 * GIB, None, (8, 9))
    fit = open_fit(question, on_card=True)
    first = fit.setting
    found = fit.down(step=1)
    assert found is not None and found != first
    assert (found.master_weights, found.optim_states) == (first.master_weights, first.optim_states)


def test_a_hundred_changes_leave_nothing_behind(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit_module, "_CLIMB_EVERY", 1)
    alive: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    most: list[int] = []
    plain = Optimizer.update

    def counted(optimizer: Optimizer, *arguments: Any) -> None:
        alive.add(optimizer)
        most.append(len(alive))
        plain(optimizer, *arguments)

    monkeypatch.setattr(Optimizer, "update", counted)
    loss_sum, count = Decoder.loss_sum, iter(range(2**62))

    def often(*arguments: Any, **named: Any) -> Any:
        if named.get("scale") is not None and next(count) % 5 == 4:
            raise torch.OutOfMemoryError(FULL)
        return loss_sum(*arguments, **named)

    monkeypatch.setattr(Decoder, "loss_sum", often)
    monkeypatch.setattr("onecard.train.fit._PATIENCE", 2)
    summary = train(config("--max_iters=120", "--batch_size=2", "--gradient_accumulation_steps=2"))
    assert summary.values["refits"] > 60
    assert max(most) == 1, "no stepper outlives its setting"
    assert not [t for t in threading.enumerate() if t.name == "onecard-prefetch"]
