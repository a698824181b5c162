"""The files a run writes line by line while it goes on: metrics.jsonl, events.jsonl, log.txt.

A checkpoint flushes them to the disk, so that a run that goes on from it has its whole curve. What was
written after that checkpoint is dropped then, because those steps are done again: each step stands once in
metrics.jsonl and log.txt. events.jsonl is a diary and keeps everything.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onecard.errors import UserError
from onecard.files import flush_to_disk, lines_of, open_plain
from onecard.language import _, english_of
from onecard.run.directory import RunDirectory
from onecard.run.stored import SCHEMA, json_lines
from onecard.terminal import visible

_UNWRITTEN_BYTES = 16 * 2**20  # of lines at most, that wait for room on the disk
# What says that a disk is full, not that it is gone.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
_TRAINING, _EVALUATION, _BITS = "training", "evaluation", "bits per byte"  # kinds of lines
_HALF = "half a line"  # that a crash cut short


class Recorder:
    """The open files of a run. Every line goes to the system at once: a crash loses at most that line."""

    def __init__(self, directory: RunDirectory, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say
        self._begin(directory)

    def _begin(self, directory: RunDirectory, unwritten: Sequence[bytes] = (b"", b"", b"")) -> None:
        self._failed = False
        self.disk_error: OSError | None = None  # the last one that is about more than a full disk
        paths = (directory.metrics_path, directory.events_path, directory.log_path)
        self._files = [_Lines(path, rest) for path, rest in zip(paths, unwritten, strict=True)]
        self._samples = directory.samples
        with self._reported_once():
            flush_to_disk(directory.path)  # the files' names

    def metrics(self, **values: Any) -> None:
        with self._reported_once():
            self._files[0].write(_json_line(values))

    def event(self, kind: str, **values: Any) -> None:
        with self._reported_once():
            self._files[1].write(_json_line({"event": kind, "at": round(time.time(), 3), **values}))

    def log(self, line: str) -> None:
        with self._reported_once():
            self._files[2].write(visible(str(english_of(line))) + "\n")

    def sample(self, step: int, text: str) -> None:
        with self._reported_once():
            (self._samples / f"step-{step:08d}.txt").write_text(visible(text) + "\n", encoding="utf-8")

    @contextmanager
    def _reported_once(self) -> Iterator[None]:
        """A full disk costs lines of a log, never the run; it is reported once."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                self.disk_error = error
            if not self._failed:
                note = _("metrics and logs cannot be written ({error}); training goes on").format(error=error)
                self._say(_("note: {text}").format(text=note))
            self._failed = True

    def flush(self) -> None:
        """To the disk itself: what a checkpoint stands for is then there, even if the power fails."""
        for file in self._files:
            with self._reported_once():
                file.flush()

    def move(self, directory: RunDirectory) -> None:
        """Go on in another folder, with what was written so far as far as it can still be read."""
        for file, target in zip(
            self._files, (directory.metrics_path, directory.events_path, directory.log_path), strict=True
        ):
            with contextlib.suppress(OSError):
                shutil.copyfile(file.readable_path(), target)
        self.close()
        self._begin(directory, [bytes(file.unwritten) for file in self._files])

    def close(self) -> None:
        for file in self._files:
            with self._reported_once():
                file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def iteration_line(step: int, loss: float, seconds: float, mfu: float | None) -> str:
    """nanoGPT's line. MFU is against this machine's own card, and left out where no peak is known."""
    line = f"iter {step}: loss {loss:.4f}, time {seconds * 1000:.2f}ms"
    return line if mfu is None else f"{line}, mfu {mfu * 100:.2f}%"


def evaluation_line(step: int, train_loss: float, val_loss: float) -> str:
    return f"step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"


def bits_per_byte_line(step: int, val_bpb: float) -> str:
    """nanochat's line."""
    return f"Step {step:05d} | Validation bpb: {val_bpb:.6f}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines in order of step, superseded and half-written ones left out."""
    curves: dict[bool, dict[int, dict[str, Any]]] = {False: {}, True: {}}
    for line in json_lines(path):
        if type(line.get("step")) is int:
            curve, step = curves["val_loss" in line], line["step"]
            # A step seen again means the run went back: what came after it no longer belongs to it.
            while curve and next(reversed(curve)) >= step:
                curve.popitem()
            curve[step] = line
    lines = [line for curve in curves.values() for line in curve.values()]
    return sorted(lines, key=lambda line: (line["step"], "val_loss" in line))


