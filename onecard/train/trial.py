"""A trial: a change of the setting made for speed, until it is judged."""

from __future__ import annotations

from dataclasses import dataclass

from onecard.plan.search import Choice


@dataclass(frozen=True)
class Trial:
    """A change for speed that is still to be judged."""

    before: Choice
    speed: float | None  # tokens per second measured before it
    tight: bool = False  # away from a setting in which the allocator kept starting over


def gain_of(before: float | None, after: float | None) -> float | None:
    return round(after / before - 1, 3) if before and after else None
