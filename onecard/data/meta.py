"""A dataset's folder: its meta.json, the journal of a prepare at work, and which files hold its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from onecard.errors import UserError
from onecard.files import DATA_JSON_BYTES, load_json
from onecard.language import _

META_SCHEMA = 1
# Beside the bins while prepare is at work on them, or was when it was killed.
JOURNAL_NAME = ".prepare.json"

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")


def read_meta(data_dir: Path) -> dict[str, Any] | None:
    """What prepare wrote down about a dataset; None where there is no meta.json (nanoGPT's bins)."""
    path = data_dir / "meta.json"
    try:
        meta = load_json(path, DATA_JSON_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            _("cannot read {path}").format(path=path), str(error), _("prepare the data again with --force")
        ) from error
    if not isinstance(meta, dict) or not isinstance(meta.get("schema"), int):
        raise UserError(
            _("{path} is not a onecard meta.json").format(path=path), _("it names no schema version")
        )
    if meta["schema"] > META_SCHEMA:
        raise UserError(
            _("{path} has schema {schema}; this onecard knows {known}").format(
                path=path, schema=meta["schema"], known=META_SCHEMA
            ),
            hint="pip install --upgrade onecard",
        )
    return meta


def datasets_in(root: Path) -> list[str]:
    """Names of the prepared datasets under a data folder."""
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and split_files(entry, "train"))


def split_files(data_dir: Path, split: Split) -> list[Path]:
    """`train.bin`, or shards such as `fineweb_train_000001.bin` in order."""
    single = data_dir / f"{split}.bin"
    return [single] if single.exists() else sorted(data_dir.glob(f"*_{split}_*.bin"))


def later_shards(last: Path) -> list[Path]:
    for split in SPLITS:
        if f"_{split}_" in last.name:
            siblings = sorted(last.parent.glob(f"*_{split}_*.bin"))
            return [path for path in siblings if path.name > last.name]
    return []


def counted_while_growing(data_dir: Path, split: Split) -> int | None:
    """What meta.json counts, if prepare is appending to the bins (or was, when it was killed)."""
    try:
        journal = load_json(data_dir / JOURNAL_NAME, DATA_JSON_BYTES)
    except (OSError, ValueError):
        return None
    # A new dataset under way has partial files of its own; these bins are then the old ones, whole.
    if not isinstance(journal, dict) or journal.get("mode") != "append":
        return None
    meta = read_meta(data_dir)
    counted = ((meta or {}).get("splits") or {}).get(split, {}).get("tokens")
    return counted if isinstance(counted, int) else None
