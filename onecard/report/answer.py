"""A report on a run: what is known of it and all that follows, before it is put into a form.

The parts are found by modules of their own. `report_of` is the one place that asks them all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from onecard.errors import UserError
from onecard.files import read_bounded
from onecard.language import _, number
from onecard.report.course import Course, Money, Pace, course_of, pace_by_lines
from onecard.report.findings import Finding, Forecast, ForecastPoint, Mistake, NextStep, Place
from onecard.report.gathering.known import Known
from onecard.report.gathering.run_folder import RunFolder
from onecard.report.log import Log
from onecard.report.run_facts import RunFacts

Health = Literal["healthy", "healthy-but", "not-healthy", "unknown"]

# Fewer losses than that are no curve.
LEAST_LOSSES = 3
# And fewer steps than that, from the first seen to the last, show nothing yet.
LEAST_STEPS = 100
# Where a run may be compared with ended ones: so far through its schedule, or after so many tokens.
HALFWAY, TOKENS_PER_PARAMETER = 0.5, 5.0
# Of a mistake's or a finding's weight: from here on the first sentence names it.
GRAVE = 45.0
_LATEST = 0.02  # of the run: what its last loss is, where only single steps are logged
_LEAST_LATEST = 8
_MOST_OF_A_SAMPLE = 2**20


@dataclass(frozen=True)
class Sample:
    """Text that the run's own model has generated."""

    text: str
    step: int | None = None


