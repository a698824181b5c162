"""What this process may use of the processor."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores this process may run on: fewer than the machine has in a container or under taskset."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        return os.cpu_count() or 1
