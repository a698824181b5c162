"""Read, encode and write side by side: reading runs ahead in its own thread, encoding in others.

Threads, not processes: the encoder and Arrow work outside Python's lock, text does not travel, and a
killed prepare leaves no orphans. What is in flight is bounded by the queue.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from onecard.data.prepare.reading import BATCH_BYTES, MOST_TEXTS, Batch
from onecard.data.prepare.split import Rule
from onecard.data.tokenizer import Tokenizer
from onecard.hardware.cpu import usable_cores

# Batches read ahead, and batches that are encoded at a time: one on each core. Reading and writing take turns
# with them, and no core ever waits for another to finish its part of a batch. Every thread that encodes
# remembers words (30 MB of Wikipedia's), and eight are more than one thread that reads can feed with parquet
# (500 MB/s, where one encodes 250: measured on two cores, each apart).
_READ_AHEAD = 4
_ENCODERS = min(usable_cores(), 8)
_IN_FLIGHT_BYTES = 64 * 2**20  # of text: a few very large documents are enough at a time

# Small files go together until they are this much.
_SMALL_FILES_BYTES = 64 * 2**10
_WAIT_SECONDS = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Encoded:
    """A batch with its tokens: text n's are ids[offsets[n]:offsets[n + 1]], its end-of-text among them."""

    batch: Batch
    held_out: list[bool]
    ids_N: NDArray[Any]
    offsets: list[int]


def encode_all(
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    rule: Rule,
    dtype: str,
    on_wait: Callable[[], None] = lambda: None,
) -> Generator[Encoded, None, None]:
    """Every batch with its tokens, in order. Close the iterator to stop all threads.

    An error of the reader comes after everything that was read before it. `on_wait` is called now and
    then while there is nothing to do, as during a download.
    """
    with Ahead(lambda: merged(batches), _READ_AHEAD, on_wait) as ahead, ThreadPoolExecutor(_ENCODERS) as pool:
        waiting: deque[Future[Encoded]] = deque()
        sizes: deque[int] = deque()  # bytes of text of each
        failure: BaseException | None = None
        ready = iter(ahead)
        try:
            while failure is None:
                try:
                    batch = next(ready)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
                labelled, held_out = rule.assign(batch)
                waiting.append(pool.submit(_encode, labelled, held_out, tokenizer, dtype))
                sizes.append(labelled.n_bytes)
                while len(waiting) > _ENCODERS or (len(waiting) > 1 and sum(sizes) > _IN_FLIGHT_BYTES):
                    sizes.popleft()
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
            if failure is not None:
                raise failure
        finally:
            for future in waiting:
                future.cancel()


def _encode(batch: Batch, held_out: list[bool], tokenizer: Tokenizer, dtype: str) -> Encoded:
    """Tokens as they will be written, so that the writing thread only writes."""
    ids_N, starts_T = tokenizer.encode_batch(batch.texts)
    batch.texts = []  # the largest part of a batch, not needed any more
    pieces: list[NDArray[Any]] = []
    eot_1 = np.array([] if tokenizer.eot is None else [tokenizer.eot], ids_N.dtype)
    for start, stop, ends in zip(starts_T[:-1].tolist(), starts_T[1:].tolist(), batch.ends, strict=True):
        pieces.append(ids_N[start:stop])
        if ends:
            pieces.append(eot_1)
    narrow = np.dtype(dtype).newbyteorder("<")
    written_N = np.concatenate(pieces, dtype=narrow, casting="unsafe") if pieces else np.empty(0, narrow)
    offsets_T = starts_T.copy()
    offsets_T[1:] += len(eot_1) * np.cumsum(batch.ends, dtype=np.int64)
    return Encoded(batch, held_out, written_N, offsets_T.tolist())


def merged(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Small batches together: a folder of a million notes must not be a million calls.

    Never across the end of a larger file: there it must be possible to go back to.
    """
    held: Batch | None = None
    inside_file = False
    failure: Exception | None = None
    source = iter(batches)
    while True:
        try:
            batch = next(source)
        except StopIteration:
            break
        except Exception as error:
            failure = error
            break
        if held is None:
            held = batch
        else:
            held.extend(batch)
        ends_file = batch.end.item == 0
        enough = held.n_bytes >= (_SMALL_FILES_BYTES if ends_file else BATCH_BYTES // 2)
        if enough or len(held.sizes) >= MOST_TEXTS or (ends_file and inside_file):
            yield held
            held, inside_file = None, not ends_file
    if held is not None:
        yield held
    if failure is not None:
        raise failure


class _End:
    """The mark after the last item."""


class Ahead(Generic[T]):
    """Runs an iterator in a thread of its own, a few items ahead of whoever consumes it."""

    def __init__(
        self, make: Callable[[], Iterator[T]], depth: int, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        self._make = make
        self._on_wait = on_wait
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="onecard-read", daemon=True)

    def __enter__(self) -> Ahead[T]:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        # Whatever it waits for: make room, so that it sees the stop. A download in progress may take
        # longer to notice; the thread is a daemon and holds nothing of ours.
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.05)
                if not self._thread.is_alive() or self._ready.empty():
                    break

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                item = self._ready.get(timeout=_WAIT_SECONDS)
            except queue.Empty:
                self._on_wait()
                continue
            if item is _End:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        try:
            iterator = self._make()
            for item in iterator:
                if self._stop.is_set():
                    return
                self._ready.put(item)
            self._ready.put(_End)
        except BaseException as error:
            # Raised again where the items are consumed.
            self._ready.put(error)
