"""Writing checkpoints: safetensors and json in a folder of their own, whole or not at all.

A checkpoint is assembled under a hidden name, flushed to the disk and renamed into place, so that a
folder called step-00000500 is complete by construction. The newest two and the best are kept; what is on
disk is read by stored.py.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onecard.errors import UserError
from onecard.files import file_sha256, flush_to_disk, remove_any, write_json
from onecard.plan.bill import CHECKPOINTS_AT_ONCE
from onecard.run.stored import (
    MANIFEST_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    SCHEMA,
    STATE_NAME,
    best_checkpoint,
    list_checkpoints,
    place_to_build,
    place_when_replaced,
    remove_checkpoint,
    sweep,
)
from onecard.run.tensor_file import write_tensors

KEEP_NEWEST = CHECKPOINTS_AT_ONCE - 2  # beside the best, and the one that is being written
_DISK_MARGIN = 16_000_000


class SaveError(UserError):
    """A checkpoint could not be written. `errno` is the system's reason."""

    def __init__(self, what: str, why: str, hint: str, errno: int | None) -> None:
        super().__init__(what, why, hint, exit_code=1)
        self.errno = errno


@dataclass(frozen=True)
class TrainingState:
    """What training changes and a checkpoint keeps, besides the position in the run."""

    weights: dict[str, Tensor]  # every tensor once, the tied head left out
    optimizer: dict[str, Tensor]
    scaler: dict[str, Any]

    def is_finite(self) -> bool:
        """Are all weights numbers?"""
        return all(bool(tensor.isfinite().all()) for tensor in self.weights.values())


def save_checkpoint(folder: Path, step: int, training: TrainingState, state: Mapping[str, Any]) -> Path:
    """Write step-NNNNNNNN under `folder`, then drop checkpoints no longer kept."""
    tensors = {MODEL_NAME: training.weights, OPTIMIZER_NAME: training.optimizer}
    final = folder / f"step-{step:08d}"
    building = place_to_build(final)
    needed = sum(tensor.nbytes for of_file in tensors.values() for tensor in of_file.values())
    try:
        sweep(folder)
        _check_space(folder, needed)
        building.mkdir()
        files = {name: write_tensors(building / name, t) for name, t in tensors.items()}
        write_json(
            building / STATE_NAME, {**state, "schema": SCHEMA, "step": step, "scaler": training.scaler}
        )
        files[STATE_NAME] = _facts(building / STATE_NAME)
        write_json(building / MANIFEST_NAME, {"schema": SCHEMA, "files": files})
        for name in (*files, MANIFEST_NAME):
            flush_to_disk(building / name)
        flush_to_disk(building)
        replaced = place_when_replaced(final)
        if final.exists():  # the same step again, after a resume from an older checkpoint
            remove_any(replaced)
            final.rename(replaced)  # listed in its place until the new one is there
        building.rename(final)
        flush_to_disk(folder)
        remove_any(replaced)
    except OSError as error:
        remove_any(building)
        if error.errno == errno.ENOMEM:
            raise MemoryError(str(error)) from None  # which may pass
        raise SaveError(
            f"the checkpoint of step {step} could not be written to {folder}",
            f"{error}; earlier checkpoints are untouched",
            "free some space or choose another --out_dir",
            error.errno,
        ) from None
    except BaseException:
        remove_any(building)
        raise
    with contextlib.suppress(OSError):  # the checkpoint is safe; an old one too many is no reason to fail
        _prune(folder, just_saved=step)
    return final


def _prune(folder: Path, just_saved: int) -> None:
    checkpoints = list_checkpoints(folder)
    best = best_checkpoint(checkpoints)
    for old in checkpoints[:-KEEP_NEWEST]:
        if old != best and old.step != just_saved:
            remove_checkpoint(old.path)


def check_room(folder: Path, checkpoint_bytes: int, saves: int) -> None:
    """Is there room for the checkpoints that `saves` more of them will have on disk at once? Asked before
    the first step: a disk that fills up weeks later costs what was learned since."""
    there = len(list_checkpoints(folder))
    at_once = min(CHECKPOINTS_AT_ONCE, there + saves)
    needed = max(0, at_once - there) * checkpoint_bytes + _DISK_MARGIN
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # a file system that does not say; each save asks again
    if saves and free < needed:
        each, already = f"{checkpoint_bytes / 1e9:.3f} GB", f", {there} of them there" if there else ""
        raise UserError(
            f"{folder} has not enough room for this run's checkpoints",
            f"{at_once} × {each} are there at once{already}: "
            f"the newest {KEEP_NEWEST}, the best and the one being written;\n"
            f"{needed / 1e9:.3f} GB are needed, {free / 1e9:.3f} GB are free",
            f"free {(needed - free) / 1e9:.3f} GB, or choose another disk: --out_dir=FOLDER",
            exit_code=1,
        )


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    needed += _DISK_MARGIN
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e9:.3f} GB are needed and {free / 1e9:.3f} GB free")


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
