"""Part sweep of benchmarks/fit.py: was the setting chosen the fastest one?"""

from __future__ import annotations

import argparse
import gc
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fit_parts import FAST, STAND_IN, Check, Job, Rows, check
from fit_runs import GIB, PULSE, Row, caps_of, question_of
from processes import so_far

# Those first that runs under caps are most likely to have.
MICRO_BATCHES = (16, 8, 4, 32, 64, 2, 1)
WARM_UP = 3  # steps in which kernels are compiled and micro-batches recorded


def sweep_jobs(options: argparse.Namespace) -> dict[str, Job]:
    return {job_of(size): Job(partial(sweep, options, size), 40, most=240) for size in MICRO_BATCHES}


def job_of(size: int) -> str:
    return f"micro-batch {size}"


def key_of(choice: Any) -> tuple[str, int]:
    return choice.setting.words(), choice.setting.loss_chunk


def is_whole(row: Row) -> bool:
    """Of a setting, or of all of one size: nothing in it is to be measured (again) by --resume."""
    return not (
        "error" in row
        or row.get("unmeasured")
        or any(not is_whole(part) for part in (*row.get("settings", []), *row.get("under_caps", [])))
    )


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
    """All settings of one micro-batch in one process, as a run does that changes its setting; those that
    --resume finds measured, and those for which the time is over, left out.

    One size after the other, though most of it is compiling: kernels are tried out meanwhile, on the card.
    """
    import torch

    began = time.monotonic()
    from onecard.data.batches import Sequences
    from onecard.data.bins import open_split
    from onecard.data.prefetch import Prefetcher
    from onecard.train import engine, memory, start

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
    there = options.known.get("sweep", {}).get(job_of(size), {}).get("settings", [])
    done = {(told["setting"], told["loss_chunk"]): told for told in there if is_whole(told)}
    row["settings"] = [done[key_of(choice)] for choice in mine if key_of(choice) in done]
    mine = [choice for choice in mine if key_of(choice) not in done]
    if not mine:
        return row
    row["unmeasured"] = ["{} --loss_chunk={}".format(*key_of(choice)) for choice in mine]
    so_far(row)
    model = start._fresh_model(shape, config)
    row["attention"] = model.attention_kernel = engine.choose_kernel(shape, config, device, dtype)
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    data = open_split(Path("data") / config.dataset, "train", shape.block_size, shape.vocab_size)
    sequences = Sequences(data, shape.block_size, config.seed)
    stepper: Any = None

    def begin(choice: Any) -> Any:
        model.use_weights({name: tensor.clone() for name, tensor in weights.items()})
        model.forget_accumulators()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model.recompute, model.loss_chunk = choice.setting.recompute, choice.setting.loss_chunk
        if config.compile and not model.compiled:
            model.compile_parts()
        return engine.new_stepper(model, config, choice.setting, device, dtype, compiled=model.compiled)

    def new_batches() -> Prefetcher:
        """For a setting each: one that ran out leaves a step half taken."""
        return Prefetcher(
            sequences, sequences.start(), step_sequences=config.sequences_per_step, micro_batch=size,
            device=device,
        )  # fmt: skip

    limit = min(sweep_jobs(options)[job_of(size)].limit, options.limit_seconds)
    ends = min(began + 0.9 * limit, options.ends)
    for choice in mine:
        if time.monotonic() > ends:
            break
        stepper = None
        told: Row = {"setting": choice.setting.words(), "loss_chunk": choice.setting.loss_chunk,
                     "drawn": choice in drawn, "predicted_need_gib": choice.bill.need / GIB,
                     "predicted_tokens_per_s": round(choice.tokens_per_s)}  # fmt: skip
        row["settings"].append(told)
        try:
            stepper = begin(choice)
            told["tokens_per_s"] = measured_speed(stepper, new_batches, config, options.sweep_steps)
        except Exception as error:
            told["error"] = first_words(error)
            memory.forget(error)
        if cuda:
            told |= peaks_gib()
            told["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            if "error" not in told:
                replay = stepper.replay
                told["recorded"] = replay is not None and replay.held_bytes > 0
                least = min(told["peak_allocated_gib"], told["predicted_need_gib"])
                told["under_caps"] = [
                    under_cap(options, cap, choice, stepper, new_batches)
                    for cap in sorted(options.caps)
                    if least <= cap < told["peak_reserved_gib"]
                ]
        del row["unmeasured"][0]
        so_far(row)  # should this process be ended, that is not lost
    return row


def first_words(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def peaks_gib() -> Row:
    import torch

    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return {"peak_reserved_gib": round(reserved / GIB, 3), "peak_allocated_gib": round(allocated / GIB, 3)}


def under_cap(options: argparse.Namespace, cap: float, choice: Any, stepper: Any, new_batches: Any) -> Row:
    """Does it run in less than it takes where nothing is short? The allocator keeps more then than it needs.

    As a run under that cap would: micro-batches are recorded only where there is room for it.
    """
    import torch

    from onecard.train import engine, memory
    from onecard.train.first_setting import process_bytes

    config, setting = choice.question.config, choice.setting
    there = replace(choice.question, allowed=process_bytes(cap * GIB)).answer(setting)
    told: Row = {"cap": cap, "ran": False}
    stepper.release()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap * GIB / torch.cuda.mem_get_info()[1])
    try:
        room, compiled = there.has_room_to_capture, stepper.model.compiled
        stepper.use_graphs(engine.graphs_of(config, setting, options.device, compiled=compiled, room=room))
        told["tokens_per_s"] = measured_speed(stepper, new_batches, config, options.sweep_steps)
        told["ran"] = True
    except Exception as error:
        if not memory.is_out_of_memory(error):
            told["error"] = first_words(error)
        memory.forget(error)
    finally:
        stepper.release()
        torch.cuda.set_per_process_memory_fraction(1.0)
    return told


def measured_speed(stepper: Any, new_batches: Any, config: Any, steps: int) -> int:
    """Tokens a second after the first steps, by the better of two times: a host that is busy with something
    else makes it slower, nothing makes it faster."""
    with new_batches() as batches:
        timed_steps(stepper, batches, config, WARM_UP)
        seconds = min(timed_steps(stepper, batches, config, steps) for _ in range(2))
    return round(config.tokens_per_step / seconds)


def timed_steps(stepper: Any, batches: Any, config: Any, steps: int) -> float:
    """Seconds of each of so many, with the card waited for as seldom as the trainer does."""
    import torch

    from onecard.optim.schedule import rates

    began = time.perf_counter()
    for _ in range(steps):
        PULSE.beat()
        stepper.run(batches.next_step().micros, rates(1, config))
    if config.device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


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
