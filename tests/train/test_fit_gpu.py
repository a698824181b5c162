"""The fit on a CUDA card: a tight cap, a real shortage, memory that comes back, a pause."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_bins

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.model.compiling import graphs_compiled
from onecard.plan.lines import GIB
from onecard.run.stored import list_checkpoints
from onecard.train import refit as refit_module
from onecard.train.loop import Training, train
from onecard.train.memory import allocator_bytes, allocator_retries, free_memory_gib
from onecard.train.other_processes import look_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
SMALL = [
    "--dataset=tiny", "--vocab_size=8192", "--n_layer=6", "--n_head=4", "--n_embd=256", "--block_size=512",
    "--batch_size=16", "--gradient_accumulation_steps=2", "--learning_rate=1e-3", "--min_lr=1e-4",
    "--warmup_iters=5", "--lr_decay_iters=48", "--max_iters=48", "--eval_interval=24", "--eval_iters=2",
    "--device=cuda", "--dtype=bfloat16", "--no-compile", "--sample_tokens=0", "--out_dir=out",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    write_bins(tmp_path / "data" / "tiny", train=100_000, val=30_000)
    yield tmp_path
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def config(*more: str) -> RunConfig:
    return load_config(RunConfig, [*SMALL, *more])


def events(kind: str, out_dir: str = "out") -> list[dict[str, Any]]:
    lines = (Path(out_dir) / "events.jsonl").read_text().splitlines()[1:]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses(out_dir: str) -> list[float]:
    lines = map(json.loads, (Path(out_dir) / "metrics.jsonl").read_text().splitlines()[1:])
    return [line["loss"] for line in lines if "loss" in line]


def cap(gib: float) -> None:
    torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.mem_get_info()[1])


def test_we_are_not_another_process() -> None:
    torch.zeros(64, device="cuda")
    look = look_at("cuda")
    assert look.free_bytes and look.total_bytes and look.free_bytes < look.total_bytes
    assert not look.computing, "nobody else is on this machine's card"
    free = free_memory_gib("cuda")
    assert free is not None and 0 < free * GIB <= look.total_bytes


def test_predicted_and_measured_stand_side_by_side(place: Path) -> None:
    summary = train(config("--max_iters=12"))
    (reported,) = events("memory")
    assert reported["measured_gib"] == pytest.approx(reported["predicted_gib"], rel=0.06, abs=64 / 1024)
    plan = json.loads((place / "out" / "plan.json").read_text())
    assert plan["memory"]["allocated_gib"] == pytest.approx(reported["predicted_gib"], abs=0.001)
    assert summary.values["measured_gib"] > 0 and "predicted" in summary.text()


def test_a_tight_cap_starts_in_another_setting_and_holds(place: Path) -> None:
    # Small pieces: under a cap the allocator asks for the whole of one, even where only its end is missing.
    pieces = "--loss_chunk=1024"
    train(config("--out_dir=free", pieces))
    need = json.loads((place / "free" / "plan.json").read_text())["memory"]["reserved_gib"]
    cap(0.75 * need)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    summary = train(config("--out_dir=tight", pieces))
    assert summary.values["refits"] == 0, events("refitted", "tight")
    plan = json.loads((place / "tight" / "plan.json").read_text())
    assert plan["as_given"] is False
    assert torch.cuda.max_memory_reserved() <= 0.75 * need * GIB
    apart = [abs(a - b) for a, b in zip(losses("free"), losses("tight"), strict=True)]
    assert max(apart) < 0.05


def test_under_a_cap_the_allocator_does_not_start_over_in_every_step(place: Path) -> None:
    """Though a chunk of logits is a quarter of all that a step takes."""
    words = ["--auto_fit=False", "--cuda_graphs=False"]
    train(config("--out_dir=free", "--max_iters=2", *words))
    need = json.loads((place / "free" / "plan.json").read_text())["memory"]["reserved_gib"] + 44 / 1024
    torch.cuda.empty_cache()
    cap(need)
    before = allocator_retries("cuda")
    train(config("--out_dir=capped", *words))
    assert allocator_retries("cuda") - before <= 6, "in 48 steps of two micro-batches"


def test_memory_that_is_taken_and_given_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program, played by ourselves: torch's own limit goes down at step 10 and up again at 20."""
    monkeypatch.setattr(refit_module, "_CLIMB_EVERY", 4)
    monkeypatch.setattr(refit_module, "_CLIMB_SECONDS", 0.0)
    monkeypatch.setattr("onecard.train.fit._PATIENCE", 4)
    train(config("--out_dir=free"))
    torch.cuda.empty_cache()
    needed = json.loads((place / "free" / "plan.json").read_text())["memory"]["allocated_gib"]
    plain = Training._step

    def step(training: Training, *arguments: Any) -> bool:
        if training.position.step == 10:
            training._settle()
            torch.cuda.empty_cache()
            cap(0.6 * needed)
        if training.position.step == 20:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return plain(training, *arguments)

    monkeypatch.setattr(Training, "_step", step)
    summary = train(config())
    where = [event["where"] for event in events("refitted")]
    assert "training" in where and "climb" in where
    assert summary.values["step"] == 48 and len(losses("out")) == 48
    assert [c.step for c in list_checkpoints(place / "out" / "checkpoints")][-1] == 48
    assert max(abs(a - b) for a, b in zip(losses("free"), losses("out"), strict=True)) < 0.05
    assert allocator_bytes("cuda", None, None) > 0  # type: ignore[operator]


@pytest.mark.parametrize("words", [[], ["--recompute=block"]])
def test_probes_compile_nothing(place: Path, words: list[str]) -> None:
    """Sampling before the first step must not make the layers compile for its shapes."""
    letters = ["\n", *(chr(ord("A") + i) for i in range(60))]
    meta = {"vocab_size": 61, "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (place / "data" / "tiny" / "meta.pkl").write_bytes(pickle.dumps(meta))
    small = ["--n_layer=2", "--compile=True", "--max_iters=6", "--eval_interval=100", "--sample_tokens=8"]
    found = []
    for more in (["--out_dir=probed"], ["--out_dir=plain", "--auto_fit=False"]):
        before = graphs_compiled()
        train(config(*small, *words, *more))
        found.append(graphs_compiled() - before)
    assert found[0] == found[1] > 0
