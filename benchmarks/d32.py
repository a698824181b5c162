"""nanochat's d32 inside a 12 GB card: a whole run in small, on this machine's GPU.

    python benchmarks/d32.py --out FILE.json
    python benchmarks/d32.py --device cpu --eager --depth 2 --vocab 512 --block 64 --batch 2 --total 1024

Random tokens (the arithmetic does not look at them), the tight recipe of config/train_d32_12gb.py, the
allocator capped at --cap GiB. The run begins, takes --steps whole steps, evaluates, samples, saves, ends;
is resumed for one step more; then the model is loaded for sampling in a process of its own. Reported are
peaks of reserved memory on the card and resident memory of the host, seconds of forward and backward
passes and of updates apart, and model FLOPs (recompute not counted) over what a bf16 matmul reached in
this run. FLOPs/token = 6N + 12·L·H·Q·T, N without the token embedding.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from command_line import command_line

HERE = Path(__file__).resolve().parent
GIB = 2**30
FIRST_LETTER = 0x10000


def write_data(options: argparse.Namespace) -> None:
    import numpy as np

    folder = Path("data") / "d32-random"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    for split, count in (("train", 4 * options.total + 10 * options.block), ("val", 200 * options.block)):
        tokens = numbers.integers(0, options.vocab, count, dtype=np.uint16)
        tokens.tofile(folder / f"{split}.bin")
    # A letter for every token, so that samples can be drawn: nanoGPT's kind of character dataset.
    letters = [chr(FIRST_LETTER + i) for i in range(options.vocab)]
    meta = {"vocab_size": options.vocab, "itos": dict(enumerate(letters))}
    meta["stoi"] = {letter: i for i, letter in enumerate(letters)}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def words(options: argparse.Namespace, steps: int) -> list[str]:
    return [
        "--arch=nanochat", f"--generation={options.generation}", f"--depth={options.depth}",
        f"--vocab_size={options.vocab}", f"--block_size={options.block}", f"--batch_size={options.batch}",
        f"--total_batch_size={options.total}", f"--max_iters={steps}", "--warmdown_ratio=0",
        f"--eval_interval={options.steps}", "--eval_iters=4", "--log_interval=1", "--sample_tokens=16",
        "--dataset=d32-random", f"--out_dir={options.work}", f"--device={options.device}",
        f"--compile={not options.eager}", "--recompute=block", f"--master_weights={options.master_weights}",
        f"--optim_states={options.optim_states}", f"--offload={options.offload}",
        *([f"--loss_chunk={options.loss_chunk}"] if options.loss_chunk else []),
    ]  # fmt: skip


def host_peak_gib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    return 0.0


def run_part(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """In a process of its own: peaks do not mix."""
    import torch

    from onecard.config.knobs import load_config
    from onecard.config.run import RunConfig
    from onecard.config.sample import SampleConfig

    cuda = options.device.startswith("cuda")
    row: dict[str, Any] = {"part": part}
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total)
        from plain_gpt2 import matmul_tflops

        row["bf16_matmul_tflops"] = matmul_tflops(options.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    if part == "sample":
        from onecard.generate.sample import sample_command

        start = chr(FIRST_LETTER)
        drawing = [f"--out_dir={options.work}", f"--device={options.device}", f"--start={start}"]
        assert (
            sample_command(load_config(SampleConfig, [*drawing, "--num_samples=2", "--max_new_tokens=64"]))
            == 0
        )
    else:
        from onecard.train.loop import train
        from onecard.train.step import Stepper

        updates: list[float] = []
        whole: list[float] = []
        plain_update, plain_run = Stepper.update, Stepper.run

        def finish() -> float:
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter()

        def update(self: Any, *args: Any) -> Any:
            start = finish()
            result = plain_update(self, *args)
            updates.append(finish() - start)
            row["pinned_gib"] = round(self.optimizer.host_bytes / GIB, 2)
            return result

        def run(self: Any, *args: Any, **more: Any) -> Any:
            start = finish()
            result = plain_run(self, *args, **more)
            whole.append(finish() - start)
            return result

        Stepper.update, Stepper.run = update, run  # type: ignore[method-assign, assignment]
        steps = options.steps + (part == "resume")
        fresh = ["--fresh"] if part == "train" else ["--init_from=resume"]
        config = load_config(RunConfig, [*words(options, steps), *fresh])
        shape = config.shape(options.vocab)
        summary = train(config)
        # The first step compiles.
        later = list(zip(whole, updates, strict=True))[1:] or [(whole[0], updates[0])]
        passes = statistics.median(step - update for step, update in later)
        row |= {
            "parameters": shape.parameters,
            "steps": len(whole),
            "first_step_s": round(whole[0], 2),
            "step_s": round(statistics.median(step for step, _ in later), 3),
            "forward_backward_s": round(passes, 3),
            "update_s": round(statistics.median(update for _, update in later), 4),
            "tokens_per_s_forward_backward": round(config.tokens_per_step / passes),
            "model_tflops": round(shape.flops_per_token * config.tokens_per_step / passes / 1e12, 1),
            "val_loss": summary.values["val_loss"],
        }
        row["update_share"] = round(row["update_s"] / row["step_s"], 4)
        if cuda:
            row["of_matmul_rate"] = round(row["model_tflops"] / row["bf16_matmul_tflops"], 3)
    row["seconds"] = round(time.perf_counter() - began, 1)
    row["host_peak_gib"] = round(host_peak_gib(), 2)
    if cuda:
        row["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
        row["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
        free, total = torch.cuda.mem_get_info()
        row["whole_card_gib"] = round((total - free) / GIB, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    sizes = {"generation": 2025, "depth": 32, "vocab": 65536, "block": 2048, "batch": 4, "total": 524288,
             "steps": 2, "loss_chunk": 0}  # fmt: skip
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default)
    add("--cap", type=float, default=11.0)
    add("--master_weights", default="bf16")
    add("--optim_states", default="int8")
    add("--offload", default="gradients")
    add("--device", default="cuda")
    add("--eager", action="store_true")
    add("--work", type=Path, default=Path("out-d32-bench"))
    add("--parts", nargs="+", default=["train", "resume", "sample"])
    add("--part", default="")
    add("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    if options.part:
        row = run_part(options, options.part)
        options.out.write_text(json.dumps(row))
        return
    import torch

    write_data(options)
    result: dict[str, Any] = {
        "what": "nanochat d32 under a cap: train, evaluate, sample, save, resume; then sample alone",
        "date": time.strftime("%Y-%m-%d"),
        "command": command_line(),
        "card": torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "rows": [],
    }
    for part in options.parts:
        target = Path(f"{options.work}-{part}.json")
        target.unlink(missing_ok=True)
        arguments = [a for a in sys.argv[1:] if not a.startswith("--out=")]
        if "--out" in arguments:
            at = arguments.index("--out")
            del arguments[at : at + 2]
        command = [sys.executable, str(HERE / "d32.py"), *arguments, "--part", part, "--out", str(target)]
        done = subprocess.run(command, env=os.environ)
        row = json.loads(target.read_text()) if target.exists() else {"part": part, "error": done.returncode}
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
