"""The planner's predictions held against this machine's GPU: peak memory and seconds of whole steps.

    python benchmarks/plan_accuracy.py --list                      (the grid, and the time it will take)
    python benchmarks/plan_accuracy.py --out FILE.json --resume    (measure what FILE does not have yet)
        --lanes 4                (build and compile 4 at a time; measuring is one by one all the same)
        --again 'muon'           (and what FILE has, where the name matches; the oldest first. Peaks are then
                                  the new ones, seconds the least of all: a shared host only adds to them)
    python benchmarks/plan_accuracy.py --out FILE.json --caps      (again under caps, in fresh processes:
                                  what is not known to run in today's need, and what --again matches)
    python benchmarks/plan_accuracy.py --report FILE.json --worst 10
    python benchmarks/plan_accuracy.py --device cpu --tiny --count 3 --out FILE.json    (does it run?)

A process per configuration (a fork: peaks do not mix), in an order in which compiled code is used again.
Most of its time is Python building a model and compiling it, which several can do at the same time: --lanes.
Each then waits until no other does anything, and has card and host for itself from its timed steps on.
The file holds what was measured and what was predicted then; errors are always computed anew, from the
formulas of today and the machine's figures in the file. A fifth of the configurations, by their hash, is
held out: nothing is fitted to it, and it is reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from accuracy_errors import GIB, RATES, predict, recompute, report  # noqa: E402
from accuracy_grid import Case, as_row, case_of, estimates, grid, in_order  # noqa: E402
from accuracy_lanes import Lanes, Memory, show_grid, waiting  # noqa: E402
from command_line import command_line  # noqa: E402
from memory_speed import Row, write  # noqa: E402
from processes import Work, in_own_process, side_by_side  # noqa: E402

from onecard.hardware.cpu import available_memory  # noqa: E402
from onecard.hardware.measured import card_slug  # noqa: E402

# --- measuring


def or_nothing(work: Work) -> Row:
    """What nothing can be measured without."""
    row = in_own_process(work, 120.0)
    if "error" in row:
        raise SystemExit(f"error: the machine cannot be measured: {row['error']}\n{row.get('trace', '')}")
    return row


def call_of(options: argparse.Namespace) -> Row:
    """The machine as this call finds it."""
    from accuracy_measure import machine

    row = or_nothing(partial(machine, options.device, options.bench_seconds))
    if row["compile_problem"]:
        raise SystemExit(f"error: torch.compile does not work here: {row['compile_problem']}")
    return {"date": time.strftime("%Y-%m-%d %H:%M"), "command": command_line()} | row


def to_try_again(options: argparse.Namespace, results: Row) -> Iterator[tuple[Case, Row]]:
    """Rows that are not known to run in what is predicted for them today, and those asked for."""
    states = {entry["name"]: entry["ran_under_cap"] for entry in recompute(results)}
    for row in results["rows"]:
        asked_for = options.again is not None and re.search(options.again, row["name"])
        known = states.get(row["name"], True) is True  # what could not be measured has no state
        if "error" not in row and re.search(options.only, row["name"]) and (asked_for or not known):
            yield case_of(row["config"]), row


def with_earlier(row: Row, before: Row | None) -> Row:
    """Seconds are kept of every time it was measured."""
    if before is None or "error" in before:
        return row
    return row | {"earlier_seconds": [*before.get("earlier_seconds", []), before["measured"]["seconds"]]}


class Run:
    """One call: within its time, the file written after every measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        from onecard.model.compiling import set_compile_cache
        from onecard.train.memory import use_expandable_segments

        # Whoever asks whether there is a card must not begin to use it: its forks could not.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        if not options.late_imports:
            from accuracy_measure import import_compiler

            import_compiler()
        use_expandable_segments()  # as the trainer does, before the card is touched
        set_compile_cache()
        self.options, self.began = options, time.monotonic()
        self.results: Row = {"what": "predicted and measured peaks and step times", "calls": [], "rows": []}
        if options.out is not None and options.out.exists():
            if not (options.resume or options.caps or options.again is not None):
                raise SystemExit(f"error: {options.out} exists\nhint: --resume goes on from it")
            self.results = json.loads(options.out.read_text())
        self.rows: list[Row] = self.results["rows"]
        self.call = call_of(options)
        if options.caps:
            self.call["bench"] = None  # nothing is timed, so that others may run beside it
        self.out: Path = (
            options.out or HERE / "results" / f"plan_accuracy_{card_slug(self.call['card'])}.json"
        )
        if options.out is None and self.out.exists():
            raise SystemExit(f"error: {self.out} exists\nhint: --out={self.out} --resume goes on from it")
        self.call["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get(
            "PYTORCH_CUDA_ALLOC_CONF"
        )
        self.results |= {"card": self.call["card"], "calls": [*self.results["calls"], self.call]}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def save(self, unfinished: Sequence[str] = ()) -> None:
        self.results |= {"unfinished": list(unfinished), "rows": self.rows}
        write(self.out, self.results)

    def say(self, name: str, told: str) -> None:
        print(f"[{self.elapsed:4.0f} s] {name} | {told}", file=sys.stderr, flush=True)

    def measure(self) -> None:
        from accuracy_measure import kernels

        options, cases = self.options, waiting(self.options, self.rows)
        chosen = dict[str, str]()
        if cases and options.lanes > 1:  # before others run, whose time would be in that of a kernel
            chosen = or_nothing(partial(kernels, cases, options.device))["kernels"]
        lanes = self.lanes(cases)
        begun: list[Row] = []
        with tempfile.TemporaryDirectory() as folder:
            works = self.works(lanes, Path(folder) / "turns", chosen, begun)
            for number, found in side_by_side(works, options.lanes, options.limit_seconds):
                row = begun[number] | found
                lanes.ended(row["name"])
                self.keep(row)
                self.save()
                self.say(row["name"], row.get("error") or _line(row, row["predicted"]))
        self.save(lanes.left)
        left = f"{len(lanes.left)} left: {self.out}"
        print(f"{lanes.started} measured in {self.elapsed:.0f} s, {left}", file=sys.stderr)

    def keep(self, row: Row) -> None:
        """In the place of an earlier one, unless that is good and this is not."""
        before = next((other for other in self.rows if other["name"] == row["name"]), None)
        if before is None or "error" in before or "error" not in row:
            self.rows = [other for other in self.rows if other is not before] + [with_earlier(row, before)]

    def works(
        self, lanes: Lanes, turns_at: Path, kernels: dict[str, str], begun: list[Row]
    ) -> Iterator[Work | None]:
        """Each when a lane is free for it; what is known of its row beforehand goes to `begun`."""
        from accuracy_measure import measure

        for one in lanes:
            if one is None:
                yield None
                continue
            case, said = one.case, predict(one.case, self.call)
            begun.append(as_row(case) | {"call": len(self.results["calls"]) - 1, "predicted": said})
            yield partial(
                measure, case, self.options.device, said["need"], said["seconds"], turns_at,
                kernels.get(case.name),
            )  # fmt: skip

    def try_caps(self) -> None:
        """Several at a time, where asked for: nothing is timed."""
        rows = {row["name"]: (case, row) for case, row in to_try_again(self.options, self.results)}
        lanes = self.lanes([case for case, _ in rows.values()])
        begun: list[tuple[Row, int]] = []

        def works() -> Iterator[Work | None]:
            from accuracy_measure import run_capped

            for one in lanes:
                if one is None:
                    yield None
                    continue
                case, row = rows[one.case.name]
                begun.append((row, predict(case, self.results["calls"][row["call"]])["need"]))
                yield partial(run_capped, case, self.options.device, begun[-1][1])

        for number, found in side_by_side(works(), self.options.lanes, self.options.limit_seconds):
            row, need = begun[number]
            lanes.ended(row["name"])
            told = found.get("error") or found["cap_problem"] or f"ran in {need / GIB:.3f} GiB"
            if "error" not in found:
                row |= {key: value for key, value in found.items() if key != "took"}
            self.save()
            self.say(row["name"], told)
        print(f"not tried for want of time: {len(lanes.left)}", file=sys.stderr)

    def lanes(self, cases: Sequence[Case]) -> Lanes:
        gib, options = self.call["memory_gib"], self.options
        memory = Memory(gib and gib * GIB, available_memory())
        return Lanes(
            estimates(cases), memory, lambda: self.elapsed,
            budget_s=options.budget_seconds, most=options.count,
        )  # fmt: skip


