"""What to do next with a run: in the reader's own trainer first, then here, each by its gain an hour.

A gain is in nats of validation loss at the end, as a range, and names what it is from: the forecast, the
law of plan/scaling.py, or a measurement. Every command and config line is one that plan has accepted for
the card (offers.py); where the card is not known only what needs none is shown.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from onecard.language import _, number
from onecard.plan.amounts import count
from onecard.plan.options import Options
from onecard.plan.scaling import NATS, WORTH
from onecard.report.curve.phase import share_of_peak
from onecard.report.findings import Forecast, Mistake, NextStep, Place
from onecard.report.next.in_their_trainer import decay, faster, finish, larger, longer
from onecard.report.next.next_run import (
    NANOCHAT,
    NANOGPT,
    ONECARD,
    Run,
    by_the_law,
    forecast_gain,
    further,
    gain_of_length,
    is_gpt2s,
    own_trainer,
    round_steps,
    run_of,
    step_of,
    times_longer,
)
from onecard.report.next.offers import (
    Price,
    by_onecard,
    dataset_of,
    same_hours_here,
)
from onecard.report.run_facts import RunFacts

_AGAIN = 0.5  # of the peak: how high a rewarm goes


def next_steps_of(
    facts: RunFacts, forecast: Forecast, place: Place, mistakes: Sequence[Mistake] = (),
    options: Options | None = None, *, lost: int | None = None,
) -> list[NextStep]:  # fmt: skip
    """`options` has the price of a kWh, `lost` is the step since which the run is. The first are those of
    the reader's own trainer."""
    run = run_of(facts, mistakes, options or Options())
    if lost is not None:
        return [_back(run, lost)]
    theirs = [finish(run, forecast), decay(run), longer(run, forecast), larger(run), faster(run)]
    here = [_continued_here(run, forecast), _better_here(run, place)]
    ranked = [*_by_gain(theirs), *_by_gain(here)]
    return [*ranked, _better_data(run, place), _sample(run)]


def _back(run: Run, lost: int) -> NextStep:
    """What is left of a run that diverged or has no numbers any more."""
    text = _("go back to a checkpoint from before step {step:,}, with half the learning rate")
    if run.facts.dtype == "float16":
        text = _(
            "go back to a checkpoint from before step {step:,}: in bfloat16, or with half the learning rate"
        )
    command = ""
    if run.trainer == NANOGPT:
        peak = run.facts.schedule.peak if run.facts.schedule is not None else None
        command = "init_from = 'resume'" + (f"\nlearning_rate = {peak / 2:g}" if peak else "")
    return NextStep(text.format(step=lost), command, own_trainer(run) if run.trainer else "theirs")


def _by_gain(steps: Sequence[NextStep | None]) -> list[NextStep]:
    """The most nats an hour first; what gains none, or nobody knows how much, last."""

    def rank(step: NextStep) -> tuple[bool, float]:
        if step.gain is None:
            return True, 0.0
        return False, -sum(step.gain) / 2 / max(step.hours if step.hours is not None else 1e9, 0.1)

    return sorted((step for step in steps if step is not None), key=rank)


# --- here ----------------------------------------------------------------------------------------------


def _continued_here(run: Run, forecast: Forecast) -> NextStep | None:
    """nanoGPT's ckpt.pt, or a run of onecard's, gone on with: its moments and its place included."""
    facts, config = run.facts, run.config
    if run.trainer not in (NANOGPT, ONECARD) or config is None:
        return None
    times = times_longer(run)
    steps = round_steps(times * run.steps)
    gain = gain_of_length(run, steps)
    if times < 1.3 or gain is None:
        return None
    usual = config.muon_lr if config.by_muon else config.learning_rate
    peak = (facts.schedule.peak if facts.schedule is not None else None) or usual
    longer = dataclasses.replace(config, max_iters=steps)
    price = Price()
    if facts.card is not None:
        offer = by_onecard(dataclasses.replace(longer, max_iters=steps - run.steps), facts.card, run.options)
        if offer is None:
            return None
        price = offer[1]
    point = further(run, forecast, steps)
    source = by_the_law()
    if point is not None and abs(point.step - steps) < 0.1 * steps:
        gain, source = forecast_gain(run, point, forecast.of) or gain, _("the forecast")
    text = _(
        "go on with it here until step {steps:,}: onecard reads nanoGPT's ckpt.pt, with AdamW's moments, "
        "from "
        "its folder"
    )
    if run.trainer == ONECARD:
        text = _("go on with it until step {steps:,}, with a decay of the rate at the end")
    extend = f"--max_iters={steps} --extend=rewarm --extend_lr={_AGAIN * peak:g}"
    if (share_of_peak(facts, facts.step) or 0.0) > 0.9 * _AGAIN:
        extend = f"--max_iters={steps} --extend=decay"
    if (facts.last_step or 0) >= steps or (facts.schedule is not None and facts.schedule.assumed):
        # It was made for more steps: its rate has not come down, and nothing is extended.
        extend = f"--max_iters={steps} --lr_decay_iters={steps}"
    folder = shlex.quote(folder_of(facts))
    command = f"onecard train --out_dir={folder} --init_from=resume {_shape_flags(run)}{extend}"
    return step_of(text.format(steps=steps), command, "onecard", price, gain=gain, source=source)


