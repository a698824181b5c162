"""A report in a terminal: one screen, whatever its width, its encoding and the reader's language."""

from __future__ import annotations

import math
from itertools import pairwise

import made_reports as made
import pytest

from onecard.report.answer import Report
from onecard.report.findings import ForecastPoint
from onecard.report.pages.drawing import Segments, Signs, drawn, signs_for
from onecard.report.pages.plotting import Curves
from onecard.report.pages.show import LINES, first_screen, whole

BRAILLE, ASCII = Signs(True), Signs(False)


def text_of(lines: list[Segments]) -> list[str]:
    return ["".join(text for text, _style in line) for line in lines]


@pytest.mark.parametrize("language", ["en", "es", "de"])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", made.EVERY)
def test_the_first_screen_is_one_screen(
    name: str, width: int, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    shown = text_of(first_screen(made.EVERY[name](), width, BRAILLE))
    assert 12 <= len(shown) <= LINES
    # What is to be pasted is never broken, and may be longer.
    assert [line for line in shown if len(line) > width and not line.startswith("    ")] == []


def test_the_first_screen_has_the_verdict_first_then_the_curve_then_reasons_and_what_to_do() -> None:
    shown = text_of(first_screen(made.wrong(), 80, BRAILLE))
    assert shown[0] == "Healthy, but: A model of 117M was meant, one of 54M was built."
    at = {
        word: next(n for n, line in enumerate(shown) if word in line) for word in ("└", "+ ", "speed", "> ")
    }
    assert list(at.values()) == sorted(at.values())
    assert "    dataset = 'fineweb-edu'" in shown
    assert shown[-1].startswith("More: onecard report train.log --full")


def test_the_verdicts_own_reason_is_not_said_twice() -> None:
    assert sum("117M" in line for line in text_of(first_screen(made.wrong(), 80, BRAILLE))) == 1


def test_full_has_all_that_is_known() -> None:
    shown = "\n".join(text_of(whole(made.wrong(), 100, BRAILLE)))
    for words in (
        "n_embd = 768   # was 512", "the file is called 117m", "about 0.2 nats", "Bridged from other text",
        "onecard train --init_from=nanogpt:out", "longer from the start", "3.24 – 3.33", "the config",
        "an evaluation line is cut", "perplexity", "a river that nobody had named", "60,100 tokens/s",
    ):  # fmt: skip
        if words != "Bridged from other text":
            assert words in shown, words
    assert "Bridged from other text." in "\n".join(text_of(whole(made.report(), 100, BRAILLE)))


def test_an_encoding_without_braille_gets_ascii() -> None:
    assert signs_for("utf-8").braille
    for encoding in ("ascii", "cp1252", "latin-1", None, "no such encoding"):
        assert not signs_for(encoding).braille
    curve = text_of(drawn(Curves((), [(s, made.falling(s)) for s in range(0, 6001, 500)]), 80, 9, ASCII))
    assert all(line.isascii() for line in curve)
    assert any("*" in line for line in curve)


def rows_of(curve: list[str], sign: str = "*") -> dict[int, list[int]]:
    """Of each column of characters the rows that have the sign, 0 at the top."""
    found: dict[int, list[int]] = {}
    for row, line in enumerate(curve[:-2]):
        for at, each in enumerate(line):
            if each == sign:
                found.setdefault(at, []).append(row)
    return found


def test_a_falling_curve_falls_without_gaps() -> None:
    curve = text_of(drawn(Curves((), [(s, made.falling(s)) for s in range(0, 6001, 50)]), 80, 12, ASCII))
    rows = rows_of(curve)
    columns = sorted(rows)
    assert columns == list(range(columns[0], columns[-1] + 1))
    assert all(max(rows[a]) <= max(rows[b]) for a, b in pairwise(columns))


def test_a_spike_is_seen_however_many_steps_there_are() -> None:
    pairs = [(s, 3.0 + 0.001 * (s % 3)) for s in range(100_000)]
    pairs[61_234] = (61_234, 3.6)
    curve = text_of(drawn(Curves(pairs, ()), 80, 12, ASCII))
    assert [line for line in curve[:3] if "." in line.split("|")[-1].split("+")[-1]]


def test_the_forecast_is_drawn_where_the_curve_ends() -> None:
    curves = Curves(
        (), [(s, made.falling(s)) for s in range(0, 6001, 500)], (ForecastPoint(9000, None, 3.3, 3.2, 3.4),)
    )
    curve = text_of(drawn(curves, 80, 12, ASCII))
    expected = sorted(rows_of(curve, ":"))
    assert min(expected) >= max(rows_of(curve))
    assert max(expected) >= 77


def test_new_starts_and_alarms_are_on_the_axis() -> None:
    pairs = [(s, made.falling(s)) for s in range(0, 6001, 500)]
    axis = text_of(drawn(Curves((), pairs, starts=(3000.0,), marks=(4500.0,)), 83, 9, ASCII))[-2]
    inside = axis.partition("+")[2]
    assert abs(inside.index("^") / len(inside) - 0.5) < 0.02
    assert abs(inside.index("!") / len(inside) - 0.75) < 0.02


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(0, 5.0)],
        [(7, 5.0), (7, 5.0)],
        [(0, math.inf), (1, math.inf)],
        [(0, 3.0), (10, 3.0)],
        [(0, 1e300), (1, -1e300)],
    ],
)
def test_no_curve_is_too_odd_to_be_drawn(pairs: list[tuple[float, float]], log_x: bool) -> None:
    for curves in (Curves(pairs, ()), Curves((), pairs), Curves(pairs, pairs)):
        for signs in (BRAILLE, ASCII):
            assert len(drawn(curves, 60, 8, signs, log_x=log_x)) == 8


def test_a_narrow_terminal_is_no_error() -> None:
    for width in (20, 33, 50):
        made_report: Report = made.wrong()
        assert text_of(first_screen(made_report, width, ASCII))
