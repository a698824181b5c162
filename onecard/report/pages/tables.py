"""The sections of a whole report, the same in a terminal, on a page and in markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onecard.language import _, joined, number
from onecard.plan.amounts import count, duration
from onecard.report.answer import Report, heaviest, loss_text, range_texts
from onecard.report.pages.plotting import curves_of, mean_line, round_steps, value_at
from onecard.report.pages.rows import step_text
from onecard.report.run_facts import RunFacts, Schedule

_ROWS = 10  # of the table of losses


@dataclass(frozen=True)
class Item:
    """Something to do or to mend: a sentence, what to paste, and more sentences."""

    text: str
    code: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    texts: tuple[str, ...] = ()
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    items: tuple[Item, ...] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.texts or self.rows or self.items)


def sections(report: Report) -> list[Section]:
    every = (
        _mistakes(report), _next_steps(report), _forecast(report), _place(report), losses(report),
        _facts(report), _notes(report),
    )  # fmt: skip
    return [section for section in every if section]


def _mistakes(report: Report) -> Section:
    items = tuple(
        Item(each.text, each.change, tuple(filter(None, (each.evidence, each.costs))))
        for each in heaviest(report.mistakes)
    )
    return Section("mistakes", _("What to fix"), items=items)


def _next_steps(report: Report) -> Section:
    items = tuple(
        Item(
            step_text(step),
            step.command,
            (_("Source: {source}").format(source=step.source),) if step.source else (),
        )
        for step in report.next_steps
    )
    return Section("next", _("What to do next"), items=items)


def _forecast(report: Report) -> Section:
    forecast = report.forecast
    if forecast is None:
        return Section("forecast", "")
    title = _("What is to be expected")
    if forecast.refused:
        return Section("forecast", title, (forecast.refused, *forecast.notes))
    rows = tuple(
        (
            _(point.case) if point.case else _("the end of this schedule"),
            number(point.step, ",d"),
            count(point.tokens) if point.tokens else "–",
            loss_text(point.loss, point.high),
            " – ".join(range_texts(point.low, point.high)),
        )
        for point in forecast.points
    )
    by_law = joined(f"{law} {loss_text(loss)}" for law, loss in forecast.by_law)
    texts = (_("Each range holds the loss four times in five."), *forecast.notes)
    if by_law:
        texts = (*texts, _("By single laws: {laws}.").format(laws=by_law))
    headings = (_("case"), _("step"), _("tokens"), _("loss"), _("range"))
    return Section("forecast", title, texts if rows else forecast.notes, headings, rows)


def _place(report: Report) -> Section:
    place = report.place
    if place is None:
        return Section("place", "")
    rows = tuple(
        (
            model,
            number(millions, ".3g") + "M" if millions < 1000 else number(millions / 1000, ".3g") + "B",
            count(1e9 * tokens) if tokens else "–",
            loss_text(loss),
            source,
        )
        for model, millions, tokens, loss, source in place.rows
    )
    headings = (_("model"), _("size"), _("tokens"), _("loss"), _("source"))
    texts = tuple(filter(None, (place.cannot, place.text, *place.bridges)))
    return Section("place", _("Where it stands"), texts, headings if rows else (), rows)


def losses(report: Report) -> Section:
    """The figure as a table: losses at round steps."""
    curves = curves_of(report.facts)
    if not curves.train and not curves.val:
        return Section("losses", "")
    scale = curves.steps()
    within = max(0.5, 0.02 * (scale.high - scale.low))
    # As the evaluations have it, of the same steps; else the mean of many single steps, but of the first one.
    evaluated = report.facts.log.evaluations.pairs("train")
    steps_alone = [*curves.train[:1], *mean_line(curves.train, 400)]
    smooth: Sequence[tuple[float, float]] = evaluated if len(evaluated) > 1 else steps_alone
    if len(evaluated) < len(curves.train) <= _ROWS:
        smooth = list(curves.train)
    few = len(curves.main) <= _ROWS
    either = sorted({step for pairs in (curves.main, smooth) for step, _loss in pairs})
    if few and len(either) <= _ROWS:
        steps = either
    else:
        steps = [step for step, _loss in curves.main] if few else round_steps(scale, _ROWS - 2)
    rows = []
    for step in steps:
        pair = [value_at(pairs, step, within) for pairs in (smooth, curves.val)]
        if any(value is not None for value in pair):
            rows.append((number(round(step), ",d"), *(_tokens(report.facts, step)), *map(_cell, pair)))
    headings = (
        _("step"),
        *((_("tokens"),) if report.facts.tokens_per_step else ()),
        _("training"),
        _("validation"),
    )
    return Section("losses", _("Losses"), (), headings, tuple(rows))


def _tokens(facts: RunFacts, step: float) -> tuple[str, ...]:
    return (count(step * facts.tokens_per_step),) if facts.tokens_per_step else ()


def _cell(value: float | None) -> str:
    return "–" if value is None else loss_text(value) if math.isfinite(value) else "NaN"


def _facts(report: Report) -> Section:
    origin = report.facts.origin
    rows = tuple((name, value, origin_text(origin.get(key, ""))) for key, name, value in facts_shown(report))
    headings = (_("fact"), _("value"), _("from"))
    return Section("facts", _("What is known of the run"), (), headings, rows)


def origin_text(origin: str) -> str:
    names = {
        "log": _("the log"), "command": _("its command line"), "prose": _("the text"),
        "config": _("the config"), "folder": _("the run's folder"), "data": _("the data"),
        "flag": _("your flag"), "usual": _("this machine"), "trainer": _("the trainer's default"),
    }  # fmt: skip
    return names.get(origin, origin)


def facts_shown(report: Report) -> Iterator[tuple[str, str, str]]:
    """(field of RunFacts, its name, its value) of all that is known."""
    facts = report.facts
    shape = facts.shape
    whole = {
        "tokens_per_step": _("tokens a step"), "batch_size": "batch_size", "block_size": "block_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps", "vocab_size": _("vocabulary"),
        "train_tokens": _("tokens of training data"), "eval_tokens": _("tokens of an evaluation"),
        "last_step": _("last step"),
    }  # fmt: skip
    words = {
        "tokenizer": _("tokenizer"), "data": _("data"), "optimizer": _("optimizer"), "dtype": "dtype",
        "dropout": "dropout", "weight_decay": "weight_decay",
    }  # fmt: skip
    if facts.parameters:
        yield "parameters", _("parameters"), number(facts.parameters, ",d")
    if shape is not None:
        yield "shape", _("shape"), f"n_layer {shape.n_layer}, n_embd {shape.n_embd}"
    for key, name in whole.items():
        if (value := getattr(facts, key)) is not None:
            yield key, name, number(value, ",d")
    for key, name in words.items():
        if (value := getattr(facts, key)) is not None:
            yield key, name, str(value) if isinstance(value, str) else number(value, "g")
    if facts.schedule is not None:
        yield "schedule", _("learning rate"), schedule_text(facts.schedule)
    if facts.card is not None:
        yield "card", _("card"), f"{facts.cards} × {facts.card.name}" if facts.cards > 1 else facts.card.name
    if (seconds := report.course.seconds.whole) is not None:
        yield "time", _("time of the whole run"), duration(seconds)


def schedule_text(schedule: Schedule) -> str:
    parts = [schedule.kind] if schedule.kind != "unknown" else []
    if schedule.peak is not None:
        parts.append(_("peak {rate:g}").format(rate=schedule.peak))
    if schedule.warmup_steps:
        parts.append(_("{n:,} steps of warm-up").format(n=schedule.warmup_steps))
    if schedule.horizon is not None and schedule.final is not None:
        parts.append(_("{rate:g} at step {n:,}").format(rate=schedule.final, n=schedule.horizon))
    if schedule.assumed:
        parts.append(_("as far as nobody says it the trainer's default"))
    return joined(parts)


def _notes(report: Report) -> Section:
    facts, pace = report.facts, report.course.pace
    texts = [*facts.notes, *facts.log.remarks, *report.remarks]
    if pace.log_mfu is not None and pace.mfu_explanation:
        text = _("The log's MFU ({share:.1%}): {why}")
        texts.insert(0, text.format(share=pace.log_mfu, why=pace.mfu_explanation))
    return Section("notes", _("Notes"), tuple(dict.fromkeys(texts)))
