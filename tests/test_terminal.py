"""How wide a terminal is, and lines that go on below themselves."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.cli import main
from onecard.terminal import columns, folded, hanging


@pytest.mark.parametrize(
    ("said", "wide"), [("80", 80), ("0", 33), ("", 33), ("many", 33), ("²", 33), ("9" * 5000, 33), ("-5", 33)]
)
def test_a_pipe_is_as_wide_as_is_said(said: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", said)
    assert columns(of_a_pipe=33) == wide


@pytest.mark.parametrize("said", ["²", "9" * 5000])
@pytest.mark.parametrize("words", [["gpus", "4070"], ["plan", "--gpu=RTX 4070"], ["eta", "--help"]])
def test_a_width_that_is_none_costs_no_command(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, said)
    assert main(words) == 0
    assert capsys.readouterr().out


def test_a_line_goes_on_below_itself() -> None:
    line = "  --offload   in host memory: none, optimizer or gradients"
    assert hanging(line, 40, 14) == [
        "  --offload   in host memory: none,",
        " " * 14 + "optimizer or gradients",
    ]
    assert hanging(line, 80, 14) == [line]


@given(st.lists(st.text("abc-=_", min_size=1, max_size=12), min_size=1, max_size=20), st.integers(30, 90))
def test_no_word_is_lost_or_broken(words: list[str], width: int) -> None:
    line = "  name  " + " ".join(words)
    shown = hanging(line, width, 8)
    assert " ".join(shown).split() == line.split()
    assert max(map(len, shown)) <= width


def test_what_is_said_at_the_end_is_folded_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "done at step 20\n  step 5: out of memory in training: going on with --batch_size=2"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert folded(text) == text
    monkeypatch.setenv("COLUMNS", "40")
    lines = folded(text).split("\n")
    assert lines[0] == "done at step 20" and len(lines) == 3 and max(map(len, lines)) <= 40
    assert lines[2].startswith("  ") and lines[2].strip() == "going on with --batch_size=2"
