"""This machine: its cards as the driver sees them, and where a run computes.

Nothing here imports torch at the top, so that plan, gpus and doctor stay quick and work without it.
NVML (nvidia-ml-py) may be missing, old or forbidden: what it does not report is None.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecard.errors import UserError, missing_package
from onecard.hardware.cards import Card, match_card
from onecard.language import N_, _, ngettext

GIB = 2**30


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a card; its share is None where the driver does not report it (WSL)."""

    pid: int
    name: str | None
    memory_bytes: int | None
    mine: bool = False
    draws: bool = False  # on the screen, whether it computes too or not


@dataclass(frozen=True)
class LocalGpu:
    """A card in this machine. `index` is NVML's (PCI order); CUDA may count in another order."""

    index: int
    uuid: str | None
    name: str
    card: Card | None
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    cuda_driver: tuple[int, int] | None = None
    compute_capability: tuple[int, int] | None = None
    processes: list[GpuProcess] = field(default_factory=list)
    power_limit_w: float | None = None
    display_active: bool | None = None


def local_gpus() -> list[LocalGpu]:
    """The cards NVML sees; [] where there is no NVIDIA card, driver or NVML."""
    return survey_gpus()[0]


def survey_gpus() -> tuple[list[LocalGpu], str]:
    """The cards, and what is wrong with the driver if one is installed but does not answer."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return [], ""
    except Exception as error:
        # 9 and 12 are "driver not loaded" and "library not found": no driver, so no card to speak of. Any
        # other failure (a driver updated while in use, a card fallen off the bus) is trouble with a card.
        absent = getattr(error, "value", 12) in (9, 12)
        return [], "" if absent else _("the driver's library does not start: {error}").format(error=error)
    try:
        count = _ask(nvml, "nvmlDeviceGetCount") or 0
        return [gpu for index in range(count) if (gpu := _look_at(nvml, index)) is not None], ""
    finally:
        _ask(nvml, "nvmlShutdown")


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """One NVML question. Old libraries lack functions and drivers refuse some: both mean "not known"."""
    try:
        answer = getattr(nvml, function)(*arguments)
    except Exception:
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _look_at(nvml: Any, index: int) -> LocalGpu | None:
    handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    name = _ask(nvml, "nvmlDeviceGetName", handle) or "unknown NVIDIA card"
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    total = int(memory.total) if memory is not None else None
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    milliwatts = _ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
    display = _ask(nvml, "nvmlDeviceGetDisplayActive", handle)
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2") or _ask(nvml, "nvmlSystemGetCudaDriverVersion")
    return LocalGpu(
        index=index,
        uuid=_ask(nvml, "nvmlDeviceGetUUID", handle),
        name=name,
        card=match_card(name, total / GIB if total else None),
        total_bytes=total,
        free_bytes=int(memory.free) if memory is not None else None,
        driver=_ask(nvml, "nvmlSystemGetDriverVersion"),
        cuda_driver=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        processes=_processes(nvml, handle),
        power_limit_w=milliwatts / 1000 if milliwatts else None,
        display_active=bool(display) if display is not None else None,
    )


def _processes(nvml: Any, handle: Any) -> list[GpuProcess]:
    """Everyone on the card, the largest first. One that both computes and draws is listed twice by NVML."""
    held: dict[int, int | None] = {}
    drawing = set()
    for kind in ("Compute", "Graphics"):
        for process in _ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) or []:
            share = process.usedGpuMemory
            if share is not None and share >= 2**63:  # NVML's "not available", if the binding passes it on
                share = None
            known = held.get(process.pid)
            both = known is not None and share is not None
            held[process.pid] = max(known, share) if both else known or share
            if kind == "Graphics":
                drawing.add(process.pid)
    found = [
        GpuProcess(pid, _process_name(nvml, pid), share, mine=pid == os.getpid(), draws=pid in drawing)
        for pid, share in held.items()
    ]
    return sorted(found, key=lambda process: (-(process.memory_bytes or 0), process.pid))


def _process_name(nvml: Any, pid: int) -> str | None:
    """Program and script, not the whole command line: arguments may hold keys and passwords."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    # Browsers rewrite their command line into one string, hence the cut at the first option.
    program = re.split(r"[/\\]", words[0].split(" -")[0].strip())[-1] if words else ""
    if not program:
        reported = _ask(nvml, "nvmlSystemGetProcessName", pid)
        return re.split(r"[/\\]", reported)[-1] or None if reported else None
    if program.startswith("python"):
        if words[1:2] == ["-m"]:
            return " ".join([program, *words[1:3]])
        if len(words) > 1 and words[1] and not words[1].startswith("-"):
            return f"{program} {Path(words[1]).name}"
    return program


