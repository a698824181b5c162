"""Where a run will end, asked as the report asks: which curve, which cases, and when there is no answer."""

from __future__ import annotations

import math
import random
import time

import pytest

from onecard.report.findings import Forecast
from onecard.report.forecast import forecast_of
from onecard.report.forecast.outlook import AGAIN, COOLED, LONGER, STAYS
from onecard.report.log import Evaluations, Log, Planned, Steps
from onecard.report.run_facts import RunFacts, Schedule

COSINE = Schedule("cosine", 6e-4, 6e-5, 200, 10_000)


def falling(step: float) -> float:
    """As a small model's loss does while its rate follows COSINE."""
    done = max(step - 200, 0) / 9800
    return 3.0 + 5.5 / (1 + step / 60) ** 0.6 - 0.1 * 0.5 * (1 - math.cos(math.pi * done))


def log_of(last: int, every: int = 250, *, train: bool = False, **more: Planned) -> Log:
    draw = random.Random(3)
    at = [float(step) for step in range(0, last + 1, every)]
    val = Evaluations(step=at, val=[falling(step) + draw.gauss(0, 0.002) for step in at])
    often = [float(step) for step in range(0, last + 1, 10)] if train else []
    steps = Steps(step=often, loss=[falling(step) - 0.03 + draw.gauss(0, 0.02) for step in often])
    return Log("table", steps, val, **more)


def facts_of(
    log: Log, schedule: Schedule | None = COSINE, last_step: int | None = 10_000, **more: int
) -> RunFacts:
    return RunFacts(log, schedule=schedule, last_step=last_step, **more)


def cases(found: Forecast) -> list[tuple[int, str]]:
    return [(point.step, point.case) for point in found.points]


def test_the_end_of_the_schedule_comes_first_and_holds_the_truth() -> None:
    found = forecast_of(facts_of(log_of(5000), tokens_per_step=1000))
    first = found.points[0]
    assert (first.step, first.tokens, first.case) == (10_000, 10_000_000, "")
    assert first.low < falling(10_000) < first.high and first.high - first.low < 0.15
    assert first.low < first.loss < first.high < falling(5000)
    assert {"a power law", "the last value"} < set(dict(found.by_law))
    assert cases(found)[1:] == [(15_000, LONGER)]


def test_a_finished_run_ends_where_it_is_and_goes_on_in_two_ways() -> None:
    found = forecast_of(facts_of(log_of(10_000)))
    assert found.points[0].loss == pytest.approx(falling(10_000), abs=0.01)
    assert found.points[0].high - found.points[0].low < 0.02
    assert cases(found)[1:3] == [(15_000, AGAIN), (15_000, LONGER)]
    later = [point.loss for point in found.points if point.case == LONGER]
    assert later == sorted(later, reverse=True) and later[0] < found.points[0].loss


def test_an_unknown_schedule_has_two_wider_cases() -> None:
    found = forecast_of(facts_of(log_of(10_000), None, None))
    known = forecast_of(facts_of(log_of(10_000)))
    assert {case for _, case in cases(found)} == {AGAIN, LONGER}
    again, sure = (next(p for p in f.points if p.case == AGAIN) for f in (found, known))
    assert again.high - again.low > 1.3 * (sure.high - sure.low)
    assert any("assumes" in note for note in found.notes)


def test_a_constant_rate_may_stay_or_be_cooled() -> None:
    log = log_of(5000)
    rated = Evaluations(step=log.evaluations.step, val=log.evaluations.val, lr=[5e-4] * len(log.evaluations))
    found = forecast_of(facts_of(Log("table", Steps(), rated), None, 10_000))
    assert cases(found) == [(10_000, COOLED), (10_000, STAYS)]
    assert found.points[0].loss < found.points[1].loss


def test_rows_without_losses_say_how_the_schedule_goes_on() -> None:
    at = [6000.0, 8000.0, 10_000.0]
    log = log_of(5000)
    rated = Evaluations(step=log.evaluations.step, val=log.evaluations.val, lr=[5e-4] * len(log.evaluations))
    ends = {}
    for name, last in (("down", 0.0), ("flat", 5e-4)):
        planned = Planned(step=at, lr=[5e-4, 5e-4, last], tokens=[6e6, 8e6, 1e7])
        found = forecast_of(RunFacts(Log("table", Steps(), rated, planned=planned)))
        assert (found.points[0].step, found.points[0].tokens) == (10_000, 10_000_000)
        ends[name] = found.points[0].loss
    assert ends["down"] < ends["flat"] - 0.04


