"""Measured steps of nanoGPT and of our engine away from the shapes that plan's speeds were fitted to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onecard.arch.layout import Setting, default_chunk
from onecard.arch.shapes import GPT2Shape

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_DEFAULTS: dict[str, Any] = {
    "compile": True, "dropout": 0.0, "vocab": 50304, "accumulation": 4, "head_dim": 64, "evaluates": False,
    "checkpointing": False, "cap_gib": 0.0,
}  # fmt: skip


def peers(contender: str) -> list[dict[str, Any]]:
    """Rows of the newest result, their jobs complete."""
    results = json.loads(sorted(RESULTS.glob("*-peers-h200.json"))[-1].read_text())
    rows = [row | {"job": _DEFAULTS | row["job"]} for row in results["rows"] if "error" not in row]
    found = [row for row in rows if row["job"]["contender"] == contender]
    assert found
    return found


def name_of(row: dict[str, Any]) -> str:
    return str(row["name"])


def shape_of(job: dict[str, Any]) -> GPT2Shape:
    heads = max(1, job["n_embd"] // job["head_dim"])
    return GPT2Shape(job["n_layer"], heads, job["n_embd"], job["vocab"], job["block"], False)


def setting_of(job: dict[str, Any]) -> Setting:
    chunk = default_chunk(job["vocab"])
    return Setting(job["batch"], chunk, compile=job["compile"], cuda_graphs=False)
