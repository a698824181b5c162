"""The detectors' rates of false and missed alarms, on made-up logs. Real ones: benchmarks/alarms.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from onecard.report.curve.detectors import (
    DIVERGING,
    MEMORISING,
    NOT_A_NUMBER,
    STUCK,
    UNLEARNED,
    Alarm,
    Levels,
    Memorising,
    Watch,
    block_size,
    noise_of,
    watch_losses,
)
from tests.report.made_runs import VOCABULARY, curve, losses

LOGS = 30


def watch(values: list[float]) -> tuple[list[Alarm], Levels]:
    return watch_losses(range(len(values)), values, VOCABULARY)


def kinds(values: list[float]) -> list[str]:
    return [alarm.kind for alarm in watch(values)[0]]


def test_healthy_logs_raise_hardly_an_alarm() -> None:
    false = [kind for seed in range(LOGS) for kind in kinds(losses(seed))]
    assert false == []  # in 120,000 steps


def diverging(values: list[float], at: int, dice: random.Random) -> list[float]:
    height, length = dice.uniform(2.0, 6.0), dice.uniform(20, 600)
    return [loss + height * min(1.0, max(0.0, (i - at) / length)) for i, loss in enumerate(values)]


def stuck(values: list[float], at: int, dice: random.Random) -> list[float]:
    return [loss + max(0.0, curve(at) - curve(i)) for i, loss in enumerate(values)]


@pytest.mark.parametrize(
    ("change", "wanted", "between", "latest"),
    [
        (diverging, {DIVERGING}, (0.1, 0.8), lambda at: at + 700),
        (stuck, {STUCK, UNLEARNED}, (0.03, 0.2), lambda at: max(1300, 4.2 * at)),
    ],
    ids=["diverging", "stuck"],
)
def test_failures_are_found_with_their_step(
    change: Callable[..., list[float]],
    wanted: set[str],
    between: tuple[float, float],
    latest: Callable[[int], float],
) -> None:
    found = near = 0
    for seed in range(LOGS):
        dice = random.Random(1000 + seed)
        values = losses(seed)
        at = int(len(values) * dice.uniform(*between))
        alarms = watch(change(values, at, dice))[0]
        raised = [alarm for alarm in alarms if alarm.kind in wanted]
        if not raised:
            continue
        found += at <= raised[0].seen <= latest(at)
        near += abs(raised[0].began - at) <= max(150, 0.5 * at)
    assert found >= 0.95 * LOGS
    assert near >= 0.9 * LOGS


def test_memorising_is_found_and_noise_is_not() -> None:
    found = false = 0
    for seed in range(100):
        dice = random.Random(seed)
        turn, rise = dice.randrange(8, 25), dice.uniform(0.015, 0.08)
        healthy, turned = Memorising(), Memorising()
        raised = None
        for i in range(1, 41):
            step = 250 * i
            train, chance = curve(step) + dice.gauss(0, 0.02), dice.gauss(0, 0.004)
            val = curve(step) + 0.02 + chance
            false += healthy.add(step, train, val) is not None
            val = curve(250 * min(i, turn)) + 0.02 + rise * max(0, i - turn) + chance
            alarm = turned.add(step, train - 0.01 * max(0, i - turn), val)
            raised = raised or alarm
        found += raised is not None and raised.kind == MEMORISING and abs(raised.began - 250 * turn) <= 500
    assert false == 0
    assert found >= 95


def test_an_alarm_needs_nothing_that_comes_after_it() -> None:
    values = diverging(losses(3), 2000, random.Random(5))
    (alarm,) = watch(values)[0]
    (again,) = watch(values[: alarm.seen + 1])[0]
    assert again == alarm
    assert kinds(values[: alarm.seen - 20]) == []


def test_step_by_step_is_the_same_as_all_at_once() -> None:
    values = diverging(losses(8, 1500), 900, random.Random(6))
    values[700] = math.inf
    one_by_one = Watch(VOCABULARY)
    for step, loss in enumerate(values):
        one_by_one.add(step, loss)
    assert list(one_by_one.found) == [NOT_A_NUMBER, DIVERGING]
    assert list(one_by_one.found.values()) == watch(values)[0]


def test_a_model_that_learns_nothing() -> None:
    dice = random.Random(0)
    blind = [math.log(VOCABULARY) + dice.gauss(0, 0.02) for _ in range(600)]
    (alarm,) = watch(blind)[0]
    assert (alarm.kind, alarm.began) == (UNLEARNED, 0)
    assert alarm.seen <= 460
    # The frequent tokens and no more: 7.5 of 10.8.
    unigram = [max(7.5, 10.8 - 0.1 * i) + dice.gauss(0, 0.03) for i in range(1200)]
    (alarm,) = watch(unigram)[0]
    assert alarm.kind == UNLEARNED
    assert alarm.began < 120


def test_a_model_that_had_learned_before_may_stay_where_it_is() -> None:
    dice = random.Random(0)
    assert kinds([3.1 + dice.gauss(0, 0.05) for _ in range(3000)]) == []
    # A chat model's training: half a nat in the first hundred steps, and then hardly anything.
    values = [1.2 + 0.9 / (1 + i / 40) ** 2 + dice.gauss(0, 0.05) for i in range(3000)]
    assert watch_losses(range(len(values)), values)[0] == []
    assert kinds(values) == []


def test_not_a_number_is_said_with_its_step() -> None:
    values = losses(1, 300)
    values[120:] = [math.inf] * 180
    (alarm,) = watch(values)[0]
    assert (alarm.kind, alarm.began) == (NOT_A_NUMBER, 120)


def test_logs_of_every_tenth_or_hundredth_step_are_watched_too() -> None:
    values = losses(7, 20_000)
    for every in (10, 100):
        steps = range(0, len(values), every)
        seen = [values[step] for step in steps]
        assert watch_losses(steps, seen, VOCABULARY, block_size(steps))[0] == []
        risen = [values[step] + (4.0 if step > 12_000 else 0.0) for step in steps]
        (alarm,) = watch_losses(steps, risen, VOCABULARY, block_size(steps))[0]
        assert alarm.kind == DIVERGING
        assert 11_000 <= alarm.began <= 12_200


def test_noise_is_measured_about_a_curve() -> None:
    dice = random.Random(2)
    values = [curve(step) + dice.gauss(0, 0.05) for step in range(1000, 3000)]
    assert noise_of(values) == pytest.approx(0.05, rel=0.1)
    assert noise_of(values[:4]) == 0.0