def test_a_default_schedule_is_said_and_makes_the_range_wider() -> None:
    assumed = Schedule("cosine", 6e-4, 6e-5, 200, 10_000, assumed=True)
    found, known = (forecast_of(facts_of(log_of(5000), s)) for s in (assumed, COSINE))
    assert any("default" in note for note in found.notes)
    assert found.points[0].high - found.points[0].low > 1.9 * (known.points[0].high - known.points[0].low)


def test_few_evaluations_borrow_the_shape_of_the_training_loss() -> None:
    log = log_of(5000, 1500, train=True)
    found = forecast_of(facts_of(log)).points[0]
    assert abs(found.loss - falling(10_000)) < 0.04


def test_the_training_loss_alone_is_named() -> None:
    log = Log("table", log_of(5000, train=True).steps, Evaluations())
    found = forecast_of(facts_of(log))
    assert found.points and any("training loss" in note for note in found.notes)


def test_eight_evaluations_of_a_finished_run_are_enough() -> None:
    at = [0.0, 500.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0]
    log = Log("table", Steps(), Evaluations(step=at, val=[falling(step) for step in at]))
    found = forecast_of(facts_of(log, None, None))
    assert not found.refused and len(found.points) == 6
    assert all(2.9 < point.low < point.loss < point.high < falling(6000) for point in found.points)


def test_data_read_many_times_is_said() -> None:
    found = forecast_of(facts_of(log_of(5000), tokens_per_step=1000, train_tokens=1_000_000))
    assert any("10.0 times" in note for note in found.notes)


# --- no forecast ----------------------------------------------------------------------------------------


def test_no_losses_no_forecast() -> None:
    assert "no loss" in forecast_of(facts_of(Log("table", Steps(), Evaluations()))).refused


def test_three_points_are_too_few() -> None:
    assert (
        "3 points" in forecast_of(facts_of(log_of(750))).refused or forecast_of(facts_of(log_of(750))).refused
    )


def test_the_first_twentieth_of_a_run_says_too_little() -> None:
    long = Schedule("cosine", 6e-4, 6e-5, 200, 100_000)
    assert "5% of the run" in forecast_of(facts_of(log_of(5000), long, 100_000)).refused


def test_a_validation_loss_that_rises_is_not_forecast() -> None:
    at = [250.0 * n for n in range(1, 21)]
    val = [3.5 + 0.4 * abs(step / 5000 - 0.4) + 3 * math.exp(-step / 300) for step in at]
    found = forecast_of(facts_of(Log("table", Steps(), Evaluations(step=at, val=val))))
    assert "has risen" in found.refused and not found.points


def test_a_loss_that_is_no_number_any_more_is_not_forecast() -> None:
    log = log_of(5000)
    broken = Evaluations(step=log.evaluations.step, val=[*log.evaluations.val[:-2], math.inf, math.inf])
    assert "no longer a number" in forecast_of(facts_of(Log("table", Steps(), broken))).refused


def test_losses_that_scatter_like_a_cloud_are_not_forecast() -> None:
    draw = random.Random(5)
    at = [250.0 * n for n in range(1, 21)]
    cloud = Evaluations(step=at, val=[3.5 + draw.gauss(0, 0.8) for _ in at])
    assert "scatter" in forecast_of(facts_of(Log("table", Steps(), cloud))).refused


def test_a_million_steps_take_a_moment() -> None:
    draw = random.Random(7)
    at = [float(step) for step in range(1, 200_001)]
    log = Log(
        "table", Steps(step=at, loss=[falling(s / 40) + draw.gauss(0, 0.05) for s in at]), Evaluations()
    )
    schedule = Schedule("cosine", 6e-4, 6e-5, 8000, 400_000)
    began = time.perf_counter()
    found = forecast_of(facts_of(log, schedule, 400_000))
    assert found.points and time.perf_counter() - began < 10
