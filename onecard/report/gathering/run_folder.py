"""Facts of a run's folder that its log.txt lacks: its config, its starts and the model it really has.

Read without torch, and leniently: a file that is missing or damaged costs a fact, never the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from onecard.arch.shapes import shape_from
from onecard.config.dataset import data_facts
from onecard.config.knobs import from_values, sound
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.files import load_json
from onecard.language import _
from onecard.report.gathering.known import ONECARD
from onecard.report.log import Evaluations, Log, Start, Steps
from onecard.run.directory import RunDirectory, read_json
from onecard.run.stored import json_lines

# From a start's first line nothing follows; the second one shows the pace, if only just.
_LEAST_LINES = 2
# A run cannot have more FLOPs a token: what says so is damaged.
_MOST_FLOPS = 10**18
# What reading a damaged file, and counting with its values, may end in.
_DAMAGE = (UserError, KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)


class RunFolder:
    """A run's folder, as far as it can be read."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    @property
    def path(self) -> str:
        return str(self._directory.path)

    def config(self) -> RunConfig | None:
        """The run's; where config.json is damaged the newest checkpoint's, as where it is lost."""
        for read in (self._directory.read_config, self._saved_config):
            try:
                if (config := read()) is not None:
                    return _sound(config)
            except _DAMAGE:
                continue
        return None

    def damage(self) -> str:
        """A message on a config.json that cannot be used; empty where it can, and where there is none."""
        path = self._directory.config_path
        try:
            content = load_json(path)
            if isinstance(content, dict) and "schema" not in content:
                return ""  # another program's, such as of Hugging Face: no concern of ours
            content = read_json(path)
            _sound(from_values(RunConfig, content["values"], content["set_by_user"]))
        except FileNotFoundError:
            return ""
        except (OSError, *_DAMAGE):
            return _("{path} is damaged or of another version, and is not used").format(path=path)
        return ""

    def facts_for(self, log: Log, config: RunConfig | None) -> Log:
        """The log with what its folder says. Its lines alone could be nanoGPT's: that it is onecard's own is
        known by its config or, where that is damaged, by the events."""
        device = self.device()
        if config is None and device is None:
            return log
        device = device or (config.device if config else None)
        facts = {**log.facts, "device": device, **self.model(config), **self.memory()}
        return replace(log, format=ONECARD, facts=facts)

    def device(self) -> str | None:
        """Where the run last began."""
        devices = [str(device) for event in self._events() if (device := event.get("device"))]
        return devices[-1] if devices else None

    def memory(self) -> dict[str, float]:
        """Tensors of the card at the newest setting's peak, as predicted and as measured."""
        found: dict[str, float] = {}
        for event in self._events():
            predicted, measured = event.get("predicted_gib"), event.get("measured_gib")
            if event.get("event") != "memory":
                continue
            if isinstance(predicted, int | float) and isinstance(measured, int | float):
                found = {"predicted_memory_gib": predicted, "peak_memory_gib": measured}
        return found

    def model(self, config: RunConfig | None) -> dict[str, Any]:
        """What the config may leave open, as facts of a log: the vocabulary is often the data's, and of a
        model that was not begun from scratch the sizes are its own."""
        if flops := self._planned_flops() or self._saved_flops():
            return {"flops_per_token": flops}
        if config is None or config.vocab_size is not None:
            return {}
        vocabulary = data_facts(config.dataset).vocabulary
        return {"vocab_size": vocabulary} if vocabulary is not None else {}

    def damaged_data(self, config: RunConfig | None) -> str:
        """A message where the vocabulary is that of data whose meta.json cannot be used."""
        if config is None or config.vocab_size is not None or self._planned_flops() or self._saved_flops():
            return ""
        return data_facts(config.dataset).problem

    def since_last_start(self, log: Log) -> Log:
        """The log with the last process as a start of its own: a run that goes on where it was stopped writes
        on as if nothing had been, and only its events show that these steps have a warm-up and perhaps a card
        of their own."""
        began, last = self._starts(), log.last
        for count in range(len(began), 0, -1):
            first = began[count - 1]
            since = [step >= first for step in last.steps.step]
            if sum(since) >= _LEAST_LINES:
                newest = Start(last.steps.where(since), _of(last.evaluations, first, since=True))
                before = Start(
                    last.steps.where([not after for after in since]),
                    _of(last.evaluations, first, since=False),
                )
                earlier = (*log.starts[:-1], *((before,) if len(before.steps) else ()))
                blanks = (Start(Steps(), Evaluations()),) * max(0, count - 1 - len(earlier))
                return replace(log, starts=(*blanks, *earlier, newest))
        return log

    def _starts(self) -> list[int]:
        """The step of each start, without those that found nothing to train."""
        began: list[int] = []
        for event in self._events():
            kind, step = event.get("event"), event.get("step")
            if not isinstance(step, int):
                continue
            if kind in ("started", "resumed"):
                began.append(step)
            elif kind in ("finished", "interrupted") and began and began[-1] == step:
                began.pop()
        return began

    def _events(self) -> Iterator[dict[str, Any]]:
        return json_lines(self._directory.events_path)

    def _planned_flops(self) -> int | None:
        """By the plan of the last start, which is there before the first checkpoint is."""
        try:
            return _believable((read_json(self._directory.plan_path) or {})["model"]["flops_per_token"])
        except (UserError, KeyError, TypeError, RecursionError):
            return None

    def _saved_config(self) -> RunConfig | None:
        """Of the newest checkpoint that has a whole one."""
        for path in self._directory.checkpoint_states():
            try:
                return _sound(from_values(RunConfig, (read_json(path) or {})["config"], {}))
            except _DAMAGE:
                continue
        return None

    def _saved_flops(self) -> int | None:
        """By the newest checkpoint."""
        for path in self._directory.checkpoint_states():
            try:
                state = read_json(path) or {}
                return _believable(shape_from(state["arch"], state["shape"], path).flops_per_token)
            except _DAMAGE:
                continue
        return None


def run_folder(source: str) -> RunFolder | None:
    """For a run's folder or the log.txt in it; None for what was pasted, and for any other file."""
    path = Path(source)
    if source == "-" or not (path.is_dir() or path.name == "log.txt"):
        return None
    return RunFolder(RunDirectory(path if path.is_dir() else path.parent))


def _of(evaluations: Evaluations, first: int, *, since: bool) -> Evaluations:
    return evaluations.where([(step >= first) is since for step in evaluations.step])


def _sound(config: RunConfig) -> RunConfig:
    """The config, if every value is one that its knob may have; ValueError or UserError otherwise."""
    sound(config)
    config.shape(config.vocab_size or 64)  # a shape refuses what it cannot be
    return config


def _believable(flops: Any) -> int | None:
    return flops if isinstance(flops, int) and 0 < flops < _MOST_FLOPS else None
