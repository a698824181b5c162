"""Rates as functions of the step: there is no state to save or to restore.

A run that is extended keeps the rates it had until then: its config records where the extension begins and
what the schedule was before (`extended`), and says what follows (`extend`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from onecard.arch.dial import batch_lr_scale
from onecard.config.files import MAX_INTEGER
from onecard.config.knobs import sound
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.files import parse_json
from onecard.language import _

# The knobs of a schedule, recorded of the one before an extension.
SCHEDULE = ("optimizer", "learning_rate", "min_lr", "decay_lr", "warmup_iters", "lr_decay_iters", "max_iters",
            "warmdown_ratio", "final_lr_frac", "extend", "extend_lr")  # fmt: skip
# Shares of an extension's steps: of the rewarm, and of the decay where the architecture sets no share.
_UP, _DOWN = 0.1, 0.2


@dataclass(frozen=True)
class StepRates:
    """The schedules' values for one step."""

    lr: float  # times the rules' own
    momentum: float = 0.95  # Muon's
    decay: float = 1.0  # times Muon's weight decay


class _Momentum(NamedTuple):
    """Muon's momentum, which rises from 0.85 at the beginning of a run."""

    top: float
    steps: int
    end: float  # its value at the end of the learning rate's decay


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
    """nanochat's schedule: linear warm-up, constant, in the last warmdown_ratio down to final_lr_frac."""
    assert config.warmdown_ratio is not None and config.final_lr_frac is not None
    down = round(config.warmdown_ratio * config.max_iters)
    if step < config.warmup_iters:
        return (step + 1) / config.warmup_iters
    if not config.decay_lr or not down or step <= config.max_iters - down:
        return 1.0
    left = max(config.max_iters - step, 0) / down
    return left + (1 - left) * config.final_lr_frac


def rates(step: int, config: RunConfig) -> StepRates:
    """Factors of the optimizer's rules (optim/recipe.py) in this step."""
    extension = before_extension(config)
    if extension is None:
        return _unextended(step, config)
    begins, before = extension
    if step < begins:
        return rates(step, before)
    if config.extend in (None, "schedule"):
        return _unextended(step, config)
    last = rates(max(begins - 1, 0), before)
    # A base rate that the user has changed holds for the rest of the run.
    if _base(before) != _base(config):
        last = dataclasses.replace(last, lr=last.lr / (_base(before) or 1.0) * _base(config))
    constant = _constant(step, begins, last, config)
    if config.extend == "stay":
        return constant
    if config.extend == "decay":
        return _decayed(step, begins, constant, config)
    return _rewarmed(step, begins, last, config)


def _unextended(step: int, config: RunConfig) -> StepRates:
    """The rates of a run that was never extended."""
    if config.arch == "gpt2":
        rate = learning_rate(step, config)
        if not config.by_muon:
            return StepRates(rate)
        level = rate / config.learning_rate if config.learning_rate else 0.0
        return StepRates(level, momentum=_rising(step, 0.85, 0.95, 300))
    level = trapezoid(step, config)
    if config.generation == 2025:
        return StepRates(level, momentum=_rising(step, 0.85, 0.95, 300))
    decay = 0.5 * (1 + math.cos(math.pi * min(step / max(config.max_iters, 1), 1.0)))
    return StepRates(level, momentum=_momentum_2026(step, config), decay=decay)


def shown_rate(step: int, config: RunConfig) -> float:
    """The learning rate in a log line: AdamW's where it is for all, else that of Muon's matrices."""
    return rates(step, config).lr * _unit(config)


def peak_rate(config: RunConfig) -> float:
    """The highest rate of the schedule without extensions, as it is shown."""
    return _base(config) * _unit(config)


def _base(config: RunConfig) -> float:
    """The highest factor of the rules: AdamW's rate itself where it is for all, else 1."""
    return 1.0 if config.by_muon else config.learning_rate


def _unit(config: RunConfig) -> float:
    """The shown rate for a factor of 1."""
    if not config.by_muon:
        return 1.0
    scale = 1.0 if config.arch == "gpt2" else batch_lr_scale(config.generation, config.tokens_per_step)
    return config.muon_lr * scale


# --- extensions -----------------------------------------------------------------------------------


def extended_from(trained: RunConfig, step: int, config: RunConfig) -> RunConfig:
    """The config of a run that is extended from this step on, and was trained with another config so far."""
    stages = _stages(trained)
    stages.append({"begins": step, **{name: getattr(trained, name) for name in SCHEDULE}})
    return dataclasses.replace(config, extended=json.dumps(stages))


