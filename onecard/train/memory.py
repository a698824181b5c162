"""How much memory a run has taken, measured."""

from __future__ import annotations

import sys

import torch


def peak_memory_gib(device: str) -> float | None:
    """Most memory held so far: by the allocator on a card, by the whole process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux
