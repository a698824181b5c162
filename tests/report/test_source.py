"""What is read of what a person names."""

from __future__ import annotations

import io

import pytest

from onecard.report import reading
from onecard.report.gathering import source


def test_of_a_long_log_the_beginning_and_the_end_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_KEPT", 1000)
    lines = "".join(f"iter {n}: loss 4.0000, time 400.00ms, mfu 11.00%\n" for n in range(5000)).encode()
    stream = source.Source(io.BytesIO(lines))
    log = reading.read(stream)
    assert log is not None
    assert len(log.steps) == 5000
    assert stream.content == lines[:1000] + lines[-1000:]
    short = source.Source(io.BytesIO(lines[:1500]))
    while short.read(7):
        pass
    assert short.content == lines[:1500]
