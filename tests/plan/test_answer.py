"""What plan answers about a config as it stands, and about data that is not there yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onecard.cli import main

ROOT = Path(__file__).resolve().parents[2]
FINEWEB = str(ROOT / "config" / "train_fineweb.py")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of this machine, and no measurement of its card."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ONECARD_LANG", "en")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--gpu=RTX 4070", "--json"])
    return code, json.loads(capsys.readouterr().out)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", *words, "--gpu=RTX 4070"])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (["--auto_fit=False", "--vram_limit=2"], False),
        (["--auto_fit=True", "--vram_limit=2"], True),
        (["--auto_fit=False"], True),
    ],
)
def test_without_auto_fit_the_config_as_it_stands_decides(
    words: list[str], fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = told(capsys, FINEWEB, *words)
    assert found["fits"] is fits and code == (0 if fits else 1)


def test_what_would_fit_without_auto_fit_is_still_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, FINEWEB, "--auto_fit=False", "--vram_limit=2", "--stages")
    assert code == 1
    for part in ("As it stands it does not fit", "train would refuse", "Fits, and is as fast",
                 "tokens/s", "kWh", "Back to speed"):  # fmt: skip
        assert part in text
