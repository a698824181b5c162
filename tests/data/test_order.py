from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecard.data.order import LARGEST_N, finalize_array, mix64, permute


@pytest.mark.parametrize("n", [*range(1, 130), 255, 256, 257, 1000, 1023, 1025, 4095, 4096, 4097, 70_001])
def test_every_place_is_taken_once(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key=n * 31)), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_bijection_for_any_size_and_key(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(5000, LARGEST_N), key=st.integers(0, 2**64 - 1), first=st.integers(0, 2**62))
def test_large_sizes_stay_inside_and_never_collide(n: int, key: int, first: int) -> None:
    index_N = np.unique((first + np.arange(2000)) % n)
    place_N = permute(index_N, n, key)
    assert place_N.min() >= 0
    assert place_N.max() < n
    assert len(np.unique(place_N)) == len(index_N)


def test_depends_on_position_only_not_on_the_call() -> None:
    whole_N = permute(np.arange(1000), 1000, key=5)
    assert np.array_equal(np.concatenate([permute([i], 1000, key=5) for i in range(1000)]), whole_N)


def test_order_is_stable_across_releases() -> None:
    """Runs are continued by later versions: these numbers must never change."""
    assert mix64(1, 2, 3) == 0xC80B70FCE3E26B92
    assert permute(np.arange(8), 1000, key=42).tolist() == [633, 317, 676, 20, 140, 526, 67, 127]


def test_looks_shuffled() -> None:
    n = 10_000
    place_N = permute(np.arange(n), n, key=7).astype(float)
    serial = np.corrcoef(place_N[:-1], place_N[1:])[0, 1]
    along = np.corrcoef(np.arange(n), place_N)[0, 1]
    fixed = int((place_N == np.arange(n)).sum())
    assert abs(serial) < 0.05
    assert abs(along) < 0.05
    assert fixed < 10


@pytest.mark.parametrize("n", [2, 3, 5, 10, 17])
def test_first_place_is_uniform_across_keys(n: int) -> None:
    keys = 2000
    counts_N = np.bincount([int(permute([0], n, mix64(key))[0]) for key in range(keys)], minlength=n)
    expected = keys / n
    chi_square = float(((counts_N - expected) ** 2 / expected).sum())
    # Mean n - 1, standard deviation sqrt(2(n - 1)); five of them away does not happen by chance.
    assert chi_square < (n - 1) + 5 * np.sqrt(2 * (n - 1)) + 5


def test_neighbouring_keys_give_unrelated_orders() -> None:
    n = 5000
    same = int((permute(np.arange(n), n, 1) == permute(np.arange(n), n, 2)).sum())
    assert same < 10


def test_mix64_separates_its_parts() -> None:
    values = {mix64(*parts) for parts in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2**64 - 2,)]}
    assert len(values) == 8
    assert all(0 <= value < 2**64 for value in values)


def test_finalizer_is_a_bijection_on_samples() -> None:
    words_N = np.arange(100_000, dtype=np.uint64)
    assert len(np.unique(finalize_array(words_N))) == len(words_N)
