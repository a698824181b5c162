"""What benchmarks/plan_accuracy.py may start next, beside what is under way. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from accuracy_grid import Case, Estimate

_ROOM = 0.85  # of a memory: bills may be too small, which is what is being measured


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
