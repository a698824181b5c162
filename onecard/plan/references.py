"""Losses others have published: what a run is judged by, and what scaling.py was fitted to."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

UNITS = ("nats", "bpb")


@dataclass(frozen=True)
class Reference:
    """One row of references.toml: a loss that a known model had after so many tokens."""

    model: str
    parameters: int
    data: str
    tokenizer: str
    tokens: float | None  # None where the source does not say
    loss: float
    unit: str  # nats (per token) or bpb (bits per byte)
    split: str
    lr: float | None  # over its peak, where the loss was read: 0 at the end of a decay; None: not said
    source: str


@cache
def all_references() -> tuple[Reference, ...]:
    """Every row of references.toml, in the file's order."""
    text = resources.files(__package__).joinpath("references.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return tuple(_reference(dict(zip(table["columns"], row, strict=True))) for row in table["rows"])


def _reference(row: dict[str, Any]) -> Reference:
    # Millions and billions in the file, as sources give them; whole counts everywhere else.
    parameters = round(row.pop("parameters_m") * 1e6)
    billions = row.pop("tokens_b")
    tokens = None if billions == "" else float(round(billions * 1e9))
    lr = None if row["lr"] == "" else float(row["lr"])
    return Reference(parameters=parameters, tokens=tokens, **{**row, "loss": float(row["loss"]), "lr": lr})
