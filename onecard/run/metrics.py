"""What a run writes while it goes on: metrics.jsonl, events.jsonl, log.txt. Append-only lines.

After a resume the steps since the checkpoint are written again; `read_metrics` lets the later line
win, so a reader sees one curve.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from onecard.run.directory import SCHEMA, RunDirectory


class Recorder:
    """The open files of a run. Every line is flushed: a crash loses at most the line being written."""

    def __init__(self, directory: RunDirectory, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say
        self._failed = False
        self._metrics = _open(directory.metrics_path)
        self._events = _open(directory.events_path)
        self._log = _open(directory.log_path)
        self._samples = directory.samples

    def metrics(self, **values: Any) -> None:
        with self._told_once():
            _write_json_line(self._metrics, values)

    def event(self, kind: str, **values: Any) -> None:
        with self._told_once():
            _write_json_line(self._events, {"event": kind, "at": round(time.time(), 3), **values})

    def log(self, line: str) -> None:
        with self._told_once():
            self._log.write(line + "\n")
            self._log.flush()

    def sample(self, step: int, text: str) -> None:
        with self._told_once():
            (self._samples / f"step-{step:08d}.txt").write_text(text + "\n", encoding="utf-8")

    @contextmanager
    def _told_once(self) -> Iterator[None]:
        """A full disk costs lines of a log, never the run; it is said once."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._say(f"note: metrics and logs cannot be written ({error}); training goes on")
            self._failed = True

    def close(self) -> None:
        for file in (self._metrics, self._events, self._log):
            with self._told_once():
                file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the line a crash cut short
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            curve, step = curves["val_loss" in line], line["step"]
            # A step seen again means the run went back: what came after it no longer belongs to it.
            while curve and next(reversed(curve)) >= step:
                curve.popitem()
            curve[step] = line
    lines = [line for curve in curves.values() for line in curve.values()]
    return sorted(lines, key=lambda line: (line["step"], "val_loss" in line))


def _open(path: Path) -> TextIO:
    fresh = not path.exists() or path.stat().st_size == 0
    file = path.open("a", encoding="utf-8")
    if fresh and path.suffix == ".jsonl":
        _write_json_line(file, {"schema": SCHEMA})
    elif not fresh and _last_byte(path) != b"\n":
        file.write("\n")  # a crash cut the last line short; do not glue ours to it
    return file


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _write_json_line(file: TextIO, values: dict[str, Any]) -> None:
    # JSON has no NaN: a diverged loss is written as null rather than as a file nobody can parse.
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    file.write(json.dumps(clean) + "\n")
    file.flush()
