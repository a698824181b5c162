"""The processor and its memory, as much as this process may use."""

from __future__ import annotations

import os

import pytest

from onecard.hardware import cpu as processor


def test_the_cpu_of_this_machine() -> None:
    cpu = processor.local_cpu()
    assert cpu.name
    assert 1 <= cpu.cores <= (os.cpu_count() or 1)
    assert cpu.memory_bytes is None or cpu.memory_bytes > 2**26


def test_a_container_limit_counts_as_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/cpuinfo": "processor: 0\nmodel name\t: Made-up 9000\n",
        "/sys/fs/cgroup/memory.max": "4096\n",
    }
    monkeypatch.setattr(processor, "_read", files.__getitem__)
    assert processor.local_cpu().memory_bytes == 4096
    assert processor.local_cpu().name == "Made-up 9000"
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert processor.local_cpu().memory_bytes != 4096
