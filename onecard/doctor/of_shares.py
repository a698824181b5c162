"""Percentages of an answer, judged: memory saved, certainty, MFU, time."""

from __future__ import annotations

import re

from onecard.doctor.advised import KNOBS, named
from onecard.doctor.diagnosis import OK, WRONG, Judged
from onecard.doctor.figures import Figure
from onecard.doctor.of_config import ConfigJudged, Run, run_of
from onecard.doctor.of_times import days
from onecard.doctor.subject import Subject, depth_in, laptop_of, of_depth, size_of
from onecard.language import _, number
from onecard.plan.amounts import count
from onecard.plan.answer import question_of
from onecard.report.eta.mfu import A100_FLOPS, minus_hundred

_MEMORY = re.compile(r"memor|speicher|vram|saves?|ahorr|spart|less|menos|weniger", re.IGNORECASE)
_SUCCESS = re.compile(r"success|\S{0,2}xito|erfolg|guarante|garant|works?\b|funciona", re.IGNORECASE)
_TIME = re.compile(
    r"\btime\b|tiempo|\bzeit|l\S{1,2}nger|longer|slower|m\S{1,2}s lento|langsamer", re.IGNORECASE
)
_FASTER = re.compile(
    r"faster|speed|schneller|m\S{1,2}s r\S{1,2}pido|velocidad|langsamer|slower", re.IGNORECASE
)
_NAME = re.compile(r"[A-Za-z_]{3,32}")
_POINTS = 0.06  # that a share may be off


def judge_share(figure: Figure, subject: Subject, config: ConfigJudged) -> Judged | None:
    line, low, high = figure.line, figure.low / 100, figure.high / 100
    if "MFU" in line or "mfu" in line:
        return _mfu(figure, subject)
    if _SUCCESS.search(line) and high >= 0.95 and config.runs:
        return _certain(figure, config)
    if laptop_of(subject.card, line) is not None and _TIME.search(line):
        return _laptop(figure, subject, low, high)
    if depth_in(line) is not None and _TIME.search(line):
        return _smaller(figure, subject, low, high)
    if config.was is None or not (_MEMORY.search(line) or _FASTER.search(line)):
        return None
    run = _run_on(line, config)
    if run is None:
        return None
    if _FASTER.search(line) and not _MEMORY.search(line):
        return _speed(figure, config.was, run, high)
    saved = 1 - run.allocated / config.was.allocated, 1 - run.reserved / config.was.reserved
    text = _("{a:.0f}% of what is allocated, {b:.0f}% of what is reserved").format(
        a=100 * saved[0], b=100 * saved[1]
    )
    if all(abs(share) < 0.005 for share in saved):
        text = _("0%: as much memory as before")
    right = any(low - _POINTS <= share <= high + _POINTS for share in saved) and max(saved) > 0.01
    return Judged(_context(figure), OK if right else WRONG, text, 0.8 if right else 3.5, key="memory")


def _context(figure: Figure) -> str:
    """The figure with the words behind it: 15% alone says little."""
    behind = figure.line[figure.at :].replace("*", "")
    found = re.match(r".{0,12}%(?: [^\s.,;:()|]{1,20}){0,3}", behind)
    return found[0].strip() if found else figure.words


def _run_on(line: str, config: ConfigJudged) -> Run | None:
    """The config with the one knob changed that the line is about."""
    first = config.runs[0] if config.runs else None
    was = config.was
    if was is None or first is None:
        return None
    target = was.theirs.target
    for word in _NAME.findall(line):
        name = named(word)
        if name in KNOBS and name not in ("dtype", "gradient_accumulation_steps"):
            return run_of(was.config, target, {name: getattr(first.config, name)})
    if re.search(r"float16|fp16|bfloat16|bf16", line):
        return run_of(was.config, target, {"dtype": "float16"})
    return None


