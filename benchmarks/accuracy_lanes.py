"""What benchmarks/plan_accuracy.py starts next beside what is under way, and how long all takes. No torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accuracy_grid import Case, Estimate, estimates, grid, in_order, tiny

Row = dict[str, Any]
GIB = 2**30
_ROOM = 0.85  # of a memory: bills may be too small, which is what is being measured


def waiting(options: argparse.Namespace, rows: Sequence[Row]) -> list[Case]:
    """What is asked for and not there yet, then what is wanted again, the oldest first; last what failed."""
    calls = {row["name"]: row["call"] for row in rows}
    failed = {row["name"] for row in rows if "error" in row}
    again = {name for name in calls if options.again is not None and re.search(options.again, name)}
    done = calls.keys() - failed - again
    cases = (tiny(case) if options.tiny else case for case in in_order(grid()))
    found = [c for c in dict.fromkeys(cases) if c.name not in done and re.search(options.only, c.name)]
    return sorted(found, key=lambda case: (case.name in failed, calls.get(case.name, -1)))


@dataclass(frozen=True)
class Memory:
    """In bytes, as the machine has it; None where that is not known."""

    card: float | None
    host: float | None

    def holds(self, cases: Sequence[Case]) -> bool:
        """All of them at once?"""
        bills = [case.bill() for case in cases]
        card = sum(bill.process for bill in bills)
        host = sum(bill.host + bill.building.bytes for bill in bills)
        return all(
            have is None or need <= _ROOM * have for need, have in ((card, self.card), (host, self.host))
        )


class Lanes:
    """The queue. Nothing is started that would end after the budget, nor what the memory does not hold."""

    def __init__(
        self,
        waiting: Sequence[Estimate],
        memory: Memory,
        elapsed: Callable[[], float],
        *,
        budget_s: float,
        most: int = -1,
    ) -> None:
        self._waiting, self._memory, self._elapsed = waiting, memory, elapsed
        self._budget_s, self._most = budget_s, most
        self._under_way: dict[str, Estimate] = {}
        self.started = 0
        self.left: list[str] = []

    def __iter__(self) -> Iterator[Estimate | None]:
        """Asked whenever there is a free lane. None: wait until something has ended."""
        for one in self._waiting:
            while self._in_time(one) and not self._beside(one):
                yield None
            if self.started == self._most or not self._in_time(one):
                self.left.append(one.case.name)
                continue
            self.started += 1
            self._under_way[one.case.name] = one
            yield one

    def ended(self, name: str) -> None:
        del self._under_way[name]

    def _in_time(self, one: Estimate) -> bool:
        """With those before it, which it will wait for."""
        before = sum(other.alone_s for other in self._under_way.values())
        return self._elapsed() + before + one.seconds <= self._budget_s

    def _beside(self, one: Estimate) -> bool:
        """What is too large for any company runs alone."""
        others = [other.case for other in self._under_way.values()]
        return not others or self._memory.holds([*others, one.case])


def show_grid(cases: Sequence[Case], card: str, lanes: int) -> None:
    total = 0.0
    for one in estimates(cases, card):
        case, bill = one.case, one.case.bill()
        total += one.ready_s / lanes + one.alone_s
        print(
            f"{'*' if case.held_out else ' '}{case.name:75}{case.shape.parameters / 1e6:8.1f}M"
            f"{bill.process / GIB:7.1f} GiB{bill.host / GIB:6.1f} GiB host{one.step_s * 1e3:8.1f} ms"
            f"{one.seconds:6.1f} s"
        )
    held_out = sum(case.held_out for case in cases)
    print(f"{len(cases)} configurations, {held_out} of them held out (*); about {total / 60:.0f} minutes")
