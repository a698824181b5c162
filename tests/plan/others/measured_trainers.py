"""Peaks of other people's trainers as a card had them, and the same steps on paper."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape
from onecard.plan.others.huggingface_step import HuggingFaceGPT2, HuggingFaceLlama, LlamaShape
from onecard.plan.others.nanochat_compiled import CompiledNanochat
from onecard.plan.others.nanochat_eager import EagerNanochat
from onecard.plan.others.trainer import Played

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
_DEFAULTS: dict[str, Any] = {"compile": True, "evaluates": False, "checkpointing": False, "head_dim": 64}


def rows(contender: str) -> list[dict[str, Any]]:
    """Of the newest result, their jobs complete."""
    results = json.loads(sorted(RESULTS.glob("*-peers-h200.json"))[-1].read_text())
    found = [
        row | {"job": _DEFAULTS | row["job"]} for row in results["rows"]
        if row["job"]["contender"].startswith(contender) and "error" not in row
    ]  # fmt: skip
    assert found
    return found


def name_of(row: dict[str, Any]) -> str:
    return str(row["name"])


def shape_of(job: dict[str, Any]) -> Any:
    sizes = (job["n_layer"], job["n_embd"] // job["head_dim"], job["n_embd"])
    if job["contender"] == "huggingface-llama":
        inner = -(-8 * job["n_embd"] // 3 // 256) * 256
        return LlamaShape(*sizes, inner, job["vocab"], job["block"])
    if job["contender"] == "huggingface-gpt2":
        return GPT2Shape(*sizes, job["vocab"], job["block"], bias=True)
    kind = NanochatShape if job["contender"] == "nanochat-2025" else Nanochat2026Shape
    return kind(*sizes, job["vocab"], job["block"])


def trainer_of(job: dict[str, Any]) -> Any:
    """As it was measured, at its first moment."""
    kinds: dict[str, Callable[..., Played]] = {
        "huggingface-llama": HuggingFaceLlama, "huggingface-gpt2": HuggingFaceGPT2,
    }  # fmt: skip
    nanochat = CompiledNanochat if job["compile"] else EagerNanochat
    options = {"checkpointing": True} if job["checkpointing"] else {}
    return kinds.get(job["contender"], nanochat)(shape_of(job), job["batch"], **options)
