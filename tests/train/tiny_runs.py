"""Runs that take a second on a CPU, for tests that disturb them, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.run.stored import list_checkpoints

TINY = [
    "--dataset=tiny", "--vocab_size=61", "--n_layer=3", "--n_head=2", "--n_embd=32", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=2", "--learning_rate=1e-2", "--min_lr=1e-3",
    "--warmup_iters=3", "--lr_decay_iters=40", "--max_iters=20", "--eval_interval=5", "--eval_iters=2",
    "--device=cpu", "--no-compile", "--sample_tokens=0", "--out_dir=out",
]  # fmt: skip
FULL = "CUDA out of memory"


def config(*more: str) -> RunConfig:
    """A later flag wins."""
    return load_config(RunConfig, [*TINY, *more])


def weights(out_dir: str = "out") -> dict[str, torch.Tensor]:
    return list_checkpoints(Path(out_dir) / "checkpoints")[-1].model_tensors()


def events(kind: str, out_dir: str = "out") -> list[dict[str, Any]]:
    lines = (Path(out_dir) / "events.jsonl").read_text().splitlines()[1:]
    return [event for event in map(json.loads, lines) if event["event"] == kind]
