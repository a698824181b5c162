"""Back to speed in stages: the start, climbs by what was measured, the return from one that was slower."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import TINY, events, weights

from onecard.config.knobs import load_config
from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.errors import UserError
from onecard.hardware.cards import find_card
from onecard.model.decoder import Decoder
from onecard.plan.activations import TRYING_OUT, training_moments
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.rates import ANY_CARD, Rates, rates_of
from onecard.plan.search import Question, settings
from onecard.plan.update import update_moments
from onecard.run.stored import list_checkpoints
from onecard.train import engine as engine_module
from onecard.train import journal as journal_module
from onecard.train import probes as probes_module
from onecard.train import refit as refit_module
from onecard.train import retries as retries_module
from onecard.train import start as start_module
from onecard.train.first_setting import open_fit, plan_of, process_bytes, setting_notes
from onecard.train.fit import MOST_MICRO_BATCHES, Fit
from onecard.train.journal import Journal
from onecard.train.loop import train
from onecard.train.other_processes import Look
from onecard.train.pace import duration
from onecard.train.refit import _OF_TRAINING, Refit
from onecard.train.saving import prepare_folder
from onecard.train.speed_watch import Verdict
from onecard.train.start import open_run
from onecard.train.step import Stepper

pytestmark = pytest.mark.usefixtures("little_garbage")

LONGER = ["--max_iters=24", "--eval_interval=8", "--log_interval=1"]


def config(*more: str) -> RunConfig:
    return tiny_runs.config(*LONGER, *more)


def question(*words: str, rates: Rates | None = None, cap_gib: float = 60.0) -> Question:
    asked = load_config(RunConfig, ["--max_iters=10", "--block_size=1024", *words])
    known = rates or rates_of(find_card("H200"), "bfloat16")
    return Question(asked, asked.shape(50304), "bfloat16", known, int(cap_gib * GIB) + CONTEXT, None, (9, 0))


# --- the start
def test_a_micro_batch_too_small_for_the_card_is_made_larger() -> None:
    asked = question("--batch_size=1", "--gradient_accumulation_steps=64")
    fit = open_fit(asked, on_card=True)
    given = asked.answer(setting_of(asked.config, asked.shape))
    assert given.fits, "nothing forces it"
    assert fit.setting.micro_batch > 1 and 64 % fit.setting.micro_batch == 0, "the same step"
    assert fit.choice.tokens_per_s > 1.03 * given.tokens_per_s
    (reported,) = setting_notes(fit)
    assert "faster by prediction" in reported and f"--batch_size={fit.setting.micro_batch}" in reported


def test_on_a_card_that_is_not_known_nothing_is_changed_for_speed() -> None:
    asked = question("--batch_size=1", "--gradient_accumulation_steps=64", rates=ANY_CARD)
    assert open_fit(asked, on_card=True).as_given


def test_what_is_hardly_faster_is_left_alone() -> None:
    asked = question("--batch_size=32", "--gradient_accumulation_steps=2")
    fit = open_fit(asked, on_card=True)
    assert (
        asked.answer(dataclasses.replace(fit.setting, micro_batch=64)).tokens_per_s > fit.choice.tokens_per_s
    )
    assert fit.as_given and setting_notes(fit) == []


def test_the_plan_of_a_run_has_the_names_of_the_plan_command() -> None:
    fit = open_fit(question("--batch_size=16", "--gradient_accumulation_steps=4"), on_card=True)
    plan = plan_of(fit, on_card=True)
    assert plan["memory"]["allocated_gib"] == round(fit.choice.bill.allocated / GIB, 4)
    assert plan["speed"]["tokens_per_s"] == round(fit.choice.tokens_per_s, 1)
    assert plan["model"]["flops_per_token"] == fit.question.shape.flops_per_token
    step = plan["model"]["tokens_per_step"] / plan["speed"]["tokens_per_s"]
    assert plan["time"]["seconds"] == pytest.approx(10 * step, abs=0.051)  # reported in tenths
    apart = plan_of(fit, on_card=False)
    assert apart["memory"] is apart["speed"] is apart["time"] is None


def test_a_run_on_a_cpu_has_a_plan_too(workplace: Path) -> None:
    train(config("--max_iters=2"))
    plan = json.loads((Path("out") / "plan.json").read_text())
    assert plan["schema"] == 1 and plan["settings"]["micro_batch"] == 4 and plan["as_given"] is True


def test_without_auto_fit_the_nearest_settings_that_fit_are_reported() -> None:
    with pytest.raises(UserError, match="auto_fit is off") as stopped:
        open_fit(question("--auto_fit=False", "--batch_size=32", cap_gib=4.0), on_card=True)
    reported = [line for line in stopped.value.hint.splitlines() if line.startswith("fits: ")]
    assert len(reported) == 3
    for line in reported:
        flags = [word for word in line.split() if word.startswith("--")]
        again = question("--auto_fit=False", "--batch_size=32", *flags, cap_gib=4.0)
        assert again.answer(setting_of(again.config, again.shape)).fits, line


# --- what was measured
def test_a_measured_peak_allows_what_the_bill_alone_would_not() -> None:
    # Without graphs: a smaller micro-batch with room for one may be faster than a larger one without.
    flags = ("--batch_size=16", "--gradient_accumulation_steps=4", "--cuda_graphs=False")
    fit = open_fit(question(*flags, cap_gib=3.0), on_card=True)
    small = fit.setting
    larger = fit.up(step=1, allocator=60 * GIB)
    assert larger is not None
    need = fit.choice.bill.need
    for share, allocator, expected in (
        (1.0, need - 1, False),
        (0.96, 0.97 * need, True),
        (1.05, need, False),
    ):
        fit.setting = small
        found = fit.up(1, allocator, share)
        assert (found == larger) is expected, (share, found)


def test_going_back_is_remembered() -> None:
    fit = open_fit(question("--batch_size=16", "--gradient_accumulation_steps=4", cap_gib=3.0), on_card=True)
    small = fit.setting
    larger = fit.up(step=1, allocator=60 * GIB)
    fit.back(small, step=40)
    assert fit.setting == small
    assert fit.evaluation_batch <= small.micro_batch, "what the bill of the smaller setting counts with"
    assert fit.up(step=41, allocator=60 * GIB) != larger, "not at once again"
    fit.setting = small
    assert fit.up(step=1000, allocator=60 * GIB) == larger


@pytest.mark.parametrize("taken", [True, False])
def test_what_others_took_is_tried_again_as_soon_as_it_is_back(taken: bool) -> None:
    """A setting that should have fitted and did not is tried less and less often."""
    fit = open_fit(question("--batch_size=16", "--gradient_accumulation_steps=4", cap_gib=11.0), on_card=True)
    first, need = fit.setting, fit.choice.bill.need
    for failure in range(6):
        fit.setting = first
        assert fit.down(10 * failure, allocator=0.8 * need if taken else 1.2 * need) is not None
    lower = fit.setting
    assert fit.up(114, allocator=0.8 * need) != first
    fit.setting = lower
    assert (fit.up(115, allocator=1.2 * need) == first) is taken
    fit.setting = lower
    again = 50 + 64 * 2**6
    assert fit.up(again, allocator=1.2 * need) == first
    # One that has held for long since is trusted as at first.
    later = again + 8 * 64 * 2**6
    assert fit.down(later, allocator=1.2 * need) not in (first, None)
    assert fit.up(later + 63, allocator=1.2 * need) != first
    assert fit.up(later + 64, allocator=1.2 * need) == first


def test_nothing_is_changed_for_the_setting_that_is_there() -> None:
    """Where the host is slow, a recorded graph counts: with all the memory in the world there would be room
    for one, with what there is there is not, and the same setting looked faster than itself."""
    for cap_gib in (1.12, 1.3, 2.0, 3.0):
        for batch in (1, 2, 8, 12):
            fit = open_fit(
                question(f"--batch_size={batch}", "--block_size=256", cap_gib=cap_gib), on_card=True
            )
            for step in range(1000, 6000, 1000):
                before = fit.setting
                assert fit.up(step, allocator=cap_gib * GIB) != before, (cap_gib, batch)
            assert fit.up(7000, allocator=cap_gib * GIB) is None, "that is all there is"


def test_where_it_is_known_what_there_is_the_next_setting_fits_in_it() -> None:
    """Not one after the other from the top, each compiled and failing."""
    fit = open_fit(question("--batch_size=32", "--gradient_accumulation_steps=2"), on_card=True)
    assert fit.down(5, allocator=3 * GIB) is not None
    assert 2 * GIB < fit.choice.bill.need <= 3 * GIB


@pytest.mark.parametrize("pins", [(), ("--recompute=none", "--offload=none")])
def test_the_smallest_setting_is_never_out_of_reach(pins: tuple[str, ...]) -> None:
    fit = open_fit(question("--batch_size=32", "--gradient_accumulation_steps=2", *pins), on_card=True)
    sizes, settings_tried = {fit.setting.micro_batch}, [fit.setting]
    while (found := fit.down(5)) is not None and found != settings_tried[-1]:
        sizes.add(found.micro_batch)
        settings_tried.append(found)
    least = min(fit.question.answer(s).bill.need for s in settings(fit.question.config, fit.question.shape))
    assert fit.choice.bill.need <= least / 0.97**2, "as good as the smallest there is"
    assert len(sizes) <= MOST_MICRO_BATCHES


def test_what_was_only_slower_has_not_run_out() -> None:
    """A setting left for its speed is a way out when memory does run out."""
    fit = open_fit(question("--batch_size=16", "--gradient_accumulation_steps=4", cap_gib=11.0), on_card=True)
    first = fit.setting
    smaller = fit.down(1)
    assert smaller is not None
    fit = open_fit(question("--batch_size=16", "--gradient_accumulation_steps=4", cap_gib=11.0), on_card=True)
    fit.setting = smaller
    fit.back(first, step=10)
    assert fit.down(20) == smaller


def test_the_run_returns_to_what_it_began_with_for_a_small_gain() -> None:
    fit = open_fit(question("--batch_size=32", "--gradient_accumulation_steps=2", cap_gib=9.0), on_card=True)
    first, need = fit.setting, fit.choice.bill.need
    assert fit.down(1, allocator=0.9 * need) is not None
    assert 0.97 < fit.choice.tokens_per_s / fit.question.answer(first).tokens_per_s < 1
    assert fit.up(100, allocator=need) == first


@pytest.mark.parametrize(
    ("worst", "measured", "share"),
    [("loss", 0.95, 0.95), ("loss", 0.5, 0.9), ("evaluation", 0.95, 1.0), ("evaluation", 1.05, 1.05)],
)
def test_a_peak_that_may_not_have_come_yet_is_no_reason_to_expect_less(
    monkeypatch: pytest.MonkeyPatch, worst: str, measured: float, share: float
) -> None:
    bill = SimpleNamespace(allocated=10 * GIB, worst=SimpleNamespace(name=worst))
    monkeypatch.setattr(refit_module, "peak_memory_gib", lambda device: 10 * measured)
    refit = SimpleNamespace(run=SimpleNamespace(device="cuda"))
    found = Refit._measured_share(refit, SimpleNamespace(bill=bill))  # type: ignore[arg-type]
    assert found == pytest.approx(share)


def test_the_moments_of_every_step_have_the_names_that_the_bill_gives_them() -> None:
    asked = question("--batch_size=4")
    setting = setting_of(asked.config, asked.shape)
    moments = [*training_moments(asked.shape, setting, "bfloat16")]
    moments += update_moments(asked.shape, setting, "bfloat16", by_muon=True, l2_bytes=0)
    assert {m.name for m in moments} == {*_OF_TRAINING, TRYING_OUT}


class PretendCard:
    """Without a card: the trainer decides as if it had one with so many bytes for tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, start_gib: float, then_gib: float) -> None:
        self.rates = rates_of(find_card("RTX 4070"), "bfloat16")

        def opened(asked: Question, *, on_card: bool) -> Fit:
            reported = replace(
                asked, allowed=process_bytes(start_gib * GIB), host_allowed=None, rates=self.rates
            )
            return open_fit(reported, on_card=True)

        monkeypatch.setattr(engine_module, "open_fit", opened)
        monkeypatch.setattr(refit_module, "free_for_tensors", lambda run: then_gib * GIB)
        monkeypatch.setattr(refit_module, "_CLIMB_EVERY", 4)
        monkeypatch.setattr(start_module, "choose_dtype", lambda requested, device: ("float64", ""))


