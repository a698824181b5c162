"""A shuffle without a table: a keyed bijection on [0, n).

Position i of an epoch is computed, not looked up, so a run of any length needs no memory for its
order and can be continued from two integers. The bijection is a Feistel network on the smallest
even number of bits that holds n; results outside [0, n) are sent through again until they fall
inside (cycle walking), which keeps it a bijection for every n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_WORD = (1 << 64) - 1
# Few bits per half mix slowly; eight rounds make even n = 3 look uniform and cost microseconds.
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_A = 0xBF58476D1CE4E5B9
_MULTIPLIER_B = 0x94D049BB133111EB
LARGEST_N = 1 << 62


def _finalize(word: int) -> int:
    """SplitMix64's output function: a bijection on 64-bit words with full avalanche."""
    word = ((word ^ (word >> 30)) * _MULTIPLIER_A) & _WORD
    word = ((word ^ (word >> 27)) * _MULTIPLIER_B) & _WORD
    return word ^ (word >> 31)


def finalize_array(words_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`finalize` over a uint64 array (arrays wrap silently; numpy scalars would warn)."""
    words_N = (words_N ^ (words_N >> np.uint64(30))) * np.uint64(_MULTIPLIER_A)
    words_N = (words_N ^ (words_N >> np.uint64(27))) * np.uint64(_MULTIPLIER_B)
    return words_N ^ (words_N >> np.uint64(31))


def mix64(*parts: int) -> int:
    """One 64-bit key out of several integers; order and number of the parts matter."""
    word = _finalize(len(parts) * _GOLDEN & _WORD)
    for part in parts:
        word = _finalize(((word ^ (part & _WORD)) + _GOLDEN) & _WORD)
    return word


def permute(indices: ArrayLike, n: int, key: int) -> NDArray[np.int64]:
    """Where the keyed permutation of [0, n) sends each of `indices`."""
    assert 1 <= n <= LARGEST_N, n
    index_N = np.atleast_1d(np.asarray(indices, dtype=np.int64))
    assert index_N.size == 0 or (index_N.min() >= 0 and index_N.max() < n), "index outside [0, n)"
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    round_keys = [np.uint64(mix64(key, number)) for number in range(_ROUNDS)]

    place_N = _feistel(index_N.astype(np.uint64), half_bits, round_keys)
    outside_M = np.flatnonzero(place_N >= n)
    while outside_M.size:
        place_N[outside_M] = _feistel(place_N[outside_M], half_bits, round_keys)
        outside_M = outside_M[place_N[outside_M] >= n]
    return place_N.astype(np.int64)


def _feistel(value_N: NDArray[np.uint64], half_bits: int, round_keys: list[np.uint64]) -> NDArray[np.uint64]:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    # The finalizer's top bits are its best mixed ones.
    drop = np.uint64(64 - half_bits)
    left_N, right_N = value_N >> shift, value_N & mask
    for round_key in round_keys:
        left_N, right_N = right_N, left_N ^ (finalize_array(right_N ^ round_key) >> drop)
    return (left_N << shift) | right_N
