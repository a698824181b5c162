"""What `benchmarks/fit.py` measured on a card, judged anew: every promise about memory has its figure."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NEWEST = "2026-11-18-fit-h200.json"
# What the newest does not have: errors that change the setting each time, and what Muon's update allocates.
BEFORE, ONLY_BEFORE = "2026-11-16-fit-part-2-h200.json", ("loud", "quiet, muon")


def checks(name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fit = importlib.import_module("fit")
    rows = json.loads((BENCHMARKS / "results" / name).read_text())["rows"]
    options = fit.arguments().parse_args(["--parts", *fit.PARTS])
    for length, (on_card, _tiny) in fit.LENGTHS.items():
        setattr(options, length, on_card)
    found: list[dict[str, Any]] = fit.judged(options, rows)
    return found


def test_all_that_the_newest_has_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(NEWEST, monkeypatch)
    failed = {f"{c['part']}: {c['what']}" for c in found if not c["ok"]}
    assert failed == {f"inject: {job}: ran" for job in ONLY_BEFORE}
    parts = {c["part"] for c in found if c["ok"]}
    assert parts == {"start", "pause", "caps", "sweep", "inject", "ballast"}
    assert sum("beside the best setting measured" in c["what"] for c in found) == 6


def test_the_rest_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [c for c in checks(BEFORE, monkeypatch) if c["part"] == "inject"]
    assert len(found) > 15 and all(c["ok"] for c in found if not c["what"].startswith("quiet again"))
    (loss,) = (c for c in found if c["what"].startswith("loud: final validation loss"))
    assert loss["ok"]
