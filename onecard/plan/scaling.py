"""What loss a model of so many parameters reaches after so many tokens: a range, never one number.

Losses are nats per token of GPT-2's tokenizer on text like FineWeb. The law has the form of Chinchilla's, a
floor and one term each for too few parameters and too few tokens. benchmarks/fit_scaling.py fitted it once
to references.toml and prints the constants below; docs/scaling.md has the residuals and what this must not
be used for.

A loss read in the middle of a run, with the learning rate still high, is higher than that of a run ended
there. The law is about runs that end: their learning rate has come down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from onecard.arch.shapes import GPT2_VOCABULARY, Shape
from onecard.language import _
from onecard.plan.amounts import count

FAMILIES = ("gpt2", "nanochat")


@dataclass(frozen=True)
class Law:
    """L = floor + (size / N^size_power + data / D^data_power)^joint."""

    floor: float
    size: float
    size_power: float
    data: float
    data_power: float
    joint: float = 1.0

    def loss(self, parameters: float, tokens: float) -> float:
        both = self.size / parameters**self.size_power + self.data / tokens**self.data_power
        return self.floor + both**self.joint


# Least squares over 39 losses, residuals 0.035 (root mean square).
LAW = Law(floor=1.848, size=618.1, size_power=0.366, data=99.48, data_power=0.212)
# With one exponent more it fits these losses better (0.023) and goes astray sooner: for our own GPT-2 run of
# 64M tokens it is off by 0.80, LAW by 0.13. It serves to show how much the losses leave undecided.
JOINT_LAW = Law(floor=1.873, size=243900.0, size_power=0.653, data=281300.0, data_power=0.554, joint=0.469)

# What a learning rate still at its peak adds to a loss: of runs read on their way, fitted with the law.
STILL_HIGH = 0.074
# Inside the fitted region: all fitted losses (at most 0.09 off) and all fits that decide otherwise (another
# form, no learning-rate term, a model left out) are that near.
HALF_WIDTH = 0.1
# The region, and by how many nats a range grows per decade outside, so that these fits still lie inside. It
# does not reach down to open_lm's 10.6M: most of so small a model is embeddings, and how these are counted
# decides. Tokens per parameter are a side of their own: no run was as short for its size as 350M with 1B.
SIZES, SMALLER, LARGER = (40e6, 350e6), 0.7, 0.15
HORIZONS, SHORTER, LONGER = (0.2e9, 32e9), 0.6, 0.1
PER_PARAMETER, FEWER, MORE = (10, 640), 0.5, 0.25
# Between open_lm's 79M and 10.6M one model alone is fitted, of other text. A straight line from the one to
# the other, over the logarithm of the size, is 0.04 to 0.11 above the law; so the upper end grows by this per
# decade, it alone.
NEXT_SIZE, HIGHER = 79e6, 0.3
# What a model that has learned nothing pays for one of 50,257 tokens.
NOTHING_LEARNED = math.log(GPT2_VOCABULARY)

# One token of nanochat (architecture and Muon) is worth this many of GPT-2 with AdamW. Measured at the loss
# GPT-2 reaches after 64M tokens: 2.73 with equal parameters, 3.40 (2025), 3.44 (2026). Later is not measured:
# there the lower end falls, and is one ("no better than GPT-2") from a hundred times that horizon on.
WORTH = (2.7, 3.5)
WORTH_MEASURED_TO, WORTH_LOST_AT = 64e6, 6.4e9

# Bytes in one of GPT-2's tokens on web text: 4.46 on 20 MB of FineWeb (much of it law), 4.59 with Wikipedia.
# A token of a vocabulary of 32k or 65k learned from these 20 MB holds 1% and 6% more, so that as many of them
# are a little more text: worth less than this many nats.
BYTES_PER_TOKEN = (4.4, 4.7)
LONGER_TOKENS = 0.03
VOCABULARIES = (32_000, 66_000)

# Value of repeated text, arXiv 2305.16264 (appendix A): after so many repeats the gain has decayed to 1/e.
REPEATS_DECAY = 15.387756
MANY_EPOCHS = 4
TOKENS_PER_PARAMETER = 20

NATS, BITS = "nats per token, GPT-2's tokenizer, web text", "bits per byte, web text"

Standing = Literal["ahead", "within", "behind"]


@dataclass(frozen=True)
class LossRange:
    """Nats per token of GPT-2's tokenizer, or bits per byte, for a run that has ended."""

    low: float
    middle: float
    high: float
    basis: str  # a sentence for people
    extrapolated: bool
    unit: str = NATS

    def to_json(self) -> dict[str, Any]:
        return {
            "low": round(self.low, 3), "middle": round(self.middle, 3), "high": round(self.high, 3),
            "unit": self.unit, "basis": self.basis,
        }  # fmt: skip

    def standing(self, measured: float, learning_rate: float = 0.0) -> Standing:
        """Where a measured loss stands against what others reach with as many parameters and tokens.

        `learning_rate` over its peak when it was measured: in the middle of a run more loss is allowed.
        """
        assert self.unit == NATS
        ended = measured - STILL_HIGH * learning_rate
        if ended < self.low:
            return "ahead"
        return "behind" if ended > self.high else "within"


@dataclass(frozen=True)
class RankedModel:
    """One candidate of best_for_tokens, in its place."""

    parameters: int
    tokens: float
    loss: LossRange
    not_distinguishable: bool  # from the best: the law cannot tell them apart


def counted_parameters(shape: Shape) -> int:
    """The N of this module: all parameters but value embeddings, whose gain is in nanochat's multiplier."""
    parts = shape.parameters_by_part()
    return sum(parts.values()) - parts.get("value embeddings", 0)


