"""`onecard report` from the command line: real logs, and what is none."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import made_reports as made
import pytest

from onecard.cli import main
from onecard.report.gathering.inputs import pasted_sample
from onecard.terminal import columns

HEAD = "tokens per iteration will be: 262,144\nnumber of parameters: 53.51M\n"


def lines_of(last: int = 6000, *, every: int = 500, better: float = 0.0) -> str:
    lines = []
    for step in range(0, last + 1, 10):
        loss = made.falling(step) - better + 0.02 * ((step * 7919) % 11 - 5) / 5
        if step % every == 0:
            lines.append(f"step {step}: train loss {loss:.4f}, val loss {loss + 0.02:.4f}")
        lines.append(f"iter {step}: loss {loss:.4f}, time {4360 + step % 7:.2f}ms, mfu {11.5:.2f}%")
    return HEAD + "\n".join(lines) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> str:
    (tmp_path / "train.log").write_text(lines_of())
    return str(tmp_path / "train.log")


def test_a_log_gets_its_verdict_on_one_screen(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", log, "--gpu", "RTX 4070"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("Healthy")
    assert 12 <= len(shown) <= 20
    assert max(map(len, (line for line in shown if not line.startswith("    ")))) <= columns(80)


def test_a_paste_is_read_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines_of().encode())))
    assert main(["report", "-", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 6000
    assert found["loss"]["value"] == pytest.approx(made.falling(6000) + 0.02, abs=0.03)


def test_all_forms_of_one_report(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.html"
    assert main(["report", log, "--html", str(target), "--markdown"]) == 0
    assert "| step |" in capsys.readouterr().out
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main(["report", log, "--full", "--log-x"]) == 0
    assert "What is known of the run" in capsys.readouterr().out


def test_two_runs_are_compared(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "better.log").write_text(lines_of(better=0.2))
    assert main(["report", log, str(tmp_path / "better.log"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["by"][0]["best"] == "better.log"
    assert found["by"][0]["beyond_noise"]


LOGS = sorted(
    path for path in (Path(__file__).parent / "logs").glob("*") if path.is_file() and path.suffix != ".toml"
)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_every_kind_of_log_gets_a_report_or_a_sentence(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["report", str(path), "--gpu", "RTX 4070"])
    printed = capsys.readouterr()
    if printed.out:
        lines = printed.out.splitlines()
        assert lines[0].startswith(("Healthy", "Not healthy", "Nothing is wrong", "Whether this run"))
        assert len(lines) <= 20
    else:
        assert code == 1
        assert printed.err.startswith("error: ")


@pytest.mark.long
@pytest.mark.parametrize("language", ["en", "es", "de"])
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_every_kind_of_log_in_every_form(
    path: Path,
    language: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    for form in (["--full"], ["--markdown"], ["--json"], ["--html", str(tmp_path / "page.html"), "--log-x"]):
        assert main(["report", str(path), *form]) in (0, 1)
    if (tmp_path / "page.html").exists():
        from test_report_page import parsed

        parsed((tmp_path / "page.html").read_text(encoding="utf-8"))
    capsys.readouterr()


NANOCHATS = "<|bos|>The capital of France is Paris.\n<|bos|>If 5*x + 3 = 13, then x is 4.\n"
NANOGPTS = (
    "---------------\nan older one\n---------------\nThe river had no name,\nand no end.\n---------------\n"
)


@pytest.mark.parametrize(
    ("text", "sample"),
    [
        (NANOCHATS, "The capital of France is Paris.\nIf 5*x + 3 = 13, then x is 4."),
        (
            "<|bos|>an older one\nstep 9\n" + NANOCHATS,
            "The capital of France is Paris.\nIf 5*x + 3 = 13, then x is 4.",
        ),
        (NANOGPTS, "The river had no name,\nand no end."),
        ("---------------\na heading\n", ""),
        ("", ""),
    ],
)
def test_text_of_the_model_in_a_log_is_its_sample(text: str, sample: str) -> None:
    assert pasted_sample((lines_of() + text).encode()) == sample


NOT_A_RUN = {
    "empty": b"",
    "spaces": b" \n\n\t\n",
    "binary": bytes(range(256)) * 400,
    "zip": b"PK\x03\x04" + b"\x00\x01\x02" * 1000,
    "prose": b"It was a run like any other.\n" * 50,
    "one line": b"iter 0: loss 10.9876, time 27432.10ms, mfu -100.00%\n",
    "nan": "".join(f"iter {n}: loss nan, time 400.00ms, mfu 11.50%\n" for n in range(400)).encode(),
    "traceback": b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB.\n",
}


@pytest.mark.parametrize("name", NOT_A_RUN)
def test_what_is_no_run_gets_one_clear_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "it").write_bytes(NOT_A_RUN[name])
    began = time.perf_counter()
    assert main(["report", str(tmp_path / "it")]) in (1, 2)
    assert time.perf_counter() - began < 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "Traceback (most recent call last):\n" not in printed.err
    assert len(printed.err.splitlines()) <= 4


def test_a_folder_without_a_run_and_a_name_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "there is no run in" in capsys.readouterr().err
    (tmp_path / "ckpt.pt").write_bytes(b"PK")
    assert main(["report", str(tmp_path)]) == 1
    assert "has a checkpoint, and no log" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "there is no log" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-", "-"],
        ["x", "--json", "--markdown"],
        ["x", "--tokens=1B", "--max-iters=3"],
        ["x", "--price=much"],
        ["x", "--hmtl"],
    ],
)
def test_wrong_use_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_without_numpy_there_is_an_answer(log: str, tmp_path: Path) -> None:
    from test_house import WITHOUT_HEAVY, python

    code = f"{WITHOUT_HEAVY}\nfrom onecard.cli import main\nraise SystemExit(main(['report', {log!r}]))"
    done = python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Healthy")
