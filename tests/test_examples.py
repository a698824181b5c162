"""Property tests try the same examples whatever ran before them; see conftest.py."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def examples() -> list[tuple[int, float, str]]:
    tried = []

    @settings(max_examples=200, database=None)
    @given(st.integers(0, 10**9), st.floats(0, 1e9), st.text(max_size=9))
    def collect(whole: int, real: float, text: str) -> None:
        tried.append((whole, real, text))

    collect()
    return tried


def test_a_module_imported_before_does_not_change_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not settings().derandomize:
        pytest.skip("new examples were asked for")
    before = examples()
    (tmp_path / "newly_imported.py").write_text(
        f"whole = {list(range(1000, 1100))}\nreal = {[n + 0.25 for n in range(100)]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("newly_imported")
    assert len(before) >= 200
    assert examples() == before