def squeezed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config as given needs a little more than there is at first; later there is plenty."""
    asked = config()
    probe = Question(asked, asked.shape(61), "float64", ANY_CARD, 2**62, None, None)
    need = probe.answer(setting_of(asked, probe.shape)).bill.need
    PretendCard(monkeypatch, start_gib=(need - 2000) / GIB, then_gib=60.0)


@pytest.mark.parametrize("slower", [False, True])
def test_a_stage_is_judged_by_its_speed(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slower: bool
) -> None:
    squeezed(monkeypatch)
    steps: list[int] = []
    plain = Stepper.run

    def counted(stepper: Stepper, micros: Any, *arguments: Any, **named: Any) -> Any:
        steps.append(max(micros.sizes))
        return plain(stepper, micros, *arguments, **named)

    monkeypatch.setattr(Stepper, "run", counted)
    # 100 tokens a second before the change; after it half of that, or twice.
    speed = iter([100.0, *([50.0 if slower else 200.0] * 20)])
    monkeypatch.setattr(refit_module.Refit, "_speed", lambda refit: next(speed))
    summary = train(config())
    first, *later = events("refitted")
    (gained, *_more) = events("gained")
    assert first["where"] == "climb" and first["predicted_gain"] > 0.03
    assert gained["measured_gain"] == (-0.5 if slower else 1.0)
    assert gained["predicted_gain"] == first["predicted_gain"]
    assert (later[0]["where"] == "back") if slower else not later
    if slower:
        assert later[0]["after"] == first["before"]
    assert summary.values["step"] == 24 and len(steps) == 24
    shown = "".join(capsys.readouterr()) + summary.text()
    assert "predicted" in shown and ("going back" in shown) is slower


# --- the probes
def text_data() -> list[str]:
    Path("text.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    prepare(["text.txt"], PrepareOptions(tokenizer="byte"), progress=False)
    return [word for word in (*TINY, *LONGER) if not word.startswith(("--vocab", "--dataset", "--sample"))]


def test_what_comes_late_is_tried_first(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*text_data(), "--dataset=text", "--sample_tokens=8"]
    order: list[str] = []
    for name in ("_evaluation", "_sampling", "_checkpoint"):
        plain = getattr(probes_module, name)
        monkeypatch.setattr(
            probes_module, name, lambda run, name=name, plain=plain: (order.append(name), plain(run))
        )
    plain_run = Stepper.run
    monkeypatch.setattr(
        Stepper, "run", lambda *a, **n: (order.append("step"), plain_run(*a, **n))[1]
    )  # fmt: skip
    train(load_config(RunConfig, [*words, "--max_iters=3"]))
    assert order == ["_sampling", "_checkpoint", "step", "step", "step"], "step 0 begins with an evaluation"
    order.clear()
    train(load_config(RunConfig, [*words, "--max_iters=5", "--init_from=resume"]))
    assert order == ["_evaluation", "_sampling", "_checkpoint", "step", "step"]
    order.clear()
    train(load_config(RunConfig, [*words, "--max_iters=6", "--eval_interval=5", "--init_from=resume"]))
    assert order == ["_evaluation", "_sampling", "_checkpoint", "step"], "step 5 was evaluated at its end"


def test_probing_changes_nothing_that_is_learned(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*text_data(), "--dataset=text", "--sample_tokens=8", "--max_iters=6", "--dropout=0.1"]
    train(load_config(RunConfig, [*words, "--out_dir=probed"]))
    train(load_config(RunConfig, [*words, "--out_dir=plain", "--auto_fit=False"]))
    for name, expected in weights("plain").items():
        assert torch.equal(weights("probed")[name], expected), name


def test_a_checkpoint_that_cannot_be_made_is_no_surprise_after_an_hour(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is short for a moment is waited for; one that stays so ends the run before it begins."""
    plain, calls, done = probes_module._checkpoint, iter(range(100)), []

    def full(run: Any) -> None:
        if next(calls) < 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append(run.position.step)
        plain(run)

    monkeypatch.setattr(probes_module, "_checkpoint", full)
    summary = train(config())
    assert done == [0]
    assert not events("refitted"), "no setting gives the host's memory back"
    assert summary.values["step"] == 24
    fail = MemoryError()
    monkeypatch.setattr(probes_module, "_checkpoint", lambda run: (_ for _ in ()).throw(fail))
    with pytest.raises(UserError, match="checkpoint of step 0 could not be written: out of memory") as ended:
        train(config("--out_dir=other"))
    assert "RAM" in ended.value.hint and ended.value.why == "MemoryError"


