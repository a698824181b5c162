"""The Hugging Face Trainer's lines: its dicts have no step, its progress bars have."""

from __future__ import annotations

import math
import re
from array import array
from itertools import groupby
from typing import Any

from onecard.report.log import NOT_SAID
from onecard.report.reading.lines import Row, Shape
from onecard.report.reading.runs import MOST_ROWS, Runs

# A bar of tqdm's: `10%|█ | 500/5000 [12:34<1:53:06,  1.51s/it]`.
BAR = re.compile(
    r"\|\s*(\d{1,12})/(\d{1,12})\s*\[[^\]<]{1,20}<[^\],]{1,20},\s*(\d{1,9}\.\d{1,4})\s*(s/it|it/s)"
)
_QUICK = frozenset(("loss", "val", "lr", "grad_norm", "epoch"))  # whatever number they are
_MOST_BARS = 8
_MOST_DICTS = 100_000
_SETTLED = 0.006  # epochs are printed to two decimals


class Trainer:
    """Its bars and dicts, until it is known of which step each is."""

    def __init__(self) -> None:
        self._bars: dict[int, tuple[array[float], array[float]]] = {}  # by their total: steps and times
        self._votes: dict[int, int] = {}  # how often a loss came behind a bar of this total
        self._last_bar: tuple[int, int] | None = None
        self._rows: list[tuple[int, int, Row]] = []  # (step and total of the bar before, the row)
        self._dicts: Shape | None = None
        self._columns: list[tuple[str, int, float]] = []  # of such a dict: name, group of the pattern, factor
        self.speed: dict[str, float] = {}  # of the line that ends a training

    def bar(self, line: str) -> bool:
        found = BAR.search(line)
        if found is None:
            return False
        step, total, rate = int(found[1]), int(found[2]), float(found[3])
        if rate > 0 and step <= total:
            if total not in self._bars and len(self._bars) >= _MOST_BARS:
                fewest = min(self._bars, key=lambda key: len(self._bars[key][0]))
                del self._bars[fewest]
            steps, times = self._bars.setdefault(total, (array("d"), array("d")))
            ms = 1000 * rate if found[4] == "s/it" else 1000 / rate
            if steps and steps[-1] == step:
                times[-1] = ms
            else:
                steps.append(step)
                times.append(ms)
                if len(steps) >= 2 * MOST_ROWS:
                    del steps[1:-1:2], times[1:-1:2]
            self._last_bar = (step, total)
        return True

    def row(self, row: Row) -> None:
        """A dict without a step."""
        if len(self._rows) >= _MOST_DICTS:
            self._thin()
        step, total = self._last_bar or (-1, -1)
        if "loss" in row:
            self._votes[total] = self._votes.get(total, 0) + 1
        self._rows.append((step, total, row))

    def quick_row(self, line: str) -> bool:
        """A dict of the shape that came last, without working out what its numbers are; False for others."""
        if self._dicts is None or (found := self._dicts.pattern.match(line)) is None:
            return False
        try:
            row = {name: float(found[group]) * factor for name, group, factor in self._columns}
        except ValueError:
            return False  # with commas in it
        if not all(map(math.isfinite, row.values())):
            return False
        self.row(row)
        return True

    def like(self, shape: Shape) -> None:
        """The shape of a dict that was read: the next ones will be of it."""
        if shape is self._dicts or len(shape.plans) != 1 or shape.plans[0].unsure:
            return
        if not shape.plans[0].columns.keys() <= _QUICK:
            return
        group = {index: n for n, index in enumerate(shape.used, 1)}
        plan = shape.plans[0].columns.items()
        self._dicts = shape
        self._columns = [(name, group[index], factor) for name, (index, factor) in plan]

    def _thin(self) -> None:
        """Leaves out every second row, but not the largest and the smallest loss."""
        losses = [row.get("loss", row.get("val", math.nan)) for *_, row in self._rows]
        said = [loss for loss in losses if not math.isnan(loss)]
        kept = {losses.index(max(said)), losses.index(min(said)), len(losses) - 1} if said else set()
        self._rows = [row for place, row in enumerate(self._rows) if place % 2 == 0 or place in kept]

    @property
    def has_rows(self) -> bool:
        return any("loss" in row or "val" in row for _step, _total, row in self._rows)

    def finish(self, runs: Runs, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """All rows whose step can be known, into `runs`."""
        if not self.has_rows:
            return
        said = facts.get("last_step")
        votes = {total: count for total, count in self._votes.items() if total > 0}
        total = said or max(votes, key=lambda key: (votes[key], key), default=0)
        # An evaluation has a bar of its own.
        of_evaluations = {total for _step, total, row in self._rows if "val" in row}
        total = total or max(set(self._bars) - of_evaluations, default=0) or self._total_by_speed()
        steps = self._by_bars(total) or self._by_epochs(total) or [None] * len(self._rows)
        merged: dict[float, Row] = {}
        if total in self._bars:
            for step, ms in zip(*self._bars[total], strict=True):
                merged.setdefault(step, {"step": step})["ms"] = ms
        evaluations: list[Row] = []
        for at, (_step, _total, row) in zip(steps, self._rows, strict=True):
            if at is None:
                continue
            named = {name: value for name, value in row.items() if name != "epoch"} | {"step": float(at)}
            if "val" in row:
                evaluations.append(named)
            elif "loss" in row:
                merged[at] = {**named, **merged.get(at, {})}
        if total:
            facts.setdefault("last_step", total)
        rows = sorted([*merged.values(), *evaluations], key=lambda row: row["step"])
        for evaluated, some in groupby(rows, key=lambda row: "val" in row):
            first, *more = some
            runs.add(first, settings, facts)
            if evaluated:
                for row in more:
                    runs.add(row, settings, facts)
            elif more:
                names = set().union(*more)
                columns = {name: [row.get(name, NOT_SAID) for row in more] for name in names}
                runs.add_many(columns, settings, facts)

    def _total_by_speed(self) -> int:
        runtime, speed = self.speed.get("runtime", 0.0), self.speed.get("steps_per_s", 0.0)
        # Printed to three decimals: of a slow run that is too coarse.
        exact = runtime * speed
        return round(exact) if speed and exact * 0.0005 / speed < 0.4 else 0

    def _by_bars(self, total: int) -> list[int | None] | None:
        """The bar before each row, where it is the training's."""
        if not total or not any(of == total for _step, of, _row in self._rows):
            return None
        steps: list[int | None] = []
        last: int | None = None
        for step, of, row in self._rows:
            if of == total:
                last = step
            # An evaluation has a bar of its own: it is of the step that the training's bar showed last.
            steps.append(last if of == total or "val" in row else None)
        return steps

    def _by_epochs(self, total: int) -> list[int | None] | None:
        """Rows at equal distances, if the epochs agree; or as many steps an epoch as the end shows."""
        losses = [row for _step, _total, row in self._rows if "loss" in row]
        end = self.speed.get("epoch", math.nan)
        if not total or not end > 0 or not losses or any("epoch" not in row for *_, row in self._rows):
            return None
        every, rest = divmod(total, len(losses))
        if rest == 0 and all(
            abs(row["epoch"] - end * n / len(losses)) <= _SETTLED for n, row in enumerate(losses, 1)
        ):
            by_epoch = {row["epoch"]: n * every for n, row in enumerate(losses, 1)}
            rows = iter(range(every, total + 1, every))
            return [next(rows) if "loss" in row else by_epoch.get(row["epoch"]) for *_, row in self._rows]
        if total / end * _SETTLED > 0.5:
            return None
        return [round(row["epoch"] * total / end) for *_, row in self._rows]


_ENDS = re.compile(
    r"'train_runtime': '?([\d.]+)'?.{0,120}?'train_steps_per_second': '?([\d.]+)'?"
    r".{0,120}?'epoch': '?([\d.]+)"
)


def read_end(line: str) -> dict[str, float]:
    """The line that ends a training."""
    found = _ENDS.search(line)
    if found is None:
        return {}
    runtime, speed, epoch = (float(text) if text.count(".") < 2 else NOT_SAID for text in found.groups())
    return {"runtime": runtime, "steps_per_s": speed, "epoch": epoch}
