"""Findings about the losses: where they are, how far apart, how fast they fall and how exact they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from onecard.language import _, joined
from onecard.report.curve import columns
from onecard.report.curve.detectors import FEWEST_FOR_NOISE, Levels, block_size, noise_of
from onecard.report.curve.noise import evaluation_error
from onecard.report.curve.rates import WARM_UP, phase_at, rates_of
from onecard.report.findings import Finding
from onecard.report.run_facts import RunFacts

Points = list[tuple[int, float]]

ROUND = (1, 2, 5)  # times powers of ten
SHOWN = 8
SMALL_GAP, LARGE_GAP = 0.05, 0.15
# A slope counts where it is so many times its error, and matters from so many nats per doubling on.
SIGMAS, FALLING = 2.0, 0.02
UNSEEN = 1.0  # an error so large is no figure
LAST_DIGIT = 0.29  # of a unit: the standard deviation of what rounding leaves out
INITIAL_SHARE = 0.03


@dataclass(frozen=True)
class Series:
    """The curve that counts: the validation loss where there is one."""

    name: str  # val, train
    points: Points
    single: bool  # evaluations; else medians of training steps


def series_of(facts: RunFacts) -> Series | None:
    """The best curve there is of a run; finite values alone."""
    for name in ("val", "train"):
        points = finite(facts.log.evaluations.pairs(name))
        if len(points) >= 3:
            return Series(name, points, single=True)
    steps, losses = columns.finite(facts.log.steps, "loss")
    if len(losses) < 3:
        return None
    if len(losses) < 20:
        return Series("train", [(int(s), loss) for s, loss in zip(steps, losses, strict=True)], single=True)
    levels = Levels(block_size(steps))
    for at in range(0, len(losses), levels.size):
        levels.add_block(steps[at : at + levels.size], losses[at : at + levels.size])
    return Series("train", list(zip(levels.steps, levels.values, strict=True)), single=False)


def rounds(facts: RunFacts) -> Iterator[Finding]:
    """The losses at round steps."""
    series = series_of(facts)
    if series is None:
        return
    chosen = at_round_steps(series.points)
    shown = joined(_("{loss:.2f} at step {step:,}").format(loss=loss, step=step) for step, loss in chosen)
    text = _("Validation loss: {losses}.") if series.name == "val" else _("Training loss: {losses}.")
    yield Finding("losses", text.format(losses=shown), None, chosen[-1][0], 5.0)


def at_round_steps(points: Points) -> Points:
    """The first point, those nearest to round steps, and the last."""
    first, last = points[0], points[-1]
    chosen = {first[0]: first}
    for power in range(8):
        for lead in ROUND:
            wanted = lead * 10**power
            near = min(points, key=lambda point: abs(point[0] - wanted))
            if abs(near[0] - wanted) <= 0.05 * wanted:
                chosen[near[0]] = near
    inner = [point for step, point in sorted(chosen.items()) if step not in (first[0], last[0])]
    return [first, *inner[-(SHOWN - 2) :], last] if last != first else [first]


def initial(facts: RunFacts) -> Iterator[Finding]:
    """The loss that the run began with, against ln(vocabulary), that of blind guesses."""
    if not facts.vocab_size or facts.vocab_size < 2:
        return
    log = facts.log
    first = [pairs[0] for pairs in (log.evaluations.pairs("val"), log.steps.pairs("loss")) if pairs]
    first = [(step, loss) for step, loss in first if step <= 1 and math.isfinite(loss)]
    if not first:
        return
    step, loss = first[0]
    blind = math.log(facts.vocab_size)
    values = {"loss": loss, "blind": blind, "vocabulary": facts.vocab_size}
    if abs(loss - blind) <= INITIAL_SHARE * blind:
        text = _(
            "The initial loss {loss:.2f} is ln({vocabulary:,}) = {blind:.2f}: the model began "
            "knowing nothing, as it should."
        )
        yield Finding("initial-loss", text.format(**values), True, step, 10.0)
    elif loss > blind:
        text = _(
            "The initial loss {loss:.2f} is above ln({vocabulary:,}) = {blind:.2f}: the weights begin "
            "large, and the first steps go into unlearning wrong guesses. It costs little."
        )
        yield Finding("initial-loss", text.format(**values), None, step, 12.0)
    else:
        text = _(
            "The initial loss {loss:.2f} is below ln({vocabulary:,}) = {blind:.2f}: the model had learned "
            "before, or its vocabulary is a smaller one."
        )
        yield Finding("initial-loss", text.format(**values), None, step, 15.0)


def gaps(facts: RunFacts) -> Points:
    """Validation minus training loss, where both are evaluated (NaN and infinite ones left out)."""
    log = facts.log.evaluations
    return [
        (int(step), val - train)
        for step, train, val in zip(log.step, log.train, log.val, strict=True)
        if math.isfinite(train) and math.isfinite(val)
    ]


def gap(facts: RunFacts) -> Iterator[Finding]:
    """The generalisation gap, and whether it grows."""
    pairs = gaps(facts)
    if not pairs or pairs[-1][0] <= 0:  # before the first step nothing is learnt, nor memorised
        return
    tail = [value for _step, value in pairs[-max(1, len(pairs) // 8) :]]
    now, step = statistics.fmean(tail), pairs[-1][0]
    middle = next((value for at, value in pairs if at >= step / 2), now)
    grown = now - middle if len(pairs) >= 3 and step > 0 else 0.0
    values = {"gap": now, "grown": grown}
    if now <= SMALL_GAP:
        text = _(
            "Validation and training loss are {gap:.2f} nats apart: the model learns, it does not memorise."
        )
        yield Finding("gap", text.format(gap=abs(now)), True, step, 40.0)
    elif now > LARGE_GAP and grown > 0.25 * now:
        text = _(
            "Validation is {gap:.2f} nats above training, {grown:.2f} of it since half of the steps: the "
            "model begins to memorise its text."
        )
        yield Finding("gap", text.format(**values), False, step, 55.0)
    else:
        text = _("Validation is {gap:.2f} nats above training, {grown:+.2f} since half of the steps.")
        yield Finding("gap", text.format(**values), None, step, 20.0)


@dataclass(frozen=True)
class Slope:
    """Nats per doubling of the steps over the last doubling there is."""

    nats: float
    error: float
    begin: int
    end: int


def slope_of(facts: RunFacts) -> Slope | None:
    """A straight line over the logarithm of the steps, least squares; None of fewer than three points."""
    series = series_of(facts)
    if series is None:
        return None
    points = [(step, loss) for step, loss in series.points if step > 0]
    if len(points) < 3:
        return None
    end = points[-1][0]
    chosen = [point for point in points if point[0] >= end / 2]
    if len(chosen) < 3:
        chosen = points[-3:]
    x = [math.log2(step) for step, _loss in chosen]
    y = [loss for _step, loss in chosen]
    x_mean, y_mean = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    if spread <= 0:
        return None
    nats = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    left = [b - y_mean - nats * (a - x_mean) for a, b in zip(x, y, strict=True)]
    residual = math.sqrt(sum(value * value for value in left) / max(1, len(chosen) - 2))
    return Slope(nats, max(residual, _own_noise(facts, series)) / math.sqrt(spread), chosen[0][0], end)


def printed(points: Points) -> float:
    """The standard deviation that the printed digits leave: two or four of them."""
    coarse = all(abs(loss - round(loss, 2)) < 1e-9 for _step, loss in points[-4:])
    return LAST_DIGIT * (1e-2 if coarse else 1e-4)


def _rate_fell(facts: RunFacts, over: Slope) -> bool:
    early, late = (rates_of(facts)(step) for step in (over.begin, over.end))
    return early is not None and late is not None and late < 0.9 * early


def _own_noise(facts: RunFacts, series: Series) -> float:
    """Of one point of the curve: what it shows itself, its printed digits, and what its text allows."""
    error = evaluation_error(facts) if series.single and series.name == "val" else None
    known = error.of_a_change / math.sqrt(2) if error is not None and not error.assumed else 0.0
    seen = (
        noise_of([loss for _step, loss in series.points[-48:]])
        if len(series.points) >= FEWEST_FOR_NOISE
        else 0.0
    )
    return max(printed(series.points), known, seen)


def slope(facts: RunFacts) -> Iterator[Finding]:
    """Still falling, flat, or rising."""
    found = slope_of(facts)
    if found is None or phase_at(facts, facts.step) == WARM_UP:
        return
    values = {"nats": abs(found.nats), "error": found.error, "begin": found.begin, "end": found.end}
    if found.nats < -FALLING and abs(found.nats) > SIGMAS * found.error:
        text = _(
            "The loss still falls: by {nats:.2f} nats per doubling of the steps (± {error:.3f}, steps "
            "{begin:,} to {end:,})."
        )
        if _rate_fell(facts, found):
            text = _(
                "The loss still falls: by {nats:.2f} nats per doubling of the steps (± {error:.3f}, steps "
                "{begin:,} to {end:,}); part of that is the falling learning rate."
            )
        yield Finding("still-falling", text.format(**values), True, found.end, 45.0)
    elif found.nats > FALLING and found.nats > SIGMAS * found.error:
        text = _(
            "The loss rises: by {nats:.2f} nats per doubling of the steps (± {error:.3f}, since step "
            "{begin:,})."
        )
        yield Finding("rising", text.format(**values), False, found.begin, 60.0)
    elif found.error <= FALLING:
        text = _(
            "The loss is flat: it moved by less than {nats:.3f} nats per doubling of the steps (± "
            "{error:.3f}) since step {begin:,}."
        ).format(**{**values, "nats": max(abs(found.nats), FALLING)})
        yield Finding("plateau", text, None, found.begin, 45.0)
    elif found.error > UNSEEN:
        text = _("Whether the loss still falls cannot be seen in so few steps.")
        yield Finding("slope-unclear", text, None, found.begin, 20.0)
    else:
        text = _(
            "Whether the loss still falls cannot be seen: {signed:+.3f} ± {error:.3f} nats per doubling of "
            "the steps."
        ).format(signed=found.nats, error=found.error)
        yield Finding("slope-unclear", text, None, found.begin, 20.0)


def finite(points: Points) -> Points:
    return [(step, value) for step, value in points if math.isfinite(value)]
