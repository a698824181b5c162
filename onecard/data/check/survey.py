"""One look at every token of a split, window by window: counts, hashes, where documents begin and end.

Nothing here knows what the tokens should be; `check` compares. Memory is a window, a count per id,
and per document a length and a hash (16 bytes; 24 while the hashes are sorted).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecard.data.shards import SHARD_HEADER_BYTES, SHARD_MAGIC, layout
from onecard.errors import UserError
from onecard.files import open_plain
from onecard.language import _

# With the 64-bit copy that counting makes, a window of this size stays in a processor's cache;
# four times as many tokens take twice as long each.
WINDOW_TOKENS = 2**20
_DIGEST_BYTES = 8


@dataclass(frozen=True)
class _Part:
    path: Path
    offset: int
    tokens: int
    dtype: np.dtype[Any]


class TokenRow:
    """The tokens of a split over its files, for reading from front to back.

    Read, not mapped as for training: reading a map past the end of a file that was cut meanwhile
    kills the process. What is wrong with the files' sizes is kept in `damage` and does not stop anyone.
    """

    def __init__(self, paths: list[Path], dtype: np.dtype[Any]) -> None:
        self.damage: list[str] = []
        self.parts = [self._look(path, dtype) for path in paths]
        self.bytes_on_disk = sum(part.path.stat().st_size for part in self.parts)

    def __len__(self) -> int:
        return sum(part.tokens for part in self.parts)

    def _look(self, path: Path, dtype: np.dtype[Any]) -> _Part:
        try:
            with open_plain(path) as file:
                n_bytes = os.fstat(file.fileno()).st_size
                head = file.read(12)
        except OSError as error:
            raise _unreadable(path, error) from error
        if n_bytes >= SHARD_HEADER_BYTES and int.from_bytes(head[:4], "little") == SHARD_MAGIC:
            promised = int.from_bytes(head[8:12], "little")
            # As if it were whole: only a version nobody knows is an error here.
            offset, _count, dtype = layout(path, head, SHARD_HEADER_BYTES + 2 * promised, dtype)
            there = (n_bytes - offset) // dtype.itemsize
            if there < promised:
                cut = _("{file} is cut short: its header promises {promised:,} tokens, {there:,} are there")
                self.damage.append(cut.format(file=path.name, promised=promised, there=there))
            return _Part(path, offset, min(there, promised), dtype)
        if n_bytes % dtype.itemsize:
            odd = _("{file}: {n:,} bytes are not a whole number of {size}-byte tokens ({kind})")
            self.damage.append(odd.format(file=path.name, n=n_bytes, size=dtype.itemsize, kind=dtype.name))
        return _Part(path, 0, n_bytes // dtype.itemsize, dtype)

    def windows(self, start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Tokens `start` to `stop` in order. A window is valid until the next one is asked for."""
        before = 0
        for part in self.parts:
            first, last = max(0, start - before), min(part.tokens, stop - before)
            before += part.tokens
            if first >= last:
                continue
            itemsize = part.dtype.itemsize
            buffer = memoryview(bytearray(min(WINDOW_TOKENS, last - first) * itemsize))
            try:
                with part.path.open("rb", buffering=0) as file:
                    file.seek(part.offset + first * itemsize)
                    while first < last:
                        window = buffer[: (last - first) * itemsize]
                        _fill(part.path, file, window)
                        yield np.frombuffer(window, part.dtype)
                        first += len(window) // itemsize
            except OSError as error:
                raise _unreadable(part.path, error) from error

    def read(self, start: int, stop: int) -> list[int]:
        """A few tokens, for showing them."""
        return [token for window_W in self.windows(start, stop) for token in window_W.tolist()]

    def place(self, position: int) -> str:
        """Where a token of the row lies, as a person would look for it."""
        for part in self.parts:
            if position < part.tokens:
                return _("{file}, token {n:,}").format(file=part.path.name, n=position)
            position -= part.tokens
        raise IndexError(position)


def _fill(path: Path, file: Any, window: memoryview) -> None:
    done = 0
    while done < len(window):
        got = file.readinto(window[done:])
        if not got:
            raise UserError(
                _("{path} became shorter while it was being checked").format(path=path),
                hint=_("run the same command again"),
            )
        done += got


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(_("cannot read {path}").format(path=path), str(error.strerror or error))


@dataclass
class Documents:
    """Length and hash of every document: what lies between one end-of-text and the next.

    nanoGPT and onecard put end-of-text behind each document, llm.c in front of it. Taken as a
    separator it serves both, as long as the nothing before the very first one is left out.
    """

    lengths_D: NDArray[np.int64]
    hashes_D: NDArray[np.uint64]
    ends: int
    first_start: int

    def __len__(self) -> int:
        return len(self.lengths_D)

    def start(self, number: int) -> int:
        """Position of a document's first token. Only while the lengths are in the order of the row."""
        return self.first_start + number + int(self.lengths_D[:number].sum())

    def sorted_hashes(self) -> NDArray[np.uint64]:
        """Hashes of the documents that are not empty."""
        hashes_D: NDArray[np.uint64] = self.hashes_D[self.lengths_D > 0]
        hashes_D.sort()
        return hashes_D


