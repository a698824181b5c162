"""Stored checkpoints: which there are on disk, and whether each is as it was written.

A checkpoint is a folder step-00000500 with safetensors, state.json and a manifest of their sizes and hashes.
Nothing here needs torch, but for the tensors themselves.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.errors import UserError
from onecard.files import JSON_BYTES, file_sha256, lines_of, parse_json, read_bounded, remove_any
from onecard.language import _
from onecard.run.state import is_count, problem_of

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
# Errors of reading that say nothing about a file: no memory, too many files open.
PASSING = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
CHECKPOINT_NAME = re.compile(r"step-(\d{8,12})")
MODEL_NAME, OPTIMIZER_NAME = "model.safetensors", "optimizer.safetensors"
STATE_NAME, MANIFEST_NAME = "state.json", "manifest.json"
_QUARANTINED = "damaged-"  # before a checkpoint's name
_REPLACED, _BUILDING, _REMOVING = ".replaced-", ".building-", ".removing-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; tensors are read when asked for.

    `problem` is what listing it has found wrong: its small files are read and checked then, the large ones
    only by `damage`. With a problem there is no state.
    """

    path: Path
    step: int
    state: dict[str, Any]
    problem: str | None = None

    @property
    def val_loss(self) -> float | None:
        return self.state.get("val_loss")

    def model_tensors(self) -> dict[str, Tensor]:
        return self._tensors(MODEL_NAME)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return self._tensors(OPTIMIZER_NAME)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self.path / name)
        except (OSError, SafetensorError) as error:
            if getattr(error, "errno", None) == errno.ENOMEM:
                raise MemoryError(str(error)) from None
            raise UserError(_("{path} cannot be read").format(path=self.path / name), str(error)) from None


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """All that has a checkpoint's name, oldest first: whatever became of it since it was written whole."""
    found = []
    for path in (*folder.glob("step-*"), *folder.glob(f"{_REPLACED}step-*")):
        name = path.name.removeprefix(_REPLACED)
        if name != path.name and _is_there(path.with_name(name)):
            continue  # it waits to be removed
        if match := CHECKPOINT_NAME.fullmatch(name):
            found.append(_read(path, int(match[1])))
    return sorted(found, key=lambda c: c.step)


def _read(path: Path, step: int) -> Checkpoint:
    try:
        files = _manifest(path)
        state = _checked_state(path, step, files)
    except _DamagedError as problem:
        return Checkpoint(path, step, {}, str(problem))
    return Checkpoint(path, step, state)


class _DamagedError(Exception):
    """What is wrong with a checkpoint, in words."""


def _manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise _DamagedError(_("it is not a folder"))
    try:
        _must_be_plain(path / MANIFEST_NAME)
        content = parse_json(read_bounded(path / MANIFEST_NAME, JSON_BYTES))
        files = content["files"]
        if content.get("schema") != SCHEMA or not isinstance(files, dict):
            raise _DamagedError(
                _("{path} was not written by this version of onecard").format(name=MANIFEST_NAME)
            )
    except OSError as error:
        raise _unreadable(path, MANIFEST_NAME, error) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _DamagedError(_("{path} cannot be read").format(path=MANIFEST_NAME)) from None
    if missing := {MODEL_NAME, OPTIMIZER_NAME, STATE_NAME} - files.keys():
        raise _DamagedError(
            _("{name} does not name {names}").format(name=MANIFEST_NAME, names=", ".join(sorted(missing)))
        )
    for name, facts in files.items():
        sound = isinstance(facts, dict) and is_count(facts.get("bytes")) and Path(name).name == name
        if not sound or not isinstance(facts.get("sha256"), str):
            raise _DamagedError(_("{path} cannot be read").format(path=MANIFEST_NAME))
    return files


def _checked_state(path: Path, step: int, files: dict[str, Any]) -> dict[str, Any]:
    """Of state.json, whose bytes are those of the manifest."""
    try:
        _must_be_plain(path / STATE_NAME)
        content = read_bounded(path / STATE_NAME, JSON_BYTES)
    except OSError as error:
        raise _unreadable(path, STATE_NAME, error) from None
    if hashlib.sha256(content).hexdigest() != files[STATE_NAME]["sha256"]:
        raise _DamagedError(_("the content of {name} has changed").format(name=STATE_NAME))
    try:
        state = parse_json(content)
    except ValueError:
        state = None
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise _DamagedError(_("{path} was not written by this version of onecard").format(path=STATE_NAME))
    if state.get("step") != step:
        raise _DamagedError(
            _("{name} is of step {step}: the folder was renamed").format(
                name=STATE_NAME, step=str(state.get("step"))[:20]
            )
        )
    if wrong := problem_of(state):
        raise _DamagedError(
            _("{name} has an impossible value of {wrong}").format(name=STATE_NAME, wrong=wrong)
        )
    return state