@pytest.mark.parametrize("failures", [1, 10**6])
def test_a_sample_is_tried_again_with_the_card_emptied(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    words = [*text_data(), "--dataset=text", "--sample_tokens=8"]
    plain, calls = journal_module.sample_text, iter(range(2**62))

    def full(*arguments: Any, **named: Any) -> str:
        if next(calls) < failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*arguments, **named)

    monkeypatch.setattr(journal_module, "sample_text", full)
    summary = train(load_config(RunConfig, words))
    assert summary.values["step"] == 24 and summary.values["refits"] == 0
    drawn = sorted(path.name for path in (Path("out") / "samples").iterdir())
    assert len(drawn) == (3 if failures == 1 else 0)


# --- a card that is gone, a speed that is gone
def test_a_lost_card_ends_with_the_checkpoint_kept_and_the_way_on(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = Decoder.loss_sum, iter(range(2**62))

    def lost(*arguments: Any, **named: Any) -> Any:
        if named.get("scale") is not None and next(calls) >= 20:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors ...")
        return plain(*arguments, **named)

    monkeypatch.setattr(Decoder, "loss_sum", lost)
    with pytest.raises(UserError, match="the card stopped working at step 10") as stopped:
        train(config())
    assert "the checkpoint of step 8 is kept; 2 steps after it are lost" in stopped.value.why
    assert "onecard train --out_dir=out" in stopped.value.hint
    assert [c.step for c in list_checkpoints(Path("out") / "checkpoints")] == [8]
    monkeypatch.setattr(Decoder, "loss_sum", plain)
    assert train(config()).values["step"] == 24, "and it goes on from there"


def test_a_card_lost_before_anything_was_saved(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Stepper, "run", lost)
    with pytest.raises(UserError, match="stopped working at step 0") as stopped:
        train(config())
    assert "nothing had been saved yet" in stopped.value.why
    assert "the same command" in stopped.value.hint


@pytest.mark.parametrize("reason", ["spilling", "shared"])
def test_a_driver_that_spills_is_a_shortage_and_another_process_is_only_reported(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    answers = iter([Verdict(reason, "a step takes 9 s instead of 1 s: ...", 1.0, 9.0, 2**20)])
    monkeypatch.setattr(refit_module.Refit, "_on_card", property(lambda refit: True))
    monkeypatch.setattr(retries_module, "_WAIT", 0.0)
    monkeypatch.setattr(refit_module.SpeedWatch, "step_took", lambda watch, seconds, steps=1: steps > 0)
    monkeypatch.setattr(refit_module.SpeedWatch, "verdict", lambda watch, look: next(answers, None))
    summary = train(config())
    (reported,) = events("speed changed")
    assert reported["reason"] == reason and reported["now_seconds"] == 9.0
    changed = [event for event in events("refitted") if event["where"] == "training"]
    assert len(changed) == (reason == "spilling")
    assert summary.values["step"] == 24


def test_other_processes_are_reported_at_the_start(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refit_module, "look_at", lambda device: Look(unnamed_bytes=3 * GIB))
    train(config("--max_iters=1"))
    assert "hold 3.00 GiB of the card" in "".join(capsys.readouterr())


def test_speed_is_measured_without_the_first_steps_and_whatever_the_log_interval(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, float | None]] = []
    plain = refit_module.Refit.climb

    def climb(refit: Any) -> bool:
        seen.append((refit.run.position.step, refit._speed()))
        return plain(refit)

    monkeypatch.setattr(refit_module.Refit, "climb", climb)
    monkeypatch.setattr("onecard.train.loop.GLANCE_SECONDS", 0.0)
    train(config("--max_iters=40", "--log_interval=1000"))
    known = [step for step, speed in seen if speed is not None]
    assert known == list(range(24, 41)), "eight steps to settle, sixteen to measure"


def test_what_was_dared_and_ran_out_is_dared_less_often() -> None:
    """By its bill it was too large; the measured peak of another setting said it would do. It did not."""
    fit = open_fit(question("--batch_size=16", "--gradient_accumulation_steps=4", cap_gib=3.0), on_card=True)
    small, step, allocator, waits = fit.setting, 0, 0.97 * 5.517 * GIB, []
    dared = fit.up(step, allocator, 0.95)
    assert dared is not None and fit.choice.bill.need > allocator
    for _ in range(3):
        failed_at = step
        assert fit.down(step, allocator) is not None
        fit.setting = small
        while fit.up(step, allocator, 0.95) != dared:
            fit.setting = small
            step += 32
        waits.append(step - failed_at)
    assert waits == [64, 128, 256]


@pytest.mark.parametrize("words", [[], ["--offload=none"], ["--optimizer=muon", "--offload=none"]], ids=str)
@pytest.mark.parametrize(("layers", "heads", "width"), [(12, 12, 768), (24, 16, 1024), (48, 25, 1600)])
def test_at_the_bottom_it_is_the_smallest_there_is(
    words: list[str], layers: int, heads: int, width: int
) -> None:
    """Where weights and states are most of the peak, nothing is 3% smaller, and still enough may be."""
    size = [f"--n_layer={layers}", f"--n_head={heads}", f"--n_embd={width}"]
    asked = question(*size, "--batch_size=16", "--gradient_accumulation_steps=4", *words, cap_gib=100.0)
    fit = open_fit(asked, on_card=True)
    seen = {fit.setting}
    while (then := fit.down(100, 0.01 * GIB)) not in (None, *seen):
        assert then is not None
        seen.add(then)
    assert fit.choice.bill.need == fit.least_need
    assert len({setting.micro_batch for setting in seen}) <= MOST_MICRO_BATCHES


# --- the first ETA ----------------------------------------------------------------------------------
def test_what_a_step_is_predicted_to_take_is_what_the_runs_plan_says() -> None:
    fit = open_fit(question(), on_card=True)
    seconds, plan = fit.predicted_seconds, plan_of(fit, on_card=True)
    assert seconds is not None and plan["speed"]["step_s"] == pytest.approx(seconds, abs=1e-4)
    assert open_fit(question(rates=ANY_CARD), on_card=True).predicted_seconds is None
    assert open_fit(question(), on_card=False).predicted_seconds is None


def test_a_run_on_a_card_begins_with_the_predicted_eta(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(config("--max_iters=6000"))
    run.fit, run.device = open_fit(question(), on_card=True), "cuda:0"
    monkeypatch.setattr(journal_module, "peak_flops", lambda device, dtype: None)
    with run.directory.claimed(fresh=False):
        prepare_folder(run)
        with Journal(run) as journal:
            journal.opened()
    seconds = run.fit.predicted_seconds
    assert seconds is not None and journal.status.seconds_left == pytest.approx(6000 * seconds)
    assert f"time: {duration(6000 * seconds)} expected for 6,000 steps, at " in capsys.readouterr().err
