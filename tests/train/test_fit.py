"""Running out of memory, made to happen: the run goes on, and nothing about what it learns has changed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard.config.knobs import load_config
from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.model.decoder import Decoder
from onecard.optim import regions
from onecard.optim.optimizer import Optimizer
from onecard.plan import resident as resident_module
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.rates import ANY_CARD
from onecard.plan.search import Question, settings
from onecard.run.metrics import read_metrics
from onecard.run.stored import list_checkpoints
from onecard.train import evaluate as evaluate_module
from onecard.train import host_copy as host_copy_module
from onecard.train import loop as loop_module
from onecard.train import refit as refit_module
from onecard.train import start as start_module
from onecard.train.first_setting import open_fit, setting_notes
from onecard.train.fit import MOST_MICRO_BATCHES, Fit
from onecard.train.journal import Journal
from onecard.train.loop import train
from onecard.train.refit import Refit
from onecard.train.saving import Saver
from onecard.train.start import open_run
from onecard.train.step import Stepper

pytestmark = pytest.mark.usefixtures("little_garbage")

TINY = [
    "--dataset=tiny", "--vocab_size=61", "--n_layer=3", "--n_head=2", "--n_embd=32", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=2", "--learning_rate=1e-2", "--min_lr=1e-3",
    "--warmup_iters=3", "--lr_decay_iters=400", "--max_iters=40", "--eval_interval=10", "--eval_iters=2",
    "--device=cpu", "--no-compile", "--sample_tokens=0", "--out_dir=out",
]  # fmt: skip


def config(*more: str) -> RunConfig:
    return load_config(RunConfig, [*TINY, *more])


def weights(out_dir: str) -> dict[str, torch.Tensor]:
    return list_checkpoints(Path(out_dir) / "checkpoints")[-1].model_tensors()


def events(out_dir: str) -> list[dict[str, Any]]:
    lines = (Path(out_dir) / "events.jsonl").read_text().splitlines()[1:]
    return [json.loads(line) for line in lines]


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is offered it; here it reports a changed order of sums from a changed step."""
    monkeypatch.setattr(start_module, "choose_dtype", lambda requested, device: ("float64", ""))


