"""Findings about how a run was driven: its learning rate, resumes, gradients and passes over the data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import pairwise

from onecard.language import _, joined, ngettext
from onecard.plan.amounts import count as amount
from onecard.plan.scaling import TOKENS_PER_PARAMETER
from onecard.report.curve.columns import finite, thinned
from onecard.report.curve.noise import scatter
from onecard.report.curve.rates import (
    CONSTANT,
    DECAYING,
    FLOOR,
    HIGH,
    WARM_UP,
    last_planned,
    peak_of,
    phase_at,
    rates_of,
)
from onecard.report.findings import Finding
from onecard.report.log import Start
from onecard.report.run_facts import RunFacts

# What the decay of the learning rate still brings, in published runs: most, and all (facts by family).
DECAY_USUAL, DECAY_SEEN = (0.05, 0.2), (0.03, 0.4)
AROUND_A_RESUME = 40  # logged losses on either side
FIRST_COMPARED, FEWEST_COMPARED = 100, 8
MOST_RESUMES = 3  # the newest
JUMP, JUMP_SIGMAS = 0.03, 4.0
GRAD_CLIP = 1.0
CLIPPED_OFTEN, GROWN = 0.5, 2.0
FEW_PASSES, MANY_PASSES = 1.05, 4.0


def phase(facts: RunFacts) -> Iterator[Finding]:
    """Where the learning rate is in its schedule, and what its decay still brings."""
    step = facts.step
    rate, peak, now = rates_of(facts)(step), peak_of(facts), phase_at(facts, step)
    if rate is None or not peak or now is None:
        if len(facts.log.steps) + len(facts.log.evaluations) >= 3:
            text = _(
                "Nothing says where the learning rate is in its schedule: if it is still high, its decay "
                "usually brings {low} to {high} nats; if it is down, that is in the loss already."
            )
            said = text.format(low=DECAY_USUAL[0], high=DECAY_USUAL[1])
            yield Finding("rate-unknown", said, None, None, 16.0)
        return
    end = last_planned(facts)
    falls = end is not None and end[1] < 0.5 * rate
    values = {
        "rate": rate, "peak": peak, "share": rate / peak, "low": DECAY_USUAL[0], "high": DECAY_USUAL[1],
        "least": DECAY_SEEN[0], "most": DECAY_SEEN[1],
    }  # fmt: skip
    text, good, weight = _phase_text(now, falls)
    if facts.schedule is not None and facts.schedule.assumed:
        # A second sentence, for the first is true only if nobody set the schedule.
        text = joined((text, _("Nothing says the schedule: this is the trainer's default.")), " ")
        weight -= 10.0
    yield Finding(f"rate-{now}", text.format(**values), good, step, weight)


def _phase_text(now: str, falls: bool) -> tuple[str, bool | None, float]:
    if now == WARM_UP:
        return (
            _("The learning rate is still warming up, at {rate:.2g}: this loss says little yet."),
            None,
            50.0,
        )
    if now == FLOOR:
        return (
            _(
                "The learning rate has come down to {rate:.2g} ({share:.0%} of its peak): what the decay "
                "brings is in the loss already."
            ),
            True, 28.0,
        )  # fmt: skip
    if now == DECAYING:
        return (
            _(
                "The learning rate is on its way down, at {rate:.2g} ({share:.0%} of its peak); a whole "
                "decay usually brings {low} to {high} nats, and part of that is still to come."
            ),
            None, 38.0,
        )  # fmt: skip
    if now in (HIGH, CONSTANT) and falls:
        return (
            _(
                "The learning rate is still high, at {rate:.2g} ({share:.0%} of its peak): the decay to "
                "come usually brings {low} to {high} nats ({least} to {most} in published runs)."
            ),
            None, 50.0,
        )  # fmt: skip
    return (
        _(
            "The learning rate is at {rate:.2g} and no decay is planned: one at the end usually brings "
            "{low} to {high} nats ({least} to {most} in published runs)."
        ),
        None, 50.0,
    )  # fmt: skip


def resumes(facts: RunFacts) -> Iterator[Finding]:
    """The loss before and after each time that the run went on."""
    if len(facts.log.starts) < 2:
        return
    noise = scatter(finite(facts.log.steps, "loss")[1])
    for old, new in list(pairwise(facts.log.starts))[-MOST_RESUMES:]:
        found = _resume(facts, old, new, noise)
        if found is not None:
            yield found


def _resume(facts: RunFacts, old: Start, new: Start, noise: float) -> Finding | None:
    after = [(int(s), loss) for s, loss in new.steps.pairs("loss") if math.isfinite(loss)]
    if not after:
        return None
    at = after[0][0]
    before = [(int(s), loss) for s, loss in old.steps.pairs("loss") if s <= at and math.isfinite(loss)]
    # Before a hundred steps the loss falls too fast to compare two means.
    if at < FIRST_COMPARED or len(before) < FEWEST_COMPARED or len(after) < 3:
        return None
    trend = _trend(before[-4 * AROUND_A_RESUME :])
    later = after[:AROUND_A_RESUME]
    # Where the old start had gone further, its own losses of the same steps.
    again = [(int(s), loss) for s, loss in old.steps.pairs("loss") if at < s <= later[-1][0]]
    again = [(s, loss) for s, loss in again if math.isfinite(loss)]
    alike = [(s, loss) for s, loss in later if again and at < s <= again[-1][0]]
    if min(len(again), len(alike)) >= FEWEST_COMPARED:
        before, later, trend = again, alike, 0.0
    before = before[-AROUND_A_RESUME:]
    left, right = (statistics.fmean(loss for _s, loss in part) for part in (before, later))
    apart = _log_mean(later) - _log_mean(before)
    error = noise * math.sqrt(1 / len(before) + 1 / len(later))
    # The loss falls on between the two means as well.
    jump = right - left - min(0.0, trend) * apart
    values = {"step": at, "before": left, "after": right, "jump": jump, "error": error}
    rates = [steps.pairs("lr") for steps in (old.steps, new.steps)]
    if abs(jump) <= max(JUMP, JUMP_SIGMAS * error):
        text = _(
            "The resume at step {step:,} cost nothing: {before:.2f} before, {after:.2f} after (± "
            "{error:.2f})."
        )
        return Finding("resume", text.format(**values), True, at, 12.0)
    if jump < 0:
        text = _(
            "After the resume at step {step:,} the loss is lower: {before:.2f} before, {after:.2f} after."
        )
        return Finding("resume-lower", text.format(**values), None, at, 15.0)
    earlier = [rate for s, rate in rates[0] if s <= at]
    if earlier and rates[1] and rates[1][0][1] > 1.1 * earlier[-1]:
        text = _(
            "After the resume at step {step:,} the loss is {jump:.2f} nats higher (± {error:.2f}): the "
            "learning rate rose from {old:.2g} to {new:.2g} there."
        )
        values |= {"old": earlier[-1], "new": rates[1][0][1]}
        return Finding("resume-higher", text.format(**values), False, at, 45.0)
    text = _(
        "After the resume at step {step:,} the loss is {jump:.2f} nats higher (± {error:.2f}): were the "
        "optimizer's states kept, and is it the same data and batch?"
    )
    return Finding("resume-higher", text.format(**values), False, at, 55.0)


def _trend(points: list[tuple[int, float]]) -> float:
    """Nats per doubling of the steps, from the first half of these to the second; a curve is nearly straight
    over the logarithm of its steps, once its first steep part is over."""
    last = points[-1][0]
    points = [point for point in points if point[0] >= last / 2] or points
    half = len(points) // 2
    early, late = points[:half], points[half:]
    if not early or (apart := _log_mean(late) - _log_mean(early)) <= 0:
        return 0.0
    fell = statistics.fmean(loss for _s, loss in late) - statistics.fmean(loss for _s, loss in early)
    return fell / apart


def _log_mean(points: list[tuple[int, float]]) -> float:
    return statistics.fmean(math.log2(max(s, 1)) for s, _loss in points)


def passes(facts: RunFacts) -> Iterator[Finding]:
    """How often the run has read its text."""
    if not facts.train_tokens or not facts.tokens:
        return
    count = facts.tokens / facts.train_tokens
    values = {"passes": count, "tokens": amount(facts.tokens), "data": amount(facts.train_tokens)}
    if count <= FEW_PASSES:
        text = _("Every token was new: {tokens} of {data} tokens of data.")
        yield Finding("passes", text.format(**values), True, None, 18.0)
    elif count <= MANY_PASSES:
        text = _(
            "The data was read {passes:.1f} times ({data} tokens): up to four times is nearly as "
            "good as new text (arXiv 2305.16264)."
        )
        yield Finding("passes", text.format(**values), None, None, 15.0)
    else:
        text = _("The data was read {passes:.1f} times ({data} tokens): more new text would do more.")
        yield Finding("passes", text.format(**values), False, None, 35.0)


def tokens_for_size(facts: RunFacts) -> Iterator[Finding]:
    """Tokens per parameter, and what is on either side of twenty."""
    if not facts.tokens or not facts.parameters:
        return
    ratio = facts.tokens / facts.parameters
    if ratio > 2 * TOKENS_PER_PARAMETER:
        text = _(
            "{ratio:.0f} tokens per parameter: more than the {usual} at which computing is best spent "
            "(Chinchilla). That suits a model that should be small; a larger one would end lower for the "
            "same computing."
        )
    elif ratio < 0.5 * TOKENS_PER_PARAMETER:
        text = _(
            "{ratio:.1f} tokens per parameter so far: below the {usual} at which computing is best spent "
            "(Chinchilla). More tokens bring more than a larger model."
        )
    else:
        text = _(
            "{ratio:.0f} tokens per parameter: near the {usual} at which computing is best spent "
            "(Chinchilla)."
        )
    yield Finding("tokens-for-size", text.format(ratio=ratio, usual=TOKENS_PER_PARAMETER), None, None, 11.0)


def gradients(facts: RunFacts) -> Iterator[Finding]:
    """How often the gradient was clipped, and whether its norm grows."""
    norms = [(step, norm) for step, norm in thinned(facts.log.steps, "grad_norm") if norm >= 0]
    warm = facts.schedule.warmup_steps if facts.schedule is not None else 0
    settled = [norm for step, norm in norms if step >= warm]
    settled = settled[len(settled) // 10 :]
    if len(settled) < 20:
        return
    clip = (
        facts.config.grad_clip if facts.config is not None else facts.log.settings.get("grad_clip", GRAD_CLIP)
    )
    quarter = len(settled) // 4
    early, late = statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])
    values = {"early": early, "late": late, "clip": clip}
    if early > 0 and late > GROWN * early:
        text = _(
            "Gradient norms grow: {early:.2g} early, {late:.2g} now; often the first sign of divergence."
        )
        yield Finding("gradients-grow", text.format(**values), False, None, 42.0)
    if not isinstance(clip, int | float) or clip <= 0:
        return
    share = sum(norm > clip for norm in settled) / len(settled)
    if share > CLIPPED_OFTEN:
        text = _(
            "{share:.0%} of the steps after the warm-up were clipped to a gradient norm of {clip:g}: the "
            "step size is set by clipping, not by the learning rate."
        )
        yield Finding("clipped", text.format(share=share, clip=clip), None, None, 22.0)
    else:
        text = ngettext(
            "Gradients are calm: a norm of {late:.2g} now, {share:.1%} of {count:,} step clipped.",
            "Gradients are calm: a norm of {late:.2g} now, {share:.1%} of {count:,} steps clipped.",
            len(settled),
        )
        if late <= GROWN * early:
            said = text.format(late=late, share=share, count=len(settled))
            yield Finding("gradients", said, True, None, 14.0)
