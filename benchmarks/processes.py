"""Work in forks of this process: peaks of memory do not mix, and nothing is imported twice.

The parent must not have touched the card (its forks could not) and must not have threads.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Work = Callable[[], Row]

_waiting: Path | None = None  # in a fork: this file is there while its limit is not to be counted
_result: Path | None = None  # in a fork: where its row goes


def in_own_process(work: Work, limit_s: float) -> Row:
    """`work` in a fork; what goes wrong with the process itself is in the row as `error`."""
    ((_, row),) = side_by_side([work], 1, limit_s)
    return row


def side_by_side(works: Iterable[Work | None], lanes: int, limit_s: float) -> Iterator[tuple[int, Row]]:
    """Each in a fork, `lanes` of them at a time; number and row of each as it ends.

    `works` is asked for the next one when a lane is free. None: not now, but once another has ended.
    """
    import torch  # noqa: F401 - for the children: importing takes longer than measuring

    import onecard.train.step  # noqa: F401

    source, running, begun, free = iter(works), dict[int, _Child](), 0, True
    with tempfile.TemporaryDirectory() as folder:
        try:
            while free or running:
                while free and len(running) < lanes and (work := next(source, None)) is not None:
                    running[begun] = _Child(work, Path(folder) / str(begun), limit_s)
                    begun += 1
                free = False
                for number, child in list(running.items()):
                    row = child.ended()
                    if row is not None:
                        del running[number]
                        free = True
                        yield number, row
                if not free:
                    time.sleep(0.05)
        finally:
            for child in running.values():
                child.kill()


def so_far(row: Row) -> None:
    """Of work that may be stopped: what is known of its row. The row has to say that it is not whole."""
    if _result is not None:
        # Whole or not there: the parent may look in between.
        fresh = _result.with_suffix(".new")
        fresh.write_text(json.dumps(row))
        fresh.replace(_result)


class Turns:
    """One machine for several processes: together while they get ready, one by one while they measure.

    A lock on a file, which the system takes from a process that ends, however it ends. Nobody keeps one
    kind while waiting for the other, and all who hold it have their limit: somebody always goes on. To be
    made in the fork, since forks of whoever has the file open would share its lock.
    """

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT)  # a number: closed by nothing but the end
        self.waited = 0.0

    def together(self) -> None:
        self._take(alone=False)

    def alone(self) -> None:
        """Until the process has ended: giving its memory back would disturb the next one."""
        self._take(alone=True)

    def _take(self, alone: bool) -> None:
        import fcntl  # not on Windows, where results can be looked at

        began = time.monotonic()
        with _not_counted():
            fcntl.flock(self._file, fcntl.LOCK_UN)
            fcntl.flock(self._file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        self.waited += time.monotonic() - began


@contextmanager
def _not_counted() -> Iterator[None]:
    """The limit of a process that waits for others is not counted meanwhile."""
    if _waiting is not None:
        _waiting.touch()
    yield
    if _waiting is not None:
        _waiting.unlink()


class _Child:
    def __init__(self, work: Work, folder: Path, limit_s: float) -> None:
        folder.mkdir()
        self.result, self.log, self.waiting = (folder / name for name in ("row.json", "log", "waiting"))
        self.limit_s, self.looked, self.is_over = limit_s, time.monotonic(), False
        self.deadline = self.looked + limit_s
        sys.stdout.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _end_with(parent)
            try:
                self._run(work)
                os._exit(0)
            except BaseException:
                self.log.write_text(traceback.format_exc())
            finally:
                os._exit(1)  # never back into the parent's story

    def _run(self, work: Work) -> None:
        global _waiting, _result
        _waiting, _result = self.waiting, self.result
        with self.log.open("w") as sink:
            for stream in (1, 2):
                os.dup2(sink.fileno(), stream)
            so_far(work())

    def ended(self) -> Row | None:
        done, status = os.waitpid(self.pid, os.WNOHANG)
        how = (
            f"exit code {os.waitstatus_to_exitcode(status)}" if done else f"stopped after {self.limit_s:g} s"
        )
        self.is_over = bool(done)
        if not done:
            now = time.monotonic()
            self.deadline += now - self.looked if self.waiting.exists() else 0.0
            self.looked = now
            if now < self.deadline:
                return None
            self.kill()
        if self.result.exists():
            found: Row = json.loads(self.result.read_text())
            return found
        trace = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
        return {"error": f"no result: {how}", "trace": trace}

    def kill(self) -> None:
        if self.is_over:  # its number may be another process's by now
            return
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.is_over = True


def _end_with(parent: int) -> None:
    """If the parent is ended from outside (a time limit), nobody stays on the card beside what comes next."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # gone already
        os._exit(1)
