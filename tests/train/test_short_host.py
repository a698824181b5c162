"""The host has no memory left: no other setting gives that back, and none is chosen that needs more of it."""

from __future__ import annotations

import _thread
import errno
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FULL, config, events, weights

from onecard.arch.layout import Setting
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import find_card
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.rates import rates_of
from onecard.plan.search import Question
from onecard.run.metrics import read_metrics
from onecard.train import engine as engine_module
from onecard.train import host_copy as host_copy_module
from onecard.train import pausing as pausing_module
from onecard.train import refit as refit_module
from onecard.train.first_setting import open_fit
from onecard.train.fit import Fit
from onecard.train.loop import Training, train
from onecard.train.memory import is_of_host_memory, is_out_of_memory
from onecard.train.refit import Refit
from onecard.train.saving import Saver
from onecard.train.step import Stepper, StepResult, read

pytestmark = pytest.mark.usefixtures("little_garbage")
REFUSED = "masters do not fit into this machine's memory"
AT_REST = ["--learning_rate=0", "--min_lr=0", "--decay_lr=False", "--max_iters=8", "--eval_interval=8"]


def fit_of(gib: float, *words: str) -> Fit:
    """On an RTX 4070 with so much for tensors."""
    given = load_config(RunConfig, ["--max_iters=10", "--block_size=1024", *words])
    rates = rates_of(find_card("RTX 4070"), "bfloat16")
    question = Question(given, given.shape(50304), "bfloat16", rates, int(gib * GIB) + CONTEXT, None, (8, 9))
    return open_fit(question, on_card=True)


# --- which setting
@pytest.mark.parametrize("gib", [2.38, 2.6])
def test_what_the_host_refuses_is_not_answered_with_more_of_it(gib: float) -> None:
    """124M: offloading is the fastest that fits, and there is something that fits without."""
    fit = fit_of(11, "--batch_size=16", "--gradient_accumulation_steps=4")
    first = fit.down(100, gib * GIB)
    assert first is not None and first.offload == "optimizer"
    found = fit.refused(100, gib * GIB)
    assert found is not None and found.offload == "none"
    assert fit.choice.bill.need <= gib * GIB
    # Nor is it asked again a moment later, when even that runs out; but when some time has passed.
    assert (then := fit.down(110, gib * GIB)) is not None and then.offload == "none"
    later = {setting.offload for step in range(400, 500, 10) if (setting := fit.down(step, 1.7 * GIB))}
    assert later - {"none"}


def test_what_cannot_be_moved_stays_where_it_is() -> None:
    fit = fit_of(11, "--batch_size=16", "--gradient_accumulation_steps=4")
    fit.down(100, 2.38 * GIB)
    assert fit.choice.bill.host
    found = fit.refused(100, 2.38 * GIB, "none")
    assert found is not None and found.offload == "none"


def test_a_refusal_of_what_the_host_was_not_asked_for_is_somebody_elses_error() -> None:
    fit = fit_of(11, "--batch_size=16", "--gradient_accumulation_steps=4")
    assert fit.setting.offload == "none" and fit.refused(1) is None


def test_what_the_host_has_refused_is_not_what_there_is_least_of() -> None:
    """Between what can be had with offloading and what without, others are who have the memory."""
    fit = fit_of(11, "--batch_size=16", "--gradient_accumulation_steps=4")
    with_it = fit.least_need
    fit.down(100, 2.38 * GIB)
    fit.refused(100, 2.38 * GIB)
    assert with_it < GIB and fit.least_need > 2.3 * GIB
    fit.up(1000, 3 * GIB)
    assert fit.least_need == with_it, "for a while"


def test_a_host_that_ran_out_is_asked_for_no_more() -> None:
    fit = fit_of(11, "--batch_size=16", "--gradient_accumulation_steps=4")
    fit.spare_the_host(100)
    seen = {found.offload for _ in range(20) if (found := fit.down(100, 11 * GIB))}
    assert seen == {"none"}


