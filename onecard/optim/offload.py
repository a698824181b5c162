"""Buffers in host memory that visit the card piece by piece while it works.

An optimizer step reads and writes every master weight and state once. From pinned host memory that is up
to 12 bytes a parameter each way over the bus, in pieces: while one is updated, the next arrives and the
one before goes home. Three pieces are on the card at a time; a piece is a few MB, or a whole matrix
where the rule needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onecard.arch.layout import PLACES
from onecard.errors import UserError, first_line
from onecard.hardware.cpu import available_memory
from onecard.optim.regions import Region, Slot

# Smaller buffers may share pages with others, which cannot be registered twice; from 32 MiB on, the C
# library gives every allocation pages of its own.
_REGISTERED_FROM = 2**26


def check_host_memory(needed: int, what: str) -> None:
    """Refuse before the machine begins to swap, or the kernel to kill."""
    available = available_memory()
    if available is not None and needed > available:
        raise UserError(
            f"{what} do not fit into this machine's memory",
            f"they take {needed / 2**30:.1f} GiB of host memory; {available / 2**30:.1f} GiB are available",
            "close other programs, choose a smaller model, or keep them on the card: --offload=none",
        )


def host_empty(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Host memory the card can read by itself.

    torch's own pinned allocator rounds up to a power of two, which for large buffers is up to twice the
    memory: those are allocated plainly and registered with the driver.
    """
    small = count * dtype.itemsize < _REGISTERED_FROM
    try:
        tensor = torch.empty(count, dtype=dtype, pin_memory=small and device.startswith("cuda"))
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"{count * dtype.itemsize / 2**30:.2f} GiB of host memory cannot be had", first_line(error),
            "close other programs, or use --offload=none",
        ) from None  # fmt: skip
    if small or not device.startswith("cuda"):
        return tensor
    tensor.registration = _Registration(tensor)  # type: ignore[attr-defined]  # lives as long as it does
    return tensor


class _Registration:
    """Pages the driver keeps in place until this is gone: it must go before the memory does."""

    def __init__(self, tensor: Tensor) -> None:
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._address: int | None = tensor.data_ptr()
        if failed := int(self._runtime.cudaHostRegister(self._address, tensor.nbytes, 0)):
            self._address = None
            # The runtime keeps its last error for whoever asks next, which is a kernel that has done nothing.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise UserError(
                f"{tensor.nbytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {failed})",
                "the driver may allow less (under WSL about half of the memory WSL has)",
                "give WSL more memory in .wslconfig, or use --offload=none",
            )

    def __del__(self) -> None:
        if self._address is not None:
            torch.cuda.synchronize()  # a copy may still be on its way
            self._runtime.cudaHostUnregister(self._address)