def rewind(directory: RunDirectory, step: int, *, evaluated: bool) -> None:
    """Drop what was written after the checkpoint of this step, which a run goes on from: its own evaluation
    stays where it was `evaluated`. A disk without room leaves the files as they are, and `read_metrics`
    passes over what was superseded."""
    for path, kind_of in ((directory.metrics_path, _metric_kind), (directory.log_path, _log_kind)):
        with contextlib.suppress(OSError):
            _keep_only(path, _lines_to_keep(path, kind_of, step, evaluated))


def _lines_to_keep(
    path: Path, kind_of: Callable[[bytes], tuple[str, int] | None], step: int, evaluated: bool
) -> bytearray:
    """One byte a line, 1 to keep it. A step seen again means that the run went back to it."""
    keep, seen = bytearray(), dict[str, list[tuple[int, int]]]()
    for number, line in enumerate(lines_of(path)):
        keep.append(1)
        found = kind_of(line)
        if found is None:
            continue
        kind, at = found
        if kind == _HALF:
            keep[number] = 0
            continue
        so_far = seen.setdefault(kind, [])
        while so_far and so_far[-1][0] >= at:
            keep[so_far.pop()[1]] = 0
        so_far.append((at, number))
        keep[number] = at < step or (at == step and kind != _TRAINING and evaluated)
    return keep


def _keep_only(path: Path, keep: bytearray) -> None:
    if all(keep) and sum(map(len, lines_of(path))) == path.stat().st_size:
        return
    unfinished = path.with_name(path.name + ".part")
    unfinished.unlink(missing_ok=True)
    with unfinished.open("xb") as file:
        file.writelines(line for line, keep_it in zip(lines_of(path), keep, strict=True) if keep_it)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


_METRIC = re.compile(rb'\{"step": (\d{1,15}), .*\}\n')
_LOGGED = (
    (_TRAINING, re.compile(rb"iter (\d{1,15}): loss ")),
    (_EVALUATION, re.compile(rb"step (\d{1,15}): train loss ")),
    (_BITS, re.compile(rb"Step (\d{1,15}) \| Validation bpb: ")),
)


def _metric_kind(line: bytes) -> tuple[str, int] | None:
    match = _METRIC.fullmatch(line)
    if match is None:
        return None if line.startswith(b'{"schema": ') else (_HALF, 0)
    return (_EVALUATION if b'"val_loss": ' in line else _TRAINING), int(match[1])


def _log_kind(line: bytes) -> tuple[str, int] | None:
    if not line.endswith(b"\n"):
        return _HALF, 0
    for kind, pattern in _LOGGED:
        if match := pattern.match(line):
            return kind, int(match[1])
    return None


class _Lines:
    """A file that grows by lines. What a full disk does not take is kept, and written when there is room."""

    def __init__(self, path: Path, unwritten: bytes = b"") -> None:
        if path.exists() and not path.is_file():  # opening a FIFO would wait for a reader
            raise UserError(
                _("{path} is not an ordinary file").format(path=path),
                hint=_("move it away: the run writes its own file there"),
            )
        self._path, self.unwritten = path, bytearray()
        self.file = path.open("ab", buffering=0)
        if self.file.tell() == 0:
            if path.suffix == ".jsonl":
                self.unwritten += _json_line({"schema": SCHEMA}).encode()
        elif _last_byte(path) != b"\n":
            self.unwritten += b"\n"  # a crash cut the last line short; do not glue ours to it
        self.unwritten += unwritten

    def write(self, line: str) -> None:
        if len(self.unwritten) < _UNWRITTEN_BYTES:
            self.unwritten += line.encode("utf-8", "backslashreplace")
        self._drain()

    def _drain(self) -> None:
        while self.unwritten:
            del self.unwritten[: self.file.write(self.unwritten) or 0]

    def flush(self) -> None:
        self._drain()
        os.fsync(self.file.fileno())

    def readable_path(self) -> Path:
        """Where it can be read, on Linux also if it was removed."""
        still_open = Path(f"/proc/self/fd/{self.file.fileno()}")
        return still_open if still_open.exists() else self._path

    def close(self) -> None:
        try:
            self._drain()
        finally:
            self.file.close()


def _last_byte(path: Path) -> bytes:
    with open_plain(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _json_line(values: dict[str, Any]) -> str:
    # JSON has no NaN: a diverged loss is written as null rather than as a file nobody can parse.
    clean = {
        name: None if isinstance(value, float) and not math.isfinite(value) else english_of(value)
        for name, value in values.items()
    }
    return json.dumps(clean) + "\n"
