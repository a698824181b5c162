"""What a user asks `onecard prepare` for, checked before anything is done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onecard.data.hub import catalogue
from onecard.data.prepare.sources import STDLIB
from onecard.errors import UserError

_COUNT = re.compile(r"(\d{1,3}(?:,\d{3})+|[\d_]*\.?\d+(?:e\d{1,2})?)\s*([kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    folder: Path
    inputs: list[str]
    named: catalogue.NamedDataset | None
    tokenizer: str  # a name of tokenizer.NAMES, or "bpe" to be trained
    train_tokenizer: int | None
    text_column: str
    val_fraction: float | None
    tokens: int | None
    keep: bool
    force: bool
    show: bool


def named_dataset(inputs: list[str], dump: str | None, edu: bool) -> catalogue.NamedDataset | None:
    """A dataset known by name; a file or folder of that name that is there goes first."""
    if len(inputs) == 1 and inputs[0] in catalogue.NAMES and not Path(inputs[0]).exists():
        return catalogue.lookup(inputs[0], dump=dump, edu=edu)
    if dump is not None or edu:
        flag = "--dump" if dump is not None else "--edu"
        raise UserError(f"{flag} belongs to fineweb", hint=f"onecard prepare fineweb {flag} …")
    return None


def dataset_name(inputs: list[str], name: str | None, named: catalogue.NamedDataset | None = None) -> str:
    """The folder under data/."""
    if not inputs:
        raise UserError(
            "nothing to prepare",
            hint=f"onecard prepare FILES-OR-FOLDERS, or one of: {STDLIB}, {', '.join(catalogue.NAMES)}",
        )
    if name is None:
        if len(inputs) > 1:
            raise UserError(
                "several inputs need a name", hint=f"onecard prepare {' '.join(inputs)} --name NAME"
            )
        if named is not None:
            name = f"{named.name}-edu" if named.edu else named.name
        else:
            name = _name_of(inputs[0])
    if not name or name.startswith(".") or any(sign in name for sign in '/\\:*?"<>|\0'):
        raise UserError(f"{name!r} cannot be the name of a dataset", "it becomes a folder under data/")
    return name


def _name_of(given: str) -> str:
    path = Path(given)
    if given != STDLIB and path.is_dir():
        return path.resolve().name
    for ending in (".gz", ".zst"):
        path = path.with_suffix("") if path.suffix.lower() == ending else path
    return path.stem


def parse_count(text: str) -> int:
    """3.2B, 100M, 65k, 1e9, 3_200_000: a number of tokens."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{text!r} is not a number of tokens", hint="such as 3.2B, 100M or 65536")
    return round(float(match[1].replace("_", "").replace(",", "")) * _UNITS[match[2].lower()])
