"""Next steps in the reader's own trainer: config lines for nanoGPT, a command for nanochat."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY
from onecard.language import _
from onecard.plan.amounts import count
from onecard.plan.scaling import STILL_HIGH
from onecard.report.curve.phase import share_of_peak
from onecard.report.findings import Forecast, NextStep
from onecard.report.next.next_run import (
    NANOCHAT,
    NANOGPT,
    Run,
    by_the_law,
    forecast_gain,
    further,
    gain_of_length,
    hours_more,
    is_gpt2s,
    law_gain,
    own_trainer,
    pace,
    round_steps,
    step_of,
    times_longer,
)
from onecard.report.next.offers import (
    Price,
    by_nanogpt,
    nanogpt_splits,
    price_of_hours,
)
from onecard.report.run_facts import RunFacts

NANOCHAT_2025 = "nanochat-2025"  # a format of logs
_STILL_HIGH_SHARE = 0.2
# GPT-2's sizes, as nanoGPT trains them: layers, heads, width, the usual highest learning rate.
_SIZES = ((12, 12, 768, 6e-4), (24, 16, 1024, 3e-4), (36, 20, 1280, 2.5e-4))
_LARGER = 1.5  # times the parameters: less is not worth a run
_FEWEST = 5  # tokens per parameter that a larger model has to see


def finish(run: Run, forecast: Forecast) -> NextStep | None:
    left = run.steps - run.facts.step
    if left < 0.02 * run.steps or not forecast.points:
        return None
    gain = forecast_gain(run, forecast.points[0], forecast.of)
    text = _("let it finish: {left:,} steps are left, and the end of the schedule is where the loss falls")
    return step_of(
        text.format(left=left),
        "",
        own_trainer(run),
        hours_more(run, left),
        gain=gain,
        source=_("the forecast"),
    )


def decay(run: Run) -> NextStep | None:
    """The decay that a schedule made for another length never came to."""
    share = share_of_peak(run.facts, run.facts.step)
    finished = run.facts.step >= 0.98 * run.steps
    if run.trainer != NANOGPT or share is None or share < _STILL_HIGH_SHARE or not finished:
        return None
    # A rate that nobody said is no reason, and one above its peak is a mistake of its own.
    if share > 1 or not math.isfinite(_last_loss(run.facts)) or _is_guessed(run.facts):
        return None
    more = max(run.steps // 5, 1)
    end = run.steps + more
    text = _(
        "bring the learning rate down: it ended at {share:.0%} of its peak. {more:,} steps more, with the "
        "decay "
        "ending where the run does"
    )
    command = _lines(init_from="'resume'", max_iters=end, lr_decay_iters=end)
    gain = (STILL_HIGH * share / 2, 2 * STILL_HIGH * share)
    source = _("runs read before and after their decay (docs/scaling.md)")
    return step_of(
        text.format(share=share, more=more),
        command,
        "theirs",
        hours_more(run, more),
        gain=gain,
        source=source,
    )


def _is_guessed(facts: RunFacts) -> bool:
    """Is the schedule nanoGPT's default, and the log one that many others write, or in its warm-up?"""
    schedule = facts.schedule
    if schedule is None or not schedule.assumed:
        return False
    if facts.step < schedule.warmup_steps:
        return True
    return facts.last_step is None and not facts.log.steps.has("ms")


def _last_loss(facts: RunFacts) -> float:
    return facts.log.steps.loss[-1] if len(facts.log.steps) and facts.log.steps.has("loss") else 0.0


def longer(run: Run, forecast: Forecast) -> NextStep | None:
    """The same model for more steps, its decay at their end."""
    times = times_longer(run)
    if run.trainer not in (NANOGPT, NANOCHAT) or times < 1.3:
        return None
    if run.facts.last_step is None and not forecast.points:
        return None  # nobody says how long it is, and it has only begun
    steps = round_steps(times * run.steps)
    point = further(run, forecast, steps)
    if point is not None and run.steps < point.step <= times * run.steps * 1.05:
        steps, gain, source = point.step, forecast_gain(run, point, forecast.of), _("the forecast")
    else:
        gain, source = gain_of_length(run, steps), by_the_law()
    if gain is None:
        return None
    amount = steps_and_tokens(run, steps)
    text = _(
        "train the same model for {amount} with the decay at their end: from its checkpoint the rate goes up "
        "once more, and falls over the rest"
    )
    command = _lines(init_from="'resume'", max_iters=steps, lr_decay_iters=steps)
    if run.trainer == NANOCHAT:
        text = _("train the same model anew for {amount}: its warm-down is at their end")
        flag = "--num_iterations" if run.facts.log.format == NANOCHAT_2025 else "--num-iterations"
        command = f"python -m scripts.base_train {flag}={steps}" + _depth_flag(run)
    text = text.format(amount=amount)
    more = steps - run.steps if run.trainer == NANOGPT else steps
    return step_of(text, command, "theirs", hours_more(run, more), gain=gain, source=source)


