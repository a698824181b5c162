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


def test_what_a_finished_run_proposes_is_not_what_was_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal of a run, as people save it: its last line is a command for twice the steps."""
    rows = "".join(
        f"step {n}: train loss {5 - n / 300:.4f}, val loss {5.1 - n / 300:.4f}, val bpb 2.1\n"
        f"iter {n}: loss {5 - n / 300:.4f}, time 90.00ms, 5,900 tok/s, lr 1.00e-02, eta 9s\n"
        for n in range(0, 601, 50)
    )
    further = (
        "to train further: onecard train --out_dir=out --init_from=resume --max_iters=1200 --extend=rewarm\n"
    )
    german = "zum Weitertrainieren: onecard train --out_dir=out --init_from=resume --max_iters=1200\n"
    done = "done at step 600 of 600; saved as out/checkpoints/step-00000600\n"
    for end, last in ((done + further, 600), (german, None), (f"$ {further.partition(': ')[2]}", 1200)):
        (tmp_path / "run.log").write_text(rows + end)
        assert main(["report", str(tmp_path / "run.log"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["facts"].get("last_step") or {}).get("value") == last
        main(["report", str(tmp_path / "run.log")])
        assert "run.log · onecard log" in capsys.readouterr().out


def test_an_evaluation_of_the_beginning_is_not_where_the_run_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(
        f"iter {n}: loss {10.8 - n / 50:.4f}, time 400.00ms, mfu {11.5 if n > 50 else -100:.2f}%\n"
        for n in range(0, 200, 10)
    )
    (tmp_path / "new.log").write_text(HEAD + "step 0: train loss 10.8812, val loss 10.8794\n" + rows)
    assert main(["report", str(tmp_path / "new.log")]) == 0
    shown = capsys.readouterr().out
    assert "training loss is 7.00 at 49.8M tokens" in shown
    assert "does not memorise" not in " ".join(shown.split()) and "train the same model" not in shown
    assert "Not known: the card (--gpu), the last step (--max-iters)" in shown


def test_tokens_that_nobody_knows_are_not_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = (10.88, 5.86, 4.95, 4.48, 4.32, 4.24, 4.19, 4.17)
    rows = "".join(f"| {n} | {loss - 0.02:.2f} | {loss:.2f} |\n" for n, loss in enumerate(losses))
    rows = "max_iters = 7000, n_embd = 384\n| step | train | val |\n|---|---|---|\n" + rows.replace(
        " |", "000 |", 1
    )
    table = "".join(
        line if n < 3 else f"| {n - 3}000 {line[3:]}\n" for n, line in enumerate(rows.splitlines(True))
    )
    (tmp_path / "table.md").write_text(table)
    main(["report", str(tmp_path / "table.md"), "--full"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "train the same model for 21,000 steps with the decay" in shown


def test_a_speed_that_the_log_does_not_show_is_called_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = lines_of()
    timeless = "".join(line for line in timed.splitlines(True) if "time" not in line)
    for text, predicted in ((timed, False), (timeless, True)):
        (tmp_path / "a.log").write_text(text)
        assert main(["report", str(tmp_path / "a.log"), "--gpu", "RTX 4070", "--full"]) == 0
        assert ("predicted: the log has no times" in " ".join(capsys.readouterr().out.split())) is predicted


def test_each_verb_names_itself_where_a_log_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("eta", "report", "doctor"):
        assert main([verb, "no-such.log"]) == 2
        assert f"`onecard {verb} -` reads what you paste" in capsys.readouterr().err
