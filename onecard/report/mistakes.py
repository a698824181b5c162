"""Mistakes in how a run was set up, each with its evidence and the line to change.

Only what the log, its command line, the config or the data show is claimed; what would be a guess is left
out or is said as one. What is right for some purpose (many tokens for a small model, a constant rate) is no
mistake.

The parts: mistakes_model.py (size, tokens for it, vocabulary, accumulation, MFU), mistakes_rate.py (the
learning rate's schedule), mistakes_data.py (validation, repeated text, dropout, memorising).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onecard.report import mistakes_data, mistakes_model, mistakes_rate
from onecard.report.findings import Mistake
from onecard.report.run_facts import RunFacts

CHECKS: tuple[Callable[[RunFacts], Iterable[Mistake]], ...] = (
    mistakes_rate.horizon, mistakes_rate.last_rate, mistakes_rate.warmup, mistakes_rate.raised,
    mistakes_model.size, mistakes_model.tokens_for_size, mistakes_model.vocabulary,
    mistakes_model.accumulation, mistakes_model.others_mfu,
    mistakes_data.validation_too_small, mistakes_data.validation_is_training, mistakes_data.repeated,
    mistakes_data.dropout, mistakes_data.memorised,
)  # fmt: skip


def mistakes_of(facts: RunFacts) -> list[Mistake]:
    """All that is found, what costs most first."""
    found = [mistake for check in CHECKS for mistake in check(facts)]
    return sorted(found, key=lambda mistake: -mistake.weight)
