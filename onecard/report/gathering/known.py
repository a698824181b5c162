"""Known facts of a run that its log's reader adds, as options."""

from __future__ import annotations

from dataclasses import dataclass

from onecard.config.run import RunConfig
from onecard.hardware.cards import Card

# Names of formats, as Log.format has them.
NANOGPT, NANOCHAT, NANOCHAT_2025 = "nanogpt", "nanochat", "nanochat-2025"
NANOCHAT_SFT, ONECARD, HUGGINGFACE = "nanochat-sft", "onecard", "huggingface"


NANOCHATS = (NANOCHAT, NANOCHAT_2025, NANOCHAT_SFT)


@dataclass(frozen=True)
class Known:
    """What the reader of the log adds to it; None is "see the log"."""

    max_iters: int | None = None
    tokens: int | None = None
    batch_size: int | None = None
    block_size: int | None = None
    gradient_accumulation_steps: int | None = None
    config: RunConfig | None = None
    card: Card | None = None
    cards: int | None = None
    eval_tokens: int | None = None  # of one evaluation of one split
    eval_every: int | None = None  # steps
    usual_card: Card | None = None  # where neither the reader nor the log names one
    notes: tuple[str, ...] = ()  # on what was given
