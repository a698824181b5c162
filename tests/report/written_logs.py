"""Logs as nanoGPT, nanochat and onecard write them, for runs whose speed is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

NOTES_HEAD = """\
Overriding config with config/train_fineweb.py:
# FineWeb, 40M
out_dir = 'out-fineweb'
dataset = 'fineweb'
batch_size = 16
gradient_accumulation_steps = 4 * 8  # 524,288 tokens
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 384
max_iters = 6000
lr_decay_iters = max_iters
eval_interval = 500
eval_iters = 50
compile = True
dtype = 'bfloat16'

Overriding: log_interval = 10
tokens per iteration will be: 524,288
found vocab_size = 50304 (inside data/fineweb/meta.pkl)
Initializing a new model from scratch
number of parameters: 40.56M
num decayed parameter tensors: 50, with 40,943,616 parameters
using fused AdamW: True
compiling the model... (takes a ~minute)
"""
NOTES_FLOPS = 299_983_104 * 524_288  # a step of the 40M model at 1024 tokens: 6N + 12·L·H·Q·T

D12_HEAD = """\
Autodetected device type: cuda
GPU: NVIDIA GeForce RTX 4070 | Peak FLOPS (BF16): inf
COMPUTE_DTYPE: torch.bfloat16 (auto-detected: CUDA SM 89 (bf16 supported))
WARNING: Flash Attention 3 not available, using PyTorch SDPA fallback
Vocab size: 32,768
Parameter counts:
total                   : 286,261,730
Estimated FLOPs per token: 8.870000e+08
Calculated number of iterations from target data:param ratio: 2,520
Total number of training tokens: 1,321,205,760
Tokens / micro-batch / rank: 8 x 2048 = 16,384
Tokens / micro-batch: 16,384
Total batch size 524,288 => gradient accumulation steps: 32
"""


def nanogpt_log(
    ms: float,
    numbers: Sequence[int],
    *,
    flops: float = NOTES_FLOPS,
    evaluations: int = 500,
    evaluation_ms: float = 90_000.0,
    compile_ms: float = 60_000.0,
    jitter: float = 0.01,
    head: str = NOTES_HEAD,
    seed: int = 0,
) -> str:
    """Steps of about `ms`; the average MFU as nanoGPT keeps it, -100% for the first five iterations."""
    dice = random.Random(seed)
    lines, average, first = [head.rstrip("\n")] if head else [], -1.0, numbers[0]
    for number in numbers:
        took = ms * dice.gauss(1.0, jitter) + (compile_ms if number == first else 0.0)
        if evaluations and number % evaluations == 0:
            lines.append(f"step {number}: train loss {_loss(number):.4f}, val loss {_loss(number):.4f}")
            if number:
                lines.append("saving checkpoint to out-fineweb")
            took += evaluation_ms
        if number - first >= 5:
            now = flops / (took / 1000) / 312e12
            average = now if average == -1.0 else 0.9 * average + 0.1 * now
        lines.append(f"iter {number}: loss {_loss(number):.4f}, time {took:.2f}ms, mfu {average * 100:.2f}%")
    return "\n".join(lines) + "\n"


def nanochat_log(
    ms: float,
    steps: int,
    *,
    total: int = 2520,
    tokens: int = 524_288,
    field: str = "bf16_mfu",
    mfu: float = 0.0,
    accumulation: int = 1,
    evaluate: int = 250,
    head: str = D12_HEAD,
) -> str:
    """`accumulation`: by how much tok/sec is too small, as before 2025-10-26."""
    dice = random.Random(1)
    lines = [head.rstrip("\n")] if head else []
    for number in range(steps):
        if evaluate and number % evaluate == 0:
            lines.append(f"Step {number:05d} | Validation bpb: {3 - number / 1000:.6f}")
        took = ms * dice.gauss(1.0, 0.005) + (45_000 if number == 0 else 0)
        rest = f" | epoch: 1 pq: 0 rg: {number}" if field == "bf16_mfu" else ""
        rest += " | total time: 0.20m" + (" | eta: 196.1m" if field == "bf16_mfu" and number > 10 else "")
        lines.append(
            f"step {number:05d}/{total:05d} ({100 * number / total:.2f}%) | loss: {_loss(number):.6f} | "
            f"lrm: 0.25 | dt: {took:.2f}ms | tok/sec: {int(tokens / accumulation / took * 1000):,} | "
            f"{field}: {mfu:.2f}{rest}"
        )
    return "\n".join(lines) + "\n"


def _loss(number: int) -> float:
    return 4.0 + 6.9 / (1 + number / 100)
