"""Which sizes `onecard bench` measures: those that training uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY

Shape = tuple[int, int, int]  # tokens, n, k: rows, outputs and inputs of a layer


@dataclass(frozen=True)
class Sizes:
    """What is measured. Tokens are in order of importance: the last are given up first when time is short."""

    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    head_tokens: int  # the loss takes the head in chunks of rows, so one size will do
    vocab: int
    ceiling: int
    head_dims: tuple[int, ...]
    blocks: tuple[int, ...]
    attention_tokens: int
    attention_width: int
    copy_bytes: int
    transfer_bytes: int

    def levels(self, own: Sequence[tuple[int, int]] = ()) -> list[list[Shape]]:
        """Products by number of tokens. `own`: widths, with their vocabularies, that a config adds; first."""
        vocabularies = [*own, *((width, self.vocab) for width in self.widths)]
        widths = dict.fromkeys(width for width, _ in vocabularies)
        levels = []
        for tokens in self.tokens:
            level = [(tokens, n * width, width) for width in widths for n in (1, 3, 4)]
            if tokens == self.head_tokens:
                level += [(tokens, vocab, width) for width, vocab in vocabularies]
            levels.append(list(dict.fromkeys(level)))  # a vocabulary of 4 widths is one shape, not two
        return levels


CARD_SIZES = Sizes(
    widths=(384, 768, 1024, 1280, 2048),
    # 1024 besides the two that fill a card: large models train with one short block at a time.
    tokens=(4096, 16384, 1024),
    head_tokens=4096,
    vocab=GPT2_PADDED_VOCABULARY,
    ceiling=8192,
    head_dims=(64, 128),
    blocks=(1024, 2048),
    attention_tokens=8192,
    attention_width=768,
    copy_bytes=2**30,  # many times any card's cache
    transfer_bytes=2**28,
)
CPU_SIZES = Sizes(
    widths=(64, 128),
    tokens=(256, 64),
    head_tokens=256,
    vocab=512,
    ceiling=384,
    head_dims=(64, 128),
    blocks=(64, 128),
    attention_tokens=256,
    attention_width=128,
    copy_bytes=2**26,
    transfer_bytes=2**24,
)
