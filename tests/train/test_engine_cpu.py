"""What whoever trains on a CPU is reported before the first step."""

from __future__ import annotations

import re

import pytest

from onecard.train.engine import cpu_notes


def test_a_model_for_a_card_is_noted_with_how_long_a_cpu_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanoGPT's 124M with its own batch: 420 TFLOP a step."""
    clock = iter(number * 2 * 1024**3 / 0.5e12 for number in range(100))  # half a TFLOPS
    monkeypatch.setattr("onecard.train.engine.time.perf_counter", lambda: next(clock))
    (note,) = cpu_notes(420e12)
    assert "a step is 420 TFLOP, and a matmul here reaches 0.50 TFLOPS: at least 14m00s per step" in note


def test_it_is_measured() -> None:
    (note,) = cpu_notes(1e15)
    found = re.search(r"reaches ([\d.]+) TFLOPS", note)
    assert found and 0.001 < float(found[1]) < 100


def test_small_models_belong_on_a_cpu() -> None:
    assert cpu_notes(1e12) == []
