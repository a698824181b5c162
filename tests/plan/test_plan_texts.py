"""An expected loss is said of the text that it holds for, and not of any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onecard.cli import main
from onecard.plan.texts import known_text

ON = ["--gpu", "RTX 4070", "--host-ram", "32", "--max_iters=6000"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *ON, *words]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, "--json", *words))
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no data/ here


@pytest.mark.parametrize("dataset", ["fineweb", "fineweb-32k", "fineweb10B", "./corpora/FineWeb_100BT"])
def test_of_fineweb_it_is_said_without_more(capsys: pytest.CaptureFixture[str], dataset: str) -> None:
    shown = plan(capsys, f"--dataset={dataset}")
    assert "nats a token on FineWeb, at the end" in shown and "losses" not in shown
    loss = as_json(capsys, f"--dataset={dataset}")["loss"]
    assert loss["text"] == loss["text_of_run"] == "FineWeb"


@pytest.mark.parametrize(
    ("dataset", "name"),
    [("openwebtext", "OpenWebText"), ("owt-9b", "OpenWebText"), ("fineweb-edu", "FineWeb-Edu"), ("c4", "C4")],
)
def test_other_web_text_has_losses_of_its_own(
    capsys: pytest.CaptureFixture[str], dataset: str, name: str
) -> None:
    shown = plan(capsys, f"--dataset={dataset}")
    assert "nats a token on FineWeb" in shown
    assert f"{name} has losses of its own" in " ".join(shown.split())
    assert as_json(capsys, f"--dataset={dataset}")["loss"]["text_of_run"] == name


@pytest.mark.parametrize("dataset", ["shakespeare", "tinystories", "wikitext-103", "stdlib"])
def test_of_other_text_no_loss_is_said(capsys: pytest.CaptureFixture[str], dataset: str) -> None:
    words = [f"--dataset={dataset}", "--vocab_size=50304"]
    shown = plan(capsys, *words)
    assert "no web text" in shown and "nats" not in shown
    assert as_json(capsys, *words)["loss"] is None
    assert "These losses are of FineWeb" in plan(capsys, "--dataset=c4", "--largest")
    best = plan(capsys, *words, "--largest")
    assert "nats" not in best and "not for" in " ".join(best.split())


def test_of_text_that_is_not_known_it_is_said_what_the_loss_holds_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = " ".join(plan(capsys, "--dataset=my-novels").split())
    assert "nats a token on FineWeb" in shown and "my-novels has losses of its own" in shown
    assert as_json(capsys, "--dataset=my-novels")["loss"]["text_of_run"] is None


def test_short_names_are_whole_words() -> None:
    assert known_text("compile") is None and known_text("towtruck") is None
    pile = known_text("the-pile")
    assert pile is not None and pile == known_text("pile") and not pile.is_web
