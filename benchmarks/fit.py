"""What the trainer promises about memory, tried on this machine's GPU: it does not run out.

    python benchmarks/fit.py --data PARQUET... --parts start caps --out FILE.json
    python benchmarks/fit.py --parts sweep --out FILE.json --resume --budget_seconds 560
    python benchmarks/fit.py --report FILE.json
    python benchmarks/fit.py --device cpu --tiny --out FILE.json                (does it run?)

GPT-2 124M, bf16, compiled, 65,536 tokens a step (inject: 16,384). Every job is a process of its own; the
results file is rewritten after each, --resume leaves out what is in it (of the sweep setting by setting).
Jobs without a result are failed checks: those of the parts asked for, and of the parts that the file has
something of.

                                                                                    seconds on an H200 (guess)
start    seconds that choosing a setting adds before the first step                                     60
pause    seconds from --pause to free memory, and the same curve as without                            130
caps     the same config in less and less memory: loss, learning rates and data as without a cap       370
sweep    all exact settings worth a try and some others, a few steps each: was the trainer's choice
         the fastest that fits? (beside what is in the file of part caps)                              500
inject   100 OutOfMemoryErrors in all places where they can happen (tiny: 36)                          290
ballast  another process fills the card, takes memory and gives it back while the trainer runs         230

A step takes 0.13 s, a process with all its compiling 25 to 30 s before the first one, 15 s where the
compiler's cache knows it. A job in which nothing gets done for 85 s is ended; one that goes on has a limit
of its own (twice what it should take, and a minute).

Tiny mode runs every path on a CPU, where nothing is short: memory is what the trainer is told it has, and
speeds are not judged.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from command_line import command_line  # noqa: E402
from fit_disturbed import (  # noqa: E402
    ballast_jobs,
    inject_jobs,
    judge_ballast,
    judge_inject,
    judge_pause,
    needless,
    pause_jobs,
)
from fit_parts import (  # noqa: E402
    Check,
    Job,
    Rows,
    caps_jobs,
    check,
    judge_caps,
    judge_start,
    start_jobs,
)
from fit_runs import PULSE, Row, tiny_data  # noqa: E402
from fit_sweep import is_whole, judge_sweep, sweep_jobs  # noqa: E402
from processes import in_own_process  # noqa: E402

Jobs = Callable[[argparse.Namespace], dict[str, Job]]
Judge = Callable[[argparse.Namespace, Rows, dict[str, Rows]], list[Check]]
PARTS: dict[str, tuple[Jobs, Judge]] = {
    "start": (start_jobs, judge_start),
    "pause": (pause_jobs, judge_pause),
    "caps": (caps_jobs, judge_caps),
    "sweep": (sweep_jobs, judge_sweep),
    "inject": (inject_jobs, judge_inject),
    "ballast": (ballast_jobs, judge_ballast),
}
ABOUT = (
    "Caps are bytes for tensors, as torch's allocator counts them (peak reserved is its figure). CUDA's own "
    "context, libraries and kernels come on top and differ from card to card: a process needs that much more "
    "of the card than its cap."
)
# How long runs are: on a card, and in the tiny mode.
LENGTHS: dict[str, tuple[Any, Any]] = {
    "steps": (200, 20),
    "sweep_steps": (5, 1),
    "sweep_drawn": (12, 3),
    "ballast_steps": ([100, 500, 400], [20, 160, 80]),
    "gap": ([2.0, 10.0], [0.05, 0.2]),
    "inject_steps": (200, 60),
    "pause_steps": (160, 160),
}


def safely(work: Callable[[], Row], cuda: bool) -> Row:
    """What goes wrong is in the row as `error`, and told in full on the screen only: traces name folders."""
    import torch

    if not cuda:
        torch.set_num_threads(1)  # a toy is done sooner by one
    try:
        row = work()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        row = {"error": f"{type(error).__name__}: {lines[0][:200]}", "trace": traceback.format_exc()[-3000:]}
    card = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    return row | {"card": card, "torch": torch.__version__}


def watched(work: Callable[[], Row]) -> Row:
    PULSE.beat()
    return work()


def prepare_data(options: argparse.Namespace) -> Row:
    if options.tiny:
        tiny_data(options.dataset)
    elif options.data:
        from onecard.data.prepare.command import prepare
        from onecard.data.prepare.options import PrepareOptions

        prepare(options.data, PrepareOptions(name=options.dataset, tokenizer="gpt2", val_fraction=0.025))
    if not (Path("data") / options.dataset / "val.bin").exists():
        return {"error": f"there is no data/{options.dataset}: --data PARQUET..."}  # not once in every job
    return {}


def write(file: Path | None, results: Row) -> None:
    if file:
        fresh = file.with_name(file.name + ".new")
        fresh.write_text(json.dumps(results) + "\n")
        fresh.replace(file)


def judged(options: argparse.Namespace, rows: dict[str, dict[str, Row]]) -> list[Check]:
    """Of all parts that were asked for, or have a result from an earlier call."""
    found: list[Check] = []
    good = {part: {n: r for n, r in jobs.items() if "error" not in r} for part, jobs in rows.items()}
    for part, (jobs_of, judge) in PARTS.items():
        if part not in rows and part not in options.parts:
            continue
        there = rows.get(part, {})
        for name in jobs_of(options):
            if name in there or not needless(there, name):
                row = there.get(name, {"error": "not run"})
                result = row.get("error") or f"in {row['took']:.0f} s"
                found.append({"part": part, **check(f"{name}: ran", "a result", result, "error" not in row)})
        if good.get(part):
            try:
                found += [{"part": part, **c} for c in judge(options, good[part], good)]
            except Exception as error:  # a row with less in it than there should be must not cost the others
                text = f"{type(error).__name__}: {error}"
                found.append({"part": part, **check("can be judged", "whole results", text, False)})
    return found


def show(checks: list[Check]) -> None:
    for found in checks:
        verdict = "PASS" if found["ok"] else "FAIL"
        print(f"{verdict} {found['part']}: {found['what']}: {found['found']} (wanted: {found['wanted']})")
    failed = sum(not found["ok"] for found in checks)
    print(f"{len(checks) - failed} of {len(checks)} requirements met")


def run_all(options: argparse.Namespace) -> Row:
    began = time.monotonic()
    results: Row = {
        "what": "training in less memory than there should be",
        "date": time.strftime("%Y-%m-%d"), "command": command_line(), "python": platform.python_version(),
        "tiny": options.tiny, "about_caps": ABOUT, "rows": {}, "checks": [],
    }  # fmt: skip
    if options.resume and options.out and options.out.exists():
        before = json.loads(options.out.read_text())
        results["resumed"] = [*before.get("resumed", []), before["command"]]
        results |= {key: before[key] for key in ("rows", "card", "torch") if key in before}
    options.work.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        # Once for all jobs, which are forks of this process, and nothing for them to look for garbage in. Not
        # where there is a card: nothing that might ask for one may be loaded before they are.
        import torch._dynamo  # noqa: F401

        import onecard.train.loop  # noqa: F401

        gc.freeze()
    rows = results["rows"]
    options.known, options.ends = rows, began + options.budget_seconds
    ready = in_own_process(partial(safely, partial(prepare_data, options), False), options.limit_seconds)
    if "error" in ready:
        raise SystemExit(f"error: the data could not be prepared: {ready['error']}\n{ready.get('trace', '')}")
    for part in options.parts:
        for name, job in PARTS[part][0](options).items():
            there = rows.get(part, {}).get(name)
            if there is not None and is_whole(there):
                continue
            if needless(rows.get(part, {}), name):
                continue
            if time.monotonic() - began + job.seconds > options.budget_seconds:
                print(f"not started within the budget: {part}, {name}", file=sys.stderr)
                continue
            started = time.monotonic()
            work = partial(safely, partial(watched, job.work), not options.tiny)
            row = in_own_process(work, min(job.limit, options.limit_seconds))
            row["took"] = round(time.monotonic() - started, 1)
            if trace := row.pop("trace", None):
                print(trace, file=sys.stderr)
            for key in ("card", "torch"):
                results[key] = row.pop(key, results.get(key))
            rows.setdefault(part, {})[name] = row
            told = row.get("error") or " ".join(
                f"{key}={row[key]}" for key in ("setting", "tokens_per_s", "val_loss", "refits") if key in row
            )
            print(f"[{time.monotonic() - began:5.0f} s] {part}, {name}: {told}", file=sys.stderr, flush=True)
            results["checks"] = judged(options, rows)
            write(options.out, results)
    results["checks"] = judged(options, rows)
    write(options.out, results)
    return results


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--data", nargs="*", default=[], help="text to prepare (GPT-2's tokens, 2.5%% held out)")
    add("--dataset", default="fit", help="its name under data/")
    add("--caps", type=float, nargs="+", default=[11.0, 8.0, 6.0, 4.0, 3.0, 2.0], help="GiB for tensors")
    add("--steps", type=int, help="of every run in part caps (200)")
    add("--slower", type=float, default=0.2, help="sweep: leave out what is predicted to be so much slower")
    add("--sweep_steps", type=int, help="timed ones of every setting (5)")
    add("--sweep_drawn", type=int, help="settings measured of those that are left out (12)")
    add("--free_gib", type=float, default=12.0, help="ballast: what the card has free at first")
    add("--leave_gib", type=float, default=0.25, help="ballast: never taken, the driver needs some itself")
    add("--ballast_steps", type=int, nargs=3, help="before, during and after it (100 500 400)")
    add("--gap", type=float, nargs=2, help="seconds between its moves (2 to 10)")
    add("--inject_steps", type=int, help="(200)")
    add("--pause_steps", type=int, help="(160)")
    add("--seed", type=int, default=1337)
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tiny", action="store_true", help="a toy on the CPU: to try the script, not to measure")
    add("--eager", action="store_true", help="without torch.compile")
    add("--budget_seconds", type=float, default=float("inf"), help="start nothing that should take longer")
    add("--limit_seconds", type=float, default=540.0, help="stop any job after that")
    add("--work", type=Path, default=Path("out-fit"))
    add("--resume", action="store_true", help="keep what is in --out")
    add("--out", type=Path)
    add("--report", type=Path, metavar="FILE", help="print the checks of an earlier run")
    return parser


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    if options.report:
        checks: list[Any] = json.loads(options.report.read_text())["checks"]
        show(checks)
        return 0 if all(found["ok"] for found in checks) else 1
    if options.tiny != (options.device == "cpu"):
        parser.error("--tiny and --device cpu go together: a CPU cannot show anything else")
    for name, (real, toy) in LENGTHS.items():
        if getattr(options, name) is None:
            setattr(options, name, toy if options.tiny else real)
    options.eager = options.eager or options.tiny
    checks = run_all(options)["checks"]
    show(checks)
    return 0 if checks and all(found["ok"] for found in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
