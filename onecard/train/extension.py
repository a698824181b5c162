"""A run that goes on beyond where it was to end: what its learning rate will do.

A schedule is written for a length. Stretched over a greater one, a run that had come to its end is in its
middle again, at many times the last rate, which undoes what the decay had brought. So a run whose rate would
rise is refused until `--extend` says what is meant. The rates themselves are optim/schedule.py's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onecard.config.knobs import from_values, sound
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.optim.schedule import (
    SCHEDULE,
    before_extension,
    extended_from,
    peak_rate,
    shown_rate,
    way_down,
    way_up,
)

if TYPE_CHECKING:
    from onecard.run.directory import RunDirectory
    from onecard.train.source import Source

_A_RISE = 1.01  # times what it was; less is the step a schedule takes anyway
_LEARNS_NOTHING = 0.01  # of the peak
_AGAIN = 0.5  # of the peak: a rewarm that forgets less than one to the full height


def extended(
    config: RunConfig, source: Source | None, directory: RunDirectory, notes: list[str]
) -> tuple[RunConfig, RunConfig | None]:
    """The config a run goes on with, where its extension begins included, and the one of its steps so far."""
    if source is None or not source.continues:
        _refuse_a_new_run(config)
        return config, None
    if source.checkpoint is not None:
        values, step = source.checkpoint.state["config"], source.checkpoint.step
    else:
        assert source.weights.nanogpt is not None
        values, step = source.weights.nanogpt.config, source.weights.nanogpt.step
    trained = _trained_with(values)
    if config.eval_only:
        return config, trained
    return continued(config, step, trained, directory.read_config(), notes), trained


def _trained_with(values: Mapping[str, Any]) -> RunConfig | None:
    """The config of the last step taken, as a checkpoint has it; None where it does not say."""
    needed = {"learning_rate", "max_iters", "lr_decay_iters", "warmup_iters", "min_lr", "decay_lr"}
    if not all(isinstance(values.get(name), int | float) for name in needed):
        return None
    try:
        return sound(from_values(RunConfig, values, {}))
    except (TypeError, ValueError) as error:
        raise UserError("the config saved with the checkpoint is damaged", str(error)) from None


def _refuse_a_new_run(config: RunConfig) -> None:
    if config.extend is not None:
        raise UserError(
            f"--extend={config.extend} has nothing to extend",
            "it goes on with a run, and this is a new one",
            f"leave it out, or name the run's folder: --out_dir=FOLDER --max_iters=STEPS {_flags(config)}",
        )


def continued(
    config: RunConfig, step: int, trained: RunConfig | None, recorded: RunConfig | None, notes: list[str]
) -> RunConfig:
    """The config that goes on from this step, with where its extension begins.

    `trained` is what the steps so far were taken with, `recorded` what the run was last started with: an
    extension that has begun there and not been saved yet, or lost its checkpoint, is the same one.
    """
    if trained is None:
        if config.extend is not None:
            raise UserError(
                f"what the steps until {step:,} were trained with is not known",
                "the checkpoint does not say; so there is no rate to go on from",
                "without --extend: the schedule as written",
            )
        return config
    if config.extend is None:
        _look_at_the_rate(config, step, trained, notes)
        return config
    if config.extend == "rewarm" and not config.extend_lr:
        raise UserError(
            "a rewarm needs the rate it goes up to",
            hint=f"half the peak: {_flags(proposal(trained, step, rewarm=True, config=config))}",
        )
    for earlier in (recorded, trained):
        if earlier is not None and earlier.extended and _is_the_same(config, earlier):
            config = dataclasses.replace(config, extended=earlier.extended)
            break
    else:
        config = _newly_extended(config, step, trained, notes)
    found = before_extension(config)
    assert found is not None
    if step < config.max_iters:
        begins, before = found
        last = shown_rate(max(begins - 1, 0), before)
        notes.append(
            f"extended at step {begins:,} (--extend={config.extend}): the learning rate was {_sci(last)} "
            f"until there, then {forecast(config)}"
        )
        if config.extend_lr is not None and config.extend_lr > _A_RISE * peak_rate(config):
            times = f"{config.extend_lr / peak_rate(config):.2g} times"
            notes.append(f"its peak is {times} the highest rate of the schedule, {_sci(peak_rate(config))}")
        if config.extend in ("stay", "decay") and last < _LEARNS_NOTHING * peak_rate(config):
            notes.append(
                f"that is {_part(last, config)}, so hardly anything is learned; "
                f"{_flags(proposal(trained, step))} goes up again"
            )
    return config


def _is_the_same(config: RunConfig, earlier: RunConfig) -> bool:
    same = all(getattr(config, name) == getattr(earlier, name) for name in ("extend", "extend_lr"))
    return same and config.max_iters <= earlier.max_iters


def _newly_extended(config: RunConfig, step: int, trained: RunConfig, notes: list[str]) -> RunConfig:
    if step >= config.max_iters or (config.max_iters <= trained.max_iters and trained.extend is None):
        further = 2 * max(trained.max_iters, step, 1)
        raise UserError(
            f"--extend={config.extend} has nothing to extend",
            f"the run is at step {step:,} and was to end at {trained.max_iters:,}; "
            f"now it is to end at {config.max_iters:,}",
            f"a later end: --max_iters={further} {_flags(config)}",
        )
    last = shown_rate(max(step - 1, 0), trained)
    if config.extend == "rewarm" and config.extend_lr is not None and config.extend_lr <= last * _A_RISE:
        raise UserError(
            f"--extend_lr={config.extend_lr:g} is not above the rate of the last step, {_sci(last)}",
            "a rewarm goes up to a peak, and down again",
            f"{_flags(proposal(trained, step, rewarm=True))}, or --extend=stay",
        )
    if (
        config.extend != "schedule"
        and config.is_set("lr_decay_iters")
        and config.lr_decay_iters != trained.lr_decay_iters
    ):
        notes.append(f"lr_decay_iters is not used: --extend={config.extend} says what the rate does")
    return extended_from(trained, step, config)


def _look_at_the_rate(config: RunConfig, step: int, trained: RunConfig, notes: list[str]) -> None:
    """Refused where it would rise because the run has become longer; said where it changes otherwise."""
    if not step or step >= config.max_iters or config.by_muon != trained.by_muon:
        return  # of two optimizers no rates compare
    last, was_to_be, now = shown_rate(step - 1, trained), shown_rate(step, trained), shown_rate(step, config)
    # What it would be without the new length: a rise beyond that is the length's doing.
    lengths: dict[str, Any] = {"max_iters": trained.max_iters, "lr_decay_iters": trained.lr_decay_iters}
    if not config.is_set("warmup_iters"):
        lengths["warmup_iters"] = trained.warmup_iters
    otherwise = shown_rate(step, dataclasses.replace(config, **lengths))
    longer = config.max_iters > trained.max_iters
    if now > _A_RISE * max(last, was_to_be, otherwise) and (longer or trained.extend is not None):
        raise _would_rise(config, step, trained, last, now)
    if longer:  # its hint is the very flag that would be refused
        notes[:] = [note for note in notes if note not in config.schedule_notes()]
    if now > _A_RISE * max(last, was_to_be):
        notes.append(_changed("rises", config, step, trained, last, now))
    elif now * _A_RISE < was_to_be:
        notes.append(_changed("falls", config, step, trained, last, now))
    elif longer and config.arch == "gpt2" and config.decay_lr and step >= config.lr_decay_iters:
        notes.append(
            f"the learning rate stays at {_sci(now)} (min_lr) to the end, step {config.max_iters:,}: "
            f"lr_decay_iters is {config.lr_decay_iters:,}"
        )


def _would_rise(config: RunConfig, step: int, trained: RunConfig, last: float, now: float) -> UserError:
    times = f" (×{now / last:.2g})" if last else ""
    ways = [dataclasses.replace(config, extend=way, extend_lr=None) for way in ("stay", "decay", "schedule")]
    ways.insert(1, proposal(trained, step, rewarm=True, config=config))
    if last < _LEARNS_NOTHING * peak_rate(trained):
        ways = [way for way in ways if way.extend not in ("stay", "decay")]
    rows = [(_flags(way), forecast(extended_from(trained, step, way))) for way in ways]
    width = max(len(flags) for flags, _ in rows)
    cause = f"--max_iters={config.max_iters}"
    why = f"the schedule is stretched over the whole new length: step {step:,} comes earlier in it"
    if config.max_iters <= trained.max_iters:
        cause, why = (
            f"leaving out --extend={trained.extend}",
            f"the schedule as written ends at {config.max_iters:,}",
        )
    if len(rows) < 4:
        why += f"\nthe last rate is {_part(last, trained)}: to stay there would teach it hardly anything"
    return UserError(
        f"{cause} would raise the learning rate from {_sci(last)} to {_sci(now)}{times} at step {step:,}",
        why,
        "say what it is to do\n" + "\n".join(f"{flags:<{width}}   {what}" for flags, what in rows),
    )


def _changed(how: str, config: RunConfig, step: int, trained: RunConfig, last: float, now: float) -> str:
    times = f" (×{now / last:.2g})" if last else ""
    other = [
        f"{name} is {_value(config, name)} now, {_value(trained, name)} before"
        for name in SCHEDULE
        if getattr(config, name) != getattr(trained, name)
    ]
    why = f": {', '.join(other)}" if other else ""
    return f"the learning rate {how} from {_sci(last)} to {_sci(now)}{times} at step {step:,}{why}"


def _value(config: RunConfig, name: str) -> str:
    value = getattr(config, name)
    return f"{value:g}" if isinstance(value, float) else "not set" if value is None else str(value)


def forecast(config: RunConfig) -> str:
    """What the rate of an extended run does until its end, in figures."""
    found = before_extension(config)
    assert found is not None
    begins, end = found[0], config.max_iters
    first = shown_rate(begins, config)
    if config.extend == "stay":
        return f"{_sci(first)} to the end (step {end:,})"
    if config.extend == "decay":
        level = end - way_down(begins, config)
        until = f"{_sci(first)} until step {level:,}, then " if level > begins else ""
        return f"{until}to 0 at {end:,}"
    if config.extend == "rewarm":
        top = min(begins + way_up(begins, config), end)
        return (
            f"up to {_sci(config.extend_lr or 0.0)} by step {top:,}, "
            f"down to {_sci(shown_rate(end, config))} at {end:,}"
        )
    return f"as written: {_sci(first)} at once, {_sci(shown_rate(end, config))} at {end:,}"


def proposal(
    trained: RunConfig, step: int, *, rewarm: bool = False, config: RunConfig | None = None
) -> RunConfig:
    """How to go on: where the last rate still teaches, at that; else up again, to half the peak."""
    last, config = shown_rate(max(step - 1, 0), trained), config or trained
    if not rewarm and last >= _LEARNS_NOTHING * peak_rate(trained):
        return dataclasses.replace(config, extend="stay", extend_lr=None)
    peak = _AGAIN * peak_rate(config)
    if last >= peak:
        peak = max((last + peak_rate(config)) / 2, 2 * _A_RISE * last if last >= peak_rate(config) else 0.0)
    return dataclasses.replace(config, extend="rewarm", extend_lr=float(f"{peak:.2g}"))


def further_flags(trained: RunConfig, step: int, steps: int) -> str:
    """The flags with which a finished run goes on until so many steps."""
    return f"--init_from=resume --max_iters={steps} {_flags(proposal(trained, step))}"


def _flags(config: RunConfig) -> str:
    peak = f" --extend_lr={config.extend_lr:g}" if config.extend_lr is not None else ""
    return f"--extend={config.extend}{peak}"


def _part(rate: float, config: RunConfig) -> str:
    return f"{rate / peak_rate(config):.2g} of the peak, {_sci(peak_rate(config))}"


def _sci(rate: float) -> str:
    """As 6e-05 or 3.5e-04: in figures that are told apart."""
    if not rate:
        return "0"
    figures, _, power = f"{rate:.1e}".partition("e")
    return f"{figures.removesuffix('.0')}e{power}"
