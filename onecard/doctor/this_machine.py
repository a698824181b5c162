"""This machine, line by line: what a run needs of it, whether that is there, and the command that mends it.

`look()` asks the machine; `checks_of()` judges what was seen and is a pure function, so that machines that
nobody has here can be judged in tests.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onecard.errors import UserError, install_command
from onecard.hardware.cpu import available_memory, local_cpu
from onecard.hardware.machine import LocalGpu, Observations, decide_device, observe, survey_gpus
from onecard.language import _

GIB = 2**30
OK, WARNING, WRONG = "ok", "warning", "wrong"
# Below these a usual run (GPT-2 124M, three checkpoints of 1.5 GB, its data) does not go through.
LEAST_DISK, LEAST_HOST = 10 * GIB, 6 * GIB
BUSY = GIB // 2  # of the card, by another program: about what a desktop takes
HOT_C = 84.0  # where GeForce cards begin to lower their clock


@dataclass(frozen=True)
class Check:
    level: str
    text: str
    mend: str = ""  # a command, or what to do


@dataclass(frozen=True)
class Seen:
    """What was seen of a machine; None where it could not be asked."""

    system: str = ""
    wsl: bool = False
    python: str = ""
    torch_version: str | None = None
    torch: Observations | None = None
    gpus: tuple[LocalGpu, ...] = ()
    trouble: str = ""
    compiler: str | None = None
    triton: str | None = None
    disk_free: int | None = None
    folder: str = "."
    host_total: int | None = None
    host_free: int | None = None
    locked_limit: int | None = None  # bytes a process may lock; None: no limit, or not known
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    held_back: tuple[str, ...] = ()
    allocator: str | None = None  # PYTORCH_CUDA_ALLOC_CONF
    caches: tuple[tuple[str, int], ...] = field(default=())  # (folder, bytes)


def look(folder: str = ".") -> Seen:
    """Ask this machine. Loads torch where it is installed, for it alone knows what it can use."""
    gpus, trouble = survey_gpus()
    release = platform.release().lower()
    return Seen(
        system=f"{platform.system()} {platform.release()}",
        wsl="microsoft" in release,
        python=platform.python_version(),
        torch_version=_version("torch"),
        torch=_torch(),
        gpus=tuple(gpus),
        trouble=trouble,
        compiler=_compiler(),
        triton=_version("triton"),
        disk_free=_disk(folder),
        folder=folder,
        host_total=local_cpu().memory_bytes,
        host_free=available_memory(),
        locked_limit=_locked_limit(),
        **_sensors(),
        allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> Observations | None:
    try:
        return observe()
    except (UserError, ImportError, OSError):
        return None


def _compiler() -> str | None:
    names = (
        [os.environ.get("CC", ""), "cl"]
        if sys.platform == "win32"
        else [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    )
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _disk(folder: str) -> int | None:
    try:
        return shutil.disk_usage(Path(folder)).free
    except OSError:
        return None


def _locked_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _sensors() -> dict[str, Any]:
    from onecard.hardware.sensors import find_sensors

    sensors = find_sensors(None)
    if sensors is None:
        return {}
    load = sensors.read()
    return {
        "temperature_c": load.temperature_c,
        "power_w": load.power_w,
        "power_limit_w": load.power_limit_w,
        "held_back": sensors.held_back_by(),
    }


# --- judged ---------------------------------------------------------------------------------------


def checks_of(seen: Seen) -> list[Check]:
    """In the order in which one depends on the other: the first that is wrong is the one to mend first."""
    return [
        *_card(seen),
        *_torch_and_card(seen),
        *_users(seen),
        *_compile(seen),
        *_memory(seen),
        *_disks(seen),
        *_heat(seen),
        *_surroundings(seen),
    ]


def _card(seen: Seen) -> list[Check]:
    if seen.trouble:
        return [Check(WRONG, seen.trouble, _("restart the machine; nvidia-smi must list the card"))]
    if not seen.gpus:
        return [
            Check(
                WARNING,
                _("no NVIDIA card, or no driver for it: training here is on the CPU"),
                _("if a card is built in, install its driver: nvidia-smi must list it"),
            )
        ]
    checks = []
    for gpu in seen.gpus:
        driver = _("driver {version}").format(version=gpu.driver) if gpu.driver else _("driver unknown")
        cuda = f", CUDA {gpu.cuda_driver[0]}.{gpu.cuda_driver[1]}" if gpu.cuda_driver else ""
        size = f", {gpu.total_bytes / GIB:.1f} GiB" if gpu.total_bytes else ""
        text = f"{gpu.name}{size}; {driver}{cuda}"
        if gpu.compute_capability and gpu.compute_capability < (7, 0):
            text += "; " + _("compute capability {n}: below 7.0 PyTorch's wheels have no code for it")
            checks.append(Check(WRONG, text.format(n=".".join(map(str, gpu.compute_capability)))))
        else:
            checks.append(Check(OK, text))
    return checks


def _torch_and_card(seen: Seen) -> list[Check]:
    if seen.torch_version is None:
        text = _("torch is not installed: plan, eta, report and doctor work without it, training does not")
        return [Check(WARNING, text, install_command("train"))]
    if seen.torch is None:
        text = _("torch {version} is installed and does not load").format(version=seen.torch_version)
        return [Check(WRONG, text, "pip install --force-reinstall torch")]
    built = f"CUDA {seen.torch.torch_cuda}" if seen.torch.torch_cuda else _("a CPU build")
    text = f"torch {seen.torch_version} ({built}), Python {seen.python}"
    try:
        decide_device("auto", seen.torch)
    except UserError as error:
        first = error.hint.splitlines()[0].strip() if error.hint else ""
        return [Check(WRONG, f"{text}: {error.what}" + (f" ({error.why})" if error.why else ""), first)]
    return [Check(OK, text)]


def _users(seen: Seen) -> list[Check]:
    """Who holds memory of the card."""
    checks = []
    for gpu in seen.gpus:
        if gpu.total_bytes is None or gpu.free_bytes is None:
            continue
        taken = gpu.total_bytes - gpu.free_bytes
        text = _("{free:.2f} of {total:.2f} GiB are free").format(
            free=gpu.free_bytes / GIB, total=gpu.total_bytes / GIB
        )
        who = [
            f"{p.name or p.pid} {p.memory_bytes / GIB:.2f} GiB" if p.memory_bytes else str(p.name or p.pid)
            for p in gpu.processes
            if not p.mine
        ]
        if who:
            text += ": " + ", ".join(who[:4])
        pythons = [p.pid for p in gpu.processes if not p.mine and "python" in (p.name or "")]
        if taken <= BUSY:
            checks.append(Check(OK, text))
        elif pythons:
            mend = _("end it if it was left over: kill {pid}").format(pid=pythons[0])
            checks.append(Check(WARNING, text, mend))
        else:
            checks.append(Check(WARNING, text, _("close what is not needed, or plan with --vram_reserve")))
    return checks


def _compile(seen: Seen) -> list[Check]:
    if seen.torch_version is None:
        return []
    if seen.compiler is None:
        mend = (
            "sudo apt install build-essential"
            if sys.platform.startswith("linux")
            else _("install a C compiler")
        )
        return [Check(WARNING, _("no C compiler: torch.compile does not work, runs are slower"), mend)]
    if seen.gpus and seen.triton is None:
        mend = "pip install triton-windows" if sys.platform == "win32" else "pip install triton"
        return [Check(WARNING, _("triton is missing: torch.compile does not work on the card"), mend)]
    triton = f", triton {seen.triton}" if seen.triton else ""
    return [Check(OK, _("C compiler {path}").format(path=seen.compiler) + triton)]


def _memory(seen: Seen) -> list[Check]:
    if seen.host_total is None:
        return []
    free = seen.host_free if seen.host_free is not None else seen.host_total
    text = _("host memory (RAM): {free:.1f} of {total:.1f} GiB are free").format(
        free=free / GIB, total=seen.host_total / GIB
    )
    checks = [Check(OK, text) if free >= LEAST_HOST else Check(WARNING, text, _("close other programs"))]
    if seen.gpus and seen.locked_limit is not None and seen.locked_limit < GIB and not seen.wsl:
        text = _("a process may lock {mib:.0f} MiB of host memory").format(mib=seen.locked_limit / 2**20)
        checks.append(Check(OK, text + _("; CUDA's page-locked buffers are not counted there")))
    return checks


def _disks(seen: Seen) -> list[Check]:
    if seen.disk_free is None:
        return [Check(WRONG, _("{folder} cannot be asked for its free space").format(folder=seen.folder))]
    text = _("disk: {free:.1f} GB free in {folder}").format(free=seen.disk_free / 1e9, folder=seen.folder)
    if seen.disk_free >= LEAST_DISK:
        return [Check(OK, text)]
    return [
        Check(
            WARNING,
            text,
            _("a 124M run keeps three checkpoints of 1.5 GB: make room, or --out_dir elsewhere"),
        )
    ]


def _heat(seen: Seen) -> list[Check]:
    if seen.temperature_c is None:
        return []
    parts = [f"{seen.temperature_c:.0f} °C"]
    if seen.power_w and seen.power_limit_w:
        parts.append(_("{now:.0f} of {limit:.0f} W").format(now=seen.power_w, limit=seen.power_limit_w))
    text = _("card: {parts}").format(parts=", ".join(parts))
    if seen.held_back:
        causes = ", ".join(_(cause) for cause in seen.held_back)
        return [
            Check(
                WARNING,
                text + "; " + _("its clock is held down by {causes}").format(causes=causes),
                _("dust, air and fans; or a lower power limit: onecard bench --power_limits"),
            )
        ]
    if seen.temperature_c >= HOT_C:
        return [Check(WARNING, text, _("look at its fans and the air in the case"))]
    return [Check(OK, text)]


def _surroundings(seen: Seen) -> list[Check]:
    checks = []
    if seen.wsl:
        checks.append(
            Check(
                WARNING,
                _(
                    "WSL: where the card is full, Windows moves its memory to the host and training is many "
                    "times slower"
                ),
                _(
                    "onecard's limit keeps clear of it; in other trainers "
                    "torch.cuda.set_per_process_memory_fraction(0.9)"
                ),
            )
        )
    if seen.allocator:
        checks.append(Check(OK, f"PYTORCH_CUDA_ALLOC_CONF={seen.allocator}"))
    return checks
