"""What figures of a run are drawn from: its curves, the scales of their axes, and extremes by column.

A log has up to millions of steps and a figure a few hundred columns of pixels. Of each column the lowest
and the highest value are drawn, so that no spike is lost and the figure is as small as ever.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from onecard.language import number
from onecard.report.curve.rates import rate_at
from onecard.report.findings import Finding, Forecast, ForecastPoint
from onecard.report.log import Columns, Log
from onecard.report.run_facts import RunFacts

Pairs = Sequence[tuple[float, float]]

# The first steps fall from ln(vocabulary): drawn whole, they would leave the rest of the curve flat.
_FALL = 0.04
# How high the scale is, in what the later steps span: of a few lines of text, and of a picture.
LATE, LATE_OF_A_PICTURE = 3.5, 4.5
_LEAST_OF_THE_FALL = 0.4  # of what is above that, after the first steps
_LARGE = 1e5  # a loss: no more digits than a person reads
_MANY = 200  # values of a curve, among which a few may be left out
_ROOM = 0.06  # of the scale, above and below the curve
_NEAR_THE_END = 2.2  # times the run: what is forecast further off would squeeze the curve
_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Scale:
    """Values to shares of an axis, 0 to 1."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = map(self._plain, (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return min(1.0, max(0.0, share))

    def _plain(self, value: float) -> float:
        return math.log(max(value, 1e-300)) if self.log else value

    def ticks(self, about: int) -> list[float]:
        """Round values on the axis, `about` so many."""
        if self.log:
            return self._decades(about)
        if not self.high > self.low:
            return [self.low]
        rough = (self.high - self.low) / max(1, about)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(n * power for n in _STEPS if n * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]

    def _decades(self, about: int) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [10.0**power for power in powers if self.low <= 10.0**power <= self.high]
        return found[:: max(1, math.ceil(len(found) / max(1, about)))] or [self.low, self.high]


@dataclass(frozen=True)
class Column:
    """The values of one column of a figure."""

    at: int
    low: float
    high: float
    last: float


def by_column(pairs: Iterable[tuple[float, float]], scale: Scale, count: int) -> list[Column]:
    """In the order of columns; those without a value are left out."""
    lows: dict[int, float] = {}
    highs: dict[int, float] = {}
    lasts: dict[int, float] = {}
    for step, value in pairs:
        if not math.isfinite(value):
            continue
        at = min(count - 1, int(scale.at(step) * count))
        if at in lows:
            if value < lows[at]:
                lows[at] = value
            elif value > highs[at]:
                highs[at] = value
        else:
            lows[at] = highs[at] = value
        lasts[at] = value
    return [Column(at, lows[at], highs[at], lasts[at]) for at in sorted(lows)]


@dataclass(frozen=True)
class Curves:
    """The loss of a run as it is drawn, and what is expected of it."""

    train: Pairs
    val: Pairs
    points: tuple[ForecastPoint, ...] = ()  # expected at steps still to come
    starts: tuple[float, ...] = ()  # steps at which a process went on
    marks: tuple[float, ...] = ()  # of alarms
    unit: str = "nats"  # or bpb

    @property
    def main(self) -> Pairs:
        """The curve that the run is judged by."""
        return self.val if len(self.val) > 1 or not self.train else self.train

    @property
    def fans(self) -> bool:
        """Does the forecast go on from the curve's end? Other horizons are ranges of their own."""
        return bool(self.points) and not self.points[0].case

    def steps(self, log: bool = False) -> Scale:
        every = [pairs[end][0] for pairs in (self.train, self.val) if pairs for end in (0, -1)]
        last = max([*every, *(point.step for point in self.points)], default=1.0)
        low = min(every, default=0.0)
        if not log:
            return Scale(low, max(last, low + 1))
        seen = [step for pairs in (self.train, self.val) for step, _value in pairs if step > 0]
        low = min(seen, default=1.0)
        return Scale(low, max(last, low + 1), True)

    def losses(self, log: bool = False, late: float = LATE) -> Scale:
        """What the axis of losses spans: not the fall of the first steps, which would leave the rest flat,
        unless steps are on a scale where it has room."""
        finite = [[(s, v) for s, v in pairs if math.isfinite(v)] for pairs in (self.train, self.val)]
        values = sorted(v for pairs in finite for _s, v in pairs)
        if not values:
            return Scale(0.0, 1.0)
        low, high = values[0], values[-1] if len(values) < _MANY else _without_spikes(values)
        if not log:
            high = min(high, self._top(finite, low, high, late))
        bounds = [bound for point in self.points for bound in (point.low, point.high) if math.isfinite(bound)]
        low, high = min([low, *bounds]), max([high, *bounds])
        room = _ROOM * (high - low) or 0.05 * abs(high) or 1.0
        return Scale(low - room, high + room)

    def _top(self, finite: Sequence[Pairs], low: float, high: float, late: float) -> float:
        """So high that what falls in the second half has its share, and that nothing later is cut off."""
        scale = self.steps()
        begin, middle = (scale.low + share * (scale.high - scale.low) for share in (_FALL, 0.4))
        after = [max((v for s, v in pairs if s >= begin), default=low) for pairs in finite]
        later = [sorted(v for s, v in pairs if s >= middle) for pairs in finite]
        highest = [
            _without_spikes(values) if len(values) >= _MANY else values[-1] for values in later if values
        ]
        top = max([*highest, low])
        return max(top, low + max(late * (top - low), _LEAST_OF_THE_FALL * (min(max(after), high) - low)))


