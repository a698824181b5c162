from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.config import RunConfig
from onecard.optim.schedule import learning_rate


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
