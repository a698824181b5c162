"""Checkpoints are written here: safetensors and json in a folder of their own, whole or not at all.

A checkpoint is assembled under a hidden name, flushed to the disk and renamed into place
(`_put_in_place`), so that a folder called step-00000500 is complete by construction. The newest two and the
best are kept; what is on disk is read by stored.py.
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
from onecard.language import _
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

KEEP_NEWEST = CHECKPOINTS_AT_ONCE - 2  # without the best, and the one that is being written
_DISK_MARGIN = 16_000_000


class SaveError(UserError):
    """A checkpoint could not be written. `errno` is the system's reason."""

    def __init__(self, what: str, why: str, hint: str, errno: int | None) -> None:
        super().__init__(what, why, hint, exit_code=1)
        self.errno = errno


@dataclass(frozen=True)
class TrainingState:
    """What training changes and a checkpoint keeps, apart from the position in the run."""

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
        _put_in_place(building, final)
    except OSError as error:
        remove_any(building)
        if error.errno == errno.ENOMEM:
            raise MemoryError(str(error)) from None  # which may pass
        raise SaveError(
            _("the checkpoint of step {step} could not be written to {folder}").format(
                step=step, folder=folder
            ),
            _("{error}; earlier checkpoints are untouched").format(error=error),
            _("free some space or choose another --out_dir"),
            error.errno,
        ) from None
    except BaseException:
        remove_any(building)
        raise
    with contextlib.suppress(OSError):  # the checkpoint is safe; an old one too many is no reason to fail
        _prune(folder, just_saved=step)
    return final


def _put_in_place(building: Path, final: Path) -> None:
    """Rename what is written and flushed to its own name. Until then it is listed nowhere."""
    replaced = place_when_replaced(final)
    if final.exists():  # the same step again, after a resume from an older checkpoint
        remove_any(replaced)
        final.rename(replaced)  # listed in its place until the new one is there
    building.rename(final)
    flush_to_disk(final.parent)
    remove_any(replaced)


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
        why = _(
            "up to {n} checkpoints of {size:.3f} GB are kept at once: the newest {newest}, the best and the "
            "one being written;\n"
            "{there} of them are there, {needed:.3f} GB more are needed, and {free:.3f} GB are free"
        )
        raise UserError(
            _("{folder} has not enough room for this run's checkpoints").format(folder=folder),
            why.format(
                n=at_once, size=checkpoint_bytes / 1e9, newest=KEEP_NEWEST, there=there,
                needed=needed / 1e9, free=free / 1e9,
            ),
            _("free {n:.3f} GB, or choose another disk: --out_dir=FOLDER").format(n=(needed - free) / 1e9),
            exit_code=1,
        )  # fmt: skip


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    needed += _DISK_MARGIN
    if free < needed:
        short = _("{needed:.3f} GB are needed and {free:.3f} GB are free").format(
            needed=needed / 1e9, free=free / 1e9
        )
        raise OSError(errno.ENOSPC, short)


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