def steps_and_tokens(run: Run, steps: int) -> str:
    """The tokens only where a step's are known."""
    if not run.facts.tokens_per_step:
        return _("{steps:,} steps").format(steps=steps)
    text = _("{steps:,} steps ({tokens} tokens)")
    return text.format(steps=steps, tokens=count(steps * run.facts.tokens_per_step))


def _depth_flag(run: Run) -> str:
    return f" --depth={run.facts.shape.n_layer}" if run.facts.shape is not None else ""


def larger(run: Run) -> NextStep | None:
    """The next of GPT-2's sizes, in the batch size that nanoGPT has room for on this card."""
    facts, config = run.facts, run.config
    if run.trainer != NANOGPT or config is None or facts.parameters is None or config.arch != "gpt2":
        return None
    if not run.tokens or not is_gpt2s(facts):
        return None
    for layers, heads, width, rate in _SIZES:
        changed: dict[str, Any] = {
            "n_layer": layers, "n_head": heads, "n_embd": width, "learning_rate": rate, "min_lr": rate / 10,
            "max_iters": run.steps, "lr_decay_iters": run.steps, "warmup_iters": min(2000, run.steps // 20),
        }  # fmt: skip
        larger = dataclasses.replace(config, **changed)
        parameters = larger.shape(config.vocab_size or GPT2_PADDED_VOCABULARY).parameters
        if parameters > _LARGER * facts.parameters:
            break
    else:
        return None
    gain = law_gain((facts.parameters, run.tokens), (parameters, run.tokens))
    if run.tokens < _FEWEST * parameters or gain is None:
        return None
    text = _("train {size} parameters on the same {tokens} tokens: n_embd = {width}")
    if any("n_embd" in mistake.change for mistake in run.mistakes):
        text = _("train the {size} that were meant on the same {tokens} tokens: n_embd = {width}")
    text = text.format(size=count(parameters), tokens=count(run.tokens), width=width)
    if facts.card is None:
        text += "; " + _("add --gpu NAME for the batch size that fits, the hours and the cost")
        return step_of(text, "", "theirs", Price(), gain=gain, source=by_the_law())
    offer = by_nanogpt(larger, facts.card, run.options) if facts.cards == 1 else None
    if offer is None:
        return None  # it runs out of memory in nanoGPT; here it may still fit
    split, price = offer
    price = price_of_hours((price.hours or 0.0) * pace(run), facts.card, run.options)
    changed |= {
        "batch_size": split.batch_size,
        "gradient_accumulation_steps": split.gradient_accumulation_steps,
    }
    text += "; " + _("nanoGPT has room for batch_size {n} on the {card}").format(
        n=split.batch_size, card=facts.card.name
    )
    return step_of(text, _lines(**changed), "theirs", price, gain=gain, source=by_the_law())


def faster(run: Run) -> NextStep | None:
    """The same run in another split of the same step, or compiled."""
    facts, config = run.facts, run.config
    if run.trainer != NANOGPT or facts.card is None or config is None or facts.cards > 1:
        return None
    if facts.compiled is False:
        offer = by_nanogpt(config, facts.card, run.options)
        if offer is None:
            return None
        text = _(
            "compile the model: faster, and in less memory (a second run of {steps:,} steps: {hours:.1f} h)"
        )
        said = text.format(steps=run.steps, hours=offer[1].hours)
        source = _("plan's figures of nanoGPT")
        return NextStep(said, "compile = True", "theirs", source=source)
    whole = dataclasses.replace(config, max_iters=run.steps)
    splits = nanogpt_splits(whole, facts.card, run.options)
    own = next((price.hours for split, price in splits if split.batch_size == config.batch_size), None)
    best = by_nanogpt(whole, facts.card, run.options)
    if not own or best is None or best[0].batch_size == config.batch_size:
        return None
    split, price = best
    text = _("split a step otherwise: batch_size {n} takes {share:.0%} less time for the same tokens a step")
    command = _lines(
        batch_size=split.batch_size, gradient_accumulation_steps=split.gradient_accumulation_steps
    )
    said = text.format(n=split.batch_size, share=1 - (price.hours or own) / own)
    return NextStep(said, command, "theirs", source=_("plan's figures of nanoGPT"))


def _lines(**values: object) -> str:
    """For a config file."""
    return "\n".join(f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"
                     for name, value in values.items())  # fmt: skip
