"""Checkpoints: safetensors and json in a folder of their own, written whole or not at all.

A checkpoint is assembled under a hidden name, flushed to the disk and renamed into place, so that a
folder called step-00000500 is complete by construction. The newest two and the best are kept.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from onecard.errors import UserError
from onecard.files import file_sha256, flush_to_disk, write_json
from onecard.run.directory import CHECKPOINT_NAME, PASSING, SCHEMA, STATE_NAME, read_json
from onecard.run.tensor_file import write_tensors

KEEP_NEWEST = 2
_DISK_MARGIN = 16_000_000
_MODEL, _OPTIMIZER, _STATE, _MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    STATE_NAME,
    "manifest.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; tensors are read when asked for."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def val_loss(self) -> float | None:
        return self.state.get("val_loss")

    def model_tensors(self) -> dict[str, Tensor]:
        return self._tensors(_MODEL)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return self._tensors(_OPTIMIZER)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        try:
            return load_file(self.path / name)
        except (OSError, SafetensorError) as error:
            if getattr(error, "errno", None) == errno.ENOMEM:
                raise MemoryError(str(error)) from None
            raise UserError(f"{self.path / name} cannot be read", str(error)) from None


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
    tensors = {_MODEL: training.weights, _OPTIMIZER: training.optimizer}
    final = folder / f"step-{step:08d}"
    building = folder / f".building-{final.name}-{os.getpid()}"
    needed = sum(tensor.nbytes for of_file in tensors.values() for tensor in of_file.values())
    try:
        _sweep(folder)
        _check_space(folder, needed)
        building.mkdir()
        files = {name: write_tensors(building / name, t) for name, t in tensors.items()}
        write_json(building / _STATE, {"schema": SCHEMA, "step": step, "scaler": training.scaler, **state})
        files[_STATE] = _facts(building / _STATE)
        write_json(building / _MANIFEST, {"schema": SCHEMA, "files": files})
        for name in (*files, _MANIFEST):
            flush_to_disk(building / name)
        flush_to_disk(building)
        if final.exists():  # the same step again, after a resume from an older checkpoint
            shutil.rmtree(_replaced(final), ignore_errors=True)
            final.rename(_replaced(final))  # listed in its place until the new one is there
        building.rename(final)
        flush_to_disk(folder)
        shutil.rmtree(_replaced(final), ignore_errors=True)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        if error.errno == errno.ENOMEM:
            raise MemoryError(str(error)) from None  # which may pass
        raise UserError(
            f"the checkpoint of step {step} could not be written to {folder}",
            f"{error}; earlier checkpoints are untouched",
            "free some space or choose another --out_dir",
        ) from None
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    with contextlib.suppress(OSError):  # the checkpoint is safe; an old one too many is no reason to fail
        _prune(folder, just_saved=step)
    return final


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Checkpoints that were written to the end, oldest first. What happened to their files since is
    for `damage` to say: one whose state cannot be read any more is listed with none."""
    found = []
    there = [*folder.glob("step-*"), *folder.glob(_replaced(folder / "step-*").name)]
    for path in there:
        if path != _original(path) and _original(path).exists():
            continue
        match = CHECKPOINT_NAME.fullmatch(_original(path).name)
        if match and (path / _MANIFEST).is_file():
            try:
                state = read_json(path / _STATE)
            except UserError:
                state = None
            found.append(Checkpoint(path, int(match[1]), state or {}))
    return sorted(found, key=lambda c: c.step)


def best_checkpoint(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    # Losses compare only on the same text in blocks of the same length.
    of = [(c.state.get("dataset"), (c.state.get("config") or {}).get("block_size")) for c in checkpoints]
    measured = [
        c
        for c, measured_on in zip(checkpoints, of, strict=True)
        if measured_on == of[-1] and c.val_loss is not None and math.isfinite(c.val_loss)
    ]
    return min(measured, key=lambda c: c.val_loss or 0.0) if measured else None


def newest_intact(
    checkpoints: list[Checkpoint], *, weights_only: bool = False
) -> tuple[Checkpoint, list[tuple[Checkpoint, str]]]:
    """The newest checkpoint whose files are as they were written, and what is wrong with newer ones."""
    damaged: list[tuple[Checkpoint, str]] = []
    for checkpoint in reversed(checkpoints):
        problem = damage(checkpoint, weights_only=weights_only)
        if problem is None:
            return checkpoint, damaged
        damaged.append((checkpoint, problem))
    problems = "\n".join(f"{bad.path} is damaged ({why})" for bad, why in damaged)
    raise UserError("no checkpoint of this run is intact", problems, "start over with --fresh")


def put_out_of_the_way(checkpoint: Checkpoint) -> None:
    """A damaged checkpoint must not count among the newest that are kept; it is renamed, not removed."""
    aside = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        checkpoint.path.rename(aside)


def damage(checkpoint: Checkpoint, *, weights_only: bool = False) -> str | None:
    """What is wrong with the files against their manifest, or None; `weights_only` spares reading moments."""
    try:
        files = dict(read_json(checkpoint.path / _MANIFEST)["files"])
    except (UserError, TypeError, KeyError, ValueError):
        return f"{_MANIFEST} cannot be read"
    if not checkpoint.state:
        return f"{_STATE} cannot be read"
    if missing := {_MODEL, _OPTIMIZER, _STATE} - files.keys():
        return f"{_MANIFEST} does not name {', '.join(sorted(missing))}"
    if weights_only:
        del files[_OPTIMIZER]
    for name, facts in files.items():
        path = checkpoint.path / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if path.stat().st_size != facts["bytes"]:
                return f"{name} has {path.stat().st_size:,} bytes instead of {facts['bytes']:,}"
            if file_sha256(path) != facts["sha256"]:
                return f"the content of {name} has changed"
        except (OSError, TypeError, KeyError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                raise UserError(
                    f"{path} cannot be read now", str(error), "the file may be whole: try again", exit_code=1
                ) from None
            return f"{name} cannot be checked: {error}"
    return None


def _sweep(folder: Path) -> None:
    """Remove what a kill left half done. The run folder is claimed, so nobody is at work on it."""
    for replaced in folder.glob(_replaced(folder / "step-*").name):
        if _original(replaced).exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(_original(replaced))
    for pattern in (".building-*", ".removing-*"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _replaced(path: Path) -> Path:
    """Where a checkpoint waits while another one of the same step takes its place."""
    return path.with_name(f".replaced-{path.name}")


def _original(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".replaced-"))


def _prune(folder: Path, just_saved: int) -> None:
    checkpoints = list_checkpoints(folder)
    best = best_checkpoint(checkpoints)
    for old in checkpoints[:-KEEP_NEWEST]:
        if old != best and old.step != just_saved:
            _remove(old.path)


def _remove(path: Path) -> None:
    # Renamed first: a removal cut short must not leave half a checkpoint under a valid name.
    trash = path.with_name(f".removing-{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    needed += _DISK_MARGIN
    if free < needed:
        raise OSError(f"{needed / 1e9:.3f} GB are needed and {free / 1e9:.3f} GB free")


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
