"""Steps that become slow: always noticed when they stay so, never for noise."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.hardware.machine import GIB, GpuProcess
from onecard.hardware.measured import Load
from onecard.train.other_processes import Look
from onecard.train.pace import SETTLING_STEPS
from onecard.train.speed_watch import IN_A_ROW, LOOK_SECONDS, MOST_REPORTS, SpeedWatch, Verdict

ROOMY = Look(4 * GIB, 12 * GIB)
FULL = Look(GIB // 10, 12 * GIB)
TRAINER = GpuProcess(4711, "python train.py", 5 * GIB)
SHARED = replace(ROOMY, others=(TRAINER, GpuProcess(900, "Xorg", None, draws=True)))
LONG = LOOK_SECONDS  # steps of this length are a look each


def feed(watch: SpeedWatch, seconds: Iterable[float], look: Look = ROOMY, steps: int = 1) -> list[Verdict]:
    """As the loop does: a verdict is asked for where the watch wants it."""
    return [
        verdict
        for took in seconds
        if watch.step_took(took, steps) and (verdict := watch.verdict(look)) is not None
    ]


def settled(spills: bool = False, steps: int = 30, first: Look | None = None) -> SpeedWatch:
    watch = SpeedWatch(spills, first)
    assert feed(watch, [50 * LONG] * SETTLING_STEPS + [LONG] * steps) == []
    return watch


# --- no false alarm ---------------------------------------------------------------------------------

seeds = st.integers(0, 2**32)


@given(seed=seeds, scale=st.floats(LONG / 0.6, 1000))
def test_noise_is_no_collapse(seed: int, scale: float) -> None:
    rng = random.Random(seed)
    assert feed(SpeedWatch(True), (scale * rng.uniform(0.6, 1.4) for _ in range(300)), FULL) == []


@given(
    noise=st.lists(st.floats(0.85, 1.15), min_size=30, max_size=120),
    spikes=st.dictionaries(st.integers(0, 60), st.floats(1.2, 1e6)),
)
def test_isolated_spikes_of_any_size_are_no_collapse(noise: list[float], spikes: dict[int, float]) -> None:
    """Every other step at most, wherever they are."""
    for where, factor in spikes.items():
        if 2 * where < len(noise):
            noise[2 * where] *= factor
    assert feed(SpeedWatch(True), (4 * LONG * part for part in noise), FULL) == []


@given(seed=seeds, share=st.floats(0.0, 0.08), size=st.floats(2, 1000))
def test_rare_spikes_at_random_on_top_of_noise_are_no_collapse(seed: int, share: float, size: float) -> None:
    rng = random.Random(seed)
    looks = (2 * LONG * rng.uniform(0.7, 1.3) * (size if rng.random() < share else 1) for _ in range(300))
    assert feed(SpeedWatch(True), looks, FULL) == []


@given(seed=seeds, slow=st.floats(2, 20), share=st.floats(0.2, 0.8))
def test_steps_that_are_fast_or_slow_by_nature_are_no_collapse(seed: int, slow: float, share: float) -> None:
    """After a while of both; nobody can know of the second kind before it was seen."""
    rng, watch = random.Random(seed), SpeedWatch(True)
    feed(watch, [LONG, slow * LONG] * 20)
    looks = (LONG * rng.uniform(1.0, 1.1) * (slow if rng.random() < share else 1) for _ in range(200))
    assert feed(watch, looks, FULL) == []


@given(change=st.floats(0.98, 1.01))
def test_a_speed_that_changes_little_by_little_is_no_collapse(change: float) -> None:
    assert feed(SpeedWatch(True), (1000 * LONG * change**i for i in range(300)), FULL) == []


@given(gone=st.integers(1, IN_A_ROW - 1), size=st.floats(2.5, 1000))
def test_a_short_disturbance_is_no_collapse(gone: int, size: float) -> None:
    watch = settled()
    assert feed(watch, ([LONG] * 30 + [size * LONG] * gone) * 5 + [LONG] * 30) == []


@given(part=st.floats(1.0, 1.75))
def test_what_is_not_nearly_twice_as_slow_becomes_usual(part: float) -> None:
    watch = settled()
    assert feed(watch, [part * LONG] * 100, SHARED) == []
    assert watch.usual == pytest.approx(part * LONG)


def test_many_short_steps_in_a_second_of_disturbance_are_one_look() -> None:
    watch = SpeedWatch(True)
    assert feed(watch, [0.02] * 20_000 + [0.2] * 20 + [0.02] * 2_000, FULL) == []


@pytest.mark.parametrize("steps", [1, SETTLING_STEPS, 100])
def test_steps_that_compile_do_not_count(steps: int) -> None:
    """A long look that holds them is left out as a whole; after it comes the pace."""
    watch = SpeedWatch(True)
    feed(watch, [1000.0], steps=steps)
    feed(watch, [LONG * steps] * 20, steps=steps)
    assert watch.usual == pytest.approx(LONG)


# --- no collapse missed -----------------------------------------------------------------------------


@given(
    before=st.lists(st.floats(0.85, 1.15), min_size=12, max_size=200),
    after=st.lists(st.floats(0.85, 1.15), min_size=IN_A_ROW, max_size=100),
    factor=st.floats(2.5, 50),
)
def test_a_lasting_slow_down_is_reported_as_soon_as_it_can_be_and_once(
    before: list[float], after: list[float], factor: float
) -> None:
    watch = SpeedWatch(True)
    assert feed(watch, [4 * LONG] * SETTLING_STEPS + [4 * LONG * part for part in before]) == []
    looks = [4 * LONG * factor * part for part in after]
    (reported,) = feed(watch, looks[:IN_A_ROW], FULL)
    assert reported.reason == "spilling"
    assert reported.now_seconds / reported.before_seconds >= 1.8
    assert feed(watch, looks[IN_A_ROW:], FULL) == []


@given(seed=seeds, factor=st.floats(3.5, 50))
def test_a_slow_down_is_reported_through_much_noise(seed: int, factor: float) -> None:
    rng, watch = random.Random(seed), SpeedWatch(False)
    assert feed(watch, (2 * LONG * rng.uniform(0.6, 1.4) for _ in range(70))) == []
    reported = feed(watch, (2 * LONG * factor * rng.uniform(0.6, 1.4) for _ in range(IN_A_ROW)))
    assert [verdict.reason for verdict in reported] == ["slow"]


@given(part=st.floats(1.85, 2.2))
def test_half_the_speed_is_noticed(part: float) -> None:
    """What two trainers on one card leave each other."""
    (reported,) = feed(settled(), [part * LONG] * 10, SHARED)
    assert reported.reason == "shared"


def test_a_collapse_of_short_steps_is_noticed() -> None:
    watch = SpeedWatch(True)
    assert feed(watch, [0.02] * 20_000) == []
    (reported,) = feed(watch, [0.2] * 200, FULL)
    assert reported.text.startswith("a step takes 200 ms instead of 20 ms: ")


# --- reported once, and once again when it is over -------------------------------------------------------


def test_the_speed_is_back() -> None:
    watch = settled()
    assert [v.reason for v in feed(watch, [3 * LONG] * 200)] == ["slow"]
    (back,) = feed(watch, [LONG] * 50)
    assert back.reason == "back"
    assert (back.before_seconds, back.now_seconds) == (LONG, LONG)
    assert [v.reason for v in feed(watch, [3 * LONG] * 50)] == ["slow"]  # the usual pace is still known


def test_what_gets_slow_a_second_time_is_reported_and_back_is_back_to_the_first() -> None:
    watch = settled(spills=True)
    assert [v.reason for v in feed(watch, [2 * LONG] * 40, SHARED)] == ["shared"]
    assert [v.reason for v in feed(watch, [20 * LONG] * 40, FULL)] == ["spilling"]
    assert feed(watch, [2 * LONG] * 40, SHARED) == []
    assert [v.reason for v in feed(watch, [LONG] * 40)] == ["back"]


def test_what_gets_slow_in_two_leaps_is_reported_with_the_last_one() -> None:
    """The first may be another trainer, the second the card that it has filled."""
    watch = settled(spills=True)
    first, second = feed(watch, [2 * LONG] * 3 + [20 * LONG] * 10, FULL)
    assert (first.now_seconds, second.now_seconds) == (2 * LONG, 20 * LONG)


def test_what_comes_and_goes_is_not_reported_forever() -> None:
    watch, reported = settled(spills=True), []
    for _ in range(MOST_REPORTS + 5):
        reported += feed(watch, [3 * LONG] * 10, SHARED) + feed(watch, [LONG] * 40)
    assert [verdict.reason for verdict in reported] == ["shared", "back"] * MOST_REPORTS
    assert ["not reported again" in verdict.text for verdict in reported].index(True) == 2 * MOST_REPORTS - 2
    assert [v.reason for v in feed(watch, [3 * LONG] * 10, FULL)] == ["spilling"]  # that is not only reported


def test_another_setting_has_another_pace() -> None:
    watch = settled()
    watch.reset()
    assert watch.usual is None
    assert feed(watch, [90 * LONG] * SETTLING_STEPS + [5 * LONG] * 100) == []
    assert watch.usual == pytest.approx(5 * LONG)


# --- why --------------------------------------------------------------------------------------------


def collapse(watch: SpeedWatch, look: Look) -> Verdict:
    (reported,) = feed(watch, [3 * LONG] * 10, look)
    return reported


def test_a_full_card_spills_only_where_the_driver_does() -> None:
    full = replace(SHARED, free_bytes=FULL.free_bytes)
    spilling = collapse(settled(spills=True), full)
    assert spilling.reason == "spilling"
    assert "9.00 s instead of 3.00 s: 0.10 GiB of the card are free" in spilling.text
    assert spilling.free_bytes == FULL.free_bytes
    assert collapse(settled(), full).reason == "shared"  # a trainer that fills its card is no news
    assert collapse(settled(spills=True), SHARED).reason == "shared"


def test_who_takes_a_part_of_the_speed_is_named() -> None:
    shared = collapse(settled(), SHARED)
    assert "python train.py (pid 4711) computes on the card too" in shared.text
    assert "Xorg" not in shared.text
    assert shared.pids == (4711,)


def test_heat_is_reported_with_what_was_measured() -> None:
    watch = settled()
    power = ("its power limit",)
    assert watch.notice(replace(ROOMY, load=Load(2610, temperature_c=70), held_back_by=power)) == []
    hot = replace(ROOMY, load=Load(900, temperature_c=88), held_back_by=(*power, "heat"))
    reported = collapse(watch, hot)
    assert reported.reason == "slow"
    assert (
        "its clock is 900 MHz, it was 2610; its temperature 88 °C; it is held back by heat" in reported.text
    )
    assert "power limit" not in reported.text  # that was so before


def test_the_card_while_it_is_slow_is_no_measure_of_well() -> None:
    watch = settled()
    watch.notice(replace(ROOMY, load=Load(2610)))
    collapse(watch, ROOMY)
    watch.notice(replace(ROOMY, load=Load(900)))
    (reported,) = feed(watch, [9 * LONG] * 40, replace(ROOMY, load=Load(300)))
    assert "its clock is 300 MHz, it was 2610" in reported.text


def test_where_the_driver_reports_nothing_the_times_are_reported() -> None:
    reported = collapse(settled(spills=True), Look())
    assert reported.reason == "slow"
    assert reported.text.startswith("a step takes 9.00 s instead of 3.00 s: no other process is seen")
    assert "None" not in reported.text


def test_unnamed_programs_are_a_possible_cause() -> None:
    assert "does not name hold 5.00 GiB" in collapse(settled(), replace(ROOMY, unnamed_bytes=5 * GIB)).text


# --- spilling from the start of a setting ------------------------------------------------------------


@pytest.mark.parametrize(
    ("spills", "look", "reasons"), [(True, FULL, ["spilling"]), (True, ROOMY, []), (False, FULL, [])]
)
def test_a_setting_that_is_slower_than_it_can_be_spills(spills: bool, look: Look, reasons: list[str]) -> None:
    watch = settled(spills)
    watch.reset(expected_seconds=watch.usual)
    assert [v.reason for v in feed(watch, [4 * LONG] * 60, look)] == reasons


def test_a_wrong_expectation_is_asked_about_once() -> None:
    watch = SpeedWatch(True)
    watch.reset(expected_seconds=LONG)
    asked = [watch.step_took(4 * LONG) and watch.verdict(ROOMY) is None for _ in range(60)]
    assert asked.count(True) == 1


# --- who comes later ---------------------------------------------------------------------------------


def test_a_program_that_begins_to_compute_is_reported_once() -> None:
    watch = SpeedWatch(False, first=Look(others=(GpuProcess(5, "python old.py", None),)))
    later = replace(SHARED, others=(*SHARED.others, GpuProcess(5, "python old.py", None)))
    (reported,) = watch.notice(later)
    assert "python train.py (pid 4711)" in reported
    assert watch.notice(later) == []


def test_whom_a_verdict_named_is_not_named_again() -> None:
    watch = settled()
    collapse(watch, SHARED)
    assert watch.notice(SHARED) == []
