"""`law.posterior` of many moments at once, with numpy: leaving runs out takes a hundred thousand of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onecard.report.forecast import law, learnt
from onecard.report.forecast.law import Evidence, Posterior

ALPHAS = np.array([alpha for _, alpha in law.PARTICLES])


class Stack:
    """Evidence of many moments, and each one's rate feature."""

    def __init__(self, evidence: Sequence[Evidence], rates: Sequence[float | None]) -> None:
        self.evidence, self.rates = evidence, rates
        self.matrices = np.array([e.matrices for e in evidence])
        self.vectors = np.array([e.vectors for e in evidence])
        self.square = np.array([e.square for e in evidence])
        self.drift = np.array([e.drift for e in evidence])
        self.level = np.array([e.level for e in evidence])
        self.slope = np.array([e.slope for e in evidence])
        self.at_now = np.array([e.at_now for e in evidence])
        self.free = np.array([e.at_end for e in evidence]) - np.array([e.carried for e in evidence])
        self.carried_loss = np.array([e.carried_loss for e in evidence])

    def posteriors(self, log_gains: Any) -> dict[str, Any]:
        """As `law.posterior` does, column by column."""
        usual = np.exp(log_gains)
        precision = np.stack(
            [np.full_like(usual, 1e-8), np.full_like(usual, 1e-6), (law.GAIN_WIDTH * usual) ** -2.0], 1
        )
        matrices, vectors = self.matrices.copy(), self.vectors.copy()
        for i in range(3):
            matrices[:, :, i, i] += precision[:, None, i]
        vectors[:, :, 2] += (precision[:, 2] * usual)[:, None]
        inverse = np.linalg.inv(matrices)
        found = np.einsum("kaij,kaj->kai", inverse, vectors)
        off = (self.square + precision[:, 2] * usual**2)[:, None] - np.einsum("kai,kai->ka", vectors, found)
        unusual = (np.log(ALPHAS) - law.USUAL_ALPHA[0]) / law.USUAL_ALPHA[1]
        weights = -0.5 * (off + np.linalg.slogdet(matrices)[1] + unusual**2) - 20.0 * (found[:, :, 1] <= 0)
        weights = np.exp(weights - weights.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        means = np.einsum("kai,kai->ka", self.free, found) + self.carried_loss[:, None]
        variances = np.einsum("kai,kaij,kaj->ka", self.free, inverse, self.free) + self.drift[:, None]
        loss, gain = (weights * means).sum(1), (weights * found[:, :, 2]).sum(1)
        level = found[:, :, 0] + found[:, :, 1] + self.at_now * found[:, :, 2]
        spread = inverse[:, :, 2, 2] + (found[:, :, 2] - gain[:, None]) ** 2
        return {
            "loss": loss + self.level,
            "width": np.sqrt((weights * (variances + (means - loss[:, None]) ** 2)).sum(1)),
            "slope": (weights * found[:, :, 1] * ALPHAS).sum(1),
            "alpha": (weights * ALPHAS).sum(1),
            "gain": gain,
            "gain_width": np.sqrt((weights * spread).sum(1)),
            "level": self.level + (weights * level).sum(1),
        }

    def with_usual_gain(self, gain: Sequence[float]) -> list[Posterior]:
        """As `learnt.with_usual_gain` does."""
        found = self.posteriors(np.full(len(self.evidence), math.log(learnt.FIRST_GAIN)))
        for _ in range(learnt.TURNS):
            rows = [
                learnt.gain_features(e, learnt.sound_slope(e, float(slope)), float(level), rate)
                for e, slope, level, rate in zip(
                    self.evidence, found["slope"], found["level"], self.rates, strict=True
                )
            ]
            found = self.posteriors(np.array(rows) @ np.array(gain))
        columns = {name: [float(v) for v in column] for name, column in found.items()}
        return [
            Posterior(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
        ]
