"""Offloaded buffers: they live in host memory and are streamed through the card in pieces.

An optimizer step reads and writes every master weight and state once. From pinned host memory that is up
to 12 bytes a parameter each way over the bus. While one piece is updated, the next is copied to the card
and the previous one back to host memory. Three pieces are on the card at a time; a piece is a few MB, or a
whole matrix where the rule needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onecard.arch.layout import PIECES_ON_CARD
from onecard.errors import UserError, first_line
from onecard.hardware.cpu import available_memory
from onecard.language import _
from onecard.optim.regions import Region, Slot

# Smaller buffers may share pages with others, and a page cannot be registered twice. From 32 MiB on, the C
# library gives every allocation pages of its own.
_REGISTERED_FROM = 2**26


def check_host_memory(needed: int) -> None:
    """Stop before the machine begins to swap, or the kernel to kill processes."""
    available = available_memory()
    if available is not None and needed > available:
        raise UserError(
            _("master weights and optimizer states do not fit into this machine's memory"),
            _("they take {needed:.1f} GiB of RAM; {available:.1f} GiB are available").format(
                needed=needed / 2**30, available=available / 2**30
            ),
            _("close other programs, choose a smaller model, or keep them on the card: --offload=none"),
        )


def host_empty(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Pinned host memory, which the card can read by itself.

    torch's own pinned allocator rounds up to a power of two, up to twice the memory. Large buffers are
    therefore allocated as pageable memory and registered with the driver.
    """
    small = count * dtype.itemsize < _REGISTERED_FROM
    try:
        tensor = torch.empty(count, dtype=dtype, pin_memory=small and device.startswith("cuda"))
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            _("{n:.2f} GiB of RAM could not be allocated").format(n=count * dtype.itemsize / 2**30),
            first_line(error),
            _("close other programs, or use --offload=none"),
        ) from None
    if small or not device.startswith("cuda"):
        return tensor
    tensor.registration = _Registration(tensor)  # type: ignore[attr-defined]  # lives as long as the tensor
    return tensor


