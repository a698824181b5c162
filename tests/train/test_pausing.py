"""A pause from both sides: the job in this thread, whoever asks in another one. Only the memory that is
missing is a stand-in."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FULL, config, events, weights

from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.plan.lines import GIB
from onecard.run.directory import RunDirectory
from onecard.run.pause import PauseRequest, ask_to_go_on, ask_to_pause, left_in_words
from onecard.run.stored import list_checkpoints
from onecard.train import host_copy as host_copy_module
from onecard.train import loop as loop_module
from onecard.train import pausing as pausing_module
from onecard.train import refit as refit_module
from onecard.train import saving
from onecard.train.loop import Training, train
from onecard.train.start import open_run

pytestmark = pytest.mark.usefixtures("little_garbage")

OUT = RunDirectory("out")
LONG = 60.0  # seconds, for a machine with much else to do


@pytest.fixture(autouse=True)
def without_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausing_module, "_TRY_EVERY", 0.05)


def asked_at(monkeypatch: pytest.MonkeyPatch, step: int, asking: Callable[[], None]) -> list[Any]:
    """`asking` runs in a thread once that step is done; the job waits for its first request. What went wrong
    in it is in the list."""
    plain, problems, begun = Training._step, [], [False]

    def careful() -> None:
        try:
            asking()
        except BaseException as error:
            problems.append(error)
            if (Path("out") / "job.json").exists():  # or the job would wait for what does not come
                os.kill(os.getpid(), signal.SIGINT)

    def stepped(training: Training, *arguments: Any) -> Any:
        result = plain(training, *arguments)
        if training.position.step >= step and not begun[0]:
            begun[0] = True
            threading.Thread(target=careful, daemon=True).start()
            wait_for(lambda: (Path("out") / "pause").exists() or problems)
            training.pause._looked = -1.0  # seen before the next step
        return result

    monkeypatch.setattr(Training, "_step", stepped)
    return problems


def wait_for(true: Callable[[], Any]) -> None:
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def go_on_and_wait_for(true: Callable[[], Any]) -> None:
    """Takes the request back and waits for what the job does then, however long its checkpoint takes."""
    (Path("out") / "pause").unlink()
    wait_for(true)


def names() -> set[str]:
    return {path.name for path in Path("out").iterdir()} & {"pause", "paused", "job.json"}


def full_while(monkeypatch: pytest.MonkeyPatch, full: Callable[[], bool]) -> list[Any]:
    """Building a setting runs out as long as `full` says; the settings tried."""
    plain, tried = host_copy_module.new_stepper, []

    def built(model: Any, asked: Any, setting: Any, *arguments: Any, **named: Any) -> Any:
        tried.append(setting)
        if full():
            raise torch.OutOfMemoryError(FULL)
        return plain(model, asked, setting, *arguments, **named)

    monkeypatch.setattr(host_copy_module, "new_stepper", built)
    return tried


# --- requests are not lost
def test_a_second_request_while_the_card_is_taken_back_is_another_pause(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reported at once that the card is free, and then forgotten."""
    taking, gate, plain = threading.Event(), threading.Event(), host_copy_module.move_to_card
    answers: list[str] = []

    def slow(*arguments: Any) -> None:
        taking.set()
        gate.wait(LONG)
        plain(*arguments)

    monkeypatch.setattr(host_copy_module, "move_to_card", slow)

    def asking() -> None:
        answers.append(ask_to_pause(OUT))
        (Path("out") / "pause").unlink()
        assert taking.wait(LONG)
        assert names() == {"job.json"}, "the card is not free while it is being taken"
        again = threading.Thread(target=lambda: answers.append(ask_to_pause(OUT)))
        again.start()
        wait_for(lambda: (Path("out") / "pause").exists())
        assert len(answers) == 1
        gate.set()
        again.join(LONG)
        assert names() == {"pause", "paused", "job.json"}
        answers.append(ask_to_go_on(OUT))

    problems = asked_at(monkeypatch, 7, asking)
    summary = train(config("--max_iters=40", "--lr_decay_iters=40"))
    assert problems == [] and len(answers) == 3 and answers[2] == "going on"
    assert len(events("paused")) == len(events("went on")) == 2
    assert summary.values["step"] == 40 and not names()