class _DocumentCollector:
    """Cuts windows at end-of-text. A document that goes on in the next window is hashed bit by bit."""

    def __init__(self, eot: int) -> None:
        self._eot = eot
        self._lengths = array("q")
        self._hashes = array("Q")
        self._open = sha256()
        self._n_open = 0
        self.ends = 0

    def add(self, window_W: NDArray[Any]) -> None:
        size = window_W.dtype.itemsize
        data = window_W.view(np.uint8).data
        ends_E = np.flatnonzero(window_W == self._eot)
        self.ends += len(ends_E)
        begun = 0
        if len(ends_E):
            first = int(ends_E[0])
            self._open.update(data[: first * size])
            self._n_open += first
            self._close()
            self._lengths.frombytes((np.diff(ends_E) - 1).astype(np.int64).tobytes())
            cuts = (ends_E * size).tolist()
            self._hashes.frombytes(
                b"".join(
                    sha256(data[cut + size : following]).digest()[:_DIGEST_BYTES]
                    for cut, following in pairwise(cuts)
                )
            )
            begun = int(ends_E[-1]) + 1
        self._open.update(data[begun * size :])
        self._n_open += len(window_W) - begun

    def _close(self) -> None:
        self._lengths.append(self._n_open)
        self._hashes.frombytes(self._open.digest()[:_DIGEST_BYTES])
        self._open, self._n_open = sha256(), 0

    def finish(self) -> Documents:
        unfinished = self._n_open > 0
        if unfinished:
            self._close()
        # Begins with end-of-text and does not end with it: it stands in front of the documents.
        leading = unfinished and self._lengths[0] == 0
        return Documents(
            np.frombuffer(self._lengths, np.int64)[leading:],
            np.frombuffer(self._hashes, np.uint64)[leading:],
            self.ends,
            int(leading),
        )


@dataclass
class Survey:
    """What one pass over a split finds. `documents` is None where nothing ends one."""

    tokens: int = 0
    sha256: str = ""
    counts_V: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    out_of_range: int = 0
    first_out_of_range: tuple[int, int] | None = None
    documents: Documents | None = None


def survey(
    row: TokenRow, stop: int, n_vocab: int, eot: int | None, count: Callable[[int, int], None]
) -> Survey:
    """One pass over the first `stop` tokens. `count` gets how many tokens and documents are behind us."""
    found = Survey(counts_V=np.zeros(n_vocab, np.int64))
    hasher = sha256()
    collector = None if eot is None else _DocumentCollector(eot)
    for window_W in row.windows(0, stop):
        hasher.update(window_W.data)
        counts_V = _counts(window_W, n_vocab)
        found.counts_V += counts_V[:n_vocab]
        outside = int(counts_V[n_vocab:].sum())
        if outside and found.first_out_of_range is None:
            at = int(np.argmax(window_W >= n_vocab))
            found.first_out_of_range = (found.tokens + at, int(window_W[at]))
        found.out_of_range += outside
        if collector is not None:
            collector.add(window_W)
        found.tokens += len(window_W)
        count(found.tokens, collector.ends if collector else 0)
    found.sha256 = hasher.hexdigest()
    if collector is not None and collector.ends:
        found.documents = collector.finish()
    return found


def _counts(window_W: NDArray[Any], n_vocab: int) -> NDArray[np.int64]:
    """How often each id occurs; those from n_vocab on are out of range."""
    if window_W.dtype.itemsize > 2:
        # A damaged 32-bit id must not make a table of four billion counts.
        window_W = np.minimum(window_W, n_vocab)
    counts: NDArray[np.int64] = np.bincount(window_W, minlength=n_vocab + 1)
    return counts


# ---------------------------------------------------------------- what follows from it


def entropy(counts_V: NDArray[np.int64]) -> float:
    """The entropy of the ids' frequencies, in nats: the loss of a guess that knows nothing else."""
    seen_V = counts_V[counts_V > 0]
    share_V = seen_V / max(1, int(seen_V.sum()))
    return max(0.0, float(-(share_V * np.log(share_V)).sum()))


@dataclass(frozen=True)
class Repeats:
    """Exact copies among documents. `copies` counts those beyond the first of each text."""

    copies: int
    texts: int
    most_times: int
    most_hash: int


def repeats(sorted_D: NDArray[np.uint64]) -> Repeats:
    copies_C = sorted_D[1:][sorted_D[1:] == sorted_D[:-1]]
    if not len(copies_C):
        return Repeats(0, 0, 0, 0)
    texts_U, times_U = np.unique(copies_C, return_counts=True)
    most = int(np.argmax(times_U))
    return Repeats(len(copies_C), len(texts_U), int(times_U[most]) + 1, int(texts_U[most]))


@dataclass(frozen=True)
class Shared:
    """Documents that are in both splits. `example` is the hash of one of them."""

    in_train: int
    in_val: int
    example: int


def shared(train_D: NDArray[np.uint64], val_D: NDArray[np.uint64]) -> Shared:
    """Both sorted. Searching from the smaller side keeps memory to a few numbers per val document."""
    first_D = np.searchsorted(train_D, val_D, "left")
    behind_D = np.searchsorted(train_D, val_D, "right")
    in_both_S = val_D[behind_D > first_D]
    if not len(in_both_S):
        return Shared(0, 0, 0)
    once_U = np.unique(val_D, return_index=True)[1]
    in_train = int((behind_D[once_U] - first_D[once_U]).sum())
    return Shared(in_train, len(in_both_S), int(in_both_S[0]))


def histogram(sorted_lengths_D: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(from, to, documents) by powers of two, from the first that occurs to the last."""
    borders = [0] + [2**power for power in range(int(sorted_lengths_D[-1]).bit_length() + 1)]
    counts = np.diff(np.searchsorted(sorted_lengths_D, borders)).tolist()
    rows = [(low, high - 1, count) for (low, high), count in zip(pairwise(borders), counts, strict=True)]
    while rows and not rows[0][2]:
        rows.pop(0)
    return rows
