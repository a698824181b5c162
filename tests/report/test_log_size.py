"""200 MB of log are read in at most 15 s and 200 MB of memory."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onecard.report.reading import read

MB = 10**6
ROWS = 2000


def nanogpt(n: int) -> str:
    return f"iter {n}: loss {4 + n % 977 / 5000:.4f}, time {4000 + n % 100:.2f}ms, mfu 11.{n % 99:02d}%\n"


def nanochat(n: int) -> str:
    return (
        f"step {n:05d}/9999999 ({n % 99:.2f}%) | loss: 3.14{n % 10000:04d} | lrm: 1.00 | "
        f"dt: {1100 + n % 90}.12ms | tok/sec: 55,{n % 999:03d} | bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: {n} | "
        f"total time: {n / 60:.2f}m | eta: {n}.1m\n"
    )


def llm_c(n: int) -> str:
    return (
        f"step {n + 1:4d}/9999999 | loss {3 + n % 977 / 5000:.6f} ({n % 5 - 2.5:+.2f}z)| "
        f"norm {n % 91 / 99:.4f} ({1.2 - n % 3:+.2f}z)| lr 6.00e-04 | "
        f"{300 + n % 91:.2f} ms | 42.6% bf16 MFU | 171540 tok/s\n"
    )


def csv(n: int) -> str:
    head = "step,tokens,loss_train,loss_val,lr\n" if n == 0 else ""
    val = "3.9" if n % 250 == 0 else ""
    return f"{head}{n},{n * 524288},{4 + n % 977 / 5000:.4f},{val},{3e-4 + n * 1e-12}\n"


def jsonl(n: int) -> str:
    return (
        f'{{"step": {n}, "loss": {4 + n % 977 / 5000:.6f}, "grad_norm": 0.5{n % 999:03d}, "lr": 0.0003, '
        f'"tokens": {n * 65536}, "step_seconds": 0.25, "mfu": null}}\n'
    )


def huggingface(n: int) -> str:
    loss, rate = 3 + n % 977 / 5000, 5e-05 - n * 1e-13
    bar = f"{n % 100:3d}%|#####     | {n}/99999999 [10:00:10<1:00:00,  1.50s/it]\r"
    said = {"loss": round(loss, 4), "grad_norm": 0.9012, "learning_rate": rate, "epoch": round(n / 1e6, 2)}
    return f"{bar}{said}\n{bar}"


def prose(n: int) -> str:
    return f"The {n}th line says that the loss went down; see step and iteration = 5 of it.\n"


LINES: dict[str, Callable[[int], str]] = {
    f.__name__: f for f in (nanogpt, nanochat, llm_c, csv, jsonl, huggingface, prose)
}


class Stream(io.RawIOBase):
    """Lines made while they are read, and the time it takes to make them."""

    def __init__(self, line: Callable[[int], str], size: int) -> None:
        self.line, self.left, self.rows, self.rest, self.making = line, size, 0, b"", 0.0

    def read(self, count: int = -1) -> bytes:
        began = time.process_time()
        while len(self.rest) < count and self.left > 0:
            more = "".join(map(self.line, range(self.rows, self.rows + ROWS))).encode()
            self.rows, self.left, self.rest = self.rows + ROWS, self.left - len(more), self.rest + more
        found, self.rest = self.rest[:count], self.rest[count:]
        self.making += time.process_time() - began
        return found


def seconds_of(name: str, megabytes: int) -> float:
    stream = Stream(LINES[name], megabytes * MB)
    began = time.process_time()
    log = read(stream)  # type: ignore[arg-type]
    took = time.process_time() - began - stream.making
    assert (log is None) == (name == "prose")
    if log is not None:
        assert log.steps.step[0] <= 1
        assert (
            max(log.steps.step[-1], log.evaluations.step[-1] if len(log.evaluations) else 0)
            >= stream.rows - 1
        )
        assert len(log.steps) <= 400_000
    return took


@pytest.mark.parametrize("name", LINES)
def test_a_log_is_read_at_its_pace(name: str) -> None:
    assert seconds_of(name, 2) < 2.0  # ten times what it takes


# In a process of its own, whose memory is then this one log's.
PROGRAM = """
import resource, sys
sys.path.insert(0, {here!r})
import test_log_size as sizes
sizes.seconds_of({name!r}, 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds = sizes.seconds_of({name!r}, 200)
print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="asks the system for a process's memory")
@pytest.mark.parametrize("name", LINES)
def test_200_mb_are_read_in_time_and_memory(name: str) -> None:
    program = PROGRAM.format(here=str(Path(__file__).parent), name=name)
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600
    )
    seconds, mebibytes = map(float, found.stdout.split())
    assert seconds < 15
    assert mebibytes < 200
