from __future__ import annotations

import pytest

from onecard.train.pace import SETTLING_STEPS, Pace, duration


def pace(last_step: int = 100, eval_interval: int = 50) -> Pace:
    return Pace(tokens_per_step=1000, eval_interval=eval_interval, last_step=last_step)


def test_compilation_in_the_first_steps_does_not_enter_the_estimate() -> None:
    p = pace()
    for seconds in (27.0, 5.0, 1.0):
        p.steps_took(seconds)
    assert SETTLING_STEPS == 3
    assert p.seconds_left(3) is None  # more than a guess, or nothing
    for _ in range(5):
        p.steps_took(0.5)
    assert p.tokens_per_second == 2000
    assert p.seconds_left(8) == pytest.approx(92 * 0.5)


def test_steps_are_counted_not_log_lines() -> None:
    p = pace()
    p.steps_took(27.0)
    p.steps_took(5.0, steps=10)
    p.steps_took(5.0, steps=10)
    assert p.seconds_left(21) == pytest.approx(79 * 0.5)


def test_one_slow_step_does_not_move_the_estimate() -> None:
    p = pace()
    for seconds in [1.0] * 3 + [0.5] * 10 + [30.0]:
        p.steps_took(seconds)
    assert p.step_seconds == 0.5


def test_evaluations_still_to_come_are_counted() -> None:
    p = pace(last_step=120, eval_interval=50)
    for _ in range(10):
        p.steps_took(1.0)
    p.evaluation_took(7.0)
    # From step 40: evaluations at 50, 100 and the closing one at 120.
    assert p.seconds_left(40) == pytest.approx(80 + 3 * 7)
    assert p.seconds_left(120) == pytest.approx(7)
    q = pace(last_step=100, eval_interval=50)
    for _ in range(10):
        q.steps_took(1.0)
    q.evaluation_took(7.0)
    assert q.seconds_left(60) == pytest.approx(40 + 7)


def test_several_steps_between_log_lines_are_averaged() -> None:
    p = pace()
    for _ in range(5):
        p.steps_took(4.0, steps=8)
    assert p.step_seconds == 0.5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (60, "1m00s"), (247, "4m07s"), (7500, "2h05m"), (90_000, "1d01h"), (-3, "0s")],
)
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_machine_that_has_more_to_do_now_is_noticed_after_two_lines() -> None:
    pace = Pace(tokens_per_step=1000, eval_interval=10**6, last_step=10**6)
    for _ in range(20):
        pace.steps_took(1.0)
    pace.steps_took(9.0)
    assert pace.tokens_per_second == 1000.0, "once is an outlier"
    pace.steps_took(10.0)
    assert pace.tokens_per_second == pytest.approx(1000 / 9.5)
    for seconds in (9.8, 9.6, 9.7):
        pace.steps_took(seconds)
    assert pace.tokens_per_second == pytest.approx(1000 / 9.7)
    pace.steps_took(1.0)
    pace.steps_took(1.1)
    assert pace.tokens_per_second == pytest.approx(1000 / 1.05), "and back again"
    for seconds in (1.2, 1.3, 1.0, 1.4):
        pace.steps_took(seconds)
    assert 1000 / 1.4 < pace.tokens_per_second < 1000, "small changes are averaged"


# --- with a prediction ----------------------------------------------------------------------------


def predicted(seconds: float = 2.0) -> Pace:
    return Pace(tokens_per_step=1000, eval_interval=1000, last_step=1000, predicted_seconds=seconds)


def test_the_first_estimate_is_the_prediction() -> None:
    p = predicted(2.0)
    assert p.seconds_left(0) == pytest.approx(2000 + 0)
    p.steps_took(27.0)  # compiles: no measurement
    assert p.seconds_left(1) == pytest.approx(999 * 2)


def test_each_measured_step_moves_it_and_at_last_only_they_count() -> None:
    p, left = predicted(2.0), []
    for _ in range(SETTLING_STEPS):
        p.steps_took(27.0)
    for _ in range(500):
        p.steps_took(1.0)
        left.append(p.seconds_left(0) or 0.0)
    assert left == sorted(left, reverse=True)
    assert 1500 < left[0] < 2000  # one step does not outweigh the prediction
    assert left[-1] == pytest.approx(1000, rel=0.02)


def test_steps_that_no_log_line_has_yet_count_too() -> None:
    p = predicted(2.0)
    p.steps_took(27.0, steps=SETTLING_STEPS)
    p.steps_took(1.0)
    before, with_them = p.seconds_left(4), p.seconds_left(4, (40, 40.0))
    assert before is not None and with_them is not None
    assert 996 <= with_them < before


def test_another_setting_begins_with_its_own_prediction() -> None:
    p = predicted(2.0)
    for _ in range(50):
        p.steps_took(1.0)
    p.changed(3.0)
    assert p.seconds_left(100) == pytest.approx(900 * 3)
    p.changed()
    assert p.seconds_left(100) is None
