from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.config import RunConfig
from onecard.knobs import load_config
from onecard.optim.schedule import learning_rate, rates, shown_rate, trapezoid


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