class Injector:
    """Raises as a full card does, at chosen calls of chosen places."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chance: float, most: int, seed: int = 0) -> None:
        self.random, self.chance, self.left = random.Random(seed), chance, most
        self.raised: Counter[str] = Counter()
        self.updates = 0
        self._wrap(monkeypatch, Decoder, "loss_sum", "forward")
        self._wrap(monkeypatch, Decoder, "_begin_backward", "backward", also=True)
        self._wrap(monkeypatch, Stepper, "update", "entry of the update")
        self._wrap(monkeypatch, evaluate_module, "evaluate", "evaluation")
        self._wrap(monkeypatch, Saver, "write", "checkpoint")
        plain = Optimizer.update

        def counted(optimizer: Optimizer, *arguments: Any) -> None:
            self.updates += 1
            plain(optimizer, *arguments)

        monkeypatch.setattr(Optimizer, "update", counted)

    def _wrap(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, place: str, *, also: bool = False
    ) -> None:
        owners = [owner, *(cls for cls in _subclasses(owner) if name in vars(cls))] if also else [owner]
        for each in owners:
            plain: Callable[..., Any] = getattr(each, name)

            def wrapped(*arguments: Any, _plain: Callable[..., Any] = plain, **named: Any) -> Any:
                if self.left and self.random.random() < self.chance:
                    self.left -= 1
                    self.raised[place] += 1
                    raise torch.OutOfMemoryError(f"CUDA out of memory in {place}")
                return _plain(*arguments, **named)

            monkeypatch.setattr(each, name, wrapped)


def _subclasses(owner: Any) -> Iterator[Any]:
    for cls in owner.__subclasses__():
        yield cls
        yield from _subclasses(cls)


@pytest.mark.parametrize(("steps", "most"), [(140, 35), pytest.param(400, 100, marks=pytest.mark.long)])
def test_a_hundred_times_out_of_memory_changes_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, in_float64: None, steps: int, most: int
) -> None:
    for module in (regions, resident_module):
        monkeypatch.setattr(module, "PIECE", 2**10)  # small beside this small model: offloading saves
    monkeypatch.setattr(Fit, "may_offload", True)  # as on a card
    wider = "--n_embd=36"  # a shape of its own: what stands is remembered by shape
    quiet = train(config("--out_dir=quiet", f"--max_iters={steps}", wider))
    monkeypatch.setattr(refit_module, "_CLIMB_EVERY", 3)
    injector = Injector(monkeypatch, chance=0.04, most=most)
    loud = train(config("--out_dir=loud", f"--max_iters={steps}", wider))
    assert injector.left == 0
    assert all(
        injector.raised[place] for place in ("forward", "backward", "entry of the update", "evaluation")
    )
    assert injector.updates == steps, "one update a step, whatever happened in between"
    for name, expected in weights("quiet").items():
        assert (weights("loud")[name] - expected).abs().max() < 1e-9, name
    assert loud.values["val_loss"] == pytest.approx(quiet.values["val_loss"], abs=1e-9)
    assert loud.values["tokens"] == quiet.values["tokens"]
    refits = [e for e in events("loud") if e["event"] == "refitted"]
    assert len(refits) == loud.values["refits"] > most / 5
    sizes = {e["after"]["micro_batch"] for e in refits} | {4}
    assert len(sizes) <= MOST_MICRO_BATCHES
    assert {e["after"]["offload"] for e in refits} > {"none"}, "masters have moved to the host and back"
    reported = [x for x in read_metrics(Path("loud") / "metrics.jsonl") if "loss" in x]
    assert [x["step"] for x in reported] == list(range(steps)), "no step lost, none doubled"
    rates = [x["lr"] for x in read_metrics(Path("quiet") / "metrics.jsonl") if "loss" in x]
    assert [x["lr"] for x in reported] == rates


def test_a_failure_that_stays_ends_the_run_with_its_steps_saved(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = Decoder.loss_sum, 0

    def full(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += named.get("scale") is not None
        if calls > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*arguments, **named)

    monkeypatch.setattr(Decoder, "loss_sum", full)
    with pytest.raises(UserError, match="out of memory"):
        train(config())
    assert [c.step for c in list_checkpoints(Path("out") / "checkpoints")] == [5]
    tried = [e["after"] for e in events("out") if e["event"] == "refitted"]
    assert len(tried) > 3 and tried[-1]["micro_batch"] == 1 and tried[-1]["recompute"] == "block"


def test_without_auto_fit_it_ends_at_once(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    injector = Injector(monkeypatch, chance=1.0, most=1)
    with pytest.raises(UserError, match="out of memory"):
        train(config("--auto_fit=False"))
    assert injector.left == 0


def test_an_update_that_was_begun_is_not_done_again(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Optimizer.update

    def halfway(optimizer: Optimizer, *arguments: Any) -> None:
        plain(optimizer, *arguments)
        if optimizer.steps == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Optimizer, "update", halfway)
    with pytest.raises(UserError, match="out of memory"):
        train(config())
    assert list_checkpoints(Path("out") / "checkpoints") == [], "half an update is not worth keeping"


def test_the_libraries_errors_count_as_well(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, raised = Decoder.loss_sum, []

    def full(*arguments: Any, **named: Any) -> Any:
        if named.get("scale") is not None and len(raised) < 2:
            raised.append(1)
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return plain(*arguments, **named)

    monkeypatch.setattr(Decoder, "loss_sum", full)
    reported = [e for e in (train(config()), *events("out"))[1:] if e["event"] == "refitted"]
    assert sum("CUBLAS" in e.get("error", "") for e in reported) == 2


def test_what_is_no_shortage_is_not_tried_again(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Decoder, "loss_sum", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        train(config())
    assert len(calls) == 1


def test_evaluation_takes_smaller_bites_first(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = evaluate_module.evaluate

    def limited(*arguments: Any, **named: Any) -> Any:
        sizes.append(named["micro_batch"])
        if named["micro_batch"] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*arguments, **named)

    monkeypatch.setattr(evaluate_module, "evaluate", limited)
    summary = train(config("--max_iters=10"))
    assert sizes[:4] == [4, 2, 1, 1] and set(sizes[4:]) == {1}
    assert summary.values["refits"] == 0 and summary.values["val_loss"] > 0


def test_an_allocator_that_keeps_starting_over_is_a_shortage(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card that spills or thrashes nothing fails; it only becomes slow."""
    # 70 before it began: the process had another run. Five by step 8, five again by step 24 and by step 32.
    retries = iter([70, 75, 75, 80, 85, 85])
    monkeypatch.setattr(refit_module, "allocator_retries", lambda device: next(retries, 85))
    summary = train(config("--max_iters=60"))
    (reported,) = (e for e in events("out") if e["event"] == "refitted" and e["where"] == "training")
    assert reported["step"] == 32 and "started over" in reported["error"], "once alone is none"
    assert summary.values["step"] == 60