def _stages(config: RunConfig) -> list[dict[str, Any]]:
    """What `extended` says, which is read out of a file with the rest of a run's config."""
    if not config.extended:
        return []
    try:
        stages: list[dict[str, Any]] = parse_json(config.extended)
        for stage in stages:
            if type(stage["begins"]) is not int or not 0 <= stage["begins"] <= MAX_INTEGER:
                raise ValueError(_("begins is no step"))
            schedule = {name: stage[name] for name in SCHEDULE}
            sound(dataclasses.replace(config, **schedule, origins={}))
        if not stages:
            raise ValueError(_("it is empty"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            _("the run's config is damaged"),
            _("what it says of its extensions cannot be: {error}").format(error=error),
        ) from None
    return stages


@lru_cache(maxsize=64)
def before_extension(config: RunConfig) -> tuple[int, RunConfig] | None:
    """The step at which the last extension begins, and the config until then; None without an extension."""
    if not config.extended:
        return None
    *earlier, last = _stages(config)
    schedule = {name: last[name] for name in SCHEDULE}
    before = dataclasses.replace(config, **schedule, extended=json.dumps(earlier) if earlier else None)
    return last["begins"], before


def rewarm_steps(begins: int, config: RunConfig) -> int:
    """Steps of a rewarm until its peak."""
    return max(1, round(_UP * (config.max_iters - begins)))


def decay_steps(begins: int, config: RunConfig) -> int:
    """Steps at an extension's end in which a constant rate decays: nanochat's share of it, or a fifth."""
    return max(1, round((config.warmdown_ratio or _DOWN) * (config.max_iters - begins)))


def floor_rate(config: RunConfig, last: float) -> float:
    """The factor at which the schedule ends without extensions; `last` where it is constant."""
    if not config.decay_lr:
        return last
    if config.arch == "gpt2":
        lowest = config.min_lr
        return lowest / (config.learning_rate or 1.0) if config.by_muon else lowest
    assert config.final_lr_frac is not None
    return config.final_lr_frac


def _left(step: int, config: RunConfig, down: int) -> float:
    return min(1.0, max(config.max_iters - step, 0) / down)


def _constant(step: int, begins: int, last: StepRates, config: RunConfig) -> StepRates:
    """The rates of the last step before the extension. Only Muon's momentum still rises, as always in the
    first hundreds of steps of a run."""
    if not config.by_muon:
        return last
    top, steps, _ = _momentum_of(config)
    if begins > steps:
        return last
    # A rewarm before may have brought it further already.
    return dataclasses.replace(last, momentum=max(last.momentum, _rising(step, 0.85, top, steps)))


def _decayed(step: int, begins: int, constant: StepRates, config: RunConfig) -> StepRates:
    """Constant, then linearly down to zero (WSD). The weight decay falls with the rate, so that neither moves
    the weights in the end. The momentum of 2026 goes to its end value."""
    left = _left(step, config, decay_steps(begins, config))
    end = min(constant.momentum, _momentum_of(config).end)
    return StepRates(constant.lr * left, end + left * (constant.momentum - end), constant.decay * left)


def _rewarmed(step: int, begins: int, last: StepRates, config: RunConfig) -> StepRates:
    """Linearly up to the given peak, then down again in the architecture's own shape: a new cycle.

    Momentum and weight decay begin a new cycle too, because their values belong to those of the rate. They
    rise with the rate from where they ended: a sudden change would move every weight while the rate is still
    small. Weight decay is a factor of the rate, so that a lower peak weakens it in proportion.
    """
    assert config.extend_lr is not None
    up, length = rewarm_steps(begins, config), config.max_iters - begins
    peak = config.extend_lr / (_unit(config) or 1.0)
    low = min(floor_rate(config, last.lr), peak)
    risen = min((step - begins + 1) / up, 1.0)
    done = min(max(step - begins - up, 0) / max(length - up, 1), 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    top, steps, end = _momentum_of(config)
    if config.arch == "gpt2":
        left = cosine
    else:
        down = min(round((config.warmdown_ratio or 0.0) * length), length - up)
        left = _left(step, config, down) if down else 1.0
    level = last.lr + risen * (peak - last.lr) if risen < 1 else low + left * (peak - low)
    if config.arch == "gpt2" or config.generation == 2025:  # no horizon in momentum and decay
        momentum = _rising(step, 0.85, top, steps) if config.by_muon else last.momentum
        return StepRates(level, momentum, last.decay)
    momentum = last.momentum + risen * (top - last.momentum) if risen < 1 else end + left * (top - end)
    decay = last.decay + risen * (1.0 - last.decay) if risen < 1 else cosine
    return StepRates(level, momentum, decay)


def _momentum_of(config: RunConfig) -> _Momentum:
    if config.arch == "gpt2" or config.generation == 2025:
        return _Momentum(top=0.95, steps=300, end=0.95)
    return _Momentum(top=0.97, steps=400, end=0.90)


# --- pieces ---------------------------------------------------------------------------------------


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
