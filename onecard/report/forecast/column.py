"""Which curve of a run is forecast: the validation loss where it has enough points, else the training one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.report.curve.columns import finite
from onecard.report.forecast.seen import FEWEST, noise_of
from onecard.report.log import Log

MOST = 400  # points; more are means of equally many
TRAIN_IS_BETTER = 4  # times as many points


@dataclass(frozen=True)
class Column:
    name: str  # val or train
    points: list[tuple[float, float]]
    ended_badly: bool = False  # the last loss is not a number


def column_of(log: Log, begin: float) -> Column | None:
    """The curve; `begin`: what is before it (the warm-up) says nothing about the end."""
    val = _points(*finite(log.evaluations, "val"))
    steps, averaged = _points(*finite(log.steps, "loss")), _points(*finite(log.evaluations, "train"))
    train = max((averaged, steps), key=lambda points: (len(points) >= FEWEST, len(points)))
    enough = [point for point in val if point[0] >= begin]
    shape = [point for point in train if point[0] >= begin]
    if len(enough) >= FEWEST and not _clearer(shape, enough):
        return Column("val", val, _bad(log.evaluations.val))
    if len(enough) >= 2 and _clearer(shape, enough):
        # Few evaluations: the shape is the training loss's, the level theirs.
        off = [loss - _between(train, step) for step, loss in enough[-FEWEST:]]
        gap = math.fsum(off) / len(off)
        return Column("val", [(step, loss + gap) for step, loss in train], _bad(log.steps.loss))
    if not train and not val:
        return None
    chosen = ("train", train) if len(train) > len(val) else ("val", val)
    return Column(*chosen, ended_badly=_bad(log.steps.loss if chosen[0] == "train" else log.evaluations.val))


def _clearer(train: Sequence[tuple[float, float]], val: Sequence[tuple[float, float]]) -> bool:
    """Do many training losses show the trend better than few evaluations?"""
    if len(train) <= TRAIN_IS_BETTER * len(val):
        return False
    if len(val) < FEWEST:
        return True
    return noise_of(train) / math.sqrt(len(train)) < noise_of(val) / math.sqrt(len(val))


def _points(steps: Sequence[float], losses: Sequence[float]) -> list[tuple[float, float]]:
    """By rising steps; means of equally many where there are more than MOST."""
    found = dict(zip(steps, losses, strict=True))
    ordered = sorted((step, loss) for step, loss in found.items() if step >= 0)
    size = -(-len(ordered) // MOST) or 1
    groups = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    return [(math.fsum(s for s, _ in g) / len(g), math.fsum(y for _, y in g) / len(g)) for g in groups]


def _bad(losses: Sequence[float]) -> bool:
    said = [loss for loss in losses[-3:] if not math.isnan(loss)]
    return bool(said) and math.isinf(said[-1])


def _between(points: Sequence[tuple[float, float]], step: float) -> float:
    at = bisect_left(points, (step, -math.inf))
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (a, low), (b, high) = points[at - 1], points[at]
    return low + (high - low) * (step - a) / (b - a)
