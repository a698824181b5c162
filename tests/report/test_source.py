"""What is read of what a person names."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecard.cli import main
from onecard.report import source


def test_a_file_larger_than_any_log_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source, "MAX_BYTES", 1000)
    path = tmp_path / "data.bin"
    path.write_bytes(b"x" * 5000)
    assert len(source._content(str(path))) == 1001
    assert main(["eta", str(path)]) == 2
    assert "too large for a log" in capsys.readouterr().err