def _must_be_plain(path: Path) -> None:
    """Nothing of ours is a link; through one, what is verified now could be another file later."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise _DamagedError(_("{name} is not an ordinary file").format(name=path.name))


def _unreadable(path: Path, name: str, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError):
        return _DamagedError(_("{name} is missing").format(name=name))
    if error.errno in PASSING:
        return error
    return _DamagedError(_("{name} cannot be read: {error}").format(name=name, error=error.strerror or error))


def best_checkpoint(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The one with the lowest validation loss among those on the text of the newest."""
    sound = [c for c in checkpoints if c.problem is None]
    # Losses compare only on the same text in blocks of the same length.
    of = [(c.state.get("dataset"), (c.state.get("config") or {}).get("block_size")) for c in sound]
    measured = [
        c
        for c, measured_on in zip(sound, of, strict=True)
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
    problems = "\n".join(
        _("{path} is damaged ({why})").format(path=bad.path, why=why) for bad, why in damaged
    )
    raise UserError(
        _("no checkpoint of this run is intact"),
        problems,
        _("bring one back from a copy, or start over with --fresh (what is there is set aside)"),
    )


def passed_over(checkpoint: Checkpoint, damaged: list[tuple[Checkpoint, str]]) -> list[str]:
    """Notes on damaged checkpoints in whose place an older one is used."""
    step = checkpoint.step
    return [
        _("{path} is damaged ({why}): step {step:,} is used").format(path=bad.path, why=why, step=step)
        for bad, why in damaged
    ]


def damage(checkpoint: Checkpoint, *, weights_only: bool = False) -> str | None:
    """What is wrong with the files against their manifest, or None; `weights_only` spares reading moments."""
    if checkpoint.problem is not None:
        return checkpoint.problem
    try:
        files = _manifest(checkpoint.path)
    except _DamagedError as problem:
        return str(problem)
    if weights_only:
        del files[OPTIMIZER_NAME]
    for name, facts in files.items():
        path = checkpoint.path / name
        try:
            _must_be_plain(path)
            if path.stat().st_size != facts["bytes"]:
                found, wanted = path.stat().st_size, facts["bytes"]
                return _("{name} has {found:,} bytes instead of {wanted:,}").format(
                    name=name, found=found, wanted=wanted
                )
            if file_sha256(path) != facts["sha256"]:
                return _("the content of {name} has changed").format(name=name)
        except _DamagedError as problem:
            return str(problem)
        except FileNotFoundError:
            return _("{name} is missing").format(name=name)
        except OSError as error:
            if error.errno in PASSING:
                raise UserError(
                    _("{path} cannot be read now").format(path=path),
                    str(error),
                    _("the file may be whole: try again"),
                    exit_code=1,
                ) from None
            return _("{name} cannot be checked: {error}").format(name=name, error=error)
    return None


def quarantine(checkpoint: Checkpoint) -> Path:
    """A damaged checkpoint must not count among the newest that are kept: it is renamed, and only the last
    one is kept. Returns where it is."""
    folder, aside = checkpoint.path.parent, checkpoint.path.with_name(_QUARANTINED + checkpoint.path.name)
    with contextlib.suppress(OSError):
        remove_any(aside)
        checkpoint.path.rename(aside)
        for earlier in folder.glob(f"{_QUARANTINED}*"):
            if earlier != aside:
                remove_any(earlier)
    return aside


def sweep(folder: Path) -> None:
    """Remove what a kill left half done. The run folder is claimed, so nobody is at work on it."""
    for replaced in folder.glob(f"{_REPLACED}step-*"):
        original = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if _is_there(original):
            remove_any(replaced)
        else:
            replaced.rename(original)
    for prefix in (_BUILDING, _REMOVING):
        for leftover in folder.glob(f"{prefix}*"):
            remove_any(leftover)


def place_to_build(final: Path) -> Path:
    """The hidden name under which a checkpoint is written."""
    return final.with_name(f"{_BUILDING}{final.name}-{os.getpid()}")


def place_when_replaced(final: Path) -> Path:
    """Where a checkpoint waits while another one of the same step takes its place; listed until it has."""
    return final.with_name(_REPLACED + final.name)


def remove_checkpoint(path: Path) -> None:
    """Renamed first: a removal cut short must not leave half a checkpoint under a valid name."""
    trash = path.with_name(_REMOVING + path.name)
    remove_any(trash)
    path.rename(trash)
    remove_any(trash)


def remains(folder: Path, events: Path) -> str:
    """The signs that a run without checkpoints once had some; empty where there are none."""
    signs = []
    if saved := _last_saved(events):
        signs.append(_("{name} says that step {saved:,} was saved").format(name=events.name, saved=saved))
    prefixes = (_QUARANTINED, _REMOVING)
    names = sorted(p.name for prefix in prefixes for p in folder.glob(f"{prefix}step-*"))
    if names:
        signs.append(_("{name}/ has {names}").format(name=folder.name, names=", ".join(names[:3])))
    return "; ".join(signs)


def _last_saved(events: Path) -> int | None:
    """The last step of which events.jsonl says that it was saved."""
    saved = None
    for event in json_lines(events):
        if event.get("event") == "saved" and is_count(event.get("step")):
            saved = event["step"]
    return saved


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines; half-written lines, and what is no such file, are passed over."""
    with contextlib.suppress(OSError):
        for line in lines_of(path):
            try:
                content = parse_json(line)
            except ValueError:
                continue
            if isinstance(content, dict):
                yield content


def seal(content: dict[str, Any]) -> str:
    """A hash of values as JSON has them, for a file that says by itself whether it is as it was written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)
