"""Running out of memory at unlucky moments, one after the other: what once ended a run, or misled it."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FULL, config, events, weights

from onecard.arch.layout import RECOMPUTE, Setting
from onecard.config.knobs import load_config
from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import find_card
from onecard.model import compiling
from onecard.model.decoder import Decoder
from onecard.optim.optimizer import Optimizer
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.rates import ANY_CARD, Rates, rates_of
from onecard.plan.search import Choice, Question
from onecard.run.metrics import read_metrics
from onecard.run.pause import PauseRequest
from onecard.run.stored import list_checkpoints
from onecard.train import engine as engine_module
from onecard.train import evaluate as evaluate_module
from onecard.train import host_copy as host_copy_module
from onecard.train import loop as loop_module
from onecard.train import refit as refit_module
from onecard.train import start as start_module
from onecard.train.first_setting import open_fit
from onecard.train.fit import MOST_MICRO_BATCHES, Fit, _of_the_setting
from onecard.train.loop import train
from onecard.train.memory import is_out_of_memory
from onecard.train.step import Stepper

pytestmark = pytest.mark.usefixtures("little_garbage")


def evaluated_steps(out_dir: str = "out") -> list[int]:
    return [x["step"] for x in read_metrics(Path(out_dir) / "metrics.jsonl") if "val_loss" in x]


def question(*words: str, rates: Rates | None = None, cap_gib: float = 10.0) -> Question:
    asked = load_config(RunConfig, ["--max_iters=10", "--block_size=1024", *words])
    known = rates or rates_of(find_card("RTX 4070"), "bfloat16")
    return Question(asked, asked.shape(50304), "bfloat16", known, int(cap_gib * GIB) + CONTEXT, None, (8, 9))


# --- decisions
def to_the_bottom(fit: Fit, step: int) -> Setting:
    """Down until nothing is smaller, and once more."""
    while True:
        before = fit.setting
        found = fit.down(step, allocator=GIB)
        assert found is not None
        if found == before:
            return found


def test_where_the_smallest_has_failed_too_the_way_down_is_still_open() -> None:
    """Memory gone, back, and gone again: what is smaller than the present setting is tried, failed or not."""
    fit = open_fit(question("--batch_size=16", "--gradient_accumulation_steps=4"), on_card=True)
    smallest = to_the_bottom(fit, step=100)
    fit.progressed()
    assert fit.up(step=170, allocator=10 * GIB) is not None, "climbed again"
    fit._failed[smallest].again_at = 10**6  # it has often failed
    for _ in range(30):
        before = _of_the_setting(fit.choice)
        assert fit.down(180, allocator=GIB) is not None, "the smallest one worked a moment ago"
        if fit.setting == smallest:
            break
        assert _of_the_setting(fit.choice) < before
    assert fit.setting == smallest


# --- pausing
def pause_when(monkeypatch: pytest.MonkeyPatch, wanted: Any) -> None:
    """A request to pause that stands as long as `wanted(granted)` says; `granted`: how often it was."""
    granted: list[int] = []
    plain = PauseRequest.granted
    for name in ("__call__", "requested"):
        monkeypatch.setattr(PauseRequest, name, lambda request: wanted(len(granted)))
    monkeypatch.setattr(
        PauseRequest, "granted", lambda request, *left: (granted.append(1), plain(request, *left))[1]
    )


def during_evaluation(monkeypatch: pytest.MonkeyPatch, number: int) -> list[bool]:
    """Becomes true in the evaluation of that number (counted over both sets)."""
    plain, seen, now = evaluate_module.evaluate, iter(range(10**6)), [False]

    def evaluate(*arguments: Any, **named: Any) -> Any:
        if next(seen) == number:
            now[0] = True
        return plain(*arguments, **named)

    monkeypatch.setattr(evaluate_module, "evaluate", evaluate)
    return now


def test_ctrl_c_while_paused_in_the_middle_of_an_evaluation(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluating = during_evaluation(monkeypatch, 2)

    def wanted(granted: int) -> bool:
        if granted and evaluating[0]:
            os.kill(os.getpid(), signal.SIGINT)
            evaluating[0] = False
        return evaluating[0]

    pause_when(monkeypatch, wanted)
    summary = train(config())
    assert summary.interrupted and summary.values["step"] == 5
    assert [event["step"] for event in events("saved")] == [5]


def test_a_pause_in_the_last_evaluation_does_not_cost_it(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluating = during_evaluation(monkeypatch, 8)  # steps 0, 5, 10, 15, 20: two sets each

    def wanted(granted: int) -> bool:
        return evaluating[0] and not granted

    pause_when(monkeypatch, wanted)
    summary = train(config())
    assert [event["step"] for event in events("paused")] == [20]
    assert evaluated_steps() == [0, 5, 10, 15, 20]
    assert summary.values["step"] == 20 and not summary.interrupted


def test_a_pause_that_is_no_longer_requested_does_not_cost_an_evaluation(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--resume-now came before the loop had looked again."""
    evaluating = during_evaluation(monkeypatch, 4)

    def wanted(granted: int) -> bool:
        asked, evaluating[0] = evaluating[0], False
        return asked

    pause_when(monkeypatch, wanted)
    train(config())
    assert not events("paused") and evaluated_steps() == [0, 5, 10, 15, 20]


