"""Sources of facts: options, a log's knobs (under nanoGPT's names, whatever its trainer's), a config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from onecard.config.run import RunConfig
from onecard.language import _
from onecard.report.gathering.known import Known
from onecard.report.log import Log

Value = int | float | str

# By nanoGPT's name, what other trainers call it (log.settings has the trainer's own names).
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("device_batch_size", "per_device_train_batch_size", "micro_batch_size"),
    "block_size": (
        "max_seq_len", "max_seq_length", "sequence_length", "sequence_len", "seq_len", "seq_length",
        "context_length", "n_ctx",
    ),
    "gradient_accumulation_steps": ("grad_accum_steps", "gradient_accumulation", "grad_accum"),
    "tokens_per_step": ("total_batch_size", "tokens_per_iter", "tokens_per_step_about"),
    "max_iters": ("num_iterations", "max_steps", "num_steps", "train_steps"),
    "n_layer": ("num_layers", "n_layers", "num_hidden_layers", "depth"),
    "n_head": ("num_heads", "n_heads", "num_attention_heads"),
    "n_embd": ("hidden_size", "d_model", "model_dim"),
    "vocab_size": ("padded_vocab_size",),
    "learning_rate": ("lr", "max_lr", "peak_lr"),
    "min_lr": ("lr_min",),
    "warmup_iters": ("warmup_steps", "num_warmup_steps", "lr_warmup_steps"),
    "eval_interval": ("eval_every", "eval_steps", "val_loss_every"),
    "eval_tokens": ("val_tokens",),
    "train_tokens": ("train_tokens_about",),
    "parameters": ("parameters_in_all", "parameters_about"),
    "lr_scheduler_type": ("lr_scheduler",),
    "cards": ("nproc_per_node", "gpus", "num_gpus", "world_size", "ddp_world_size"),
    "compile": ("torch_compile", "compiled"),
    "dataset": ("data", "dataset_name"),
    "optimizer": ("optim",),
}  # fmt: skip
_MOST = 10**15


def said(log: Log, name: str) -> tuple[str, Value] | None:
    """(the name it has there, its value), from the log's settings or facts."""
    for known_as in (name, *OTHER_NAMES.get(name, ())):
        for table in (log.settings, log.facts):
            if isinstance(value := table.get(known_as), bool | int | float | str):
                return known_as, value
    return None


def whole(value: object) -> int | None:
    """A number of things; None for what cannot be one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and 0 < value < _MOST else None


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def switch(value: object) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


def word(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def origin_of(log: Log, name: str) -> str:
    """Where the log has it from: its trainer's own words, a command line shown in it, or prose."""
    words = log.evidence.get(name)
    if words is None:
        return "log"
    return "command" if "--" in words or words.lstrip("$ ").startswith(("python", "torchrun")) else "prose"


T = TypeVar("T")


@dataclass
class Sources:
    """Facts as they come in: the first source that says one counts, and a later one that differs is named."""

    log: Log
    known: Known
    config: RunConfig | None
    config_origin: str
    origin: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def first(self, name: str, *sources: tuple[str, T | None]) -> T | None:
        for where, value in sources:
            if value is not None:
                self.origin[name] = where
                return value
        return None

    def in_log(self, name: str, read: Callable[[Any], T | None]) -> tuple[str, T | None]:
        entry = said(self.log, name)
        if entry is None:
            return "log", None
        return origin_of(self.log, entry[0]), read(entry[1])

    def in_config(self, name: str) -> tuple[str, Any]:
        return self.config_origin, getattr(self.config, name) if self.config is not None else None

    def of(self, name: str, read: Callable[[Any], T | None]) -> T | None:
        """By an option, the log, the config, in this order."""
        given = getattr(self.known, name, None)
        ours, theirs = self.in_log(name, read), self.in_config(name)
        if ours[1] is not None and theirs[1] is not None and self.config is not None and given is None:
            self.compare(name, ours[1], theirs[1])
        return self.first(name, ("flag", given), ours, theirs)

    def own(self, name: str) -> tuple[str, Any]:
        """What the config itself sets: a default is not said."""
        stated = self.config is not None and (self.config.is_set(name) or self.config_origin == "folder")
        return self.config_origin, getattr(self.config, name) if stated else None

    def compare(self, name: str, by_log: Any, by_config: Any) -> None:
        assert self.config is not None
        if by_log is not None and by_log != by_config and self.config.is_set(name):
            text = _("{name} is {log} in the log and {config} in the config: the log counts")
            self.notes.append(text.format(name=name, log=by_log, config=by_config))
