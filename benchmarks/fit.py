"""What the trainer promises about memory, tried on this machine's GPU: it does not run out.

    python benchmarks/fit.py --data PARQUET... --parts caps sweep --out FILE.json
    python benchmarks/fit.py --parts ballast inject pause start --out FILE.json --resume
    python benchmarks/fit.py --report FILE.json
    python benchmarks/fit.py --device cpu --tiny --out FILE.json                (does it run?)

GPT-2 124M, bf16, compiled, 65,536 tokens a step (inject: 16,384). Every job is a process of its own; the
results file is rewritten after each, --resume leaves out what is in it.

caps     the same config in less and less memory: loss, learning rates and data as without a cap
sweep    all exact settings worth a try, a few steps each: was the trainer's choice the fastest that fits?
ballast  another process fills the card, takes memory and gives it back while the trainer runs
inject   100 OutOfMemoryErrors in all places where they can happen (tiny: 35)
pause    seconds from --pause to free memory, and the same curve as without
start    seconds that choosing a setting adds before the first step

Tiny mode runs every path on a CPU, where nothing is short: memory is what the trainer is told it has, and
speeds are not judged.
"""

from __future__ import annotations

import argparse
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
    judge_caps,
    judge_start,
    judge_sweep,
    start_jobs,
    sweep_jobs,
)
from fit_runs import Row, tiny_data  # noqa: E402
from processes import in_own_process  # noqa: E402

Jobs = Callable[[argparse.Namespace], dict[str, Job]]
Judge = Callable[[argparse.Namespace, Rows, dict[str, Rows]], list[Check]]
PARTS: dict[str, tuple[Jobs, Judge]] = {
    "caps": (caps_jobs, judge_caps),
    "sweep": (sweep_jobs, judge_sweep),
    "ballast": (ballast_jobs, judge_ballast),
    "inject": (inject_jobs, judge_inject),
    "pause": (pause_jobs, judge_pause),
    "start": (start_jobs, judge_start),
}
# How long runs are: on a card, and in the tiny mode.
LENGTHS: dict[str, tuple[Any, Any]] = {
    "steps": (200, 24),
    "sweep_steps": (5, 2),
    "ballast_steps": ([100, 500, 400], [40, 160, 300]),
    "gap": ([2.0, 10.0], [0.1, 0.4]),
    "inject_steps": (200, 120),
    "pause_steps": (160, 240),
}


def safely(job: Job, cuda: bool) -> Row:
    """What goes wrong is in the row as `error`, and told in full on the screen only: traces name folders."""
    import torch

    if not cuda:
        torch.set_num_threads(1)  # a toy is done sooner by one
    try:
        row = job()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        row = {"error": f"{type(error).__name__}: {lines[0][:200]}", "trace": traceback.format_exc()[-3000:]}
    card = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    return row | {"card": card, "torch": torch.__version__}


def prepare_data(options: argparse.Namespace) -> Row:
    if options.tiny:
        tiny_data(options.dataset)
    elif options.data:
        from onecard.data.prepare.command import prepare

        prepare(options.data, name=options.dataset, tokenizer="gpt2", val_fraction=0.025)
    return {}


def write(file: Path | None, results: Row) -> None:
    if file:
        fresh = file.with_name(file.name + ".new")
        fresh.write_text(json.dumps(results) + "\n")
        fresh.replace(file)


def judged(options: argparse.Namespace, rows: dict[str, dict[str, Row]]) -> list[Check]:
    found: list[Check] = []
    good = {part: {n: r for n, r in jobs.items() if "error" not in r} for part, jobs in rows.items()}
    for part, jobs in rows.items():
        for name, row in jobs.items():
            if "error" in row:
                found.append({"part": part, "what": f"{name}: runs", "wanted": "no error",
                              "found": row["error"], "ok": False})  # fmt: skip
        if good[part]:
            found += [{"part": part, **c} for c in PARTS[part][1](options, good[part], good)]
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
        "tiny": options.tiny, "rows": {}, "checks": [],
    }  # fmt: skip
    if options.resume and options.out and options.out.exists():
        before = json.loads(options.out.read_text())
        results["resumed"] = [*before.get("resumed", []), before["command"]]
        results |= {key: before[key] for key in ("rows", "card", "torch") if key in before}
    options.work.mkdir(parents=True, exist_ok=True)
    rows = results["rows"]
    ready = in_own_process(partial(safely, partial(prepare_data, options), False), options.limit_seconds)
    if "error" in ready:
        raise SystemExit(f"error: the data could not be prepared: {ready['error']}\n{ready.get('trace', '')}")
    for part in options.parts:
        for name, job in PARTS[part][0](options).items():
            there = rows.get(part, {}).get(name)
            if there is not None and "error" not in there and not there.get("unmeasured"):
                continue
            if needless(rows.get(part, {}), name):
                continue
            if time.monotonic() - began > options.budget_seconds:
                print(f"not started within the budget: {part}, {name}", file=sys.stderr)
                continue
            started = time.monotonic()
            row = in_own_process(partial(safely, job, not options.tiny), options.limit_seconds)
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
    add("--budget_seconds", type=float, default=float("inf"), help="start nothing after that")
    add("--limit_seconds", type=float, default=540.0, help="stop a job after that")
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
