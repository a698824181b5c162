from __future__ import annotations

import os
import sys

import pytest
import torch

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.hardware.cpu import available_memory, local_cpu
from onecard.train import memory as memory_module
from onecard.train.memory import (
    allocator_bytes,
    cap_again,
    cap_memory,
    is_out_of_memory,
    out_of_memory,
    reserve_of,
    use_expandable_segments,
)

GIB = 2**30
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.skipif(sys.platform != "linux", reason="where the platform has it")
@pytest.mark.parametrize("name", NAMES)
def test_growing_segments_are_asked_for_and_a_users_own_setting_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    use_expandable_segments()
    assert [os.environ[n] for n in NAMES if n in os.environ] == ["expandable_segments:True"]
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    assert {n: os.environ.get(n) for n in NAMES} == {**dict.fromkeys(NAMES), name: "max_split_size_mb:64"}


def test_a_cap_is_about_a_card() -> None:
    assert cap_memory("cpu", None, None) == (None, [])
    _, (note,) = cap_memory("cpu", None, 1.0)
    assert "CPU" in note


def test_a_limit_that_torch_was_given_from_outside_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows nothing of it, and reports what the whole card has free."""
    gib, card = 2**30, {"share": 1.0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (20 * gib, 24 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: gib)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: card["share"])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device=None: card.update(share=share)
    )
    monkeypatch.setattr(memory_module, "_context_bytes", lambda device: gib)
    monkeypatch.setattr(memory_module, "_own_caps", {})
    monkeypatch.setattr(memory_module, "_contexts", {})
    assert allocator_bytes("cuda", None, None) == 21 * gib
    card["share"] = 0.5
    assert allocator_bytes("cuda", None, None) == 12 * gib
    assert cap_memory("cuda", 16.0, None)[0] == 12 * gib, "the smaller of the two"
    assert cap_memory("cuda", 7.0, None)[0] == 6 * gib
    assert card["share"] == 0.25
    assert cap_memory("cuda", 9.0, None)[0] == 8 * gib, "the earlier run's limit is not this one's"
    assert cap_memory("cuda", None, None) == (None, [])
    assert card["share"] == 0.5, "what came from outside stays"


class PretendCard:
    """24 GiB, of which others and we hold some; torch keeps limits as whole bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others, self.ours, self.limit = 3 * GIB, 0, 24 * GIB
        for name, answer in (
            ("mem_get_info", lambda device=None: (24 * GIB - self.others - self.ours, 24 * GIB)),
            ("memory_reserved", lambda device=None: self.ours),
            ("current_device", lambda: 0),
            ("get_per_process_memory_fraction", lambda device=None: self.limit / (24 * GIB)),
            ("set_per_process_memory_fraction", self._set),
        ):
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(memory_module, "_context_bytes", lambda device: GIB)
        monkeypatch.setattr(memory_module, "_own_caps", {})
        monkeypatch.setattr(memory_module, "_contexts", {})

    def _set(self, share: float, device: int) -> None:
        self.limit = int(share * 24 * GIB)


def test_what_others_give_back_may_be_used_though_a_cap_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    card = PretendCard(monkeypatch)
    assert cap_memory("cuda", None, 1.234567)[0] == pytest.approx((21 - 1.234567) * GIB)
    card.ours, card.others = 15 * GIB, GIB
    there = allocator_bytes("cuda", None, 1.234567)
    assert there == pytest.approx((23 - 1.234567) * GIB), "our own cap is no limit from outside"
    assert cap_memory("cuda", None, 1.234567)[0] == there
    assert cap_memory("cuda", None, None) == (None, [])
    assert card.limit == 24 * GIB, "lifted at last"


