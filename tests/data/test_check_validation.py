"""`prepare --check` on validation sets of different sizes: what a loss on them is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onecard.cli import main

BLOCK = 1024


def bins(folder: Path, train: int, val: int) -> Path:
    """As nanoGPT writes them: no meta.json, GPT-2's tokens."""
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    for split, tokens in (("train", train), ("val", val)):
        numbers.integers(0, 50000, tokens).astype("<u2").tofile(folder / f"{split}.bin")
    return folder


def check(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, dict[str, Any], str]:
    code = main(["prepare", str(folder), "--check", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["prepare", str(folder), "--check"]) == code
    return code, found, " ".join(capsys.readouterr().out.split())


def test_five_blocks_of_much_text_are_a_problem_with_a_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, text = check(capsys, bins(tmp_path / "data", 1_000_000, 5 * BLOCK + 1))
    assert code == 1 and not found["ok"]
    said = found["validation"]
    assert (said["blocks"], said["block_size"], said["enough"]) == (5, BLOCK, False)
    # sqrt((3² / 1024 + 0.75²) / 5)
    assert said["standard_error"] == pytest.approx(0.338, abs=0.001)
    assert "5 blocks of 1,024" in text and "0.34 nats" in text and "Hold out" in text
    assert "NOT ok" in text


def test_enough_is_said_with_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, text = check(capsys, bins(tmp_path / "data", 1_000_000, 244 * BLOCK + 1))
    assert code == 0 and found["ok"] and found["validation"]["enough"]
    assert "±0.048 nats a token (244 blocks of 1,024)" in text


def test_of_little_text_no_larger_part_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, text = check(capsys, bins(tmp_path / "data", 50_000, 5 * BLOCK + 1))
    assert code == 0 and found["ok"] and not found["validation"]["enough"]
    assert "too small" in text and "More text would help" in text


def test_the_share_that_is_named_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.jsonl"
    words = np.random.default_rng(1).integers(97, 123, (8000, 200)).astype("u1")
    corpus.write_text("".join(json.dumps({"text": bytes(row).decode()}) + "\n" for row in words))
    prepare = ["prepare", str(corpus), "--name=it", f"--out_root={tmp_path}", "--tokenizer=byte"]
    assert main([*prepare, "--val_fraction=0.005"]) == 0
    capsys.readouterr()
    code, found, text = check(capsys, tmp_path / "it")
    assert code == 1 and "--val_fraction=" in text
    (problem,) = found["problems"]
    share = problem.split("--val_fraction=")[1].split()[0]
    assert main([*prepare, f"--val_fraction={share}", "--force"]) == 0
    capsys.readouterr()
    code, found, _ = check(capsys, tmp_path / "it")
    assert code == 0 and found["validation"]["standard_error"] == pytest.approx(0.025, rel=0.2)
