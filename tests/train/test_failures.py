"""When the card is gone: recognised however it is told, and explained by what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onecard.errors import UserError
from onecard.train.failures import explained, is_beyond_recovery

RUN: Any = SimpleNamespace(position=SimpleNamespace(step=10), config=SimpleNamespace(out_dir="out"))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors ..."), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA driver error: unknown error"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False),
        (ValueError("CUDA error: unknown error"), False),
        (RuntimeError("unknown error"), False),
    ],
)
def test_what_ends_a_process_on_a_card(error: Exception, lost: bool) -> None:
    assert is_beyond_recovery(error) is lost


@pytest.mark.parametrize(
    ("what", "hint", "not_hint"),
    [
        ("unspecified launch failure", "overclocking", "report"),
        ("device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1", "overclocking"),
    ],
)
def test_a_fault_of_the_program_is_not_blamed_on_heat(what: str, hint: str, not_hint: str) -> None:
    told = explained(RuntimeError(f"CUDA error: {what}"), RUN, saved_step=8)
    assert isinstance(told, UserError)
    assert hint in told.hint and not_hint not in told.hint
    assert "onecard train --out_dir=out" in told.hint
