"""The rules by which parameters learn, and the rates of a step.

A new optimizer brings a rule here, who learns by it (recipe.py), its update (optimizer.py calls it, as it
calls muon.py), its states (region_buffers.py), their bytes (arch/layout.py), its launches and time
(plan/host.py, plan/speed.py) and a choice of the knob `optimizer` (config/run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Size


@dataclass(frozen=True)
class AdamWRule:
    betas: tuple[float, float]
    weight_decay: float = 0.0
    lr: float = 1.0  # times the schedule's
    epsilon: float = 1e-8


@dataclass(frozen=True)
class MuonRule:
    lr: float
    weight_decay: float = 0.0
    # nanochat's refinements of 2026: rows equalised before and neurons after the iteration, cautious decay.
    refined: bool = False


Rule = AdamWRule | MuonRule
# The rule of a parameter, by its name and shape.
Rules = Callable[[str, Size], Rule]


def adamw_for_all(betas: tuple[float, float], weight_decay: float) -> Rules:
    """nanoGPT's groups: matrices and embeddings decay, norms and biases do not."""

    def rule(name: str, shape: Size) -> Rule:
        return AdamWRule(betas, weight_decay if len(shape) >= 2 else 0.0)

    return rule
