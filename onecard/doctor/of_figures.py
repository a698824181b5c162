"""Figures of an answer, judged: memory, shares, times, speeds, energy, money, sizes.

Each judge takes a figure with the line it stands in, and returns what is so, or None where the line does
not say what the figure is of: such a figure is left alone.
"""

from __future__ import annotations

import dataclasses
import re

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY
from onecard.config.run import RunConfig
from onecard.doctor.diagnosis import OK, UNKNOWN, WRONG, Judged
from onecard.doctor.figures import MOST_LINES, Figure
from onecard.doctor.of_config import ConfigJudged
from onecard.doctor.of_memory_figures import judge_memory
from onecard.doctor.of_shares import judge_share
from onecard.doctor.of_times import days, judge_time
from onecard.doctor.subject import Subject, depth_in, of_depth, size_of
from onecard.language import _, number
from onecard.plan.amounts import count
from onecard.plan.lines import GIB

_NEAR = 0.06  # a size said so near is right
_BITS = re.compile(
    r"\b[2-8](?:[.,]\d)?(?:[-\u2013][2-8](?:[.,]\d)?)?[- ]?bits?\b|NF4|QLoRA|GPTQ|\bint4\b", re.IGNORECASE
)
_IMPOSSIBLE = re.compile(r"\bimpos+ible\b|unm\S{1,2}glich|does not fit|no cabe|passt nicht", re.IGNORECASE)
_FITS = re.compile(
    r"\bfits?\b|\bcabr\S{1,2}a|\bcabe\b|\bpasst\b|\bpassen\b|\bw\S{1,2}rde.{0,20}passen", re.IGNORECASE
)
_INSTEAD = re.compile(
    r"(?:instead of|en lugar de|en vez de|anstatt|statt|rather than)\s\D{0,12}$", re.IGNORECASE
)
_BATCHES = re.compile(r"batch(?:[_ -]?size)?\W{0,4}(\d{1,3})(?:\s?[-\u2013]\s?(\d{1,3}))?", re.IGNORECASE)
_WIDTH = re.compile(
    r"n_embd\W{0,4}(\d{2,5})|embedding\w{0,4}\W{0,4}(?:de |of |von )?(\d{3,5})|Embedding\w{0,10} (?:de"
    r"|von|of) (\d{3,5})"
)


def judge(figure: Figure, subject: Subject, config: ConfigJudged, others: list[Figure]) -> Judged | None:
    """`others`: all figures of the same line."""
    if figure.unit == "memory":
        return judge_memory(figure, subject, config, others)
    if figure.unit == "%":
        return judge_share(figure, subject, config)
    if figure.unit == "time":
        return judge_time(figure, subject, others)
    if figure.unit == "tokens/s":
        return _speed(figure, subject)
    if figure.unit == "tflops":
        return _tflops(figure, subject, others)
    if figure.unit in ("parameters", "M"):
        return _size(figure, subject)
    if figure.unit == "tokens":
        return _tokens(figure, others)
    if figure.unit in ("kwh", "money"):
        return _energy(figure, subject, others)
    return None


def _speed(figure: Figure, subject: Subject) -> Judged | None:
    if not subject.peak or not subject.flops_per_token:
        return None
    most = subject.peak / subject.flops_per_token
    text = _("at most {most} tokens/s: {flops} MFLOP a token at {peak} TFLOPS").format(
        most=number(most, ",.0f"), flops=number(subject.flops_per_token / 1e6, ",.0f"),
        peak=number(subject.peak / 1e12, ".1f"),
    )  # fmt: skip
    if figure.low > most:
        return Judged(figure.words, WRONG, text, 6.0, key="speed")
    return Judged(figure.words, OK, _("possible: {text}").format(text=text), 0.5, key="speed")


