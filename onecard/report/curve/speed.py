"""Findings about the speed: tokens per second over time, the card's true use, memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from onecard.language import _
from onecard.report.curve.columns import thinned
from onecard.report.findings import Finding
from onecard.report.log import Steps
from onecard.report.run_facts import RunFacts

FIRST = 5  # steps that compile and warm up
FEWEST = 40
SLOWER, FASTER = 0.06, 0.06
BATCHES_GROW = ("modded-nanogpt",)  # and its windows, by schedule
GOOD_USE, LOW_USE = 0.45, 0.25
QUOTED = ("table", "key-value", "csv")  # in which people show what nanoGPT printed
AGREES = 0.03  # of the predicted memory
A100_FLOPS = 312e12  # what nanoGPT divides by, on any card


def step_times(steps: Steps) -> list[tuple[int, float]]:
    """(step, milliseconds) of steady steps: one with an evaluation in its time is left out by its length."""
    times = [(step, ms) for step, ms in thinned(steps, "ms") if ms > 0]
    times = times[FIRST:]
    if not times:
        return []
    usual = statistics.median(ms for _step, ms in times)
    return [(step, ms) for step, ms in times if ms < 3 * usual]


def trend(facts: RunFacts) -> Iterator[Finding]:
    """Did the run become slower, since when, by how much?"""
    times = step_times(facts.log.last.steps)
    if len(times) < FEWEST:
        return
    size = max(5, len(times) // 40)
    parts = [
        (times[i][0], statistics.median(ms for _step, ms in times[i : i + size]))
        for i in range(0, len(times) - size + 1, size)
    ]
    third = max(1, len(parts) // 4)
    early = statistics.median(ms for _step, ms in parts[:third])
    late = statistics.median(ms for _step, ms in parts[-third:])
    values = {"early": early / 1000, "late": late / 1000, "change": abs(late / early - 1)}
    if late > (1 + SLOWER) * early and facts.log.format in BATCHES_GROW:
        return  # as it was written to
    if late > (1 + SLOWER) * early:
        middle = (early + late) / 2
        at = len(parts) - 1
        while at > 0 and parts[at - 1][1] > middle:
            at -= 1
        text = _(
            "The run became {change:.0%} slower from about step {step:,} on: {early:.3g} s a step before, "
            "{late:.3g} s now. Heat, another process on the card, or a disk that cannot keep up?"
        )
        yield Finding("slower", text.format(step=parts[at][0], **values), False, parts[at][0], 42.0)
    elif late < (1 - FASTER) * early:
        text = _("The run became {change:.0%} faster: {early:.3g} s a step at first, {late:.3g} s now.")
        yield Finding("faster", text.format(**values), None, None, 10.0)
    else:
        text = _("The speed held: {late:.3g} s a step from beginning to end (within {held:.0%}).")
        held = max(0.01, values["change"])
        yield Finding("speed-steady", text.format(held=held, **values), True, None, 16.0)


def tokens_per_second(facts: RunFacts) -> float | None:
    """Of all cards, steady: tokens of a step by the median time of one, else as the log says it."""
    times = step_times(facts.log.last.steps) or step_times(facts.log.steps)
    if times and facts.tokens_per_step:
        return facts.tokens_per_step / statistics.median(ms for _step, ms in times) * 1000
    speeds = [speed for _step, speed in thinned(facts.log.steps, "tokens_per_s") if speed > 0]
    return statistics.median(speeds[FIRST:] or speeds) if speeds else None


def true_mfu(facts: RunFacts) -> float | None:
    """The share of the card's own dense peak that the model's arithmetic uses; None where a factor lacks."""
    if facts.card is None:
        return None
    peak = facts.card.peak_tflops(facts.dtype if facts.dtype in ("float16", "float32") else "bfloat16")
    if not peak:
        return None
    speed = tokens_per_second(facts)
    if speed is not None and facts.shape is not None:
        return speed * facts.shape.flops_per_token / (peak * 1e12 * max(1, facts.cards))
    shown = nanogpts_mfu(facts)
    return shown * A100_FLOPS / (peak * 1e12) if shown is not None else None


def nanogpts_mfu(facts: RunFacts) -> float | None:
    """nanoGPT's, by the log's format, or by its knobs where people quote them."""
    knobs = {"n_embd", "lr_decay_iters"} & set(facts.log.settings)
    if not facts.log.format.startswith("nanogpt") and not (knobs and facts.log.format in QUOTED):
        return None
    shown = [mfu for _step, mfu in thinned(facts.log.steps, "mfu") if mfu > 0]
    if shown:
        return statistics.median(shown)
    said = facts.log.facts.get("mfu")
    if isinstance(said, tuple | list) and said and all(isinstance(part, int | float) for part in said):
        return statistics.fmean(said)
    return float(said) if isinstance(said, int | float) and said > 0 else None


def use(facts: RunFacts) -> Iterator[Finding]:
    """How much of the card was used."""
    share = true_mfu(facts)
    if share is None or facts.card is None or not 0 < share <= 1.05:
        return
    values = {"share": share, "card": facts.card.name}
    if share >= GOOD_USE:
        text = _("{share:.0%} of the {card}'s own peak is used (true MFU): good.")
        yield Finding("mfu", text.format(**values), True, None, 36.0)
    elif share >= LOW_USE:
        text = _("{share:.0%} of the {card}'s own peak is used (true MFU): usual for a model of this size.")
        yield Finding("mfu", text.format(**values), None, None, 18.0)
    else:
        text = _(
            "Only {share:.0%} of the {card}'s own peak is used (true MFU): is it compiled, and is the batch "
            "large enough?"
        )
        yield Finding("mfu", text.format(**values), False, None, 30.0)


def memory(facts: RunFacts) -> Iterator[Finding]:
    """Peak memory, where the log has it, against the card's."""
    peak = facts.log.facts.get("peak_memory_gib")
    if not isinstance(peak, int | float) or not 0 < peak < math.inf:
        return
    predicted = facts.log.facts.get("predicted_memory_gib")
    if isinstance(predicted, int | float) and 0 < predicted < math.inf:
        off = peak / predicted - 1
        text = _(
            "Memory of tensors at the peak: {peak:.2f} GiB measured, {predicted:.2f} predicted ({off:+.1%})."
        )
        said = text.format(peak=peak, predicted=predicted, off=off)
        yield Finding("memory", said, True if abs(off) < AGREES else None, None, 9.0)
        return
    if facts.card is None:
        yield Finding("memory", _("Peak memory: {peak:.1f} GiB.").format(peak=peak), None, None, 6.0)
        return
    room = facts.card.memory_gb * 1e9 / 2**30 if facts.card.memory_gb % 1 else facts.card.memory_gb
    text = _("Peak memory: {peak:.1f} of the card's {room:.0f} GiB.").format(peak=peak, room=room)
    yield Finding("memory", text, None, None, 9.0)
