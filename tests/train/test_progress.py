from __future__ import annotations

import dataclasses
import io
import sys

import pytest

from onecard.train.progress import PlainDisplay, Status, TerminalDisplay, open_display


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """Called in the test itself: pytest puts its own stderr in place after the fixtures."""
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(TerminalDisplay, "REDRAW_SECONDS", 0.0)
    return screen


FULL = Status(
    step=120, last_step=1000, loss=3.21, val_loss=3.4, learning_rate=6e-4, tokens_per_second=12345.0,
    mfu=0.412, memory_gib=5.61, seconds_left=130,
)  # fmt: skip


def test_only_what_is_known_is_shown() -> None:
    assert Status().figures() == "lr 0.00e+00"
    assert FULL.figures() == "loss 3.2100  val 3.4000  lr 6.00e-04  12,345 tok/s  mfu 41.2%  mem 5.61 GiB"
    assert FULL.eta() == "eta 2m10s"
    assert Status().eta() == "eta ..."


def test_a_pipe_gets_nanogpts_lines_with_more_behind_them(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display(FULL)
    assert isinstance(display, PlainDisplay)
    with display:
        display.logged(FULL, 119, 0.5)
        display.evaluated(FULL, 3.1)
        display.inside("micro-batch", 1, 9)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("iter 119: loss 3.2100, time 500.00ms, mfu 41.20%, 12,345 tok/s")
    assert lines[1:] == ["step 120: train loss 3.1000, val loss 3.4000"]


def test_bits_per_byte_stand_behind_the_losses_on_pipe_and_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dataclasses.replace(FULL, val_bpb=1.23456)
    line = "step 120: train loss 3.1000, val loss 3.4000, val bpb 1.2346"
    with open_display(known) as display:
        display.evaluated(known, 3.1)
    assert capsys.readouterr().err == line + "\n"
    terminal = open_terminal(monkeypatch)
    with open_display(known) as display:
        display.evaluated(known, 3.1)
    assert line in terminal.getvalue()


def test_a_long_step_shows_life_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainDisplay, "INSIDE_SECONDS", -1.0)
    PlainDisplay().inside("micro-batch", 3, 32)
    assert capsys.readouterr().err == "  micro-batch 3/32\n"


def test_a_terminal_shows_bar_figures_and_progress_inside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    display = open_display(FULL)
    assert isinstance(display, TerminalDisplay)
    with display:
        display.say("note: hello [not markup]")
        display.logged(FULL, 119, 0.5)
        display.inside("micro-batch", 3, 32)
        display.evaluated(FULL, 3.1)
    shown = terminal.getvalue()
    for text in (
        "step 120/1,000", "eta 2m10s", "loss 3.2100", "mfu 41.2%", "micro-batch 3/32", "hello [not markup]",
        "step 120: train loss 3.1000, val loss 3.4000", "━",
    ):  # fmt: skip
        assert text in shown, text


def test_what_may_last_for_hours_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with open_display(FULL) as display:
        display.inside("evaluating, block", 8, 64)
        terminal.truncate(0)
        display.doing("paused")
        shown = terminal.getvalue()
        assert "paused" in shown and "evaluating" not in shown.split("paused")[-1]
        terminal.truncate(0)
        display.doing("")
        assert "paused" not in terminal.getvalue()


def test_a_terminal_that_is_gone_is_written_to_no_more_and_nothing_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = open_terminal(monkeypatch)

    def gone(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with open_display(FULL) as display:
        assert isinstance(display, TerminalDisplay)
        display.say("before")
        monkeypatch.setattr(screen, "write", gone)
        monkeypatch.setattr(screen, "flush", gone)
        display.say("after")
        display.evaluated(FULL, 3.1)
        display.logged(FULL, 119, 0.5)
        display.doing("pause")
    assert "before" in screen.getvalue() and "after" not in screen.getvalue()


class NarrowTerminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_without_the_bars_signs_gets_one_in_ascii(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_terminal(monkeypatch)
    written = io.BytesIO()
    # Strict: a sign that the encoding lacks would end the run.
    monkeypatch.setattr(sys, "stderr", NarrowTerminal(written, encoding=encoding, errors="strict"))
    monkeypatch.setenv("COLUMNS", "40")  # so narrow that the figures are cut
    with open_display(FULL) as display:
        display.logged(FULL, 119, 0.5)
        sys.stderr.flush()
        shown = written.getvalue().decode(encoding)
    assert "step 120/1,000" in shown and "---" in shown
    assert shown.isascii()


def test_the_block_under_the_bar_speaks_the_readers_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", "de")
    terminal = open_terminal(monkeypatch)
    with open_display(FULL) as display:
        display.logged(FULL, 119, 0.5)
        display.evaluated(FULL, 3.1)
    shown = terminal.getvalue()
    for text in ("Schritt 120/1.000", "12.345 Tok/s", "Speicher 5,61 GiB", "step 120: train loss 3.1000"):
        assert text in shown, text
