"""Amounts as people read them, from a demo's to a month's."""

from __future__ import annotations

import pytest

from onecard.plan.amounts import duration, energy, file_size, kwh_cell, speed


@pytest.fixture(autouse=True)
def in_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", "en")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.004, "4 ms"), (0.4, "0.4 s"), (0.96, "1 s"), (18, "18 s"), (300, "5 min"), (23400, "6.5 h"),
     (20 * 86400, "20.0 days"), (5e10, "1,585 years")],
)  # fmt: skip
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(3.864, "9,000 tokens/s, 3.86 s a step"), (0.35, "9,000 tokens/s, 0.35 s a step"),
     (0.0332, "9,000 tokens/s, 33.2 ms a step"), (0.0004, "9,000 tokens/s, 0.4 ms a step")],
)  # fmt: skip
def test_a_short_step_is_told_in_milliseconds(seconds: float, told: str) -> None:
    assert speed(9000, seconds) == told


def test_little_energy_is_told_in_watt_hours() -> None:
    assert energy(1.21, 1.73, 80).startswith("1.2 kWh by the card, 1.7 by the whole PC (80 W")
    assert energy(0.0143, 0.0205, 80).startswith("14.3 Wh by the card, 20.5 by the whole PC (80 W")
    assert (kwh_cell(1.73), kwh_cell(0.0205), kwh_cell(1234.5)) == ("1.7", "0.0205", "1,234.5")


@pytest.mark.parametrize(
    ("count", "told"),
    [(6.29e9, "6.3 GB"), (0.49e9, "0.5 GB"), (3.07e6, "3.1 MB"), (0.43e6, "0.4 MB"), (24_000, "24.0 kB")],
)
def test_small_files_are_told_in_smaller_units(count: float, told: str) -> None:
    assert file_size(count) == told


@pytest.mark.parametrize("language", ["es", "de"])
def test_in_other_languages_with_their_comma(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    assert file_size(3.07e6) == "3,1 MB" and duration(0.4) == "0,4 s"
    assert "33,2 ms" in speed(9000, 0.0332) and "14,3 Wh" in energy(0.0143, 0.02, 80)
