"""How exact a loss is: the error of an evaluation, from its text, and the scatter of a curve.

The model of an evaluation's error: texts differ more than tokens do. A token's loss has a standard deviation
of some 3 nats about the mean of its sequence, and sequences of 1,024 tokens of web text differ by 0.75 nats
from each other; so S sequences of T tokens give the loss of all text with a standard error of

    sqrt((3² / T + 0.75²) / S)

Both constants are read off public logs in which every step has fresh text: 512 sequences of 1,024 tokens
scatter by 0.033 and 0.040 nats (build-nanogpt, llm.c), 64 of them by 0.095 (modded-nanogpt), where the
formula gives 0.034 and 0.095. Characters and bytes have smaller figures of their own (own runs on
Wikipedia). Where each evaluation reads the same text, that error is in all of them alike and falls out of
their differences: what is left is about a twentieth (0.0005 to 0.002 nats where the formula gives 0.019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.report.curve.detectors import noise_of
from onecard.report.run_facts import RunFacts

PER_TOKEN, PER_SEQUENCE = 3.0, 0.75
PER_CHARACTER, PER_SEQUENCE_OF_CHARACTERS = 1.7, 0.2
CHARACTERS = 1000  # vocabularies below are of characters or bytes
SAME_TEXT = 0.05
USUAL_BLOCK = 1024
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
    token, sequence = PER_TOKEN, PER_SEQUENCE
    if facts.vocab_size is not None and facts.vocab_size < CHARACTERS:
        token, sequence = PER_CHARACTER, PER_SEQUENCE_OF_CHARACTERS
    level = math.sqrt((token**2 / block + sequence**2) / sequences)
    change = math.sqrt(2) * level * (1.0 if draws_anew else SAME_TEXT)
    return EvaluationError(level, change, sequences, block, not draws_anew, assumed)


def scatter(values: Sequence[float]) -> float:
    """Standard deviation of losses about their curve, in the last three quarters (at most 20,000)."""
    return noise_of(values[max(len(values) // 4, len(values) - MOST_VALUES) :])