def test_where_everything_asks_the_host_there_is_nothing_left() -> None:
    fit = fit_of(3, "--batch_size=16", "--gradient_accumulation_steps=4", "--offload=optimizer")
    assert fit.refused(1, 3 * GIB) is None


def test_a_cpu_is_not_reported_to_offload() -> None:
    """There it takes more of the very memory that ran out."""
    given = load_config(
        RunConfig, ["--max_iters=10", "--block_size=256", "--batch_size=8", "--gradient_accumulation_steps=1"]
    )
    question = Question(given, given.shape(50304), "float32", None, 2**62, None, None)
    fit, seen = open_fit(question, on_card=False), set()
    while (found := fit.down(5)) is not None and found not in seen:
        seen.add(found)
    assert {setting.offload for setting in seen} == {"none"} and len(seen) > 2


def test_a_capture_is_tried_by_the_memory_of_now() -> None:
    """What was short at the start is not when others have left, and the reverse."""
    words = [
        "--n_layer=12",
        "--n_head=6",
        "--n_embd=384",
        "--batch_size=16",
        "--gradient_accumulation_steps=4",
    ]
    fit = fit_of(1.2, *words)
    assert fit.up(1000, 10 * GIB) is not None
    assert not fit.choice.has_room_to_capture and fit.room_to_capture(10 * GIB)
    assert not fit.room_to_capture(fit.choice.bill.need + fit.choice.capture_bytes - 1)
    assert fit.room_to_capture(None) is fit.choice.has_room_to_capture


# --- in a run
def always_down(monkeypatch: pytest.MonkeyPatch, *ways: str, then_none: int = 8) -> None:
    """Masters are to change place at every failure; after so many there is nothing left."""
    following = iter(range(10**6))

    def down(fit: Fit, step: int, allocator: float | None = None) -> Setting | None:
        fit.retries += 1
        if fit.retries > then_none:
            return None
        fit.setting = replace(fit.setting, offload=ways[next(following) % len(ways)])
        return fit.setting

    monkeypatch.setattr(Fit, "down", down)
    monkeypatch.setattr(Fit, "may_offload", True)  # as on a card


class Card:
    """What tensors may take of it; `full` from some step on, for so many looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int, looks: int) -> None:
        self.at, self.left, self.full, self.looked = at, looks, False, 0
        plain = Stepper.run

        def run(stepper: Stepper, *arguments: Any, **named: Any) -> StepResult | None:
            self.full = self.full or (stepper.optimizer.steps == self.at and self.left > 0)
            if self.full:
                raise torch.OutOfMemoryError(FULL)
            return plain(stepper, *arguments, **named)

        def free(run: Any) -> float:
            self.looked += 1
            if self.full:
                self.left -= 1
                self.full = self.left > 0
            return 0.0 if self.full else 60 * GIB

        monkeypatch.setattr(Stepper, "run", run)
        for module in (refit_module, host_copy_module):
            monkeypatch.setattr(module, "free_for_tensors", free)
        monkeypatch.setattr(pausing_module, "_TRY_EVERY", 0.0)


def test_masters_are_not_made_of_what_was_rounded_for_a_setting_that_failed(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments cannot be put back, in any setting; the run waits, and what goes on are its own masters."""
    card = Card(monkeypatch, at=5, looks=30)
    kept: dict[str, dict[str, torch.Tensor]] = {}
    plain_restore, plain_run = Stepper.restore, Stepper.run

    def restore(stepper: Stepper, *arguments: Any) -> None:
        if card.full:
            raise torch.OutOfMemoryError(FULL)
        plain_restore(stepper, *arguments)

    def run(stepper: Stepper, *arguments: Any, **named: Any) -> Any:
        now = {name: tensor.clone() for name, tensor in stepper.export().weights.items()}
        kept.setdefault("after" if card.looked else "before", now)
        return plain_run(stepper, *arguments, **named)

    monkeypatch.setattr(Stepper, "restore", restore)
    monkeypatch.setattr(Stepper, "run", run)
    always_down(monkeypatch, "optimizer")
    assert train(config("--dtype=bfloat16", *AT_REST)).values["step"] == 8
    assert events("waits for memory")
    for name, tensor in kept["before"].items():
        assert torch.equal(tensor, kept["after"][name]), name


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "no"),
        RuntimeError("DefaultCPUAllocator: not enough memory"),
    ],
)
@pytest.mark.parametrize("times", [2, 8])
def test_the_hosts_own_shortage_amid_a_step_is_tried_again_first(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int
) -> None:
    """On a card: in the same setting, and only then in one that asks no more of the host."""
    monkeypatch.setattr(Refit, "_on_card", True)
    monkeypatch.setattr(Fit, "may_offload", True)
    plain, failed = Stepper.run, list[int]()

    def run(stepper: Stepper, *arguments: Any, **named: Any) -> Any:
        if stepper.optimizer.steps == 7 and len(failed) < times:
            failed.append(7)
            raise error
        return plain(stepper, *arguments, **named)

    monkeypatch.setattr(Stepper, "run", run)
    assert train(config()).values["step"] == 20
    changes = events("refitted")
    assert bool(changes) is (times > refit_module._HOST_TRIES) and len(failed) == times
    assert {event["after"]["offload"] for event in changes} <= {"none"}


