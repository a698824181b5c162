"""`plan --as nanogpt --stages`: which settings of their trainer run, and that mostly one is enough."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onecard import cli

NOTE = ["--n_embd=576", "--batch_size=16", "--gradient_accumulation_steps=32"]


def asked(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    cli.main(["plan", "--as=nanogpt", "--stages", "--gpu=RTX 4070", *words])
    return capsys.readouterr().out


def test_no_return_in_stages_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """The smaller micro-batch is compiled from the first step, and costs little."""
    said = asked(NOTE, capsys)
    assert "compile stays on from step 0 with batch_size = 8, gradient_accumulation_steps = 64" in said
    assert "-2% speed" in said
    assert "16 × 32, 11.35 GiB" in said


def test_stages_keep_the_tokens_of_a_step_and_grow_faster(capsys: pytest.CaptureFixture[str]) -> None:
    stages = json.loads(asked([*NOTE, "--json"], capsys))["stages"]
    assert all(stage["batch_size"] * stage["gradient_accumulation_steps"] == 512 for stage in stages)
    speeds = [stage["speed"] for stage in stages]
    assert speeds == sorted(speeds)
    assert all(stage["total_gib"] < 11.83 for stage in stages)


def test_what_fits_needs_none_and_what_never_fits_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No stages are needed" in asked(["--n_embd=384", "--batch_size=8"], capsys)
    assert "No setting of it runs" in asked(["--n_embd=2560", "--n_layer=24", "--n_head=20"], capsys)