def test_a_tight_setting_that_is_the_faster_one_is_kept(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting over may cost less than a smaller setting does. Nobody knows before it is measured."""
    counted, speeds = iter(range(0, 2**62, 5)), {"known": False}
    monkeypatch.setattr(refit_module, "allocator_retries", lambda device: next(counted))
    monkeypatch.setattr(refit_module, "_CLIMB_EVERY", 8)

    def speed(refit: Refit) -> float | None:
        speeds["known"] = speeds["known"] or refit.run.position.step >= 40
        return (100.0 if refit.fit.as_given else 80.0) if speeds["known"] else None

    monkeypatch.setattr(Refit, "_speed", speed)
    monkeypatch.setattr(Refit, "_speed_from", lambda refit, then, least: speed(refit))
    summary = train(config("--max_iters=96"))
    changes = [(e["where"], e["step"]) for e in events("out") if e["event"] == "refitted"]
    assert changes == [("training", 40), ("back", 48)], "tried once, taken back, and left alone"
    assert summary.values["step"] == 96


def test_a_tight_setting_after_a_tight_one_is_judged_before_it_is_left(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a run would go down from one tight setting to the next, each a little slower, and stay there."""
    counted = iter(range(0, 2**62, 5))
    monkeypatch.setattr(refit_module, "allocator_retries", lambda device: next(counted))
    for name in ("_speed", "_speed_from"):
        monkeypatch.setattr(Refit, name, lambda refit, *_: 100.0 if refit.fit.as_given else 80.0)
    train(config("--max_iters=96"))
    changes = [(e["where"], e["step"]) for e in events("out") if e["event"] == "refitted"]
    assert changes == [("training", 16), ("back", 32)], "32: the smaller one, looked at twice"


def test_a_setting_that_became_tight_is_judged_by_what_it_is_now(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast for 200 steps, then the allocator starts over and steps take five times as long. A smaller setting
    in between is better than that, though worse than what was."""
    retries, runs, clock = [0], [], [0.0]
    plain_run, plain_open = Stepper.run, loop_module.open_run
    monkeypatch.setattr(refit_module, "allocator_retries", lambda device: retries[0])

    def opened(asked: RunConfig) -> Any:
        runs.append(plain_open(asked))
        return runs[0]

    def timed(*arguments: Any, **named: Any) -> Any:
        run, tight = runs[0], runs[0].position.step >= 200 and runs[0].fit.as_given
        retries[0] += 3 if tight else 0
        clock[0] += 0.05 if tight else 0.01 if run.fit.as_given else 0.02
        return plain_run(*arguments, **named)

    monkeypatch.setattr(loop_module, "open_run", opened)
    monkeypatch.setattr(Stepper, "run", timed)
    monkeypatch.setattr(Journal, "session", property(lambda j: (j.run.position.step, clock[0])))
    train(config("--max_iters=280", "--log_interval=2", "--eval_interval=280"))
    changes = [(e["where"], e["step"]) for e in events("out") if e["event"] == "refitted"]
    assert changes == [("training", 216)], "and it is not taken back"
    (gained,) = (e for e in events("out") if e["event"] == "gained")
    assert gained["measured_gain"] == pytest.approx(1.5, abs=0.1)


def test_where_nothing_is_smaller_tightness_is_reported_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter(range(0, 2**62, 5))
    monkeypatch.setattr(refit_module, "allocator_retries", lambda device: next(counted))
    for name in ("_speed", "_speed_from"):
        monkeypatch.setattr(Refit, name, lambda refit, *_: 100.0)
    one = ("--batch_size=1", "--gradient_accumulation_steps=1", "--loss_chunk=16")
    summary = train(config("--max_iters=96", *one, "--recompute=block", "--offload=gradients"))
    reported = [e["step"] for e in events("out") if e["event"] == "out of memory"]
    assert reported == [16] and summary.values["step"] == 96
    assert summary.values["refits"] == 0, "what stays as it was has not been changed"


def test_errors_that_were_dealt_with_are_no_thrashing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the end of a retry of the allocator's."""
    plain, failures = evaluate_module.evaluate, iter(range(2**62))
    retries = 0

    def limited(*arguments: Any, **named: Any) -> Any:
        nonlocal retries
        if named["micro_batch"] > 1:
            retries += 5
            raise torch.OutOfMemoryError(f"CUDA out of memory, number {next(failures)}")
        return plain(*arguments, **named)

    monkeypatch.setattr(evaluate_module, "evaluate", limited)
    monkeypatch.setattr(refit_module, "allocator_retries", lambda device: retries)
    assert train(config("--max_iters=20")).values["refits"] == 0
    assert retries == 10


# --- decisions alone
def question(allowed_gib: float, *words: str) -> Question:
    asked = load_config(RunConfig, ["--max_iters=10", *words])
    return Question(asked, asked.shape(50304), "bfloat16", ANY_CARD, int(allowed_gib * GIB), None, (8, 9))


@pytest.mark.parametrize("cap", [11, 8, 6, 4, 3, 2])
def test_every_cap_has_an_exact_setting_for_124m(cap: float) -> None:
    """As reported: 2 GiB for tensors by offload, not by low bits."""
    asked = question(cap + CONTEXT / GIB)
    fit = open_fit(asked, on_card=True)
    assert fit.setting.exact
    assert fit.choice.bill.need <= cap * GIB
    best = max(
        choice.tokens_per_s for choice in (asked.answer(s) for s in settings(asked.config, asked.shape))
        if choice.fits
    )  # fmt: skip
    assert fit.choice.tokens_per_s > 0.98 * best


def test_the_way_down_is_ever_smaller_and_as_fast_as_can_be() -> None:
    fit = open_fit(question(12.0), on_card=True)
    peaks, speeds, sizes = [fit.choice.bill.allocated], [fit.choice.tokens_per_s], {fit.setting.micro_batch}
    while fit.down(step=5) is not None and fit.choice.bill.allocated < peaks[-1]:
        peaks.append(fit.choice.bill.allocated)
        speeds.append(fit.choice.tokens_per_s)
        sizes.add(fit.setting.micro_batch)
        assert fit.setting.exact
    assert len(peaks) > 4 and peaks[-1] < 1.6 * GIB
    assert len(sizes) <= MOST_MICRO_BATCHES
    assert speeds[1] > 0.9 * speeds[0], "the first step down costs little"


def test_it_climbs_when_there_is_room_and_waits_after_a_failure() -> None:
    fit = open_fit(question(12.0), on_card=True)
    first = fit.setting
    while fit.choice.tokens_per_s > 0.9 * fit.question.answer(first).tokens_per_s:
        assert fit.down(step=100) is not None
    lower = fit.setting
    assert fit.up(step=101, allocator=11 * GIB) != first, "it has just failed"
    fit.setting = lower
    assert fit.up(step=101, allocator=fit.choice.bill.need - 1) is None
    fit.setting = lower
    found = fit.up(step=1000, allocator=11 * GIB)
    assert found is not None
    assert fit.choice.tokens_per_s >= 0.99 * fit.question.answer(first).tokens_per_s


def test_pinned_values_stay_and_are_blamed() -> None:
    fit = open_fit(question(4.0, "--recompute=none"), on_card=True)
    for _ in range(6):
        assert fit.setting.recompute == "none"
        if fit.down(step=1) is None:
            break
    with pytest.raises(UserError, match="with --offload=none it cannot fit"):
        open_fit(question(1.6, "--offload=none"), on_card=True)
    with pytest.raises(UserError, match="--recompute=none --offload=none") as stopped:
        open_fit(question(1.58, "--recompute=none", "--offload=none"), on_card=True)
    assert "without: --batch_size=" in str(stopped.value) and "tokens/s" in str(stopped.value)
    with pytest.raises(UserError, match="does not fit in any setting"):
        open_fit(question(0.9), on_card=True)


def test_low_bits_only_when_nothing_exact_fits_and_then_announced() -> None:
    d32 = ["--arch=nanochat", "--generation=2025", "--depth=32", "--vocab_size=65536", "--batch_size=4",
           "--offload=none"]  # fmt: skip
    fit = open_fit(question(14.5, *d32), on_card=True)
    assert not fit.setting.exact
    assert any("low-bit" in text for text in setting_notes(fit))
    exact = open_fit(question(40.0, *d32), on_card=True)
    assert (exact.setting.exact and setting_notes(exact) == []) or exact.setting.recompute != "none"


def test_auto_fit_off_refuses_before_anything_is_allocated() -> None:
    with pytest.raises(UserError, match="auto_fit is off") as stopped:
        open_fit(question(4.0, "--auto_fit=False", "--batch_size=32"), on_card=True)
    assert "GiB are needed" in str(stopped.value) and "--" in str(stopped.value)
    assert isinstance(open_fit(question(30.0, "--auto_fit=False"), on_card=True), Fit)


def test_a_config_that_fits_is_left_as_it_is() -> None:
    asked = question(12.0)
    fit = open_fit(asked, on_card=True)
    assert fit.setting == setting_of(asked.config, asked.shape) and setting_notes(fit) == []


def test_parking_frees_and_brings_back_every_bit(workplace: Path) -> None:
    """What pausing and changing places rest on."""
    run = open_run(config())
    assert run.stepper is not None
    training = {n: t.clone() for n, t in run.stepper.export().weights.items()}
    state = host_copy_module.move_to_host(run)
    assert run.stepper is None
    host_copy_module.move_to_card(run, state, run.fit.setting)
    assert run.stepper is not None
    for name, tensor in run.stepper.export().weights.items():
        assert torch.equal(tensor, training[name])