@dataclass(frozen=True)
class Traveller:
    """A flat host buffer with one element for every `per` parameters."""

    home: Tensor
    per: int = 1
    returns: bool = True  # False: only read on the card

    def part(self, flat: Tensor, first: int, count: int) -> Tensor:
        return flat[first // self.per : (first + count) // self.per]


class Shuttle:
    """Carries pieces of several host buffers to the card and back, overlapping with the work on them."""

    def __init__(
        self, travellers: Sequence[Traveller], spans: Sequence[tuple[int, int]], device: str
    ) -> None:
        """`spans`: first and count of the pieces, in the order of their journeys."""
        self.travellers, self.spans = tuple(travellers), tuple(spans)
        longest = max(count for _, count in spans)
        # On a CPU the same journeys are made without streams: the path the tests take.
        self.cuda = device.startswith("cuda")
        self._places = [
            [torch.empty(longest // t.per, dtype=t.home.dtype, device=device) for t in self.travellers]
            for _ in range(min(PLACES, len(spans)))
        ]
        if self.cuda:
            self._inward, self._outward = torch.Stream(device), torch.Stream(device)
            self._left = [torch.Event(device) for _ in self._places]  # the place is empty again

    def bytes_at_home(self) -> int:
        return sum(t.home.nbytes for t in self.travellers)

    def run(self, work: Callable[[list[Tensor], int, int], None]) -> None:
        """work(pieces, first, count) for every piece in order; it may change the pieces in place."""
        if self.cuda:
            # Pieces may not set out before those of the last round are back home, nor before what the
            # caller has waited for (totals on their way home, say).
            self._inward.wait_stream(self._outward)
            self._inward.wait_stream(torch.cuda.current_stream())
        for number, (first, count) in enumerate(self.spans):
            place = self._places[number % len(self._places)]
            visiting = [t.part(flat, 0, count) for t, flat in zip(self.travellers, place, strict=True)]
            homes = [t.part(t.home, first, count) for t in self.travellers]
            with _on(self._inward if self.cuda else None):
                if self.cuda and number >= len(self._places):
                    self._inward.wait_event(self._left[number % len(self._places)])
                for visitor, home in zip(visiting, homes, strict=True):
                    visitor.copy_(home, non_blocking=True)
            if self.cuda:
                torch.cuda.current_stream().wait_stream(self._inward)
            work(visiting, first, count)
            if self.cuda:
                self._outward.wait_stream(torch.cuda.current_stream())
            with _on(self._outward if self.cuda else None):
                for traveller, visitor, home in zip(self.travellers, visiting, homes, strict=True):
                    if traveller.returns:
                        home.copy_(visitor, non_blocking=True)
                if self.cuda:
                    self._left[number % len(self._places)].record(self._outward)

    def settle(self) -> None:
        """Wait until everything is home: before anybody on the host reads it."""
        if self.cuda:
            self._outward.synchronize()


class LayerTotals:
    """Gradient totals that live on the host; those of three layers at a time are on the card.

    The backward pass goes through the layers from last to first. Before a layer, its total of the
    micro-batches so far has come; after it, the sum goes home. While one layer computes, the sum of the
    one before it leaves and the total of the next arrives: with three places the two need not wait for
    each other, and the bus carries both ways at once.
    """

    def __init__(self, region: Region, dtype: torch.dtype, device: str) -> None:
        self.home = host_empty(region.size, dtype, device).zero_()
        self._spans = _layer_spans(region)
        longest = max(last - first for first, last in self._spans)
        count = min(PLACES, len(self._spans))
        self._places = [torch.zeros(longest, dtype=dtype, device=device) for _ in range(count)]
        wide = torch.promote_types(dtype, torch.float32)
        self._norms = torch.zeros(len(self._spans), dtype=wide, device=device)
        self._empty = [True] * len(self._spans)  # nothing has been added in this step
        self._coming: int | None = None
        self.views: dict[str, Tensor] = {}
        for slot in region.slots:
            layer = _layer_of(slot)
            first, _ = self._spans[layer]
            self.views[slot.name] = replace(slot, first=slot.first - first).view(self._place_of(layer))
        self.cuda = device.startswith("cuda")
        if self.cuda:
            self._inward, self._outward = torch.Stream(device), torch.Stream(device)
            self._left = [torch.Event(device) for _ in self._places]  # what was there is home

    def begin(self, layer: int) -> None:
        """Before the layer's backward pass: its total is in `views` afterwards."""
        if self._coming != layer:
            self._fetch(layer)
        if self.cuda:
            torch.cuda.current_stream().wait_stream(self._inward)
        if layer:
            self._fetch(layer - 1)

    def end(self, layer: int) -> None:
        """After it: the total goes home."""
        place, home = self._both(layer)
        self._norms[layer] = torch.linalg.vector_norm(place, dtype=self._norms.dtype)
        self._empty[layer] = False
        if self.cuda:
            self._outward.wait_stream(torch.cuda.current_stream())
        with _on(self._outward if self.cuda else None):
            home.copy_(place, non_blocking=True)
            if self.cuda:
                self._left[layer % len(self._places)].record(self._outward)
        if not layer:
            self._coming = None

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._norms)

    def clear(self) -> None:
        self._empty = [True] * len(self._spans)
        self._coming = None
        self._norms.zero_()

    def settle(self) -> None:
        """Before the update reads what has gone home."""
        if self.cuda:
            torch.cuda.current_stream().wait_stream(self._outward)

    def _fetch(self, layer: int) -> None:
        place, home = self._both(layer)
        if self.cuda:
            # The layer that was here before must have left, and with it all that left earlier, among them
            # this layer's own sum of the micro-batch before.
            self._inward.wait_event(self._left[layer % len(self._places)])
            if self._coming is None:
                # The first of a micro-batch. The one before may still be at work on a place, or have been
                # broken off there.
                self._inward.wait_stream(torch.cuda.current_stream())
                self._inward.wait_stream(self._outward)
        with _on(self._inward if self.cuda else None):
            if self._empty[layer]:
                place.zero_()
            else:
                place.copy_(home, non_blocking=True)
        self._coming = layer

    def _both(self, layer: int) -> tuple[Tensor, Tensor]:
        first, last = self._spans[layer]
        return self._place_of(layer)[: last - first], self.home[first:last]

    def _place_of(self, layer: int) -> Tensor:
        return self._places[layer % len(self._places)]


def _layer_of(slot: Slot) -> int:
    """The number in a name such as transformer.h.7.mlp.c_fc.weight."""
    return int(next(part for part in slot.name.split(".") if part.isdigit()))


def _layer_spans(region: Region) -> list[tuple[int, int]]:
    """Where each layer's parameters begin and end in the region: one after the other, nothing between."""
    spans: list[tuple[int, int]] = []
    for slot in region.slots:
        layer = _layer_of(slot)
        assert layer in (len(spans) - 1, len(spans)), "layers in order"
        if layer == len(spans):
            spans.append((slot.first, 0))
        spans[layer] = (spans[layer][0], slot.last)
    return spans


def _on(stream: Any) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
