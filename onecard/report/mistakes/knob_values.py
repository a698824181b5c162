"""What a run's knobs were set to: by its log, its command line or prose, else by its config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from onecard.language import _, joined
from onecard.report.run_facts import RunFacts


def knob_value(facts: RunFacts, name: str) -> Any:
    """A knob's value; None where nobody says it. A config says all of its knobs, its defaults among them."""
    value = facts.log.settings.get(name)
    if value is None and facts.config is not None:
        value = getattr(facts.config, name, None)
    return value


def numeric(facts: RunFacts, name: str) -> float | None:
    value = knob_value(facts, name)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def is_default(facts: RunFacts, name: str) -> bool:
    """Is it a config's, and nobody set it there or elsewhere?"""
    return name not in facts.log.settings and facts.config is not None and not facts.config.is_set(name)


def evidence_of(facts: RunFacts, **values: object) -> str:
    """`name = value` for each, with the words that it was read from where these are not the same."""

    def parts() -> Iterator[str]:
        for name, value in values.items():
            shown = f"{name} = {_plain(value)}"
            words = facts.log.evidence.get(name, "")
            if words and words.replace(" ", "") != shown.replace(" ", ""):
                yield _("{shown} (“{words}”)").format(shown=shown, words=words)
            elif is_default(facts, name):
                yield _("{shown} (the default, not set)").format(shown=shown)
            else:
                yield shown

    return joined(parts())


def names_in(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """(where, text) of all that a person may have called the run by."""
    seen = set()
    for where in ("out_dir", "wandb_run_name", "run", "run_name", "config", "output_dir", "title", "name"):
        for value in (
            facts.log.settings.get(where),
            facts.log.facts.get(where),
            getattr(facts.config, where, None),
        ):
            if isinstance(value, str) and value and value not in seen:
                if where == "wandb_run_name" and is_default(facts, where):
                    continue
                seen.add(value)
                yield where, value
    for where, value in (("", facts.source), ("", facts.folder)):
        last = value.replace("\\", "/").rstrip("/").rpartition("/")[2]
        if last and last not in seen:
            seen.add(last)
            yield where, last


def line(name: str, value: object, was: object = None) -> str:
    """A config line to change."""
    end = f"   # was {_plain(was)}" if was is not None else ""
    return f"{name} = {_plain(value)}{end}"


def _plain(value: object) -> str:
    """As a config file has it."""
    if isinstance(value, float):
        return f"{int(value)}" if value.is_integer() and abs(value) < 1e15 else f"{value:g}"
    return str(value)
