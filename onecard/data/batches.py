"""Data is a function: which sequences a run sees depends on the seed and a count, nothing else.

Every epoch cuts the tokens into blocks at its own phase and visits each block once, in an order
computed by a keyed permutation. How calls are split, the batch size, and the number of threads do
not enter. Tokens appended to the file join with the next epoch.

Shape suffixes: B sequences, T block_size, L block_size + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onecard.data.bins import changed_under_run
from onecard.data.order import finalize_array, mix64, permute
from onecard.errors import UserError
from onecard.language import _

# Separate uses of one seed must not share keys.
_FOR_PHASE, _FOR_ORDER, _FOR_IDS, _FOR_EVALUATION = 1, 2, 3, 4
# An id packs epoch and index into 64 bits before mixing, so that no two sequences of a run share one.
_INDEX_BITS = 40


class TokenRow(Protocol):
    """What the functions below need of a token file."""

    def __len__(self) -> int: ...

    def gather(self, positions: ArrayLike, length: int) -> NDArray[np.int64]: ...

    def refresh(self) -> int: ...


@dataclass(frozen=True)
class DataState:
    """How far a run has read. `epoch_tokens` is fixed when an epoch begins, so growth cannot disturb it."""

    epoch: int
    index: int
    epoch_tokens: int
    sequences: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataState:
        names = [field.name for field in fields(cls)]
        bad = [name for name in names if type(values.get(name)) is not int or values[name] < 0]
        if bad:
            raise UserError(
                _("the saved data state is damaged: {bad} missing or not a number").format(bad=", ".join(bad))
            )
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True)
class Located:
    """Where a run's next sequences begin in the file, their ids, and the state after them."""

    positions: NDArray[np.int64]  # [B]
    ids: NDArray[np.uint64]  # [B]
    next_state: DataState


class Sequences:
    """The sequences of a run, by number."""

    def __init__(self, tokens: TokenRow, block_size: int, seed: int) -> None:
        assert block_size >= 1
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        if len(tokens) < block_size + 1:
            raise UserError(
                _("the data is too short for block_size {block_size}").format(block_size=block_size),
                _("it has {n:,} tokens; one block needs {block_size:,}").format(
                    n=len(tokens), block_size=block_size + 1
                ),
            )

    def start(self) -> DataState:
        return DataState(epoch=0, index=0, epoch_tokens=len(self.tokens), sequences=0)

    def phase(self, epoch: int, epoch_tokens: int) -> int:
        """Where the first block begins: another cut each epoch, so that block edges move through the text."""
        room = min(self.block_size, epoch_tokens - self.block_size)
        return mix64(self.seed, _FOR_PHASE, epoch) % room

    def n_blocks(self, epoch: int, epoch_tokens: int) -> int:
        return (epoch_tokens - 1 - self.phase(epoch, epoch_tokens)) // self.block_size

    def locate(self, state: DataState, count: int) -> Located:
        """Compute the next `count` sequences without reading them."""
        position_parts: list[NDArray[np.int64]] = []
        id_parts: list[NDArray[np.uint64]] = []
        for epoch, epoch_tokens, first, number in self._stretches(state, count):
            index_B = np.arange(first, first + number, dtype=np.int64)
            key = mix64(self.seed, _FOR_ORDER, epoch)
            block_B = permute(index_B, self.n_blocks(epoch, epoch_tokens), key)
            position_parts.append(self.phase(epoch, epoch_tokens) + block_B * self.block_size)
            id_parts.append(self._ids(epoch, index_B))
            state = DataState(epoch, first + number, epoch_tokens, state.sequences + number)
        if not position_parts:
            return Located(np.empty(0, np.int64), np.empty(0, np.uint64), state)
        return Located(np.concatenate(position_parts), np.concatenate(id_parts), state)

    def take(self, state: DataState, count: int) -> tuple[NDArray[np.int64], NDArray[np.uint64], DataState]:
        """The next sequences with their targets [count, T+1], their ids, and the state after them."""
        located = self.locate(state, count)
        tokens_BL = self.tokens.gather(located.positions, self.block_size + 1)
        return tokens_BL, located.ids, located.next_state

    def skip(self, state: DataState, count: int) -> DataState:
        """The state after `count` more sequences; costs one step per epoch, reads nothing."""
        for epoch, epoch_tokens, first, number in self._stretches(state, count):
            state = DataState(epoch, first + number, epoch_tokens, state.sequences + number)
        return state

    def _stretches(self, state: DataState, count: int) -> Iterator[tuple[int, int, int, int]]:
        """(epoch, epoch_tokens, first index, number) for each epoch the next `count` sequences touch."""
        assert count >= 0
        epoch, index, epoch_tokens = state.epoch, state.index, state.epoch_tokens
        self._check_length(epoch_tokens)
        while count:
            left = self.n_blocks(epoch, epoch_tokens) - index
            if left <= 0:
                # An epoch begins only when its first sequence is asked for: data may grow until then.
                epoch, index, epoch_tokens = epoch + 1, 0, self.tokens.refresh()
                self._check_length(max(epoch_tokens, state.epoch_tokens))
                continue
            number = min(count, left)
            yield epoch, epoch_tokens, index, number
            index += number
            count -= number

    def _check_length(self, need: int) -> None:
        have = len(self.tokens)
        if have < need or have < self.block_size + 1:
            raise changed_under_run(self.tokens, have, max(need, self.block_size + 1))

    def _ids(self, epoch: int, index_B: NDArray[np.int64]) -> NDArray[np.uint64]:
        assert epoch < 1 << (64 - _INDEX_BITS)
        secret = mix64(self.seed, _FOR_IDS)
        packed_B = index_B.astype(np.uint64) | np.uint64(epoch << _INDEX_BITS)
        return finalize_array(packed_B ^ np.uint64(secret))


