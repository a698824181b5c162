"""Days, kilowatt-hours and money of a run."""

from __future__ import annotations

import dataclasses
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import D32, D32_SETTING
from questions import NOTES, NOW, config

from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2Shape
from onecard.config.run import RunConfig
from onecard.hardware.cards import find_card
from onecard.plan.bill import checkpoint_bytes
from onecard.plan.cost import POWER_SHARE, Cost, Training, cost_of, steps_within
from onecard.plan.others.nanogpt_speed import nanogpt_step_time
from onecard.plan.prices import IDLE_WATTS, PRICE, Prices
from onecard.plan.rates import Rates, rates_of
from onecard.plan.speed import StepTime, step_time

CARD = find_card("RTX 4070")
FORTY = GPT2Shape(12, 12, 384, 50304, 1024, False)
RUN = [*NOTES, "--n_embd=384", "--eval_interval=500", "--eval_iters=50"]


def rates() -> Rates:
    found = rates_of(CARD, "bfloat16")
    assert found is not None
    return found


def cost(run: RunConfig, step: StepTime, prices: Prices = Prices()) -> Cost:  # noqa: B008
    return cost_of(Training(run, step, 0), CARD, prices)


def test_six_thousand_iterations_as_nanogpt_runs_them() -> None:
    """10 to 20 minutes are hoped for. At 300 MFLOP a token the card's peak alone forbids it."""
    assert FORTY.parameters == pytest.approx(40.95e6, rel=0.001)
    step = nanogpt_step_time(FORTY, 16, 512, rates(), compiled=True)
    assert step.tokens == 524_288
    assert 4.2 <= step.seconds <= 5.4
    hours = cost(config(RUN), step).seconds / 3600
    assert 7 <= hours <= 9
    at_the_peak = 6000 * 524_288 * FORTY.flops_per_token / 58.3e12 / 3600
    assert hours > at_the_peak > 4


def test_ours_is_no_slower_than_nanogpts() -> None:
    theirs = nanogpt_step_time(FORTY, 16, 512, rates(), compiled=True)
    ours = step_time(FORTY, Setting(16, 4096), "bfloat16", rates(), 512)
    assert ours.seconds < theirs.seconds


def test_d32_takes_months() -> None:
    """37.6B tokens; 28 to 45 days would be above the card's peak."""
    step = step_time(D32, D32_SETTING, "bfloat16", rates(), 256, by_muon=True)
    steps = 37_600_000_000 // 524_288
    words = ["--arch=nanochat", "--generation=2025", "--depth=32", "--vocab_size=65536", "--block_size=2048",
             "--total_batch_size=524288", "--batch_size=4", f"--max_iters={steps}"]  # fmt: skip
    run = Training(config(words), step, checkpoint_bytes(D32, D32_SETTING, True))
    found = cost_of(run, CARD, Prices(idle_watts=80.0))
    assert 100 <= found.days <= 160
    floor = steps * 524_288 * D32.flops_per_token / 58.3e12 / 86400
    assert found.days > floor > 85
    assert 450 <= found.card_kwh <= 800
    assert found.pc_kwh == pytest.approx(found.card_kwh + 0.08 * 24 * found.days)
    assert found.amount == pytest.approx(found.pc_kwh * PRICE)


STEP = StepTime(1.0, 0.2, 0.3, 0.2, 0.0, 0.1, 0.1, 524_288, 300_000_000, 58.3e12)


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 500))
def test_the_parts_are_the_whole(steps: int, interval: int, iterations: int) -> None:
    run = dataclasses.replace(config(RUN), max_iters=steps, eval_interval=interval, eval_iters=iterations)
    found = cost_of(Training(run, STEP, 500_000_000), CARD, Prices())
    whole = found.training_s + found.evaluation_s + found.checkpoint_s + found.first_step_s
    assert found.seconds == pytest.approx(whole)
    assert found.training_s == pytest.approx(1.8 * steps)
    evaluations = steps // interval + 1
    # Forward passes over two splits; each is cheaper than training on as much.
    tokens = evaluations * 2 * iterations * 16 * 1024
    assert 0 < found.evaluation_s < tokens / STEP.tokens_per_s
    assert found.checkpoint_s == pytest.approx(evaluations * 3 * 0.625)
    assert found.card_kwh == pytest.approx(200 * POWER_SHARE * found.seconds / 3.6e6)
    assert found.pc_kwh == pytest.approx((200 * POWER_SHARE + IDLE_WATTS) * found.seconds / 3.6e6)


@given(st.floats(1.0, 1e8), st.integers(1, 10**4), st.integers(1, 500), st.integers(0, 10**10))
def test_as_many_steps_as_a_time_is_enough_for(
    seconds: float, interval: int, iterations: int, checkpoint: int
) -> None:
    run = dataclasses.replace(config(RUN), eval_interval=interval, eval_iters=iterations)
    steps = steps_within(seconds, Training(run, STEP, checkpoint))

    def whole(count: int) -> float:
        run_of = dataclasses.replace(run, max_iters=count)
        return cost_of(Training(run_of, STEP, checkpoint), CARD, Prices()).seconds

    assert steps == 0 or whole(steps) <= seconds * (1 + 1e-9)
    assert whole(steps + interval + 1) > seconds * (1 - 1e-9)


def test_rare_evaluations_cost_little_and_a_free_kilowatt_nothing() -> None:
    often = cost(config(RUN, "--eval_interval=100"), STEP)
    rarely = cost(config(RUN, "--eval_interval=100000"), STEP)
    assert rarely.evaluation_s == pytest.approx(often.evaluation_s / 61)
    free = cost(config(RUN), STEP, Prices(0.0, 0.0, idle_watts=0.0))
    assert free.amount == 0 and free.pc_kwh == free.card_kwh > 0


def test_compiling_more_kinds_of_layers_takes_longer() -> None:
    one, four = (Training(config(RUN), STEP, 0, kinds_of_layers=n).first_step_s for n in (1, 4))
    assert four > one > Training(config(RUN), STEP, 0, compiled=False).first_step_s > 0


def test_when_it_is_done() -> None:
    found = cost(config(RUN), STEP)
    done = found.finish(NOW)
    assert done is not None and (done - NOW).total_seconds() == pytest.approx(found.seconds, abs=1)
    said = found.to_json(NOW)
    assert datetime.fromisoformat(said["time"]["finish"]) <= done
    assert said["time"]["seconds"] == round(found.seconds, 1)
    assert said["cost"] == {"amount": round(found.amount, 2), "currency": "EUR"}
    endless = dataclasses.replace(found, seconds=1e15)
    assert endless.finish(NOW) is None and endless.to_json(NOW)["time"]["finish"] is None


def test_of_a_card_whose_power_is_not_known_there_is_no_energy_and_no_money() -> None:
    unknown = cost_of(Training(config(RUN), STEP, 0), dataclasses.replace(CARD, tdp_w=None), Prices())
    assert (unknown.card_kwh, unknown.pc_kwh, unknown.amount) == (None, None, None)
    assert unknown.seconds == cost(config(RUN), STEP).seconds
