"""Parts caps and start of benchmarks/fit.py: the same run in less memory, and what it takes to begin it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fit_runs import GIB, Row, Watched, caps_of, config_of, pretend_memory

Rows = dict[str, Row]  # of one part, by job
Check = dict[str, Any]
CLOSE = 0.01  # nats
FAST = 0.95
# In the tiny mode speeds are those of a toy on a busy machine: the paths run, the figures say nothing.
STAND_IN = " (stand-in: no card)"


@dataclass(frozen=True)
class Job:
    """Work in a process of its own. `seconds`: what it is expected to take on an H200, compiling included."""

    work: Callable[[], Row]
    seconds: float
    most: float = (
        0.0  # of one that ends by itself when the time is over; `seconds` is then the least it needs
    )

    @property
    def limit(self) -> float:
        """One that hangs is ended long before (fit_runs.Pulse); this is for one that is far too slow."""
        return self.most or 60 + 2 * self.seconds


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

    from onecard.config.resolve import resolve
    from onecard.train import engine, memory

    more = []
    if cap is not None and options.tiny:
        pretend_memory(lambda: cap * GIB)
    elif cap is not None:
        memory.use_expandable_segments()
        asked = config_of(options, "capped", steps)
        shape = resolve(asked).shape
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
    from onecard.train import engine, probes, refit, saving
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
    for name in ("cap_memory", "open_fit", "setting_notes"):
        timed(engine, name)
    more_parts = (saving, "plan_of"), (refit, "look_at"), (probes, "_sampling"), (probes, "_checkpoint")
    for owner, name in more_parts:
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
