"""What a card's name, a limit and a price say, where they say more than there is."""

from __future__ import annotations

import pytest

from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.plan.amounts import price_text
from onecard.plan.lines import GIB
from onecard.plan.machine import Figures, find_target

OWN = Figures(tflops=30.0, bandwidth=500.0)


@pytest.fixture(autouse=True)
def no_records(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("digits", [5, 20, 400])
def test_a_name_with_more_memory_than_any_card_is_refused(
    digits: int, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"X {'9' * digits}GB"
    assert main(["plan", f"--gpu={name}", "--tflops=30", "--bandwidth=500", "--max_iters=10"]) == 2
    error = capsys.readouterr().err
    assert "error: no card has as much memory" in error and "10,000 GB" in error
    assert max(map(len, error.splitlines())) < 110


def test_the_largest_memory_that_is_allowed_can_be_planned_for() -> None:
    config = load_config(RunConfig, [])
    assert find_target(config, "X 10000GB", figures=OWN).capacity == int(10_000 * 0.985 * GIB)
    limited = load_config(RunConfig, ["--vram_limit=10000"])
    assert find_target(limited, "X", figures=OWN).capacity / GIB == pytest.approx(10_000)


@pytest.mark.parametrize(("limit", "beyond"), [(24, True), (12, False), (11.8, False), (4, False)])
def test_a_limit_beyond_the_card_is_known(limit: float, beyond: bool) -> None:
    target = find_target(load_config(RunConfig, [f"--vram_limit={limit}"]), "RTX 4070")
    assert target.limit_beyond_card is beyond
    assert target.limit == int(limit * GIB) and target.allowed == min(target.limit, target.capacity)


@pytest.mark.parametrize("limit", [0.1, 1.1, 7.77, 11.99, 12, 24, 79.3, 9999.9])
def test_a_limit_that_is_the_cards_own_size_is_not_beyond_it(limit: float) -> None:
    """Of a card that is not listed the limit says how much memory it has."""
    target = find_target(load_config(RunConfig, [f"--vram_limit={limit}"]), "X", figures=OWN)
    assert not target.limit_beyond_card


def test_without_a_limit_none_is_beyond() -> None:
    target = find_target(load_config(RunConfig, []), "RTX 4070")
    assert target.limit is None and not target.limit_beyond_card


@pytest.mark.parametrize(
    ("price", "told"),
    [(0.30, "0.30"), (0.004, "0.004"), (0.2849, "0.2849"), (0.0, "0.00"), (-0.0, "0.00"), (2, "2.00"),
     (1234.5, "1,234.50"), (0.1 + 0.2, "0.30"), (1 / 3, "0.3333"), (0.00001, "0.00001"), (1e-9, "1e-09"),
     (1.5e-300, "1.5e-300")],
)  # fmt: skip
def test_a_price_has_as_many_digits_as_it_takes(price: float, told: str) -> None:
    assert price_text(price) == told


def test_a_price_has_the_languages_comma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", "de")
    assert price_text(0.004) == "0,004" and price_text(1234.5) == "1.234,50"
