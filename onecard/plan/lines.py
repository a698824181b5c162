"""A bill is a list of lines: what takes memory, how much, and by which formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One thing that takes memory at the moment a bill is about."""

    name: str  # English: a key for programs, translated where it is shown
    bytes: int
    formula: str  # with its numbers, so that a reader can check it

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "gib": round(self.gib, 4), "formula": self.formula}

    @property
    def gib(self) -> float:
        return self.bytes / GIB


def total(lines: Iterable[Line]) -> int:
    return sum(line.bytes for line in lines)
