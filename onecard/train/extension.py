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
from onecard.language import _, joined, number
from onecard.optim.schedule import (
    SCHEDULE,
    before_extension,
    decay_steps,
    extended_from,
    peak_rate,
    rewarm_steps,
    shown_rate,
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
        raise UserError(_("the config saved with the checkpoint is damaged"), str(error)) from None


def _refuse_a_new_run(config: RunConfig) -> None:
    if config.extend is not None:
        raise UserError(
            _("{flag} has nothing to extend").format(flag=f"--extend={config.extend}"),
            _("it goes on with a run, and this is a new one"),
            _("leave it out, or name the run's folder: {flags}").format(
                flags=f"--out_dir=FOLDER --max_iters=STEPS {_flags(config)}"
            ),
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
                _("the config of the steps until {step:,} is not known").format(step=step),
                _("the checkpoint does not have it; so there is no rate to go on from"),
                _("without --extend: the schedule as written"),
            )
        return config
    if config.extend is None:
        _look_at_the_rate(config, step, trained, notes)
        return config
    if config.extend == "rewarm" and not config.extend_lr:
        raise UserError(
            _("a rewarm needs the rate it goes up to"),
            hint=_("half the peak: {flags}").format(
                flags=_flags(proposal(trained, step, rewarm=True, config=config))
            ),
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
            _(
                "extended at step {step:,} ({flag}): the learning rate was {rate} until there, "
                "then {forecast}"
            ).format(
                step=begins, flag=f"--extend={config.extend}", rate=_sci(last), forecast=forecast(config)
            )
        )
        if config.extend_lr is not None and config.extend_lr > _A_RISE * peak_rate(config):
            notes.append(
                _("its peak is {n:.2g} times the highest rate of the schedule, {rate}").format(
                    n=config.extend_lr / peak_rate(config), rate=_sci(peak_rate(config))
                )
            )
        if config.extend in ("stay", "decay") and last < _LEARNS_NOTHING * peak_rate(config):
            notes.append(
                _("that is {part}, so hardly anything is learned; {flags} goes up again").format(
                    part=_part(last, config), flags=_flags(proposal(trained, step))
                )
            )
    return config


def _is_the_same(config: RunConfig, earlier: RunConfig) -> bool:
    same = all(getattr(config, name) == getattr(earlier, name) for name in ("extend", "extend_lr"))
    return same and config.max_iters <= earlier.max_iters


def _newly_extended(config: RunConfig, step: int, trained: RunConfig, notes: list[str]) -> RunConfig:
    if step >= config.max_iters or (config.max_iters <= trained.max_iters and trained.extend is None):
        further = 2 * max(trained.max_iters, step, 1)
        raise UserError(
            _("{flag} has nothing to extend").format(flag=f"--extend={config.extend}"),
            _("the run is at step {step:,} and was to end at {before:,}; now it is to end at {now:,}").format(
                step=step, before=trained.max_iters, now=config.max_iters
            ),
            _("a later end: {flags}").format(flags=f"--max_iters={further} {_flags(config)}"),
        )
    last = shown_rate(max(step - 1, 0), trained)
    if config.extend == "rewarm" and config.extend_lr is not None and config.extend_lr <= last * _A_RISE:
        raise UserError(
            _("{flag} is not above the rate of the last step, {rate}").format(
                flag=f"--extend_lr={config.extend_lr:g}", rate=_sci(last)
            ),
            _("a rewarm goes up to a peak, and down again"),
            _("{flags}, or --extend=stay").format(flags=_flags(proposal(trained, step, rewarm=True))),
        )
    if (
        config.extend != "schedule"
        and config.is_set("lr_decay_iters")
        and config.lr_decay_iters != trained.lr_decay_iters
    ):
        notes.append(
            _("lr_decay_iters is not used: {flag} says what the rate does").format(
                flag=f"--extend={config.extend}"
            )
        )
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
        notes.append(
            _("the learning rate rises from {last} to {now}{times} at step {step:,}{why}").format(
                **_change(config, step, trained, last, now)
            )
        )
    elif now * _A_RISE < was_to_be:
        notes.append(
            _("the learning rate falls from {last} to {now}{times} at step {step:,}{why}").format(
                **_change(config, step, trained, last, now)
            )
        )
    elif longer and config.arch == "gpt2" and config.decay_lr and step >= config.lr_decay_iters:
        notes.append(
            _(
                "the learning rate stays at {rate} (min_lr) to the end, step {step:,}: "
                "lr_decay_iters is {n:,}"
            ).format(rate=_sci(now), step=config.max_iters, n=config.lr_decay_iters)
        )


def _would_rise(config: RunConfig, step: int, trained: RunConfig, last: float, now: float) -> UserError:
    choices = [dataclasses.replace(config, extend=e, extend_lr=None) for e in ("stay", "decay", "schedule")]
    choices.insert(1, proposal(trained, step, rewarm=True, config=config))
    if last < _LEARNS_NOTHING * peak_rate(trained):
        choices = [choice for choice in choices if choice.extend not in ("stay", "decay")]
    rows = [(_flags(choice), forecast(extended_from(trained, step, choice))) for choice in choices]
    width = max(len(flags) for flags, _forecast in rows)
    what = _("{flag} would raise the learning rate from {last} to {now}{times} at step {step:,}")
    flag = f"--max_iters={config.max_iters}"
    why = _("the schedule is stretched over the whole new length: step {step:,} comes earlier in it").format(
        step=step
    )
    if config.max_iters <= trained.max_iters:
        what = _("without {flag} the learning rate would rise from {last} to {now}{times} at step {step:,}")
        flag = f"--extend={trained.extend}"
        why = _("the schedule as written ends at {step:,}").format(step=config.max_iters)
    if len(rows) < 4:
        low = _("the last rate is {part}: to stay there would teach it hardly anything").format(
            part=_part(last, trained)
        )
        why = joined([why, low], "\n")
    return UserError(
        what.format(flag=flag, last=_sci(last), now=_sci(now), times=_times(last, now), step=step),
        why,
        joined([_("choose what it is to do"), *(joined([f"{f:<{width}}", w], "   ") for f, w in rows)], "\n"),
    )


def _times(last: float, now: float) -> str:
    return _(" (×{n:.2g})").format(n=now / last) if last else ""


def _change(config: RunConfig, step: int, trained: RunConfig, last: float, now: float) -> dict[str, Any]:
    other = [
        _("{name} is {now} now, {before} before").format(
            name=name, now=_value(config, name), before=_value(trained, name)
        )
        for name in SCHEDULE
        if getattr(config, name) != getattr(trained, name)
    ]
    why = joined([": ", joined(other)], "") if other else ""
    return {"last": _sci(last), "now": _sci(now), "times": _times(last, now), "step": step, "why": why}


def _value(config: RunConfig, name: str) -> str:
    value = getattr(config, name)
    if value is None:
        return _("not set")
    return number(value, "g") if isinstance(value, float) else str(value)


def forecast(config: RunConfig) -> str:
    """What the rate of an extended run does until its end, in figures."""
    found = before_extension(config)
    assert found is not None
    begins, end = found[0], config.max_iters
    first = shown_rate(begins, config)
    if config.extend == "stay":
        return _("{rate} to the end (step {step:,})").format(rate=_sci(first), step=end)
    if config.extend == "decay":
        level = end - decay_steps(begins, config)
        if level <= begins:
            return _("to 0 at {step:,}").format(step=end)
        return _("{rate} until step {level:,}, then to 0 at {step:,}").format(
            rate=_sci(first), level=level, step=end
        )
    if config.extend == "rewarm":
        top = min(begins + rewarm_steps(begins, config), end)
        return _("up to {rate} by step {top:,}, down to {last} at {step:,}").format(
            rate=_sci(config.extend_lr or 0.0), top=top, last=_sci(shown_rate(end, config)), step=end
        )
    return _("as written: {rate} at once, {last} at {step:,}").format(
        rate=_sci(first), last=_sci(shown_rate(end, config)), step=end
    )


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
    return _("{part:.2g} of the peak, {rate}").format(
        part=rate / peak_rate(config), rate=_sci(peak_rate(config))
    )


def _sci(rate: float) -> str:
    """As 6e-05 or 3.5e-04: as many figures as set rates apart."""
    if not rate:
        return "0"
    return number(rate, ".0e" if f"{rate:.1e}".partition("e")[0].endswith(".0") else ".1e")
