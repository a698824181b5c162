"""Rates by step: areas, progress and falls, of tables and of schedules."""

from __future__ import annotations

import pytest

from onecard.report.forecast.rates import NODES, Rates, Shape, table
from onecard.report.forecast.rates_of_run import (
    cooled,
    cosine,
    course_of,
    going_on,
    past_of,
    restarted,
    stretched,
)
from onecard.report.log import Evaluations, Log, Planned, Steps
from onecard.report.run_facts import RunFacts, Schedule

SHAPE = Shape(0.4, 0.3, 20.0)


def rates(*rows: tuple[float, float]) -> Rates:
    made = table(rows)
    assert made is not None
    return made


def facts(schedule: Schedule | None = None, last_step: int | None = None, **columns: list[float]) -> RunFacts:
    steps = Steps(step=[100.0 * n for n in range(1, 31)], loss=[4.0] * 30, **columns)
    return RunFacts(Log("table", steps, Evaluations()), schedule=schedule, last_step=last_step)


def test_the_area_of_a_trapezoid() -> None:
    trapezoid = rates((0, 0.0), (100, 2.0), (900, 2.0), (1000, 0.0))
    assert trapezoid.peak == 2.0 and trapezoid.warm_at == 100
    assert trapezoid.area(1000) == pytest.approx(50 + 800 + 50)
    assert trapezoid.area(950) == pytest.approx(50 + 800 + 37.5)
    assert trapezoid.area(1200) == pytest.approx(900)


def test_progress_is_the_sum_of_a_power_of_the_rate() -> None:
    falling = rates((0, 1.0), (500, 1.0), (1500, 0.0))
    by_hand = 500 + sum((1 - (n + 0.5) / 1000) ** 0.4 for n in range(1000))
    assert falling.progress(1500, 0.4) == pytest.approx(by_hand, rel=1e-3)
    assert falling.progress(1500, 1.0) == pytest.approx(falling.area(1500), rel=1e-3)


def test_a_fall_shows_little_by_little_and_a_warm_up_is_none() -> None:
    step_down = rates((0, 0.0), (100, 1.0), (999, 1.0), (1000, 0.5), (9000, 0.5))
    shown = [step_down.cooled(step, SHAPE) for step in (500, 999, 1010, 1500, 9000)]
    assert shown[:2] == [0.0, 0.0]
    assert 0 < shown[2] < shown[3] < shown[4] < 0.5


def test_a_table_forgets_what_lies_on_a_line_and_keeps_the_corners() -> None:
    straight = rates(*((step, 1.0 if step < 800 else (1000 - step) / 200) for step in range(1001)))
    assert len(straight.steps) <= 4
    assert straight.at(900) == pytest.approx(0.5) and straight.at(799) == pytest.approx(1.0, abs=0.01)
    curved = rates(*((step, 1 / (1 + step)) for step in range(5000)))
    assert len(curved.steps) == NODES and curved.steps[-1] == 4999


@pytest.mark.parametrize("rows", [[], [(0, 0.0), (5, 0.0)], [(0, float("nan"))]])
def test_no_rate_no_table(rows: list[tuple[float, float]]) -> None:
    assert table(rows) is None


def test_a_schedule_gives_the_rates_still_to_come() -> None:
    wsd = Schedule("wsd", 1e-3, 0.0, 100, 10_000, decay_start=8000)
    course = course_of(facts(wsd, 10_000))
    assert course is not None and course.end == 10_000 and course.known
    assert course.rates.at(5000) == pytest.approx(1e-3)
    assert course.rates.at(9000) == pytest.approx(5e-4)
    assert course.rates.at(10_000) == pytest.approx(0.0, abs=1e-9)
    assert course_of(facts(Schedule("cosine", 1e-3, 1e-4, 100, None), None)) is None


def test_rows_without_losses_are_the_schedule() -> None:
    seen = facts(lr=[1e-3] * 30)
    planned = Planned(step=[4000.0, 5000.0], lr=[1e-3, 0.0], tokens=[1.0, 2.0])
    log = Log("table", seen.log.steps, Evaluations(), planned=planned)
    course = course_of(RunFacts(log))
    assert course is not None and course.end == 5000
    assert course.rates.at(4500) == pytest.approx(5e-4)


def test_the_rates_of_the_past_are_the_logs() -> None:
    assert past_of(facts()) is None
    past = past_of(facts(lr=[5e-4] * 30))
    assert past is not None and past.at(2000) == pytest.approx(5e-4)
    assert going_on(past, 3000, 6000).at(6000) == pytest.approx(5e-4)
    down = cooled(past, 3000, 6000)
    assert down.at(4800) == pytest.approx(5e-4) and down.at(5400) == pytest.approx(2.5e-4)


def test_a_longer_run_keeps_its_warm_up_and_a_restart_begins_anew() -> None:
    short = rates((0, 0.0), (100, 1.0), (800, 1.0), (1000, 0.0))
    longer = stretched(short, 1000, 1900)
    assert longer.warm_at == 100 and longer.steps[-1] == 1900
    assert longer.at(1500) == pytest.approx(1.0) and longer.at(1700) == pytest.approx(0.5)
    again = restarted(short, 1000, 2000)
    assert again.at(999) < 0.01 and again.at(1500) == pytest.approx(1.0) and again.at(2000) < 0.01
    assert cosine(1000).at(1000) == pytest.approx(0.1, abs=1e-3)
