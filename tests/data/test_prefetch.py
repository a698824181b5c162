"""Reading ahead, where it cannot begin; what it reads is in test_batches.py."""

from __future__ import annotations

import threading

import pytest
from conftest import MemoryTokens

from onecard.data.batches import Sequences
from onecard.data.prefetch import Prefetcher
from onecard.train.memory import is_out_of_memory


def test_a_thread_that_cannot_be_started_is_met_where_a_step_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There it can be tried again; opening one must not end a run."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sequences = Sequences(MemoryTokens(1000), 8, seed=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        batches = Prefetcher(sequences, sequences.start(), step_sequences=4, micro_batch=2)
    with batches, pytest.raises(RuntimeError, match="new thread") as met:
        batches.next_step()
    assert is_out_of_memory(met.value)
