"""What `benchmarks/fit.py` measured on a card, judged anew."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NEWEST = "2026-11-18-fit-h200.json"


def test_every_promise_about_memory_has_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fit = importlib.import_module("fit")
    rows = json.loads((BENCHMARKS / "results" / NEWEST).read_text())["rows"]
    options = fit.arguments().parse_args(["--parts", *fit.PARTS])
    for length, (on_card, _tiny) in fit.LENGTHS.items():
        setattr(options, length, on_card)
    found: list[dict[str, Any]] = fit.judged(options, rows)
    assert not [f"{c['part']}: {c['what']}" for c in found if not c["ok"]]
    assert {c["part"] for c in found} == {"start", "pause", "caps", "sweep", "inject", "ballast"}
    assert sum("beside the best setting measured" in c["what"] for c in found) == 6
    assert sum("beside the undisturbed run's" in c["what"] for c in found) == 1
