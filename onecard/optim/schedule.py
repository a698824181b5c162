"""Learning rate as a function of the step: no state to save, nothing to get out of step on resume."""

from __future__ import annotations

import math

from onecard.config import RunConfig


def learning_rate(step: int, config: RunConfig) -> float:
    """nanoGPT's schedule: linear warm-up, cosine down to min_lr at lr_decay_iters, min_lr after it."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= config.lr_decay_iters:
        return config.min_lr
    progress = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (config.learning_rate - config.min_lr)
