"""The figures of a report, each under a name: the same in a terminal, on a page and in markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onecard.language import _, joined, number
from onecard.plan.amounts import FEW_KWH, count, duration
from onecard.plan.show import span
from onecard.report.answer import Report, perplexity, range_texts
from onecard.report.course import Amount
from onecard.report.findings import ForecastPoint, NextStep
from onecard.report.gathering.gather import is_of_cpu

_MOST_SHOWN = 160  # characters of a sample, in a line
PROGRAMS = {
    "nanogpt": "nanoGPT", "nanochat": "nanochat", "nanochat-2025": "nanochat (2025)", "onecard": "onecard",
    "huggingface": "Hugging Face Trainer", "llm.c": "llm.c", "modded-nanogpt": "modded-nanogpt",
    "litgpt": "LitGPT",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """`brief` is what the first screen has room for; empty: the row waits for the whole report."""

    key: str
    name: str
    text: str
    brief: str = ""


def run_line(report: Report) -> str:
    """Which run it is, in one line."""
    return joined(run_parts(report), " · ")


def run_parts(report: Report) -> list[str]:
    facts, parts = report.facts, []
    if report.name:
        parts.append(report.name)
    if facts.log.format in PROGRAMS:
        parts.append(_("{program} log").format(program=PROGRAMS[facts.log.format]))
    if facts.parameters:
        parts.append(_("{n} parameters").format(n=count(facts.parameters)))
    step = _("step {n:,}").format(n=facts.step)
    if facts.last_step is not None and facts.last_step >= facts.step:
        step = _("step {n:,} of {total:,}").format(n=facts.step, total=facts.last_step)
    parts.append(step)
    if facts.tokens:
        parts.append(_("{tokens} tokens").format(tokens=count(facts.tokens)))
    if facts.data:
        parts.append(facts.data)
    if facts.card is not None:
        cards = f"{facts.cards} × {facts.card.name}" if facts.cards > 1 else facts.card.name
        parts.append(cards)
    return parts


def unsaid(report: Report) -> str:
    """What would make the answer better, and the flags that say it."""
    facts, lacks = report.facts, []
    if facts.card is None and facts.log.format != "onecard" and not is_of_cpu(facts.log):
        lacks.append(_("the card (--gpu)"))
    if facts.config is None and (facts.parameters is None or facts.tokens_per_step is None):
        lacks.append(_("model and batch (--config)"))
    if facts.last_step is None:
        lacks.append(_("the last step (--max-iters)"))
    return _("Not known: {facts}").format(facts=joined(lacks)) if lacks else ""


def rows_of(report: Report) -> list[Row]:
    found = [
        *_loss(report),
        *_place(report),
        *_forecast(report),
        *_speed(report),
        *_time(report),
        *_sample(report),
    ]
    return [row for row in found if row.text]


def _loss(report: Report) -> Iterator[Row]:
    loss = report.loss
    if loss is None:
        return
    text = f"{loss.name} {loss.text}"
    if (surprise := perplexity(loss)) is not None:
        meaning = _("perplexity {n}: as unsure of the next token as among {n} equally likely ones")
        text += ", " + meaning.format(n=number(surprise, ",.0f" if surprise >= 10 else ".1f"))
    yield Row("loss", _("loss"), text, text.partition(":")[0])


def _place(report: Report) -> Iterator[Row]:
    place = report.place
    if place is not None:
        # At its end the verdict says it.
        brief = place.text.partition(". ")[0] if report.end is not None else ""
        yield Row("place", _("place"), place.cannot or place.text, place.cannot or brief)


def _forecast(report: Report) -> Iterator[Row]:
    forecast = report.forecast
    if forecast is None:
        return
    if forecast.refused:
        yield Row("forecast", _("forecast"), forecast.refused, forecast.refused)
        return
    cases: dict[str, list[ForecastPoint]] = {}
    for point in forecast.points:
        if point.step > report.facts.step:
            cases.setdefault(point.case, []).append(point)
    texts = [case_text(case, points) for case, points in cases.items()]
    # The end of the schedule stands in the verdict; of longer runs the furthest say most.
    brief = next((case_text(case, points[-2:]) for case, points in cases.items() if case), "")
    yield Row("forecast", _("forecast"), joined(texts, "; "), brief)


def case_text(case: str, points: Sequence[ForecastPoint]) -> str:
    """What is expected under one schedule, at one step or more."""
    ranges = []
    for point in points:
        low, high = range_texts(point.low, point.high)
        ranges.append(_("{low} to {high} at step {step:,}").format(low=low, high=high, step=point.step))
    name = _(case) if case else _("the end of this schedule")
    return _("{case}: {ranges}").format(case=name, ranges=joined(ranges))


def _speed(report: Report) -> Iterator[Row]:
    pace, facts = report.course.pace, report.facts
    parts = []
    if pace.tokens_per_s is not None:
        parts.append(_("{n:,} tokens/s").format(n=four_digits(pace.tokens_per_s)))
    if pace.step_s is not None:
        parts.append(_("{time} a step").format(time=_seconds(pace.step_s)))
    if pace.mfu is not None:
        text = _("true MFU {share:.0%}")
        if facts.card is not None and pace.peak_flops:
            text = _("true MFU {share:.0%} of the {card}'s {peak:.1f} TFLOPS")
        peak = pace.peak_flops / 1e12 if pace.peak_flops else 0.0
        parts.append(text.format(share=pace.mfu, card=facts.card.name if facts.card else "", peak=peak))
    brief = parts[:1] if pace.mfu is None else [*parts[:1], _("true MFU {share:.0%}").format(share=pace.mfu)]
    text, short = joined(parts), joined(brief or parts)
    if pace.predicted:
        remark = _("predicted: the log has no times")
        text, short = f"{text} ({remark})", f"{short} ({remark})"
    yield Row("speed", _("speed"), text, short)


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return _("{n:.0f} ms").format(n=1000 * seconds)
    return _("{n:.2f} s").format(n=seconds)


def four_digits(value: float) -> int:
    """Four digits are more than a log is worth."""
    digits = max(0, len(str(int(value))) - 4)
    return round(value / 10**digits) * 10**digits


def _time(report: Report) -> Iterator[Row]:
    course = report.course
    if course.seconds.so_far is None:
        return
    texts = [amount_text(course.seconds, duration)]
    if course.pc_kwh.so_far is not None:
        texts.append(amount_text(course.pc_kwh, kwh))
        texts.append(_money(report))
    yield Row(
        "time",
        _("time, cost"),
        joined(texts, "; "),
        joined(texts if not course.seconds.left else [texts[0], *texts[2:]], "; "),
    )


def amount_text(amount: Amount, form: object) -> str:
    """So far, and to the end where that is to come and known."""
    assert callable(form) and amount.so_far is not None
    if amount.left:
        text = _("{so_far} so far and {left} to the end")
        return text.format(so_far=form(amount.so_far), left=form(amount.left))
    return form(amount.so_far)


def kwh(value: float) -> str:
    if value < FEW_KWH:
        return _("{n:.1f} Wh").format(n=1000 * value)
    return _("{n:,.1f} kWh").format(n=value)


def _money(report: Report) -> str:
    course = report.course
    low = course.cost.whole if course.cost.whole is not None else course.cost.so_far
    high = course.cost_high.whole if course.cost_high.whole is not None else course.cost_high.so_far
    assert low is not None and high is not None
    amount = f"{span(low, high, ',.2f')} {course.currency}"
    return _("{amount} in all").format(amount=amount) if course.seconds.left else amount


def _sample(report: Report) -> Iterator[Row]:
    if report.sample is not None:
        words = " ".join(report.sample.text.split())
        shown = words[:_MOST_SHOWN].rsplit(" ", 1)[0] + " …" if len(words) > _MOST_SHOWN else words
        yield Row("sample", _("it writes"), f"“{shown}”")


def step_lines(report: Report, *, brief: bool = False) -> Iterator[tuple[str, str]]:
    """Each next step with its gain, and its command: the first of each trainer, then the others."""
    first = {step.trainer: step for step in reversed(report.next_steps)}
    begin = [step for step in report.next_steps if step in first.values()]
    rest = [step for step in report.next_steps if step not in begin]
    for step in (*begin, *rest):
        yield step_text(step, brief=brief), step.command


def step_text(step: NextStep, *, brief: bool = False) -> str:
    """`brief`: what comes after a colon or a full stop explains it, and its hours say what it takes."""
    amounts = []
    if step.gain is not None:
        low, high = sorted(step.gain)
        amounts.append(_("{low:.2f} to {high:.2f} nats lower").format(low=low, high=high))
    if step.hours is not None:
        amounts.append(duration(3600 * step.hours))
    if step.kwh is not None and not brief:
        amounts.append(kwh(step.kwh))
    text = re.split(r"[:.;] ", step.text)[0] if brief else step.text
    return f"{text.rstrip('.')} ({joined(amounts)})" if amounts else text
