"""Stochastic rounding to bf16: up with the probability of the fraction that is cut off.

With rounding to nearest, additions smaller than half a step of bf16 would be lost every time, however many
there are. Stochastic rounding keeps them on average.

The noise is hashed from (key, place), not drawn from a generator: a resumed run rounds the same, and so does
one that cuts a buffer into other pieces.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Below 2**31, so that it is an int32 scalar; arithmetic wraps around, as it does on every device.
_MULTIPLIER = 0x045D9F3B


def accumulate_bf16_(accumulator: Tensor, addend: Tensor, key: Tensor, first: Tensor | int) -> None:
    """accumulator += addend, where the accumulator is bf16 and the addend may be far below its last bit."""
    noise = noise_bits(accumulator.numel(), key, first, accumulator.device).view_as(accumulator)
    accumulator.copy_(round_to_bf16(accumulator.float() + addend.float(), noise))


def round_to_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """fp32 to bf16, to one of the two nearest, so that the mean over noise is x. Uses the low 16 bits."""
    # bf16 is the upper half of an fp32. Noise added to the lower half carries into the upper one with the
    # probability of the fraction that is cut off, away from zero for either sign.
    carried = (x.view(torch.int32) + (noise & 0xFFFF)) & -0x10000
    # A carry would turn some NaNs into infinity or zero.
    return torch.where(x.isfinite(), carried.view(torch.float32), x).to(torch.bfloat16)


def noise_key(seed: int, step: int, stream: int = 0) -> int:
    """An int32 key for the noise of one step. Other roundings within the step have other streams."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def noise_bits(n: int, key: Tensor, first: Tensor | int, device: torch.device) -> Tensor:
    """32 random bits (as int32) for each of the elements first ... first + n - 1 of the flat buffer.

    Elements 2**32 apart share their bits, which does no harm.
    """
    begin = first.to(torch.int32) if isinstance(first, Tensor) else first
    x = (torch.arange(n, device=device, dtype=torch.int32) + begin) ^ key
    for _ in range(3):
        x = _fold(x) * _MULTIPLIER
    return _fold(x)


def _fold(x: Tensor) -> Tensor:
    """x with its upper half xored into the lower. The mask makes the arithmetic shift a logical one."""
    return x ^ ((x >> 16) & 0xFFFF)
