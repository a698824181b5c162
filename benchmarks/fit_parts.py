"""Parts caps, sweep and start of benchmarks/fit.py: was the setting chosen the right one?"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fit_runs import GIB, Row, Watched, caps_of, config_of, pretend_memory, question_of

Job = Callable[[], Row]
Rows = dict[str, Row]  # of one part, by job
Check = dict[str, Any]
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CLOSE = 0.01  # nats
FAST = 0.95
# In the tiny mode speeds are those of a toy on a busy machine: the paths run, the figures say nothing.
STAND_IN = " (stand-in: no card)"


def check(what: str, wanted: str, found: Any, ok: bool) -> Check:
    return {"what": what, "wanted": wanted, "found": found, "ok": bool(ok)}


# --- caps
def caps_jobs(options: argparse.Namespace) -> dict[str, Job]:
    caps = caps_of(options)
    outside = list(caps)[len(caps) // 2]
    return {
        "uncapped": partial(capped, options, None, options.steps),
        **{name: partial(capped, options, cap, options.steps) for name, cap in caps.items()},
        f"from outside: {outside}": partial(
            capped, options, caps[outside], max(20, options.steps // 10), knob=False
        ),
    }


def capped(options: argparse.Namespace, cap: float | None, steps: int, *, knob: bool = True) -> Row:
    """vram_limit is about the process, so CUDA's own share is added; torch's limit is the hard stop."""
    import torch

    from onecard.train import engine, memory
    from onecard.train import start as start_module

    more = []
    if cap is not None and options.tiny:
        pretend_memory(lambda: cap * GIB)
    elif cap is not None:
        memory.use_expandable_segments()
        asked = config_of(options, "capped", steps)
        shape = asked.shape(start_module._vocabulary(Path("data") / options.dataset))
        engine.choose_kernel(shape, asked, options.device, "bfloat16")  # as the run will: it loads libraries
        context = memory._context_bytes(options.device)
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(cap * GIB / total)
        more = [f"--vram_limit={cap + context / GIB}"] if knob else []
    row = Watched(config_of(options, "capped", steps, *more)).go()
    del row["step_seconds"]
    return row | {"cap_gib": cap}


def judge_caps(options: argparse.Namespace, rows: Rows, others: dict[str, Rows]) -> list[Check]:
    free = rows.get("uncapped")
    found: list[Check] = []
    for name, row in rows.items():
        found.append(check(f"{name}: ran to the end", f"{row['asked']} steps", row["steps"],
                           row["steps"] == row["asked"]))  # fmt: skip
        if name == "uncapped" or free is None:
            continue
        peak = row.get("peak_reserved_gib", row["predicted_need_gib"])
        found += [
            check(f"{name}: exact settings only", "exact", row["setting"], row["exact"]),
            check(f"{name}: peak reserved", f"at most {row['cap_gib']:.6g} GiB", f"{peak:.6g} GiB",
                  peak <= row["cap_gib"]),
        ]  # fmt: skip
        if name.startswith("from outside"):
            same = rows.get(name.removeprefix("from outside: "))
            if same is not None:
                found.append(check(f"{name}: the same choice as by vram_limit", same["began_with"],
                                   row["began_with"], same["began_with"] == row["began_with"]))  # fmt: skip
            continue
        apart = abs(row["val_loss"] - free["val_loss"])
        curve = max(abs(a - b) for (_, a), (_, b) in zip(row["train"], free["train"], strict=True))
        found += [
            check(f"{name}: validation loss beside the uncapped run's", f"within {CLOSE}",
                  f"{apart:.5f} apart; training curves at most {curve:.5f}", apart <= CLOSE),
            check(f"{name}: learning rates", free["rates"], row["rates"], row["rates"] == free["rates"]),
            check(f"{name}: data order and position", free["position"], row["position"],
                  (row["position"], row["tokens"]) == (free["position"], free["tokens"])),
        ]  # fmt: skip
    return found


# --- sweep
def sweep_jobs(options: argparse.Namespace) -> dict[str, Job]:
    return {f"micro-batch {size}": partial(sweep, options, size) for size in MICRO_BATCHES}


def worth_measuring(options: argparse.Namespace, question: Any) -> tuple[list[Any], int]:
    """Settings that the planner lets into some cap (or nearly), not far slower than its best one there."""
    from onecard.plan.search import settings

    every = [question.answer(s) for s in settings(question.config, question.shape)]
    every = [
        choice for choice in every if choice.setting.micro_batch in MICRO_BATCHES and choice.setting.exact
    ]
    kept = []
    for cap in caps_of(options).values():
        fitting = [choice for choice in every if choice.bill.need <= 1.03 * cap * GIB]
        best = max((choice.tokens_per_s for choice in fitting if choice.bill.need <= cap * GIB), default=0.0)
        kept += [c for c in fitting if c.tokens_per_s >= (1 - options.slower) * best and c not in kept]
    return kept, len(every)


def sweep(options: argparse.Namespace, size: int) -> Row:
    """All settings of one micro-batch in one process: as a run does that changes its setting."""
    import torch

    from onecard.data.batches import Sequences
    from onecard.data.bins import open_split
    from onecard.data.prefetch import Prefetcher
    from onecard.train import engine, start

    ends = time.monotonic() + 0.85 * options.limit_seconds
    question = question_of(options)
    config, shape, dtype = question.config, question.shape, question.dtype
    cuda, device = not options.tiny, options.device
    torch.set_float32_matmul_precision("high")
    kept, every = worth_measuring(options, question)
    row: Row = {"settings": [], "unmeasured": [], "kept": len(kept), "of": every}
    mine = [choice for choice in kept if choice.setting.micro_batch == size]
    if not mine:
        return row
    model = start._fresh_model(shape, config)
    model.attention_kernel = engine.choose_kernel(shape, config, device, dtype)
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    data = open_split(Path("data") / config.dataset, "train", shape.block_size, shape.vocab_size)
    sequences = Sequences(data, shape.block_size, config.seed)
    stepper: Any = None
    with Prefetcher(
        sequences, sequences.start(), step_sequences=config.sequences_per_step, micro_batch=size,
        device=device,
    ) as batches:  # fmt: skip
        for choice in mine:
            if time.monotonic() > ends:
                row["unmeasured"].append(choice.setting.words())
                continue
            stepper = None
            model.use_weights({name: tensor.clone() for name, tensor in weights.items()})
            model.forget_totals()
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            told = {"setting": choice.setting.words(), "loss_chunk": choice.setting.loss_chunk,
                    "predicted_need_gib": choice.bill.need / GIB,
                    "predicted_tokens_per_s": round(choice.tokens_per_s)}  # fmt: skip
            row["settings"].append(told)
            try:
                model.recompute, model.loss_chunk = choice.setting.recompute, choice.setting.loss_chunk
                if config.compile and not model.compiled:
                    model.compile_parts()
                stepper = engine.new_stepper(
                    model, config, choice.setting, device, dtype, compiled=model.compiled
                )
                seconds = [timed_step(stepper, batches, config) for _ in range(3 + options.sweep_steps)][3:]
                told["tokens_per_s"] = round(config.tokens_per_step / statistics.median(seconds))
            except Exception as error:
                told["error"] = (str(error).splitlines() or [type(error).__name__])[0][:160]
            if cuda:
                told["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
                told["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
                told["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
    return row


def timed_step(stepper: Any, batches: Any, config: Any) -> float:
    import torch

    from onecard.optim.schedule import rates

    began = time.perf_counter()
    stepper.run(batches.next_step().micros, rates(1, config))
    if config.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began


def judge_sweep(options: argparse.Namespace, rows: Rows, others: dict[str, Rows]) -> list[Check]:
    """Beside what the trainer reached in part caps; figures in predicted speeds where there is no card."""
    speed = "predicted_tokens_per_s" if options.tiny else "tokens_per_s"
    size = "predicted_need_gib" if options.tiny else "peak_reserved_gib"
    measured = [s for row in rows.values() for s in row["settings"] if "tokens_per_s" in s]
    unmeasured = [name for row in rows.values() for name in row["unmeasured"]]
    failed = [s["setting"] for row in rows.values() for s in row["settings"] if "error" in s]
    kept, of = next(((row["kept"], row["of"]) for row in rows.values()), (0, 0))
    missing = [*unmeasured, *failed, *(j for j in sweep_jobs(options) if j not in rows)]
    found = [check(f"{kept} settings worth measuring of {of} (others predicted {options.slower:.0%} slower)",
                   "all measured", missing or len(measured), not missing)]  # fmt: skip
    for name, row in others.get("caps", {}).items():
        if row["cap_gib"] is None or name.startswith("from outside"):
            continue
        fitting = [s for s in measured if s[size] <= row["cap_gib"]]
        if not fitting:
            continue
        best = max(fitting, key=lambda s: s[speed])
        ratio = row[speed] / best[speed]
        what = f"{name}: tokens/s beside the best of {len(fitting)} settings" + (
            STAND_IN if options.tiny else ""
        )
        text = f"{ratio:.3f}: {row[speed]:,} with {row['setting']}; {best[speed]:,} with {best['setting']}"
        found.append(check(what, f"at least {FAST}", text, ratio >= FAST))
    return found


# --- start
def start_jobs(options: argparse.Namespace) -> dict[str, Job]:
    caps = caps_of(options)
    name = list(caps)[len(caps) // 2]
    return {"as it stands": partial(start, options, None), name: partial(start, options, caps[name])}


def start(options: argparse.Namespace, cap: float | None) -> Row:
    """Seconds of all that is there because of the fit: asking for memory, predicting, choosing, probing."""
    from onecard.train import engine, loop, probe, refit
    from onecard.train import start as start_module

    took: dict[str, float] = {}

    def timed(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*arguments, **named)
            finally:
                took[name] = round(took.get(name, 0.0) + time.perf_counter() - began, 4)

        setattr(owner, name, wrapped)

    if options.tiny and cap is not None:
        pretend_memory(lambda: cap * GIB)
    timed(start_module, "choose_kernel")
    timed(start_module, "make_room")
    for name in ("cap_memory", "open_fit", "told_at_start"):
        timed(engine, name)
    for owner, name in ((loop, "plan_of"), (refit, "look_at"), (probe, "_sampling"), (probe, "_checkpoint")):
        timed(owner, name)
    more = [] if cap is None or options.tiny else [f"--vram_limit={cap + 0.75}"]
    row = Watched(config_of(options, "start", 4, "--log_interval=1", "--sample_tokens=200", *more)).go()
    return {key: row[key] for key in ("setting", "refits", "steps", "seconds")} | {"parts": took}


def judge_start(options: argparse.Namespace, rows: Rows, others: dict[str, Rows]) -> list[Check]:
    found = []
    for name, row in rows.items():
        took = row["parts"]
        parts = ("make_room", "plan_of", "look_at", "_sampling", "_checkpoint")
        added = sum(took[part] for part in parts)
        text = f"{added:.2f} s ({', '.join(f'{p} {took[p]:.2f}' for p in parts)}; {row['setting']})"
        found += [
            check(f"{name}: what the fit adds before the first step", "at most 5 s", text,
                  added <= 5),
            check(f"{name}: the prediction held", "no change of setting", row["refits"], row["refits"] == 0),
        ]  # fmt: skip
    return found
