from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.optim.schedule import extended_from, learning_rate, peak_rate, rates, shown_rate, trapezoid


def config(**values: float) -> RunConfig:
    return RunConfig(
        **{"warmup_iters": 10, "lr_decay_iters": 110, "learning_rate": 1e-3, "min_lr": 1e-4, **values}
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1e-3 / 11),  # never zero: the first step must learn something
        (9, 1e-3 * 10 / 11),
        (10, 1e-3),
        (60, 1e-4 + 0.5 * 9e-4),
        (35, 1e-4 + 0.5 * (1 + math.cos(math.pi / 4)) * 9e-4),
        (110, 1e-4),
        (10_000, 1e-4),
    ],
)
def test_the_rate_is_nanogpts(step: int, expected: float) -> None:
    assert learning_rate(step, config()) == pytest.approx(expected, rel=1e-12)


def test_a_warm_up_that_outlasts_the_decay_ends_at_the_lowest_rate() -> None:
    c = config(warmup_iters=200, lr_decay_iters=110)
    assert learning_rate(199, c) == pytest.approx(1e-3 * 200 / 201)
    assert learning_rate(200, c) == learning_rate(110 + 200, c) == 1e-4


def test_without_decay_the_rate_is_constant() -> None:
    assert {learning_rate(step, config(decay_lr=False)) for step in (0, 5, 50, 5000)} == {1e-3}


@given(warmup=st.integers(0, 50), decay=st.integers(51, 500), step=st.integers(0, 600))
def test_it_rises_then_falls_and_stays_between_its_bounds(warmup: int, decay: int, step: int) -> None:
    c = config(warmup_iters=warmup, lr_decay_iters=decay)
    now, then = learning_rate(step, c), learning_rate(step + 1, c)
    assert 0 < now <= 1e-3 * (1 + 1e-12)
    if step >= warmup:
        assert now >= 1e-4 * (1 - 1e-12)
        assert then <= now
    elif step + 1 < warmup:
        assert then > now


def nanochat(generation: int, *more: str) -> RunConfig:
    return load_config(RunConfig, ["--depth=12", f"--generation={generation}", "--max_iters=1000", *more])


def test_nanochats_rate_is_level_and_then_falls() -> None:
    old, new = nanochat(2025), nanochat(2026)
    assert [trapezoid(s, old) for s in (0, 799, 800, 900, 1000)] == [1.0, 1.0, 1.0, 0.5, 0.0]
    assert trapezoid(0, new) == 1 / 40
    assert trapezoid(39, new) == trapezoid(350, new) == 1.0
    assert trapezoid(675, new) == pytest.approx(0.5 + 0.5 * 0.05)
    assert trapezoid(1000, new) == trapezoid(2000, new) == pytest.approx(0.05)
    assert trapezoid(999, nanochat(2025, "--decay_lr=False")) == 1.0
    assert shown_rate(900, old) == pytest.approx(0.01)


