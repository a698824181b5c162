"""Changes of a config that make a run another experiment than the one in its folder."""

from __future__ import annotations

from typing import Any

from onecard.config.files import CHECKPOINT
from onecard.config.knobs import knobs
from onecard.config.run import RunConfig


def differences(before: RunConfig, now: RunConfig) -> list[tuple[str, Any, Any]]:
    """(knob, before, now) for every knob that makes `now` another experiment than `before`."""
    split = ("batch_size", "gradient_accumulation_steps")
    # To extend a run is to go on with it, further.
    extends = now.extend is not None and now.max_iters > before.max_iters
    longer = ("max_iters", "tokens", "lr_decay_iters", "extend", "extend_lr") if extends else ()
    found = [
        (f.name, getattr(before, f.name), getattr(now, f.name))
        for f in knobs(RunConfig)
        if f.metadata["changes_result"]
        and f.name not in (*split, *longer)
        and getattr(before, f.name) != getattr(now, f.name)
        # Set in neither, it followed from something else (tokens, a checkpoint's block size).
        and (_asked_for(before, f.name) or _asked_for(now, f.name))
    ]
    # 16 × 32 and 8 × 64 are the same step, split otherwise.
    if before.sequences_per_step != now.sequences_per_step:
        found += [(name, getattr(before, name), getattr(now, name)) for name in split]
    return found


def _asked_for(config: RunConfig, name: str) -> bool:
    """By a person; what a continued model brought along counts as set, but nobody asked for it."""
    return config.is_set(name) and config.origins[name] != CHECKPOINT
