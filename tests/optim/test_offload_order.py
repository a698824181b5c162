"""Offloaded accumulators: every two uses of the same memory are in an order that the streams enforce.

Streams and tensors are stand-ins that record which stream uses what and which streams it has waited for. Two
uses of one buffer, at least one of them writing, must not be possible at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from onecard.optim import offload
from onecard.optim.offload import LayerAccumulators

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
                    self.races.append(f"{buffer}: {self.current} at the same time as {stream} #{number}")
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
        return self if self.name != "host copy" else Memory(self.world, f"host copy {part.start}")

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

    def norm(staging: Memory, dtype: Any) -> float:
        world.operate([staging.name], [])
        return 0.0

    monkeypatch.setattr(offload, "_on", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(world, world.current))
    monkeypatch.setattr(torch.linalg, "vector_norm", norm)
    return world


def accumulators_of(world: World, layers: int, count: int = 3) -> LayerAccumulators:
    accumulators = object.__new__(LayerAccumulators)
    accumulators._spans = [(layer, layer + 1) for layer in range(layers)]
    accumulators._staging = [Memory(world, f"staging {i}") for i in range(min(count, layers))]  # type: ignore[misc]
    accumulators.host_copy = Memory(world, "host copy")  # type: ignore[assignment]
    accumulators._norms = torch.zeros(layers)
    accumulators._empty, accumulators._fetched, accumulators.cuda = [True] * layers, None, True
    accumulators._to_card, accumulators._to_host = Stream(world, "to card"), Stream(world, "to host")  # type: ignore[assignment]
    accumulators._free = [Event(world) for _ in accumulators._staging]  # type: ignore[misc]
    return accumulators


def micro_batch(world: World, accumulators: LayerAccumulators, layers: int, until: int = 0) -> None:
    for layer in reversed(range(until, layers)):
        accumulators.begin(layer)
        staging = accumulators._staging_of(layer).name  # type: ignore[attr-defined]
        world.operate([staging], [staging])
        accumulators.end(layer)


def update(world: World, accumulators: LayerAccumulators, layers: int) -> None:
    """The streamer reads on a stream of its own, which waits for the current one and the reverse."""
    accumulators.wait_for_copies()
    world.learn("streamer", world.moment("compute"))
    world.current = "streamer"
    for layer in range(layers):
        world.operate([f"host copy {layer}"], [])
    world.current = "compute"
    world.learn("compute", world.moment("streamer"))
    accumulators.clear()


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 7, 12])
def test_no_two_touches_at_once(world: World, layers: int) -> None:
    accumulators = accumulators_of(world, layers)
    for _ in range(3):
        for _ in range(4):
            micro_batch(world, accumulators, layers)
        update(world, accumulators, layers)
    assert world.races == []
    assert sum(map(len, world.touches.values())) > 70 * layers


def test_an_interrupted_step_leaves_no_race(world: World) -> None:
    accumulators = accumulators_of(world, 6)
    micro_batch(world, accumulators, 6)
    micro_batch(world, accumulators, 6, until=2)
    accumulators.begin(1)
    accumulators.clear()
    for _ in range(3):
        micro_batch(world, accumulators, 6)
    update(world, accumulators, 6)
    assert world.races == []


def test_copies_in_both_directions_do_not_wait_for_each_other(world: World) -> None:
    """While a layer computes, the one before it leaves and the next one comes."""
    accumulators = accumulators_of(world, 6)
    micro_batch(world, accumulators, 6)
    accumulators.begin(5)
    world.operate(["staging 2"], ["staging 2"])
    accumulators.end(5)
    left = world.moment("to host")["to host"]
    accumulators.begin(4)  # fetches layer 3
    assert world.moment("to card").get("to host", 0) < left


def test_a_missing_wait_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker itself: without the events, races."""
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    accumulators = accumulators_of(world, 6)
    for _ in range(2):
        micro_batch(world, accumulators, 6)
    assert world.races
