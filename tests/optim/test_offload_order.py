"""Totals that travel: every two uses of the same memory are in an order that the streams enforce.

Streams and tensors are stand-ins that write down who touches what and who has waited for whom. Two
touches of one buffer, at least one of them writing, must not be possible at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from onecard.optim import offload
from onecard.optim.offload import LayerTotals

Moment = dict[str, int]  # of every stream: how many of its operations are known to be over


class World:
    def __init__(self) -> None:
        self.known: dict[str, Moment] = {}
        self.touches: dict[str, list[tuple[str, int, bool]]] = {}
        self.current = "compute"
        self.races: list[str] = []

    def moment(self, stream: str) -> Moment:
        return self.known.setdefault(stream, {})

    def operate(self, reads: list[str], writes: list[str]) -> None:
        """On the current stream."""
        now = self.moment(self.current)
        now[self.current] = now.get(self.current, 0) + 1
        for buffer in {*reads, *writes}:
            for stream, number, wrote in self.touches.get(buffer, []):
                if (wrote or buffer in writes) and now.get(stream, 0) < number:
                    self.races.append(f"{buffer}: {self.current} beside {stream} #{number}")
            self.touches.setdefault(buffer, []).append((self.current, now[self.current], buffer in writes))

    def learn(self, stream: str, other: Moment) -> None:
        mine = self.moment(stream)
        for name, number in other.items():
            mine[name] = max(mine.get(name, 0), number)


class Stream:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def wait_stream(self, other: Stream) -> None:
        self.world.learn(self.name, self.world.moment(other.name))

    def wait_event(self, event: Event) -> None:
        self.world.learn(self.name, event.moment)


class Event:
    def __init__(self, world: World) -> None:
        self.world, self.moment = world, {}

    def record(self, stream: Stream) -> None:
        self.moment = dict(self.world.moment(stream.name))


class Memory:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def __getitem__(self, part: slice) -> Memory:
        return self if self.name != "home" else Memory(self.world, f"home {part.start}")

    def copy_(self, source: Memory, non_blocking: bool = False) -> None:
        self.world.operate([source.name], [self.name])

    def zero_(self) -> None:
        self.world.operate([], [self.name])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, world.current = world.current, stream.name
        yield
        world.current = before

    def norm(place: Memory, dtype: Any) -> float:
        world.operate([place.name], [])
        return 0.0

    monkeypatch.setattr(offload, "_on", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(world, world.current))
    monkeypatch.setattr(torch.linalg, "vector_norm", norm)
    return world


def totals_of(world: World, layers: int, places: int = 3) -> LayerTotals:
    totals = object.__new__(LayerTotals)
    totals._spans = [(layer, layer + 1) for layer in range(layers)]
    totals._places = [Memory(world, f"place {i}") for i in range(min(places, layers))]  # type: ignore[misc]
    totals.home = Memory(world, "home")  # type: ignore[assignment]
    totals._norms = torch.zeros(layers)
    totals._empty, totals._coming, totals.cuda = [True] * layers, None, True
    totals._inward, totals._outward = Stream(world, "inward"), Stream(world, "outward")  # type: ignore[assignment]
    totals._left = [Event(world) for _ in totals._places]  # type: ignore[misc]
    return totals


def micro_batch(world: World, totals: LayerTotals, layers: int, until: int = 0) -> None:
    for layer in reversed(range(until, layers)):
        totals.begin(layer)
        place = totals._place_of(layer).name  # type: ignore[attr-defined]
        world.operate([place], [place])
        totals.end(layer)


def update(world: World, totals: LayerTotals, layers: int) -> None:
    """As the shuttle reads them: on a stream of its own that waits for the current one, and is waited for."""
    totals.settle()
    world.learn("shuttle", world.moment("compute"))
    world.current = "shuttle"
    for layer in range(layers):
        world.operate([f"home {layer}"], [])
    world.current = "compute"
    world.learn("compute", world.moment("shuttle"))
    totals.clear()


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 7, 12])
def test_no_two_touches_at_once(world: World, layers: int) -> None:
    totals = totals_of(world, layers)
    for _ in range(3):
        for _ in range(4):
            micro_batch(world, totals, layers)
        update(world, totals, layers)
    assert world.races == []
    assert sum(map(len, world.touches.values())) > 70 * layers


def test_a_step_that_was_broken_off_leaves_no_race(world: World) -> None:
    totals = totals_of(world, 6)
    micro_batch(world, totals, 6)
    micro_batch(world, totals, 6, until=2)
    totals.begin(1)
    totals.clear()
    for _ in range(3):
        micro_batch(world, totals, 6)
    update(world, totals, 6)
    assert world.races == []


def test_coming_and_going_do_not_wait_for_each_other(world: World) -> None:
    """While a layer computes, the one before it leaves and the next one comes."""
    totals = totals_of(world, 6)
    micro_batch(world, totals, 6)
    totals.begin(5)
    world.operate(["place 2"], ["place 2"])
    totals.end(5)
    left = world.moment("outward")["outward"]
    totals.begin(4)  # the total of layer 3 sets out
    assert world.moment("inward").get("outward", 0) < left


def test_a_missing_wait_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker itself: without the events, races."""
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    totals = totals_of(world, 6)
    for _ in range(2):
        micro_batch(world, totals, 6)
    assert world.races
