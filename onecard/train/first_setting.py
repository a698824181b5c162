"""The setting a run begins with, and what is told about it; or why there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.search import Choice, Question, by_kind, chosen, pinned, smallest
from onecard.train.fit import Fit


def open_fit(question: Question, *, on_card: bool) -> Fit:
    """The setting to begin with. On a CPU the config as it stands: its memory is not a card's."""
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


def told_at_start(fit: Fit) -> list[str]:
    """What differs from the config as it stands, and why."""
    question, setting = fit.question, fit.setting
    given = question.answer(setting_of(question.config, question.shape))
    if setting == given.setting:
        return []
    need, there = (f"{choice.bill.process / GIB:.2f}" for choice in (given, fit.choice))
    have = f"{question.allowed / GIB:.2f} GiB"
    if given.fits:
        gain = fit.choice.tokens_per_s / given.tokens_per_s - 1
        return [
            f"running with {fit.choice.words}: the same step, {gain:.0%} faster by prediction, {there} GiB "
            f"of {have} instead of {need} (auto_fit=False runs it as it stands)"
        ]
    told = [f"as it stands it needs {need} of {have}: running with {fit.choice.words} instead ({there} GiB)"]
    if not setting.exact and given.setting.exact:
        told.append("nothing exact fits: this is low-bit training (bf16 masters, int8 states)")
    return told


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
    hint = "\n".join(f"fits: {choice.words} ({_pace(choice)})" for choice in exact[:3])
    hint += "\nauto_fit=True chooses by itself" if fitting else "nothing else fits either: onecard plan"
    return UserError("this config does not fit, and auto_fit is off", _shortage(given), hint, exit_code=1)


def _cannot_fit(question: Question, nearest: Choice) -> UserError:
    """Whose fault it is: values the user pinned, or the model's size."""
    fixed = tuple(pinned(question.config))
    for names in (*((name,) for name in fixed), fixed):
        found, _ = chosen(replace(question, config=_unpinned(question.config, names)))
        if names and found is not None:
            said = " and ".join(f"{name}={getattr(question.config, name)}" for name in names)
            return UserError(
                f"with {said} it cannot fit",
                _shortage(nearest),
                f"without: {found.words}, {_pace(found)}",
                exit_code=1,
            )
    return UserError(
        "this model does not fit in any setting",
        _shortage(nearest),
        "a smaller n_layer or n_embd, or a shorter block_size; `onecard plan --largest` says what fits",
        exit_code=1,
    )


def _shortage(choice: Choice) -> str:
    lines = sorted(choice.bill.all_lines(), key=lambda line: -line.bytes)[:4]
    parts = ", ".join(f"{line.name} {line.gib:.2f}" for line in lines)
    have = choice.question.allowed / GIB
    if choice.short <= 0:
        return f"{choice.host_short / GIB:.1f} GiB of host memory are missing"
    return f"{choice.bill.process / GIB:.2f} GiB are needed ({parts} ...), {have:.2f} are there"


def _pace(choice: Choice) -> str:
    return f"{choice.tokens_per_s:,.0f} tokens/s expected"


def _unpinned(config: RunConfig, names: tuple[str, ...]) -> RunConfig:
    origins = {n: origin for n, origin in config.origins.items() if n not in names}
    changes: dict[str, Any] = {**dict.fromkeys(names), "origins": origins}
    return replace(config, **changes)


def process_bytes(allocator: float) -> int:
    """What the bill calls a process's memory, where tensors may take `allocator` bytes."""
    return int(allocator) + CONTEXT
