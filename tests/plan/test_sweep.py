"""The planner's choice beside settings that were measured on a card, one after the other."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from questions import config, target

from onecard.plan.answer import question_of
from onecard.plan.lines import GIB
from onecard.plan.search import chosen
from onecard.train.first_setting import process_bytes

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SWEPT = json.loads((BENCHMARKS / "results" / "2026-11-18-fit-h200.json").read_text())["rows"]["sweep"]
CONFIG = [
    "--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024", "--vocab_size=50304", "--bias=False",
    "--batch_size=16", "--gradient_accumulation_steps=4", "--max_iters=200",
]  # fmt: skip


@pytest.fixture
def speed_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fit_sweep").speed_at


@pytest.mark.parametrize("cap", [11.0, 8.0, 6.0, 4.0, 3.0, 2.0])
def test_nothing_measured_is_clearly_faster_in_the_same_memory(cap: float, speed_at: Any) -> None:
    asked = question_of(config(CONFIG), target("H200"))
    choice, _ = chosen(dataclasses.replace(asked, allowed=process_bytes(cap * GIB)))
    assert choice is not None
    wanted = (choice.setting.words(), choice.setting.loss_chunk)
    measured = {
        (row["setting"], row["loss_chunk"]): speed
        for size in SWEPT.values()
        for row in size["settings"]
        if (speed := speed_at(row, cap)) is not None
    }
    assert measured[wanted] >= 0.95 * max(measured.values())
