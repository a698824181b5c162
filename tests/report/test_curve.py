"""What a curve shows: one run of the shape that people paste, and each finding with and without its cause."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from onecard.hardware.cards import all_cards
from onecard.report.curve.findings import findings_of
from onecard.report.curve.losses import slope_of
from onecard.report.curve.noise import evaluation_error
from onecard.report.findings import Finding
from onecard.report.log import Evaluations, Start, Steps
from onecard.report.run_facts import RunFacts, Schedule
from tests.report.made_runs import VOCABULARY, curve, losses, run, small_gpt, steps_of, table

RTX_4070 = next(card for card in all_cards() if card.name.endswith("RTX 4070"))
SHAPE = small_gpt()

# A healthy run of a small model, as a table with two digits.
STEPS = [0, 500, 1000, 2000, 3000, 4000, 5000]
TRAIN = [10.91, 5.74, 4.88, 4.43, 4.28, 4.20, 4.15]
VAL = [10.91, 5.75, 4.90, 4.45, 4.30, 4.22, 4.18]


def usual(**changes: object) -> RunFacts:
    facts = table(
        STEPS, TRAIN, VAL, parameters=SHAPE.parameters, shape=SHAPE, tokens_per_step=524_288, block_size=1024,
        vocab_size=VOCABULARY, tokenizer="gpt2", last_step=5000,
        schedule=Schedule("cosine", 5e-4, 5e-5, 250, 5000),
    )  # fmt: skip
    return replace(facts, **changes)  # type: ignore[arg-type]


def keyed(facts: RunFacts) -> dict[str, Finding]:
    return {found.key: found for found in findings_of(facts)}


def test_a_healthy_table() -> None:
    found = keyed(usual())
    assert not [each for each in found.values() if each.good is False]
    assert found["gap"].good
    assert "0.03 nats apart" in found["gap"].text
    assert found["still-falling"].good
    assert "0.16 nats per doubling" in found["still-falling"].text
    assert "part of that is the falling learning rate" in found["still-falling"].text
    assert found["rate-floor"].good
    assert "5e-05" in found["rate-floor"].text
    assert "ln(50,304) = 10.83" in found["initial-loss"].text
    assert "perplexity of 65.4" in found["reads-like"].text
    assert "64 tokens per parameter" in found["tokens-for-size"].text
    assert "4.90 at step 1,000" in found["losses"].text
    assert "4.18 at step 5,000" in found["losses"].text


def test_the_heaviest_come_first() -> None:
    weights = [found.weight for found in findings_of(usual())]
    assert weights == sorted(weights, reverse=True)


def test_nothing_is_said_of_nothing() -> None:
    assert findings_of(table([], [], [])) == []
    assert findings_of(table([0], [10.9], [10.9])) == []  # a model that has learnt nothing memorises nothing


# --- how exact --------------------------------------------------------------------------------------


def test_an_evaluations_error_is_what_public_logs_scatter_by() -> None:
    """512 sequences of fresh text: 0.033 and 0.040 nats in two public logs; 64 of them: 0.095."""
    for sequences, measured in ((512, 0.036), (64, 0.095)):
        error = evaluation_error(usual(eval_tokens=sequences * 1024))
        assert error is not None
        assert error.level == pytest.approx(measured, rel=0.12)
    smaller = evaluation_error(usual(eval_tokens=1600 * 512, block_size=512))
    assert smaller is not None
    assert smaller.of_a_change < 0.1 * smaller.level  # the same text each time
    assert evaluation_error(usual()) is None


def test_is_the_last_change_anything() -> None:
    """0.04 nats: on other text each time only where there is much of it, on the same text it is."""
    anew = usual(eval_tokens=400 * 1024, log=replace(usual().log, format="nanogpt"))
    assert "4.22 → 4.18 from step 4,000 to 5,000 alone says nothing" in keyed(anew)["last-change"].text
    assert "± 0.054" in keyed(anew)["last-change"].text
    assert "± 0.038" in keyed(anew)["evaluation-error"].text
    much = replace(anew, eval_tokens=20_000 * 1024)
    assert "is beyond chance" in keyed(much)["last-change"].text
    same = usual(eval_tokens=400 * 1024)
    assert "is real" in keyed(same)["last-change"].text
    unsaid = keyed(usual())["last-change"].text
    assert "only if it reads 2.92M tokens or more" in unsaid


def test_the_slope_has_an_error_that_its_noise_explains() -> None:
    """Over many made-up curves the true slope lies within two errors nearly always."""
    inside = 0
    for seed in range(100):
        dice = random.Random(seed)
        steps = list(range(250, 10_001, 250))
        vals = [5.0 - 0.12 * math.log2(step) + dice.gauss(0, 0.01) for step in steps]
        found = slope_of(table(steps, vals, vals))
        assert found is not None
        inside += abs(found.nats + 0.12) < 2 * found.error
    assert inside >= 88


def test_flat_rising_and_unclear_slopes() -> None:
    steps = list(range(500, 10_001, 500))
    flat = keyed(table(steps, [3.2] * 20, [3.2 + 0.001 * (-1) ** i for i in range(20)]))
    assert "plateau" in flat
    assert "still-falling" not in flat
    rising = keyed(table(steps, [3.2] * 20, [3.2 + 0.01 * i for i in range(20)]))
    assert rising["rising"].good is False
    dice = random.Random(4)
    noisy = keyed(table(steps, [3.2] * 20, [3.2 + dice.gauss(0, 0.2) for _ in range(20)]))
    assert "slope-unclear" in noisy


def test_the_gap_of_a_model_that_begins_to_memorise() -> None:
    train = [4.2, 2.3, 1.9, 1.7, 1.5, 1.3, 1.15]
    val = [4.2, 2.4, 2.0, 1.85, 1.75, 1.70, 1.68]
    found = keyed(table(STEPS, train, val, vocab_size=65))
    assert found["gap"].good is False
    assert "0.53 nats above training" in found["gap"].text
    assert "letters" in found["reads-like"].text or "words" in found["reads-like"].text
    assert "per-character" in found


def test_single_steps_their_noise_and_spikes() -> None:
    values = [curve(step) + random.Random(step).gauss(0, 0.04) for step in range(3000)]
    calm = keyed(run(steps_of(values)))
    assert calm["stable"].good
    assert "± 0.04" in calm["noise"].text
    for at in (1000, 2000):
        values[at : at + 3] = [loss + 2.0 for loss in values[at : at + 3]]
    spiky = keyed(run(steps_of(values)))
    assert "stable" not in spiky
    assert spiky["spikes"].text.startswith("2 spikes in 3,000 logged steps")


@pytest.mark.parametrize(
    ("loss", "words", "good"),
    [(10.85, "knowing nothing", True), (16.0, "above ln", None), (3.4, "below ln", None)],
)
def test_the_initial_loss(loss: float, words: str, good: bool | None) -> None:
    found = keyed(table([0, 500], [loss, 3.3], [loss, 3.3], vocab_size=VOCABULARY))["initial-loss"]
    assert (words in found.text, found.good) == (True, good)


# --- how it was driven ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "end", "key", "words"),
    [
        (Schedule("cosine", 6e-4, 6e-5, 250, 50_000), 50_000, "rate-high", "still high"),
        (Schedule("cosine", 6e-4, 6e-5, 250, 10_000), 10_000, "rate-decaying", "on its way down"),
        (Schedule("cosine", 6e-4, 6e-5, 250, 5000), 5000, "rate-floor", "has come down to 6e-05"),
        (Schedule("constant", 6e-4, 6e-4), 5000, "rate-constant", "no decay is planned"),
        (Schedule("wsd", 6e-4, 0.0, 250, 8000, 6000), 8000, "rate-high", "0.05 to 0.2 nats (0.03 to 0.4"),
        (Schedule("cosine", 6e-4, 6e-5, 9000, 600_000), 600_000, "rate-warm-up", "still warming up"),
    ],
)
def test_the_learning_rates_phase(schedule: Schedule, end: int, key: str, words: str) -> None:
    found = keyed(usual(schedule=schedule, last_step=end))
    assert words in found[key].text
    assert "default" not in found[key].text
    assumed = keyed(usual(schedule=replace(schedule, assumed=True), last_step=end))
    assert "Nothing says the schedule" in assumed[key].text


def test_a_rate_that_nobody_knows_has_no_phase() -> None:
    found = keyed(usual(schedule=None))
    assert [key for key in found if key.startswith("rate-")] == ["rate-unknown"]
    assert "if it is down, that is in the loss already" in found["rate-unknown"].text


def resumed(lift: float, new_rate: float = 1e-4) -> RunFacts:
    values = [curve(step) + random.Random(step).gauss(0, 0.03) for step in range(2000)]
    first = Steps(step=range(1000), loss=values[:1000], lr=[1e-4] * 1000)
    second = Steps(step=range(1000, 2000), loss=[loss + lift for loss in values[1000:]], lr=[new_rate] * 1000)
    whole = Steps(step=range(2000), loss=[*first.loss, *second.loss], lr=[*first.lr, *second.lr])
    return run(whole, starts=(Start(first, Evaluations()), Start(second, Evaluations())))


def test_before_and_after_a_resume() -> None:
    same = keyed(resumed(0.0))["resume"]
    assert (same.good, same.step) == (True, 1000)
    higher = keyed(resumed(0.3))["resume-higher"]
    assert higher.good is False
    assert "0.29 nats higher" in higher.text
    assert "optimizer's states" in higher.text
    rate = keyed(resumed(0.3, new_rate=6e-4))["resume-higher"]
    assert "rose from 0.0001 to 0.0006" in rate.text


@pytest.mark.parametrize(
    ("data", "good", "words"),
    [(4e9, True, "Every token was new"), (1e9, None, "2.6 times"), (0.1e9, False, "26.2 times")],
)
def test_passes_over_the_data(data: float, good: bool | None, words: str) -> None:
    found = keyed(usual(train_tokens=int(data)))["passes"]
    assert (found.good, words in found.text) == (good, True)


def test_gradients_that_are_clipped_or_grow() -> None:
    values = losses(0, 1000)
    calm = keyed(run(steps_of(values, grad_norm=[0.4] * 1000)))
    assert calm["gradients"].good
    grown = keyed(run(steps_of(values, grad_norm=[0.3 + 0.002 * i for i in range(1000)])))
    assert grown["gradients-grow"].good is False
    assert "72% of the steps" in grown["clipped"].text


# --- speed ------------------------------------------------------------------------------------------


def test_a_run_that_slows_down_says_since_when() -> None:
    ms = [20_000.0] + [4000.0 + (1200.0 if i >= 600 else 0.0) for i in range(1, 1000)]
    ms[500] = 60_000.0  # an evaluation is in it
    found = keyed(run(steps_of(losses(0, 1000), ms=ms)))["slower"]
    assert found.good is False
    assert found.step is not None
    assert abs(found.step - 600) <= 30
    assert "30% slower" in found.text
    steady = keyed(run(steps_of(losses(0, 1000), ms=[20_000.0] + [4000.0] * 999)))["speed-steady"]
    assert steady.good
    assert "4 s a step" in steady.text


def test_the_true_use_of_the_card() -> None:
    """By tokens, FLOPs and the card's peak; the same from nanoGPT's own MFU of an A100."""
    seconds = 4.4
    facts = run(
        steps_of(losses(0, 1000), ms=[1000 * seconds] * 1000),
        shape=SHAPE,
        card=RTX_4070,
        tokens_per_step=524_288,
    )
    share = 524_288 / seconds * SHAPE.flops_per_token / (58.3e12)
    assert f"{share:.0%} of the RTX 4070's own peak" in keyed(facts)["mfu"].text
    shown = share * 58.3 / 312
    by_log = run(steps_of(losses(0, 1000), mfu=[-1.0] * 5 + [shown] * 995), card=RTX_4070)
    assert f"{share:.0%} of the RTX 4070's own peak" in keyed(by_log)["mfu"].text
    slow = replace(facts, tokens_per_step=100_000)
    assert keyed(slow)["mfu"].good is False
    assert "mfu" not in keyed(replace(facts, card=None))
