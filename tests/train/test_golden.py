"""Losses that a refactor must reproduce.

In float64 the order of summation moves the tenth digit at most, so the same numbers come out on
every CPU: what differs is a change of data order, initialisation, dropout, schedule or update.
Recorded per torch version with `make golden`; look at the difference before you commit a new file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import learnable_tokens, write_bins

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.data.batches import Sequences
from onecard.data.bins import TokenFile
from onecard.data.prefetch import Prefetcher
from onecard.model.registry import model_class
from onecard.optim.recipe import rules_of
from onecard.optim.schedule import rates
from onecard.train.loop import train
from onecard.train.step import StepOptions, Stepper

GOLDEN = Path(__file__).parent.parent / "golden"
VERSION = ".".join(torch.__version__.split(".")[:2])
CASES: dict[str, list[str]] = {
    "plain": [],
    "bias": ["--bias=True", "--weight_decay=0.3"],
    "dropout": ["--dropout=0.2"],
    "unclipped": ["--grad_clip=0", "--decay_lr=False"],
    "gpt2 by muon": ["--optimizer=muon"],
    "nanochat 2025": ["--arch=nanochat", "--generation=2025"],
    # Its learning rates follow the batch, and this one is small.
    "nanochat 2026": ["--arch=nanochat", "--matrix_lr=1", "--embedding_lr=10", "--unembedding_lr=0.3"],
}
COMMON = [
    "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=3",
    "--gradient_accumulation_steps=3", "--learning_rate=1e-2", "--min_lr=1e-3", "--warmup_iters=5",
    "--lr_decay_iters=30", "--max_iters=30", "--vocab_size=61",
]  # fmt: skip


def float64_losses(config: RunConfig, folder: Path) -> list[float]:
    """30 steps over more than two epochs of data, split unevenly."""
    path = folder / "train.bin"
    learnable_tokens(1_900).tofile(path)
    shape = config.shape(61)
    stepper = Stepper(
        model_class(shape).initialised(shape, config.seed),
        device="cpu",
        dtype="float64",
        rules=rules_of(config, shape),
        options=StepOptions(dropout=config.dropout, grad_clip=config.grad_clip),
    )
    sequences = Sequences(TokenFile.open(path), config.block_size, config.seed)
    losses = []
    with Prefetcher(
        sequences, sequences.start(), step_sequences=config.sequences_per_step, micro_batch=4
    ) as batches:
        for step in range(config.max_iters):
            micros = batches.next_step().micros
            losses.append(sum(stepper.backward(m, config.tokens_per_step).item() for m in micros))
            stepper.update(rates(step, config))
    return losses


def recorded(case: str, losses: list[float]) -> list[float]:
    path = GOLDEN / f"losses-torch-{VERSION}.json"
    if os.environ.get("ONECARD_RECORD_GOLDEN"):
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, case: losses}, indent=1) + "\n")
    content = json.loads(path.read_text()) if path.exists() else {}
    if case not in content:  # not recorded with this torch yet: in float64 another version's figures must do
        content = json.loads(sorted(GOLDEN.glob("losses-torch-*.json"))[-1].read_text())
    figures: list[float] = content[case]
    return figures


@pytest.mark.parametrize("case", CASES)
def test_float64_losses_are_the_recorded_ones(case: str, tmp_path: Path) -> None:
    config = load_config(RunConfig, [*COMMON, *CASES[case]])
    losses = float64_losses(config, tmp_path)
    assert losses == pytest.approx(recorded(case, losses), rel=1e-9)
    assert losses[-1] < losses[0] - 0.5


def test_a_whole_run_in_float32_gives_the_recorded_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_bins(tmp_path / "data" / "tiny", train=2_000, val=600)
    arguments = ["--dataset=tiny", "--device=cpu", "--no-compile", "--eval_interval=15", "--eval_iters=4"]
    summary = train(load_config(RunConfig, [*COMMON, *arguments, "--sample_tokens=0"]))
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()[1:]]
    losses = [line["loss"] for line in lines if "loss" in line] + [summary.values["val_loss"]]
    assert losses == pytest.approx(recorded("run in float32", losses), abs=2e-4)
