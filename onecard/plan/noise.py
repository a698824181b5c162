"""How exact a loss on so much text is: texts differ more than tokens do.

A token's loss has a standard deviation of some 3 nats about the mean of its sequence, and sequences of 1,024
tokens of web text differ by 0.75 nats from each other. So S sequences of T tokens give the loss of all text
of this kind with a standard error of

    sqrt((3² / T + 0.75²) / S)

Both constants are read off public logs in which every step has fresh text: 512 sequences of 1,024 tokens
scatter by 0.033 and 0.040 nats (build-nanogpt, llm.c), 64 of them by 0.095 (modded-nanogpt), where the
formula gives 0.034 and 0.095. Characters and bytes have smaller figures of their own.
"""

from __future__ import annotations

import math

PER_TOKEN, PER_SEQUENCE = 3.0, 0.75
PER_CHARACTER, PER_SEQUENCE_OF_CHARACTERS = 1.7, 0.2
CHARACTERS = 1000  # vocabularies below are of characters or bytes
USUAL_BLOCK = 1024


def standard_error(sequences: float, block_size: int = USUAL_BLOCK, vocabulary: int | None = None) -> float:
    """Nats a token, of the mean loss over so many sequences as the loss of all text of this kind."""
    assert sequences > 0 and block_size > 0
    token, sequence = PER_TOKEN, PER_SEQUENCE
    if vocabulary is not None and vocabulary < CHARACTERS:
        token, sequence = PER_CHARACTER, PER_SEQUENCE_OF_CHARACTERS
    return math.sqrt((token**2 / block_size + sequence**2) / sequences)


def sequences_for(error: float, block_size: int = USUAL_BLOCK, vocabulary: int | None = None) -> int:
    """So many give a standard error of no more than this."""
    return math.ceil((standard_error(1, block_size, vocabulary) / error) ** 2)