# --- what counts as a shortage
def test_errors_that_were_answered_do_not_count_as_thrashing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator starts over before each of them; four must not cost a fifth setting."""
    retries = [7]  # an earlier run of this process had some
    monkeypatch.setattr(refit_module, "allocator_retries", lambda device: retries[0])
    plain, calls = Decoder.loss_sum, iter(range(10**6))

    def full(*arguments: Any, **named: Any) -> Any:
        if named.get("scale") is not None and next(calls) in range(20, 24):
            retries[0] += 2
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    monkeypatch.setattr(Decoder, "loss_sum", full)
    train(config("--max_iters=26"))
    assert [event["error"] for event in events("refitted")] == [FULL] * 4


@pytest.mark.parametrize(
    "text",
    [
        "Triton Error [CUDA]: out of memory",
        "CUDA driver error: out of memory",
        "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to "
        "allocate 4294967296 bytes.",
    ],
)
def test_other_words_for_the_same(text: str) -> None:
    """A compiled kernel that is loaded when the card is full, the driver, and the host on Windows."""
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))


# --- evaluations
def test_evaluation_takes_larger_bites_again_when_memory_is_back(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onecard.train.fit._PATIENCE", 10)
    sizes: list[int] = []
    plain = evaluate_module.evaluate

    def limited(*arguments: Any, **named: Any) -> Any:
        sizes.append(named["micro_batch"])
        if len(sizes) < 3:
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    monkeypatch.setattr(evaluate_module, "evaluate", limited)
    summary = train(config("--max_iters=30"))
    # Steps 0 and 5 in small ones; from step 10 on as before.
    assert sizes == [4, 2, 1, 1, 1, 1, *[4] * 10]
    assert summary.values["refits"] == 0
    assert evaluated_steps() == [0, 5, 10, 15, 20, 25, 30]


def test_larger_bites_that_fail_again_are_tried_less_and_less(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onecard.train.fit._PATIENCE", 2)
    failed: list[int] = []
    plain = evaluate_module.evaluate

    def limited(*arguments: Any, **named: Any) -> Any:
        if named["micro_batch"] > 1:
            failed.append(named["micro_batch"])
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    monkeypatch.setattr(evaluate_module, "evaluate", limited)
    train(config("--max_iters=100", "--eval_interval=1"))
    assert evaluated_steps() == list(range(101))
    assert 4 < len(failed) <= 12


# --- climbing
@pytest.mark.parametrize("card", ["the CPU", "a card that is not known"])
def test_where_speeds_are_not_known_nothing_larger_than_asked_for_is_climbed_to(card: str) -> None:
    asked = question("--batch_size=1", "--gradient_accumulation_steps=64", rates=ANY_CARD)
    fit = open_fit(asked, on_card=card != "the CPU")
    assert fit.as_given
    assert fit.up(step=32, allocator=60 * GIB) is None
    given = fit.choice
    to_the_bottom(fit, step=40)
    found = fit.up(step=1000, allocator=60 * GIB)
    assert found is not None and fit.choice.bill.need <= given.bill.need
    assert fit.choice.tokens_per_s >= 0.97 * given.tokens_per_s, "and all of that"


def full_while_building(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    plain = host_copy_module.move_to_card

    def move_to_card(run: Any, state: Any, wanted: Setting) -> None:
        if wanted == setting:
            raise torch.OutOfMemoryError(FULL)
        plain(run, state, wanted)

    monkeypatch.setattr(host_copy_module, "move_to_card", move_to_card)


def test_a_climb_that_cannot_be_built_is_not_reported_as_one(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refit_module, "_CLIMB_EVERY", 4)
    first = setting_of(config(), config().shape(61))
    lower = replace(first, offload="optimizer", micro_batch=2)
    downs: list[int] = []

    def down(fit: Fit, step: int, allocator: float | None = None) -> Setting:
        downs.append(step)
        fit.setting = lower
        return lower

    def up(fit: Fit, step: int, *arguments: Any) -> Setting | None:
        if fit.setting != lower or step > 8:
            return None
        fit.setting = first
        return first

    monkeypatch.setattr(Fit, "down", down)
    monkeypatch.setattr(Fit, "up", up)
    full_while_building(monkeypatch, first)
    plain, calls = Stepper.run, iter(range(10**6))

    def run(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 2:
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    monkeypatch.setattr(Stepper, "run", run)
    summary = train(config())
    assert downs == [2, 4, 8]
    assert summary.values["step"] == 20
    assert not events("gained"), "there is nothing to judge"
    reported = [event for event in events("refitted") if event["where"] == "climb"]
    assert len(reported) == 2 and all(event["after"] == lower.to_json() for event in reported)
    assert all("not enough" in event["text"] and "predicted_gain" not in event for event in reported)


@pytest.mark.parametrize("log_interval", [1, 1000])
def test_a_stage_is_judged_however_rare_log_lines_are(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, log_interval: int
) -> None:
    monkeypatch.setattr(refit_module, "_CLIMB_EVERY", 8)
    monkeypatch.setattr("onecard.train.loop.GLANCE_SECONDS", 0.0)
    monkeypatch.setattr(refit_module, "_STEADY", 2)
    monkeypatch.setattr(refit_module, "_MEASURED", 4)
    first = setting_of(config(), config().shape(61))
    monkeypatch.setattr(Fit, "as_given", False)
    ups = iter([replace(first, micro_batch=8), replace(first, recompute="mlp")])

    def up(fit: Fit, *arguments: Any) -> Setting | None:
        found = next(ups, None)
        fit.setting = found or fit.setting
        return found

    monkeypatch.setattr(Fit, "up", up)
    monkeypatch.setattr(refit_module, "_SLOWER", 0.0)
    train(config("--max_iters=40", f"--log_interval={log_interval}"))
    assert [event["step"] for event in events("refitted")] == [8, 24]
    judged = events("gained")
    assert [event["step"] for event in judged] == [16, 32]
    assert all(event["measured_gain"] is not None for event in judged)


# --- what is recorded
def test_a_changed_setting_is_captured_anew(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shapes computed in another way are compiled and tuned first: that cannot be recorded. And one
    way may leave room for it where another does not (here that with block)."""
    asked: list[tuple[str, Any]] = []
    plain = Stepper.use_graphs

    def noted(stepper: Stepper, graphs: bool | None) -> None:
        asked.append((stepper.model.recompute, graphs))
        plain(stepper, graphs)

    monkeypatch.setattr(Stepper, "use_graphs", noted)
    monkeypatch.setattr("onecard.train.engine._can_capture", lambda device, storage: True)
    plain_build = start_module.build_stepper

    def as_if_compiled(model: Decoder, *arguments: Any) -> Any:
        stepper = plain_build(model, *arguments)
        model.compiled = True
        return stepper

    monkeypatch.setattr(start_module, "build_stepper", as_if_compiled)
    ways = iter(["mlp", "block", "none"])

    def down(fit: Fit, step: int, allocator: float | None = None) -> Setting:
        fit.setting = replace(fit.setting, recompute=next(ways))
        return fit.setting

    monkeypatch.setattr(Fit, "down", down)
    monkeypatch.setattr(Choice, "has_room_to_capture", property(lambda c: c.setting.recompute != "block"))
    monkeypatch.setattr(Stepper, "run", _full_at(Stepper.run, 2, 4, 6))
    monkeypatch.setattr("onecard.train.step.launch_share", lambda compute, inputs: (compute(*inputs), 0.0))
    train(config())
    assert asked[1:] == [("mlp", None), ("block", False), ("none", None)]


