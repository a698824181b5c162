"""Train with nanoGPT's own train.py and with onecard on the same weights and batches; compare losses.

    python benchmarks/parity_nanogpt.py --nanogpt PATH_TO_A_CLONE [--steps 200] [--save-fixture FILE]

nanoGPT's train.py runs as it is, in this process, on a small data set written here. Its GPT.forward
is wrapped to note the first weights, every training batch and every loss in full precision. Then
onecard's Stepper gets the same weights and batches, once for every way in which a step may be computed
(what is recomputed, how the loss is chunked, where masters and accumulators are). The fixture lets a test
repeat our half without nanoGPT.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from onecard.arch.shapes import GPT2Shape
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.data.prefetch import Micro
from onecard.model.gpt2 import GPT2
from onecard.optim.region_buffers import Storage
from onecard.optim.rules import adamw_for_all
from onecard.optim.schedule import StepRates, learning_rate
from onecard.run.load import load_weights
from onecard.train.step import StepOptions, Stepper

VOCAB = 64
SETTINGS = {
    "batch_size": 4, "gradient_accumulation_steps": 2, "block_size": 32, "n_layer": 2, "n_head": 2,
    "n_embd": 32, "bias": True, "dropout": 0.0, "learning_rate": 3e-3, "min_lr": 3e-4, "warmup_iters": 10,
    "eval_interval": 100_000, "eval_iters": 1, "weight_decay": 0.1, "grad_clip": 1.0,
}  # fmt: skip
# Recompute, rows of logits at a time, offload.
WAYS = [("none", 4096, "none"), ("mlp", 50, "none"), ("block", 50, "optimizer"), ("block", 7, "gradients")]


def write_dataset(folder: Path) -> None:
    """Something to learn: every token is mostly a function of the one before it."""
    random = np.random.default_rng(0)
    tokens = [0]
    for surprise in random.random(20_000):
        following = (tokens[-1] * 5 + 1) % VOCAB
        tokens.append(int(random.integers(0, VOCAB)) if surprise < 0.2 else following)
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        np.array(tokens, dtype=np.uint16).tofile(folder / f"{split}.bin")
    import pickle

    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCAB, "itos": {}, "stoi": {}}))


def run_nanogpt(clone: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """nanoGPT's train.py, as it is; what went into and came out of its model."""
    noted: dict[str, Any] = {"weights": None, "x": [], "y": [], "loss": []}
    sys.path.insert(0, str(clone))
    import model as nanogpt_model  # type: ignore[import-not-found]  # in the clone

    plain_forward = nanogpt_model.GPT.forward

    def noting_forward(self: Any, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits, loss = plain_forward(self, idx, targets)
        if self.training and targets is not None:
            if noted["weights"] is None:
                noted["weights"] = {n: p.detach().clone() for n, p in self.named_parameters()}
            noted["x"].append(idx.clone())
            noted["y"].append(targets.clone())
            noted["loss"].append(loss.item())
        return logits, loss

    nanogpt_model.GPT.forward = noting_forward
    flags = [f"--{k}={v}" for k, v in settings.items()]
    here, arguments = Path.cwd(), sys.argv
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        write_dataset(Path(folder) / "data" / "parity")
        (Path(folder) / "configurator.py").write_text((clone / "configurator.py").read_text())
        os.chdir(folder)
        sys.argv = [
            "train.py",
            "--dataset=parity",
            "--device=cpu",
            "--compile=False",
            "--dtype=float32",
            *flags,
        ]
        try:
            runpy.run_path(str(clone / "train.py"), run_name="__main__")
        finally:
            os.chdir(here)
            sys.argv = arguments
    return noted


def run_onecard(noted: dict[str, Any], config: RunConfig, way: tuple[str, int, str]) -> list[float]:
    shape = GPT2Shape(config.n_layer, config.n_head, config.n_embd, VOCAB, config.block_size, config.bias)
    model = GPT2(shape)
    load_weights(model, noted["weights"])
    model.recompute, model.loss_chunk, place = way
    stepper = Stepper(
        model,
        device="cpu",
        dtype="float32",
        rules=adamw_for_all((config.beta1, config.beta2), config.weight_decay),
        storage=Storage(offload=place),
        options=StepOptions(grad_clip=config.grad_clip),
    )
    losses = []
    accumulation = config.gradient_accumulation_steps
    for step in range(len(noted["loss"]) // accumulation):
        losses.append(0.0)
        for i in range(step * accumulation, (step + 1) * accumulation):
            micro = Micro(noted["x"][i], noted["y"][i], torch.zeros(config.batch_size, dtype=torch.int64))
            losses[-1] += stepper.backward(micro, config.tokens_per_step).item()
        stepper.update(StepRates(learning_rate(step, config)))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-fixture", type=Path)
    options = parser.parse_args()
    settings = {**SETTINGS, "lr_decay_iters": options.steps, "max_iters": options.steps - 1}
    config = load_config(RunConfig, [f"--{k}={v}" for k, v in settings.items()])
    noted = run_nanogpt(options.nanogpt.resolve(), settings)
    accumulation = config.gradient_accumulation_steps
    theirs = [
        sum(noted["loss"][i : i + accumulation]) / accumulation
        for i in range(0, len(noted["loss"]), accumulation)
    ]
    assert len(theirs) == options.steps
    rows = []
    for way in WAYS:
        ours = run_onecard(noted, config, way)
        differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
        rows.append({
            "recompute": way[0], "loss_chunk": way[1], "offload": way[2], "last_loss": ours[-1],
            "largest_difference": max(differences), "at_step": differences.index(max(differences)),
        })  # fmt: skip
    print(json.dumps({
        "what": "onecard against nanoGPT's train.py, same weights and batches, CPU, float32",
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "machine": platform.machine(),
        "steps": options.steps, "settings": settings, "nanogpt_loss": [theirs[0], theirs[-1]],
        "largest_difference": max(row["largest_difference"] for row in rows), "rows": rows,
    }, indent=1))  # fmt: skip
    if options.save_fixture:
        tensors = {f"weights.{k}": v.contiguous() for k, v in noted["weights"].items()}
        tensors |= {k: torch.stack(noted[k]).to(torch.uint8) for k in ("x", "y")}
        tensors["loss"] = torch.tensor(theirs, dtype=torch.float64)
        save_file(tensors, options.save_fixture, metadata={"settings": json.dumps(settings)})


if __name__ == "__main__":
    main()
