"""Reading ahead, where it cannot begin or dies; what it reads is in test_batches.py."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import MemoryTokens

from onecard.data.batches import Sequences
from onecard.data.prefetch import Prefetcher
from onecard.train.memory import is_out_of_memory


def opened() -> Prefetcher:
    sequences = Sequences(MemoryTokens(1000), 8, seed=1)
    return Prefetcher(sequences, sequences.start(), step_sequences=4, micro_batch=2)


def no_thread(*arguments: Any) -> int:
    raise RuntimeError("can't start new thread")


def stillborn(work: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    """As where Python has no memory for the first lines of a thread: nobody hears of it."""
    return 0


def dies(prefetcher: Prefetcher, *arguments: Any) -> None:
    """Without even room to say why."""


@pytest.mark.parametrize("start", [no_thread, stillborn])
def test_a_thread_that_cannot_begin_is_met_where_a_step_is_tried(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., int]
) -> None:
    """There it can be tried again; opening one must neither end a run nor wait for ever."""
    monkeypatch.setattr(_thread, "start_new_thread", start)
    began = time.monotonic()
    with opened() as batches, pytest.raises((RuntimeError, MemoryError), match="new thread") as met:
        batches.next_step()
    assert is_out_of_memory(met.value) and time.monotonic() - began < 5


def test_a_thread_that_dies_amid_its_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetcher, "_read_ahead", dies)
    with opened() as batches, pytest.raises(MemoryError, match="has ended"):
        batches.next_step()
