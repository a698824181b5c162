"""Other processes on the card, and how full it is.

Another trainer takes speed, a desktop takes memory, and some drivers do not fail when a card is full: they
move memory to RAM, and training goes on many times slower without a word. What can be known of all that at
the start is noted there; speed_watch.py notices what comes later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onecard.hardware.machine import GIB, GpuProcess, local_gpus
from onecard.hardware.measured import Load
from onecard.hardware.sensors import find_sensors
from onecard.language import _
from onecard.plan.bill import CONTEXT

MIB = 2**20
# Kept free where the driver spills, the larger of the two. A choice and not a measurement: room for a desktop
# to open some windows in, and more than what counts as full, so that a card we filled ourselves does not.
_CAREFUL_SHARE, _CAREFUL_BYTES = 0.03, int(0.4 * GIB)
# Full: less free than this share of the card, or than this. A choice too.
_FULL_SHARE, _FULL_BYTES = 0.02, 300 * MIB
# Less than this in use by a desktop is usual; less than the other by no listed process is the driver's own.
_WORTH_REPORTING, _SOMEBODY = 100 * MIB, GIB
# A desktop's programs that a driver may list as computing: they do, now and then, to draw.
_DESKTOP = (
    "xorg", "xwayland", "gnome-", "kwin", "plasma", "mutter", "cinnamon", "xfwm", "sway", "hyprland",
    "weston", "firefox", "chrom", "msedge", "brave", "opera", "vivaldi", "electron", "discord", "steam",
    "dwm", "explorer", "csrss", "shellexperiencehost", "searchhost", "startmenuexperiencehost",
    "textinputhost", "applicationframehost", "systemsettings",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """The card at one moment, and who else is on it. None or empty: the driver does not report it."""

    free_bytes: int | None = None
    total_bytes: int | None = None
    others: tuple[GpuProcess, ...] = ()
    unnamed_bytes: int | None = (
        None  # in use, and by no process on the list: other containers, Windows from WSL
    )
    load: Load = field(default_factory=Load)
    held_back_by: tuple[str, ...] = ()

    @property
    def full(self) -> bool:
        """Where the driver spills, this full is too full."""
        if self.free_bytes is None or self.total_bytes is None:
            return False
        return self.free_bytes < max(_FULL_SHARE * self.total_bytes, _FULL_BYTES)

    @property
    def computing(self) -> tuple[GpuProcess, ...]:
        return tuple(p for p in self.others if computes(p))

    def unnamed(self) -> list[str]:
        held = self.unnamed_bytes or 0
        note = _("programs that the driver does not name hold {n} of the card").format(n=gib(held))
        return [note] if held >= _SOMEBODY else []


def look_at(device: str) -> Look:
    """Asks the driver, which takes some milliseconds: not for every step. CUDA must have been started."""
    if not device.startswith("cuda"):
        return Look()
    import torch

    own = torch.cuda.memory_reserved(device) + CONTEXT
    free, total = torch.cuda.mem_get_info(device)
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or None
    sensors = find_sensors(uuid)
    load, held_back_by = (sensors.read(), sensors.held_back_by()) if sensors else (Load(), ())
    gpus = local_gpus()
    alone = gpus[0] if len(gpus) == 1 else None
    gpu = next((gpu for gpu in gpus if gpu.uuid and uuid and uuid in gpu.uuid), alone)
    if gpu is None:
        return Look(free, total)
    unnamed = None
    others = without_this_process(gpu.processes, own)
    shares = [next((p.memory_bytes for p in gpu.processes if p.mine), None) or own]
    shares += [p.memory_bytes for p in others if p.memory_bytes is not None]
    if gpu.free_bytes is not None and gpu.total_bytes is not None and len(shares) == len(others) + 1:
        unnamed = max(gpu.total_bytes - gpu.free_bytes - sum(shares), 0)
    return Look(
        free if gpu.free_bytes is None else min(free, gpu.free_bytes), total, tuple(others), unnamed, load,
        held_back_by,
    )  # fmt: skip


def without_this_process(processes: Sequence[GpuProcess], own_bytes: int) -> list[GpuProcess]:
    """The others. In a container the driver may list it under the number it has outside, which
    has no name in here: of such ones, that with the memory nearest to ours is taken for us."""
    others = [p for p in processes if not p.mine]
    nameless = [p for p in others if p.name is None and not p.draws]
    if nameless and len(others) == len(processes):
        others.remove(min(nameless, key=lambda p: abs((p.memory_bytes or 0) - own_bytes)))
    return others


def computes(process: GpuProcess) -> bool:
    """Or is it only a part of the desktop?"""
    return not process.draws and not (process.name or "").lower().startswith(_DESKTOP)


def process_notes(look: Look) -> list[str]:
    """What is to be known of other processes at the start of a run."""
    notes = []
    for p in look.computing:
        if p.memory_bytes is None:
            holds = _("its memory is not reported")
        else:
            holds = _("it holds {n}").format(n=gib(p.memory_bytes))
        notes.append(
            _(
                "another program computes on this card: {who}, {holds}; while both are busy, each gets a "
                "part of the speed"
            ).format(who=who(p), holds=holds)
        )
    desktop = [p for p in look.others if not computes(p)]
    shares = [p.memory_bytes for p in desktop if p.memory_bytes is not None]
    if desktop and not shares:
        notes.append(
            _(
                "a desktop's programs (windows, browser) are on this card; the driver does not report "
                "their memory"
            )
        )
    elif sum(shares) >= _WORTH_REPORTING:
        text = _("a desktop's programs (windows, browser) hold {n} of the card")
        if len(shares) < len(desktop):
            text = _("a desktop's programs (windows, browser) hold at least {n} of the card")
        notes.append(text.format(n=gib(sum(shares))))
    return [*notes, *look.unnamed()]


def spilling_platform(platform: str = sys.platform, kernel: str | None = None) -> str | None:
    """Where the driver moves memory to RAM instead of failing; None where a full card is an error."""
    if platform == "win32":
        return "Windows"
    if kernel is None and platform == "linux":
        try:
            kernel = Path("/proc/version").read_text(encoding="utf-8", errors="replace")
        except OSError:
            kernel = ""
    return "WSL2" if platform == "linux" and "microsoft" in (kernel or "").lower() else None


def careful_bytes(free: int, total: int, spills: bool) -> int:
    """How far to stay below what is free now, where a desktop that grows would push us into host memory."""
    return min(free, max(int(_CAREFUL_SHARE * total), _CAREFUL_BYTES)) if spills else 0


def spilling_note(platform: str, careful: int) -> str:
    return _(
        "on {platform} the driver may move memory of a full card to RAM instead of failing, and steps take "
        "many times as long: onecard stays {n} below what is free now; --vram_reserve=GIB changes that"
    ).format(platform=platform, n=gib(careful))


def who(process: GpuProcess) -> str:
    name = process.name or _("a program without a readable name")
    return _("{program} (pid {pid})").format(program=name, pid=str(process.pid))


def gib(count: int) -> str:
    return _("{n:.2f} GiB").format(n=count / GIB)
