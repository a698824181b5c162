"""What plan answers about a config as it stands, and about data that is not there yet."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from onecard.cli import main

ROOT = Path(__file__).resolve().parents[2]
FINEWEB = str(ROOT / "config" / "train_fineweb.py")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of this machine, and no measurement of its card."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ONECARD_LANG", "en")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--gpu=RTX 4070", "--json"])
    return code, json.loads(capsys.readouterr().out)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", *words, "--gpu=RTX 4070"])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (["--auto_fit=False", "--vram_limit=2"], False),
        (["--auto_fit=True", "--vram_limit=2"], True),
        (["--auto_fit=False"], True),
    ],
)
def test_without_auto_fit_the_config_as_it_stands_decides(
    words: list[str], fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = told(capsys, FINEWEB, *words)
    assert found["fits"] is fits and code == (0 if fits else 1)


def test_what_would_fit_without_auto_fit_is_still_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, FINEWEB, "--auto_fit=False", "--vram_limit=2", "--stages")
    assert code == 1
    for part in ("Does not fit as given", "train changes nothing", "Fastest setting that fits",
                 "tokens/s", "kWh", "Back to speed"):  # fmt: skip
        assert part in text


# --- data that is not there yet -------------------------------------------------------------------

SHAKESPEARE = str(ROOT / "config" / "train_shakespeare_char.py")
DEMO = str(ROOT / "config" / "demo.py")


@pytest.mark.parametrize(
    ("config", "vocabulary", "said"),
    [
        (SHAKESPEARE, 65, "data/shakespeare_char is not prepared yet: its vocabulary will be 65 characters."),
        # Bytes and their end of text, rounded up to the trainer's multiple of 64.
        (DEMO, 320, "data/stdlib is not prepared yet: its vocabulary will be bytes, 257 tokens."),
    ],
)
def test_a_dataset_of_characters_or_bytes_has_its_own_vocabulary_before_it_is_there(
    config: str, vocabulary: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, pinned = told(capsys, config, f"--vocab_size={vocabulary}")
    _, found = told(capsys, config)
    assert found["model"] == pinned["model"] and found["memory"] == pinned["memory"]
    assert found["loss"] is None, "of characters and bytes nothing is known"
    code, text = shown(capsys, config)
    assert code == 0 and said in text and "web text" not in text and "assumed" not in text
    _, text = shown(capsys, config, f"--vocab_size={vocabulary}")
    assert "prepared" not in text, "who says it needs no data for it"


def test_nanogpt_is_priced_with_that_vocabulary_too(capsys: pytest.CaptureFixture[str]) -> None:
    _, pinned = told(capsys, SHAKESPEARE, "--as=nanogpt", "--vocab_size=65")
    _, found = told(capsys, SHAKESPEARE, "--as=nanogpt")
    assert found["memory"] == pinned["memory"]
    _, text = shown(capsys, SHAKESPEARE, "--as=nanogpt")
    assert "its vocabulary will be 65 characters" in text


def test_characters_of_other_data_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = shown(capsys, "--dataset=my_chars", "--max_iters=10")
    assert "data/my_chars is not prepared yet: a vocabulary of 50,304 is assumed" in text
    assert "vocabulary" not in shown(capsys, "--dataset=mine", "--max_iters=10")[1]


def test_tokens_that_are_there_count_for_what_the_trainer_takes_them_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With nanoGPT's table of characters they are its 65; with nothing beside them, GPT-2's."""
    _, gpt2 = told(capsys, SHAKESPEARE, "--vocab_size=50304")
    _, characters = told(capsys, SHAKESPEARE, "--vocab_size=65")
    folder = Path("data") / "shakespeare_char"
    folder.mkdir(parents=True)
    (folder / "train.bin").touch()
    assert told(capsys, SHAKESPEARE)[1]["model"] == gpt2["model"]
    table = dict(enumerate("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))
    (folder / "meta.pkl").write_bytes(
        pickle.dumps({"itos": table, "stoi": {sign: number for number, sign in table.items()}})
    )
    assert len(table) == 65 and told(capsys, SHAKESPEARE)[1]["model"] == characters["model"]
    assert "prepared" not in shown(capsys, SHAKESPEARE)[1]


# --- runs that only evaluate ----------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--json"], ["--as=nanogpt"]])
def test_a_run_that_only_evaluates_is_said_not_to_train(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--gpu=RTX 4070", "--init_from=gpt2", "--batch_size=8", *more]
    assert main([*words, "--eval_only=True"]) == 0
    assert "note: with eval_only=True train would only evaluate" in capsys.readouterr().err
    assert main(words) == 0
    assert "eval_only" not in capsys.readouterr().err
