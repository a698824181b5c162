"""Dropout whose masks are a function of (sequence, place in the model), not of a global generator.

However a step is split into micro-batches, the same values are dropped. A resumed run drops what it
would have dropped, and recomputation needs no generator state. The masks are hashed from counters with
plain integer operations: the same code runs eager, compiled, on the CPU and on the GPU (where the
compiler fuses it into the neighbouring operation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Below 2**31, so that it is an int32 scalar; arithmetic wraps around, as it does on every device.
_MULTIPLIER = 0x045D9F3B
_SITE_STRIDE = 0x1E3779B1
_LAYER_STRIDE = 0x2C1B3C6D


@dataclass(frozen=True)
class DropoutKeys:
    """One 32-bit key per sequence of the micro-batch. Every site derives a stream of its own from it."""

    keys_B: Tensor  # int32
    probability: float

    def for_layers(self, n_layer: int) -> list[DropoutKeys]:
        """Other keys for every layer, so that a layer's sites can be constants.

        If sites were numbered through all layers, the compiler would compile every layer again, then
        give up and run the rest eager.
        """
        keys_LB = keys_for_layers(self.keys_B, n_layer)
        return [DropoutKeys(keys_B, self.probability) for keys_B in keys_LB]

    def apply(self, x: Tensor, site: int) -> Tensor:
        """Drop values of x (batch first), scaling what stays by 1/(1-p)."""
        kept = keep_mask(self.keys_B, tuple(x.shape[1:]), self.probability, site)
        return x * kept.to(x.dtype) * (1.0 / (1.0 - self.probability))


def keys_for_layers(keys_B: Tensor, n_layer: int) -> Tensor:
    """(L, B): different keys for every layer."""
    number_L = torch.arange(1, n_layer + 1, device=keys_B.device, dtype=torch.int32)
    return _scramble(keys_B[None, :] * _LAYER_STRIDE + number_L[:, None])


def keep_mask(keys_B: Tensor, shape: tuple[int, ...], probability: float, site: int) -> Tensor:
    """Boolean (B, *shape), True with chance 1 - probability; depends on key, site and position alone."""
    counter = torch.arange(math.prod(shape), device=keys_B.device, dtype=torch.int32)
    stream_B = _scramble(keys_B * _SITE_STRIDE + site)
    bits = _scramble(counter[None, :] ^ stream_B[:, None])
    return (bits >= int(probability * 2**32) - 2**31).view(keys_B.shape[0], *shape)


def _scramble(x: Tensor) -> Tensor:
    """A 32-bit mixing function (xorshift-multiply, three rounds), overwriting x.

    In place because, eager on the CPU, new memory would cost most of the time; compiled, the whole
    function is one pass anyway. The mask after >> makes the arithmetic shift a logical one.
    """
    for _ in range(3):
        x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MULTIPLIER)
    return x