@pytest.mark.parametrize("ours", [0, 15, 21])
def test_where_the_driver_spills_a_full_card_is_left_as_much_as_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, ours: int
) -> None:
    card = PretendCard(monkeypatch)
    card.ours = ours * GIB
    monkeypatch.setattr(memory_module, "spilling_platform", lambda: "WSL2")
    assert reserve_of(load_config(RunConfig, []), "cuda") == pytest.approx(0.03 * 24)
    assert reserve_of(load_config(RunConfig, ["--vram_reserve=2"]), "cuda") == 2.0


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might ...", True),
        ("CUDA driver error: out of memory", True),  # of segments that grow
        ("Triton Error [CUDA]: out of memory", True),  # a kernel that is loaded onto a full card
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(handle, ...)`", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_the_ways_in_which_running_out_is_reported(reported: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(reported)) is expected
    assert is_out_of_memory(torch.AcceleratorError(reported)) is expected


@pytest.mark.skipif(sys.platform != "linux", reason="not known elsewhere")
def test_available_memory_is_less_than_there_is() -> None:
    available, total = available_memory(), local_cpu().memory_bytes
    assert available is not None
    assert total is not None
    assert 0 < available < total


@pytest.mark.parametrize(
    ("batch", "accumulation", "advice"),
    [
        (4, 2, "--batch_size=2 --gradient_accumulation_steps=4"),
        (5, 1, "--batch_size=1 --gradient_accumulation_steps=5"),
        (12, 1, "--batch_size=6 --gradient_accumulation_steps=2"),
        (1, 7, None),
    ],
)  # fmt: skip
def test_advice_against_running_out_keeps_the_step_as_it_is(
    batch: int, accumulation: int, advice: str | None
) -> None:
    config = load_config(
        RunConfig, [f"--batch_size={batch}", f"--gradient_accumulation_steps={accumulation}"]
    )
    hint = out_of_memory(config, "cuda").hint
    assert (advice in hint) if advice else ("--batch_size" not in hint)


def test_advice_goes_on_where_the_user_already_is() -> None:
    config = load_config(RunConfig, ["--recompute=block", "--offload=optimizer", "--batch_size=1"])
    assert [line.split()[0] for line in out_of_memory(config, "cuda").hint.splitlines()] == [
        "--offload=gradients", "--master_weights=bf16", "a",
    ]  # fmt: skip


def test_a_cpu_that_ran_out_is_not_reported_to_offload() -> None:
    hint = out_of_memory(load_config(RunConfig, []), "cpu").hint
    assert "offload" not in hint
    assert "--recompute=block" in hint


def test_evaluating_alone_gets_advice_for_evaluating() -> None:
    config = load_config(RunConfig, ["--eval_only=True", "--batch_size=12", "--eval_iters=20"])
    hint = out_of_memory(config, "cpu").hint
    assert "--batch_size=6 --eval_iters=40" in hint
    assert "recompute" not in hint and "low bits" not in hint


def test_a_shortage_is_not_answered_with_another_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA itself takes is measured by a small kernel: when the limit is set, and not on a full card."""
    card = PretendCard(monkeypatch)
    assert cap_memory("cuda", 12.0, None)[0] == 11 * GIB

    def full(device: str) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory_module, "_context_bytes", full)
    card.ours, card.others = 10 * GIB, 14 * GIB
    assert allocator_bytes("cuda", 12.0, None) == 10 * GIB


def test_amid_a_run_a_cap_follows_what_others_leave_and_never_goes_below_what_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = PretendCard(monkeypatch)
    cap_memory("cuda", None, 1.0)
    assert card.limit == 20 * GIB
    card.ours, card.others = 15 * GIB, 8.5 * GIB  # half a GiB is free, and one was to be left
    cap_again("cuda", None, 1.0)
    assert card.limit == pytest.approx(15 * GIB), "14.5 would fail whatever is allocated next"
    card.others = 0
    cap_again("cuda", None, 1.0)
    assert card.limit == pytest.approx(23 * GIB)
    cap_again("cuda", None, 30.0)
    assert card.limit == pytest.approx(15 * GIB), "an error at the start, and no reason to end a run"
    cap_again("cuda", None, None)
    cap_again("cpu", 1.0, 1.0)
    assert card.limit == pytest.approx(15 * GIB)
    assert cap_memory("cuda", None, None) == (None, [])
    assert card.limit == 24 * GIB, "what was before the first cap"
