"""The law, on curves that a law made: what it finds, and how wide it is."""

from __future__ import annotations

import math
import random

import pytest

from onecard.report.forecast import plain
from onecard.report.forecast.law import evidence_of, posterior
from onecard.report.forecast.learnt import learnt, likeness
from onecard.report.forecast.predict import predict
from onecard.report.forecast.rates import Rates, Shape, table
from onecard.report.forecast.seen import noise_of, seen_of, smoothed_end, thinned

Points = list[tuple[float, float]]


def trapezoid(end: float, cool: float = 0.2, peak: float = 6e-4) -> Rates:
    made = table([(0, 0.0), (200, peak), (end * (1 - cool), peak), (end, 0.0)])
    assert made is not None
    return made


def curve(
    rates: Rates, end: float, *, gain: float = 0.18, alpha: float = 0.6, noise: float = 0.001
) -> Points:
    draw = random.Random(1)
    shape = Shape(0.4, 0.3, 20.0)
    return [
        (
            step,
            2.8
            + 0.25 * (rates.progress(step, 0.4) / 8000) ** -alpha
            - gain * rates.cooled(step, shape)
            + draw.gauss(0, noise),
        )
        for step in range(200, int(end) + 1, 100)
    ]


def until(points: Points, step: float) -> Points:
    return [point for point in points if point[0] <= step]


def test_a_cool_down_that_is_not_seen_is_forecast() -> None:
    rates = trapezoid(20_000)
    points = curve(rates, 20_000)
    found = predict(until(points, 10_000), rates, 20_000)
    truth = points[-1][1]
    assert abs(found.loss - truth) <= found.half <= 0.08
    by_power = plain.power_law(until(points, 10_000), rates, 20_000)
    # A power law does not know that the rate falls.
    assert by_power - truth > 0.08 > abs(found.loss - truth)


def test_the_range_narrows_as_the_run_goes_on() -> None:
    rates = trapezoid(20_000)
    points = curve(rates, 20_000)
    halves = [predict(until(points, seen), rates, 20_000).half for seen in (4000, 10_000, 19_000)]
    assert halves == sorted(halves, reverse=True) and halves[0] > 2 * halves[2]


def test_noise_makes_the_range_wider() -> None:
    rates = trapezoid(20_000)
    quiet, loud = (
        predict(until(curve(rates, 20_000, noise=noise), 10_000), rates, 20_000) for noise in (0.001, 0.08)
    )
    assert loud.half > 1.2 * quiet.half


def test_a_seen_cool_down_counts_more_than_what_is_usual() -> None:
    rates = trapezoid(20_000)
    for gain in (0.08, 0.4):
        points = curve(rates, 20_000, gain=gain)
        evidence = evidence_of(seen_of(points, rates), rates, rates, 20_000)
        assert posterior(evidence, math.log(0.18)).gain == pytest.approx(gain, rel=0.25)


def test_a_longer_run_is_forecast_from_a_finished_one() -> None:
    short, long = trapezoid(10_000), trapezoid(25_000)
    truth = curve(long, 25_000)[-1][1]
    found = predict(curve(short, 10_000), short, 25_000, long)
    assert abs(found.loss - truth) < 0.02


def test_few_points_are_enough_and_say_less() -> None:
    rates = trapezoid(20_000)
    points = curve(rates, 20_000)
    few = [point for point in points if point[0] in (500, 1000, 2000, 4000, 6000, 8000, 10_000)]
    found = predict(few, rates, 20_000)
    assert abs(found.loss - points[-1][1]) < 0.06
    assert found.half > predict(until(points, 10_000), rates, 20_000).half


def test_a_run_like_no_other_gets_the_law_alone() -> None:
    rates = trapezoid(20_000)
    points = [(step, loss * 0.2) for step, loss in curve(rates, 20_000)]
    found = predict(until(points, 10_000), rates, 20_000)
    assert found.nearest < 0.01 and found.loss == pytest.approx(found.law, abs=1e-3)


def test_what_was_learnt_is_like_itself() -> None:
    known = learnt()
    assert len(known.rows) == len(known.weights) > 500
    assert likeness(known.rows[0], known.rows[0]) == 1.0
    assert all(math.isfinite(number) for row in known.rows for number in row)


def test_noise_is_measured_and_a_trend_is_none() -> None:
    draw = random.Random(2)
    straight = [(float(n), 5 - 0.01 * n) for n in range(200)]
    assert noise_of(straight) < 1e-3
    assert noise_of([(s, y + draw.gauss(0, 0.05)) for s, y in straight]) == pytest.approx(0.05, rel=0.3)


def test_the_end_is_the_mean_of_the_last_points_and_of_more_where_they_are_noisy() -> None:
    points = [(float(n), 3.0 + (0.0 if n < 990 else 0.2)) for n in range(1, 1001)]
    assert smoothed_end(points, 0.001) == pytest.approx(3.0 + 0.2 * 11 / 21)
    assert smoothed_end(points, 0.5) < 3.03


def test_many_points_are_thinned_to_means() -> None:
    steps, losses, counts = thinned([(float(n), 1.0 / n) for n in range(1, 5001)])
    assert len(steps) <= 60 and sum(counts) == 5000 and losses == sorted(losses, reverse=True)