def predicted_loss(parameters: int, tokens: float, *, family: str = "gpt2") -> LossRange:
    """What a run that ends after these tokens reaches, if its learning rate suits it.

    `tokens` are unique ones; for repeated text pass effective_tokens().
    """
    assert parameters >= 1 and 0 < tokens < math.inf and family in FAMILIES
    fewer, more = token_worth(tokens) if family == "nanochat" else (1.0, 1.0)
    worst, best = fewer * tokens, more * tokens
    # The law is fitted to lengths of runs; how long this one really is counts as much as what it is worth.
    half = max(half_width(parameters, length) for length in (tokens, worst, best))
    # Far from the region a range would leave what a loss can be.
    low, middle, high = (
        min(max(loss, LAW.floor), NOTHING_LEARNED)
        for loss in (
            LAW.loss(parameters, best) - half,
            LAW.loss(parameters, math.sqrt(fewer * more) * tokens),
            LAW.loss(parameters, worst) + half + HIGHER * max(0.0, math.log10(NEXT_SIZE / parameters)),
        )
    )
    outside = half > HALF_WIDTH
    measured_worth = family == "gpt2" or tokens <= WORTH_MEASURED_TO
    basis = _basis((fewer, more), outside, measured_worth)
    return LossRange(low, middle, high, basis, outside or not measured_worth)


def in_bits_per_byte(loss: LossRange) -> LossRange:
    """What compares across tokenizers: the same text's bits, over its bytes instead of GPT-2's tokens."""
    short, long = (math.log(2) * size for size in BYTES_PER_TOKEN)
    basis = _("{n} to {m} bytes in a token of GPT-2's").format(n=BYTES_PER_TOKEN[0], m=BYTES_PER_TOKEN[1])
    return replace(
        loss, low=(loss.low - LONGER_TOKENS) / long, middle=loss.middle / math.sqrt(short * long),
        high=(loss.high + LONGER_TOKENS) / short, basis=f"{loss.basis}; {basis}", unit=BITS,
    )  # fmt: skip


def half_width(parameters: float, tokens: float) -> float:
    """How far a range reaches to both sides, from how far outside the fitted region it lies, in decades."""
    width = HALF_WIDTH
    for value, (least, most), below, above in (
        (parameters, SIZES, SMALLER, LARGER),
        (tokens, HORIZONS, SHORTER, LONGER),
        (tokens / parameters, PER_PARAMETER, FEWER, MORE),
    ):
        width += below * max(0.0, math.log10(least / value)) + above * max(0.0, math.log10(value / most))
    return width


def _basis(worth: tuple[float, float], outside: bool, measured_worth: bool) -> str:
    parts = [
        _(
            "a law fitted to llm.c's 124M and 350M on FineWeb and to the shape of runs on C4 and FineWeb-Edu "
            "({least}M to 254M)"
        ).format(least=10.6)
    ]
    if worth != (1.0, 1.0):
        said = _("a token of nanochat counted as {low:.1f} to {high:.1f} of GPT-2's").format(
            low=worth[0], high=worth[1]
        )
        parts.append(said)
    if not measured_worth:
        parts.append(
            _("measured only up to 64M tokens: that nanochat's advantage lasts longer is an assumption")
        )
    if outside:
        region = _(
            "outside the fitted region (40M to 350M parameters, {least:g}B to {most:g}B tokens, 10 to 640 "
            "tokens per parameter), so the range is wider"
        ).format(least=HORIZONS[0] / 1e9, most=HORIZONS[1] / 1e9)
        parts.append(region)
    return "; ".join(parts)


def token_worth(tokens: float) -> tuple[float, float]:
    """How many of GPT-2's tokens one of nanochat's is worth in a run of this length: at least, at most."""
    share = math.log(tokens / WORTH_MEASURED_TO) / math.log(WORTH_LOST_AT / WORTH_MEASURED_TO)
    kept = 1 - min(max(share, 0.0), 1.0)
    return WORTH[0] ** kept, WORTH[1]


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """How many fresh tokens this many are worth, if the text has fewer and is read again.

    U + U·R*·(1 − exp(−R / R*)) with R repeats after the first pass. Never more than 16.4 passes' worth.
    """
    assert 0 < tokens < math.inf and unique_tokens > 0
    if tokens <= unique_tokens:
        return tokens
    repeats = tokens / unique_tokens - 1
    return unique_tokens * (1 - REPEATS_DECAY * math.expm1(-repeats / REPEATS_DECAY))


def repetition_note(tokens: float, unique_tokens: float) -> str | None:
    """A sentence where a run reads its text more often than helps much; None where it does not."""
    worth = effective_tokens(tokens, unique_tokens)
    epochs = tokens / unique_tokens
    if epochs <= MANY_EPOCHS:
        return None
    return _(
        "{epochs:,.1f} passes over {unique} tokens are worth about {worth} fresh ones: "
        "after four passes repeated text gives less and less"
    ).format(epochs=epochs, unique=count(unique_tokens), worth=count(worth))


def best_for_tokens(
    options: Sequence[tuple[int, float]], family: str = "gpt2", *, unique_tokens: float | None = None
) -> list[RankedModel]:
    """(parameters, tokens the budget allows them) by expected loss, the best first.

    Whoever's middle lies inside the best one's range is as good as it, and then the best is no better either.
    """
    ranked = []
    for parameters, tokens in options:
        worth = effective_tokens(tokens, unique_tokens or math.inf)
        ranked.append((parameters, tokens, predicted_loss(parameters, worth, family=family)))
    # Of two with the same loss the smaller one is cheaper to use.
    ranked.sort(key=lambda option: (option[2].middle, option[0]))
    tied = [option[2].middle <= ranked[0][2].high for option in ranked]
    return [RankedModel(*option, same and sum(tied) > 1) for option, same in zip(ranked, tied, strict=True)]
