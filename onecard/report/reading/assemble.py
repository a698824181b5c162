"""A Log made of what the reader has seen."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from itertools import pairwise
from typing import Any

from onecard.report.log import NOT_SAID, Log, Planned, Start, Steps
from onecard.report.reading import formats
from onecard.report.reading.formats import KEY_VALUE, NANOGPT, ONECARD
from onecard.report.reading.reader import Reader
from onecard.report.reading.runs import OneStart, Runs, whole_curve

_OF_WORDS = ("data", "gpu", "tokenizer", "parameters_about")  # no sizes


def log_of(reader: Reader) -> Log | None:
    """The run that most rows are of; None without any."""
    with_rows = {family: runs for family, runs in reader.runs.items() if runs.rows}
    weak = (formats.CSV, formats.TABLE, KEY_VALUE)
    if not with_rows:
        return _first_step_alone(reader)
    family = max(with_rows, key=lambda name: (with_rows[name].rows, name not in weak))
    runs = with_rows[family]
    starts = [start for start in runs.starts if len(start)]
    name = reader.votes[family].most_common(1)[0][0] if reader.votes.get(family) else family
    if family in weak or family == formats.JSONL:
        starts = _in_order(starts)
        for start in starts if family != KEY_VALUE else ():
            _complete(start)
    name = _nanogpt_or_onecard(starts, reader.votes[family]) if family == NANOGPT else name
    curve = whole_curve(starts)
    planned = Planned()
    if family in (formats.CSV, formats.TABLE, formats.JSONL):
        curve, planned = _without_planned(curve)
    trained = [start for start in starts if len(start.steps)] or starts
    settings, facts, evidence = _said(reader, trained[-1], name)
    return Log(
        format=name,
        steps=curve.steps,
        evaluations=curve.evaluations,
        settings=settings,
        facts=facts,
        starts=(curve,) if len(starts) == 1 else tuple(Start(s.steps, s.evaluations) for s in starts),
        planned=planned,
        remarks=tuple(reader.remarks),
        evidence=evidence,
    )


def _said(
    reader: Reader, start: OneStart, name: str = ""
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The log's own words first, then the command line's, then those of prose."""
    settings = {**reader.prose.settings, **reader.commands, **start.settings}
    facts = {**reader.prose.facts, **start.facts}
    if name == formats.MODDED:  # its logs begin with its program: what looks like prose is code
        said = {
            known: reader.prose.settings[known] for known in reader.prose.settings if known == "optimizer"
        }
        settings = {**said, **reader.commands, **start.settings}
        facts = {known: facts[known] for known in facts if known in start.facts or known in _OF_WORDS}
    if "cards" not in facts and isinstance(cards := settings.get("nproc_per_node"), int):
        facts["cards"] = cards
    if isinstance(tokens := settings.get("eval_tokens"), int):
        facts.setdefault("eval_tokens", tokens)
    printed = {*start.settings, *start.facts}
    evidence = {**reader.prose.evidence, **reader.evidence}
    return settings, facts, {name: words for name, words in evidence.items() if name not in printed}


def _first_step_alone(reader: Reader) -> Log | None:
    """What people quote of a run that has just begun: "the first iteration took 27 seconds"."""
    if (ms := reader.prose.first_step_ms) is None:
        return None
    settings, facts, evidence = _said(reader, OneStart(reader.settings, reader.facts))
    start = Start(Steps(step=[0.0], ms=[ms]), whole_curve([OneStart()]).evaluations)
    return Log(KEY_VALUE, start.steps, start.evaluations, settings, facts, (start,), evidence=evidence)


def _in_order(starts: list[OneStart]) -> list[OneStart]:
    """People also list the newest first: then each row looks like another start."""
    if len(starts) > 2 and all(
        len(start) <= 2 and len(start.steps) < 2 and len(start.evaluations) < 2 for start in starts
    ):
        runs = Runs()
        for start in reversed(starts):
            for columns, sort in ((start.evaluations, "e"), (start.steps, "s")):
                for values in columns:
                    named = {n: v for n, v in zip(columns.NAMES, values, strict=True) if not math.isnan(v)}
                    if sort == "s" or "val" in named or "bpb" in named:
                        runs.add(named, start.settings, start.facts)
        return runs.starts
    return starts


def _complete(start: OneStart) -> None:
    """Where training losses stand in more rows than validation losses, they are the curve of all of them."""
    steps, done = start.steps, start.evaluations
    if not steps.has("loss") or not done.has("train"):
        return
    both = {name: list(getattr(steps, name)) for name in Steps.NAMES}
    more = done.where([not math.isnan(loss) for loss in done.train])
    for name, column in both.items():
        column += getattr(more, "train" if name == "loss" else name, None) or [NOT_SAID] * len(more)
    order = sorted(range(len(both["step"])), key=both["step"].__getitem__)
    merged = Steps()
    for name, column in both.items():
        setattr(merged, name, array("d", (column[place] for place in order)))
    twice = [a == b for a, b in pairwise(merged.step)]
    for place in (place for place, again in enumerate(twice) if again):
        if math.isnan(merged.loss[place]):
            merged.loss[place] = merged.loss[place + 1]
    start.steps = merged.where([True, *(not again for again in twice)]) if any(twice) else merged


def _without_planned(curve: Start) -> tuple[Start, Planned]:
    """Rows behind the last loss that have a rate or tokens: the schedule still to come."""
    steps, at = curve.steps, len(curve.steps)
    last = curve.evaluations.step[-1] if len(curve.evaluations) else -1.0
    while (
        at and math.isnan(steps.loss[at - 1]) and math.isnan(steps.ms[at - 1]) and steps.step[at - 1] > last
    ):
        at -= 1
    rest = steps.part(at, None)
    planned = Planned(step=rest.step, tokens=rest.tokens, lr=rest.lr)
    if not len(rest):
        return curve, planned
    kept = steps.part(None, at)
    assert isinstance(kept, Steps)
    return Start(kept, curve.evaluations), planned


def _nanogpt_or_onecard(starts: list[OneStart], votes: Counter[str]) -> str:
    """nanoGPT shows -100% at first and an MFU always; onecard never the one and not always the other."""
    steps = starts[-1].steps
    if any(mfu < 0 for start in starts for mfu in start.steps.mfu):
        return NANOGPT
    shown = [not math.isnan(mfu) for mfu in steps.mfu]
    of_onecard = votes[ONECARD] > 0 or starts[-1].facts.get("is_onecards", False)
    at_once = len(shown) > 0 and steps.step[0] == 0 and shown[0]
    return ONECARD if of_onecard or at_once else NANOGPT
