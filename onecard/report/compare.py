"""Runs compared by tokens, hours, FLOPs and kWh, and whether what they differ by is beyond noise.

Runs of different length or speed are compared at the largest amount that all of them have used: who is lower
there got more out of it. A difference counts where it is larger than what the evaluations and the curves
waver by.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from onecard.config.knobs import knobs
from onecard.language import _, joined
from onecard.report.answer import Report, loss_text
from onecard.report.curve.noise import evaluation_error as of_tokens
from onecard.report.pages.plotting import Pairs, curves_of, mean_line
from onecard.report.pages.tables import facts_shown

if TYPE_CHECKING:
    pass

_SIGMAS = 2.0  # a difference of so many standard errors counts
_MEANS = 200
_OTHER_VOCABULARY = 0.8  # nats between first losses: weights that begin large differ by less
_LEAST_ERROR = 0.002  # nats: no log prints more exactly, and no two runs of the same config are nearer
AXES = ("tokens", "hours", "flops", "kwh")
# Settings that are no part of what is compared: where a run writes, its name, how often it says so.
_NO_MATTER = ("out_dir", "wandb", "log_interval", "eval_interval", "eval_iters", "init_from", "always_save")


@dataclass(frozen=True)
class Side:
    """One run, its curve, and what a step of it uses on each axis."""

    name: str
    report: Report
    curve: Pairs
    a_step: dict[str, float]

    def used(self, axis: str) -> float | None:
        return self.a_step[axis] * self.curve[-1][0] if axis in self.a_step else None

    def at(self, axis: str, amount: float) -> float | None:
        """The loss after so much, between two rows of the log."""
        if axis not in self.a_step or not self.a_step[axis]:
            return None
        step = amount / self.a_step[axis]
        for (s, a), (t, b) in pairwise(self.curve):
            if s <= step <= t * (1 + 1e-9):
                return a + (b - a) * (step - s) / (t - s) if t > s else b
        return None

    @property
    def error(self) -> float:
        """Of one value of the curve: what the rows around it do not explain, and the evaluation's own."""
        rests = []
        late = self.curve[len(self.curve) // 3 :]
        for (s, a), (t, b), (u, c) in zip(late, late[1:], late[2:], strict=False):
            if u > s:
                share = (t - s) / (u - s)
                rests.append((b - a - share * (c - a)) / math.sqrt(1 + share**2 + (1 - share) ** 2))
        # A smooth curve bends alike from row to row: what its bends differ by is noise. Of white noise the
        # difference of two such rests has 10/3 of its variance.
        wobbles = [abs(b - a) for a, b in pairwise(rests)]
        wavers = 1.4826 * statistics.median(wobbles) / math.sqrt(10 / 3) if len(wobbles) > 2 else 0.0
        return math.hypot(wavers, evaluation_error(self.report), _LEAST_ERROR)


@dataclass(frozen=True)
class Comparison:
    axis: str
    amount: float
    losses: tuple[float, ...]
    error: float  # two standard errors of the difference

    @property
    def best(self) -> int:
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def lead(self) -> float:
        """Of the best over the second."""
        first, second, *_rest = sorted(self.losses)
        return second - first

    @property
    def beyond_noise(self) -> bool:
        return self.lead > self.error


def evaluation_error(report: Report) -> float:
    """The standard error of one evaluation, by the tokens that it reads."""
    error = of_tokens(report.facts)
    # The same text in every evaluation is the same for both runs too: its error falls out of the difference.
    return 0.0 if error is None else error.of_a_change / math.sqrt(2) if error.same_text else error.level


def sides_of(reports: Sequence[Report]) -> list[Side]:
    names = [report.name or _("paste") for report in reports]
    found = []
    for at, report in enumerate(reports):
        name = names[at] if names.count(names[at]) == 1 else report.facts.source
        curves = curves_of(report.facts)
        curve = curves.val if len(curves.val) > 2 else mean_line(curves.train, _MEANS)
        finite = [pair for pair in curve if math.isfinite(pair[1])]
        found.append(Side(name, report, finite, _uses(report)))
    return found


def _uses(report: Report) -> dict[str, float]:
    """Of each axis what one step takes, as far as it is known."""
    facts, course = report.facts, report.course
    step = facts.step
    if not step:
        return {}
    tokens = facts.tokens / step if facts.tokens else None
    flops = facts.flops_per_token or (facts.shape.flops_per_token if facts.shape else None)
    flops = flops or (6 * facts.parameters if facts.parameters else None)
    seconds, kwh = course.seconds.so_far, course.pc_kwh.so_far
    known = {
        "tokens": tokens,
        "hours": seconds / 3600 / step if seconds else None,
        "flops": flops * tokens if flops and tokens else None,
        "kwh": kwh / step if kwh else None,
    }
    return {axis: value for axis, value in known.items() if value}


def comparisons_of(sides: Sequence[Side]) -> list[Comparison]:
    found = []
    for axis in AXES:
        used = [side.used(axis) for side in sides]
        if all(used):
            amount = min(value for value in used if value)
            losses = [side.at(axis, amount) for side in sides]
            if all(loss is not None for loss in losses):
                values = tuple(loss for loss in losses if loss is not None)
                first, second = sorted(range(len(sides)), key=values.__getitem__)[:2]
                error = _SIGMAS * math.hypot(sides[first].error, sides[second].error)
                found.append(Comparison(axis, amount, values, error))
    return found


def why_not(sides: Sequence[Side]) -> str:
    """Why losses of these runs cannot be compared; empty where they can."""
    for name, text in (
        (
            "tokenizer",
            _("their tokenizers differ ({values}), and with them what a token is"),
        ),
        ("data", _("their data differ ({values}): losses on different text cannot be compared")),
    ):
        values = {getattr(side.report.facts, name) for side in sides} - {None}
        if len(values) > 1:
            return text.format(values=joined(sorted(map(str, values))))
    first = [loss for side in sides if (loss := _first_loss(side.report)) is not None]
    if len(first) == len(sides) and max(first) - min(first) > _OTHER_VOCABULARY:
        shown = joined(loss_text(loss) for loss in first)
        text = _("their first losses differ ({values}), and so do their vocabularies and what a token is")
        return text.format(values=shown)
    units = {curves_of(side.report.facts).unit for side in sides}
    return _("one has losses in bits per byte, another in nats a token") if len(units) > 1 else ""


def _first_loss(report: Report) -> float | None:
    """What a model that knows nothing has: the logarithm of its vocabulary, and a little more."""
    log = report.facts.log
    first = [pairs[0] for pairs in (log.evaluations.pairs("val"), log.steps.pairs("loss")) if pairs]
    return next((loss for step, loss in first if step <= 1 and math.isfinite(loss)), None)


def differences(sides: Sequence[Side]) -> list[tuple[str, ...]]:
    """Settings and facts that are not the same: name, and each run's value."""
    every = [_settings(side.report) for side in sides]
    names = list(dict.fromkeys(name for settings in every for name in settings))
    rows = []
    for name in names:
        values = [settings.get(name) for settings in every]
        # What only one log says is no difference that can be known.
        if sum(value is not None for value in values) > 1 and len({v for v in values if v is not None}) > 1:
            rows.append((name, *(value if value is not None else "–" for value in values)))
    return rows


def _settings(report: Report) -> dict[str, str]:
    facts = report.facts
    found = {name: value for key, name, value in facts_shown(report) if key not in ("time", "shape")}
    if facts.shape is not None:
        found |= {"n_layer": str(facts.shape.n_layer), "n_embd": str(facts.shape.n_embd)}
    given = dict(facts.log.settings)
    if facts.config is not None:
        names = {field.name for field in knobs(type(facts.config))}
        given |= {name: getattr(facts.config, name) for name in facts.config.origins if name in names}
    for name, value in given.items():
        if name not in found and not name.startswith(_NO_MATTER) and isinstance(value, int | float | str):
            found[name] = (
                value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
            )
    return found