def _without_spikes(ordered: list[float]) -> float:
    """The highest value but for a handful far above all others: one spike must not flatten the curve."""
    usual, lowest = ordered[int(0.995 * len(ordered))], ordered[0]
    return min(ordered[-1], usual + 0.6 * (usual - lowest))


def curves_of(facts: RunFacts, alarms: Iterable[Finding] = (), forecast: Forecast | None = None) -> Curves:
    log = facts.log
    train, val = log.steps.pairs("loss"), log.evaluations.pairs("val")
    unit = "nats"
    bits = log.evaluations.pairs("bpb")
    if not val and bits and (len(bits) > 1 or len(train) < 2):
        train, val, unit = [], bits, "bpb"  # two units do not go into one figure
    return Curves(
        train or (log.evaluations.pairs("train") if unit == "nats" else []),
        val,
        _drawn(forecast, facts.step) if unit == "nats" else (),
        tuple(starts_of(log)[1:]),
        tuple(float(alarm.step) for alarm in alarms if alarm.step is not None),
        unit,
    )


def _drawn(forecast: Forecast | None, step: int) -> tuple[ForecastPoint, ...]:
    """The end of the schedule where it is still to come; else other horizons that are not too far off."""
    points = [point for point in (forecast.points if forecast else ()) if point.step > step]
    end = tuple(point for point in points if not point.case)[:1]
    return end or tuple(point for point in points if point.step <= _NEAR_THE_END * max(step, 1))


def starts_of(log: Log) -> list[float]:
    """The first step of each start."""
    found = []
    for start in log.starts:
        first = [columns.step[0] for columns in (start.steps, start.evaluations) if len(columns)]
        if first:
            found.append(min(first))
    return found


def rates_of(facts: RunFacts) -> Pairs:
    """The learning rate by step: as the log says it, else by its schedule."""
    log = facts.log
    of_columns: tuple[Columns, ...] = (log.steps, log.evaluations)
    for columns in of_columns:
        if len(pairs := columns.pairs("lr")) > 1:
            return [*pairs, *log.planned.pairs("lr")]
    if (schedule := facts.schedule) is None or schedule.assumed or schedule.peak is None:
        return []
    if schedule.table:
        return schedule.table
    end, warm = max(facts.last_step or 0, facts.step), schedule.warmup_steps
    after = [warm + (end - warm) * n / 100 for n in range(101)] if warm < end else [float(end)]
    rates = [(step, rate_at(schedule, step)) for step in ([0.0, *after] if warm else after)]
    return [(step, rate) for step, rate in rates if rate is not None]


def speeds_of(facts: RunFacts) -> Pairs:
    """Tokens a second by step; without the first steps of a process, which compile, and without those whose
    time has an evaluation in it."""
    evaluated = set(facts.log.evaluations.step)
    steps = facts.log.steps.where([step not in evaluated for step in facts.log.steps.step])
    pairs: Pairs = steps.pairs("tokens_per_s")
    if not pairs and facts.tokens_per_step:
        pairs = [(s, 1000 * facts.tokens_per_step / ms) for s, ms in steps.pairs("ms") if ms > 0]
    if len(pairs) < 3:
        return []
    usual = statistics.median(value for _step, value in pairs)
    return [(step, value) for step, value in pairs if value > 0.2 * usual or step > pairs[2][0]]


def value_at(pairs: Pairs, step: float, within: float) -> float | None:
    """The value of the nearest row, if one is near enough."""
    if not pairs:
        return None
    near = min(pairs, key=lambda pair: abs(pair[0] - step))
    return near[1] if abs(near[0] - step) <= within else None


def round_steps(scale: Scale, most: int) -> list[float]:
    """Steps for a table: round ones, the first and the last."""
    inside = [tick for tick in scale.ticks(most) if scale.low < tick < scale.high]
    room = 0.4 * (inside[1] - inside[0]) if len(inside) > 1 else 0.0
    inside = [tick for tick in inside if min(tick - scale.low, scale.high - tick) >= room]
    return [scale.low, *inside, scale.high]


def mean_line(pairs: Pairs, count: int) -> list[tuple[float, float]]:
    """Means of `count` stretches of equal length: a noisy curve that can be read."""
    finite = [pair for pair in pairs if math.isfinite(pair[1])]
    if len(finite) <= count:
        return finite
    cuts = [round(n * len(finite) / count) for n in range(count + 1)]
    parts = [finite[a:b] for a, b in pairwise(cuts)]
    return [(statistics.fmean(s for s, _v in p), statistics.fmean(v for _s, v in p)) for p in parts if p]


def short(step: float) -> str:
    """A step or a count of tokens on an axis: 500, 5k, 2.5k, 1.2M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(step) >= size:
            return number(round(step / size, 2), "g") + letter
    return number(round(step, 2), "g")


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """With as many digits behind the point as the ticks need to differ."""
    digits = next((n for n in range(1, 6) if all(abs(round(t, n) - t) < 1e-9 for t in ticks)), 6)
    form = f".{digits}f" if all(abs(tick) < _LARGE for tick in ticks) else ".3g"
    return [number(tick, form) for tick in ticks]
