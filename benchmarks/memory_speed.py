"""Tokens per second and peak memory of training steps on this machine's GPU, ours beside others.

    python benchmarks/memory_speed.py --suite table notes --nanogpt PATH_TO_A_CLONE --out FILE.json
    python benchmarks/memory_speed.py --out FILE.json --draw FILE.png         (a figure, nothing measured)
    python benchmarks/memory_speed.py --suite table growth notes large --device cpu --tiny    (does it run?)

Each measurement is a process of its own (a fork: peaks do not mix); contenders take turns over --rounds,
each round starting with another one. All train the same shape on the same random tokens with bf16 compute,
torch.compile, fused AdamW, clipping and gradient accumulation. The results file is rewritten after every
measurement; --resume goes on from it and measures again what failed.

Speed is the median over steady steps, after the first step (compilation) and the warm-up. Peaks are torch's,
over the steady steps (peak_), all steps but the first (after_first_) and the whole process (process_);
reserved memory never shrinks, so the first step's may show in all three. `mfu` is FLOPs over what a bf16
matmul reached in the same run; FLOPs/token = 6N + 12·L·H·Q·T, N of the bias-free GPT-2 without positions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from command_line import command_line
from memory_speed_figure import AXES, draw
from processes import in_own_process

Step = Callable[[Any, Any], Any]  # torch is imported in the measuring processes only
Row = dict[str, Any]
GIB = 2**30
EXACT: dict[str, Any] = {
    "recompute": "none",  # none | mlp | block
    "loss_chunk": None,  # rows of logits at a time; None is onecard's own choice
    "offload": "none",  # none | optimizer | gradients
    "master_weights": "fp32",  # fp32 | bf16
    "optim_states": "fp32",  # fp32 | int8
    "graphs": False,  # a micro-batch as one CUDA graph
}
BLOCK = EXACT | {"recompute": "block"}
LOW_BIT = {"master_weights": "bf16", "optim_states": "int8"}


@dataclass(frozen=True)
class Case:
    """One thing to measure; goes to the measuring process as JSON."""

    contender: str
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block: int = 1024
    batch: int = 16
    accumulation: int = 4
    settings: dict[str, Any] = field(default_factory=dict)  # onecard's; empty for the others
    cap_gib: float | None = None  # the allocator may not take more: a smaller card
    axes: tuple[str, ...] = ()  # the panels of the growth figure this is a point of
    warmup: int = 2
    steps: int = 8
    vocab: int = 50304
    device: str = "cuda"
    compile: bool = True
    nanogpt: str = ""  # path to the clone

    @property
    def label(self) -> str:
        if not self.settings:
            return self.contender
        kind = " low-bit" if LOW_BIT.items() <= self.settings.items() else " exact"
        changed = (f" {k}={v}" for k, v in self.settings.items() if v not in (EXACT[k], LOW_BIT.get(k)))
        return self.contender + kind + "".join(changed)

    @property
    def shape(self) -> str:
        cap = f" cap{self.cap_gib:g}" if self.cap_gib else ""
        return f"{self.n_layer}L {self.n_embd} {self.batch}x{self.block} acc{self.accumulation}{cap}"

    @property
    def flops_per_token(self) -> int:
        parameters = self.n_embd * (self.vocab + self.n_layer * (12 * self.n_embd + 2) + 1)
        return 6 * parameters + 12 * self.n_layer * self.n_embd * self.block


def table() -> list[Case]:
    return [
        *(Case(name) for name in ("nanogpt", "plain", "huggingface")),
        *(Case("onecard", settings=EXACT | {"recompute": r}) for r in ("none", "mlp", "block")),
        *(Case("onecard", settings=EXACT | {"recompute": r, "graphs": True}) for r in ("none", "block")),
        Case("onecard", settings=BLOCK | {"offload": "optimizer"}, accumulation=32, steps=4),
        Case("onecard", settings=BLOCK | LOW_BIT),
    ]


def notes() -> list[Case]:
    width = Case("nanogpt", n_embd=576, n_head=9)
    ours = replace(width, contender="onecard", settings=EXACT)
    return [width, replace(width, contender="plain"), ours, replace(ours, settings=EXACT | {"graphs": True})]


def growth() -> list[Case]:
    """What memory and speed grow with, one axis at a time from the table's shape."""
    changes: list[dict[str, Any]] = [
        *({"axes": ("micro-batch",), "batch": n} for n in (1, 2, 4, 8, 32)),
        *({"axes": ("block",), "block": n, "batch": 16384 // n} for n in (256, 512, 2048, 4096)),
        *({"axes": ("depth",), "n_layer": n} for n in (6, 24)),
        *({"axes": ("width",), "n_embd": n, "n_head": n // 64} for n in (384, 1024, 576)),
    ]
    none = Case("onecard", settings=EXACT, axes=tuple(AXES), steps=4)
    block = replace(none, settings=BLOCK)
    # Every second point with recompute, and last: a budget cuts those first.
    points = [none, *(replace(none, **c) for c in changes)]
    return [*points, block, *(replace(block, **c) for c in changes[::2])]


def large() -> list[Case]:
    """What an 11 GiB allocator (a 12 GB card) can train; few steps, since they are long."""
    few: dict[str, Any] = {"accumulation": 8, "cap_gib": 11.0, "warmup": 1, "steps": 2}
    return [
        Case("onecard", 24, 16, 1024, batch=8, settings=BLOCK, **few),
        Case("onecard", 36, 20, 1280, batch=8, settings=BLOCK | {"offload": "optimizer"}, **few),
        Case("onecard", 48, 25, 1600, batch=4, settings=BLOCK | LOW_BIT, **few),
        Case("onecard", 48, 25, 1600, batch=4, settings=BLOCK | {"offload": "gradients"}, **few),
    ]


SUITES = {"table": table, "notes": notes, "growth": growth, "large": large}
ONE_ROUND = ("growth", "large")


def tiny(case: Case) -> Case:
    """The same case at a size a CPU runs in seconds: to try the script, not to measure."""
    return replace(
        case, n_layer=case.n_layer // 6, n_embd=case.n_embd // 8, block=case.block // 16, vocab=512,
        batch=min(case.batch, 4), accumulation=min(case.accumulation, 2), warmup=1, steps=2,
    )  # fmt: skip


def onecard_step(case: Case) -> Step:
    """What `onecard train` does in a step, without the loop around it."""
    import torch

    from onecard.arch.shapes import GPT2Shape
    from onecard.data.prefetch import Micro
    from onecard.model.attention import fastest_kernel
    from onecard.model.gpt2 import GPT2
    from onecard.optim.region_buffers import Storage
    from onecard.optim.schedule import StepRates
    from onecard.train.step import StepOptions, Stepper

    torch.set_float32_matmul_precision("high")
    shape = GPT2Shape(case.n_layer, case.n_head, case.n_embd, case.vocab, case.block, False)
    model = GPT2.initialised(shape, 0)
    model.recompute = case.settings["recompute"]
    model.loss_chunk = case.settings["loss_chunk"] or model.loss_chunk
    model.attention_kernel, _ = fastest_kernel(
        case.batch, case.n_head, case.block, shape.head_dim, torch.bfloat16, case.device
    )
    if case.compile:
        model.compile_parts()
    storage = Storage(*(case.settings[k] for k in ("master_weights", "optim_states", "offload")))
    stepper = Stepper(
        model,
        device=case.device,
        dtype="bfloat16",
        storage=storage,
        options=StepOptions(compiled=case.compile, graphs=case.settings["graphs"] and case.device == "cuda"),
    )
    ids = torch.zeros(case.batch, dtype=torch.int64, device=case.device)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for _ in range(case.accumulation):
            stepper.backward(Micro(x, y, ids), case.accumulation * x.numel())
        stepper.update(StepRates(6e-4))

    step.replay = stepper.replay  # type: ignore[attr-defined]
    step.pinned_bytes = stepper.optimizer.host_bytes  # type: ignore[attr-defined]
    step.facts = {"loss_chunk": model.loss_chunk, "attention": model.attention_kernel}  # type: ignore[attr-defined]
    return step


def peer_step(case: Case) -> Step:
    from plain_gpt2 import peer

    shape = (case.n_layer, case.n_head, case.n_embd, case.vocab, case.block)
    trainer = peer(case.contender, shape, case.device, case.compile, case.nanogpt)
    return lambda x, y: trainer.step([(x, y)] * case.accumulation, 6e-4)


def measure(case: Case) -> Row:
    """A row; what goes wrong is in it as `error`, with the peaks up to there."""
    import torch
    from plain_gpt2 import host_memory, matmul_tflops, measure_steps

    cuda = case.device == "cuda"
    card = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    row: Row = {"card": card, "torch": torch.__version__}
    step: Step | None = None
    try:
        if cuda and case.cap_gib:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_gib * GIB / total))
        torch.manual_seed(0)
        step = onecard_step(case) if case.contender == "onecard" else peer_step(case)
        generator = torch.Generator().manual_seed(1)  # the same tokens for all, whatever their init drew
        tokens = torch.randint(0, case.vocab, (2, case.batch, case.block), generator=generator)
        x, y = tokens.to(case.device).unbind(0)
        measure_steps(row, step, x, y, case.warmup, case.steps)
        replay = getattr(step, "replay", None)
        if replay is not None:
            # What a graph holds counts, though the allocator calls it free.
            assert replay.problem is None and replay.held_bytes, replay.problem
            held = (torch.cuda.memory_allocated() + replay.held_bytes) / GIB
            held = min(held, row["peak_reserved_gib"])  # a graph's matmul workspaces are in both figures
            row["peak_allocated_gib"] = round(max(row["peak_allocated_gib"], held), 3)
        row["tokens_per_s"] = round(case.accumulation * x.numel() / row["step_s"])
    except Exception as error:
        what = "out of memory" if "out of memory" in str(error).lower() else type(error).__name__
        row["error"] = f"{what}: {(str(error).splitlines() or [''])[0][:160]}"
        row["trace"] = traceback.format_exc()[-2000:]
    row |= host_memory(getattr(step, "pinned_bytes", None)) | getattr(step, "facts", {})
    if "error" not in row:
        del step  # room for the matrices
        row["bf16_matmul_tflops"] = matmul_tflops(case.device)
    return row


def plan(options: argparse.Namespace) -> Iterator[tuple[tuple[Any, ...], Case]]:
    """What names a row (NAME), and its case. Every round of a suite begins with another contender."""
    path = str(options.nanogpt.resolve()) if options.nanogpt else ""
    for suite in options.suite:
        cases = [c for c in SUITES[suite]() if c.contender != "nanogpt" or path]
        cases = [tiny(c) if options.tiny else c for c in cases if re.search(options.only, c.label)]
        for turn in range(1 if suite in ONE_ROUND else options.rounds):
            for i in range(len(cases)):
                case = cases[(i + turn) % len(cases)]
                case = replace(case, device=options.device, compile=not options.eager, nanogpt=path)
                yield (suite, case.label, case.shape, turn), case


def summarise(rows: list[Row]) -> Row:
    """Medians over rounds, ratios to the suite's nanogpt (or plain), and the run's matmul rate."""
    rates = [r["bf16_matmul_tflops"] for r in rows if r.get("bf16_matmul_tflops")]
    rate = round(statistics.median(rates), 2) if rates else None
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["suite"], row["label"], row["shape"]), []).append(row)
    summary: list[Row] = []
    for (suite, label, shape), group in groups.items():
        good = [r for r in group if "error" not in r]
        entry: Row = {"suite": suite, "label": label, "shape": shape, "rounds": len(good)}
        for key in (k for k, v in (good or group)[0].items() if isinstance(v, int | float) and k != "round"):
            entry[key] = round(statistics.median(r[key] for r in good or group if r.get(key) is not None), 3)
        if good and rate:
            flops = Case(**group[0]["case"]).flops_per_token
            entry["mfu"] = round(flops * entry["tokens_per_s"] / (rate * 1e12), 3)
        summary.append(entry | {"error": next((r["error"] for r in group if "error" in r), None)})
    for entry in summary:
        peers = {e["label"]: e for e in summary if e["suite"] == entry["suite"] and "tokens_per_s" in e}
        reference = peers.get("nanogpt") or peers.get("plain")
        if reference and "tokens_per_s" in entry:
            entry["against"] = reference["label"]
            for name, key in (("speed_ratio", "tokens_per_s"), ("memory_ratio", "peak_allocated_gib")):
                entry |= {name: round(entry[key] / reference[key], 3)} if key in reference else {}
    machine = {k: next((r[k] for r in rows if k in r), None) for k in ("card", "torch")}
    return {**machine, "bf16_matmul_tflops": rate, "summary": summary, "rows": rows}