def test_muons_momentum_and_decay() -> None:
    old, new = nanochat(2025), nanochat(2026)
    assert [rates(s, old).momentum for s in (0, 150, 300, 999)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert [rates(s, new).momentum for s in (0, 200, 400, 1000)] == pytest.approx(
        [0.85, 0.91, 0.9646, 0.90], abs=1e-4
    )
    assert [rates(s, new).decay for s in (0, 500, 1000)] == pytest.approx([1.0, 0.5, 0.0])
    assert rates(7, old).decay == 1.0


def test_gpt2_by_muon_keeps_the_cosine() -> None:
    plain = load_config(RunConfig, ["--max_iters=100", "--lr_decay_iters=100", "--warmup_iters=10"])
    muon = load_config(
        RunConfig, ["--max_iters=100", "--lr_decay_iters=100", "--warmup_iters=10", "--optimizer=muon"]
    )
    for step in (0, 5, 10, 60, 100):
        assert rates(step, muon).lr * 6e-4 == pytest.approx(rates(step, plain).lr)


# --- a run made longer ----------------------------------------------------------------------------


def longer(before: RunConfig, step: int, **values: object) -> RunConfig:
    return extended_from(before, step, dataclasses.replace(before, **{"max_iters": 2000, **values}))  # type: ignore[arg-type]


ONES = [
    config(max_iters=1000, lr_decay_iters=1000),
    load_config(
        RunConfig, ["--max_iters=1000", "--lr_decay_iters=1000", "--warmup_iters=99", "--optimizer=muon"]
    ),
    nanochat(2025),
    nanochat(2026),
]
WAYS = ["stay", "rewarm", "decay", "schedule"]


@given(before=st.sampled_from(ONES), way=st.sampled_from(WAYS), again=st.sampled_from(WAYS), at=st.data())
def test_an_extension_changes_no_step_that_is_done(
    before: RunConfig, way: str, again: str, at: st.DataObject
) -> None:
    """Nor does an extension of an extension; and no rate is below nothing or above the peak."""
    peak = peak_rate(before)
    first = at.draw(st.integers(1, 1000))
    once = longer(before, first, extend=way, extend_lr=peak if way == "rewarm" else None)
    second = at.draw(st.integers(first, 2000))
    twice = longer(once, second, extend=again, extend_lr=peak if again == "rewarm" else None, max_iters=3000)
    for step in at.draw(st.lists(st.integers(0, 3100), max_size=20)):
        if step < first:
            assert rates(step, twice) == rates(step, once) == rates(step, before)
        elif step < second:
            assert rates(step, twice) == rates(step, once)
        found = rates(step, twice)
        assert (
            0
            <= shown_rate(step, twice)
            <= max(peak, shown_rate(50, before), before.learning_rate) * (1 + 1e-9)
        )
        assert 0.85 <= found.momentum <= 0.97 and 0 <= found.decay <= 1


def test_staying_keeps_momentum_and_weight_decay_of_the_last_step() -> None:
    for before in ONES:
        stays = longer(before, 1000, extend="stay")
        assert {rates(step, stays) for step in (1000, 1500, 1999)} == {rates(999, before)}
    # What rises at the beginning of a run, however long it is, goes on rising.
    early = longer(nanochat(2026), 100, extend="stay")
    assert [rates(s, early).momentum for s in (99, 200, 500)] == pytest.approx([0.8797, 0.91, 0.97])


def test_a_rewarm_is_a_new_cycle_of_all_three() -> None:
    # Nor does it fall back after a rewarm that had brought it higher.
    warm = longer(nanochat(2026), 50, extend="rewarm", extend_lr=1.0, max_iters=100)
    level = longer(warm, 100, extend="stay", max_iters=300)
    assert rates(100, level).momentum >= rates(99, warm).momentum > rates(100, nanochat(2026)).momentum
    new = longer(nanochat(2026), 1000, extend="rewarm", extend_lr=shown_rate(100, nanochat(2026)) / 2)
    before = rates(999, nanochat(2026))
    peak = rates(1099, new)
    assert (peak.lr, peak.momentum, peak.decay) == pytest.approx((0.5, 0.97, 1.0))
    halfway = rates(1049, new)
    for name in ("lr", "momentum", "decay"):
        assert getattr(halfway, name) == pytest.approx((getattr(before, name) + getattr(peak, name)) / 2)
    assert rates(1300, new).lr == 0.5  # level until the last 65% of the thousand steps
    assert rates(1675, new).lr == pytest.approx((0.5 + 0.05) / 2)
    assert (rates(2000, new).lr, rates(2000, new).momentum, rates(2000, new).decay) == pytest.approx(
        (0.05, 0.9, 0)
    )


def test_a_decay_takes_weight_decay_and_momentum_along() -> None:
    before = nanochat(2026, "--warmdown_ratio=0.5")
    early = longer(before, 450, extend="decay")
    assert rates(1200, early) == rates(449, before)
    last, half, end = rates(449, before), rates(2000 - 388, early), rates(2000, early)
    assert (half.lr, half.decay) == pytest.approx((last.lr / 2, last.decay / 2), rel=2e-3)
    assert half.momentum == pytest.approx((0.97 + 0.90) / 2, rel=1e-3)
    assert (end.lr, end.decay, end.momentum) == pytest.approx((0, 0, 0.9))
