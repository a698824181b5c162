"""Noise that is a function of its place, and rounding that is right on average."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.model.rounding import accumulate_bf16_, noise_bits, noise_key, round_to_bf16

CPU = torch.device("cpu")
BLOCK = 256
# Every value the 16 bits can take that round a weight.
ALL_LOW = torch.arange(2**16, dtype=torch.int32)


def keyed(key: int) -> Tensor:
    return torch.tensor(key, dtype=torch.int32)


def noise(n: int, key: int = 5, first: int = 0) -> Tensor:
    return noise_bits(n, keyed(key), torch.tensor(first), CPU)


def same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def random(n: int, seed: int, spread: float = 0.0) -> Tensor:
    """Normal values, each times its own scale, lognormal: `spread` 2 covers about six decades."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=rng) * (spread * torch.randn(n, generator=rng)).exp()


# ---- noise


def test_an_elements_noise_depends_on_its_place_in_the_buffer_and_not_on_the_chunk() -> None:
    for start in (0, 2**31 - 100, 2**33 + 5):
        parts = [noise(n, first=start + at) for at, n in ((0, 1), (1, 600), (601, 399))]
        assert torch.equal(noise(1000, first=start), torch.cat(parts))
    assert not torch.equal(noise(100, first=0), noise(100, first=1))


def test_noise_bits_are_fair_and_independent_of_the_neighbours_and_of_the_next_step() -> None:
    n = 2**16
    bits = [noise(n, noise_key(7, step)) for step in (1, 2)]
    pairs = {"alone": bits[0], "neighbour": bits[0] ^ bits[0].roll(1), "next step": bits[0] ^ bits[1]}
    for distance in (2, 8, 256):
        pairs[f"{distance} apart"] = bits[0] ^ bits[0].roll(distance)
    for name, value in pairs.items():
        ones = torch.stack([(value >> bit & 1).sum() for bit in range(32)])
        # Five standard deviations of a fair coin: of the 192 here, one in 9,000 such sets would exceed it.
        assert (ones - n / 2).abs().max() < 5 * math.sqrt(n / 4), name
    between = torch.stack([((bits[0] ^ bits[0] >> shift) & 1).sum() for shift in range(1, 32)])
    assert (between - n / 2).abs().max() < 5 * math.sqrt(n / 4)
    assert len(set(bits[0].tolist())) == n


def test_keys_fit_in_int32_repeat_and_are_all_different() -> None:
    places = list(itertools.product(range(10), range(50), range(3)))
    keys = [noise_key(*place) for place in places]
    assert keys == [noise_key(*place) for place in places]
    assert len(set(keys)) == len(keys)
    assert all(-(2**31) <= key < 2**31 for key in keys)
    assert min(keys) < -(2**30) and max(keys) > 2**30
    assert noise_key(1, 11) != noise_key(11, 1)


# ---- rounding to bf16


@settings(max_examples=60, deadline=None)
@given(st.floats(width=32, min_value=-(2.0**120), max_value=2.0**120))
def test_the_mean_over_all_noise_is_the_value_itself_and_only_neighbours_are_hit(value: float) -> None:
    rounded = round_to_bf16(torch.full((2**16,), value), ALL_LOW).double()
    # Each of the 65,536 outcomes has at most 8 significant bits: in double precision the sum is exact.
    assert rounded.mean().item() == value
    step = 2.0 ** (max(math.frexp(value)[1], -125) - 8)
    assert rounded.max() - rounded.min() <= step
    assert torch.equal(round_to_bf16(torch.full((2**16,), -value), ALL_LOW).double(), -rounded)


def test_rounding_with_the_hashed_noise_is_unbiased_too() -> None:
    n = 2**18
    value = 1.0 + 0.3 * 2**-7
    rounded = round_to_bf16(torch.full((n,), value), noise(n))
    deviation = 2**-7 * math.sqrt(0.3 * 0.7 / n)
    assert abs(rounded.double().mean().item() - value) < 5 * deviation


def test_what_bf16_can_hold_stays_and_so_do_infinities_and_nans() -> None:
    every_bf16 = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    for bits in (0, 1, 0x7FFF, 0xFFFF, -1):
        rounded = round_to_bf16(every_bf16, torch.full((2**16,), bits, dtype=torch.int32))
        assert torch.equal(rounded.isnan(), every_bf16.isnan())
        assert torch.equal(rounded.float().nan_to_num(0.0), every_bf16.nan_to_num(0.0))
    odd_nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert round_to_bf16(odd_nans, torch.full((4,), 0xFFFF, dtype=torch.int32)).isnan().all()


def test_a_thousand_tiny_addends_arrive_where_plain_bf16_drowns_them() -> None:
    n, addend = 4096, 2.0**-12
    accumulator, plain = torch.ones(n, dtype=torch.bfloat16), torch.ones(n, dtype=torch.bfloat16)
    for step in range(1000):
        accumulate_bf16_(accumulator, torch.full((n,), addend), keyed(noise_key(0, step)), torch.tensor(0))
        plain += addend
    assert (plain == 1).all()
    # Below 2 the last bit is 2**-7: each addition is then a coin of chance 2**-5, that adds 2**-7.
    deviation = 2**-7 * math.sqrt(1000 * 2**-5 * (1 - 2**-5))
    assert abs(accumulator.double().mean().item() - (1 + 1000 * addend)) < 5 * deviation / math.sqrt(n)
    assert accumulator.double().std().item() == pytest.approx(deviation, rel=0.1)


def test_accumulation_repeats_and_does_not_depend_on_the_chunks() -> None:
    addend = random(700, 1)
    accumulators = [torch.ones(700, dtype=torch.bfloat16) for _ in range(4)]
    accumulate_bf16_(accumulators[0], addend, keyed(3), torch.tensor(50))
    accumulate_bf16_(accumulators[1], addend, keyed(3), torch.tensor(50))
    accumulate_bf16_(accumulators[2][:301], addend[:301], keyed(3), torch.tensor(50))
    accumulate_bf16_(accumulators[2][301:], addend[301:], keyed(3), torch.tensor(351))
    accumulate_bf16_(accumulators[3], addend, keyed(4), torch.tensor(50))
    assert torch.equal(accumulators[0], accumulators[1])
    assert torch.equal(accumulators[0], accumulators[2])
    assert not torch.equal(accumulators[0], accumulators[3])
