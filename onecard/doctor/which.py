"""Which verb answers a paste: eta a few lines of a log, report a curve, doctor errors and advice."""

from __future__ import annotations

from onecard.doctor import crashes
from onecard.doctor.out_of_memory import first
from onecard.report import reading
from onecard.report.answer import LEAST_LOSSES, LEAST_STEPS, losses_seen, steps_seen
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import Known
from onecard.report.reading.text import blocks

MOST = 64_000_000  # bytes that are searched for an error


def verb_for(content: bytes) -> str:
    """eta, report or doctor: what broke comes first, for a run that ended so is no slow or bad one."""
    text = "".join(blocks(content[:MOST]))
    log = reading.read(content)
    message = first(text)
    if (message is not None and (log is None or message.tried is not None)) or crashes.find(text) is not None:
        return "doctor"
    if log is None:
        return "doctor"
    facts = facts_of(log, Known(), None)
    begin, end = steps_seen(facts)
    if losses_seen(facts, numbers=False) >= LEAST_LOSSES and end - begin >= LEAST_STEPS:
        return "report"
    return "eta" if len(log.steps) else "report"