@dataclass(frozen=True)
class FixedBlocks:
    """The blocks an evaluation reads: always the same ones, a larger count only adds to them."""

    tokens: TokenRow
    block_size: int
    positions: NDArray[np.int64]  # [B]

    def __len__(self) -> int:
        return len(self.positions)

    def first(self, count: int) -> FixedBlocks:
        """A smaller set, for a look."""
        return replace(self, positions=self.positions[:count])

    def gather(self, first: int, count: int) -> NDArray[np.int64]:
        """Blocks first..first+count with their targets: [count, T+1]."""
        return self.tokens.gather(self.positions[first : first + count], self.block_size + 1)

    def batches(self, micro_batch: int) -> Iterator[NDArray[np.int64]]:
        """All blocks, `micro_batch` at a time; the last may be smaller."""
        for first in range(0, len(self), micro_batch):
            yield self.gather(first, micro_batch)


def fixed_blocks(
    tokens: TokenRow, block_size: int, count: int, seed: int, n_tokens: int | None = None
) -> FixedBlocks:
    """The first `count` of all blocks at phase 0, in keyed order; fewer where the data has fewer.

    `n_tokens` pins the length the order is computed for: a run that remembers it keeps its
    evaluation set when the file grows.
    """
    n_blocks = ((len(tokens) if n_tokens is None else n_tokens) - 1) // block_size
    if n_blocks < 1:
        raise UserError(
            _("the evaluation data is too short for block_size {block_size}").format(block_size=block_size),
            _("it has {n:,} tokens; one block needs {block_size:,}").format(
                n=len(tokens), block_size=block_size + 1
            ),
        )
    if n_tokens is not None and n_tokens > len(tokens):
        raise changed_under_run(tokens, len(tokens), n_tokens)
    index_B = np.arange(min(count, n_blocks), dtype=np.int64)
    position_B = permute(index_B, n_blocks, mix64(seed, _FOR_EVALUATION)) * block_size
    return FixedBlocks(tokens, block_size, position_B)
