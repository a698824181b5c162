"""What this process may use of the processor and its memory."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LocalCpu:
    """The processor, as much of it as this process may use."""

    name: str
    cores: int
    memory_bytes: int | None


def usable_cores() -> int:
    """Cores this process may run on: fewer than the machine has in a container or under taskset."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        return os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, within a container's limit; None where not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii"))
            for name in ("max", "current")
        )
        # Pages of files that the container has read count as used, and are given back when needed.
        cached = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii")
        given_back = next(int(x.split()[1]) for x in cached.splitlines() if x.startswith("inactive_file "))
    except (OSError, StopIteration, ValueError):  # no limit is the word "max"
        return free
    return min(free, limit - used + given_back)


def local_cpu() -> LocalCpu:
    """The processor and memory that this process may use (containers and affinity taken into account)."""
    return LocalCpu(_cpu_name(), usable_cores(), _host_memory())


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _host_memory() -> int | None:
    if sys.platform == "win32":
        import ctypes

        # GlobalMemoryStatusEx fills a 64-byte record: two 32-bit fields, then the total as a 64-bit one.
        record = (ctypes.c_uint64 * 8)(64)
        return int(record[1]) if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(record)) else None
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
