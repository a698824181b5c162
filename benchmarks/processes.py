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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Work = Callable[[], Row]


def in_own_process(work: Work, limit_s: float) -> Row:
    """`work` in a fork; what goes wrong with the process itself is in the row as `error`."""
    ((_, row),) = side_by_side([work], 1, limit_s)
    return row


def side_by_side(works: Sequence[Work], lanes: int, limit_s: float) -> Iterator[tuple[int, Row]]:
    """Each in a fork, `lanes` of them at a time; number and row of each as it ends."""
    import torch  # noqa: F401 - for the children: importing takes longer than measuring

    import onecard.train.step  # noqa: F401

    waiting, running = list(enumerate(works)), dict[int, _Child]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < lanes:
                    number, work = waiting.pop(0)
                    running[number] = _Child(work, Path(folder) / str(number), limit_s)
                for number, child in list(running.items()):
                    row = child.ended()
                    if row is not None:
                        del running[number]
                        yield number, row
                time.sleep(0.05)
        finally:
            for child in running.values():
                child.kill()


class _Child:
    def __init__(self, work: Work, folder: Path, limit_s: float) -> None:
        folder.mkdir()
        self.result, self.log = folder / "row.json", folder / "log"
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with self.log.open("w") as sink:
                    for stream in (1, 2):
                        os.dup2(sink.fileno(), stream)
                    # Whole or not there: the parent may look in between.
                    fresh = self.result.with_suffix(".new")
                    fresh.write_text(json.dumps(work()))
                    fresh.replace(self.result)
                os._exit(0)
            except BaseException:
                self.log.write_text(traceback.format_exc())
            finally:
                os._exit(1)  # never back into the parent's story

    def ended(self) -> Row | None:
        done, status = os.waitpid(self.pid, os.WNOHANG)
        how = (
            f"exit code {os.waitstatus_to_exitcode(status)}" if done else f"stopped after {self.limit_s:g} s"
        )
        if not done:
            if time.monotonic() < self.deadline:
                return None
            self.kill()
        if self.result.exists():
            found: Row = json.loads(self.result.read_text())
            return found
        trace = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
        return {"error": f"no result: {how}", "trace": trace}

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