def test_a_host_without_room_refuses(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever words it has for it: what then is chosen leaves everything in its place."""
    card = Card(monkeypatch, at=7, looks=2)
    always_down(monkeypatch, "optimizer")
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if card.looked and arguments == ("cpu",) and named.get("copy"):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)
    assert train(config()).values["step"] == 20
    assert {event["after"]["offload"] for event in events("refitted")} == {"none"}


def test_memory_that_is_back_when_all_is_in_host_memory_is_taken(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing could be built a moment ago; what there is now is enough."""
    card = Card(monkeypatch, at=7, looks=10**6)
    always_down(monkeypatch, "optimizer", then_none=3)
    plain_wait, plain = Refit.wait, host_copy_module.new_stepper

    def built(*arguments: Any, **named: Any) -> Stepper:
        if card.full:
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    def wait(refit: Refit, *arguments: Any) -> bool:
        assert refit.run.host_copy is not None
        card.full, card.left = False, 0
        return plain_wait(refit, *arguments)

    monkeypatch.setattr(host_copy_module, "new_stepper", built)
    monkeypatch.setattr(Refit, "wait", wait)
    assert train(config()).values["step"] == 20
    assert not events("waits for memory")


def test_it_waits_where_the_host_refuses_last(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have the card, and the host does not let its pages be pinned: all waits in host memory."""
    train(config("--out_dir=quiet"))
    Card(monkeypatch, at=7, looks=40)
    always_down(monkeypatch, "optimizer")
    plain = host_copy_module.new_stepper

    def built(model: Any, config: Any, setting: Setting, *arguments: Any, **named: Any) -> Stepper:
        if setting.offload != "none":
            raise UserError(REFUSED)
        return plain(model, config, setting, *arguments, **named)

    monkeypatch.setattr(host_copy_module, "new_stepper", built)
    assert train(config()).values["step"] == 20
    for name, expected in weights("quiet").items():
        torch.testing.assert_close(weights()[name], expected, atol=1e-5, rtol=1e-4)


def test_memory_that_comes_back_just_before_it_is_looked_at_is_used(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch, at=7, looks=10**6)
    plain = Refit.wait

    def wait(*arguments: Any) -> bool:
        card.full, card.left = False, 0
        return plain(*arguments)

    monkeypatch.setattr(Refit, "wait", wait)
    assert train(config()).values["step"] == 20
    assert not events("waits for memory"), "there was nothing to wait for"


def test_a_tight_setting_that_cannot_be_replaced_waits_too(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be built, neither what it goes to nor what it comes from."""
    counted = iter(range(0, 2**62, 5))
    monkeypatch.setattr(refit_module, "allocator_retries", lambda device: next(counted))
    for name in ("_speed", "_speed_from"):
        monkeypatch.setattr(Refit, name, lambda refit, *_: 100.0)
    always_down(monkeypatch, "optimizer", then_none=3)
    plain, looks = host_copy_module.new_stepper, iter(range(10**6))
    free = {"gib": 0.0}

    def built(*arguments: Any, **named: Any) -> Stepper:
        if not free["gib"]:
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    def there(run: Any) -> float:
        free["gib"] = 60.0 if next(looks) > 20 else 0.0
        return free["gib"] * GIB

    monkeypatch.setattr(host_copy_module, "new_stepper", built)
    for module in (refit_module, host_copy_module):
        monkeypatch.setattr(module, "free_for_tensors", there)
    monkeypatch.setattr(pausing_module, "_TRY_EVERY", 0.0)
    assert train(config("--max_iters=30")).values["step"] == 30
    assert events("waits for memory")


def test_a_start_takes_what_the_host_has_room_for(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, tried = engine_module.new_stepper, list[str]()

    def built(model: Any, config: Any, setting: Setting, *arguments: Any, **named: Any) -> Stepper:
        tried.append(setting.offload)
        if setting.offload != "none":
            raise UserError(REFUSED)
        if len(tried) == 1:
            raise torch.OutOfMemoryError(FULL)
        return plain(model, config, setting, *arguments, **named)

    monkeypatch.setattr(engine_module, "new_stepper", built)
    always_down(monkeypatch, "optimizer")
    assert train(config()).values["step"] == 20
    assert tried == ["none", "optimizer", "none"]
    assert "not enough memory at the start: running with" in "".join(capsys.readouterr())


@pytest.mark.parametrize("failures", [1, 10**6])
def test_moments_that_do_not_fit_on_resume_are_read_again_in_another_setting(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    for out_dir in ("quiet", "out"):
        train(config("--max_iters=6", "--lr_decay_iters=40", f"--out_dir={out_dir}"))
    more = ["--max_iters=12", "--lr_decay_iters=40", "--init_from=resume"]
    train(config(*more, "--out_dir=quiet"))
    plain, calls = Stepper.restore, iter(range(2**62))

    def restore(stepper: Stepper, *arguments: Any) -> None:
        plain(stepper, *arguments)
        if next(calls) < failures:
            raise MemoryError  # half of it is there

    monkeypatch.setattr(Stepper, "restore", restore)
    if failures > 1:
        with pytest.raises(UserError, match="out of memory"):
            train(config(*more))
        return
    assert train(config(*more)).values["step"] == 12
    for name, expected in weights("quiet").items():
        torch.testing.assert_close(weights()[name], expected, atol=1e-6, rtol=1e-5)


def test_a_run_goes_on_when_there_is_room_for_a_thread_again(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = _thread.start_new_thread, iter(range(10**6))

    def sometimes(work: Any, arguments: Any, *more: Any) -> int:
        mine = getattr(work, "__name__", "") == "_live"
        return 0 if mine and next(calls) < 2 else plain(work, arguments, *more)  # nobody hears of it

    monkeypatch.setattr(_thread, "start_new_thread", sometimes)
    assert train(config()).values["step"] == 20
    reported = [x["step"] for x in read_metrics(workplace / "out/metrics.jsonl") if "loss" in x]
    assert reported == [*range(20)] and next(calls) > 2


# --- losses on their way to the log
def test_losses_are_read_one_by_one_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [StepResult(torch.tensor([float(step), 2.0])) for step in range(3)]
    together = read(results)

    def full(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(torch, "stack", full)
    assert read(results) == together == [(0.0, 2.0), (1.0, 2.0), (2.0, 2.0)]


def test_a_shortage_while_losses_are_read_costs_no_line(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = torch.stack, iter(range(10**6))

    def sometimes(tensors: Any, *arguments: Any) -> torch.Tensor:
        if isinstance(tensors, list) and tensors[0].shape == (2,) and next(calls) % 2:
            raise torch.OutOfMemoryError(FULL)
        return plain(tensors, *arguments)

    monkeypatch.setattr(torch, "stack", sometimes)
    summary = train(config())
    assert [x["step"] for x in read_metrics(Path("out/metrics.jsonl")) if "loss" in x] == [*range(20)]
    assert summary.values["refits"] == 0


def test_ctrl_c_then_a_shortage_is_still_a_save(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_save, failed = Training._step, Saver.write, list[int]()

    def stepped(training: Training, *arguments: Any) -> bool:
        done = plain(training, *arguments)
        if training.position.step == 7:
            signal.raise_signal(signal.SIGINT)
        return done

    def save(saver: Saver) -> None:
        if not failed:
            failed.append(saver.run.position.step)
            raise torch.OutOfMemoryError(FULL)
        plain_save(saver)

    monkeypatch.setattr(Training, "_step", stepped)
    monkeypatch.setattr(Saver, "write", save)
    summary = train(config("--eval_interval=100", "--log_interval=100"))
    assert summary.interrupted and failed == [7] and events("saved")[-1]["step"] == 7


def test_a_system_without_memory_for_a_process_is_out_of_memory() -> None:
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    for words in (
        "std::bad_alloc",
        "could not create a primitive",
        "unable to mmap: Cannot allocate memory",
    ):
        assert is_out_of_memory(RuntimeError(words)) and is_of_host_memory(RuntimeError(words))
    assert not is_of_host_memory(torch.OutOfMemoryError(FULL)) and not is_of_host_memory(
        RuntimeError("CUDA error: out of memory")
    )


# --- only evaluated
@pytest.fixture
def trained(workplace: Path) -> Iterator[None]:
    train(config("--max_iters=5"))
    yield


def test_an_evaluation_alone_takes_smaller_bites(
    trained: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onecard.train import evaluate as evaluate_module

    expected = train(config("--max_iters=5", "--eval_only", "--init_from=resume")).values["val_loss"]
    plain = evaluate_module.evaluate

    def hungry(*arguments: Any, micro_batch: int, **named: Any) -> Any:
        if micro_batch > 1:
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, micro_batch=micro_batch, **named)

    monkeypatch.setattr(evaluate_module, "evaluate", hungry)
    found = train(config("--max_iters=5", "--eval_only", "--init_from=resume")).values["val_loss"]
    assert found == pytest.approx(expected, rel=1e-6)
    assert "out of memory: 1 sequence at a time" in "".join(capsys.readouterr())
    with pytest.raises(UserError, match="out of memory"):
        train(config("--max_iters=5", "--eval_only", "--init_from=resume", "--auto_fit=False"))


# --- a start beside others
def test_a_start_beside_a_full_card_names_who_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the model that is too large."""
    total = 12 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (GIB // 2, total))
    reported = ["another program computes on this card: python (pid 7) holds 10.90 GiB"]
    monkeypatch.setattr(engine_module, "process_notes", lambda look: reported)
    monkeypatch.setattr(engine_module, "look_at", lambda device: None)
    small = ["--max_iters=10", "--block_size=1024", "--batch_size=16", "--gradient_accumulation_steps=4"]

    def refused(*words: str) -> UserError:
        given = load_config(RunConfig, [*small, *words])
        rates = rates_of(find_card("RTX 4070"), "bfloat16")
        question = Question(given, given.shape(50304), "bfloat16", rates, GIB // 2, None, (8, 9))
        with pytest.raises(UserError) as error:
            open_fit(question, on_card=True)
        return engine_module._others_hold_too_much(error.value, question, "cuda")

    alone = refused()
    assert alone.what == "other processes hold too much of the card: 0.50 GiB of it are left"
    assert reported[0] in alone.hint and "with the card to itself it runs with" in alone.why
    assert "other processes hold" in refused("--auto_fit=False").what
    assert "others" not in refused("--vram_limit=1").what, "nobody else's doing"
    assert "others" not in refused("--n_layer=48", "--n_embd=6400", "--n_head=50").what