def _shape_flags(run: Run) -> str:
    """What nanoGPT's folder does not say to plan; a run of onecard's brings it."""
    config = run.config
    if run.trainer == ONECARD or config is None:
        return ""
    names = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps")
    said = [f"--dataset={shlex.quote(dataset_of(run.facts))}"]
    return " ".join([*said, *(f"--{name}={getattr(config, name)}" for name in names)]) + " "


def folder_of(facts: RunFacts) -> str:
    """Where the run lies, as the log or the person says it."""
    if facts.folder:
        return facts.folder
    said = facts.config.out_dir if facts.config is not None and facts.config.is_set("out_dir") else None
    return str(said or facts.log.settings.get("out_dir") or "out")


def _better_here(run: Run, place: Place) -> NextStep | None:
    """The same hours of nanochat's architecture with Muon, in the size that suits them."""
    if not is_gpt2s(run.facts) or run.loss is None:
        return None
    if run.facts.card is None:
        text = _(
            "train nanochat's architecture with Muon: it reached a loss in {low:.1f} to {high:.1f} times "
            "fewer tokens "
            "than GPT-2 with AdamW; add --gpu NAME for the size that suits your card and hours"
        )
        said = text.format(low=WORTH[0], high=WORTH[1])
        return NextStep(said, "", "onecard", source=_measured())
    found = same_hours_here(run.facts, run.options)
    if found is None:
        return None
    if run.loss <= found.point.low or found.unit != NATS:
        return None
    # A run that is behind the trend may be so for reasons that a better model does not mend.
    usual = place.expected if place.expected is not None and place.unit == "nats" else run.loss
    gain = max(min(run.loss, usual) - found.point.high, 0.0), run.loss - found.point.low
    text = _(
        "the same {hours:.1f} hours of nanochat's architecture with Muon: {size} parameters, {tokens} "
        "tokens, "
        "{low:.2f} to {high:.2f} on web text"
    )
    said = text.format(
        hours=found.price.hours, size=count(found.parameters), tokens=count(found.point.tokens or 0),
        low=found.point.low, high=found.point.high,
    )  # fmt: skip
    return step_of(said, found.command, "onecard", found.price, gain=gain, source=_measured())


def _measured() -> str:
    text = _(
        "measured to 64M tokens: {low:.1f} to {high:.1f} of GPT-2's tokens for one (benchmarks/results, "
        "tokens-to-loss); later an assumption that the range holds"
    )
    return text.format(low=WORTH[0], high=WORTH[1])


# --- what is not counted in nats -----------------------------------------------------------------------


def _better_data(run: Run, place: Place) -> NextStep:
    """Another text: its losses are other losses, what it teaches is seen in tests."""
    known = (run.facts.data or "").lower()
    text = _(
        "better text gains more than any knob: nanochat's d26 scores {fineweb} in CORE on FineWeb, "
        "{climbmix} on "
        "ClimbMix, FineWeb-Edu in between. A loss on another text compares with none on this one"
    )
    text = text.format(fineweb=number(0.2241, ".3f"), climbmix=number(0.2602, ".3f"))
    if "climbmix" in known:
        text = _("ClimbMix is the best text of nanochat's leaderboard: nothing to change there")
        return NextStep(text, "", "onecard", source=_("nanochat's leaderboard"))
    tokens = f"{max(run.tokens / 1e9, 1):.3g}B"  # a flag: the same in every language
    command = (
        f"onecard prepare fineweb --edu --tokens {tokens}"
        if "edu" not in known
        else (f"onecard prepare climbmix --tokens {tokens}")
    )
    return NextStep(text, command, "onecard", source=_("nanochat's leaderboard"))


def _sample(run: Run) -> NextStep:
    folder = shlex.quote(folder_of(run.facts))
    text = _("look at what it writes: ten samples say what a loss does not")
    command = f"onecard sample {folder}"
    if run.trainer == NANOGPT:
        command = f"python sample.py --out_dir={folder} --device=cuda --num_samples=10 --max_new_tokens=512"
    if run.trainer == NANOCHAT:
        command = "python -m scripts.base_eval"
    return NextStep(text, command, own_trainer(run) if run.trainer else "onecard")
