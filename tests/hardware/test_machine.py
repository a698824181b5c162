"""This machine: NVML through a made-up library, the choice of a device from made-up observations."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onecard.errors import UserError
from onecard.hardware import machine
from onecard.hardware.cards import find_card
from onecard.hardware.machine import GIB, LocalGpu, Observations, TorchCard, decide_device


class FakeNvmlError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


def refuse(*_: Any) -> Any:
    raise FakeNvmlError(3, "Not Supported")


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def fake_nvml(**overrides: Any) -> SimpleNamespace:
    """One RTX 4070 as nvidia-ml-py would show it; overrides replace single functions."""
    functions: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "nvmlDeviceGetName": lambda handle: "NVIDIA GeForce RTX 4070",
        "nvmlDeviceGetUUID": lambda handle: "GPU-1234",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=12282 * 2**20, free=11000 * 2**20),
        "nvmlSystemGetDriverVersion": lambda: "550.54.14",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12040,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: [8, 9],
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 200000,
        "nvmlDeviceGetDisplayActive": lambda handle: 1,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [],
        "nvmlSystemGetProcessName": refuse,
    }
    return SimpleNamespace(**(functions | overrides))


def install(monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**overrides))


def test_a_card_is_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    (gpu,) = machine.local_gpus()
    assert gpu == LocalGpu(
        index=0,
        uuid="GPU-1234",
        name="NVIDIA GeForce RTX 4070",
        card=find_card("RTX 4070"),
        total_bytes=12282 * 2**20,
        free_bytes=11000 * 2**20,
        driver="550.54.14",
        cuda_driver=(12, 4),
        compute_capability=(8, 9),
        processes=[],
        power_limit_w=200.0,
        display_active=True,
    )


def test_what_nvml_refuses_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    essential = {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    install(monkeypatch, **{name: refuse for name in vars(fake_nvml()) if name not in essential})
    assert machine.local_gpus() == [LocalGpu(index=0, uuid=None, name="unknown NVIDIA card", card=None)]


def test_an_old_library_that_lacks_functions_and_speaks_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(
        nvmlDeviceGetName=lambda handle: b"Tesla T4", nvmlSystemGetCudaDriverVersion=lambda: 11080
    )
    nvml.nvmlDeviceGetMemoryInfo = refuse
    del nvml.nvmlSystemGetCudaDriverVersion_v2, nvml.nvmlDeviceGetDisplayActive
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (gpu,) = machine.local_gpus()
    assert gpu.card is find_card("T4")
    assert gpu.cuda_driver == (11, 8)
    assert gpu.display_active is None


def test_the_same_name_with_other_memory_is_not_our_card(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = SimpleNamespace(total=8188 * 2**20, free=8000 * 2**20)
    install(
        monkeypatch,
        nvmlDeviceGetName=lambda handle: "NVIDIA GeForce RTX 4060 Ti",
        nvmlDeviceGetMemoryInfo=lambda handle: eight,
    )
    found = machine.local_gpus()[0].card
    assert found is not None and found.name == "RTX 4060 Ti 8GB"
    install(
        monkeypatch,
        nvmlDeviceGetName=lambda handle: "NVIDIA GeForce RTX 4070",
        nvmlDeviceGetMemoryInfo=lambda handle: eight,
    )
    assert machine.local_gpus()[0].card is None


def test_a_lost_card_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> str:
        return refuse() if index == 0 else "second"

    install(monkeypatch, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=handle)
    assert [gpu.index for gpu in machine.local_gpus()] == [1]


def test_no_library_no_driver_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    assert machine.survey_gpus() == ([], "")
    for value in (9, 12):

        def no_driver(value: int = value) -> None:
            raise FakeNvmlError(value, "no driver")

        install(monkeypatch, nvmlInit=no_driver)
        assert machine.survey_gpus() == ([], "")
    install(monkeypatch, nvmlDeviceGetCount=lambda: 0)
    assert machine.survey_gpus() == ([], "")


def test_a_broken_driver_is_not_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise FakeNvmlError(18, "Driver/library version mismatch")

    install(monkeypatch, nvmlInit=mismatch)
    gpus, trouble = machine.survey_gpus()
    assert gpus == []
    assert "version mismatch" in trouble


def test_processes_are_merged_and_the_own_one_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getpid()
    nobody = 2**22 + 7  # beyond the largest pid Linux gives out
    install(
        monkeypatch,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [process(me, 5 * GIB), process(nobody, None)],
        nvmlDeviceGetGraphicsRunningProcesses=lambda handle: [process(me, 6 * GIB), process(1, 2**64 - 1)],
        nvmlSystemGetProcessName=lambda pid: r"C:\games\game.exe" if pid == nobody else refuse(),
    )
    mine, *others = machine.local_gpus()[0].processes
    assert (mine.pid, mine.memory_bytes, mine.mine) == (me, 6 * GIB, True)
    by_pid = {other.pid: other for other in others}
    assert set(by_pid) == {1, nobody}
    assert not any(other.mine or other.memory_bytes for other in others)
    assert by_pid[nobody].name == "game.exe"
    assert (mine.draws, by_pid[1].draws, by_pid[nobody].draws) == (True, True, False)  # on both lists: draws


@pytest.mark.parametrize(
    ("cmdline", "name"),
    [
        (b"/usr/lib/xorg/Xorg\0-core\0:0\0", "Xorg"),
        (b"/opt/chrome/chrome --type=gpu-process --secret=x", "chrome"),
        (b"/usr/bin/python3\0/home/me/train.py\0--key=secret\0", "python3 train.py"),
        (b"python\0-m\0onecard\0train\0", "python -m onecard"),
        (b"python\0-c\0secret\0", "python"),
        (b"", None),
    ],
)
def test_process_names_say_the_program_and_not_its_arguments(
    monkeypatch: pytest.MonkeyPatch, cmdline: bytes, name: str | None
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: cmdline)
    assert machine._process_name(fake_nvml(), 1) == name


RTX_4070 = LocalGpu(0, "GPU-1234-abcd", "NVIDIA GeForce RTX 4070", None, driver="550.54", cuda_driver=(12, 4))
NOTHING = Observations(torch_version="2.11.0", torch_cuda="13.0")
HEALTHY = Observations(
    torch_version="2.11.0",
    torch_cuda="12.8",
    torch_available=True,
    torch_cards=(TorchCard("NVIDIA GeForce RTX 4070", (8, 9)),),
    torch_archs=("sm_75", "sm_80", "sm_86", "sm_90", "sm_120"),
    gpus=(RTX_4070,),
)
UNSEEN = replace(HEALTHY, torch_available=False, torch_cards=(), torch_error="CUDA unknown error")


def refusal(requested: str, seen: Observations) -> UserError:
    with pytest.raises(UserError) as caught:
        decide_device(requested, seen)
    return caught.value


def test_a_healthy_card_is_taken() -> None:
    assert decide_device("auto", HEALTHY) == "cuda"
    assert decide_device("cuda", HEALTHY) == "cuda"
    assert decide_device("cuda:0", HEALTHY) == "cuda:0"
    assert decide_device(" CPU ", HEALTHY) == "cpu"


def test_torch_alone_seeing_a_card_is_enough() -> None:
    """AMD cards, and machines without NVML."""
    assert decide_device("auto", replace(HEALTHY, gpus=())) == "cuda"
    amd = replace(HEALTHY, gpus=(), torch_cuda=None, torch_hip="6.3", torch_archs=("gfx1100",))
    assert decide_device("auto", amd) == "cuda"


def test_auto_without_any_card_is_the_cpu() -> None:
    assert decide_device("auto", NOTHING) == "cpu"
    assert decide_device("auto", replace(NOTHING, torch_cuda=None)) == "cpu"


def test_asking_for_a_card_where_there_is_none() -> None:
    error = refusal("cuda", NOTHING)
    assert "no usable graphics card" in error.what
    assert "--device=cpu" in error.hint


def test_a_card_number_too_high_says_how_many_there_are() -> None:
    error = refusal("cuda:3", HEALTHY)
    assert "cuda:3" in error.what
    assert "1 card," in error.why
    assert "cuda:0" in error.hint
    two = replace(HEALTHY, torch_cards=HEALTHY.torch_cards * 2, visible_devices="0,1")
    assert decide_device("cuda:1", two) == "cuda:1"
    assert "2 cards" in refusal("cuda:2", two).why
    assert "CUDA_VISIBLE_DEVICES=0,1" in refusal("cuda:2", two).why


@pytest.mark.parametrize("requested", ["mps", "gpu", "cuda:", "cuda:-1", "cuda:x", "", "xpu:0"])
def test_other_devices_are_refused_with_the_possible_ones(requested: str) -> None:
    error = refusal(requested, HEALTHY)
    assert all(word in error.why for word in ("auto", "cpu", "cuda", "cuda:N"))


@pytest.mark.parametrize("requested", ["auto", "cuda", "cuda:0"])
@pytest.mark.parametrize(
    ("seen", "reason", "fix"),
    [
        (replace(UNSEEN, torch_cuda=None), "CPU-only build", "pip install --force-reinstall torch"),
        (
            replace(UNSEEN, torch_cuda="13.0"),
            "driver 550.54 supports CUDA 12.4 at most",
            "update the NVIDIA driver",
        ),
        (replace(UNSEEN, visible_devices=""), "hides every card", "unset CUDA_VISIBLE_DEVICES"),
        (replace(UNSEEN, visible_devices="-1"), "hides every card", "unset CUDA_VISIBLE_DEVICES"),
        (replace(UNSEEN, visible_devices="7"), "hides every card", "unset CUDA_VISIBLE_DEVICES"),
        (replace(UNSEEN, visible_devices="GPU-9"), "hides every card", "unset CUDA_VISIBLE_DEVICES"),
        (replace(UNSEEN, visible_devices="0"), "CUDA unknown error", "nvidia-smi"),
        (replace(UNSEEN, visible_devices="GPU-1234"), "CUDA unknown error", "nvidia-smi"),
        (replace(UNSEEN, visible_devices="MIG-5"), "CUDA unknown error", "nvidia-smi"),
        (UNSEEN, "CUDA unknown error", "nvidia-smi"),
        (replace(UNSEEN, torch_error=""), "no reason", "nvidia-smi"),
        (replace(UNSEEN, gpus=(), torch_available=True), "CUDA unknown error", "nvidia-smi"),
        (replace(UNSEEN, gpus=(), driver_trouble="version mismatch"), "version mismatch", "restart"),
    ],
)
def test_a_card_torch_cannot_use_is_never_passed_over(
    requested: str, seen: Observations, reason: str, fix: str
) -> None:
    error = refusal(requested, seen)
    assert "torch cannot use" in error.what
    assert reason in error.why
    assert fix in error.hint
    assert "--device=cpu" in error.hint
    assert decide_device("cpu", seen) == "cpu"


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 9), ("sm_80",), True),
        ((8, 9), ("sm_86",), True),
        ((8, 0), ("sm_86",), False),  # code for a newer minor
        ((8, 9), ("sm_75", "sm_90"), False),
        ((12, 0), ("sm_90", "compute_90"), True),  # PTX is compiled for newer cards
        ((8, 9), ("compute_90",), False),
        ((12, 0), ("sm_120",), True),
        ((12, 1), ("sm_120a",), False),
        ((12, 0), ("sm_120a",), True),
        ((10, 3), ("sm_100f",), True),
        ((7, 0), ("sm_75", "sm_80"), False),
        ((7, 0), (), True),  # unknown: leave it to torch
    ],
)
def test_which_cards_a_wheel_has_code_for(
    capability: tuple[int, int], archs: tuple[str, ...], runs: bool
) -> None:
    seen = replace(HEALTHY, torch_cards=(TorchCard("Some card", capability),), torch_archs=archs)
    if runs:
        assert decide_device("auto", seen) == "cuda"
    else:
        error = refusal("auto", seen)
        assert "no code for Some card" in error.what
        assert f"{capability[0]}.{capability[1]}" in error.why
        assert "--device=cpu" in error.hint


def test_a_wheel_without_code_hints_up_or_down_and_at_the_other_card() -> None:
    archs = ("sm_80", "sm_90")
    new, old = TorchCard("New", (12, 0)), TorchCard("Old", (7, 0))
    fine = TorchCard("Fine", (8, 6))
    assert "--upgrade torch" in refusal("auto", replace(HEALTHY, torch_cards=(new,), torch_archs=archs)).hint
    error = refusal("auto", replace(HEALTHY, torch_cards=(old, fine), torch_archs=archs))
    assert "older torch" in error.hint
    assert "--device=cuda:1   takes the Fine" in error.hint


def fake_torch(**cuda: Any) -> SimpleNamespace:
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda index: "NVIDIA GeForce RTX 4070",
        "get_device_capability": lambda index: (8, 9),
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "get_device_properties": lambda device: SimpleNamespace(
            name="NVIDIA GeForce RTX 4070", total_memory=12282 * 2**20
        ),
    }
    version = SimpleNamespace(cuda="12.8", hip=None)
    return SimpleNamespace(__version__="2.11.0", version=version, cuda=SimpleNamespace(**(functions | cuda)))


def test_resolve_device_looks_at_torch_and_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert machine.resolve_device("auto") == "cuda"

    def fail() -> int:
        raise RuntimeError("no kernel module")

    monkeypatch.setitem(sys.modules, "torch", fake_torch(is_available=lambda: False, current_device=fail))
    with pytest.raises(UserError, match="RTX 4070 is here") as caught:
        machine.resolve_device("auto")
    assert "no kernel module" in caught.value.why


def test_resolve_device_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert machine.resolve_device("cpu") == "cpu"
    with pytest.raises(UserError, match="torch") as caught:
        machine.resolve_device("auto")
    assert "[train]" in caught.value.hint


def test_peak_flops_of_the_actual_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert machine.peak_flops("cuda", "bfloat16") == pytest.approx(58.3e12)
    assert machine.peak_flops("cuda:0", "float32") == pytest.approx(29.1e12)
    assert machine.peak_flops("cpu", "bfloat16") is None
    unknown = SimpleNamespace(name="NVIDIA GeForce GTX 1080", total_memory=8 * GIB)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(get_device_properties=lambda device: unknown))
    assert machine.peak_flops("cuda", "float32") is None
    monkeypatch.setitem(sys.modules, "torch", fake_torch(get_device_properties=refuse))
    assert machine.peak_flops("cuda", "float32") is None