class _Registration:
    """Pages pinned by the driver while this object lives. It must be deleted before the memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._address: int | None = tensor.data_ptr()
        if failed := int(self._runtime.cudaHostRegister(self._address, tensor.nbytes, 0)):
            self._address = None
            # The runtime keeps its last error, and would report it at the next kernel launch.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise UserError(
                _("{n:.1f} GiB of RAM could not be pinned (CUDA error {error})").format(
                    n=tensor.nbytes / 2**30, error=failed
                ),
                _("the driver may allow less (under WSL about half of the memory WSL has)"),
                _("give WSL more memory in .wslconfig, or use --offload=none"),
            )

    def __del__(self) -> None:
        if self._address is not None:
            torch.cuda.synchronize()  # a copy may still be running
            self._runtime.cudaHostUnregister(self._address)


@dataclass(frozen=True)
class StreamedBuffer:
    """A flat buffer in host memory with one element for every `per` parameters."""

    host_copy: Tensor
    per: int = 1
    writes_back: bool = True  # False: only read on the card

    def part(self, flat: Tensor, first: int, count: int) -> Tensor:
        """The elements of `flat` that belong to these parameters."""
        return flat[first // self.per : (first + count) // self.per]


class Streamer:
    """Copies pieces of several host buffers to the card and back while the card works on other pieces."""

    def __init__(
        self, buffers: Sequence[StreamedBuffer], spans: Sequence[tuple[int, int]], device: str
    ) -> None:
        """`spans`: first and count of the pieces, in the order of streaming."""
        self.buffers, self.spans = tuple(buffers), tuple(spans)
        longest = max(count for _, count in spans)
        # On a CPU the same copies are made without CUDA streams: tests take this path.
        self.cuda = device.startswith("cuda")
        self._staging = [
            [torch.empty(longest // b.per, dtype=b.host_copy.dtype, device=device) for b in self.buffers]
            for _ in range(min(PIECES_ON_CARD, len(spans)))
        ]
        if self.cuda:
            self._to_card, self._to_host = torch.Stream(device), torch.Stream(device)
            self._free = [torch.Event(device) for _ in self._staging]  # a set may be overwritten

    def host_bytes(self) -> int:
        """Bytes of the host copies."""
        return sum(buffer.host_copy.nbytes for buffer in self.buffers)

    def run(self, work: Callable[[list[Tensor], int, int], None]) -> None:
        """Call work(pieces, first, count) for every span in order; it may change the pieces in place."""
        if self.cuda:
            # Wait until the pieces of the last run are back in host memory, and for what the caller has
            # waited for (copies of accumulators to host memory, for example).
            self._to_card.wait_stream(self._to_host)
            self._to_card.wait_stream(torch.cuda.current_stream())
        for number, (first, count) in enumerate(self.spans):
            staging = self._staging[number % len(self._staging)]
            pieces = [b.part(flat, 0, count) for b, flat in zip(self.buffers, staging, strict=True)]
            host_copies = [b.part(b.host_copy, first, count) for b in self.buffers]
            with _on(self._to_card if self.cuda else None):
                if self.cuda and number >= len(self._staging):
                    self._to_card.wait_event(self._free[number % len(self._staging)])
                for piece, host_copy in zip(pieces, host_copies, strict=True):
                    piece.copy_(host_copy, non_blocking=True)
            if self.cuda:
                torch.cuda.current_stream().wait_stream(self._to_card)
            work(pieces, first, count)
            if self.cuda:
                self._to_host.wait_stream(torch.cuda.current_stream())
            with _on(self._to_host if self.cuda else None):
                for buffer, piece, host_copy in zip(self.buffers, pieces, host_copies, strict=True):
                    if buffer.writes_back:
                        host_copy.copy_(piece, non_blocking=True)
                if self.cuda:
                    self._free[number % len(self._staging)].record(self._to_host)

    def synchronize(self) -> None:
        """Wait until the host copies are complete, before the CPU reads them."""
        if self.cuda:
            self._to_host.synchronize()


class LayerAccumulators:
    """Gradient accumulators in host memory; those of three layers at a time are on the card.

    The backward pass goes through the layers from last to first. Before a layer is computed, its accumulators
    are copied to the card; after it, the new sums are copied back. While one layer computes, the previous one
    is copied back and the next one fetched. With three staging buffers the two copies do not wait for each
    other, and the bus works in both directions at once.
    """

    def __init__(self, region: Region, dtype: torch.dtype, device: str) -> None:
        self.host_copy = host_empty(region.size, dtype, device).zero_()
        self._spans = _layer_spans(region)
        longest = max(last - first for first, last in self._spans)
        count = min(PIECES_ON_CARD, len(self._spans))
        self._staging = [torch.zeros(longest, dtype=dtype, device=device) for _ in range(count)]
        wide = torch.promote_types(dtype, torch.float32)
        self._norms = torch.zeros(len(self._spans), dtype=wide, device=device)
        self._empty = [True] * len(self._spans)  # nothing has been added to the layer in this step
        self._fetched: int | None = None
        self.views: dict[str, Tensor] = {}
        for slot in region.slots:
            layer = _layer_of(slot)
            first, _ = self._spans[layer]
            self.views[slot.name] = replace(slot, first=slot.first - first).view(self._staging_of(layer))
        self.cuda = device.startswith("cuda")
        if self.cuda:
            self._to_card, self._to_host = torch.Stream(device), torch.Stream(device)
            self._free = [torch.Event(device) for _ in self._staging]  # a buffer may be overwritten

    def begin(self, layer: int) -> None:
        """Fetch the layer's accumulators into `views`, before its backward pass."""
        if self._fetched != layer:
            self._fetch(layer)
        if self.cuda:
            torch.cuda.current_stream().wait_stream(self._to_card)
        if layer:
            self._fetch(layer - 1)

    def end(self, layer: int) -> None:
        """Copy the layer's accumulators back to host memory, after its backward pass."""
        staging, host_copy = self._both(layer)
        self._norms[layer] = torch.linalg.vector_norm(staging, dtype=self._norms.dtype)
        self._empty[layer] = False
        if self.cuda:
            self._to_host.wait_stream(torch.cuda.current_stream())
        with _on(self._to_host if self.cuda else None):
            host_copy.copy_(staging, non_blocking=True)
            if self.cuda:
                self._free[layer % len(self._staging)].record(self._to_host)
        if not layer:
            self._fetched = None

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._norms)

    def clear(self) -> None:
        """Begin a new step: the first gradients of a layer are added to zeros."""
        self._empty = [True] * len(self._spans)
        self._fetched = None
        self._norms.zero_()

    def wait_for_copies(self) -> None:
        """Make the current stream wait for the copies to host memory, before the update reads them."""
        if self.cuda:
            torch.cuda.current_stream().wait_stream(self._to_host)

    def _fetch(self, layer: int) -> None:
        staging, host_copy = self._both(layer)
        if self.cuda:
            # The layer that used this buffer last must be back in host memory. So must all layers copied
            # earlier, among them this layer's own sums of the previous micro-batch.
            self._to_card.wait_event(self._free[layer % len(self._staging)])
            if self._fetched is None:
                # The first layer of a micro-batch. The previous micro-batch may still compute in a staging
                # buffer, or have been interrupted there.
                self._to_card.wait_stream(torch.cuda.current_stream())
                self._to_card.wait_stream(self._to_host)
        with _on(self._to_card if self.cuda else None):
            if self._empty[layer]:
                staging.zero_()
            else:
                staging.copy_(host_copy, non_blocking=True)
        self._fetched = layer

    def _both(self, layer: int) -> tuple[Tensor, Tensor]:
        first, last = self._spans[layer]
        return self._staging_of(layer)[: last - first], self.host_copy[first:last]

    def _staging_of(self, layer: int) -> Tensor:
        return self._staging[layer % len(self._staging)]


def _layer_of(slot: Slot) -> int:
    """The number in a name such as transformer.h.7.mlp.c_fc.weight."""
    return int(next(part for part in slot.name.split(".") if part.isdigit()))


def _layer_spans(region: Region) -> list[tuple[int, int]]:
    """Where each layer's parameters begin and end in the region: layer after layer, without gaps."""
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