def _line(row: Row, said: Row) -> str:
    measured, parts = row["measured"], []
    for quantity, unit, name in (("allocated", GIB, "GiB"), ("reserved", GIB, "GiB"), ("seconds", 1, "s")):
        was, guess = measured[quantity], said[quantity]
        off = "" if was is None or guess is None else f" ({guess / was - 1:+.1%})"
        parts.append("-" if was is None else f"{was / unit:.4g} {name}{off}")
    cap = {True: "ran under its cap", False: f"RAN OUT: {row.get('cap_problem')}", None: "no cap"}
    return ", ".join([*parts, cap[row["ran_under_cap"]], f"took {row['took'] - row['waited']:.0f} s"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="the grid in its order; * is held out")
    add("--report", type=Path, metavar="FILE", help="errors of what FILE holds, by the formulas of today")
    add("--worst", type=int, metavar="N", help="with --report: the N furthest off by each quantity")
    add("--rates", choices=RATES, default="card", help="what predictions of time start from")
    add("--out", type=Path, help="default: benchmarks/results/plan_accuracy_CARD.json")
    add("--resume", action="store_true", help="go on from --out; what failed is measured again, last")
    add("--caps", action="store_true", help="try again, in fresh processes, what is not known to run")
    add("--again", metavar="REGEX", help="measure these again too; a row stays until there is a new one")
    add("--lanes", type=int, default=1, metavar="N", help="get so many ready at a time")
    add("--only", default="", help="a regular expression on names")
    add("--count", type=int, default=-1, help="measure no more than so many")
    add("--budget_seconds", type=float, default=540.0, help="start nothing that would end after that")
    add("--limit_seconds", type=float, default=120.0, help="stop a measurement after that")
    add("--bench_seconds", type=float, default=8.0, help="for measuring the machine, at every call")
    add("--late_imports", action="store_true", help="of the compiler in each process: if forks fail without")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tiny", action="store_true", help="small and uncompiled: to try the script, not to measure")
    options = parser.parse_args(arguments)
    if options.lanes < 1:
        parser.error("--lanes: at least 1")
    if options.list:
        show_grid([c for c in in_order(grid()) if re.search(options.only, c.name)], "H200 SXM", options.lanes)
        return
    if options.report is not None:
        report(json.loads(options.report.read_text()), options.worst, options.rates)
        return
    if (options.device == "cpu") != options.tiny or (options.tiny and options.out is None):
        parser.error("--device cpu, --tiny and an --out of its own go together: they measure nothing")
    if options.caps and options.tiny:
        parser.error("--caps is about a card's memory")
    run = Run(options)
    if options.caps:
        run.try_caps()
    else:
        run.measure()


if __name__ == "__main__":
    main()
