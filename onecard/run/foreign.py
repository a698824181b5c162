"""Whose folder is it? A run writes only into its own and into new ones."""

from __future__ import annotations

import re
from pathlib import Path

from onecard.errors import UserError
from onecard.files import load_json
from onecard.language import _
from onecard.run.stored import json_lines

# What a run leaves in its folder, and what nanoGPT leaves in the one it may go on from.
_WITH_A_SCHEMA = ("config.json", "plan.json", "metrics.jsonl", "events.jsonl")
_OTHERS = ("job.json", "log.txt", "pause", "paused", "ckpt.pt")
_IN_FOLDERS = {
    "checkpoints": re.compile(r"(damaged-)?step-\d+|\.(building|removing|replaced)-.*"),
    "samples": re.compile(r"step-\d+\.txt"),
}
# In a run's folder people keep its config too, and what its terminal said.
_HARMLESS = {".py", ".log", ".out", ".err", ".txt", ".md"}
_SHOWN = 5


def is_run(folder: Path) -> bool:
    """Does a run of onecard's or of nanoGPT's lie there, or what is left of one?"""
    if any((folder / "checkpoints").glob("*step-*")) or (folder / "ckpt.pt").exists():
        return True
    return any(_names_a_schema(folder / name) for name in ("config.json", "events.jsonl"))


def refuse_foreign_folder(folder: Path) -> None:
    """A new run begins in an empty or a new folder; files that are no run's are never mixed with its own."""
    choose = _("choose another folder for the run: --out_dir=FOLDER")
    if folder.resolve() == folder.resolve().parent:
        raise UserError(
            _("{folder} cannot be a run's folder").format(folder=folder),
            _("it is the root of the file system"),
            choose,
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(
            _("{folder} cannot be a run's folder").format(folder=folder), _("it is a file"), choose
        )
    if is_run(folder):
        return
    try:
        foreign = [path.name for path in sorted(folder.iterdir()) if not _may_be_ours(path)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            _("the run folder {path} cannot be used").format(path=folder), str(error), choose
        ) from None
    if foreign:
        names = ", ".join([*foreign[:_SHOWN], *(["…"] if len(foreign) > _SHOWN else [])])
        raise UserError(
            _("{folder} holds files that are not a run's").format(folder=folder),
            _("a run would write its own files among these: {names}").format(names=names),
            choose,
        )


def _names_a_schema(path: Path) -> bool:
    """As every JSON file of ours does, in its first line where it is a file of lines."""
    if path.suffix == ".jsonl":
        return "schema" in next(json_lines(path), {})
    try:
        content = load_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "schema" in content


def _may_be_ours(path: Path) -> bool:
    name = path.name.removesuffix(".part")
    if name in _IN_FOLDERS and path.is_dir():
        return all(_IN_FOLDERS[name].fullmatch(inside.name) for inside in path.iterdir())
    if name in _WITH_A_SCHEMA:
        return _names_a_schema(path)
    return name in _OTHERS or name.startswith(".") or name == "lost+found" or path.suffix in _HARMLESS
