"""Times of an answer, judged: of a step, of a run, on one card or on many."""

from __future__ import annotations

import re

from onecard.doctor.diagnosis import OK, WRONG, Judged
from onecard.doctor.figures import Figure
from onecard.doctor.subject import Subject, cards_on, depth_in, laptop_of, of_depth
from onecard.hardware.cards import Card
from onecard.language import _, number
from onecard.plan.amounts import duration

DAY = 86400.0
_PER_STEP = re.compile(r"/\s?iter|\biter\w*|\bpasos?\b|\bstep|\bschritt", re.IGNORECASE)
_FIRST = re.compile(r"\bfirst\b|\bprimer|\berste|paso 0|step 0|schritt 0|warm|calent|aufw", re.IGNORECASE)
_MOST_USED = 0.65  # of the peak: more than any published run has reached on such cards


def days(seconds: float) -> str:
    value = seconds / DAY
    return number(value, ".0f" if value >= 10 else ".1f")


def judge_time(figure: Figure, subject: Subject, others: list[Figure]) -> Judged | None:
    many = cards_on(figure.line)
    if many is not None and figure.low >= 3600:
        return _on_many(figure, subject, *many)
    if _FIRST.search(figure.line) and figure.high < 300:
        return None  # a first step compiles: nobody can say how long
    before = figure.line[: figure.at + len(figure.words) + 24]
    if figure.high < 60 and (_PER_STEP.search(before) or figure.said == "ms" or "×" in figure.line):
        return _step(figure, subject)
    if figure.low >= 60:
        return _whole(figure, subject, others)
    return None


def _step(figure: Figure, subject: Subject) -> Judged | None:
    floor = subject.floor_of_step
    if not floor or not subject.peak:
        return None
    text = _("a step takes at least {floor}: {flops} TFLOP at {peak} TFLOPS").format(
        floor=f"{number(floor, '.1f')} s", flops=number(floor * subject.peak / 1e12, ",.0f"),
        peak=number(subject.peak / 1e12, ".1f"),
    )  # fmt: skip
    eta = subject.eta
    if eta is not None and eta.step_ms.mid > 0:
        low, high = (number(ms / 1000, ".1f") for ms in (eta.step_ms.low, eta.step_ms.high))
        text += "; " + _("expected are {low} to {high} s").format(low=low, high=high)
    verdict = WRONG if figure.high < floor else OK
    return Judged(figure.words, verdict, text, 6.0 if verdict == WRONG else 0.5, key="time")


def _on_many(figure: Figure, subject: Subject, cards: int, card: Card) -> Judged | None:
    """8×H100 in 33 hours: which share of their peak would that be?"""
    peak = card.peak_tflops("bfloat16")
    if not subject.tokens or not subject.flops_per_token or not peak:
        return None
    flops = subject.tokens * subject.flops_per_token
    share = flops / (cards * peak * 1e12 * figure.high)
    words = f"{figure.words} ({cards}×{card.name})"
    text = _("{flops} FLOPs: an MFU of {share:.0f}%").format(flops=f"{flops:.2e}", share=100 * share)
    if share > 1:
        return Judged(words, WRONG, text, 4.0, key="time")
    text += "; " + (_("plausible") if share < _MOST_USED else _("more than such runs reach"))
    return Judged(words, OK if share < _MOST_USED else WRONG, text, 0.6, key="time")


def _whole(figure: Figure, subject: Subject, others: list[Figure]) -> Judged | None:
    """A run on the one card: of the line's own model and tokens, where it names some."""
    tokens = next((o.low for o in others if o.unit == "tokens" and o.high >= 1e9), None)
    shape, name = _model_on(figure.line, subject)
    floor = subject.floor(tokens, shape)
    if not floor:
        return None
    used = laptop_of(subject.card, figure.line)
    peak = subject.peak or 0.0
    if used is not None and (rate := used.peak_tflops("bfloat16")):
        floor, peak = floor * peak / (rate * 1e12), rate * 1e12
    text = _("at least {floor} at the card's peak of {peak} TFLOPS").format(
        floor=_long(floor), peak=number(peak / 1e12, ".1f")
    )
    if name:
        text = f"{name}: {text}"
    if used is not None:
        text += f" ({used.name})"
    seconds = subject.seconds(tokens)
    if seconds and shape is None and used is None:
        text += "; " + _("about {time} by plan").format(time=_long(seconds))
    verdict = WRONG if figure.low < floor else OK
    if verdict == OK and seconds and shape is None and used is None and figure.low > 3 * seconds:
        verdict = WRONG
    return Judged(figure.words, verdict, text, 6.0 if verdict == WRONG else 0.5, key="time")


def _model_on(line: str, subject: Subject):  # type: ignore[no-untyped-def]
    """Another depth than the run's own: (its shape, its name)."""
    depth = depth_in(line)
    own = subject.config.depth if subject.config is not None else None
    if depth is None or own is None or depth == own or subject.target is None:
        return None, ""
    assert subject.config is not None
    config = of_depth(depth, None, subject.config.generation)
    if config is None:
        return None, ""
    from onecard.plan.answer import question_of

    return question_of(config, subject.target).shape, f"d{depth}"


def _long(seconds: float) -> str:
    return duration(seconds) if seconds < 3 * DAY else _("{n} days").format(n=days(seconds))
