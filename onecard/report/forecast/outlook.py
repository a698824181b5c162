"""Where a run will end: at the end of its schedule, and over other horizons, as ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onecard.language import N_, _, ngettext
from onecard.language import number as shown
from onecard.report.findings import Forecast, ForecastPoint
from onecard.report.forecast import plain
from onecard.report.forecast.column import Column, column_of
from onecard.report.forecast.learnt import learnt
from onecard.report.forecast.predict import Prediction, predict
from onecard.report.forecast.rates import Rates
from onecard.report.forecast.rates_of_run import (
    Course,
    cooled,
    cosine,
    course_of,
    going_on,
    past_of,
    restarted,
    stretched,
)
from onecard.report.forecast.seen import FEWEST, noise_of, smoothed_end
from onecard.report.run_facts import RunFacts

AGAIN = N_("decayed and restarted")
LONGER = N_("longer from the start")
COOLED = N_("trained on, decay in the last fifth")
STAYS = N_("the rate stays as it is")
COSINE = N_("a cosine down to a tenth of the rate")

HORIZONS = (1.5, 2.0, 3.0)  # times the run
LEAST_SEEN = 0.15  # of a horizon
EARLY, EARLY_WIDER = 0.2, 1.6  # of it less seen than any forecast that was learnt from: so much wider
FURTHEST = 3.4  # times what is seen, of a horizon that nobody planned
FINISHED = 0.97
DECAYED = 0.15  # of its peak: a rate this low has come down, even if nobody says where it ends
ASSUMED = 2.0  # times wider, where the schedule is assumed
SURE = 1.28  # standard deviations of an 80% range
LEAST_HALF = 0.003
RISEN, RISEN_SIGMAS = 0.02, 4.0
NOISY = 0.1  # nats: the error of a mean of a tenth of the points
STRANGE = 0.25  # less like any published run than this
MANY_PASSES = 4.0
RISING = 0.15  # nats above the curve's end: a law that says so does not fit it


@dataclass(frozen=True)
class Case:
    """A schedule still to come: until `end`, under `later` where it begins anew, else under `rates`."""

    name: str
    rates: Rates
    end: float
    later: Rates | None = None
    wider: float = 1.0


def forecast_of(facts: RunFacts) -> Forecast:
    """The end of this schedule first, then other horizons; or why there is no forecast."""
    course = course_of(facts) or _decayed(facts)
    past = course.rates if course is not None else past_of(facts)
    column = column_of(facts.log, past.warm_at if past is not None else 0.02 * facts.step)
    if column is None:
        return Forecast(refused=_("There is no forecast: the log shows no loss."))
    refused = _refused(column, past)
    if not refused and course is not None and facts.step < LEAST_SEEN * course.end:
        text = _("There is no forecast yet: {share:.0%} of the run is seen, and {least:.0%} are needed.")
        refused = text.format(share=facts.step / course.end, least=LEAST_SEEN)
    if refused:
        return Forecast(refused=refused)
    return _forecast(facts, column, course, past)


def _decayed(facts: RunFacts) -> Course | None:
    """A run whose logged rate has come down, and for which nobody says a later step: finished."""
    past = past_of(facts)
    if past is None or (facts.last_step or 0) * FINISHED > facts.step:
        return None
    return Course(past, facts.step, True) if past.at(facts.step) <= DECAYED * past.peak else None


def _forecast(facts: RunFacts, column: Column, course: Course | None, past: Rates | None) -> Forecast:
    now = max(facts.step, column.points[-1][0])
    cases = list(_cases(facts, course, past, now))
    points: list[ForecastPoint] = []
    predictions: list[Prediction] = []
    if course is not None and now >= FINISHED * course.end:
        points.append(_measured(facts, column, course.end))
    # More steps end no higher than those there were.
    end = smoothed_end(column.points, noise_of(column.points[-60:])) if points or course is None else math.inf
    for case in cases:
        found = predict(column.points, case.rates, case.end, case.later)
        half = found.half * case.wider * (learnt().horizons if case.name else 1.0)
        half *= EARLY_WIDER if now < EARLY * case.end else 1.0
        points.append(_point(facts, case, min(found.loss, end), half))
        predictions.append(found)
    if not points:
        return Forecast(
            refused=_("There is no forecast: every horizon is more than three times what is seen.")
        )
    if refused := _unbelievable(column, predictions):
        measured = tuple(point for point in points if not point.case and point.step <= now)
        return Forecast(measured, "" if measured else refused, column.name, (refused,) if measured else ())
    laws: list[tuple[str, float]] = []
    if cases:
        first = cases[0]
        laws = [
            (_("the multi-power law"), predictions[0].law),
            (_("a power law"), plain.power_law(column.points, first.rates, first.end)),
            (_("the last value"), plain.last_value(column.points)),
        ]
    notes = tuple(_notes(facts, column, course, points, predictions))
    return Forecast(tuple(points), "", column.name, notes, tuple(laws))


def _unbelievable(column: Column, predictions: list[Prediction]) -> str:
    """Why laws that were fitted to this curve say nothing about it."""
    losses = [found.loss for found in predictions]
    if losses and min(losses) <= 0:
        return _("There is no forecast: a loss so near to zero follows no law of learning.")
    noise = noise_of(column.points[-60:])
    if losses and max(losses) > smoothed_end(column.points, noise) + max(RISING, RISEN_SIGMAS * noise):
        return _("There is no forecast: no law of learning fits the part of the curve that is seen.")
    return ""


# --- which schedules ------------------------------------------------------------------------------------


def _cases(facts: RunFacts, course: Course | None, past: Rates | None, now: float) -> Iterator[Case]:
    if course is None:
        yield from _unknown(facts, past, now)
        return
    wider = 1.0 if course.known else ASSUMED
    rates, end = course.rates, course.end
    finished = now >= FINISHED * end
    if not finished:
        yield Case("", rates, end, wider=wider)
    for times in HORIZONS:
        new = round(times * end)
        if new > FURTHEST * now:
            continue
        if finished:
            yield Case(AGAIN, restarted(rates, end, new), new, wider=wider)
        yield Case(LONGER, rates, new, stretched(rates, end, new), wider)


def _unknown(facts: RunFacts, past: Rates | None, now: float) -> Iterator[Case]:
    """Two cases of a schedule that nobody says: it is down by now and starts again, or it is longer."""
    last = facts.last_step or 0
    if last * FINISHED > now:
        ends = [float(last)] if now >= LEAST_SEEN * last else []
    elif past is not None:
        ends = [round(times * now) for times in HORIZONS]
    else:
        for times in HORIZONS:
            new, whole = round(times * now), cosine(now)
            yield Case(AGAIN, restarted(whole, now, new), new, wider=ASSUMED)
            yield Case(LONGER, cosine(new), new, wider=ASSUMED)
        return
    for end in ends:
        if past is None:
            yield Case(COSINE, cosine(end), end, wider=ASSUMED)
        yield Case(COOLED, cooled(past, now, end), end, wider=ASSUMED)
        if past is not None:
            yield Case(STAYS, going_on(past, now, end), end)


# --- points ---------------------------------------------------------------------------------------------


def _point(facts: RunFacts, case: Case, loss: float, half: float) -> ForecastPoint:
    half = max(half, LEAST_HALF)
    return ForecastPoint(
        round(case.end), _tokens(facts, case.end), loss, max(loss - half, 0.0), loss + half, case.name
    )


def _measured(facts: RunFacts, column: Column, end: int) -> ForecastPoint:
    """The end of a run that is there already: what is left is the noise of its losses."""
    noise = noise_of(column.points[-60:])
    loss = smoothed_end(column.points, noise)
    last = sum(step >= 0.98 * column.points[-1][0] for step, _ in column.points)
    half = max(SURE * noise / math.sqrt(last), LEAST_HALF)
    return ForecastPoint(end, _tokens(facts, end), loss, max(loss - half, 0.0), loss + half)


def _tokens(facts: RunFacts, step: float) -> int | None:
    for columns in (facts.log.planned, facts.log.steps, facts.log.evaluations):
        rows = columns.pairs("tokens")
        if rows and rows[-1][0] > 0:
            return round(rows[-1][1] * step / rows[-1][0])
    return round(facts.tokens_per_step * step) if facts.tokens_per_step else None


# --- refusals and notes ---------------------------------------------------------------------------------


def _refused(column: Column, past: Rates | None) -> str:
    if column.ended_badly:
        return _("There is no forecast: the loss is no longer a number.")
    warm = past.warm_at if past is not None else 0.0
    points = [(step, loss) for step, loss in column.points if step >= max(warm, 1.0)]
    if len(points) < FEWEST:
        text = ngettext(
            "There is no forecast yet: the curve has {n} point behind the warm-up, and {least} are needed.",
            "There is no forecast yet: the curve has {n} points behind the warm-up, and {least} are needed.",
            len(points),
        )
        return text.format(n=len(points), least=FEWEST)
    begin, end = points[0][0], points[-1][0]
    if end - begin < LEAST_SEEN * end:
        text = _("There is no forecast: steps {begin:,} to {end:,} are too small a part of the run.")
        return text.format(begin=round(begin), end=round(end))
    noise, tail = noise_of(points), max(len(points) // 10, 1)
    if noise / math.sqrt(tail) > NOISY:
        text = _(
            "There is no forecast: the losses scatter by {noise} nats, more than a trend can be read from."
        )
        return text.format(noise=shown(noise, ".2f"))
    return _rising(column, points, noise, max(len(points) // 8, 2))


def _rising(column: Column, points: list[tuple[float, float]], noise: float, size: int) -> str:
    """Why there is none where the loss is well above its best and has not come down again."""
    means = [
        (points[at][0], math.fsum(loss for _, loss in points[at : at + size]) / size)
        for at in range(len(points) - size + 1)
    ]
    best_at, best = min(means, key=lambda mean: mean[1])
    rise = means[-1][1] - best
    if rise <= max(RISEN, RISEN_SIGMAS * noise / math.sqrt(size)) or means[-1][1] < means[-size][1] - noise:
        return ""
    text = _("There is no forecast: the training loss has risen by {rise} since step {step:,}.")
    if column.name == "val":
        text = _(
            "There is no forecast: the validation loss has risen by {rise} since step {step:,}, and no law "
            "of learning says where that ends."
        )
    return text.format(rise=shown(rise, ".2f"), step=round(best_at))


def _notes(
    facts: RunFacts, column: Column, course: Course | None, points: list[ForecastPoint],
    predictions: list[Prediction],
) -> Iterator[str]:  # fmt: skip
    if column.name == "train":
        yield _("The forecast is of the training loss: there are too few validation losses.")
    if course is None:
        yield _(
            "Nothing says the learning rate still to come: each case assumes one, and its range is wider."
        )
    elif not course.known:
        yield _("Nothing says the schedule: this is the trainer's default, and the range is wider.")
    if predictions and max(found.nearest for found in predictions) < STRANGE:
        yield _("No published run at hand is much like this one, so the range is wide.")
    tokens = points[0].tokens
    if tokens and facts.train_tokens and tokens > MANY_PASSES * facts.train_tokens:
        text = _("The data is read {n:.1f} times until then: repeated text brings less than forecast.")
        yield text.format(n=tokens / facts.train_tokens)
