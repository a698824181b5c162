"""Parts ballast, inject and pause of benchmarks/fit.py: what happens to a run while it runs."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fit_parts import CLOSE, FAST, STAND_IN, Check, Job, Rows, as_undisturbed, check
from fit_runs import (
    GIB,
    PULSE,
    STALLED_SECONDS,
    Row,
    Watched,
    caps_of,
    config_of,
    digest_of_weights,
    logged_steps,
    pretend_memory,
    words_of,
)
from fit_same_bits import same_bits
from fit_trouble import IN_A_ROW, Ballast, Injector, least_taken, places
from processes import _end_with

# The undisturbed run a second time, last and only where it is asked for (`needless`).
AGAIN = "quiet again"
# A short run of another optimizer: what its update allocates.
MUON, MUON_STEPS = "quiet, muon", 12


def needless(rows: Rows, name: str) -> bool:
    """Where no disturbed run has other bits than the quiet one, nobody asks how far quiet ones are apart."""
    ended = [rows.get(job, {}).get("weights") for job in ("same setting", "paused")]
    quiet = rows.get("quiet", {}).get("weights")
    return name == AGAIN and (quiet is None or all(weights in (None, quiet) for weights in ended))


# --- ballast
def ballast_phases(options: argparse.Namespace) -> tuple[int, int, int]:
    before, during, after = options.ballast_steps
    return before, during, after


def ballast_jobs(options: argparse.Namespace) -> dict[str, Job]:
    return {"run": Job(partial(ballast, options), 40 + 0.2 * sum(options.ballast_steps))}


def ballast(options: argparse.Namespace) -> Row:
    """The trainer beside somebody who takes and returns memory.

    Micro-batches of 32: the run as it stands then takes most of what is free. Every 20 steps it lets go of
    what it only keeps for later and stands aside for a moment, or there would be nothing to take from it.
    """
    import torch

    from onecard.train.loop import Training
    from onecard.train.step import Stepper

    before, during, after = ballast_phases(options)
    folder = options.work / "ballast"
    caps = list(caps_of(options).values())
    most, least = (caps[0], caps[-1]) if options.tiny else (0.0, 0.0)
    other = Ballast(options, folder, (before, during))
    shutil.rmtree(folder, ignore_errors=True)  # what is left of a job that was ended is not its steps
    for left_behind in (other.log, other.taken):
        left_behind.unlink(missing_ok=True)
    processes = multiprocessing.get_context("fork")
    ready, over = processes.Event(), processes.Event()
    helper = processes.Process(target=other.work, args=(ready, over, least, most), daemon=True)
    helper.start()
    if not ready.wait(60):
        raise RuntimeError("the ballast could not fill the card")
    more = ["--log_interval=1", "--eval_interval=50"]
    if not options.tiny:
        more += ["--batch_size=32", "--gradient_accumulation_steps=2"]
    config = config_of(options, "ballast", before + during + after, *more)
    watched = Watched(config)
    plain_step, plain_backward = Training._step, Stepper.backward
    if options.tiny:
        pretend_memory(lambda: (most - other.taken_gib()) * GIB)
        climb_sooner()

    def step(training: Any, batches: Any) -> bool:
        if not options.tiny and training.position.step % 20 == 0:
            training.stepper.release()
            torch.cuda.empty_cache()
            time.sleep(0.2)  # not in the seconds of a step
        return plain_step(training, batches)  # or the loop would never look whether memory has come back

    def backward(stepper: Any, *arguments: Any) -> Any:
        if options.tiny and watched.run.fit.choice.bill.need > (most - other.taken_gib()) * GIB:
            raise torch.OutOfMemoryError("CUDA out of memory: taken by somebody else")
        return plain_backward(stepper, *arguments)

    setattr(Training, "_step", step)  # noqa: B010
    setattr(Stepper, "backward", backward)  # noqa: B010
    try:
        row = watched.go()
    finally:
        over.set()
        helper.join(30)
    seconds = row.pop("step_seconds")
    row |= {
        "phases": [before, during, after], "ballast": other.events(),
        "least_gib": least_taken(not options.tiny, least, most),
        "seconds_before": statistics.median(seconds[before // 2 : before]),
        "seconds_during": statistics.median(seconds[before : before + during]),
        "seconds_after": statistics.median(seconds[-max(after // 5, 1) :]),
    }  # fmt: skip
    limit = row["seconds_before"] / FAST
    windows = range(before + during, len(seconds) - 10)
    row["steps_until_as_fast"] = next(
        (i - before - during for i in windows if statistics.median(seconds[i : i + 10]) <= limit), None
    )
    return row


def climb_sooner() -> None:
    """Settings that failed are tried again sooner than usual, or most of a short run would be slow."""
    from onecard.train import fit, refit

    setattr(refit, "_CLIMB_EVERY", 4)  # noqa: B010
    setattr(fit, "_PATIENCE", 8)  # noqa: B010


def judge_ballast(options: argparse.Namespace, rows: Rows, others: dict[str, Rows]) -> list[Check]:
    row = rows["run"]
    steps = sum(row["phases"])
    events = row["ballast"]
    taken = [
        took["gib"] for took, then in pairwise(events)
        if took.get("gib", 0) >= row["least_gib"] and then["did"] == "gave it back"
    ]  # fmt: skip
    losses = [loss for _, loss in row["val"]]
    again = row["seconds_before"] / row["seconds_after"]
    speed = f"{again:.3f}; during it {row['seconds_before'] / row['seconds_during']:.3f}"
    fast = again >= FAST
    if options.tiny:
        ratio = row["predicted_tokens_per_s"] / row["predicted_at_first"]
        fast, speed = ratio >= FAST, f"{ratio:.3f} predicted{STAND_IN}"
    return [
        check(f"{row['least_gib']:.2g} GiB or more were taken and given back", "at least 3 times",
              f"{len(taken)} times, {max(taken, default=0):.3g} GiB at most", len(taken) >= 3),
        check("ran to the end", f"{steps} steps", row["steps"], row["steps"] == steps),
        check("no step lost or doubled", f"0 to {steps - 1}", len(row["logged"]),
              row["logged"] == list(range(steps))),
        check("updates", str(steps), row["updates"], row["updates"] == steps),
        as_undisturbed("run", row),
        check("validation loss", "finite, and lower at the end", f"{losses[0]:.4f} to {losses[-1]:.4f}",
              all(map(math.isfinite, losses)) and losses[-1] < losses[0]),
        check("changes of setting", "at least 1", row["refits"], row["refits"] >= 1),
        check(f"speed after it has left ({row['steps_until_as_fast']} steps later), of before",
              f"at least {FAST}", speed, fast),
    ]  # fmt: skip


# --- inject
def inject_jobs(options: argparse.Namespace) -> dict[str, Job]:
    took = 0.05 * options.inject_steps  # of 16,384 tokens
    # An error costs a few tenths of a second, and another setting has to be compiled.
    seconds = {"quiet": 35 + took, "same setting": 70 + took, "loud": 120 + took, MUON: 45, AGAIN: 35 + took}
    return {kind: Job(partial(inject, options, kind), seconds[kind]) for kind in seconds}


def inject(options: argparse.Namespace, kind: str) -> Row:
    """Steps of one micro-batch as the config stands; no recorded graphs, in which nothing can be raised."""
    from onecard.train import fit, retries

    steps = MUON_STEPS if kind == MUON else options.inject_steps
    more = ["--log_interval=1", f"--eval_interval={steps // 10}", "--always_save_checkpoint=True",
            "--cuda_graphs=False", "--sample_tokens=16"]  # fmt: skip
    if kind == MUON:
        more += ["--optimizer=muon", f"--eval_interval={steps}"]
    if not options.tiny:
        more.append("--gradient_accumulation_steps=1")
        same_bits()
    watched = Watched(config_of(options, "inject", steps, *more))
    watched.watch_updates = kind in ("quiet", MUON)
    climb_sooner()
    injector = (
        Injector(watched, steps, options.seed, places(options)) if not kind.startswith("quiet") else None
    )
    if kind == "same setting":
        setattr(fit.Fit, "down", lambda self, step, allocator=None: self.setting)  # noqa: B010
        setattr(retries, "_WAIT", 0.0)  # noqa: B010 - nobody holds memory that could come back
    row = watched.go()
    del row["step_seconds"]
    if injector is not None:
        row |= injector.told()
    if watched.update_costs:
        row["update_allocations"] = {
            name: max(costs[i] for costs in watched.update_costs)
            for i, name in enumerate(("allocations", "bytes_above", "bytes_asked_of_the_driver"))
        }
    return row


def largest_gap(one: Row, other: Row) -> float:
    return max(abs(a - b) for (_, a), (_, b) in zip(one["train"], other["train"], strict=True))


def equal_or_noise(one: Row, quiet: Row, again: Row | None) -> tuple[str, str, bool]:
    """Bit for bit where undisturbed runs are; else no further apart than twice what those are."""
    gap = largest_gap(one, quiet)
    if again is None or again["weights"] == quiet["weights"]:
        same = one["weights"] == quiet["weights"]
        return "the same bits", f"{'the same' if same else 'others'}; losses {gap:.2g} apart", same
    noise = largest_gap(again, quiet)
    wanted = f"as two undisturbed runs, which are not bit for bit the same here: losses {noise:.2g} apart"
    return wanted, f"losses {gap:.2g} apart", gap <= 2 * noise


def judge_inject(options: argparse.Namespace, rows: Rows, others: dict[str, Rows]) -> list[Check]:
    quiet, found = rows.get("quiet"), []
    steps, counts = quiet["asked"] if quiet is not None else 0, places(options)
    for name in ("loud", "same setting"):
        row = rows.get(name)
        if row is None or quiet is None:
            continue
        raised, arrived, row_of = row["raised"], row["arrived"], row["in_a_row"]
        total = sum(counts.values())
        found += [
            check(f"{name}: errors raised", f"{total}: {counts}", raised, raised == counts),
            check(f"{name}: in a row at one step", f"at least {IN_A_ROW}", row_of,
                  all(row_of[place] >= count for place, count in IN_A_ROW.items())),
            check(f"{name}: arrive as what they are", f"{total} OutOfMemoryErrors", arrived,
                  arrived == {"OutOfMemoryError": total}),
            check(f"{name}: updates", str(steps), row["updates"], row["updates"] == steps),
            check(f"{name}: no step lost or doubled", f"0 to {steps - 1}", len(row["logged"]),
                  row["logged"] == list(range(steps))),
            as_undisturbed(name, row),
        ]  # fmt: skip
    if quiet is not None and "loud" in rows:
        apart = abs(rows["loud"]["val_loss"] - quiet["val_loss"])
        found.append(check("loud: final validation loss beside the undisturbed run's", f"within {CLOSE}",
                           f"{apart:.6f} apart, {rows['loud']['refits']} changes of setting",
                           apart <= CLOSE))  # fmt: skip
    if quiet is not None and "same setting" in rows:
        wanted, text, ok = equal_or_noise(rows["same setting"], quiet, rows.get(AGAIN))
        found.append(check("the same setting again after every error: weights at the end", wanted, text, ok))
    for name, what, keys in (
        ("quiet", "what an update allocates", ("allocations", "bytes_above", "bytes_asked_of_the_driver")),
        (MUON, "Muon's update: its temporaries ask the driver for nothing, the first one's neither",
         ("bytes_asked_of_the_driver",)),
    ):  # fmt: skip
        if name in rows:
            costs = rows[name].get("update_allocations")
            ok = options.tiny if costs is None else not any(costs[key] for key in keys)
            found.append(check(what + STAND_IN * (costs is None), "nothing", costs or "not counted", ok))
    return found


# --- pause
def pause_jobs(options: argparse.Namespace) -> dict[str, Job]:
    took = 0.15 * options.pause_steps
    quiet = Job(partial(plain_run, options, "quiet", options.pause_steps, "--log_interval=1"), 35 + took)
    return {"quiet": quiet, "paused": Job(partial(paused, options), 40 + took), AGAIN: quiet}


def plain_run(options: argparse.Namespace, name: str, steps: int, *more: str) -> Row:
    if not options.tiny:
        same_bits()
    row = Watched(config_of(options, name, steps, *more)).go()
    del row["step_seconds"]
    return row


def paused(options: argparse.Namespace) -> Row:
    """`onecard train` in a process of its own, asked from here; memory as the driver tells it here."""
    import torch
    from fit_same_bits import __file__ as same_bits_file

    from onecard.run.directory import RunDirectory
    from onecard.run.metrics import read_metrics
    from onecard.run.pause import ask_to_go_on, ask_to_pause
    from onecard.run.stored import list_checkpoints

    cuda, steps = not options.tiny, options.pause_steps
    folder = options.work / "paused"
    shutil.rmtree(folder, ignore_errors=True)  # what is left of a job that was ended is not its steps

    def used() -> float:
        free, total = torch.cuda.mem_get_info() if cuda else (0, 0)
        return (total - free) / GIB

    def wait_for(count: int) -> None:
        there, since = -1, time.monotonic()
        while (now := len(logged_steps(folder))) < count:
            if now > there:
                there, since = now, time.monotonic()
                PULSE.beat()
            if job.poll() is not None or time.monotonic() - since > 0.9 * STALLED_SECONDS:
                raise RuntimeError(f"no step {count}; the job's exit code: {job.returncode}")
            time.sleep(0.02)

    without = used()
    words = words_of(options, "paused", steps, "--log_interval=1")
    paths = [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"OMP_NUM_THREADS": "1"} if options.tiny else {}
    program = ["-m", "onecard", "train"] if options.tiny else [str(Path(same_bits_file).resolve())]
    # Should this process be ended, it must not be left behind on the card.
    job = subprocess.Popen(
        [sys.executable, *program, *words], env=environment, preexec_fn=partial(_end_with, os.getpid())
    )
    try:
        wait_for(steps // 4)
        held = used() - without
        seen: list[tuple[float, float]] = []
        done, began = threading.Event(), time.monotonic()

        def look() -> None:
            while not done.wait(0.01):
                seen.append((time.monotonic() - began, used() - without))

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        ask_to_pause(RunDirectory(folder))
        answered = time.monotonic() - began
        time.sleep(1.5)
        done.set()
        looking.join()
        rest = seen[-1][1]
        freed = next((at for at, now in seen if now <= rest + 0.05 * (held - rest)), None)
        there = len(logged_steps(folder))
        time.sleep(1.0)
        idle = len(logged_steps(folder)) == there
        began = time.monotonic()
        ask_to_go_on(RunDirectory(folder))
        wait_for(there + 1)
        again = time.monotonic() - began
        wait_for(steps)
        code = job.wait(timeout=60)
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
    rows = read_metrics(folder / "metrics.jsonl")
    return {
        "asked": steps, "exit_code": code, "paused_at": there, "idle": idle, "held_gib": round(held, 3),
        "left_gib": round(rest, 3), "seconds_until_free": freed if cuda else answered,
        "seconds_until_answered": round(answered, 3), "seconds_until_next_step": round(again, 3),
        "logged": logged_steps(folder), "train": [(r["step"], r["loss"]) for r in rows if "loss" in r],
        "weights": digest_of_weights(list_checkpoints(folder / "checkpoints")[-1].model_tensors()),
    }  # fmt: skip


def judge_pause(options: argparse.Namespace, rows: Rows, others: dict[str, Rows]) -> list[Check]:
    row, found = rows.get("paused"), []
    if row is None:
        return []
    stand_in = STAND_IN if options.tiny else ""
    seconds, steps = row["seconds_until_free"], row["asked"]
    text = f"{seconds:.2f} s; {row['held_gib']} GiB held before, {row['left_gib']} GiB (CUDA itself) after"
    quick = options.tiny or (seconds <= 2 and row["left_gib"] <= min(1.2, 0.5 * row["held_gib"]))
    found = [
        check("paused while it was training", f"before step {steps}", row["paused_at"],
              row["paused_at"] < steps and row["idle"]),
        check(f"from --pause to free memory{stand_in}", "at most 2 s", text, quick),
        check("goes on", f"0 to {steps - 1}, exit code 0",
              f"{len(row['logged'])} steps, code {row['exit_code']}; next step after "
              f"{row['seconds_until_next_step']:.1f} s",
              row["logged"] == list(range(steps)) and row["exit_code"] == 0),
    ]  # fmt: skip
    if "quiet" in rows:
        wanted, text, ok = equal_or_noise(row, rows["quiet"], rows.get(AGAIN))
        found.append(check("the curve and the weights of the run that was not paused", wanted, text, ok))
    return found
