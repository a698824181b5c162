"""MFU: how much of the card a run really uses, and why its log says something else.

nanoGPT divides by an A100's peak on every card, nanochat by an H100's until January 2026 and since then by
a table that lacks most GeForce cards. The work itself is known: FLOPs per token times tokens per second,
or the log's own MFU multiplied back by what it was divided by.
"""

from __future__ import annotations

import math
import statistics

from onecard.hardware.cards import read_words
from onecard.language import _, number
from onecard.report.gathering.known import HUGGINGFACE, NANOCHAT_2025, NANOCHATS, NANOGPT, ONECARD
from onecard.report.log import Steps
from onecard.report.run_facts import RunFacts

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
_MACHINES = (2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 64)  # cards that a run is on


def peak_of(facts: RunFacts) -> tuple[float | None, str]:
    """The FLOPs per second that the card can do at best in the run's dtype, and a note where it does not have
    that dtype."""
    card = facts.card
    if card is None:
        return None, ""
    dtype = facts.dtype or "bfloat16"
    tflops, note = card.peak_tflops(dtype), ""
    if tflops is None and dtype == "bfloat16":
        tflops = card.peak_tflops("float16")
        if tflops is not None:
            note = _("{card} has no bfloat16: its float16 rate is taken").format(card=card.name)
    return (tflops * 1e12 if tflops else None), note


def divisor(facts: RunFacts) -> float | None:
    """The FLOPs per second by which this log's MFU was divided, per card; None where nobody knows."""
    log, card = facts.log, facts.card
    if log.format == NANOGPT:
        return A100_FLOPS
    if log.format == NANOCHAT_2025:
        return H100_FLOPS
    if log.format in NANOCHATS:
        if "peak_flops" in log.facts:
            return float(log.facts["peak_flops"])
        return NANOCHAT_TABLE.get("".join(read_words(card.name).words)) if card is not None else None
    return peak_of(facts)[0] if log.format == ONECARD else None


def shown(steps: Steps) -> list[float]:
    """The MFUs that mean something."""
    return [mfu for mfu in steps.mfu if mfu > 0]


def flops_by_log(facts: RunFacts, step_ms: float) -> float | None:
    """FLOPs per second of one card at this step time, by the log's own MFU; None where it says nothing."""
    used, steps = divisor(facts), facts.log.last.steps
    mfus = shown(steps)
    if used is None or not math.isfinite(used) or not mfus:
        return None
    share = statistics.median(mfus)
    if facts.log.format == NANOGPT and len(mfus) > 5:
        # nanoGPT shows an average, m = 0.9 m + 0.1 work / time, in which an evaluation is felt for twenty
        # lines. It is linear in the work, so that the first and the last value give the work back.
        times = 0.0
        used_ms = [ms for ms, mfu in zip(steps.ms, steps.mfu, strict=True) if mfu > 0]
        for ms in used_ms[1:]:
            times = 0.9 * times + 0.1 / ms
        work = (mfus[-1] - 0.9 ** (len(mfus) - 1) * mfus[0]) / times
        share = work / step_ms if work > 0 else share
    return share * used


def cards_by_mfu(facts: RunFacts, by_shape: float, by_log: float) -> int | None:
    """How many cards the run is on, where its head does not say it: nanoGPT's tokens are those of all of
    them, its MFU is that of one."""
    ratio, steps = by_shape / by_log, facts.log.last.steps
    many = round(ratio)
    if facts.log.format != NANOGPT or "cards" in facts.origin or max(shown(steps), default=0.0) < COMPARABLE:
        return None
    return many if many in _MACHINES and abs(ratio / many - 1) <= AGREEMENT else None


def explain(facts: RunFacts, shown: float | None, true: float | None, peak: float | None) -> str:
    """Why the log shows `shown` where `true` is the share of this card's `peak` FLOPs per second."""
    log, card = facts.log, facts.card
    said = [_why(facts, shown)]
    if (
        log.format == NANOGPT
        and shown is not None
        and shown >= 0
        and any(mfu < 0 for mfu in log.last.steps.mfu)
    ):
        said.append(minus_hundred())
    if log.format == NANOGPT and shown is not None and shown > 0 and card is not None and peak is not None:
        said.append(
            _("{percent} of 312 is {tflops:.1f} TFLOPS: {share:.0f}% of one {card}'s {peak:.1f}.").format(
                percent=percent(shown), tflops=shown * 312, share=100 * shown * A100_FLOPS / peak,
                peak=peak / 1e12, card=card.name,
            )
        )  # fmt: skip
        share = shown * A100_FLOPS / peak
        if true is not None and len(log.last.evaluations) and share < (1 - AGREEMENT) * true:
            said.append(
                _(
                    "That is less than the {percent:.0f}% above: nanoGPT shows a moving average, and an "
                    "evaluation is felt in it for twenty lines."
                ).format(percent=100 * true)
            )
    if true is not None and true > 1.05:
        said.append(
            _(
                "More than the card can do is not possible: is it another card, several (--gpus N), or the "
                "config of another run?"
            )
        )
    elif shown is not None and shown > 1 and log.format != ONECARD:
        said.append(_("Above 100% it shows that this card does more than the one it was divided by."))
    return " ".join(text for text in said if text)


def _why(facts: RunFacts, shown: float | None) -> str:
    log, card = facts.log, facts.card
    if log.format == HUGGINGFACE:
        return _("The Hugging Face Trainer prints no MFU.")
    if shown is None:
        return _("The log shows no MFU.")
    if log.format == ONECARD:
        return _("onecard's MFU is against the card it ran on: nothing to correct.")
    if log.format == NANOGPT:
        if shown < 0:
            return minus_hundred()
        if card is not None and read_words(card.name).words == ("a", "100"):
            return _("nanoGPT divides by an A100's 312 TFLOPS, which is right here.")
        return _("nanoGPT divides by an A100's 312 TFLOPS, whatever the card.")
    if log.format == NANOCHAT_2025:
        return _("nanochat divided by an H100's 989 TFLOPS on every card until January 2026.")
    if log.format not in NANOCHATS:
        return _("What this trainer divides by is not known here.")
    if shown == 0:
        return _(
            "nanochat does not find the card in its table (of the RTX 40 it has the 4090 alone), divides by "
            "infinity and so shows 0%."
        )
    used = divisor(facts)
    if used is None or used == float("inf"):
        return _("nanochat divides by its own table's figure for the card.")
    return _("nanochat divides by {tflops:.1f} TFLOPS, its table's figure for the card.").format(
        tflops=used / 1e12
    )


def minus_hundred() -> str:
    return _("-100% is no measurement: nanoGPT starts at -1 and shows that until 5 iterations have passed.")


def disagreement(facts: RunFacts, by_shape: float, by_log: float) -> str:
    """A note where the FLOPs per second from the model's shape and from the log's MFU differ."""
    coarse = max(shown(facts.log.last.steps), default=0.0) < COMPARABLE
    if coarse or abs(by_shape / by_log - 1) <= AGREEMENT:
        return ""
    note = _(
        "the model's shape gives {shape:.1f} TFLOPS, the log's own MFU {log:.1f}: is the config that of this "
        "run?"
    )
    return note.format(shape=by_shape / 1e12, log=by_log / 1e12)


def percent(share: float) -> str:
    return number(100 * share, ".2f") + "%"