def write(file: Path | None, results: Row) -> None:
    """One row a line; by way of a second file, so that a kill while writing loses nothing."""
    if not file:
        return
    text = re.sub(r"\n(   +|  (?=[\]}]))", " ", json.dumps(results, indent=1))
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(text + "\n")
    fresh.replace(file)


COLUMNS = {  # key: heading, width, decimals
    "tokens_per_s": ("tok/s", 10, 0), "speed_ratio": ("speed", 7, 3), "peak_allocated_gib": ("GiB", 8, 2),
    "memory_ratio": ("of it", 7, 2), "peak_reserved_gib": ("reserved", 9, 2), "mfu": ("mfu", 7, 3),
    "first_step_s": ("1st s", 7, 0), "host_max_rss_gib": ("host", 7, 1), "host_pinned_gib": ("pinned", 7, 1),
}  # fmt: skip


def show(results: Row) -> None:
    print(f"\n{results['card']}, torch {results['torch']}, matmul {results['bf16_matmul_tflops']} TFLOPS")
    suite = ""
    for entry in results["summary"]:
        if entry["suite"] != suite:
            suite = entry["suite"]
            print(f"{suite:77}" + "".join(f"{name:>{width}}" for name, width, _ in COLUMNS.values()))
        texts = (
            ("-" if entry.get(k) is None else f"{entry[k]:,.{d}f}", w) for k, (_, w, d) in COLUMNS.items()
        )
        told = f" {entry['error'][:90]}" if not entry["rounds"] else "".join(f"{t:>{w}}" for t, w in texts)
        print(f"  {entry['label']:47} {entry['shape']:27}{told}")
    if results["unfinished"]:
        print(f"not started within the budget: {len(results['unfinished'])}")


