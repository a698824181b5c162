"""When the card is gone: recognised however it is reported, and explained by what it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import FULL, config, events

from onecard.errors import UserError
from onecard.optim.muon import Muon
from onecard.optim.optimizer import Optimizer
from onecard.train.failures import explained, is_beyond_recovery
from onecard.train.loop import train

pytestmark = pytest.mark.usefixtures("little_garbage")

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
    reported = explained(RuntimeError(f"CUDA error: {what}"), RUN, saved_step=8)
    assert isinstance(reported, UserError)
    assert hint in reported.hint and not_hint not in reported.hint
    assert "onecard train --out_dir=out" in reported.hint


@pytest.mark.parametrize("before_any_checkpoint", [False, True])
def test_an_update_that_is_broken_off_says_where_to_go_on(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, before_any_checkpoint: bool
) -> None:
    """Half of an update cannot be saved; the checkpoint before it can be continued."""
    plain, steps = Muon.step, iter(range(2**62))

    def step(*arguments: Any) -> None:
        if next(steps) > (1 if before_any_checkpoint else 27):
            raise torch.OutOfMemoryError(FULL)
        plain(*arguments)

    monkeypatch.setattr(Muon, "step", step)
    monkeypatch.setattr(Optimizer, "warm_up", lambda optimizer: None)  # it makes such steps too
    with pytest.raises(UserError, match="was broken off: CUDA out of memory") as stopped:
        train(config("--optimizer=muon"))
    saved = [event["step"] for event in events("saved")]
    if before_any_checkpoint:
        assert saved == [] and "nothing had been saved yet" in stopped.value.why
        assert "start it again" in stopped.value.hint
        return
    assert f"the checkpoint of step {saved[-1]} is kept" in stopped.value.why
    assert "lost" in stopped.value.why and "onecard train --out_dir=out" in stopped.value.hint