@dataclass(frozen=True)
class TorchCard:
    """A card as torch sees it."""

    name: str
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Observations:
    """All that the choice of a device depends on, so that the choice itself is a pure function."""

    torch_version: str = ""
    torch_cuda: str | None = None  # the CUDA release torch was built for; None in a CPU build
    torch_hip: str | None = None  # the same for an AMD build
    torch_available: bool = False
    torch_cards: tuple[TorchCard, ...] = ()
    torch_archs: tuple[str, ...] = ()
    torch_error: str = ""  # what torch says when CUDA is started
    gpus: tuple[LocalGpu, ...] = ()  # what NVML sees
    driver_trouble: str = ""
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES


def observe() -> Observations:
    """Look at torch, the driver and the environment. Starts CUDA if torch can."""
    try:
        import torch
    except ImportError:
        raise missing_package("torch", "train", _("choosing a device to train on")) from None
    gpus, trouble = survey_gpus()
    cards: tuple[TorchCard, ...] = ()
    error = ""
    with warnings.catch_warnings():
        # torch warns about old drivers and unknown cards; the decision below says it once, with the fix.
        warnings.simplefilter("ignore")
        available = torch.cuda.is_available()
        if available or gpus or trouble:
            try:
                torch.cuda.current_device()  # starts CUDA, and says why if that fails
                cards = tuple(
                    TorchCard(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
                    for i in range(torch.cuda.device_count())
                )
            except Exception as failure:  # torch raises AssertionError, RuntimeError and its own kinds here
                error = str(failure)
        archs = tuple(torch.cuda.get_arch_list())
    return Observations(
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        torch_available=available,
        torch_cards=cards,
        torch_archs=archs,
        torch_error=error,
        gpus=tuple(gpus),
        driver_trouble=trouble,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def resolve_device(requested: str) -> str:
    """The one place that decides where a run computes: 'cpu', 'cuda' or 'cuda:N'.

    'auto' takes a card if there is one. A card that is there but cannot be used is an error with its
    cause, because a run that crawls along on the CPU unnoticed costs a person days.
    """
    wanted = _normalized(requested)
    return wanted if wanted == "cpu" else decide_device(wanted, observe())


ON_PURPOSE = N_("--device=cpu   to compute on the CPU on purpose (slow)")


def _normalized(requested: str) -> str:
    wanted = requested.strip().lower()
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", wanted):
        raise UserError(
            _("device '{name}' is not one onecard can compute on").format(name=requested),
            why=_("possible are auto, cpu, cuda and cuda:N (N counts the cards from 0)"),
            hint=_("--device=auto   takes a card if there is one"),
        )
    return wanted


def decide_device(requested: str, seen: Observations) -> str:
    """resolve_device's decision, from what was observed."""
    wanted = _normalized(requested)
    if wanted == "cpu":
        return "cpu"
    if not seen.torch_cards:
        if seen.gpus or seen.driver_trouble or seen.torch_available:
            raise _why_torch_sees_none(seen)
        if wanted == "auto":
            return "cpu"
        raise UserError(
            _("device '{name}' was asked for, but there is no usable graphics card here").format(name=wanted),
            why=_("neither torch nor the NVIDIA driver's library sees one"),
            hint=_fixes(_("if a card is built in, install its driver (nvidia-smi must list it)")),
        )
    index = int(wanted.partition(":")[2] or 0)
    count = len(seen.torch_cards)
    if index >= count:
        why = ngettext(
            "there is {n} card, counted from cuda:0", "there are {n} cards, counted from cuda:0", count
        ).format(n=count)
        if seen.visible_devices is not None:
            limited = _("; CUDA_VISIBLE_DEVICES={value} limits which ones torch sees")
            why += limited.format(value=seen.visible_devices)
        what = _("device '{name}' does not exist").format(name=wanted)
        raise UserError(what, why, hint=f"--device=cuda:{count - 1}")
    if not _has_code_for(seen, index):
        raise _no_code(seen, index)
    return "cuda" if wanted == "auto" else wanted


def _fixes(*ways: str) -> str:
    """A hint of these, and last the CPU."""
    return "\n".join([*ways, _(ON_PURPOSE)])


def _why_torch_sees_none(seen: Observations) -> UserError:
    """A card is there and torch cannot use it: the first cause that explains it, and its fix."""
    what = _("torch cannot use the graphics card")
    if seen.gpus:
        what = _("{card} is here, but torch cannot use it").format(card=seen.gpus[0].name)
    torch = f"torch {seen.torch_version}".strip()
    if seen.driver_trouble:
        fix = _("restart the machine: a driver updated while in use needs it (nvidia-smi must list the card)")
        return UserError(what, seen.driver_trouble, _fixes(fix))
    if seen.torch_cuda is None and seen.torch_hip is None:
        fix = _("pip install --force-reinstall torch   (on Linux and WSL2 this is the CUDA build)")
        return UserError(what, _("{torch} is a CPU-only build").format(torch=torch), _fixes(fix))
    if seen.gpus and _hides_every_card(seen.visible_devices, seen.gpus):
        why = _("CUDA_VISIBLE_DEVICES='{value}' hides every card").format(value=seen.visible_devices)
        return UserError(what, why, _fixes("unset CUDA_VISIBLE_DEVICES"))
    built_for = int(seen.torch_cuda.partition(".")[0]) if seen.torch_cuda else 0
    driver_cuda = seen.gpus[0].cuda_driver if seen.gpus else None
    if driver_cuda is not None and driver_cuda[0] < built_for:
        newest = f"CUDA {driver_cuda[0]}.{driver_cuda[1]}"
        driver = _("driver {version}").format(version=seen.gpus[0].driver or "").strip()
        why = _("{driver} supports {newest} at most, and {torch} is built for CUDA {cuda}")
        why = why.format(driver=driver, newest=newest, torch=torch, cuda=seen.torch_cuda)
        fix = _("update the NVIDIA driver, or install a torch built for CUDA {n}").format(n=driver_cuda[0])
        return UserError(what, why, _fixes(fix))
    why = _("{torch} says: {text}") if seen.torch_error else _("{torch} gives no reason")
    why = why.format(torch=torch, text=seen.torch_error)
    return UserError(what, why, _fixes(_("nvidia-smi   shows whether the card itself is well")))


def _hides_every_card(visible: str | None, gpus: tuple[LocalGpu, ...]) -> bool:
    """CUDA reads the list up to its first invalid entry, so the first one decides whether any card shows."""
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    if re.fullmatch(r"\+?[0-9]+", first):
        return int(first) >= len(gpus)
    if first.startswith("MIG-"):
        return False  # slices of a card are not in our list: nothing to say against this one
    return not (first.startswith("GPU-") and any((gpu.uuid or first).startswith(first) for gpu in gpus))


_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def _has_code_for(seen: Observations, index: int) -> bool:
    """Binary code runs on its own major version, from its minor upwards; PTX on anything newer."""
    card = seen.torch_cards[index].compute_capability
    archs = [match.groups() for arch in seen.torch_archs if (match := _ARCH.fullmatch(arch))]
    for kind, major, minor, only in archs:
        arch = int(major), int(minor)
        # An 'a' build uses features of exactly one chip.
        if arch == card or (only != "a" and arch <= card and (kind == "compute" or arch[0] == card[0])):
            return True
    return not archs  # an AMD build names its chips otherwise, and is left to speak for itself


def _no_code(seen: Observations, index: int) -> UserError:
    card = seen.torch_cards[index]
    major, minor = card.compute_capability
    newer = all((major, minor) > (int(m[2]), int(m[3])) for m in map(_ARCH.fullmatch, seen.torch_archs) if m)
    fixes = ["pip install --upgrade torch"]
    if not newer:
        fixes = [_("install an older torch, or one built for an older CUDA")]
    others = [i for i in range(len(seen.torch_cards)) if _has_code_for(seen, i)]
    if others:
        instead = _("--device=cuda:{index}   takes the {card} instead")
        fixes.append(instead.format(index=others[0], card=seen.torch_cards[others[0]].name))
    return UserError(
        _("torch {version} has no code for {card}").format(version=seen.torch_version, card=card.name),
        _("its compute capability is {capability}; this torch is built for {archs}").format(
            capability=f"{major}.{minor}", archs=", ".join(seen.torch_archs)
        ),
        _fixes(*fixes),
    )


def peak_flops(device: str, dtype: str) -> float | None:
    """FLOP/s the device could reach at best, for the MFU; None on the CPU and on unknown cards."""
    card = card_behind(device)
    tflops = card.peak_tflops(dtype) if card is not None else None
    return tflops * 1e12 if tflops is not None else None


def card_behind(device: str) -> Card | None:
    if not device.startswith("cuda"):
        return None
    try:
        # torch, not NVML, says which card a number means: the two may count in different orders.
        import torch

        properties = torch.cuda.get_device_properties(device)
    except Exception:
        return None
    return match_card(properties.name, properties.total_memory / GIB)
