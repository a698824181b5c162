"""The way back to full speed in their own trainer: which settings run, and what each gains.

People begin with an emergency setting and turn things on again after some steps. What a step needs does not
change after the first ones, so a setting that runs at step 100 runs at step 0. Stages are settings in the
order of their speed, and mostly one is enough.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from onecard.language import _
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.options import Options
from onecard.plan.others.as_trainer import Priced, priced
from onecard.plan.search import Question
from onecard.plan.verdict import DESKTOP


@dataclass(frozen=True)
class Stage:
    """A setting of their trainer that runs on this card."""

    batch_size: int
    accumulation: int
    row: Priced
    share: float | None  # of the speed of the config as it was asked

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size, "gradient_accumulation_steps": self.accumulation,
            "compile": self.row.compiled, "total_gib": round(self.row.need / GIB, 4),
            "speed": round(self.share, 4) if self.share is not None else None,
        }  # fmt: skip


def stages_of(trainer: str, question: Question, target: Target, options: Options) -> list[Stage]:
    """The safest that runs, and what is faster and runs too, each with the same tokens a step; none: [].

    Safe is what leaves room for a desktop. Compiled settings come first: they need less and are faster.
    """
    config = question.config
    asked = priced(question, target, options, compiled=config.compile, trainer=trainer)
    found: list[Stage] = []
    for compiled in (True, False):
        for batch in range(config.batch_size, 0, -1):
            if config.sequences_per_step % batch:
                continue
            count = config.sequences_per_step // batch
            changed = dataclasses.replace(config, batch_size=batch, gradient_accumulation_steps=count)
            row = priced(
                dataclasses.replace(question, config=changed),
                target,
                options,
                compiled=compiled,
                trainer=trainer,
            )
            if not row.fits:
                continue
            share = row.step.tokens_per_s / asked.step.tokens_per_s if row.step and asked.step else None
            found.append(Stage(batch, count, row, share))
            if target.allowed - row.need >= DESKTOP * GIB:
                return found[::-1]
        if found:
            break
    return found[::-1]


def stages_in_words(stages: list[Stage], question: Question) -> list[str]:
    config = question.config
    if not stages:
        return [_("No setting of it runs on this card; the row of onecard does.")]
    first = stages[0]
    values = {"batch": first.batch_size, "count": first.accumulation, "gib": first.row.need / GIB}
    if first.batch_size == config.batch_size and first.row.compiled == config.compile:
        return [_("No stages are needed: the config runs as it is from step 0, with room for a desktop.")]
    if first.row.compiled:
        text = _(
            "No staged return is needed: compile stays on from step 0 with batch_size = {batch}, "
            "gradient_accumulation_steps = {count} ({gib:.2f} GiB)"
        )
    else:
        text = _(
            "Begin with compile = False, batch_size = {batch}, gradient_accumulation_steps = {count} "
            "({gib:.2f} GiB)"
        )
    said = text.format(**values)
    if first.share is not None:
        said += _(", {percent:+.0f}% speed").format(percent=100 * (first.share - 1))
    faster = [stage for stage in stages[1:] if stage.share is None or stage.share > (first.share or 0)]
    return [said + ".", *map(_faster, faster)]


def _faster(stage: Stage) -> str:
    text = _("Then, if nothing else takes the card: {batch} × {count}, {gib:.2f} GiB")
    said = text.format(batch=stage.batch_size, count=stage.accumulation, gib=stage.row.need / GIB)
    if stage.share is not None:
        said += _(", {percent:+.0f}% speed").format(percent=100 * (stage.share - 1))
    return said + "."
