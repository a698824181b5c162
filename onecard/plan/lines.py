"""A bill is a list of lines: what takes memory, how much, and by which formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One thing that takes memory at the moment a bill is about."""

    name: str  # English: a key for programs, translated where it is shown
    bytes: int
    formula: str  # with its numbers, so that a reader can check it

    @property
    def gib(self) -> float:
        return self.bytes / GIB


def total(lines: Iterable[Line]) -> int:
    return sum(line.bytes for line in lines)
