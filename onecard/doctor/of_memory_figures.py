"""Gigabytes of an answer, judged: a tensor's product, before and after, an upper bound, a need, a card's
own size."""

from __future__ import annotations

import math
import re

from onecard.doctor.diagnosis import OK, WRONG, Judged
from onecard.doctor.figures import Figure
from onecard.doctor.of_config import ConfigJudged
from onecard.doctor.subject import Subject, laptop_of
from onecard.hardware.cards import Card, match_rates
from onecard.language import _, number
from onecard.plan.lines import GIB

_PRODUCT = re.compile(
    r"(\d{1,7})(?:\s?[x\u00d7*]\s?(\d{1,7}))(?:\s?[x\u00d7*]\s?(\d{1,7}))(?:\s?[x\u00d7*]\s?([248])\b)?"
)
_BELOW = re.compile(
    r"(?:below|under|less than|at most|por debajo de|menos de|inferior a|unter|weniger als"
    r"|h\S{1,2}chstens|<)\s?[~\u2248]?$",
    re.IGNORECASE,
)
_NEEDS = re.compile(r"\b(?:needs?|requires?|necesita\w*|requiere|braucht|ben\S{1,2}tigt)\b", re.IGNORECASE)
_NEAR = 0.06


def judge_memory(
    figure: Figure, subject: Subject, config: ConfigJudged, others: list[Figure]
) -> Judged | None:
    if product := _PRODUCT.search(figure.line[: figure.at]):
        return _tensor(figure, product)
    before = figure.line[: figure.at]
    sizes = [other for other in others if other.unit == "memory"]
    if len(sizes) == 2 and _from_to(sizes) and config.was is not None and config.runs:
        return _change(sizes, config) if figure is sizes[1] else None
    if _BELOW.search(before.rstrip(" ~\u2248<") + " ") or before.rstrip().endswith("<") or _below(before):
        return _bound(figure, config)
    if _NEEDS.search(before) and subject.choice is not None:
        return _need(figure, subject)
    return _of_card(figure, subject)


def _below(before: str) -> bool:
    return _BELOW.search(before.rstrip()) is not None


def _tensor(figure: Figure, product: re.Match[str]) -> Judged:
    sides = [int(side) for side in product.groups()[:3]]
    item = int(product[4]) if product[4] else 2
    size = math.prod(sides) * item
    shape = "×".join(map(str, sides))
    text = _(
        "{shape} × {item} bytes are {bytes} bytes: {gb} GB, {gib} GiB, and one of several copies (in fp32 "
        "alone "
        "{fp32} GiB)"
    ).format(
        shape=shape, item=item, bytes=number(size, ",d"), gb=number(size / 1e9, ".3f"),
        gib=number(size / GIB, ".3f"), fp32=number(4 * math.prod(sides) / GIB, ".2f"),
    )  # fmt: skip
    near = [abs(figure.high / size - 1) < 0.01, abs(figure.high / 1e9 * GIB / size - 1) < 0.01]
    if near[1] and not near[0]:
        text = _("that is its GiB: {text}").format(text=text)
    verdict = OK if near[0] else WRONG
    return Judged(figure.words, verdict, text, 2.2, key="tensor")


def _from_to(sizes: list[Figure]) -> bool:
    between = sizes[0].line[sizes[0].at + len(sizes[0].words) : sizes[1].at]
    return re.search(r"->|\u2192|\bto\b|\ba\b|\bauf\b|\bhasta\b", between) is not None and len(between) < 30


def _change(sizes: list[Figure], config: ConfigJudged) -> Judged:
    was, run = config.was, config.runs[0]
    assert was is not None
    text = _("{a} → {b} GiB allocated, {c} → {d} with all that PyTorch reserves and CUDA itself").format(
        a=number(was.allocated / GIB, ".2f"), b=number(run.allocated / GIB, ".2f"),
        c=number(was.need / GIB, ".2f"), d=number(run.need / GIB, ".2f"),
    )  # fmt: skip
    words = f"{sizes[0].words} → {sizes[1].words}"
    said = sizes[1].high - sizes[0].high
    real = run.need - was.need
    right = said * real > 0 and abs(said - real) < 0.25 * abs(real) + 0.2 * GIB
    return Judged(words, OK if right else WRONG, text, 4.0, key="memory")


def _bound(figure: Figure, config: ConfigJudged) -> Judged | None:
    if not config.runs:
        return None
    run = config.runs[0]
    verdict = OK if run.need <= figure.high * (1 + _NEAR) else WRONG
    text = _("it needs {need} GiB, CUDA's own included").format(need=number(run.need / GIB, ".2f"))
    return Judged(f"< {figure.words}", verdict, text, 3.5 if verdict == WRONG else 0.7, key="memory")


def _need(figure: Figure, subject: Subject) -> Judged | None:
    choice = subject.choice
    assert choice is not None
    need = choice.bill.process
    text = _("here it needs {gib} GiB ({quality}), of {there} there are").format(
        gib=number(need / GIB, ".2f"), there=number(choice.question.allowed / GIB, ".2f"),
        quality=_("exact") if choice.setting.exact else _("low-bit"),
    )  # fmt: skip
    verdict = WRONG if figure.low > need * (1 + _NEAR) else OK
    return Judged(figure.words, verdict, text, 3.0 if verdict == WRONG else 0.5, key="memory")


def _of_card(figure: Figure, subject: Subject) -> Judged | None:
    """The memory of a card that the line names, as the box has it."""
    said = figure.high / 1e9 if figure.said.upper() == "GB" else figure.high / GIB
    named: list[Card] = [card for card in (laptop_of(subject.card, figure.line),) if card is not None]
    if not named:
        for words in re.findall(
            r"\b(?:RTX |GTX )?(?:\d{4}(?: ?Ti)?(?: ?Super)?|[AHLBT]\d{2,3})\b", figure.line
        ):
            if (card := match_rates(words)) is not None:
                named.append(card)
    if subject.card is not None and re.search(r"VRAM|tarjeta|Karte|card", figure.line):
        named.append(subject.card)
    if any(abs(card.memory_gb / said - 1) < 0.02 for card in named):
        text = _("the card has {n:g} GB").format(n=said)
        return Judged(figure.words, OK, text, 0.1, key="card")
    return None
