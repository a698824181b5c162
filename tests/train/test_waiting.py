"""Somebody else has the card's memory, and no setting is small enough: the run waits for it, in host memory.

Only the memory is a stand-in: what there is, and the error of whoever takes more.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FULL, config, events, weights

from onecard.errors import UserError
from onecard.plan.lines import GIB
from onecard.run.metrics import read_metrics
from onecard.run.stored import list_checkpoints
from onecard.train import host_copy as host_copy_module
from onecard.train import pausing as pausing_module
from onecard.train import refit as refit_module
from onecard.train.loop import train
from onecard.train.step import Stepper

pytestmark = pytest.mark.usefixtures("little_garbage")


class OtherProcess:
    """Takes all there is at a step, and gives it back after so many looks at what is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int, looks: int, leaves: float = 0.0) -> None:
        self.left, self.step, self.leaves, self.began = looks, at, leaves, False
        plain = Stepper.backward

        def backward(stepper: Stepper, *arguments: Any) -> Any:
            self.began = self.began or stepper.optimizer.steps == self.step
            if self.has_it:
                raise torch.OutOfMemoryError(FULL)
            return plain(stepper, *arguments)

        def free(run: Any) -> float:
            if not self.has_it:
                return 60.0 * GIB
            if run.host_copy is not None:
                self.left -= 1
            return self.leaves * GIB

        monkeypatch.setattr(Stepper, "backward", backward)
        for module in (refit_module, host_copy_module):
            monkeypatch.setattr(module, "free_for_tensors", free)
        monkeypatch.setattr(pausing_module, "_TRY_EVERY", 0.0)

    @property
    def has_it(self) -> bool:
        return self.began and self.left > 0


@pytest.fixture
def undisturbed(workplace: Path) -> Iterator[dict[str, torch.Tensor]]:
    train(config("--out_dir=quiet", "--optimizer=muon"))
    yield weights("quiet")


def test_it_goes_on_when_they_give_it_back(
    undisturbed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    OtherProcess(monkeypatch, at=7, looks=6)
    summary = train(config("--optimizer=muon"))
    assert summary.values["step"] == 20
    (waited,), (went_on,) = events("waits for memory"), events("went on")
    assert waited["step"] == went_on["step"] == 7 and "are needed" in waited["why"]
    assert [row["step"] for row in read_metrics(Path("out/metrics.jsonl")) if "loss" in row] == [*range(20)]
    for name, tensor in weights().items():
        torch.testing.assert_close(tensor, undisturbed[name], atol=1e-5, rtol=1e-4)
    assert "waiting for memory" in "".join(capsys.readouterr())


def test_a_kill_while_it_waits_loses_nothing(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = OtherProcess(monkeypatch, at=7, looks=1000)
    seen: list[int] = []
    plain = pausing_module.take_card

    def take(run: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(list_checkpoints(Path("out/checkpoints"))[-1].step)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
        return plain(run, *arguments, **named)

    monkeypatch.setattr(pausing_module, "take_card", take)
    summary = train(config())
    assert seen[0] == 7, "saved before it waits"
    assert summary.values["step"] == 7
    other.left = 0
    assert train(config()).values["step"] == 20


def test_where_the_memory_should_do_nobody_is_waited_for(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not others who have it: waiting would be for ever."""
    OtherProcess(monkeypatch, at=7, looks=10**9, leaves=60.0)
    with pytest.raises(UserError, match="out of memory") as ended:
        train(config())
    assert "--batch_size=1 --gradient_accumulation_steps=8" in ended.value.why, "the same step, as flags"
    assert not events("waits for memory")
    assert "".join(capsys.readouterr()).count("trying again") == 1, "eight times, and once is enough to hear"
    assert list_checkpoints(Path("out/checkpoints"))[-1].step == 7


def test_also_amid_a_change_of_setting(
    undisturbed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be put in place, and all is in host memory: that is no end either."""
    other = OtherProcess(monkeypatch, at=7, looks=40)
    plain = host_copy_module.new_stepper

    def built(*arguments: Any, **named: Any) -> Any:
        if other.has_it:
            raise torch.OutOfMemoryError(FULL)
        return plain(*arguments, **named)

    monkeypatch.setattr(host_copy_module, "new_stepper", built)
    assert train(config("--optimizer=muon")).values["step"] == 20
    for name, tensor in weights().items():
        torch.testing.assert_close(tensor, undisturbed[name], atol=1e-5, rtol=1e-4)
