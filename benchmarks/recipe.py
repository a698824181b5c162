"""Validation loss over 100M tokens: a plain trainer, onecard's exact engine, and its low-bit one.

    python benchmarks/recipe.py --data FILE_OR_FOLDER... --contenders plain exact low-bit --out FILE.json
    python benchmarks/recipe.py --draw FILE.png --from FILE.json...

GPT-2 124M, 1024 tokens a sequence, 65,536 tokens a step, AdamW at 1e-3 with 100 steps of warm-up and
cosine down to a tenth. All contenders begin with the same weights and read the same sequences in the
same order (`--seed`); 2.5% of the documents are held out. The plain trainer is benchmarks/plain_gpt2.py,
which gives nanoGPT's own losses; the others are `onecard train` with their settings.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_line import command_line

SETTINGS: dict[str, list[str]] = {
    "plain": [],
    "exact": [],
    "low-bit": ["--master_weights=bf16", "--optim_states=int8"],
    "bf16-masters": ["--master_weights=bf16"],
    "int8-states": ["--optim_states=int8"],
}
Curve = list[tuple[int, float]]


def config_of(options: argparse.Namespace, contender: str) -> Any:
    from onecard.config.knobs import load_config
    from onecard.config.run import RunConfig

    name = f"{contender}-{options.seed}"
    tokens_per_step = options.batch * options.accumulation * options.block
    steps = -(-options.tokens // tokens_per_step)
    return load_config(
        RunConfig,
        [
            f"--dataset={options.dataset}", f"--out_dir={options.work / name}", "--fresh",
            f"--seed={options.seed}", f"--batch_size={options.batch}", f"--block_size={options.block}",
            f"--gradient_accumulation_steps={options.accumulation}", f"--max_iters={steps}",
            f"--lr_decay_iters={steps}", f"--warmup_iters={min(100, steps // 5)}", "--learning_rate=1e-3",
            "--min_lr=1e-4", f"--eval_interval={max(steps // 12, 1)}", f"--eval_iters={options.eval_iters}",
            "--log_interval=10", "--sample_tokens=0", "--always_save_checkpoint=False",
            f"--n_layer={options.n_layer}", f"--n_head={options.n_head}", f"--n_embd={options.n_embd}",
            f"--device={options.device}", f"--dtype={options.dtype}", f"--compile={not options.eager}",
            *SETTINGS[contender],
        ],
    )  # fmt: skip


def onecard_curves(config: Any) -> tuple[Curve, Curve, dict[str, Any]]:
    from onecard.run.metrics import read_metrics
    from onecard.train.loop import train

    summary = train(config)
    rows = list(read_metrics(Path(config.out_dir) / "metrics.jsonl"))
    per_step = config.tokens_per_step
    val = [(row["step"] * per_step, row["val_loss"]) for row in rows if "val_loss" in row]
    training = [((row["step"] + 1) * per_step, row["loss"]) for row in rows if "loss" in row]
    return val, training, {"tokens_per_s": summary.values["tokens_per_second"]}


def plain_curves(config: Any, options: argparse.Namespace) -> tuple[Curve, Curve, dict[str, Any]]:
    """The same weights, sequences, schedule and evaluation blocks as open_run would use."""
    import torch
    from plain_gpt2 import PlainGPT2, PlainTrainer

    from onecard.arch.shapes import GPT2Shape
    from onecard.data.batches import Sequences, fixed_blocks
    from onecard.data.bins import open_split
    from onecard.data.prefetch import Prefetcher
    from onecard.model.gpt2 import GPT2
    from onecard.optim.schedule import learning_rate

    torch.set_float32_matmul_precision("high")
    folder = Path("data") / config.dataset
    tokens = {split: open_split(folder, split, config.block_size, 50304) for split in ("train", "val")}
    shape = GPT2Shape(config.n_layer, config.n_head, config.n_embd, 50304, config.block_size, False)
    model = PlainGPT2(config.n_layer, config.n_head, config.n_embd, 50304, config.block_size)
    model.load_state_dict(GPT2.initialised(shape, config.seed).state_dict())
    trainer = PlainTrainer(
        model.to(options.device), options.device, options.dtype, config.learning_rate,
        (config.beta1, config.beta2), config.weight_decay, config.grad_clip, not options.eager,
    )  # fmt: skip
    wanted = config.eval_iters * config.batch_size
    val_file = tokens["val"]
    blocks = fixed_blocks(val_file, config.block_size, wanted, config.seed, len(val_file))

    def evaluate() -> float:
        total = 0.0
        for tokens_BL in blocks.batches(config.batch_size):
            batch = torch.from_numpy(tokens_BL).to(options.device)
            x, y = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
            total += float(trainer.evaluate(x, y)) * len(batch)
        return total / len(blocks)

    sequences = Sequences(tokens["train"], config.block_size, config.seed)
    val: Curve = []
    training: Curve = []
    seconds = 0.0
    with Prefetcher(
        sequences, sequences.start(), step_sequences=config.sequences_per_step,
        micro_batch=config.batch_size, device=options.device,
    ) as batches:  # fmt: skip
        for step in range(config.max_iters + 1):
            if step % config.eval_interval == 0 or step == config.max_iters:
                val.append((step * config.tokens_per_step, evaluate()))
                print(f"plain step {step}: val {val[-1][1]:.4f}", file=sys.stderr, flush=True)
            if step == config.max_iters:
                break
            began = time.perf_counter()
            micros = [(m.x, m.y) for m in batches.next_step().micros]
            loss = trainer.step(micros, learning_rate(step, config))
            if step % config.log_interval == 0:
                training.append(((step + 1) * config.tokens_per_step, float(loss)))
            seconds += time.perf_counter() - began
    return val, training, {"tokens_per_s": config.max_iters * config.tokens_per_step / seconds}


def measure(options: argparse.Namespace, contender: str) -> dict[str, Any]:
    import torch

    config = config_of(options, contender)
    cuda = options.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    curves = plain_curves(config, options) if contender == "plain" else onecard_curves(config)
    val, training, more = curves
    return {
        "contender": contender,
        "seed": options.seed,
        "settings": SETTINGS[contender],
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
    figure = Figure(figsize=(9, 6), layout="constrained")
    whole, close = figure.subplots(1, 2)
    reference = next((r for r in rows if r["contender"] == "plain"), rows[0])
    for row in rows:
        label = f"{row['contender']}, seed {row['seed']}: {row['val_loss']:.4f}"
        at, losses = zip(*((t / 1e6, v) for t, v in row["val"][1:]), strict=True)
        whole.plot(at, losses, "o-", ms=3, label=label)
        base = dict(map(tuple, reference["val"]))
        apart = [(t / 1e6, v - base[t]) for t, v in row["val"][1:] if t in base]
        close.plot(*zip(*apart, strict=True), "o-", ms=3)
    whole.set(xlabel="million tokens", ylabel="validation loss, nats per token")
    whole.legend()
    close.set(xlabel="million tokens", ylabel=f"difference from {reference['contender']}")
    figure.savefig(target, dpi=130)


def arguments(description: str | None, contenders: list[str], **sizes: int) -> argparse.ArgumentParser:
    """What comparisons of loss curves have in common."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", nargs="*", default=[], help="text to prepare (GPT-2's tokens, 2.5%% held out)")
    add("--dataset", default="recipe", help="its name under data/")
    add("--contenders", nargs="+", choices=contenders, default=[])
    usual = {"seed": 1337, "batch": 16, "accumulation": 4, "block": 1024, "eval_iters": 48, "n_layer": 12}
    for name, default in {**usual, "n_embd": 768, **sizes}.items():
        add(f"--{name}", type=int, default=default)
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--eager", action="store_true")
    add("--work", type=Path, default=Path("out-curves"))
    add("--out", type=Path)
    add("--draw", type=Path)
    add("--from", dest="files", type=Path, nargs="*", default=[])
    return parser


def compare(options: argparse.Namespace, what: str, measure: Callable[..., dict[str, Any]]) -> None:
    """Every contender in turn; the results file is rewritten after each."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    if options.data:
        from onecard.data.prepare.command import prepare
        from onecard.data.prepare.options import PrepareOptions

        prepare(options.data, PrepareOptions(name=options.dataset, tokenizer="gpt2", val_fraction=0.025))
    import torch

    result: dict[str, Any] = {
        "what": what,
        "date": time.strftime("%Y-%m-%d"),
        "command": command_line(),
        "card": torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "rows": [],
    }
    for contender in options.contenders:
        row = measure(options, contender)
        result["rows"].append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "train"}), flush=True)
        if options.out:
            fresh = options.out.with_suffix(".new")
            fresh.write_text(json.dumps(result) + "\n")
            fresh.replace(options.out)


def main() -> None:
    options = arguments(__doc__, list(SETTINGS), n_head=12, tokens=100_000_000).parse_args()
    if options.draw:
        draw(options.files, options.draw)
    else:
        compare(options, "validation loss over tokens, GPT-2 124M recipe", measure)


if __name__ == "__main__":
    main()