def _tflops(figure: Figure, subject: Subject, others: list[Figure]) -> Judged | None:
    """Against the card's peak, and against the time that stands beside it."""
    if not subject.peak:
        return None
    peak = subject.peak / 1e12
    if figure.low > peak:
        text = _("the card does {peak} TFLOPS at best").format(peak=number(peak, ".1f"))
        return Judged(figure.words, WRONG, text, 4.0, key="speed")
    time = next((o for o in others if o.unit == "time"), None)
    if time is None or not subject.tokens or not subject.flops_per_token:
        text = _("{share:.0f}% of the card's {peak} TFLOPS").format(
            share=100 * figure.high / peak, peak=number(peak, ".1f")
        )
        return Judged(figure.words, OK, text, 0.3, key="speed")
    flops = subject.tokens * subject.flops_per_token
    long, short = (flops / (rate * 1e12) for rate in (figure.low, figure.high))
    words = f"{figure.words} – {time.words}"
    text = _("{flops} FLOPs at this speed take {short} to {long} days").format(
        flops=f"{flops:.2e}", short=days(short), long=days(long)
    )
    if time.high < 0.8 * short or time.low > 1.25 * long:
        return Judged(words, WRONG, text, 5.0, key="time")
    return Judged(words, OK, text, 0.5, key="time")


def _size(figure: Figure, subject: Subject) -> Judged | None:
    """Of the model that the line names; else of the run's own, where that is about what is said."""
    depth = depth_in(figure.line) if "nanochat" in subject.text[:200_000].lower() else None
    config, width = subject.config, None
    if depth is not None:
        known = config.generation if config is not None and config.depth is not None else None
        named = of_depth(depth, figure.high, known)
        if named is None:
            return None
        size, name = size_of(named), f"d{depth}"
    elif config is not None and config.arch == "gpt2":
        width = _width_before(figure, subject)
        size, name = _of_width(config, width or config.n_embd), f"n_embd = {width or config.n_embd}"
    else:
        return None
    text = _("{name} has {size} parameters").format(name=name, size=count(size))
    right = figure.low * (1 - _NEAR) <= size <= figure.high * (1 + _NEAR)
    if not right and depth is None and width is None:
        return None  # of another model
    return Judged(figure.words, OK if right else WRONG, text, 0.6 if right else 3.0, key="model")


def _width_before(figure: Figure, subject: Subject) -> int | None:
    """The last width that is named in front of it; "instead of 124M" is of the width that is advised."""
    before = figure.line[: figure.at]
    if _INSTEAD.search(before):
        return subject.advised_width
    found = [m for m in _WIDTH.finditer(figure.line) if m.start() < figure.at + len(figure.words)]
    return int(next(g for g in found[-1].groups() if g)) if found else None


def _of_width(config: RunConfig, width: int) -> int:
    config = dataclasses.replace(config, n_embd=width)
    vocab = config.vocab_size or GPT2_PADDED_VOCABULARY
    return int(config.shape(vocab).parameters)


def _tokens(figure: Figure, others: list[Figure]) -> Judged | None:
    """6000 iterations × 524k tokens = 3.1B."""
    steps = next((o for o in others if o.unit == "steps"), None)
    each = next((o for o in others if o.unit == "tokens" and o is not figure and 1000 <= o.high <= 2e7), None)
    if steps is None or each is None or figure.high < 1e8:
        return None
    low, high = steps.low * each.low, steps.high * each.high
    text = f"{number(steps.high, ',.0f')} × {number(each.high, ',.0f')} = {count(high)}"
    right = figure.low * 0.95 <= high and low <= figure.high * 1.05
    return Judged(figure.words, OK if right else WRONG, text, 0.4 if right else 2.0, key="tokens")


