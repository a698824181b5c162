"""How much memory a run has taken, and what to do when there is not enough."""

from __future__ import annotations

import sys

import torch

from onecard.config import RunConfig
from onecard.errors import UserError


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


def is_out_of_memory(error: BaseException) -> bool:
    """On a card torch has an error of its own; on the CPU it is a RuntimeError like any other."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def out_of_memory(config: RunConfig) -> UserError:
    """The same step in smaller micro-batches is the same training, in less memory."""
    if config.batch_size == 1:
        hint = "a smaller model or a shorter --block_size needs less"
    else:
        half = config.batch_size // 2
        more = -(-config.sequences_per_step // half)
        hint = f"--batch_size={half} --gradient_accumulation_steps={more} needs about half for activations"
        if half * more == config.sequences_per_step:
            hint += "; the training is the same"
    micro_batch = f"{config.batch_size} sequences of {config.block_size} tokens"
    return UserError("out of memory", f"a micro-batch of {micro_batch} does not fit", hint, exit_code=1)
