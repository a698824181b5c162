"""What this process may use of the processor and its memory."""

from __future__ import annotations

import os
from pathlib import Path


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
