"""Nothing is claimed of sound published runs: 142 of them, where they lie beside the repository."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from onecard.report.curve.alarms import alarms_of
from onecard.report.curve.findings import findings_of
from onecard.report.log import Evaluations, Log, Steps
from onecard.report.mistakes.all import mistakes_of
from onecard.report.run_facts import RunFacts, Schedule

CURVES = Path(__file__).resolve().parents[3] / "shared" / "data" / "curves"
INDEX = CURVES / "index.jsonl"
RUNS = [json.loads(line) for line in INDEX.read_text(encoding="utf-8").splitlines()] if INDEX.exists() else []
# Read over and over, and validated on few batches: there much may rightly be said.
UNSOUND = ("jax-wikitext",)


def facts_of(run: dict[str, Any]) -> RunFacts:
    with (CURVES / run["file"]).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def columns(loss: str, name: str) -> dict[str, list[float]]:
        names = {"step": "step", name: loss, "tokens": "tokens", "lr": "lr"}
        kept = [row for row in rows if row[loss]]
        return {mine: [float(row[theirs] or math.nan) for row in kept] for mine, theirs in names.items()}

    planned = run["schedule"]
    known = ("cosine", "linear", "constant", "wsd")
    kind = planned["kind"] if planned["kind"] in known else "unknown"
    schedule = Schedule(
        kind, planned.get("peak"), planned.get("final"), planned.get("warmup_steps") or 0,
        planned.get("horizon"), planned.get("decay_start"), planned.get("decay_shape") or "linear",
    )  # fmt: skip
    gpt2 = run.get("tokenizer") == "gpt2"
    log = Log(
        "csv", Steps(**columns("loss_train", "loss")), Evaluations(**columns("loss_val", "val")),
        {"out_dir": run["id"]},
    )  # fmt: skip
    return RunFacts(
        log=log, parameters=run["params"], tokens_per_step=run["tokens_per_step"],
        last_step=run["total_steps"],
        schedule=schedule, tokenizer="gpt2" if gpt2 else None, vocab_size=50304 if gpt2 else None,
        data=run.get("dataset"), optimizer=run.get("optimizer"), source=run["file"],
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(not RUNS, reason="the published curves are not here")
@pytest.mark.parametrize("run", RUNS, ids=[run["id"] for run in RUNS])
@pytest.mark.parametrize("part", [1.0, 0.5, 0.2], ids=["whole", "half", "fifth"])
def test_a_sound_run_is_not_accused(run: dict[str, Any], part: float) -> None:
    """Neither of the whole run nor of its beginning."""
    if run["family"] in UNSOUND:
        pytest.skip("much may be said of it")
    facts = facts_of(run)
    last = part * run["total_steps"]
    log = facts.log
    steps, evaluations = (
        columns.where([step <= last for step in columns.step]) for columns in (log.steps, log.evaluations)
    )
    facts = RunFacts(**{**vars(facts), "log": Log(log.format, steps, evaluations, log.settings)})
    assert [mistake.text for mistake in mistakes_of(facts)] == []
    assert [alarm.text for alarm in alarms_of(facts)] == []
    assert [found.text for found in findings_of(facts) if found.good is False] == []
    if len(steps) + len(evaluations) < 3:
        return  # its log begins later
    found = {each.key for each in findings_of(facts)}
    assert "losses" in found
    assert {"still-falling", "rising", "plateau", "slope-unclear"} & found or "rate-warm-up" in found
