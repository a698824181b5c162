"""Why there are no tokens to train on, and the command that prepares some, with what it downloads."""

from __future__ import annotations

import difflib
from pathlib import Path

from onecard.config.dataset import OWN_TOKENS
from onecard.config.knobs import load_config
from onecard.config.vocabulary import DataRecipe, value_in
from onecard.data.hub.catalogue import NAMES, lookup
from onecard.data.meta import JOURNAL_NAME, Split, datasets_in, split_files
from onecard.data.prepare.options import PrepareOptions
from onecard.errors import UserError
from onecard.language import _

_WITH_ITS_SIZE = {name: name for name in ("stdlib", *NAMES)} | {"fineweb": "fineweb --tokens 3.2B"}


def missing_data(data_dir: Path, split: Split, recipe: DataRecipe) -> UserError:
    if (data_dir / JOURNAL_NAME).exists():
        return UserError(
            _("{folder} is not finished yet").format(folder=data_dir),
            _("it is being prepared, or that was interrupted"),
            _("run the same onecard prepare again: it continues"),
        )
    known, name = datasets_in(data_dir.parent), data_dir.name
    there = _("datasets under {folder}: {names}")
    listing = there.format(folder=data_dir.parent, names=", ".join(known)) if known else ""
    if near := difflib.get_close_matches(name, known, n=1):
        listing += "; " + _("did you mean {near}?").format(near=near[0])
    command = f"onecard prepare {_WITH_ITS_SIZE.get(name, f'FILES-OR-FOLDER --name {name}')}"
    if recipe.flags and name not in OWN_TOKENS:
        command += f" {recipe.flags}"
    hints = [recipe.command or command]
    if size := _download_gb(hints[0]):
        hints.append(_("it downloads about {n:,.1f} GB; fewer --tokens take less").format(n=size))
    if not recipe.flags:  # nanoGPT's own are in GPT-2's tokens
        text = _("or put nanoGPT's {folder} here: its train.bin and val.bin work as they are")
        hints.append(text.format(folder=data_dir))
    if not data_dir.is_dir():
        what = _("there is no dataset {folder}").format(folder=data_dir)
    elif split == "val" and split_files(data_dir, "train"):
        what = _("{folder} has training tokens but no val.bin").format(folder=data_dir)
    else:
        what = _("{folder} holds no {file}").format(folder=data_dir, file=f"{split}.bin")
    return UserError(what, listing, "\n".join(hints))


def _download_gb(command: str) -> float:
    """GB of parquet that a `prepare` of a dataset known by name reads; 0 where that is not known."""
    try:
        source = lookup(command.split()[2])
        said = value_in(command, "--tokens")
        tokens = load_config(PrepareOptions, [f"--tokens={said}"]).tokens if said else source.all_tokens
    except (KeyError, IndexError, UserError):
        return 0.0
    return (tokens or 0) * source.parquet_bytes_per_token / 1e9
