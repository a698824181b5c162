"""Parts caps, sweep and start of benchmarks/fit.py: was the setting chosen the right one?"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fit_runs import GIB, PULSE, Row, Watched, caps_of, config_of, pretend_memory, question_of

Rows = dict[str, Row]  # of one part, by job
Check = dict[str, Any]
# Those first that runs under caps are most likely to have.
MICRO_BATCHES = (16, 8, 4, 32, 64, 2, 1)
CLOSE = 0.01  # nats
FAST = 0.95
# In the tiny mode speeds are those of a toy on a busy machine: the paths run, the figures say nothing.
STAND_IN = " (stand-in: no card)"


@dataclass(frozen=True)
class Job:
    """Work in a process of its own. `seconds`: what it is expected to take on an H200, compiling included."""

    work: Callable[[], Row]
    seconds: float

    @property
    def limit(self) -> float:
        """One that hangs is ended long before (fit_runs.Pulse); this is for one that is far too slow."""
        return 60 + 2 * self.seconds


def check(what: str, wanted: str, found: Any, ok: bool) -> Check:
    return {"what": what, "wanted": wanted, "found": found, "ok": bool(ok)}


def as_undisturbed(name: str, row: Row) -> Check:
    """Beside what the schedule and the order of the data say, without another run."""
    there = {key: row[key] for key in row["must_be"]}
    return check(f"{name}: learning rates, data position and tokens", row["must_be"], there,
                 there == row["must_be"])  # fmt: skip


# --- caps
def caps_jobs(options: argparse.Namespace) -> dict[str, Job]:
    """What all are compared with, and then the tightest first."""
    caps, steps = caps_of(options), options.steps
    outside = list(caps)[len(caps) // 2]
    few = max(20, steps // 10)
    return {
        "uncapped": Job(partial(capped, options, None, steps), 35 + 0.15 * steps),
        **{name: Job(partial(capped, options, cap, steps), 20 + 0.2 * steps)
           for name, cap in sorted(caps.items(), key=lambda item: item[1])},
        f"from outside: {outside}": Job(partial(capped, options, caps[outside], few, knob=False), 25),
    }  # fmt: skip


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
        found += [
            check(f"{name}: ran to the end", f"{row['asked']} steps", row["steps"],
                  row["steps"] == row["asked"]),
            check(f"{name}: holds what it began with", "no change of setting", row["refits"],
                  row["refits"] == 0),
            as_undisturbed(name, row),
        ]  # fmt: skip
        if name == "uncapped":
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
        if free is None:
            continue
        apart = abs(row["val_loss"] - free["val_loss"])
        curve = max(abs(a - b) for (_, a), (_, b) in zip(row["train"], free["train"], strict=True))
        found += [
            check(f"{name}: validation loss beside the uncapped run's", f"within {CLOSE}",
                  f"{apart:.5f} apart; training curves at most {curve:.5f}", apart <= CLOSE),
        ]  # fmt: skip
    return found


# --- sweep
def sweep_jobs(options: argparse.Namespace) -> dict[str, Job]:
    return {f"micro-batch {size}": Job(partial(sweep, options, size), 80) for size in MICRO_BATCHES}


def worth_measuring(options: argparse.Namespace, question: Any) -> tuple[list[Any], list[Any], int]:
    """Settings that the planner lets into some cap (or nearly), not far slower than its best one there; some
    of the others, drawn at random, or a setting that is faster than predicted would never be found out; and
    how many there are in all."""
    from onecard.plan.search import settings

    every = [question.answer(s) for s in settings(question.config, question.shape)]
    every = [choice for choice in every if choice.setting.exact]
    caps = [cap * GIB for cap in caps_of(options).values()]
    nearly = 1.0 if options.tiny else 1.03
    kept: list[Any] = []
    for cap in caps:
        fitting = [choice for choice in every if choice.bill.need <= nearly * cap]
        best = max((choice.tokens_per_s for choice in fitting if choice.bill.need <= cap), default=0.0)
        kept += [c for c in fitting if c.tokens_per_s >= (1 - options.slower) * best and c not in kept]
    others = [choice for choice in every if choice not in kept and choice.bill.need <= max(caps)]
    drawn = random.Random(options.seed).sample(others, min(options.sweep_drawn, len(others)))
    return kept, drawn, len(every)


def sweep(options: argparse.Namespace, size: int) -> Row:
    """All settings of one micro-batch in one process: as a run does that changes its setting."""
    import torch

    from onecard.data.batches import Sequences
    from onecard.data.bins import open_split
    from onecard.data.prefetch import Prefetcher
    from onecard.train import engine, memory, start

    ends = time.monotonic() + 0.9 * sweep_jobs(options)[f"micro-batch {size}"].limit
    if not options.tiny:
        memory.use_expandable_segments()
    question = question_of(options)
    config, shape, dtype = question.config, question.shape, question.dtype
    cuda, device = not options.tiny, options.device
    torch.set_float32_matmul_precision("high")
    kept, drawn, every = worth_measuring(options, question)
    row: Row = {"settings": [], "unmeasured": [], "kept": len(kept), "drawn": len(drawn), "of": every}
    mine = sorted((c for c in kept if c.setting.micro_batch == size), key=lambda c: -c.tokens_per_s)
    mine += [choice for choice in drawn if choice.setting.micro_batch == size]
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
            told: Row = {"setting": choice.setting.words(), "loss_chunk": choice.setting.loss_chunk,
                         "drawn": choice in drawn, "predicted_need_gib": choice.bill.need / GIB,
                         "predicted_tokens_per_s": round(choice.tokens_per_s)}  # fmt: skip
            row["settings"].append(told)
            try:
                model.recompute, model.loss_chunk = choice.setting.recompute, choice.setting.loss_chunk
                if config.compile and not model.compiled:
                    model.compile_parts()
                stepper = engine.new_stepper(
                    model, config, choice.setting, device, dtype, compiled=model.compiled
                )
                told["tokens_per_s"] = measured_speed(stepper, batches, config, options.sweep_steps)
            except Exception as error:
                told["error"] = (str(error).splitlines() or [type(error).__name__])[0][:160]
                memory.forget(error)
            if cuda:
                told["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
                told["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
                told["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
                if "error" not in told:
                    least = min(told["peak_allocated_gib"], told["predicted_need_gib"])
                    told["under_caps"] = [
                        under_cap(options, cap, choice, stepper, batches)
                        for cap in sorted(options.caps)
                        if least <= cap < told["peak_reserved_gib"]
                    ]
    return row


def under_cap(options: argparse.Namespace, cap: float, choice: Any, stepper: Any, batches: Any) -> Row:
    """Does it run in less than it takes where nothing is short? The allocator keeps more then than it needs.

    As a run under that cap would: micro-batches are recorded only where there is room for it.
    """
    import torch

    from onecard.train import engine, memory
    from onecard.train.fit import process_bytes

    config, setting = choice.question.config, choice.setting
    there = replace(choice.question, allowed=process_bytes(cap * GIB)).answer(setting)
    told: Row = {"cap": cap, "ran": False}
    stepper.release()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap * GIB / torch.cuda.mem_get_info()[1])
    try:
        room, compiled = there.has_room_to_record, stepper.model.compiled
        stepper.record(engine.graphs_of(config, setting, options.device, compiled=compiled, room=room))
        told["tokens_per_s"] = measured_speed(stepper, batches, config, max(2, options.sweep_steps // 2))
        told["ran"] = True
    except Exception as error:
        if not memory.is_out_of_memory(error):
            told["error"] = (str(error).splitlines() or [type(error).__name__])[0][:160]
        memory.forget(error)
    finally:
        stepper.release()
        torch.cuda.set_per_process_memory_fraction(1.0)
    return told


def measured_speed(stepper: Any, batches: Any, config: Any, steps: int) -> int:
    """Tokens a second, after steps in which kernels are compiled and micro-batches recorded."""
    seconds = [timed_step(stepper, batches, config) for _ in range(3 + steps)][3:]
    return round(config.tokens_per_step / statistics.median(seconds))


def timed_step(stepper: Any, batches: Any, config: Any) -> float:
    import torch

    from onecard.optim.schedule import rates

    PULSE.beat()
    began = time.perf_counter()
    stepper.run(batches.next_step().micros, rates(1, config))
    if config.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began


def speed_at(setting: Row, cap: float) -> float | None:
    """Tokens a second in so many GiB; None where it does not run in that, as far as is known."""
    if setting["peak_reserved_gib"] <= cap:
        return float(setting["tokens_per_s"])
    ran = (float(t["tokens_per_s"]) for t in setting.get("under_caps", []) if t["cap"] == cap and t["ran"])
    return next(ran, None)


def predicted_speed_at(setting: Row, cap: float) -> float | None:
    """Where there is no card to run out of."""
    return float(setting["predicted_tokens_per_s"]) if setting["predicted_need_gib"] <= cap else None


def judge_sweep(options: argparse.Namespace, rows: Rows, others: dict[str, Rows]) -> list[Check]:
    """Beside what the trainer reached in part caps; figures in predicted speeds where there is no card."""
    speed = "predicted_tokens_per_s" if options.tiny else "tokens_per_s"
    speed_of = predicted_speed_at if options.tiny else speed_at
    measured = [s for row in rows.values() for s in row["settings"] if "tokens_per_s" in s]
    unmeasured = [name for row in rows.values() for name in row["unmeasured"]]
    failed = [s["setting"] for row in rows.values() for s in row["settings"] if "error" in s]
    failed += [f"{s['setting']} under {t['cap']:g} GiB" for s in measured for t in s.get("under_caps", [])
               if "error" in t]  # fmt: skip
    missing = [*unmeasured, *failed]
    first = next(iter(rows.values()))
    what = (
        f"of {first['of']} exact settings {first['kept']} worth measuring (not predicted to be "
        f"{options.slower:.0%} slower than the best under every cap) and {first['drawn']} of the others"
    )
    wanted = first["kept"] + first["drawn"]
    found = [check(what, f"{wanted} measured", missing or len(measured),
                   not missing and len(measured) == wanted)]  # fmt: skip
    for name, cap in caps_of(options).items():
        what = f"{name}: tokens/s beside the best setting measured" + (STAND_IN if options.tiny else "")
        row = others.get("caps", {}).get(name)
        fitting = [(at, s["setting"]) for s in measured if (at := speed_of(s, cap)) is not None]
        if row is None or not fitting:
            why = "no run of part caps to compare" if row is None else "no setting that runs in that"
            found.append(check(what, f"at least {FAST}", why, False))
            continue
        best, best_setting = max(fitting)
        ratio = row[speed] / best
        text = (
            f"{ratio:.3f}: {row[speed]:,} with {row['setting']}; {best:,.0f} with {best_setting} "
            f"(best of {len(fitting)})"
        )
        found.append(check(what, f"at least {FAST}", text, ratio >= FAST))
    return found


# --- start
def start_jobs(options: argparse.Namespace) -> dict[str, Job]:
    caps = caps_of(options)
    name = list(caps)[len(caps) // 2]
    return {
        "as it stands": Job(partial(start, options, None), 35),
        name: Job(partial(start, options, caps[name]), 25),
    }


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