NAME = ("suite", "label", "shape", "round")


def run_all(options: argparse.Namespace) -> Row:
    """Measure what is planned and not yet there; the results, written after every measurement."""
    began = time.monotonic()
    rows: list[Row] = []
    unfinished: list[str] = []
    results: Row = {
        "what": "GPT-2 training steps: tokens per second and peak memory, a process per measurement",
        "date": time.strftime("%Y-%m-%d"),
        "command": command_line(),
        "python": platform.python_version(),
        "transformers": next((d.version for d in metadata.distributions(name="transformers")), None),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "unfinished": unfinished,
    }
    if options.resume and options.out and options.out.exists():
        before = json.loads(options.out.read_text())
        rows = [row for row in before["rows"] if "error" not in row]
        results["resumed"] = [*before.get("resumed", []), before["command"]]
    results |= summarise(rows)
    done = {tuple(row[k] for k in NAME) for row in rows}
    failed: set[tuple[Any, ...]] = set()
    for name, case in plan(options):
        if name in done or name[:-1] in failed:  # no second try in later rounds: out of memory stays so
            continue
        if time.monotonic() - began > options.budget_seconds:
            unfinished.append(" ".join(map(str, name)))
            continue
        measured = in_own_process(partial(measure, case), options.limit_seconds)
        row = dict(zip(NAME, name, strict=True)) | measured
        rows.append(row | {"case": asdict(replace(case, nanogpt=Path(case.nanogpt).name))})
        done.add(name)
        if "error" in row:
            failed.add(name[:-1])
        results |= {"seconds": round(time.monotonic() - began)} | summarise(rows)
        told = row.get("error") or f"{row['tokens_per_s']:,} tok/s, {row.get('peak_allocated_gib')} GiB"
        print(f"[{results['seconds']:4} s]", *name, told, sep=" | ", flush=True)
        write(options.out, results)
    write(options.out, results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", nargs="+", choices=list(SUITES), default=[])
    add("--nanogpt", type=Path, help="a clone; without it nanogpt is left out and plain is the reference")
    add("--rounds", type=int, default=3, help="for table and notes; the others have one")
    add("--only", default="", help="a regular expression on labels: nanogpt, 'onecard exact'")
    add("--budget_seconds", type=float, default=float("inf"), help="start nothing after that")
    add("--limit_seconds", type=float, default=300.0, help="stop a measurement after that")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tiny", action="store_true", help="small shapes: to try the script, not to measure")
    add("--eager", action="store_true", help="without torch.compile")
    add("--resume", action="store_true", help="keep the good rows of --out")
    add("--out", type=Path)
    add("--draw", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if not options.suite and not (options.draw and options.out):
        parser.error("name a --suite to measure, or --out and --draw for a figure of earlier results")
    results = run_all(options) if options.suite else json.loads(options.out.read_text())
    if options.draw:
        draw(results, options.draw)
    show(results)


if __name__ == "__main__":
    main()
