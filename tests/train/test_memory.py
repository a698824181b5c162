from __future__ import annotations

import os
import sys

import pytest

from onecard.hardware.cpu import available_memory
from onecard.hardware.machine import local_cpu
from onecard.train.memory import cap_memory, use_expandable_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.skipif(sys.platform != "linux", reason="where the platform has it")
@pytest.mark.parametrize("name", NAMES)
def test_growing_segments_are_asked_for_and_a_users_own_setting_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    use_expandable_segments()
    assert [os.environ[n] for n in NAMES if n in os.environ] == ["expandable_segments:True"]
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    assert {n: os.environ.get(n) for n in NAMES} == {**dict.fromkeys(NAMES), name: "max_split_size_mb:64"}


def test_a_cap_is_about_a_card() -> None:
    assert cap_memory("cpu", None, None) == []
    (note,) = cap_memory("cpu", None, 1.0)
    assert "CPU" in note


@pytest.mark.skipif(sys.platform != "linux", reason="not known elsewhere")
def test_available_memory_is_less_than_there_is() -> None:
    available, total = available_memory(), local_cpu().memory_bytes
    assert available is not None
    assert total is not None
    assert 0 < available < total
