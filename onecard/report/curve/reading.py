"""What a loss means to a reader: perplexity, what its text reads like, and per what it is counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from onecard.language import _
from onecard.plan.noise import CHARACTERS
from onecard.report.curve.losses import series_of
from onecard.report.findings import Finding
from onecard.report.run_facts import RunFacts

# No model of GPT-2's tokens has less on web text: the text is a simple one, or is known by heart.
LEAST_OF_TEXT = 2.2
CHARACTERS_A_TOKEN = 4.5  # of GPT-2's, on web text (plan/scaling.py)


# What a model's own text reads like at a loss: our judgement, with GPT-2's losses on FineWeb as posts (3.42
# for its 124M, 2.83 for its 1558M: llm.c).
def _bands(characters: bool) -> Sequence[tuple[float, str]]:
    if characters:
        return (
            (2.4, _("letters in the right frequency")), (1.9, _("things like words")),
            (1.55, _("words, many misspelt")), (1.25, _("words and short phrases that hold together")),
            (0.0, _("whole sentences")),
        )  # fmt: skip
    return (
        (6.5, _("frequent words in no order")), (5.3, _("pairs of words that go together")),
        (4.5, _(
            "phrases; sentences break off"
        )), (3.9, _("sentences with grammar, whose topic drifts within one or two")),
        (3.45, _("paragraphs on one topic, with invented facts")),
        (3.0, _(
            "paragraphs as GPT-2 124M writes them"
        )), (0.0, _("pages as the larger GPT-2 models write them")),
    )  # fmt: skip


def reads_like(facts: RunFacts) -> Iterator[Finding]:
    """Perplexity, and what such a loss reads like; of tokenizers and text for which that can be said."""
    series = series_of(facts)
    if series is None or not 0 < series.points[-1][1] < 20:
        return
    step, loss = series.points[-1]
    characters = (facts.vocab_size or 0) and (facts.vocab_size or 0) < CHARACTERS
    if not characters and facts.tokenizer != "gpt2" and facts.vocab_size not in (50257, 50304):
        return
    if not characters and loss < LEAST_OF_TEXT:
        return
    like = next(text for least, text in _bands(bool(characters)) if loss >= least)
    said = _(
        "A loss of {loss:.2f} is a perplexity of {perplexity:.1f}; its text reads like: {like} (our "
        "judgement; the run's own sample decides)."
    )
    yield Finding("reads-like", said.format(loss=loss, perplexity=math.exp(loss), like=like), None, step, 7.0)


def unit(facts: RunFacts) -> Iterator[Finding]:
    """A loss per character compares with no loss per token."""
    if facts.tokenizer not in ("char", "byte") and not 1 < (facts.vocab_size or 0) < CHARACTERS:
        return
    text = _(
        "These losses are per character (a vocabulary of {vocabulary}): they compare with no loss per "
        "token, of which GPT-2's hold some {size:.1f} characters."
    )
    if facts.vocab_size:
        yield Finding(
            "per-character",
            text.format(vocabulary=facts.vocab_size, size=CHARACTERS_A_TOKEN),
            None,
            None,
            12.0,
        )
