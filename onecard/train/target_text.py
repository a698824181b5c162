"""Bits per byte: the loss measured in the text itself, so that tokenizers can be compared.

As nanochat defines it: the nats of all targets that are text, over ln 2 and over the bytes these targets
stand for. Special tokens (end-of-text) are no text and count in neither sum; nor do ids that a padded
vocabulary has beyond its tokenizer. The loss in nats stays the mean over all targets, those included.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from onecard.data.batches import FixedBlocks
from onecard.data.tokenizer import Tokenizer


class TargetText:
    """The targets of a fixed set of blocks as text."""

    def __init__(self, tokenizer: Tokenizer, blocks: FixedBlocks, vocab_size: int) -> None:
        self._blocks = blocks
        self._bytes_V = tokenizer.token_bytes(vocab_size)
        self.is_text_V = self._bytes_V > 0

    @cached_property
    def n_bytes(self) -> int:
        """Of all targets. The blocks never change: counted once a run, when first asked for."""
        return int(count_targets(self._blocks, len(self._bytes_V)) @ self._bytes_V)

    def places_of_no_text(self, targets_BT: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the flattened targets special tokens are."""
        return np.flatnonzero(~self.is_text_V[targets_BT])

    def bits_per_byte(self, nats: float) -> float | None:
        """`nats`: of all targets that are text, together. None where there is no text."""
        return nats / self.n_bytes / math.log(2) if self.n_bytes else None


def count_targets(blocks: FixedBlocks, vocab_size: int) -> NDArray[np.int64]:
    """How often each id is a target of these blocks."""
    counts_V = np.zeros(vocab_size, np.int64)
    for tokens_BL in blocks.batches(64):
        counts_V += np.bincount(tokens_BL[:, 1:].ravel(), minlength=vocab_size)
    return counts_V