def _energy(figure: Figure, subject: Subject, others: list[Figure]) -> Judged | None:
    """Watts over the time that plan gives; money at the price on the line."""
    seconds, floor = subject.seconds(), subject.floor()
    watts = next((o for o in others if o.unit == "watts"), None)
    if not seconds or not floor or subject.card is None:
        return None
    power = (watts.low, watts.high) if watts else (0.93 * (subject.card.tdp_w or 0), subject.card.tdp_w or 0)
    if not power[0]:
        return None
    least = power[0] * floor / 3.6e6
    low, high = (w * seconds / 3.6e6 for w in power)
    if figure.unit == "kwh":
        text = _("{low} to {high} kWh in the {days} days it takes by plan; {least} even at the card's peak")
        text = text.format(
            low=number(low, ",.0f"),
            high=number(high, ",.0f"),
            days=days(seconds),
            least=number(least, ",.0f"),
        )
        verdict = WRONG if figure.high < least or figure.low > 2 * high else OK
        return Judged(figure.words, verdict, text, 3.0 if verdict == WRONG else 0.5, key="energy")
    price = next((o for o in others if o.unit == "price" and o.said == figure.said), None)
    if price is None:
        kwh = _("without a price in its currency it cannot be checked; the energy is {low} to {high} kWh")
        text = kwh.format(low=number(low, ",.0f"), high=number(high, ",.0f"))
        return Judged(figure.words, UNKNOWN, text, 0.4, key="money")
    text = _("{sign}{low} to {sign}{high} at this price for {a} to {b} kWh").format(
        sign=figure.said, low=number(low * price.low, ",.0f"), high=number(high * price.high, ",.0f"),
        a=number(low, ",.0f"), b=number(high, ",.0f"),
    )  # fmt: skip
    verdict = WRONG if figure.high < least * price.low else OK
    return Judged(figure.words, verdict, text, 2.0 if verdict == WRONG else 0.5, key="money")


# --- lines that claim without a figure --------------------------------------------------------------


def judge_lines(subject: Subject, config: ConfigJudged) -> list[Judged]:
    """ "Native bf16 is impossible", "4 bits are faster", "batch 8 to 12 still fits"."""
    found: list[Judged] = []
    for line in subject.text.split("\n")[:MOST_LINES]:
        if len(line) > 2000:
            continue
        for judged in (_impossible(line, subject), _quantised(line, subject), _still_fits(line, subject)):
            if judged is not None:
                found.append(judged)
    return found


def _impossible(line: str, subject: Subject) -> Judged | None:
    if not _IMPOSSIBLE.search(line) or subject.config is None or subject.config.depth is None:
        return None
    if _BITS.search(line) or subject.choice is None:
        return None
    choice = subject.choice
    text = _(
        "here it trains in bf16, without quantised weights: {gib} GiB of {there}, {speed} tokens/s, "
        "{days} days"
    )
    text = text.format(
        gib=number(choice.bill.process / GIB, ".2f"), there=number(choice.question.allowed / GIB, ".2f"),
        speed=number(choice.tokens_per_s, ",.0f"), days=days(subject.seconds() or 0),
    )  # fmt: skip
    return Judged(_part(line), WRONG, text, 7.0, key="memory")


def _quantised(line: str, subject: Subject) -> Judged | None:
    """A table's row or a sentence that trains a model in few bits."""
    if subject.config is None or subject.config.depth is None or not subject.floor():
        return None
    bits = _BITS.search(line)
    if bits is None or "|" not in line:
        return None
    text = _(
        "weights in few bits are unpacked before each matmul: training is no faster, and they take no "
        "step of "
        "an optimizer; {days} days is the floor at {peak} TFLOPS"
    ).format(days=days(subject.floor() or 0), peak=number((subject.peak or 0) / 1e12, ".1f"))
    return Judged(bits[0], WRONG, text, 4.5, key="quantised")


def _still_fits(line: str, subject: Subject) -> Judged | None:
    """`batch_size 8–12` of a width that the line names, in nanoGPT's own trainer."""
    from onecard.doctor.of_config import run_of

    found, width = _BATCHES.search(line), _WIDTH.search(line)
    if not found or not width or not _FITS.search(line) or subject.config is None or subject.target is None:
        return None
    size = int(next(group for group in width.groups() if group))
    texts, fits = [], []
    for batch in dict.fromkeys(int(n) for n in found.groups() if n):
        run = run_of(subject.config, subject.target, {"n_embd": size, "batch_size": batch, "n_head": 12})
        if run is None:
            return None
        fits.append(run.fits)
        texts.append(f"{batch}: {number(run.need / GIB, '.2f')} GiB, {run.verdict}")
    verdict = OK if all(fits) else WRONG
    return Judged(found[0], verdict, "; ".join(texts), 1.0 if verdict == OK else 3.0, key="memory")


def _part(line: str) -> str:
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    found = next((cell for cell in cells if _IMPOSSIBLE.search(cell)), cells[0])
    return f"{cells[0]}: {found}"[:90] if len(cells) > 1 else found[:90]
