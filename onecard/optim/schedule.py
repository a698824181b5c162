"""Rates as functions of the step: no state to save, nothing to get out of step on resume."""

from __future__ import annotations

import math

from onecard.config import RunConfig
from onecard.dial import batch_lr_scale
from onecard.optim.rules import Rates


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


def trapezoid(step: int, config: RunConfig) -> float:
    """nanochat's: up in warmup_iters, level, in the last warmdown_ratio of the run down to final_lr_frac."""
    assert config.warmdown_ratio is not None and config.final_lr_frac is not None
    down = round(config.warmdown_ratio * config.max_iters)
    if step < config.warmup_iters:
        return (step + 1) / config.warmup_iters
    if not config.decay_lr or not down or step <= config.max_iters - down:
        return 1.0
    left = max(config.max_iters - step, 0) / down
    return left + (1 - left) * config.final_lr_frac


def rates(step: int, config: RunConfig) -> Rates:
    """What the optimizer's rules (optim/recipe.py) are multiplied by in this step."""
    if config.arch == "gpt2":
        rate = learning_rate(step, config)
        if not config.by_muon:
            return Rates(rate)
        level = rate / config.learning_rate if config.learning_rate else 0.0
        return Rates(level, momentum=_rising(step, 0.85, 0.95, 300))
    level = trapezoid(step, config)
    if config.generation == 2025:
        return Rates(level, momentum=_rising(step, 0.85, 0.95, 300))
    decay = 0.5 * (1 + math.cos(math.pi * min(step / max(config.max_iters, 1), 1.0)))
    return Rates(level, momentum=_momentum_2026(step, config), decay=decay)


def shown_rate(step: int, config: RunConfig) -> float:
    """The one learning rate a log line has room for: AdamW's for all, or that of Muon's matrices."""
    if not config.by_muon:
        return learning_rate(step, config)
    scale = 1.0 if config.arch == "gpt2" else batch_lr_scale(config.generation, config.tokens_per_step)
    return rates(step, config).lr * config.muon_lr * scale


def _rising(step: int, start: float, end: float, steps: int) -> float:
    done = min(step / steps, 1.0)
    return (1 - done) * start + done * end


def _momentum_2026(step: int, config: RunConfig) -> float:
    """Up to 0.97 in 400 steps, down to 0.90 with the learning rate."""
    assert config.warmdown_ratio is not None
    down = round(config.warmdown_ratio * config.max_iters)
    if step < 400:
        return _rising(step, 0.85, 0.97, 400)
    if not down or step < config.max_iters - down:
        return 0.97
    return _rising(step - (config.max_iters - down), 0.97, 0.90, down)
