"""The setting a run begins with, and the notes about it; or why there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.language import _, joined
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.search import Choice, Question, by_kind, chosen, pinned, smallest
from onecard.train.fit import Fit, in_words


def open_fit(question: Question, *, on_card: bool) -> Fit:
    """The setting to begin with. On a CPU the config as given: its memory is not a card's."""
    config = question.config
    given = question.answer(setting_of(config, question.shape))
    if not on_card:
        return Fit(question, given.setting, enabled=config.auto_fit, on_card=False)
    if not config.auto_fit:
        if not given.fits:
            raise _does_not_fit(question, given)
        return Fit(question, given.setting, enabled=False)
    found, exact = chosen(question)
    if found is None:
        raise _cannot_fit(question, smallest(exact))
    return Fit(question, found.setting, enabled=True)


def setting_notes(fit: Fit) -> list[str]:
    """What differs from the config as given, and why."""
    question, setting = fit.question, fit.setting
    given = question.answer(setting_of(question.config, question.shape))
    if setting == given.setting:
        return []
    need, now = (choice.bill.process / GIB for choice in (given, fit.choice))
    figures = {"setting": in_words(fit.choice), "need": need, "now": now, "have": question.allowed / GIB}
    if given.fits:
        gain = fit.choice.tokens_per_s / given.tokens_per_s - 1
        return [
            _(
                "running with {setting}: the same step, {gain:.0%} faster by prediction; it needs {now:.2f} "
                "GiB of {have:.2f} instead of {need:.2f} (auto_fit=False runs the config as given)"
            ).format(gain=gain, **figures)
        ]
    notes = [
        _(
            "the config as given needs {need:.2f} GiB of {have:.2f}: "
            "running with {setting} instead ({now:.2f} GiB)"
        ).format(**figures)
    ]
    if not setting.exact and given.setting.exact:
        notes.append(_("nothing exact fits: this is low-bit training (bf16 masters, int8 states)"))
    return notes


def plan_of(fit: Fit, *, on_card: bool) -> dict[str, Any]:
    """What is predicted for the run as it begins, under the names that `onecard plan --json` uses.

    A CPU's memory and speed are not predicted.
    """
    question, choice = fit.question, fit.choice
    step = choice.step if on_card else None
    left, allowed = question.config.max_iters, round(question.allowed / GIB, 4)
    return {
        "model": {
            "arch": question.shape.arch, "parameters": question.shape.parameters,
            "flops_per_token": question.shape.flops_per_token,
            "tokens_per_step": question.config.tokens_per_step, "max_iters": left,
        },
        "settings": choice.setting.to_json(),
        "as_given": fit.as_given,
        "memory": choice.bill.to_json() | {"allowed_gib": allowed} if on_card else None,
        "speed": {
            "tokens_per_s": round(step.tokens_per_s, 1), "step_s": round(step.seconds, 4),
            "mfu": round(step.mfu, 4) if step.mfu else None,
            "source": question.rates.source if question.rates else None,
        } if step else None,
        "time": {"seconds": round(left * step.seconds, 1)} if step else None,
    }  # fmt: skip


def _does_not_fit(question: Question, given: Choice) -> UserError:
    fitting = sorted((c for _name, c in by_kind(question) if c.fits), key=lambda c: -c.tokens_per_s)
    exact = [c for c in fitting if c.setting.exact] or fitting
    hints = [
        _("fits: {setting} ({pace})").format(setting=in_words(choice), pace=_pace(choice))
        for choice in exact[:3]
    ]
    if fitting:
        hints.append(_("auto_fit=True chooses by itself"))
    else:
        hints.append(_("nothing else fits either: {command}").format(command="onecard plan"))
    what = _("this config does not fit, and auto_fit is off")
    return UserError(what, _shortage(given), joined(hints, "\n"), exit_code=1)


def _cannot_fit(question: Question, nearest: Choice) -> UserError:
    """Whose fault it is: values the user pinned, or the model's size."""
    fixed = tuple(pinned(question.config))
    for names in (*((name,) for name in fixed), fixed):
        found, _exact = chosen(replace(question, config=_unpinned(question.config, names)))
        if names and found is not None:
            fixed_values = " ".join(f"--{name}={getattr(question.config, name)}" for name in names)
            return UserError(
                _("with {flags} it cannot fit").format(flags=fixed_values),
                _shortage(nearest),
                _("without: {setting}, {pace}").format(setting=in_words(found), pace=_pace(found)),
                exit_code=1,
            )
    return UserError(
        _("this model does not fit in any setting"),
        _shortage(nearest),
        _("a smaller n_layer or n_embd, or a shorter block_size; `onecard plan --largest` shows what fits"),
        exit_code=1,
    )


def _shortage(choice: Choice) -> str:
    lines = sorted(choice.bill.all_lines(), key=lambda line: -line.bytes)[:4]
    parts = joined(_("{what} {n:.2f}").format(what=_(line.name), n=line.gib) for line in lines)
    if choice.short <= 0:
        return _("{n:.1f} GiB of RAM are missing").format(n=choice.host_short / GIB)
    return _("{need:.2f} GiB are needed ({parts} ...), {there:.2f} are there").format(
        need=choice.bill.process / GIB, parts=parts, there=choice.question.allowed / GIB
    )


def _pace(choice: Choice) -> str:
    return _("{n:,.0f} tokens/s expected").format(n=choice.tokens_per_s)


def _unpinned(config: RunConfig, names: tuple[str, ...]) -> RunConfig:
    origins = {n: origin for n, origin in config.origins.items() if n not in names}
    changes: dict[str, Any] = {**dict.fromkeys(names), "origins": origins}
    return replace(config, **changes)


def process_bytes(allocator: float) -> int:
    """What the bill calls a process's memory, where tensors may take `allocator` bytes."""
    return int(allocator) + CONTEXT
