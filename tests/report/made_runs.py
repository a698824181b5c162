"""Runs made up for tests: losses as real logs have them (heavy tails, spikes, wobbles), by a seed."""

from __future__ import annotations

import math
import random

from onecard.arch.shapes import GPT2Shape
from onecard.report.log import Evaluations, Log, Start, Steps
from onecard.report.run_facts import RunFacts

VOCABULARY = 50304


def curve(step: float, floor: float = 2.7) -> float:
    """A loss that begins at ln(vocabulary) and falls as losses do."""
    return floor + (math.log(VOCABULARY) - floor) / (1 + step / 60) ** 0.55


def losses(seed: int, steps: int = 4000, noise: float = 0.05) -> list[float]:
    """A healthy log: Student's noise with four degrees of freedom, order of the data, spikes that recover."""
    dice = random.Random(seed)
    wobble, spike = 0.0, 0.0
    found = []
    for step in range(steps):
        wobble = 0.995 * wobble + dice.gauss(0, 0.004)
        spike = 0.85 * spike
        if dice.random() < 0.0005:
            spike = dice.uniform(0.5, 4.0)
        tail = dice.gauss(0, 1) / math.sqrt(dice.gammavariate(2.0, 0.5))
        found.append(curve(step) + wobble + spike + noise * tail)
    return found


def steps_of(values: list[float], **columns: list[float]) -> Steps:
    return Steps(step=range(len(values)), loss=values, **columns)


def table(
    steps: list[int], train: list[float], val: list[float], *, format: str = "table", **facts: object
) -> RunFacts:
    """A run of which people paste a table."""
    evaluations = Evaluations(step=steps, train=train, val=val)
    settings = facts.pop("settings", {})
    said = facts.pop("log_facts", {})
    return RunFacts(log=Log(format, Steps(), evaluations, settings, said), **facts)  # type: ignore[arg-type]


def run(
    steps: Steps, evaluations: Evaluations | None = None, *, format: str = "nanogpt", **facts: object
) -> RunFacts:
    evaluations = evaluations or Evaluations()
    settings = facts.pop("settings", {})
    starts = facts.pop("starts", None) or (Start(steps, evaluations),)
    log = Log(format, steps, evaluations, settings, starts=starts)  # type: ignore[arg-type]
    return RunFacts(log=log, **facts)  # type: ignore[arg-type]


def small_gpt(width: int = 384, layers: int = 12, heads: int = 12) -> GPT2Shape:
    return GPT2Shape(layers, heads, width, VOCABULARY, 1024, bias=False)
