"""The allocator on paper keeps PyTorch's rules, and never loses or invents memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.plan.others.caching_allocator import MIB, Block, CachingAllocator, RanOutError


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 512, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # the end, of more than 1 MiB, is free for others
        (11 * MIB, 12 * MIB, 12 * MIB),  # the end of 1 MiB is not split off
    ],
)
def test_one_tensor(size: int, allocated: int, reserved: int) -> None:
    heap = CachingAllocator()
    heap.take("x", size)
    assert (heap.allocated, heap.reserved) == (allocated, reserved)


def test_free_blocks_are_used_again_and_joined() -> None:
    heap = CachingAllocator()
    segment = heap.take("x", 64 * MIB)
    heap.give_back(segment)
    parts = [heap.take("part", 16 * MIB) for _ in range(4)]
    assert heap.reserved == 64 * MIB
    heap.give_back(parts[1], parts[3], parts[0], parts[2])
    heap.take("whole", 64 * MIB)
    assert heap.reserved == heap.allocated == 64 * MIB


def test_a_small_tenant_makes_a_large_tensor_take_a_new_segment() -> None:
    """Why reserved memory is more than tensors: 62 MiB are free, 64 are wanted."""
    heap = CachingAllocator()
    heap.give_back(heap.take("x", 64 * MIB))
    heap.take("tenant", 2 * MIB)
    heap.take("large", 64 * MIB)
    assert heap.allocated == 66 * MIB and heap.reserved == 128 * MIB


def test_the_smallest_block_that_is_large_enough() -> None:
    heap = CachingAllocator()
    large, small = heap.take("x", 100 * MIB), heap.take("x", 50 * MIB)
    heap.give_back(large, small)
    heap.take("y", 40 * MIB)
    heap.take("y", 100 * MIB)  # untouched, so no new segment
    assert heap.reserved == 150 * MIB


def test_small_and_large_tensors_do_not_share_segments() -> None:
    heap = CachingAllocator()
    heap.give_back(heap.take("x", 64 * MIB))
    heap.take("small", 512)
    assert heap.reserved == 66 * MIB


def test_peak_remembers_what_was_alive_and_when() -> None:
    heap = CachingAllocator()
    heap.moment = "high"
    blocks = [heap.take("x", 4, MIB), heap.take("x", 4, MIB)]
    heap.moment = "low"
    heap.give_back(*blocks)
    heap.take("y", MIB)
    assert heap.peak_moment == "high"
    assert heap.alive_at_peak == {("x", (4, MIB)): 2}
    assert heap.alive == {("y", (MIB,)): 1}


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB)), max_size=80))
def test_books_balance(events: list[tuple[bool, int]]) -> None:
    heap = CachingAllocator()
    held: list[Block] = []
    for gives, size in events:
        if gives and held:
            heap.give_back(held.pop(size % len(held)))
        else:
            held.append(heap.take("x", size))
        assert heap.allocated == sum(block.size for block in held) <= heap.peak_allocated <= heap.reserved
        spans = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    heap.give_back(*held)
    assert heap.allocated == 0 and not heap.alive


def test_what_is_told_of_the_end_is_the_segment_as_pytorch_tells_it() -> None:
    heap = CachingAllocator(limit=30 * MIB)
    heap.take("large", 21 * MIB)
    with pytest.raises(RanOutError) as error:
        heap.take("small", 3 * MIB)
    assert (error.value.tried, error.value.tensor) == (20 * MIB, 3 * MIB)
    assert heap.retries == 1


def test_free_segments_go_back_and_used_ones_stay() -> None:
    heap = CachingAllocator(limit=100 * MIB)
    whole, cut = heap.take("whole", 30 * MIB), heap.take("cut", 40 * MIB)
    heap.give_back(whole, cut)
    kept = heap.take("kept", 20 * MIB)  # cut from the 30
    assert heap.reserved == 70 * MIB
    heap.take("new", 50 * MIB)  # for which the 40 have to go; the 30 cannot
    assert (heap.reserved, heap.retries) == (80 * MIB, 1)
    heap.give_back(kept)
    assert heap.peak_reserved == 80 * MIB
