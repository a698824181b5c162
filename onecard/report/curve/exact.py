"""Findings about how exact the losses are: the last change, the scatter of single steps, spikes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from onecard.language import _, ngettext, number
from onecard.plan.amounts import count
from onecard.plan.noise import CHARACTERS, PER_SEQUENCE, PER_TOKEN, USUAL_BLOCK
from onecard.report.curve import columns
from onecard.report.curve.detectors import FEWEST_FOR_NOISE, noise_of
from onecard.report.curve.losses import SIGMAS, Points, finite, printed
from onecard.report.curve.noise import evaluation_error, scatter
from onecard.report.findings import Finding
from onecard.report.run_facts import RunFacts

SPIKE_SIGMAS, SPIKE, SPIKE_HALF = 8.0, 0.3, 10
FEWEST_FOR_SPIKES = 300


def last_change(facts: RunFacts) -> Iterator[Finding]:
    """Is the last change between two evaluations anything?"""
    vals = finite(facts.log.evaluations.pairs("val"))
    if len(vals) < 2:
        return
    (before_step, before), (step, now) = vals[-2:]
    digits = ".2f" if printed(vals) > 1e-3 else ".3f"
    values = {
        "before": number(before, digits), "now": number(now, digits), "change": abs(now - before),
        "begin": before_step, "step": step,
    }  # fmt: skip
    error = evaluation_error(facts)
    if error is None:
        yield from _change_by_scatter(facts, vals, values)
        return
    allowed = math.hypot(error.of_a_change, math.sqrt(2) * printed(vals))
    beyond = abs(now - before) > SIGMAS * allowed
    text = _change_text(error.same_text, beyond).format(of_change=allowed, **values)
    yield Finding("last-change", text, None, step, 35.0)
    if facts.vocab_size is None or facts.vocab_size >= CHARACTERS:
        text = ngettext(
            "An evaluation of {sequences:,} sequence of {block:,} tokens has the loss of all such text to "
            "± {error:.3f} nats (√((3²/T + 0.75²)/S): texts differ more than tokens).",
            "An evaluation of {sequences:,} sequences of {block:,} tokens has the loss of all such text to "
            "± {error:.3f} nats (√((3²/T + 0.75²)/S): texts differ more than tokens).",
            error.sequences,
        ).format(sequences=error.sequences, block=error.block_size, error=error.level)
        yield Finding("evaluation-error", text, None, None, 15.0)


def _change_by_scatter(facts: RunFacts, vals: Points, values: dict[str, object]) -> Iterator[Finding]:
    """Where the tokens of an evaluation are not known: by how far the evaluations scatter, if there are
    many."""
    change, step = abs(vals[-1][1] - vals[-2][1]), vals[-1][0]
    if len(vals) < FEWEST_FOR_NOISE:
        if not 1e-4 <= change <= 10:
            return
        block = facts.block_size or USUAL_BLOCK
        # So exact a difference of two evaluations on other text each has to be.
        level = change / (SIGMAS * math.sqrt(2))
        tokens = (PER_TOKEN**2 / block + PER_SEQUENCE**2) / level**2 * block
        text = _(
            "Is {before} → {now} more than chance? Yes, if every evaluation reads the same text. If each "
            "reads other text, only if it reads {tokens} tokens or more. The slope over several says more."
        )
        yield Finding("last-change", text.format(tokens=count(tokens), **values), None, step, 30.0)
        return
    seen = noise_of([loss for _step, loss in vals[-48:]])
    text = _(
        "The last evaluations scatter by ± {seen:.3f} nats, so that {before} → {now} ({change:.3f}) is "
        "beyond chance."
    )
    if change <= SIGMAS * math.sqrt(2) * math.hypot(seen, printed(vals)):
        text = _(
            "The last evaluations scatter by ± {seen:.3f} nats, so that {before} → {now} ({change:.3f}) "
            "alone says nothing."
        )
    yield Finding("last-change", text.format(seen=seen, **values), None, step, 25.0)


def _change_text(same_text: bool, beyond: bool) -> str:
    if same_text and beyond:
        return _(
            "{before} → {now} from step {begin:,} to {step:,} is real: each evaluation reads the "
            "same text, and a difference is exact to about ± {of_change:.3f}."
        )
    if same_text:
        return _(
            "{before} → {now} from step {begin:,} to {step:,} is within chance, although each "
            "evaluation reads the same text (± {of_change:.3f})."
        )
    if beyond:
        return _(
            "{before} → {now} from step {begin:,} to {step:,} is beyond chance: each evaluation "
            "draws other text, and a difference of two has ± {of_change:.3f}."
        )
    return _(
        "{before} → {now} from step {begin:,} to {step:,} alone says nothing: each evaluation "
        "draws other text, and a difference of two has ± {of_change:.3f}. The slope over several says more."
    )


def noise(facts: RunFacts) -> Iterator[Finding]:
    """How far single steps scatter."""
    _steps, losses = columns.finite(facts.log.steps, "loss")
    if len(losses) < 20:
        return
    seen = scatter(losses)
    text = _(
        "Single steps scatter by ± {noise:.3f} nats about the curve: compare means of a hundred, which have "
        "± {mean:.4f}."
    ).format(noise=seen, mean=seen / 10)
    yield Finding("noise", text, None, None, 8.0)


def spikes(facts: RunFacts) -> Iterator[Finding]:
    """Losses that jump up and come back."""
    steps, losses = columns.finite(facts.log.steps, "loss")
    if len(losses) < FEWEST_FOR_SPIKES:
        return
    found = spikes_in(steps, losses)
    if not found:
        text = ngettext(
            "No spike in {count:,} logged step: training was stable.",
            "No spike in {count:,} logged steps: training was stable.",
            len(losses),
        ).format(count=len(losses))
        yield Finding("stable", text, True, None, 30.0)
        return
    highest = max(found, key=lambda spike: spike[1])
    text = ngettext(
        "{count:,} spike in {steps:,} logged steps, the highest {height:.2f} nats at step {step:,}; the "
        "loss came back from it.",
        "{count:,} spikes in {steps:,} logged steps, the highest {height:.2f} nats at step {step:,}; the "
        "loss came back from them.",
        len(found),
    ).format(count=len(found), steps=len(losses), height=highest[1], step=highest[0])
    yield Finding("spikes", text, None, highest[0], 10.0 + min(20.0, 1e4 * len(found) / len(losses)))


def spikes_in(steps: Sequence[float], losses: Sequence[float]) -> Points:
    """(step, nats above the curve) of each jump that came down within ten points; the ten belong to it."""
    limit = max(SPIKE, SPIKE_SIGMAS * scatter(losses))
    found: Points = []
    # The first steps fall too fast for a median to follow.
    at = max(SPIKE_HALF, len(losses) // 50)
    while at < len(losses) - SPIKE_HALF:
        if losses[at] > losses[at - 1] + 0.5 * limit:
            before, after = losses[at - SPIKE_HALF : at], losses[at + 1 : at + 1 + SPIKE_HALF]
            height = losses[at] - max(statistics.median(before), statistics.median(after))
            if height > limit:
                found.append((int(steps[at]), height))
                at += SPIKE_HALF
        at += 1
    return found
