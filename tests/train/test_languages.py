"""train in the reader's language. What programs read stays English, and so do the files of a run."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FULL, TINY, events

from onecard.cli import main
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.language import _, english_of, joined, number
from onecard.train import evaluate as evaluate_module
from onecard.train.interrupt import StopRequest
from onecard.train.speed_watch import Verdict


@pytest.fixture(autouse=True)
def there(workplace: Path) -> None:
    """Data to train on."""


def full_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation runs out of memory."""
    plain, calls = evaluate_module.evaluate, [0]

    def evaluate(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    monkeypatch.setattr(evaluate_module, "evaluate", evaluate)


SPANISH = (
    "nota: vram_limit y vram_reserve se refieren", "memoria insuficiente (evaluación): 2 secuencias",
    "terminado en el paso 20 de 20", "pérdida de validación en nats por token:", "para seguir entrenando",
)  # fmt: skip
GERMAN = (
    "Anmerkung: vram_limit und vram_reserve betreffen", "der Speicher reicht nicht (Auswertung): 2 Sequenzen",
    "fertig bei Schritt 20 von 20", "Validierungs-Loss in Nats pro Token:", "um weiter zu trainieren",
)  # fmt: skip


@pytest.mark.parametrize(("language", "words"), [("es", SPANISH), ("de", GERMAN)])
def test_a_run_speaks_to_people_and_writes_english(
    language: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    full_once(monkeypatch)
    assert main(["train", *TINY, "--vram_limit=11"]) == 0
    shown = capsys.readouterr()
    for text in words:
        assert text in shown.err + shown.out
    # Decimal commas in sentences, points in nanoGPT's lines and in flags.
    assert re.search(r"\(\d,\d\d \S+\) \S+ \d", shown.out)
    assert re.search(r"^iter 0: loss \d\.\d{4}, time \d+\.\d\dms", shown.err, re.MULTILINE)
    assert re.search(r"^step 20: train loss \d\.\d{4}, val loss \d\.\d{4}", shown.err, re.MULTILINE)
    assert "tokens per iteration will be: 128; 6,000 training tokens in data" in shown.err
    (started,) = events("started")
    assert any(note.startswith("vram_limit and vram_reserve are about a card") for note in started["notes"])
    assert started["began"].endswith("parameters, a new model from scratch")
    (short,) = events("out of memory")
    assert short["where"] == "evaluation" and short["answer"] == "2 sequences at a time"
    for path in ("log.txt", "events.jsonl", "metrics.jsonl", "config.json", "plan.json"):
        text = Path("out", path).read_text(encoding="utf-8")
        assert not re.search(r"Schritt|Lauf|ejecución|paso|Speicher|memoria", text), path


@pytest.mark.parametrize("language", ["es", "de"])
def test_programs_get_english(
    language: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    assert main(["train", *TINY, "--vram_limit=11", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["step"] == 20
    assert "note: vram_limit and vram_reserve are about a card" in shown.err


def test_refusals_speak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY]) == 0
    for language, said in (("es", "ya contiene una ejecución"), ("de", "enthält schon einen Lauf")):
        monkeypatch.setenv("ONECARD_LANG", language)
        capsys.readouterr()
        assert main(["train", *TINY, "--init_from=scratch"]) == 2
        assert said in capsys.readouterr().err


def test_rates_and_nested_sentences_keep_their_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", "de")
    inner = _("{n:.2f} GiB are needed, {free:.2f} GiB are free").format(n=1.5, free=0.25)
    whole = _("waiting for memory: {why}; going on as soon as there is room").format(why=inner)
    assert "1,50 GiB werden gebraucht" in whole
    assert english_of(whole) == (
        "waiting for memory: 1.50 GiB are needed, 0.25 GiB are free; going on as soon as there is room"
    )
    # As a verdict on the speed is copied into an event.
    copied = asdict(Verdict("slow", whole, 1.0, 2.0))["text"]
    assert copied == whole and english_of(copied) == english_of(whole)
    both = joined([number(3.5e-4, ".1e"), _("checkpoint"), "plain"])
    assert both == "3,5e-04, Checkpoint, plain" and english_of(both) == "3.5e-04, checkpoint, plain"


# --- the first second, and the last words ----------------------------------------------------------


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_not_silent_while_torch_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["train", "--dataset=missing", "--device=cpu"]) == 2
    assert screen.getvalue().startswith("loading torch ...\n")


def test_a_pipe_is_told_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dataset=missing", "--device=cpu"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_last_words_are_commands_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    prepare(["text.txt"], PrepareOptions(tokenizer="byte"), progress=False)
    words = [word for word in TINY if not word.startswith(("--vocab", "--dataset", "--out_dir"))]
    assert main(["train", *words, "--dataset=text", "--out_dir=my run"]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.partition(": ")[0] for line in lines] == [
        "to generate text", "to use it with Hugging Face", "to train further",
    ]  # fmt: skip
    for line in lines:
        command = shlex.split(line.partition(": ")[2])
        assert command[0] == "onecard"
        assert main([*command[1:], *(["--max_new_tokens=4"] if command[1] == "sample" else [])]) == 0
    assert "done at step 40 of 40" in capsys.readouterr().out


def test_an_interrupted_run_names_only_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StopRequest, "__call__", lambda stop: True)
    assert main(["train", *TINY]) == 130
    assert capsys.readouterr().out.splitlines()[-1] == "begin again with the same command"
