"""Advice as input: every line of config and every figure of a pasted answer that can be computed is.

What is not computed is left alone, and how many such figures there are is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from onecard.doctor.asked import Asked
from onecard.doctor.cures import DESKTOP, Cure, cure_here, nanogpt_cures
from onecard.doctor.diagnosis import OK, UNKNOWN, WRONG, Diagnosis, Evidence, Judged
from onecard.doctor.figures import Figure, figures_in
from onecard.doctor.of_config import ConfigJudged, judge_config
from onecard.doctor.of_figures import judge, judge_lines
from onecard.doctor.subject import Subject, subject_of
from onecard.errors import UserError
from onecard.language import _, ngettext, number
from onecard.plan.answer import question_of
from onecard.plan.machine import Target
from onecard.report.place.comparisons import claims_in, corrected

_SLOWER = re.compile(r"bfloat16(?:.{0,60}?)(?:slower|m\S{1,2}s lento|langsamer)", re.IGNORECASE)
_BACKWARD = re.compile(r"(?:first|primer|erste\w*)\s.{0,10}backward", re.IGNORECASE)
# Of figures that no advice stands or falls with nothing is said.
_COUNTED = ("memory", "%", "time", "tokens/s", "tflops", "kwh", "money")


def judged_advice(found: Asked, target: Target | None) -> Diagnosis | None:
    """None where there is nothing in it that can be computed."""
    figures = figures_in(found.prose)
    subject = subject_of(found, target, figures)
    short = found.message is not None
    config = judge_config(found.advised, found.config, subject.target, for_memory=short)
    claims, left = _figures(figures, subject, config)
    claims += _phrases(subject, config)
    claims = [*config.lines, *claims]
    judged = [claim for claim in claims if claim.verdict != UNKNOWN]
    what = _what(claims, config)
    claims = _once(claims)
    if not config.stages and not judged:
        return None
    left += [claim.words for claim in claims if claim.verdict == UNKNOWN]
    cures = _cures(subject, config)
    return Diagnosis(
        "advice",
        what,
        tuple(_evidence(subject, config)),
        tuple(cures),
        unknown=tuple(_left_alone(left)),
        next=_next(subject),
        paste=_("the first ten lines of the log"),
        claims=tuple(sorted(claims, key=_order)),
        stages=config.stages,
    )


def _order(claim: Judged) -> tuple[int, float]:
    return (WRONG, UNKNOWN, OK).index(claim.verdict), -claim.weight


def _once(claims: Iterable[Judged]) -> list[Judged]:
    """Claims with the same answer are one, with the words of each."""
    seen: dict[tuple[str, str], list[Judged]] = {}
    for claim in claims:
        seen.setdefault((claim.verdict, claim.reason), []).append(claim)
    found = []
    for same in seen.values():
        words = {claim.words.strip("~\u2248 <").lower(): claim.words for claim in reversed(same)}
        first = max(same, key=lambda claim: claim.weight)
        found.append(replace(first, words=", ".join(reversed(words.values()))))
    return found


def _figures(figures: list[Figure], subject: Subject, config: ConfigJudged) -> tuple[list[Judged], list[str]]:
    by_line: dict[int, list[Figure]] = {}
    for figure in figures:
        by_line.setdefault(figure.number, []).append(figure)
    claims: list[Judged] = []
    left: list[str] = []
    for figure in figures:
        others = by_line[figure.number]
        try:
            judged = judge(figure, subject, config, others)
        except (UserError, ArithmeticError):
            judged = None
        if judged is not None:
            claims.append(judged)
        elif figure.unit in _COUNTED and not any(figure.words in claim.words for claim in claims):
            left.append(figure.words)
    words = " ".join(claim.words for claim in claims)
    return claims, [figure for figure in dict.fromkeys(left) if figure not in words]


def _phrases(subject: Subject, config: ConfigJudged) -> list[Judged]:
    """What is claimed without a figure, and what others are said to reach."""
    found = judge_lines(subject, config)
    for finding in corrected(claims_in(subject.text)):
        verdict = OK if finding.good else WRONG
        found.append(Judged(finding.key.removeprefix("claim-"), verdict, finding.text, 2.0, key="loss"))
    card = subject.card
    if card is not None and (said := _SLOWER.search(subject.text)) and card.bf16:
        both = (card.bf16, card.peak_tflops("float16"))
        text = _("{a} TFLOPS in bfloat16 and {b} in float16, both with fp32 sums").format(
            a=number(both[0] or 0, ".1f"), b=number(both[1] or both[0] or 0, ".1f")
        )
        verdict = WRONG if (both[1] or 0) <= 1.05 * (both[0] or 0) else OK
        words = " ".join(said[0].split())
        found.append(Judged(words[:70], verdict, text, 2.0, key="speed"))
    if (said := _BACKWARD.search(subject.text)) and config.was is not None:
        moment = _moment(config)
        if moment:
            verdict = OK if "backward" in moment else WRONG
            text = _("by the bill it runs out there: {moment}").format(moment=_(moment))
            found.append(Judged(said[0], verdict, text, 0.9, key="moment"))
    return found


def _moment(config: ConfigJudged) -> str:
    """Where the config as it was runs out: alone, or where a desktop takes its part."""
    from onecard.plan.bill import CONTEXT

    was = config.was
    assert was is not None
    bill = was.theirs.bill(was.config.batch_size, compiled=was.config.compile)
    for reserve in (0, DESKTOP):
        confined = bill.within(was.there - reserve - CONTEXT)
        if confined.ran_out is not None:
            return confined.ran_out.moment
    return ""


# --- what is said of it -----------------------------------------------------------------------------


def _what(claims: list[Judged], config: ConfigJudged) -> str:
    every = [*config.stages, *claims]
    wrong = sum(claim.verdict == WRONG for claim in every)
    right = sum(claim.verdict == OK for claim in every)
    text = ngettext(
        "Of this answer {n} line or figure was computed",
        "Of this answer {n} lines and figures were computed",
        wrong + right,
    ).format(n=wrong + right)
    return text + ": " + _("{wrong} wrong, {right} right.").format(wrong=wrong, right=right)


def _evidence(subject: Subject, config: ConfigJudged) -> list[Evidence]:
    found: list[Evidence] = []
    if config.was is not None:
        was = config.was
        split = f"{was.config.batch_size}×{was.config.gradient_accumulation_steps}"
        compiled = _("compiled") if was.config.compile else _("not compiled")
        text = _("as it was ({split}, {compiled}): {figures}: {verdict}").format(
            split=split, compiled=compiled, figures=was.text, verdict=was.verdict
        )
        found.append(Evidence(text, key="bill"))
    if config.lines:
        found.append(Evidence(" · ".join(line.short for line in config.lines if line.short)))
    if config.back:
        found.append(Evidence(config.back))
    if subject.tokens and subject.flops_per_token and subject.peak and subject.card is not None:
        flops = subject.tokens * subject.flops_per_token
        text = _("{flops} FLOPs for {tokens} tokens: {days} days at the {card}'s peak of {peak} TFLOPS")
        text = text.format(
            flops=f"{flops:.2e}",
            tokens=f"{subject.tokens / 1e9:g}B",
            days=f"{flops / subject.peak / 86400:.0f}",
            card=subject.card.name,
            peak=number(subject.peak / 1e12, ".1f"),
        )
        found.append(Evidence(text))
    elif subject.eta is not None and subject.floor():
        from onecard.plan.amounts import duration

        least, seconds = subject.floor() or 0.0, subject.seconds() or 0.0
        text = _("{steps} steps take at least {least}, and about {time} by plan").format(
            steps=number(subject.steps or 0, ",d"), least=duration(least), time=duration(seconds)
        )
        found.append(Evidence(text))
    return found


def _left_alone(left: list[str]) -> list[str]:
    left = list(dict.fromkeys(left))
    if not left:
        return []
    text = ngettext(
        "{n} figure is left alone: it cannot be computed from what is said ({words})",
        "{n} figures are left alone: they cannot be computed from what is said ({words})",
        len(left),
    )
    words = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
    return [text.format(n=len(left), words=words)]


def _cures(subject: Subject, config: ConfigJudged) -> list[Cure]:
    """What fits in truth: in nanoGPT beside a desktop, where the config as it was does not; and here."""
    cures: list[Cure] = []
    if config.was is not None and not config.was.fits_beside:
        cures += nanogpt_cures(config.was.theirs, compiled=config.was.config.compile, reserve=DESKTOP)[:2]
    asks_memory = config.was is not None or (subject.config is not None and subject.config.depth is not None)
    if subject.config is not None and subject.target is not None and asks_memory:
        try:
            here = cure_here(question_of(subject.config, subject.target), _command(subject))
        except UserError:
            here = None
        cures += [here] if here is not None else []
    return cures


def _command(subject: Subject) -> str:
    config = subject.config
    if config is not None and config.depth is not None:
        return f"onecard train --depth={config.depth} --generation={config.generation}"
    return "onecard train"


def _next(subject: Subject) -> str:
    gpu = f" --gpu '{subject.card.name}'" if subject.card is not None else ""
    config = subject.config
    if config is not None and config.depth is not None:
        return f"onecard plan --depth={config.depth} --generation={config.generation}{gpu}"
    if subject.eta is not None:
        return ("onecard report LOG" if subject.eta.log.evaluations else "onecard eta LOG") + gpu
    return f"onecard plan CONFIG.py --as nanogpt{gpu}"
