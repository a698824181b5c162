"""The one reader of logs: bytes of any log, table or paste in, a Log out."""

from __future__ import annotations

import math

from onecard.report import logs
from onecard.report.log import NOT_SAID, Evaluations, Log, Start, Steps
from onecard.report.log_text import decode


def read(content: bytes) -> Log | None:
    """What there is to know from a log; None where no training line is in it."""
    found = logs.read_log(decode(content))
    if found is None:
        return None
    old = found.steps

    def column(values: list[float | None]) -> list[float]:
        return [NOT_SAID if value is None else value for value in values]

    def shown(values: list[float | None]) -> list[float]:
        """With infinity for a value that the log shows as no number."""
        return column([math.inf if value is not None and math.isnan(value) else value for value in values])

    steps = Steps(
        step=old.numbers, ms=old.ms, loss=shown(old.losses), mfu=column(old.mfus),
        tokens_per_s=column(old.speeds),
    )  # fmt: skip
    evaluations = Evaluations(step=found.evaluations)
    starts = (Start(Steps(), Evaluations()),) * (found.starts - 1) + (Start(steps, evaluations),)
    return Log(found.format, steps, evaluations, found.settings, found.facts, starts)
