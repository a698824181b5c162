"""What a run's curve shows, good and bad: each finding one sentence with its figures.

The parts: curve_losses.py (losses, gap, slope, the initial loss), curve_exact.py (errors and noise),
curve_reading.py (what a loss means), curve_rate.py (the learning rate, resumes, gradients, passes),
curve_speed.py (tokens per second, MFU, memory). What goes wrong altogether is in alarms.py, what was set
otherwise than meant in mistakes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onecard.report import curve_exact, curve_losses, curve_rate, curve_reading, curve_speed
from onecard.report.findings import Finding
from onecard.report.run_facts import RunFacts

PARTS: tuple[Callable[[RunFacts], Iterable[Finding]], ...] = (
    curve_losses.rounds, curve_losses.initial, curve_losses.gap, curve_losses.slope,
    curve_exact.last_change, curve_exact.noise, curve_exact.spikes,
    curve_reading.reads_like, curve_reading.unit,
    curve_rate.phase, curve_rate.resumes, curve_rate.passes, curve_rate.tokens_for_size, curve_rate.gradients,
    curve_speed.trend, curve_speed.use, curve_speed.memory,
)  # fmt: skip


def findings_of(facts: RunFacts) -> list[Finding]:
    """All that is seen, the heaviest first."""
    found = [finding for part in PARTS for finding in part(facts)]
    return sorted(found, key=lambda finding: -finding.weight)
