"""The committed measurements of onecard's own runs, as the planner's shapes and settings."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard.arch.layout import Setting, default_chunk
from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, Shape

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = (9, 0)


@dataclass(frozen=True)
class Run:
    """One kind of measurement; its rounds agree in memory and are put together by the median speed."""

    name: str
    shape: Shape
    setting: Setting
    sequences: int  # of a step
    allocated_gib: float
    reserved_gib: float | None
    tokens_per_s: float
    by_muon: bool = False

    @property
    def refined(self) -> bool:
        return isinstance(self.shape, Nanochat2026Shape)


def rows_of(contender: str) -> list[dict[str, Any]]:
    """Of every table but the first, whose loss took chunks of another size."""
    files = [f for f in sorted(RESULTS.glob("*memory-speed*h200.json")) if "chunk-2048" not in f.name]
    assert len(files) >= 5
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return [r for r in rows if r["case"]["contender"] == contender and "peak_allocated_gib" in r]


def table_runs() -> list[Run]:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of("onecard"):
        by_name.setdefault(f"{row['label']} {row['shape']}", []).append(row)
    return [_run(name, rows) for name, rows in by_name.items()]


def _run(name: str, rows: list[dict[str, Any]]) -> Run:
    case = rows[0]["case"]
    knobs, vocabulary = case["settings"], case["vocab"]
    shape = GPT2Shape(case["n_layer"], case["n_head"], case["n_embd"], vocabulary, case["block"], False)
    setting = Setting(
        case["batch"],
        knobs.get("loss_chunk") or default_chunk(vocabulary),
        knobs.get("recompute", "none"),
        knobs.get("offload", "none"),
        knobs.get("master_weights", "fp32"),
        knobs.get("optim_states", "fp32"),
        case["compile"],
        bool(knobs.get("graphs")),
    )
    return Run(
        name, shape, setting, case["batch"] * case["accumulation"],
        max(row["peak_allocated_gib"] for row in rows), max(row["peak_reserved_gib"] for row in rows),
        statistics.median(row["tokens_per_s"] for row in rows),
    )  # fmt: skip


def nanochat_runs() -> list[Run]:
    """The loss curves' runs: 16×1024 tokens, GPT-2's vocabulary. Their peaks count, their speeds do not."""
    tight = Setting(16, 4096, "block", "gradients", "bf16", "int8")
    d12 = (12, 6, 768, 50304, 1024)
    known: dict[str, tuple[Shape, Setting]] = {
        "2025": (NanochatShape(*d12), Setting(16, 4096)),
        "2025-tight": (NanochatShape(*d12), tight),
        "2026": (Nanochat2026Shape(*d12), Setting(16, 4096)),
        "matched": (
            Nanochat2026Shape(12, 5, 640, 50304, 1024, value_embeddings=False),
            Setting(16, 4096),
        ),
        "gpt2": (GPT2Shape(12, 12, 768, 50304, 1024, False), Setting(16, 4096)),
    }
    found = []
    for file in ("2026-11-16-tight-recipe-h200.json", "2026-11-16-tokens-to-loss-h200.json"):
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            shape, setting = known[row["contender"]]
            assert shape.parameters == row["parameters"]
            muon = row["contender"] != "gpt2"
            found.append(
                Run(
                    f"{row['contender']} {file}",
                    shape,
                    setting,
                    64,
                    row["peak_allocated_gib"],
                    None,
                    0.0,
                    muon,
                )
            )
    assert len(found) == 5
    return found


D32 = NanochatShape(32, 16, 2048, 65536, 2048)
D32_SETTING = Setting(4, default_chunk(65536), "block", "gradients", "bf16", "int8")


def d32_row(part: str) -> dict[str, Any]:
    rows = json.loads((RESULTS / "2026-11-16-d32-h200.json").read_text())["rows"]
    (found,) = (row for row in rows if row["part"] == part)
    return found


def d32_run() -> Run:
    row = d32_row("train")
    return Run(
        "d32", D32, D32_SETTING, 256, row["peak_allocated_gib"], row["peak_reserved_gib"], 0.0, by_muon=True
    )
