"""Early alarms on full logs: how often a false one, how many injected failures are found, how late.

    python benchmarks/alarms.py FOLDER --out FILE.json

FOLDER has one log a run, as the reader knows them, or a CSV with columns step, loss and val; its first line
"# REPOSITORY PATH" says where it is from. Folders inside it whose names begin with "failed-" have runs that
really failed, and their names say how (failed-diverging, failed-stuck, failed-memorising).

False alarms are counted over every logged step of the sound runs. Failures are put into the same runs, each
five times with another seed: from a random step on, the loss

- diverges: rises to 6.5 to 11 nats within 10 to 1,000 steps; slowly: by 0.8 to 2.5 nats in 500 to 3,000;
- is stuck: keeps its level (the log's own noise stays), where the run itself went at least 0.3 nats lower;
- is memorised: the validation loss rises by 0.01 to 0.1 nats an evaluation instead of falling, by 0.15 at
  least to the end, and the training loss falls on.

Spikes of one to six nats that come down again are put in as well, one in 2,000 steps: no alarm should follow.

The delay is counted in steps from the injected one; that of a stuck run grows with the step, for a loss
falls by the logarithm of the steps: it is given as a factor too.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from command_line import command_line

from onecard.report import reading
from onecard.report.curve.detectors import (
    DIVERGING,
    MEMORISING,
    STUCK,
    UNLEARNED,
    Alarm,
    Memorising,
    watch_losses,
)

SEEDS = 5
WINDOW = 101  # of the running mean that separates a log's level from its noise
FALSE_PER_100K, FOUND = 1.0, 0.95


@dataclass(frozen=True)
class Run:
    name: str
    source: str
    losses: tuple[tuple[int, float], ...]
    vals: tuple[tuple[int, float], ...]


def read_run(path: Path) -> Run:
    if path.suffix != ".csv":
        log = reading.read(path.read_bytes())
        assert log is not None, f"no losses in {path.name}"
        return Run(path.stem, "", tuple(log.steps.pairs("loss")), tuple(log.evaluations.pairs("val")))
    lines = path.read_text(encoding="utf-8").splitlines()
    source = lines.pop(0)[1:].strip() if lines[0].startswith("#") else ""
    rows = list(csv.DictReader(lines))

    def column(name: str) -> tuple[tuple[int, float], ...]:
        return tuple((int(row["step"]), float(row[name])) for row in rows if row.get(name))

    return Run(path.stem, source, column("loss"), column("val"))


def alarms_in(run: Run) -> list[Alarm]:
    """All that the detectors find in one log, each given its values in order."""
    steps, losses = zip(*run.losses, strict=True)
    found, levels = watch_losses(steps, losses)
    memory = Memorising()
    for step, val in run.vals:
        alarm = memory.add(step, levels.around(step) or math.nan, val)
        if alarm is not None:
            found.append(alarm)
            break
    return found


def smooth(values: Sequence[float]) -> list[float]:
    half, sums = WINDOW // 2, [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    last = len(values)
    return [
        (sums[min(last, i + half + 1)] - sums[max(0, i - half)])
        / (min(last, i + half + 1) - max(0, i - half))
        for i in range(last)
    ]


def with_losses(run: Run, losses: Sequence[float]) -> Run:
    steps = [step for step, _loss in run.losses]
    return Run(run.name, run.source, tuple(zip(steps, losses, strict=True)), ())


def diverged(run: Run, level: Sequence[float], dice: random.Random) -> tuple[Run, int] | None:
    at = int(len(level) * dice.uniform(0.05, 0.9))
    height = max(0.5, dice.uniform(6.5, 11.0) - level[at])
    return _risen(run, at, height, math.exp(dice.uniform(math.log(10), math.log(1000))), dice)


def drifted(run: Run, level: Sequence[float], dice: random.Random) -> tuple[Run, int] | None:
    at = int(len(level) * dice.uniform(0.2, 0.8))
    return _risen(run, at, dice.uniform(0.8, 2.5), dice.uniform(500, 3000), dice)


def _risen(run: Run, at: int, height: float, length: float, dice: random.Random) -> tuple[Run, int] | None:
    if at + length > len(run.losses):
        return None
    bent = dice.choice((1.0, 3.0))  # a straight rise, or one that begins slowly
    losses = [loss for _step, loss in run.losses]
    for i in range(at, len(losses)):
        losses[i] += height * min(1.0, (i - at) / length) ** bent
    return with_losses(run, losses), run.losses[at][0]


def spiked(run: Run, level: Sequence[float], dice: random.Random) -> tuple[Run, int] | None:
    """No failure: jumps of one to six nats that decay within some ten to a hundred steps."""
    losses = [loss for _step, loss in run.losses]
    for _ in range(max(1, len(losses) // 2000)):
        at, height, decay = dice.randrange(len(losses)), dice.uniform(1, 6), dice.uniform(3, 50)
        for i in range(at, min(len(losses), at + int(8 * decay))):
            losses[i] += height * math.exp(-(i - at) / decay)
    return with_losses(run, losses), 0


def stuck(run: Run, level: Sequence[float], dice: random.Random) -> tuple[Run, int] | None:
    at = int(len(level) * math.exp(dice.uniform(math.log(0.02), math.log(0.4))))
    if level[at] - min(level) < 0.3 or at < 20:
        return None
    losses = [loss for _step, loss in run.losses]
    for i in range(at, len(losses)):
        losses[i] += level[at] - level[i]
    return with_losses(run, losses), run.losses[at][0]


def memorised(run: Run, level: Sequence[float], dice: random.Random) -> tuple[Run, int] | None:
    if len(run.vals) < 8:
        return None
    at = int(len(run.vals) * dice.uniform(0.15, 0.8))
    rise = math.exp(dice.uniform(math.log(0.01), math.log(0.1)))
    if rise * (len(run.vals) - 1 - at) < 0.15:
        return None
    step = run.vals[at][0]
    vals = [
        (s, val if i <= at else val + run.vals[at][1] - val + rise * (i - at))
        for i, (s, val) in enumerate(run.vals)
    ]
    losses = tuple((s, loss - (0.3 * rise * (i - at) / max(1, len(level)) if s > step else 0.0))
                   for i, (s, loss) in enumerate(run.losses))  # fmt: skip
    return Run(run.name, run.source, losses, tuple(vals)), step


INJECTED: dict[str, tuple[Callable[..., tuple[Run, int] | None], tuple[str, ...]]] = {
    "diverging": (diverged, (DIVERGING,)),
    "diverging slowly": (drifted, (DIVERGING,)),
    "stuck": (stuck, (STUCK, UNLEARNED)),
    "memorising": (memorised, (MEMORISING,)),
}


def injections(runs: Sequence[Run], kind: str) -> Iterator[tuple[Run, int]]:
    make, _kinds = INJECTED[kind]
    for run in runs:
        level = smooth([loss for _step, loss in run.losses])
        for seed in range(SEEDS):
            if (made := make(run, level, random.Random(f"{run.name} {seed}"))) is not None:
                yield made


def quantiles(values: Sequence[float], digits: int = 0) -> dict[str, float]:
    ordered = sorted(values)
    places = (("median", 0.5), ("p90", 0.9), ("most", 1.0))
    return {name: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], digits) for name, q in places}


def judged(runs: Sequence[Run], kind: str) -> dict[str, Any]:
    """The share found of one kind of failure, and the delay."""
    delays, factors, began, missed, early = [], [], [], [], 0
    for run, at in injections(runs, kind):
        found = [alarm for alarm in alarms_in(run) if alarm.kind in INJECTED[kind][1]]
        if not found:
            missed.append(f"{run.name} at {at}")
            continue
        early += found[0].seen < at
        delays.append(found[0].seen - at)
        factors.append(found[0].seen / max(1, at))
        began.append(abs(found[0].began - at))
    tried = len(delays) + len(missed)
    answer: dict[str, Any] = {
        "tried": tried, "found": len(delays), "share": round(len(delays) / max(1, tried), 4),
        "before_it_began": early,
    }  # fmt: skip
    if delays:
        answer |= {"delay_steps": quantiles(delays), "began_off_by_steps": quantiles(began)}
    if delays and kind == "stuck":
        answer["seen_at_times_the_step"] = quantiles(factors, 2)
    return answer | {"missed": missed[:20]}


def spikes(runs: Sequence[Run]) -> dict[str, Any]:
    """Alarms where spikes were put in that recover, over one copy of each log."""
    made = [spiked(run, (), random.Random(f"{run.name} spikes")) for run in runs]
    steps = sum(len(run.losses) for run, _at in filter(None, made))
    alarms = [alarm.kind for run, _at in filter(None, made) for alarm in alarms_in(run)]
    return {"steps": steps, "alarms": len(alarms), "per_100000_steps": round(1e5 * len(alarms) / steps, 3)}


def really_failed(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("failed-*/*.*")):
        run = read_run(path)
        alarms = [{"kind": a.kind, "began": a.began, "seen": a.seen} for a in alarms_in(run)]
        wanted = INJECTED[path.parent.name.removeprefix("failed-")][1]
        steps = run.losses[-1][0] + 1
        rows.append({"run": run.name, "steps": steps, "found": any(a["kind"] in wanted for a in alarms),
                     "alarms": alarms})  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    runs = [read_run(path) for path in sorted(chosen.folder.rglob("*.*"))
            if not path.parent.name.startswith("failed-")]  # fmt: skip
    steps = sum(len(run.losses) for run in runs)
    false = {run.name: [f"{a.kind} at {a.seen}" for a in found] for run in runs if (found := alarms_in(run))}
    count = sum(map(len, false.values()))
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command_line(),
        "python": sys.version.split()[0],
        "logs": len(runs),
        "steps": steps,
        "steps_a_log": quantiles([len(run.losses) for run in runs]),
        "false_alarms": count,
        "false_per_100000_steps": round(1e5 * count / max(1, steps), 3),
        "false": false,
        "injected": {kind: judged(runs, kind) for kind in INJECTED},
        "spikes_that_recover": spikes(runs),
        "really_failed": really_failed(chosen.folder),
        "sources": sorted({run.source for run in runs}),
    }
    text = json.dumps(result, indent=1)
    if chosen.out:
        chosen.out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "sources"}, indent=1))
    enough = all(found["share"] >= FOUND for found in result["injected"].values())
    return 0 if enough and result["false_per_100000_steps"] <= FALSE_PER_100K else 1


if __name__ == "__main__":
    raise SystemExit(main())