def _speed(figure: Figure, was: Run, run: Run, high: float) -> Judged | None:
    if not run.tokens_per_s or not was.tokens_per_s:
        return None
    change = run.tokens_per_s / was.tokens_per_s - 1
    text = _("{percent:+.0f}% speed").format(percent=100 * change)
    right = abs(abs(change) - high) < _POINTS
    return Judged(_context(figure), OK if right else WRONG, text, 0.8 if right else 2.5, key="speed")


def _certain(figure: Figure, config: ConfigJudged) -> Judged:
    run = config.runs[0]
    text = run.verdict
    verdict = OK if run.fits_beside else WRONG
    return Judged(_context(figure), verdict, text, 4.0 if verdict == WRONG else 0.7, key="memory")


def _mfu(figure: Figure, subject: Subject) -> Judged | None:
    if figure.high >= 99:
        return Judged(f"MFU -{figure.words}", OK, minus_hundred(), 0.6, key="mfu")
    if not subject.peak or subject.card is None:
        return None
    most = subject.peak / A100_FLOPS
    low, high = (share / 100 * A100_FLOPS / 1e12 for share in (figure.low, figure.high))
    peak = subject.peak / 1e12
    if figure.low / 100 > most:
        text = _(
            "nanoGPT divides by an A100's 312 TFLOPS on every card: on the {card} it can show {most}% at most"
        ).format(card=subject.card.name, most=number(100 * most, ".1f"))
        return Judged(f"MFU {figure.words}", WRONG, text, 4.0, key="mfu")
    text = _(
        "of an A100's 312 TFLOPS, by which nanoGPT divides: {low} to {high} TFLOPS, {a:.0f} to {b:.0f}% "
        "of the "
        "{card}'s {peak}: it computes at full speed, and memory does not hold it back"
    )
    if high / peak < 0.5:
        text = _(
            "of an A100's 312 TFLOPS, by which nanoGPT divides: {low} to {high} TFLOPS, {a:.0f} to "
            "{b:.0f}% of "
            "the {card}'s {peak}"
        )
    text = text.format(
        low=number(low, ".0f"), high=number(high, ".0f"), a=100 * low / peak, b=100 * high / peak,
        card=subject.card.name, peak=number(peak, ".1f"),
    )  # fmt: skip
    return Judged(f"MFU {figure.words}", OK, text, 1.2, key="mfu")


def _laptop(figure: Figure, subject: Subject, low: float, high: float) -> Judged | None:
    """How much longer the laptop card of the name takes, by its rate at full power."""
    laptop = laptop_of(subject.card, figure.line)
    rate = laptop.peak_tflops("bfloat16") if laptop is not None else None
    if laptop is None or not rate or not subject.peak:
        return None
    more = subject.peak / (rate * 1e12) - 1
    text = _("{name}: {rate} TFLOPS at full power, {percent:+.0f}% time; less power, more").format(
        name=laptop.name, rate=number(rate, ".1f"), percent=100 * more
    )
    right = low - 0.15 <= more <= high + 0.15
    return Judged(_context(figure), OK if right else WRONG, text, 0.6 if right else 2.0, key="time")


def _smaller(figure: Figure, subject: Subject, low: float, high: float) -> Judged | None:
    """A smaller model's share of the time, on the same tokens."""
    depth = depth_in(figure.line)
    if depth is None or subject.shape is None or subject.target is None or subject.config is None:
        return None
    if depth == subject.config.depth or (config := of_depth(depth, None, subject.config.generation)) is None:
        return None
    shape = question_of(config, subject.target).shape
    share = shape.flops_per_token / subject.shape.flops_per_token
    text = _("d{depth} has {size} parameters and takes {share:.0f}% of the time on the same tokens").format(
        depth=depth, size=count(size_of(config)), share=100 * share
    )
    if floor := subject.floor(None, shape):
        text += "; " + _("at least {days} days").format(days=days(floor))
    right = low - _POINTS <= share <= high + _POINTS
    return Judged(_context(figure), OK if right else WRONG, text, 0.6 if right else 2.5, key="time")
