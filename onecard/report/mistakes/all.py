"""Mistakes in how a run was set up, each with its evidence and the line to change.

Only what the log, its command line, the config or the data show is claimed; what would be a guess is left
out or is said as one. What is right for some purpose (many tokens for a small model, a constant rate) is no
mistake.

The parts: model.py (size, tokens for it, vocabulary, accumulation, MFU), rate.py (the
learning rate's schedule), data.py (validation, repeated text, dropout, memorising).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onecard.report.findings import Mistake
from onecard.report.mistakes import data, model, rate
from onecard.report.run_facts import RunFacts

CHECKS: tuple[Callable[[RunFacts], Iterable[Mistake]], ...] = (
    rate.horizon, rate.last_rate, rate.warmup, rate.raised,
    model.size, model.tokens_for_size, model.vocabulary,
    model.accumulation, model.others_mfu,
    data.validation_too_small, data.validation_is_training, data.repeated,
    data.dropout, data.memorised,
)  # fmt: skip


def mistakes_of(facts: RunFacts) -> list[Mistake]:
    """All that is found, what costs most first."""
    found = [mistake for check in CHECKS for mistake in check(facts)]
    return sorted(found, key=lambda mistake: -mistake.weight)
