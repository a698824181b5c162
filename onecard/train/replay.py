"""A micro-batch's two passes recorded once and replayed: one call of the driver instead of hundreds.

A layer is a few dozen kernels, and the host needs longer to hand them out than a fast card (or a small
model) needs to compute them. A CUDA graph is handed out at once.

A graph keeps memory of its own for as long as it exists: what its activations took while it was recorded.
So it is dropped whenever something else needs the room (an evaluation, a micro-batch of another size) and
recorded again afterwards, which takes as long as one micro-batch without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Compute = Callable[..., Tensor]

# Kernels are compiled, loaded and tuned in the first passes, which cannot be recorded.
_PLAIN_PASSES = 2


class Recording(Protocol):
    """`compute` on inputs of certain shapes, ready to be repeated with other values."""

    held_bytes: int

    def play(self, inputs: Sequence[Tensor]) -> Tensor:
        """The result for these inputs; valid until the next call."""
        ...


class CudaRecording:
    def __init__(self, compute: Compute, inputs: Sequence[Tensor]) -> None:
        self._inputs = [t.clone() for t in inputs]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        before, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
        try:
            # thread_local: the reading thread may pin memory for the next micro-batch meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._output = compute(*self._inputs)
        except RuntimeError:
            # A recording that fails while it is ended leaves its own stream behind as the current one, and
            # random numbers waiting for its end: another recording ends that too.
            torch.cuda.set_stream(stream)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                torch.zeros(1, device=stream.device)
            raise
        self.held_bytes = torch.cuda.memory_reserved() - before

    def play(self, inputs: Sequence[Tensor]) -> Tensor:
        for ours, given in zip(self._inputs, inputs, strict=True):
            ours.copy_(given)
        self._graph.replay()
        return self._output


class Replay:
    """`compute`, recorded for every shape of inputs it is called with."""

    def __init__(
        self, compute: Compute, record: Callable[[Compute, Sequence[Tensor]], Recording] = CudaRecording
    ) -> None:
        self._compute, self._record = compute, record
        self._recordings: dict[Any, Recording] = {}
        self._passes: Counter[Any] = Counter()
        self.problem: str | None = None  # why nothing is recorded any more

    def __call__(self, *inputs: Tensor) -> Tensor:
        kind = tuple((t.shape, t.dtype) for t in inputs)
        if kind not in self._recordings and not self._try_to_record(kind, inputs):
            self._passes[kind] += 1
            self.release()  # room for what the pass allocates by itself
            return self._compute(*inputs)
        return self._recordings[kind].play(inputs)

    def _try_to_record(self, kind: Any, inputs: Sequence[Tensor]) -> bool:
        if self.problem is not None or self._passes[kind] < _PLAIN_PASSES:
            return False
        try:
            self._recordings[kind] = self._record(self._compute, inputs)
        # Out of memory among them: the plain passes have fitted, so they go on.
        except RuntimeError as error:
            self.problem = (str(error).splitlines() or [""])[0]
            return False
        return True

    @property
    def held_bytes(self) -> int:
        """Memory of the card that belongs to recordings, whatever the allocator says is in use."""
        return sum(recording.held_bytes for recording in self._recordings.values())

    def release(self) -> None:
        """Give the memory back; what is needed again is recorded again."""
        if not self._recordings:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # one may still be playing
        self._recordings.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
