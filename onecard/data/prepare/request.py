"""What a user asks `onecard prepare` for, checked before anything is done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onecard.data.hub import catalogue
from onecard.data.prepare.sources import STDLIB
from onecard.errors import UserError

_COUNT = re.compile(r"(\d{1,3}(?:,\d{3})+|[\d_]*\.?\d+(?:e\d{1,2})?)\s*([kmbt]?)", re.IGNORECASE)
_LONGEST_NAME = 200  # bytes; a file system takes 255, and names of ours are made of it
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
    if why := _why_no_name(name):
        raise UserError(
            f"{name!r} cannot be the name of a dataset",
            f"it becomes a folder under data/, and {why}",
            "give another one, of letters, digits, - and _: --name NAME",
        )
    return name


def _why_no_name(name: str) -> str:
    if not name.strip():
        return "it is empty"
    if name.startswith("."):
        return "it begins with a dot, as hidden folders do"
    if bad := next((sign for sign in name if sign in '/\\:*?"<>|' or not sign.isprintable()), ""):
        return f"it holds {bad!r}"
    if name != name.strip() or name.endswith("."):
        return "it begins or ends with a space, or ends with a dot"
    return "it is too long" if len(name.encode()) > _LONGEST_NAME else ""


def refuse_odd_inputs(inputs: list[str]) -> None:
    """Paths that mean nothing, or the current folder by accident, as "" does."""
    for given in inputs:
        if not given.strip() or "\0" in given:
            raise UserError(
                f"{given!r} is no name of a file or folder",
                "a shell gives an empty name where a variable is not set" if not given.strip() else "",
                "for the current folder: onecard prepare . --name NAME",
            )


def checked_root(out_root: str | Path) -> Path:
    """The folder that holds all data sets, which may have yet to be made."""
    hint = "name the folder that shall hold all data sets, such as --out-root data"
    if not str(out_root).strip() or not str(out_root).isprintable():
        raise UserError(f"{str(out_root)!r} is no name of a folder", hint=hint)
    root = Path(out_root)
    there = next((path for path in (root, *root.parents) if path.exists()), root)
    if there.exists() and not there.is_dir():
        raise UserError(f"--out-root {root} cannot be a folder", f"{there} is a file", hint)
    return root


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
