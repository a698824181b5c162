"""nanochat's one dial: what follows from a depth, in both generations. No torch.

Generation 2025 is the speedrun of October 2025 (d20, d32); 2026 is nanochat a few months later. The figures
are nanochat's own. Tokens, batch and learning rates of 2026 are tuned at depth 12; its scaling rules carry
them over to other depths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onecard.arch.shapes import Nanochat2026Shape, NanochatShape

_REFERENCE_DEPTH = 12
_REFERENCE_BATCH = 2**19


@dataclass(frozen=True)
class Generation:
    shape: Any
    vocab_size: int  # of its own tokenizer
    tokens_per_parameter: int
    matrix_lr: float
    embedding_lr: float
    unembedding_lr: float
    scalar_lr: float
    weight_decay: float
    warmup_iters: int
    warmdown_ratio: float
    final_lr_frac: float
    grad_clip: float


GENERATIONS = {
    2025: Generation(
        NanochatShape, vocab_size=65536, tokens_per_parameter=20, matrix_lr=0.02, embedding_lr=0.2,
        unembedding_lr=0.004, scalar_lr=0.5, weight_decay=0.0, warmup_iters=0, warmdown_ratio=0.2,
        final_lr_frac=0.0, grad_clip=1.0,
    ),
    2026: Generation(
        Nanochat2026Shape, vocab_size=32768, tokens_per_parameter=12, matrix_lr=0.02, embedding_lr=0.3,
        unembedding_lr=0.008, scalar_lr=0.5, weight_decay=0.28, warmup_iters=40, warmdown_ratio=0.65,
        final_lr_frac=0.05, grad_clip=0.0,
    ),
}  # fmt: skip


def horizon(generation: int, depth: int, vocab_size: int) -> int:
    """Tokens to train for, from the parameters: all of them in 2025, those in matmuls in 2026."""
    this = GENERATIONS[generation]
    parts = this.shape.of_depth(depth, vocab_size, 2048).parameters_by_part()
    counted = parts.values() if generation == 2025 else [parts[k] for k in ("head", "attention", "mlp")]
    return this.tokens_per_parameter * sum(counted)


def tokens_per_step(generation: int, depth: int, vocab_size: int) -> int:
    """Tokens per step. In 2026 they grow with the horizon as D^0.383 (arXiv 2505.13738), in powers of two."""
    if generation == 2025:
        return _REFERENCE_BATCH
    longer = horizon(generation, depth, vocab_size) / horizon(generation, _REFERENCE_DEPTH, vocab_size)
    return int(2 ** round(math.log2(_REFERENCE_BATCH * longer**0.383)))


def batch_lr_scale(generation: int, tokens_in_step: int) -> float:
    """Factor of the learning rates. In 2026 they grow with the square root of the batch."""
    return 1.0 if generation == 2025 else math.sqrt(tokens_in_step / _REFERENCE_BATCH)


def decay_scale(generation: int, depth: int, vocab_size: int, tokens_in_step: int) -> float:
    """Factor of the weight decay. In 2026 weights forget over the same share of a run (arXiv 2405.13698)."""
    if generation == 2025:
        return 1.0
    longer = horizon(generation, depth, vocab_size) / horizon(generation, _REFERENCE_DEPTH, vocab_size)
    return math.sqrt(tokens_in_step / _REFERENCE_BATCH) / longer


def width_lr_scale(n_embd: int) -> float:
    """Factor of the embeddings' and head's learning rates: wider models learn more slowly; tuned at 768."""
    return math.sqrt(768 / n_embd)
