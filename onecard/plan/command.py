"""`onecard plan`: the question put together, the answer printed. Data on stdout, notes on stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, TextIO

from onecard.config.dataset import data_facts
from onecard.config.run import RunConfig
from onecard.config.vocabulary import other_vocabulary
from onecard.language import _, english
from onecard.plan.answer import Answer, answer, check_horizon
from onecard.plan.depth import depths_to_json, find_depths, is_depth_question
from onecard.plan.largest import find_largest
from onecard.plan.lines import GIB
from onecard.plan.machine import Figures, Target, find_target
from onecard.plan.options import Options, budget_seconds
from onecard.terminal import columns, folded, say, show, show_json
from onecard.terminal import console as careful_console

_WEEK = 7 * 86400.0


def plan_command(
    options: Options, words: Sequence[str], load: Callable[[Sequence[str]], tuple[RunConfig, int, str]]
) -> int:
    """`load` reads a config out of the words, how many steps of it are done, and what to say where it is
    finished: unless something is asked about its setting or another model, that is the answer then."""
    with english(options.json):
        config, done, finished = load(words)
        if finished and not options.is_detailed:
            show(folded(finished))
            return 0
        return _plan(replace(options, steps_done=done), config)


def _plan(options: Options, config: RunConfig) -> int:
    sizes = options.largest or options.by is not None
    figures = Figures(options.tflops, options.bandwidth, options.watts)
    target = find_target(config, options.gpu, options.host_ram, figures)
    for note in _notes(config, options, target):
        say(_("note: {text}").format(text=note))
    now = datetime.now()
    check_horizon(config)
    if options.as_ is not None:
        from onecard.plan.others.as_trainer import as_trainer

        return as_trainer(options.as_, config, target, options, now)
    found = answer(config, target, options, now)
    if not sizes and is_depth_question(config, options):
        return _depths(config, found, options, now)
    if sizes:
        return _largest(found, options, now)
    if options.json:
        show_json(json.dumps(found.to_json(), indent=1))
    else:
        from onecard.plan.show import show

        show(found, console())
    return 0 if found.fits else 1


def _depths(config: RunConfig, found: Answer, options: Options, now: datetime) -> int:
    """`found` is what the same words would train."""
    depths = find_depths(config, options, found.target, now)
    if options.json:
        show_json(json.dumps(found.to_json() | depths_to_json(depths), indent=1))
    else:
        from onecard.plan.depth import show_depths

        show_depths(depths, console())
    return 0 if found.fits else 1


def _largest(found: Answer, options: Options, now: datetime) -> int:
    seconds = budget_seconds(options.by, now) if options.by is not None else _WEEK
    largest = find_largest(found, seconds)
    if options.json:
        show_json(json.dumps(largest.to_json(found.host_to_json()), indent=1))
        return 0 if largest.largest else 1
    from onecard.plan.tables import show_largest

    show_largest(found, largest, console())
    return 0


def _notes(config: RunConfig, options: Options, target: Target) -> list[str]:
    """What to know before the answer is read."""
    notes = list(config.notes)
    data = data_facts(config.dataset)
    if other := other_vocabulary(config, data.vocabulary):
        notes.append(other)
    if data.problem:
        notes.append(data.problem)
    if options.watts is not None and not target.is_laptop:
        notes.append(
            _("--watts counts for energy and money alone: a card held to less power is slower than this")
        )
    if config.eval_only:
        notes.append(
            _(
                "with eval_only=True train would only evaluate: whether it fits, the time and the cost here "
                "are those of training without eval_only"
            )
        )
    if target.limit is not None and target.limit_beyond_card:
        beyond = _("--vram_limit is {limit:.2f} GiB, and the card has {n:.2f}: that is planned with")
        notes.append(beyond.format(limit=target.limit / GIB, n=target.capacity / GIB))
    return notes


def console() -> Any:
    file: Any = sys.stdout if sys.stdout.isatty() else _Trimmed(sys.stdout)
    return careful_console(file, width=columns(of_a_pipe=160))


class _Trimmed:
    """Without the spaces that fill a table's last column: in a file or an issue they are dirt."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r"[ \t]+(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