@dataclass(frozen=True)
class Report:
    """All that is said of one run, before it is put into a form."""

    facts: RunFacts
    name: str = ""  # of the run, for people
    findings: tuple[Finding, ...] = ()
    alarms: tuple[Finding, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    place: Place | None = None
    forecast: Forecast | None = None
    next_steps: tuple[NextStep, ...] = ()
    course: Course = field(default_factory=Course)
    sample: Sample | None = None
    remarks: tuple[str, ...] = ()

    @property
    def loss(self) -> Loss | None:
        """The one that the run is judged by: of its last evaluation, else the mean of its latest steps."""
        return last_loss(self.facts)

    @property
    def end(self) -> ForecastPoint | None:
        """What the end of the schedule should bring, while that is still to come."""
        points = self.forecast.points if self.forecast else ()
        return next((p for p in points if not p.case and p.step > self.facts.step), None)

    @property
    def finished(self) -> bool:
        return self.facts.last_step is not None and self.facts.step >= self.facts.last_step

    @property
    def health(self) -> Health:
        if self.alarms:
            return "not-healthy"
        if losses_seen(self.facts) < LEAST_LOSSES or self.early:
            return "unknown"
        return "healthy-but" if self.grave or self.behind else "healthy"

    @property
    def early(self) -> bool:
        """Are these too few steps for a verdict, whatever they look like?"""
        begin, end = steps_seen(self.facts)
        return end - begin < LEAST_STEPS

    @property
    def comparable(self) -> bool:
        """Has it come far enough to be compared with runs that ended after as many tokens? Early in a run the
        rate is high, and every loss is above theirs."""
        if self.place is None or self.place.low is None or self.finished:
            return self.place is not None and self.place.low is not None
        if self.place.equals_tokens is None:
            return False
        facts = self.facts
        if facts.last_step is not None:
            return facts.step >= HALFWAY * facts.last_step
        return (facts.tokens or 0) >= TOKENS_PER_PARAMETER * (facts.parameters or math.inf)

    @property
    def grave(self) -> str:
        """The sentence of the heaviest thing that is wrong; empty where nothing weighs much."""
        wrong = [(mistake.weight, mistake.text) for mistake in self.mistakes]
        wrong += [(finding.weight, finding.text) for finding in self.findings if finding.good is False]
        heaviest = max(wrong, default=(0.0, ""), key=lambda pair: pair[0])
        return heaviest[1] if heaviest[0] >= GRAVE else ""

    @property
    def behind(self) -> bool:
        """Is it above what usual runs of its size have after so many tokens, a high rate allowed for?"""
        return self.comparable and self.place is not None and self.place.standing == "behind"

    @property
    def reasons(self) -> list[Finding]:
        """Alarms first, then what weighs most; each a figure."""
        return [*self.alarms, *sorted(self.findings, key=lambda finding: -finding.weight)]


@dataclass(frozen=True)
class Loss:
    """A loss, of which text, in which unit, and at which step."""

    value: float
    split: Literal["val", "train"]
    unit: Literal["nats", "bpb"]
    step: int

    @property
    def name(self) -> str:
        if self.unit == "bpb":
            return _("validation loss in bits per byte")
        return _("validation loss") if self.split == "val" else _("training loss")

    @property
    def text(self) -> str:
        return loss_text(self.value)


def loss_text(value: float, like: float | None = None) -> str:
    """With as many digits as say something; the ends of a range with as many as each other (`like`)."""
    return number(value, ".3f" if max(value, like if like is not None else value) < 2 else ".2f")


def range_texts(low: float, high: float) -> tuple[str, str]:
    return loss_text(low, high), loss_text(high, low)


def last_loss(facts: RunFacts) -> Loss | None:
    log = facts.log
    for name, split, unit in (("val", "val", "nats"), ("bpb", "val", "bpb"), ("train", "train", "nats")):
        pairs = [pair for pair in log.evaluations.pairs(name) if math.isfinite(pair[1])]
        # An evaluation of the beginning says nothing of a run that has gone on since.
        if pairs and (pairs[-1][0] > 0 or not log.steps.pairs("loss") or facts.step < LEAST_STEPS):
            return Loss(pairs[-1][1], split, unit, pairs[-1][0])  # type: ignore[arg-type]
    pairs = [pair for pair in log.steps.pairs("loss") if math.isfinite(pair[1])]
    if not pairs:
        return None
    latest = pairs[-max(_LEAST_LATEST, int(_LATEST * len(pairs))) :]
    if len(pairs) < 4 * _LEAST_LATEST:
        latest = pairs[-1:]
    return Loss(statistics.fmean(value for _step, value in latest), "train", "nats", pairs[-1][0])


def first_loss(facts: RunFacts, like: Loss) -> float | None:
    """The same curve's first one."""
    log = facts.log
    columns = log.evaluations if like.split == "val" else log.steps
    name = "bpb" if like.unit == "bpb" else "val" if like.split == "val" else "loss"
    if name not in columns.NAMES or not (pairs := columns.pairs(name)):
        pairs = log.evaluations.pairs("train")
    return next((value for _step, value in pairs if math.isfinite(value)), None)


def losses_seen(facts: RunFacts, *, numbers: bool = True) -> int:
    """How many losses the log has; without `numbers` also those that are NaN or infinite."""
    log = facts.log
    columns: tuple[tuple[Any, str], ...] = (
        (log.evaluations, "val"), (log.evaluations, "bpb"), (log.evaluations, "train"), (log.steps, "loss"),
    )  # fmt: skip
    test = math.isfinite if numbers else lambda value: not math.isnan(value)
    return max(sum(map(test, getattr(part, name))) for part, name in columns)


def steps_seen(facts: RunFacts) -> tuple[float, float]:
    """The first one and the last one that has a loss."""
    log = facts.log
    parts = (log.steps.pairs("loss"), *(log.evaluations.pairs(name) for name in ("val", "bpb", "train")))
    ends = [step for pairs in parts if pairs for step in (pairs[0][0], pairs[-1][0])]
    return min(ends, default=0), max(ends, default=0)


def tokens_at(facts: RunFacts, step: float) -> int | None:
    """Seen until that step; None where they are not known."""
    if facts.tokens is None or not facts.step:
        return facts.tokens
    return round(facts.tokens * step / facts.step)


def perplexity(loss: Loss) -> float | None:
    """Of a token; None where the loss is not in nats a token, or beyond what says anything."""
    return math.exp(loss.value) if loss.unit == "nats" and loss.value < 30 else None


def heaviest(mistakes: Sequence[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: -mistake.weight)


# --- asking them all ------------------------------------------------------------------------------------


def report_of(
    log: Log, known: Known, folder: RunFolder | None = None, *, source: str = "", name: str = "",
    money: Money | None = None,
) -> Report:  # fmt: skip
    """`known`: what the person adds to the log. `source`: how the run was named, for commands."""
    from onecard.report.curve import alarms
    from onecard.report.curve import findings as curve
    from onecard.report.forecast import forecast_of
    from onecard.report.gathering import gather
    from onecard.report.mistakes import all as mistakes
    from onecard.report.next import next_steps
    from onecard.report.place import placing as place

    facts = replace(gather.facts_of(log, known, folder), source=source)
    found = Report(facts, name, course=course_of(facts, pace_of(facts), money or Money()))
    if not losses_seen(facts) or losses_seen(facts, numbers=False) < LEAST_LOSSES:
        return found
    forecast, stands = forecast_of(facts), place.place_of(facts)
    rung = alarms.alarms_of(facts)
    wrong = tuple(mistakes.mistakes_of(facts))
    return replace(
        found,
        # What was wrong and is no more is part of what the curve shows.
        findings=(*curve.findings_of(facts), *(alarm for alarm in rung if alarm.good is not False)),
        alarms=tuple(alarm for alarm in rung if alarm.good is False),
        mistakes=wrong,
        place=stands,
        forecast=forecast,
        next_steps=tuple(next_steps.next_steps_of(facts, forecast, stands, wrong, lost=lost_since(rung))),
        sample=sample_of(facts),
    )


def lost_since(alarms: Sequence[Finding]) -> int | None:
    """The step since which nothing is worth going on with; None of any other run."""
    return next((a.step for a in alarms if a.good is False and a.key in ("diverging", "not-a-number")), None)


def pace_of(facts: RunFacts) -> Pace:
    """As eta has it; where eta has no answer, what the lines say."""
    from onecard.report.eta.estimate import estimate

    try:
        found = estimate(facts)
    except UserError:
        return pace_by_lines(facts)
    return Pace(
        found.step_ms.mid / 1000, found.tokens_per_s, found.mfu, found.peak_flops, found.log_mfu,
        found.mfu_explanation, found.evaluation_s.mid, found.remaining_s.mid if found.remaining_s else None,
        found.prediction is not None and bool(found.prediction.program),
    )  # fmt: skip


def sample_of(facts: RunFacts) -> Sample | None:
    """The newest text in the run's folder that its model has generated."""
    if facts.folder:
        newest = sorted(Path(facts.folder, "samples").glob("step-*.txt"), reverse=True)[:1]
        for path in newest:
            with suppress(OSError, ValueError):
                text = read_bounded(path, _MOST_OF_A_SAMPLE).decode("utf-8", "replace").strip()
                step = path.stem.removeprefix("step-")
                return Sample(text, int(step) if step.isdigit() else None) if text else None
    return None
