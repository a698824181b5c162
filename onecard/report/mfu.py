"""MFU: how much of the card a run really uses, and why its log says something else.

nanoGPT divides by an A100's peak on every card, nanochat by an H100's until January 2026 and since then by
a table that lacks most GeForce cards. The work itself is known: FLOPs per token times tokens per second,
or the log's own MFU multiplied back by what it was divided by.
"""

from __future__ import annotations

import math
import statistics

from onecard.hardware.cards import Card, read_words
from onecard.language import _, number
from onecard.report.logs import HUGGINGFACE, NANOCHAT, NANOCHAT_2025, NANOGPT, ONECARD, Log

A100_FLOPS = 312e12
H100_FLOPS = 989e12
# nanochat's table (2026), as far as one card at home or rented goes; it divides by infinity for all others.
NANOCHAT_TABLE = {
    "5090": 209.5e12, "4090": 165.2e12, "3090": 71e12, "h100": 989e12, "h200": 989e12, "a100": 312e12,
}  # fmt: skip
# nanoGPT's average and ours differ by a percent or two in good health.
AGREEMENT = 0.05
# Printed to 0.01%: anything smaller is too coarse to compare with.
COMPARABLE = 0.005


def divisor(log: Log, card: Card | None) -> float | None:
    """The FLOPs per second by which this log's MFU was divided, per card; None where nobody knows."""
    if log.format == NANOGPT:
        return A100_FLOPS
    if log.format == NANOCHAT_2025:
        return H100_FLOPS
    if log.format == NANOCHAT:
        if "peak_flops" in log.facts:
            return float(log.facts["peak_flops"])
        return NANOCHAT_TABLE.get("".join(read_words(card.name).words)) if card is not None else None
    if log.format == ONECARD and card is not None:
        peak = card.peak_tflops(str(log.facts.get("dtype", "bfloat16")))
        return peak * 1e12 if peak else None
    return None


def flops_by_log(log: Log, card: Card | None, step_ms: float) -> float | None:
    """FLOPs per second of all cards at this step time, by the log's own MFU; None where it says nothing."""
    used = divisor(log, card)
    shown = [mfu for mfu in log.steps.mfus if mfu and mfu > 0]
    if used is None or not math.isfinite(used) or not shown:
        return None
    share = statistics.median(shown)
    if log.format == NANOGPT and len(shown) > 5:
        # nanoGPT shows an average, m = 0.9 m + 0.1 work / time, in which an evaluation is felt for twenty
        # lines. It is linear in the work, so that the first and the last value give the work back.
        times = 0.0
        used_ms = [ms for ms, mfu in zip(log.steps.ms, log.steps.mfus, strict=True) if mfu and mfu > 0]
        for ms in used_ms[1:]:
            times = 0.9 * times + 0.1 / ms
        work = (shown[-1] - 0.9 ** (len(shown) - 1) * shown[0]) / times
        share = work / step_ms if work > 0 else share
    return share * used * log.cards


def explain(log: Log, shown: float | None, true: float | None, card: Card | None, peak: float | None) -> str:
    """Why the log shows `shown` where `true` is the share of this card's `peak` FLOPs per second."""
    said = [_why(log, shown, card)]
    if (
        log.format == NANOGPT
        and shown is not None
        and shown >= 0
        and any((mfu or 0) < 0 for mfu in log.steps.mfus)
    ):
        said.append(_minus_hundred())
    if log.format == NANOGPT and shown is not None and shown > 0 and card is not None and peak is not None:
        said.append(
            _("{percent} of 312 is {tflops:.1f} TFLOPS: {share:.0f}% of one {card}'s {peak:.1f}.").format(
                percent=percent(shown), tflops=shown * 312, share=100 * shown * A100_FLOPS / peak,
                peak=peak / 1e12, card=card.name,
            )
        )  # fmt: skip
        share = shown * A100_FLOPS / peak
        if true is not None and log.evaluations and share < (1 - AGREEMENT) * true:
            said.append(
                _(
                    "That is less than the {percent:.0f}% above: nanoGPT shows a moving average, and an "
                    "evaluation is felt in it for twenty lines."
                ).format(percent=100 * true)
            )
    if true is not None and true > 1.05:
        said.append(
            _(
                "More than the card can do is not possible: is it another card, several, or the config "
                "of another run?"
            )
        )
    elif shown is not None and shown > 1 and log.format != ONECARD:
        said.append(_("Above 100% it shows that this card does more than the one it was divided by."))
    return " ".join(text for text in said if text)


def _why(log: Log, shown: float | None, card: Card | None) -> str:
    if log.format == HUGGINGFACE:
        return _("The Hugging Face Trainer prints no MFU.")
    if shown is None:
        return _("The log shows no MFU.")
    if log.format == ONECARD:
        return _("onecard's MFU is against the card it ran on: nothing to correct.")
    if log.format == NANOGPT:
        if shown < 0:
            return _minus_hundred()
        if card is not None and read_words(card.name).words == ("a", "100"):
            return _("nanoGPT divides by an A100's 312 TFLOPS, which is right here.")
        return _("nanoGPT divides by an A100's 312 TFLOPS, whatever the card.")
    if log.format == NANOCHAT_2025:
        return _("nanochat divided by an H100's 989 TFLOPS on every card until January 2026.")
    if shown == 0:
        return _(
            "nanochat does not find the card in its table (of the RTX 40 it has the 4090 alone), divides by "
            "infinity and so shows 0%."
        )
    used = divisor(log, card)
    if used is None or used == float("inf"):
        return _("nanochat divides by its own table's figure for the card.")
    return _("nanochat divides by {tflops:.1f} TFLOPS, its table's figure for the card.").format(
        tflops=used / 1e12
    )


def _minus_hundred() -> str:
    return _("-100% is no measurement: nanoGPT starts at -1 and shows that until 5 iterations have passed.")


def disagreement(by_shape: float, by_log: float, log: Log) -> str:
    """A note where the FLOPs per second from the model's shape and from the log's MFU differ."""
    ratio = by_shape / by_log
    coarse = max((mfu or 0.0) for mfu in log.steps.mfus) < COMPARABLE
    if coarse or abs(ratio - 1) <= AGREEMENT:
        return ""
    note = _("the model's shape gives {shape:.1f} TFLOPS, the log's own MFU {log:.1f}: {guess}")
    guess = _("is the config that of this run?")
    if log.format == NANOGPT and ratio > 1.8 and abs(ratio - round(ratio)) < 0.1 * ratio:
        guess = _("nanoGPT's is that of one of {n} cards?").format(n=round(ratio))
    return note.format(shape=by_shape / 1e12, log=by_log / 1e12, guess=guess)


def percent(share: float) -> str:
    return number(100 * share, ".2f") + "%"
