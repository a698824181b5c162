"""How many tokens an architecture and its optimizer need for a loss; and what low-bit storage costs.

    python benchmarks/tokens_to_loss.py --data PARQUET... --contenders gpt2 2026 matched --out FILE.json
    python benchmarks/tokens_to_loss.py --contenders 2025 2025-tight --out FILE.json
    python benchmarks/tokens_to_loss.py --draw FILE.png --from FILE.json...

Everybody reads the same text (GPT-2's tokens, 2.5% of the documents held out) in the same order, 65,536
tokens a step, sequences of 1024, at most two passes. `gpt2` is GPT-2 124M with AdamW (1e-3, 100 steps of
warm-up, cosine to a tenth) over --tokens. `2026` is nanochat's d12 of that year by the dial, `matched`
the same architecture without value embeddings and as narrow as brings it to GPT-2's parameters; both run
to their own end after --fraction of the tokens. The others compare storages over all of --tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from recipe import arguments, compare, onecard_curves

TIGHT = ["--master_weights=bf16", "--optim_states=int8", "--recompute=block", "--offload=gradients"]
GPT2 = ["--learning_rate=1e-3", "--min_lr=1e-4", "--bias=False"]
# Settings, and whether the contender ends after --fraction of the tokens.
CONTENDERS: dict[str, tuple[list[str], bool]] = {
    "gpt2": (GPT2, False),
    "gpt2-muon": ([*GPT2, "--optimizer=muon"], True),
    "2026": (["--arch=nanochat", "--generation=2026"], True),
    "matched": (["--arch=nanochat", "--generation=2026", "--value_embeddings=False"], True),
    "2025": (["--arch=nanochat", "--generation=2025"], False),
    "2025-low-bit": (["--arch=nanochat", "--generation=2025", *TIGHT[:2]], False),
    "2025-tight": (["--arch=nanochat", "--generation=2025", *TIGHT], False),
}


def config_of(options: argparse.Namespace, contender: str) -> Any:
    from onecard.config.knobs import load_config
    from onecard.config.run import RunConfig

    settings, shortened = CONTENDERS[contender]
    per_step = options.batch * options.accumulation * options.block
    steps = round(options.tokens * (options.fraction if shortened else 1.0)) // per_step
    width = options.matched_width if contender == "matched" else options.n_embd
    words = [
        f"--dataset={options.dataset}", f"--out_dir={options.work / contender}", "--fresh",
        f"--seed={options.seed}", f"--batch_size={options.batch}", f"--block_size={options.block}",
        f"--gradient_accumulation_steps={options.accumulation}", f"--max_iters={steps}",
        f"--eval_interval={max(steps // 12, 1)}", f"--eval_iters={options.eval_iters}", "--log_interval=10",
        "--sample_tokens=0", "--always_save_checkpoint=False", f"--n_layer={options.n_layer}",
        f"--n_embd={width}", f"--device={options.device}", f"--dtype={options.dtype}",
        f"--compile={not options.eager}", *settings,
    ]  # fmt: skip
    if contender.startswith("gpt2"):
        heads, warmup = width // options.head, min(100, steps // 5)
        words += [f"--n_head={heads}", f"--lr_decay_iters={steps}", f"--warmup_iters={warmup}"]
    else:
        words += [f"--n_head={max(1, width // (2 * options.head))}", f"--vocab_size={options.vocab}"]
    return load_config(RunConfig, words)


def measure(options: argparse.Namespace, contender: str) -> dict[str, Any]:
    import torch

    config = config_of(options, contender)
    cuda = options.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()
    began = time.perf_counter()
    val, training, more = onecard_curves(config)
    return {
        "contender": contender,
        "settings": CONTENDERS[contender][0],
        "parameters": config.shape(options.vocab).parameters,
        "tokens": val[-1][0],
        "val_loss": val[-1][1],
        "seconds": round(time.perf_counter() - began, 1),
        "tokens_per_s": round(more["tokens_per_s"] or 0),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else None,
        "val": [(t, round(v, 5)) for t, v in val],
        "train": [(t, round(v, 4)) for t, v in training],
    }


def draw(files: list[Path], target: Path) -> None:
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    for row in rows:
        at, losses = zip(*((t / 1e6, v) for t, v in row["val"][1:]), strict=True)
        label = f"{row['contender']}, {row['parameters'] / 1e6:.0f}M parameters: {row['val_loss']:.3f}"
        (line,) = panel.plot(at, losses, "o-", ms=3, label=label)
        if row["contender"] == "gpt2":
            panel.axhline(row["val_loss"], color=line.get_color(), lw=0.8, ls=":")
    panel.set(xlabel="million tokens", ylabel="validation loss, nats per token")
    panel.legend()
    figure.savefig(target, dpi=130)


def main() -> None:
    sizes = {
        "matched_width": 640,
        "head": 64,
        "vocab": 50304,
        "tokens": 972 * 65536,
    }  # two passes of the text
    parser = arguments(__doc__, list(CONTENDERS), **sizes)
    parser.add_argument("--fraction", type=float, default=0.4)
    options = parser.parse_args()
    if options.draw:
        draw(options.files, options.draw)
    else:
        compare(options, "validation loss over tokens, architectures and storages", measure)


if __name__ == "__main__":
    main()
