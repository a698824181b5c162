"""`onecard plan --as nanochat`: the answer of the command."""

from __future__ import annotations

import json

import pytest

from onecard.cli import main

ASKED = ["plan", "--depth=12", "--batch_size=8", "--gpu=RTX 4070", "--host-ram=32", "--as", "nanochat"]


def test_d12_on_a_card_of_12_gb(capsys: pytest.CaptureFixture[str]) -> None:
    """What a public log shows: it runs there, with 9,448 MiB; without the compiler it would not."""
    assert main([*ASKED, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["as"], answer["fits"], answer["compile"]) == ("nanochat", True, True)
    assert answer["memory"]["allocated_gib"] * 1024 == pytest.approx(9448, rel=0.01)
    assert "confirmed" not in answer["memory"] and answer["speed"] is None and answer["time"] is None
    assert [row["fits"] for row in answer["alternatives"]] == [True, False]
    assert sum(line["gib"] for line in answer["memory"]["lines"]) == pytest.approx(
        answer["memory"]["allocated_gib"], abs=0.01
    )


def test_eager_says_where_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--compile=False"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "It runs out of memory" in said
    assert "With compile=True it would need" in said
    assert "nanochat, compile=False" in said and "nanoGPT" not in said


def test_what_no_card_has_confirmed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    far = ["plan", "--depth=4", "--batch_size=1", "--block_size=256", "--gpu=RTX 4070", "--as", "nanochat"]
    main([*far, "--json"])
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert (memory["confirmed"], memory["off_by_at_most"]) == (False, 0.15)
    main(far)
    assert "15% more or less" in " ".join(capsys.readouterr().out.split())


def test_the_other_trainers_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["config/train_gpt2.py", "--as", "nanochat"], "nanochat does not have gpt2"),
        (["--depth=4", "--as", "nanogpt"], "nanoGPT does not have nanochat-2026"),
    ):
        assert main(["plan", *words, "--gpu=RTX 4070"]) == 2
        assert said in capsys.readouterr().err
