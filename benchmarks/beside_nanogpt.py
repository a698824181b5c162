"""Speed and peak memory of a training step, ours beside nanoGPT's own model, on this machine's GPU.

    python benchmarks/beside_nanogpt.py --nanogpt PATH_TO_A_CLONE [--rounds 3] [--out FILE.json]

Each measurement is a process of its own (peaks do not mix); contenders take turns. Both train on the
same random tokens with bf16 autocast, torch.compile, fused AdamW and gradient accumulation. Speed is
the median over steps after warm-up. Also measured: the rate of a large bf16 matmul on this card.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from command_line import command_line

VOCAB = 50304


def _shape(options: argparse.Namespace) -> Any:
    from onecard.arch.shapes import GPT2Shape

    return GPT2Shape(options.n_layer, options.n_head, options.n_embd, VOCAB, options.block, False)


def our_step(options: argparse.Namespace) -> Any:
    from onecard.data.prefetch import Micro
    from onecard.model.attention import fastest_kernel
    from onecard.model.gpt2 import GPT2
    from onecard.optim.schedule import StepRates
    from onecard.train.step import StepOptions, Stepper

    torch.set_float32_matmul_precision("high")
    shape = _shape(options)
    model = GPT2.initialised(shape, 0)
    model.attention_kernel, _ = fastest_kernel(
        options.batch, shape.n_head, shape.block_size, shape.head_dim, torch.bfloat16, "cuda"
    )
    model.compile_parts()
    stepper = Stepper(
        model, device="cuda", dtype="bfloat16", options=StepOptions(dropout=options.dropout, compiled=True)
    )
    ids = torch.zeros(options.batch, dtype=torch.int64, device="cuda")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for _ in range(options.accumulation):
            stepper.backward(Micro(x, y, ids), options.accumulation * x.numel())
        stepper.update(StepRates(6e-4))

    return step


def nanogpt_step(options: argparse.Namespace) -> Any:
    sys.path.insert(0, str(options.nanogpt))
    import model as nanogpt_model  # type: ignore[import-not-found]  # in the clone

    torch.backends.cuda.matmul.allow_tf32 = True
    shape = nanogpt_model.GPTConfig(
        block_size=options.block,
        vocab_size=VOCAB,
        n_layer=options.n_layer,
        n_head=options.n_head,
        n_embd=options.n_embd,
        bias=False,
        dropout=options.dropout,
    )
    plain = nanogpt_model.GPT(shape).cuda()
    optimizer = plain.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    model: Any = torch.compile(plain)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for _ in range(options.accumulation):
            with torch.autocast("cuda", torch.bfloat16):
                _, loss = model(x, y)
            (loss / options.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(options: argparse.Namespace) -> dict[str, Any]:
    step = {"onecard": our_step, "nanogpt": nanogpt_step}[options.contender](options)
    x, y = torch.randint(0, VOCAB, (2, options.batch, options.block), device="cuda").unbind(0)
    began = time.perf_counter()
    step(x, y)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    seconds = []
    for _ in range(options.steps):
        began = time.perf_counter()
        step(x, y)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    tokens = options.accumulation * options.batch * options.block
    return {
        "contender": options.contender,
        "first_step_s": round(first, 2),
        "tokens_per_s": round(tokens / statistics.median(seconds[2:])),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
    }


def matmul_tflops() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * 8192**3 / statistics.median(times) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--n_layer", type=int, default=12)
    parser.add_argument("--n_head", type=int, default=12)
    parser.add_argument("--n_embd", type=int, default=768)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contender", choices=["onecard", "nanogpt"])
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(measure(options)))
        return
    rows = []
    for _ in range(options.rounds):
        for contender in ("nanogpt", "onecard"):
            command = [sys.executable, __file__, *sys.argv[1:], "--contender", contender]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    speed = {
        c: statistics.median(r["tokens_per_s"] for r in rows if r["contender"] == c)
        for c in ("nanogpt", "onecard")
    }
    result = {
        "what": f"GPT-2 {options.n_layer} layers, n_embd {options.n_embd}, dropout {options.dropout}, "
        f"{options.batch}x{options.block} tokens, bf16, compiled",
        "date": time.strftime("%Y-%m-%d"),
        "command": command_line(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bf16_matmul_tflops": round(matmul_tflops(), 1),
        "rows": rows,
        "onecard_over_nanogpt": round(speed["onecard"] / speed["nanogpt"], 3),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
