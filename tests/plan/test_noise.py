"""The error of a loss, against logs whose every step has fresh text."""

from __future__ import annotations

import pytest

from onecard.plan.noise import sequences_for, standard_error


@pytest.mark.parametrize(("sequences", "scatter"), [(512, 0.033), (512, 0.040), (64, 0.095)])
def test_public_logs(sequences: int, scatter: float) -> None:
    assert standard_error(sequences) == pytest.approx(scatter, rel=0.2)


def test_four_times_the_text_halves_it() -> None:
    assert standard_error(400) == pytest.approx(standard_error(100) / 2)
    assert standard_error(100, vocabulary=65) < standard_error(100) < standard_error(100, 64)


@pytest.mark.parametrize("vocabulary", [None, 65])
def test_as_many_sequences_as_an_error_takes(vocabulary: int | None) -> None:
    needed = sequences_for(0.05, vocabulary=vocabulary)
    assert standard_error(needed, vocabulary=vocabulary) <= 0.05
    assert standard_error(needed - 1, vocabulary=vocabulary) > 0.05
