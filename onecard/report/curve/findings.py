"""What a run's curve shows, good and bad: each finding one sentence with its figures.

The parts: losses.py (losses, gap, slope, the initial loss), exact.py (errors and noise),
reading.py (what a loss means), rate.py (the learning rate, resumes, gradients, passes),
speed.py (tokens per second, MFU, memory). What goes wrong altogether is in alarms.py, what was set
otherwise than meant in mistakes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onecard.report.curve import exact, losses, rate, reading, speed
from onecard.report.findings import Finding
from onecard.report.run_facts import RunFacts

PARTS: tuple[Callable[[RunFacts], Iterable[Finding]], ...] = (
    losses.rounds, losses.initial, losses.gap, losses.slope,
    exact.last_change, exact.noise, exact.spikes,
    reading.reads_like, reading.unit,
    rate.phase, rate.resumes, rate.passes, rate.tokens_for_size, rate.gradients,
    speed.trend, speed.use, speed.memory,
)  # fmt: skip


def findings_of(facts: RunFacts) -> list[Finding]:
    """All that is seen, the heaviest first."""
    found = [finding for part in PARTS for finding in part(facts)]
    return sorted(found, key=lambda finding: -finding.weight)
