"""Is the validation set large enough that a loss on it means something?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onecard.language import _, ngettext
from onecard.plan.noise import CHARACTERS, USUAL_BLOCK, sequences_for, standard_error

# Nats a token. With a larger standard error even runs whose models differ by a half in size look alike.
_ENOUGH, _ENOUGH_OF_CHARACTERS = 0.1, 0.025
_MORE = 1.2  # documents are held out whole: a little less than asked for may come of it
_MOST_FRACTION = 0.1  # of all text: more than that is missed in training


@dataclass(frozen=True)
class Validation:
    """The validation set as an evaluation reads it, all of it, in blocks of the usual length."""

    tokens: int
    blocks: int
    block_size: int
    standard_error: float  # nats a token
    vocabulary: int

    @property
    def most_error(self) -> float:
        return _ENOUGH_OF_CHARACTERS if self.vocabulary < CHARACTERS else _ENOUGH

    @property
    def enough(self) -> bool:
        return self.standard_error <= self.most_error

    def to_json(self) -> dict[str, Any]:
        names = ("tokens", "blocks", "block_size")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        return found | {"standard_error": round(self.standard_error, 4), "enough": self.enough}

    def verdict(self, train_tokens: int, *, prepared: bool) -> tuple[str, bool]:
        """What is to be said of it where it is too small, and whether preparing it again mends that."""
        needed = sequences_for(self.most_error, self.block_size, self.vocabulary) * self.block_size
        said = ngettext(
            "the validation set is too small: {blocks:,} block of {size:,} tokens gives a loss with a "
            "standard error of {n:.2f} nats a token.",
            "the validation set is too small: {blocks:,} blocks of {size:,} tokens give a loss with a "
            "standard error of {n:.2f} nats a token.",
            self.blocks,
        ).format(blocks=self.blocks, size=self.block_size, n=self.standard_error)
        share = _MORE * needed / max(1, self.tokens + train_tokens)
        if share > _MOST_FRACTION:
            return f"{said} " + _("More text would help."), False
        if not prepared:
            return f"{said} " + _("Hold out {n:,} tokens or more.").format(n=needed), True
        # Rounded up to two digits.
        digits = 1 - math.floor(math.log10(share))
        fraction = math.ceil(share * 10**digits) / 10**digits
        return f"{said} " + _("Hold out more: --val_fraction={n:g}").format(n=fraction), True


def validation_of(tokens: int, vocabulary: int) -> Validation | None:
    """None where there is nothing to read."""
    if tokens < 2:
        return None
    size = min(USUAL_BLOCK, tokens - 1)
    blocks = (tokens - 1) // size
    return Validation(tokens, blocks, size, standard_error(blocks, size, vocabulary), vocabulary)
