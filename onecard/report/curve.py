"""What a run's curve shows, good and bad: each finding one sentence with its figures.

The parts: curve_losses.py (losses, gap, slope, noise, the initial loss), curve_rate.py (the learning rate's
phase, resumes, gradients, passes), curve_speed.py (tokens per second, MFU, memory). What goes wrong
altogether is in alarms.py, what was set otherwise than meant in mistakes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onecard.report import curve_losses, curve_rate, curve_speed
from onecard.report.findings import Finding
from onecard.report.run_facts import RunFacts

PARTS: tuple[Callable[[RunFacts], Iterable[Finding]], ...] = (
    curve_losses.rounds, curve_losses.initial, curve_losses.gap, curve_losses.slope, curve_losses.last_change,
    curve_losses.noise, curve_losses.spikes, curve_losses.reads_like, curve_rate.phase, curve_rate.resumes,
    curve_rate.passes, curve_rate.gradients, curve_speed.trend, curve_speed.use, curve_speed.memory,
)  # fmt: skip


def findings_of(facts: RunFacts) -> list[Finding]:
    """All that is seen, the heaviest first."""
    found = [finding for part in PARTS for finding in part(facts)]
    return sorted(found, key=lambda finding: -finding.weight)
