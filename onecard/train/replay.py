"""A micro-batch's two passes captured once as a CUDA graph and replayed: one launch instead of hundreds.

A layer is a few dozen kernels, and launching them takes the CPU longer than a fast card (or a small model)
takes to compute them: the run is launch-bound. A CUDA graph is one launch.

A graph keeps memory of its own for as long as it exists: what its activations took while it was captured.
So it is dropped whenever something else needs the room (an evaluation, a micro-batch of another size) and
captured again afterwards, which takes as long as one micro-batch without it.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onecard.errors import first_line
from onecard.plan.host import LAUNCH_BOUND
from onecard.train.memory import forget, is_out_of_memory

Compute = Callable[..., Tensor]

# Kernels are compiled, loaded and tuned in the first passes, which cannot be captured.
_PLAIN_PASSES = 2


class Capture(Protocol):
    """`compute` on inputs of certain shapes, ready to be replayed with other values."""

    held_bytes: int

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        """The result for these inputs; valid until the next call."""
        ...


def launch_share(compute: Compute, inputs: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The result, and the share of its time that launching kernels took (it waits for the card)."""
    torch.cuda.synchronize()
    start, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
    began = time.perf_counter()
    start.record()
    result = compute(*inputs)
    end.record()
    launching = time.perf_counter() - began
    end.synchronize()
    return result, launching / max(start.elapsed_time(end) / 1e3, 1e-9)


class CudaCapture:
    """`room`: bytes of the card that it takes in one piece before anything else.

    Under a cap (vram_limit) the allocator asks for room for the whole of a tensor, even where only its end
    would have to be added to what it has, and in a capture it cannot give anything back first.
    """

    def __init__(self, compute: Compute, inputs: Sequence[Tensor], room: int = 0) -> None:
        # However it ends, also half-way. cuBLAS keeps its workspaces, which lie amid the graph's memory,
        # and the allocator counts how often that has grown: giving back, once the graph is gone, what is
        # free on both sides of them is more than it has counted, and ends the process (torch 2.11).
        weakref.finalize(self, free_workspaces).atexit = False
        self._inputs = [t.clone() for t in inputs]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        before, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
        try:
            # thread_local: the reading thread may pin memory for the next micro-batch meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                if room:
                    torch.empty(room, dtype=torch.uint8, device=stream.device)  # free at once, and ours
                self._output = compute(*self._inputs)
        except RuntimeError:
            # A capture that fails while it is ended leaves its own stream behind as the current one, and
            # random numbers waiting for its end: another capture ends that too.
            torch.cuda.set_stream(stream)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                torch.zeros(1, device=stream.device)
            raise
        self.held_bytes = torch.cuda.memory_reserved() - before

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        for ours, given in zip(self._inputs, inputs, strict=True):
            ours.copy_(given)
        self._graph.replay()
        return self._output


class Replay:
    """`compute`, captured for every shape of inputs it is called with.

    With a `measure` (launch_share) only shapes whose plain pass is launch-bound: the others gain little.
    `plain` computes the same where nothing is captured.
    """

    def __init__(
        self,
        compute: Compute,
        capture: Callable[[Compute, Sequence[Tensor]], Capture] = CudaCapture,
        measure: Callable[[Compute, Sequence[Tensor]], tuple[Tensor, float]] | None = None,
        plain: Compute | None = None,
    ) -> None:
        self._compute, self._capture, self._measure = compute, capture, measure
        self._plain = plain or compute
        self._worth: dict[Any, bool] = {}
        self._captures: dict[Any, Capture] = {}
        self._passes: Counter[Any] = Counter()
        self.problem: str | None = None  # why nothing is captured any more
        self.ran_out = False  # was it memory?

    def __call__(self, *inputs: Tensor) -> Tensor:
        kind = tuple((t.shape, t.dtype) for t in inputs)
        if kind not in self._captures and not self._try_to_capture(kind, inputs):
            if self._worth.get(kind) is False:
                # Plain for good, and in its way: to capture the others anew in every step gains nothing.
                self._worth |= dict.fromkeys(self._captures, False)
            self.release()  # room for what the pass allocates by itself
            self._passes[kind] += 1
            if self._measure is None or self._passes[kind] != _PLAIN_PASSES:
                return self._plain(*inputs)
            result, share = self._measure(self._plain, inputs)
            self._worth[kind] = share >= LAUNCH_BOUND
            return result
        return self._captures[kind].replay(inputs)

    def _try_to_capture(self, kind: Any, inputs: Sequence[Tensor]) -> bool:
        if self.problem is not None or self._passes[kind] < _PLAIN_PASSES:
            return False
        if not self._worth.get(kind, self._measure is None):
            return False
        try:
            self._captures[kind] = self._capture(self._compute, inputs)
            return True
        # Out of memory among them: the plain passes have fitted, so they go on.
        except RuntimeError as error:
            self.give_up(error)
        return False

    def give_up(self, error: Exception) -> None:
        """Nothing is captured any more, and the memory of what was is free."""
        self.problem, self.ran_out = first_line(error), is_out_of_memory(error)
        self.release()
        forget(error)  # its frames hold the capture that failed, and all the memory of that
        give_back()

    @property
    def held_bytes(self) -> int:
        """Memory of the card that belongs to CUDA graphs, whatever the allocator says is in use."""
        return sum(capture.held_bytes for capture in self._captures.values())

    def release(self) -> None:
        """Give the memory back; what is needed again is captured again."""
        if not self._captures:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # one may still be running
        self._captures.clear()
        give_back()


def free_workspaces() -> None:
    """cuBLAS took room to work in when a pass was captured, out of the graph's own memory, which would
    stay there for it; the next pass takes its own."""
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()


def take_workspaces(device: str) -> None:
    """cuBLAS takes one in each thread that multiplies, at its first product, and keeps it: this one and that
    of autograd's passes, here and now."""
    with torch.enable_grad():
        small = torch.ones((16, 16), device=device, requires_grad=True)
        (small @ small).sum().backward()  # type: ignore[no-untyped-call]


def give_back() -> None:
    free_workspaces()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