def test_a_request_in_the_moment_in_which_the_last_one_ends_keeps_the_card_free(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sees `paused` after leaving a request has been reported that the card is free."""
    plain, taken, requested = loop_module.PauseRequest.going_on, [], [False]

    def going_on(request: Any) -> None:
        if not requested[0]:
            requested[0] = True
            (Path("out") / "pause").touch()
        plain(request)

    monkeypatch.setattr(loop_module.PauseRequest, "going_on", going_on)
    plain_move = host_copy_module.move_to_card
    monkeypatch.setattr(
        host_copy_module,
        "move_to_card",
        lambda *a: (taken.append((Path("out") / "pause").exists()), plain_move(*a)),
    )

    def asking() -> None:
        ask_to_pause(OUT)
        (Path("out") / "pause").unlink()
        wait_for(lambda: requested[0] and (Path("out") / "paused").exists())
        ask_to_go_on(OUT)

    problems = asked_at(monkeypatch, 7, asking)
    train(config())
    assert problems == [] and taken == [False]


# --- no room on the card afterwards
def test_a_run_waits_for_whoever_has_the_memory_and_goes_on_as_before(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config("--out_dir=quiet"))
    full = [True]
    tried = full_while(monkeypatch, lambda: full[0] or tried[-1] != tried[0])

    def asking() -> None:
        ask_to_pause(OUT)
        go_on_and_wait_for(lambda: len(set(tried)) > 3)
        with pytest.raises(UserError, match="waits for memory") as reported:
            ask_to_go_on(OUT, patience=0.2)
        assert (
            FULL in reported.value.why
            and "by itself" in reported.value.hint
            and reported.value.exit_code == 1
        )
        assert "paused" not in names()
        full[0] = False

    problems = asked_at(monkeypatch, 7, asking)
    summary = train(config())
    assert problems == [] and summary.values["step"] == 20 and summary.values["refits"] == 0
    assert len(set(tried)) > 3, "smaller ones too"
    assert len(events("waits for memory")) == 1, "not at every try"
    assert "waiting for memory" in "".join(capsys.readouterr())
    for name, expected in weights("quiet").items():
        assert torch.equal(weights()[name], expected), name


def test_something_smaller_is_taken_after_a_few_tries_and_reported(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[int] = []
    plain = refit_module.SpeedWatch.reset
    monkeypatch.setattr(
        refit_module.SpeedWatch, "reset", lambda watch, *a: (resets.append(1), plain(watch, *a))[1]
    )
    tried = full_while(monkeypatch, lambda: tried[-1] == tried[0])

    def asking() -> None:
        ask_to_pause(OUT)
        ask_to_go_on(OUT)

    problems = asked_at(monkeypatch, 7, asking)
    summary = train(config())
    assert problems == [] and summary.values["step"] == 20
    (reported,) = events("refitted")
    assert reported["after"] != reported["before"] and reported["where"] == "pause"
    assert tried[:4] == [tried[0]] * 4 and len(tried) == 5
    assert len(resets) == 2, "the pace of the other setting is not this one's"


@pytest.mark.parametrize("auto_fit", [True, False])
def test_ctrl_c_while_waiting_for_memory_keeps_the_steps(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, auto_fit: bool
) -> None:
    full_while(monkeypatch, lambda: True)

    def asking() -> None:
        ask_to_pause(OUT)
        go_on_and_wait_for(lambda: FULL in (Path("out") / "job.json").read_text())
        with pytest.raises(UserError, match="waits for memory"):
            ask_to_go_on(OUT, patience=0.2)
        os.kill(os.getpid(), signal.SIGINT)

    problems = asked_at(monkeypatch, 7, asking)
    summary = train(config(f"--auto_fit={auto_fit}", "--eval_interval=100"))
    assert problems == [] and summary.interrupted
    assert list_checkpoints(Path("out") / "checkpoints")[-1].step == summary.values["step"] >= 7
    assert not names()


def test_a_request_while_waiting_for_memory_is_granted_at_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]
    full_while(monkeypatch, lambda: full[0])
    monkeypatch.setattr(pausing_module, "_TRY_EVERY", 1000.0)

    def asking() -> None:
        ask_to_pause(OUT)
        go_on_and_wait_for(lambda: FULL in (Path("out") / "job.json").read_text())
        with pytest.raises(UserError, match="waits for memory"):
            ask_to_go_on(OUT, patience=0.2)
        assert "paused after" in ask_to_pause(OUT)
        full[0] = False
        assert ask_to_go_on(OUT) == "going on"

    problems = asked_at(monkeypatch, 7, asking)
    assert train(config()).values["step"] == 20 and problems == []


def test_what_was_tried_is_no_failure_of_the_settings(workplace: Path) -> None:
    fit = open_run(config()).fit
    fit.down(3)
    before = fit.setting, fit.evaluation_batch, dict(fit._failed), set(fit._sizes), fit.retries
    bring_back = fit.remembered()
    for _ in range(12):
        fit.down(3)
    assert fit.retries and fit.evaluation_batch < before[1]
    bring_back()
    assert (fit.setting, fit.evaluation_batch, fit._failed, fit._sizes, fit.retries) == before


def test_memory_that_is_not_there_is_not_taken_bit_by_bit(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters alone may fit where no step does: the run would end at its first one."""
    run = open_run(config())
    host_copy_module.move_to_host(run)
    need, there = run.fit.choice.bill.need, [0.0]
    monkeypatch.setattr(host_copy_module, "free_for_tensors", lambda run: there[0])
    setting, built = run.fit.setting, full_while(monkeypatch, lambda: False)
    short = pausing_module.take_card(run, need, smaller_too=True)
    assert short == f"{need / GIB:.2f} GiB are needed, 0.00 GiB are free"
    assert not built and run.host_copy is not None and run.fit.setting == setting
    there[0] = need
    assert pausing_module.take_card(run, need, smaller_too=False) is None
    assert built == [setting] and run.stepper is not None


# --- no room on the host
@pytest.mark.parametrize("how", ["before", "half-way", "torch's own"])
@pytest.mark.parametrize("auto_fit", [True, False])
def test_a_pause_for_which_the_host_has_no_room_is_refused(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, how: str, auto_fit: bool
) -> None:
    train(config("--out_dir=quiet"))
    if how == "before":
        monkeypatch.setattr(host_copy_module, "available_memory", lambda: 2**28)
    else:
        error = MemoryError() if how == "half-way" else RuntimeError("DefaultCPUAllocator: not enough memory")
        plain, copies = torch.Tensor.to, iter(range(10**6))

        def to(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            if named.get("copy") and (Path("out") / "pause").exists() and next(copies) == 9:
                raise error
            return plain(tensor, *arguments, **named)

        monkeypatch.setattr(torch.Tensor, "to", to)

    def asking() -> None:
        began = time.monotonic()
        with pytest.raises(UserError, match="cannot pause") as refused:
            ask_to_pause(OUT)
        assert "RAM has no room" in refused.value.why and refused.value.exit_code == 1
        assert ("GiB are available" in refused.value.why) == (how == "before")
        assert time.monotonic() - began < 30

    problems = asked_at(monkeypatch, 7, asking)
    summary = train(config(f"--auto_fit={auto_fit}"))
    assert problems == [] and summary.values["step"] == 20 and not events("refitted") and not events("paused")
    assert [event["step"] for event in events("note")] == [7]
    for name, expected in weights("quiet").items():
        assert torch.equal(weights()[name], expected), name


def test_a_change_of_places_asks_for_the_hosts_memory_too(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(config())
    stepper = run.stepper
    monkeypatch.setattr(host_copy_module, "available_memory", lambda: 2**28)
    with pytest.raises(UserError, match="no room"):
        host_copy_module.move_to_host(run)
    assert run.stepper is stepper and run.host_copy is None


# --- a checkpoint of the paused step
def test_a_kill_while_paused_loses_nothing(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def asking() -> None:
        ask_to_pause(OUT)
        wait_for(lambda: events("saved"))
        kept.extend(c.step for c in list_checkpoints(Path("out") / "checkpoints"))
        ask_to_go_on(OUT)

    problems = asked_at(monkeypatch, 7, asking)
    train(config("--eval_interval=100"))
    assert problems == [] and kept == [7] and events("paused")[0]["step"] == 7
    assert [event["step"] for event in events("saved")] == [7, 20]


@pytest.mark.parametrize("error", [UserError("the disk is full"), MemoryError()])
def test_a_checkpoint_that_fails_does_not_end_the_pause(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plain, calls = saving.save_checkpoint, iter(range(100))

    def save(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise error
        return plain(*arguments)

    monkeypatch.setattr(saving, "save_checkpoint", save)

    def asking() -> None:
        ask_to_pause(OUT)
        wait_for(lambda: events("save failed"))
        assert "paused" in names()
        ask_to_go_on(OUT)

    problems = asked_at(monkeypatch, 7, asking)
    summary = train(config("--eval_interval=100"))
    assert problems == [] and summary.values["step"] == 20 and not events("refitted")
    assert [event["step"] for event in events("saved")] == [20]


# --- what is said, and how fast
def test_what_is_left_on_the_card_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausing_module, "process_bytes_on", lambda device: int(0.53 * GIB))
    assert "0.53 GiB that CUDA itself keeps" in left_in_words(pausing_module.left_on_card("cuda"))
    monkeypatch.setattr(pausing_module, "process_bytes_on", lambda device: None)
    assert "0.5 to 1 GiB" in left_in_words(pausing_module.left_on_card("cuda"))
    assert "card" not in left_in_words(pausing_module.left_on_card("cpu"))


def test_a_host_copy_needs_no_search_for_garbage(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch loaded that takes as long as copying some hundred MB; captures refer to the stepper, which
    refers to them."""
    run = open_run(config())
    assert run.stepper is not None
    run.stepper.use_graphs(True)
    gone, searched, given_back = weakref.ref(run.stepper), [], []
    monkeypatch.setattr(host_copy_module.gc, "collect", lambda: searched.append(1))
    monkeypatch.setattr(host_copy_module, "give_back", lambda: given_back.append(gone() is None))
    gc.disable()
    try:
        host_copy_module.move_to_host(run)
    finally:
        gc.enable()
    assert gone() is None and not searched
    assert given_back == [True], "after all has been let go"


def test_somebody_who_still_holds_the_old_state_is_looked_for(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(config())
    assert run.stepper is not None
    around: list[Any] = [run.stepper.optimizer]
    around.append(around)  # a circle
    gone = weakref.ref(run.stepper.optimizer)
    del around
    gc.disable()
    try:
        host_copy_module.move_to_host(run)
    finally:
        gc.enable()
    assert gone() is None


def test_a_run_that_is_ending_says_so(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be writing its last checkpoint for minutes."""
    plain, said = Training._finish, []
    plain_save = saving.save_checkpoint

    def save(*arguments: Any) -> Any:
        began = time.monotonic()
        with pytest.raises(UserError, match="is ending") as reported:
            ask_to_pause(OUT)
        said.append((reported.value.exit_code, time.monotonic() - began, names()))
        return plain_save(*arguments)

    def finish(training: Training) -> Any:
        monkeypatch.setattr(saving, "save_checkpoint", save)
        return plain(training)

    monkeypatch.setattr(Training, "_finish", finish)
    signalled = Training._step

    def stepped(training: Training, *arguments: Any) -> Any:
        result = signalled(training, *arguments)
        if training.position.step == 7:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Training, "_step", stepped)
    train(config("--eval_interval=100"))
    ((code, seconds, left),) = said
    assert code == 1 and seconds < 5 and left == {"job.json"} and not names()


def test_the_files_go_when_the_run_fails(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(host_copy_module, "move_to_card", broken)

    def asking() -> None:
        ask_to_pause(OUT)
        (Path("out") / "pause").unlink()

    problems = asked_at(monkeypatch, 7, asking)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        train(config("--eval_interval=100"))
    assert problems == [] and not names()
    assert list_checkpoints(Path("out") / "checkpoints")[-1].step == 7


def test_a_peak_counts_from_the_first_step_on(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a pause it is that of the weights alone: no reason to go on where no step fits."""
    run = open_run(config())
    monkeypatch.setattr(pausing_module, "peak_memory_gib", lambda device: 1e-6)
    predicted = run.fit.choice.bill.need
    assert pausing_module.needed_by(run, measured=False) == predicted
    assert pausing_module.needed_by(run, measured=True) == 1e-6 * 2**30 < predicted
    asked: list[bool] = []
    monkeypatch.setattr(
        refit_module, "needed_by", lambda run, *, measured: (asked.append(measured), float(predicted))[1]
    )
    due, runs, opened = [0, 0, 5], [], loop_module.open_run

    def noted(asked_for: RunConfig) -> Any:
        runs.append(opened(asked_for))
        return runs[0]

    class Requests(PauseRequest):
        def __call__(self) -> bool:
            return bool(due) and runs[0].position.step >= due[0]

        def requested(self) -> bool:
            return False  # taken back as soon as it is granted

        def granted(self, left: str = "") -> None:
            due.pop(0)
            super().granted(left)

    monkeypatch.setattr(loop_module, "open_run", noted)
    monkeypatch.setattr(loop_module, "PauseRequest", Requests)
    train(config())
    assert asked == [False, False, True], "before the first step, at once once more, and later"
