"""How exact a loss is: the error of an evaluation, from its text (plan/noise.py), and the scatter of a curve.

Where each evaluation reads the same text, its error is in all of them alike and falls out of differences:
what is left is about a twentieth (0.0005 to 0.002 nats where the formula gives 0.019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.plan.noise import USUAL_BLOCK, standard_error
from onecard.report.curve.detectors import noise_of
from onecard.report.run_facts import RunFacts

SAME_TEXT = 0.05
NANOGPT_BLOCKS = 200  # its eval_iters
MOST_VALUES = 20_000


@dataclass(frozen=True)
class EvaluationError:
    """Standard errors in nats."""

    level: float  # of a loss, as that of all text of this kind
    of_a_change: float  # of a difference between two evaluations
    sequences: int
    block_size: int
    same_text: bool  # in every evaluation
    assumed: bool  # their number is the trainer's default


def evaluation_error(facts: RunFacts) -> EvaluationError | None:
    """From the tokens of an evaluation; None where they are not known."""
    block, tokens, assumed = facts.block_size or USUAL_BLOCK, facts.eval_tokens, False
    draws_anew = facts.log.format.startswith("nanogpt")
    if tokens is None and draws_anew and facts.batch_size:
        tokens, assumed = NANOGPT_BLOCKS * facts.batch_size * block, True
    if not tokens or tokens < 0:
        return None
    sequences = max(1, round(tokens / block))
    level = standard_error(sequences, block, facts.vocab_size)
    change = math.sqrt(2) * level * (1.0 if draws_anew else SAME_TEXT)
    return EvaluationError(level, change, sequences, block, not draws_anew, assumed)


def scatter(values: Sequence[float]) -> float:
    """Standard deviation of losses about their curve, in the last three quarters (at most 20,000)."""
    return noise_of(values[max(len(values) // 4, len(values) - MOST_VALUES) :])
