"""How wide a terminal is, lines that go on below themselves, and what a terminal would obey."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.cli import main
from onecard.errors import UserError
from onecard.terminal import columns, console, folded, hanging, visible, write


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


# ---------------------------------------------------------------- what a terminal would obey

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Clears the screen, names the window, sounds, turns what follows, goes back to the line's start.
ODD = "\x1b[2J\x1b]0;x\x07\x9b31m\x7f\u202e\u2066\r"


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    assert visible("a\x1b[2J\x7f\x9b\u202eb\r\x00") == "a\\x1b[2J\\x7f\\x9b\\u202eb\\r\\x00"
    text = "tab\tline\nother line\r\nñ 漢🙂 👩‍👩‍👧 a\xa0b　c שלום"
    assert visible(text) == text.replace("\r\n", "\n")
    assert visible("a\tb\r\n\x1b[31m\u202eä\u200b\xa0 \\", exactly=True) == (
        "a\\tb\\r\n\\x1b[31m\\u202eä\\u200b\\xa0 \\"
    )


@given(st.text())
def test_nothing_obeyed_is_left_and_nothing_else_is_changed(text: str) -> None:
    assert not OBEYED.search(visible(text))
    if not OBEYED.search(text):
        assert visible(text) == text
    assert visible(visible(text)) == visible(text)


def test_an_error_is_one_line_that_obeys_nothing_and_its_reasons() -> None:
    error = UserError(f"cannot read a{ODD}\nhint: b", f"why {ODD}\nand why", f"do {ODD}\nor that")
    assert not OBEYED.search(str(error))
    lines = str(error).split("\n")
    assert [line[:6] for line in lines] == ["error:", "  why ", "  and ", "hint: ", "      "]
    assert lines[0].endswith("\\nhint: b")


def test_richs_console_keeps_its_colours_and_passes_on_no_others() -> None:
    rich_table = pytest.importorskip("rich.table")
    file = io.StringIO()
    screen = console(file, force_terminal=True, width=200, color_system="standard")
    table = rich_table.Table()
    table.add_column("name")
    table.add_row(ODD)
    for thing in (ODD, table):
        screen.print(thing, style="bold", markup=False)
    shown = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
    assert "\x1b[1m" in file.getvalue() and "\\x1b[2J" in shown and "\\x9b31m" in shown
    assert not OBEYED.search(shown)


def test_a_pipe_gets_a_part_of_a_line_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    write(ODD)
    assert capsys.readouterr().out == ODD


def test_no_command_passes_on_what_names_and_texts_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the text to the exported model, and errors on the way. Every name holds what a terminal obeys."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    name = "a\x1b[2J\x9b\u202eb\n"
    corpus = Path(f"corpus{name}")
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}{name}.txt").write_text(f"text {number} {ODD}" * 60, newline="")
    (corpus / f"{name}.gz").write_bytes(b"no gzip")
    (corpus / "out").symlink_to("/")
    Path(f"{name}.log").write_text(f"step {ODD} 1/10 loss 3\n")
    Path(f"{name}.py").write_text("n_layer = 1\nn_head = 1\nn_embd = 16\n")
    Path(f"wrong{name}.py").write_text(f"n_layer = 'a{name!r}'\nfoo(1)\n")
    run = f"run{name}"
    small = [
        f"{name}.py", "--dataset=d", f"--out_dir={run}", "--block_size=16", "--batch_size=4", "--device=cpu",
        "--gradient_accumulation_steps=1", "--max_iters=2", "--eval_interval=1", "--eval_iters=1",
        "--no-compile", "--sample_tokens=300",
    ]  # fmt: skip
    told = dict[str, str]()

    def does(code: int, verb: str, *words: str) -> None:
        assert main([verb, *words]) == code, capsys.readouterr()
        captured = capsys.readouterr()
        told[f"{verb} {len(told)}"] = captured.out + captured.err
        if "--json" in words:
            json.loads(captured.out)
        elif verb == "sample":
            captured = captured._replace(out="")  # the text itself, into a pipe
        odd = OBEYED.findall(captured.out + captured.err)
        assert not odd, (verb, words, captured)

    does(2, "prepare", str(corpus), "--name", "d")  # what is no gzip
    (corpus / f"{name}.gz").unlink()
    does(0, "prepare", str(corpus), "--name", "d", "--tokenizer", "byte")
    does(0, "prepare", str(corpus), "--name", "d", "--tokenizer", "byte")
    does(2, "prepare", str(corpus), "--name", "d", "--tokenizer", "gpt2")
    does(0, "prepare", str(corpus), "--name", "d", "--json", "--tokenizer", "byte")
    does(2, "prepare", str(corpus))
    does(2, "prepare", f"missing{name}")
    does(0, "prepare", "--check", "data/d")
    does(2, "prepare", "--check", f"missing{name}", "--name", "x")
    does(0, "train", *small)
    does(0, "train", *small, "--json", f"--out_dir=json{name}")
    does(2, "train", *small, f"--{name}=3")
    does(2, "train", f"wrong{name}.py")
    does(2, "train", f"--dataset=missing{name}", "--out_dir=x")
    does(0, "plan", *small, "--gpu=RTX 4070")
    does(2, "plan", f"--gpu={name}")
    does(0, "sample", f"--out_dir={run}", "--device=cpu", "--num_samples=2", "--max_new_tokens=20")
    does(2, "sample", f"--out_dir=missing{name}")
    does(0, "export", run, f"hf{name}")
    does(2, "export", run, f"hf{name}")
    does(2, "export", f"missing{name}", "x")
    does(1, "eta", f"{name}.log")
    does(2, "eta", f"missing{name}")
    does(0, "eta", run)
    does(2, "gpus", name)
    does(2, name)
    assert "\\x1b[2J" in told["prepare 0"] and "sample:" in told["train 9"]
    for path in (Path(run) / "log.txt", *(Path(run) / "samples").iterdir()):
        assert not OBEYED.search(path.read_text(encoding="utf-8"))


def test_errors_are_as_wide_as_the_terminal_and_what_is_pasted_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "onecard prepare fineweb --name fineweb-32k --tokens 1.4B --train-tokenizer 32768 --keep"
    error = UserError("what " * 30, "because " * 30 + "\nand", f"or else {'so ' * 40}\n{command}")
    assert len(str(error).splitlines()) == 5, "a pipe's lines stay as they are"
    lines = error.within(80).splitlines()
    assert all(len(line) <= 80 for line in lines if command not in line) and f"      {command}" in lines
    assert lines[1].startswith("       what ") and lines[3].startswith("  because ")
    assert str(error).split() == " ".join(lines).split()
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["plan", "--device=cpu"]) == 2
    assert capsys.readouterr().err.startswith("error: runs on a CPU cannot be\n       planned\n  plan knows")