def _full_at(plain: Any, *numbers: int) -> Any:
    calls = iter(range(10**6))

    def run(*arguments: Any, **named: Any) -> Any:
        if next(calls) in numbers:
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    return run


def test_every_setting_that_a_run_may_go_through_can_be_compiled() -> None:
    """A layer's backward pass is compiled for every size of micro-batch and for every way of recomputing; one
    that came too many ended the run. (Counted and not compiled: that takes a minute.)"""
    assert 2 * MOST_MICRO_BATCHES * len(RECOMPUTE) <= compiling._MOST_SHAPES


# --- the start
def test_a_start_that_runs_out_is_carried_out_in_another_way(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody took memory after the setting had been chosen."""
    plain, settings_tried = engine_module.new_stepper, []

    def built(model: Any, config: Any, setting: Setting, *arguments: Any, **named: Any) -> Any:
        settings_tried.append(setting)
        if len(settings_tried) < 3:
            raise torch.OutOfMemoryError(FULL)
        return plain(model, config, setting, *arguments, **named)

    monkeypatch.setattr(engine_module, "new_stepper", built)
    summary = train(config())
    assert summary.values["step"] == 20 and len(set(settings_tried)) == 3
    assert "not enough memory at the start: running with" in "".join(capsys.readouterr())
    assert json.loads((Path("out") / "plan.json").read_text())["settings"] == settings_tried[-1].to_json()


# --- a request that comes and goes
@pytest.mark.parametrize(("accumulation", "look"), [(1, 1), (2, 1), (2, 2)])
def test_a_step_called_off_by_a_request_that_has_gone_is_done_again_from_its_beginning(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, look: int
) -> None:
    """The sequences it had taken are trained on, once, and in their order."""
    looks = iter(range(10**6))
    asked = config(f"--gradient_accumulation_steps={accumulation}", "--eval_interval=20")
    train(replace(asked, out_dir="quiet"))
    inside, plain = [False], Stepper.run

    def run(*arguments: Any, **named: Any) -> Any:
        inside[0] = runs[0].position.step == 7
        try:
            return plain(*arguments, **named)
        finally:
            inside[0] = False

    runs: list[Any] = []
    opened = loop_module.open_run

    def noted(asked: RunConfig) -> Any:
        runs.append(opened(asked))
        return runs[0]

    monkeypatch.setattr(loop_module, "open_run", noted)
    monkeypatch.setattr(Stepper, "run", run)
    monkeypatch.setattr(PauseRequest, "__call__", lambda request: inside[0] and next(looks) == look - 1)
    summary = train(asked)
    assert summary.values["step"] == 20 and next(looks) > look
    for name, expected in weights("quiet").items():
        assert torch.equal(weights()[name], expected), name


# --- twice nothing
def test_running_out_after_an_update_does_not_do_it_again(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better an end that names the checkpoint than a step that counts twice."""
    plain, updates = Optimizer.clear, [0]
    plain_update = Optimizer.update

    def update(*arguments: Any) -> None:
        updates[0] += 1
        plain_update(*arguments)

    def clear(optimizer: Optimizer) -> None:
        if updates[0] == 8:
            raise torch.OutOfMemoryError(FULL)
        plain(optimizer)

    monkeypatch.setattr(Optimizer, "update", update)
    monkeypatch.setattr(Optimizer, "clear", clear)
    with pytest.raises(UserError, match="was broken off"):
        train(config())
    assert updates[0] == 8


def test_a_job_that_saves_while_another_one_starts_is_not_overlooked(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened while the first is still at work, and in its place when that has ended."""
    late: list[Any] = []
    plain = loop_module.open_run

    def opened(asked: RunConfig) -> Any:
        if late:
            return plain(asked)
        late.append(plain(asked))  # has looked at the folder; nothing is there yet
        train(asked)
        return late[0]

    monkeypatch.setattr(loop_module, "open_run", opened)
    with pytest.raises(UserError, match="another job has saved step 20"):
        train(config())
    assert list_checkpoints(Path("out") / "checkpoints")[-1].step == 20


def test_values_the_user_set_are_named_when_nothing_smaller_is_left(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stepper, "run", _full_at(Stepper.run, *range(3, 10**5)))
    with pytest.raises(UserError, match="out of memory") as stopped:
        train(config("--recompute=none", "--offload=none"))
    assert "without your --recompute=none --offload=none" in stopped.value.hint
