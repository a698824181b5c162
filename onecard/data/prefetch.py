"""Reading ahead: a thread prepares the next micro-batches while the card computes.

The state a run saves must be that of the steps it has trained on, not of what the thread has
already read. So every step carries its own next state, and nothing here remembers more.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onecard.data.batches import DataState, Sequences

if TYPE_CHECKING:
    import torch

_DEPTH = 2
_LOOK_EVERY = 0.5  # seconds between looks whether the thread is still there


@dataclass(frozen=True)
class Micro:
    """One micro-batch on the device: inputs and targets [b, T], and a key per sequence [b]."""

    x: torch.Tensor
    y: torch.Tensor
    # The uint64 ids reinterpreted as int64: torch computes little with unsigned words.
    ids: torch.Tensor

    @property
    def n_sequences(self) -> int:
        return int(self.x.shape[0])


class StepData(NamedTuple):
    """One optimizer step's data. Iterate `micros` to the end, train, then adopt `next_state`."""

    micros: StepMicros
    next_state: DataState


@dataclass(frozen=True)
class _StepBegins:
    next_state: DataState


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _Life:
    """Held by the thread alone: over when it ends, and gone with it where it never came to its first line."""

    over = False


def micro_sizes(step_sequences: int, micro_batch: int) -> list[int]:
    """Sizes of a step's micro-batches: equal ones, and what is left over last."""
    assert step_sequences >= 1
    assert micro_batch >= 1
    whole, rest = divmod(step_sequences, micro_batch)
    return [micro_batch] * whole + ([rest] if rest else [])


class StepMicros:
    """A step's micro-batches, moved to the device one at a time as they are asked for."""

    def __init__(self, prefetcher: Prefetcher, sizes: list[int]) -> None:
        self._prefetcher = prefetcher
        self.sizes = sizes
        self._given = 0

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def finished(self) -> bool:
        return self._given == len(self.sizes)

    def __iter__(self) -> Iterator[Micro]:
        return self

    def __next__(self) -> Micro:
        if self.finished:
            raise StopIteration
        micro = self._prefetcher._next_micro()
        self._given += 1
        return micro


class Prefetcher:
    """Steps of `step_sequences` sequences from `state` on, read by a background thread.

    At most `depth` micro-batches wait in host memory and one is in the consumer's hands. To change
    the micro-batch, or after a step was abandoned midway, close this one and open another with the
    state of the last finished step.
    """

    def __init__(
        self,
        sequences: Sequences,
        state: DataState,
        *,
        step_sequences: int,
        micro_batch: int,
        device: torch.device | str = "cpu",
        pin: bool | None = None,
        depth: int = _DEPTH,
    ) -> None:
        import torch

        self._torch = torch
        self._sequences = sequences
        self._sizes = micro_sizes(step_sequences, micro_batch)
        self._step_sequences = step_sequences
        self.device = torch.device(device)
        self._pin = self.device.type == "cuda" if pin is None else pin
        self._current: StepMicros | None = None
        self._ready: queue.Queue[_StepBegins | Micro | _Failed] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._state = state
        self._life: weakref.ref[_Life] | None = None  # None: not begun

    def _begin(self) -> None:
        """Starts the thread with the first step that is asked for: where there is no memory for one, that is
        an error of a step, and the step is tried again. threading.Thread would wait for ever for one that
        dies of it while it begins. As with a daemon, the process does not wait for it when it ends."""
        life = _Life()
        self._life = weakref.ref(life)
        try:
            _thread.start_new_thread(self._live, (self._state, life))
        except BaseException:
            self._life = None  # whoever keeps the error keeps `life` too
            raise

    @property
    def _alive(self) -> bool:
        life = self._life() if self._life is not None else None
        return life is not None and not life.over

    def next_step(self) -> StepData:
        """The next step's micro-batches and the state once they are trained on."""
        if self._life is None and not self._stop.is_set():
            self._begin()
        if self._current is not None and not self._current.finished:
            raise RuntimeError("the step before was abandoned midway; open a new Prefetcher")
        item = self._next_item()
        assert isinstance(item, _StepBegins)
        self._current = StepMicros(self, self._sizes)
        return StepData(self._current, item.next_state)

    def close(self) -> None:
        """Stop the thread and let go of what it had read."""
        self._stop.set()
        while self._alive:
            self._drain()
            time.sleep(0.001)
        self._drain()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return

    def _next_item(self) -> _StepBegins | Micro:
        if self._failure is None and self._stop.is_set():
            raise RuntimeError("the Prefetcher is closed")
        item = _Failed(self._failure) if self._failure is not None else self._next_ready()
        if isinstance(item, _Failed):
            self._failure = item.error
            raise item.error
        return item

    def _next_ready(self) -> _StepBegins | Micro | _Failed:
        while True:
            alive = self._alive  # first: what it leaves behind is there by then
            try:
                return self._ready.get(timeout=_LOOK_EVERY) if alive else self._ready.get_nowait()
            except queue.Empty:
                if not alive:
                    return _Failed(
                        MemoryError("the thread that reads ahead has ended: can't start new thread")
                    )

    def _next_micro(self) -> Micro:
        host = self._next_item()
        assert isinstance(host, Micro)
        if self.device.type == "cpu":
            return host
        # Pinned memory is handed back by torch only when the copy is over, so non_blocking is safe.
        x_BT, y_BT, id_B = (
            tensor.to(self.device, non_blocking=self._pin) for tensor in (host.x, host.y, host.ids)
        )
        return Micro(x_BT, y_BT, id_B)

    def _live(self, state: DataState, life: _Life) -> None:
        try:
            self._read_ahead(state)
        finally:
            life.over = True  # an error that somebody keeps would keep it

    def _read_ahead(self, state: DataState) -> None:
        try:
            if self.device.type == "cuda" and self.device.index is not None:
                self._torch.cuda.set_device(self.device)
            while not self._stop.is_set():
                # Located once per step: the announced next state and what is read cannot disagree,
                # even when the file grows between two micro-batches.
                located = self._sequences.locate(state, self._step_sequences)
                self._ready.put(_StepBegins(located.next_state))
                first = 0
                for size in self._sizes:
                    if self._stop.is_set():
                        return
                    rows = slice(first, first + size)
                    tokens_BL = self._sequences.tokens.gather(
                        located.positions[rows], self._sequences.block_size + 1
                    )
                    self._ready.put(self._on_host(tokens_BL, located.ids[rows]))
                    first += size
                state = located.next_state
        except BaseException as error:
            # The consumer meets it at its next call; a thread must never die unseen.
            self._ready.put(_Failed(error))

    def _on_host(self, tokens_BL: NDArray[np.int64], id_B: NDArray[np.uint64]) -> Micro:
        # Copies: a single sequence cut out of a longer row would keep that row's stride, for which the
        # compiler would compile once more.
        arrays = (tokens_BL[:, :-1].copy(), tokens_BL[:, 1:].copy(), id_B.view(np.int64).copy())
        tensors = (self._torch.from_numpy(array) for array in arrays)
        x_BT, y_BT, ids_B = (tensor.pin_memory() if self._pin else tensor for tensor in tensors)
        return Micro(x_BT, y_BT, ids_B)
