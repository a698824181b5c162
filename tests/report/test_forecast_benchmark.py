"""benchmarks/forecast.py on a folder of made runs; the committed result; and the real runs where they lie."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from onecard.report.forecast import learnt
from onecard.report.forecast.rates import Shape, table

ROOT = Path(__file__).resolve().parents[2]
CURVES = ROOT.parent / "shared" / "data" / "curves"
RESULT = sorted((ROOT / "benchmarks" / "results").glob("*-forecast.json"))[-1]


@pytest.fixture
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """benchmarks/forecast.py and forecast_fit.py."""
    pytest.importorskip("numpy")
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import forecast
    import forecast_fit

    yield forecast, forecast_fit
    sys.path[:] = before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three families of three runs each, made by the law with constants of their own."""
    draw, lines = random.Random(4), []
    for family, level, gain in (("a", 2.8, 0.12), ("b", 3.3, 0.2), ("c", 3.0, 0.16)):
        for number, end in enumerate((5000, 10_000, 20_000)):
            name = f"{family}{number}"
            rates = table([(0, 0.0), (100, 6e-4), (0.8 * end, 6e-4), (end, 0.0)])
            assert rates is not None
            rows = ["step,tokens,loss_train,loss_val,lr"]
            for step in range(0, end + 1, 100):
                fallen = 0.25 * ((rates.progress(step, 0.4) + 50) / 8000) ** -0.6
                cooled = gain * rates.cooled(step, Shape(0.4, 0.3, 20.0))
                loss = level + fallen - cooled + draw.gauss(0, 0.001)
                rows.append(f"{step},,,{loss:.5f},{rates.at(step):.6g}")
            (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
            lines.append(
                {"id": name, "family": family, "file": f"{name}.csv", "primary_loss": "val",
                 "noise_sd": 0.001, "horizon_group": family, "source": {"repo": "some/where"},
                 "licence": "MIT"}
            )  # fmt: skip
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_runs_left_out_are_forecast_and_a_fit_is_written(
    scripts: tuple[ModuleType, ModuleType], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, _ = scripts
    monkeypatch.setattr(script, "LEARNT", tmp_path / "learnt.json")
    script.main([str(folder), "--fit", "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    errors = {(row["way"], row["seen"]): row["error"] for row in result["rows"]}
    assert errors["family left out", 0.5] < 0.03 > errors["run left out", 0.5]
    beside = {(row["forecast"], row["seen"]): row["error"] for row in result["beside"]}
    assert beside["power law", 0.5] > 2 * errors["family left out", 0.5]
    assert result["longer"]["n"] == 6 and result["longer"]["error"] < 0.03
    written = json.loads((tmp_path / "learnt.json").read_text())
    assert written["sources"] == ["some/where (MIT)"] and len(written["rows"]) == 9 * 7
    again = tmp_path / "again.json"
    monkeypatch.setattr(script, "LEARNT", again)
    script.main([str(folder), "--fit"])
    assert again.read_text() == (tmp_path / "learnt.json").read_text()


def test_many_posteriors_at_once_are_those_of_one_by_one(
    scripts: tuple[ModuleType, ModuleType], folder: Path
) -> None:
    fit = scripts[1].Fit(scripts[1].runs_in(folder)[:3])
    gain = (-1.9, 0.4, 0.0, 0.2, 0.3)
    for moment, found in zip(fit.moments, fit.stack.with_usual_gain(gain), strict=True):
        single = learnt.with_usual_gain(moment.evidence, moment.rate, gain)
        assert found.loss == pytest.approx(single.loss, abs=1e-5)
        assert found.width == pytest.approx(single.width, rel=1e-3)
        assert found.gain == pytest.approx(single.gain, rel=1e-3)


def test_the_committed_result_meets_what_is_required() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert result["runs"] == 142
    assert [row["what"] for row in result["requirements"] if not row["met"]] == []
    half = {(row["way"], row["seen"]): row["error"] for row in result["rows"]}
    power = {row["seen"]: row["error"] for row in result["beside"] if row["forecast"] == "power law"}
    assert all(error < 0.4 * power[seen] for (_, seen), error in half.items())
    assert math.isfinite(result["longer"]["error"]) and result["longer"]["n"] >= 30


@pytest.mark.long
@pytest.mark.skipif(not CURVES.exists(), reason="the published runs are not beside the repository")
def test_the_published_runs_again(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/forecast.py", str(CURVES), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    committed = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    for row, before in zip(json.loads(out.read_text())["rows"], committed, strict=True):
        assert row["error"] == pytest.approx(before["error"], abs=5e-4), (row["way"], row["seen"])
