"""A run that has come to its end: where it ended, and the commands that come next; without torch."""

from __future__ import annotations

import shlex
from typing import Any

from onecard.config.run import RunConfig
from onecard.language import _
from onecard.run.directory import RunDirectory
from onecard.run.metrics import read_metrics
from onecard.train.extension import further_flags


def next_commands(config: RunConfig, further: str, *, has_tokenizer: bool = True) -> list[str]:
    """What people do with a finished run; `further` are the flags with which it trains on."""
    out = shlex.quote(config.out_dir)
    lines = []
    if has_tokenizer:  # without one there is no text
        lines.append(_("to generate text: {command}").format(command=f"onecard sample {out}"))
    if config.arch != "nanochat" or config.generation != 2026:  # which Hugging Face does not have
        command = f"onecard export {out} {shlex.quote(config.out_dir.rstrip('/') + '-hf')}"
        lines.append(_("to use it with Hugging Face: {command}").format(command=command))
    command = f"onecard train --out_dir={out} {further}"
    return [*lines, _("to train further: {command}").format(command=command)]


def finished_text(directory: RunDirectory, config: RunConfig) -> str:
    """Where a finished run ended, and what comes next; empty where it is not finished."""
    done = directory.newest_step()
    if done < max(config.max_iters, 1):
        return ""
    text = _("the run in {path} is finished: {done:,} of {steps:,} steps are done").format(
        path=directory.path, done=done, steps=config.max_iters
    )
    losses = [line for line in read_metrics(directory.metrics_path) if _is_number(line.get("val_loss"))]
    if losses:
        text += ", " + _("validation loss {loss:.4f}").format(loss=losses[-1]["val_loss"])
        if _is_number(bits := losses[-1].get("val_bpb")):
            text += " (" + _("{n:.4f} bits per byte").format(n=bits) + ")"
    return "\n".join([text, *next_commands(config, further_flags(config, done, 2 * done))])


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int)
