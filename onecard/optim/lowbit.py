"""AdamW over a flat chunk of parameters that are stored in fewer bits than they are computed in.

Weights may be stored in bf16 and moments in int8 with one scale per block of 256. Both are rounded
stochastically (model/rounding.py): rounding to nearest would lose every update or decay smaller than half
a step of the storage.

Moments: a linear int8 code loses whatever is small compared with the largest value of its block; a second
moment rounded to zero then divides by eps. The codes therefore lie on a fourth-root scale: 127 steps reach
from the largest |m| of the block down to 4e-9 of it. A step is 3% of the value at the top, and 18% at a
thousandth of the top. The second moment spans twice as many decades, so its square root is coded, on the
same curve. A positive second moment never falls below the code whose root is as small as the smallest
first moment: an average that is not yet zero then never has a zero denominator.
docs/lessons.md has the measurements behind this choice.

Everything is plain arithmetic without branches on data: it runs eager on the CPU, and compiled it is one
pass over memory. What changes from step to step comes as 0-dim tensors, since a Python number would be
compiled in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onecard.arch.layout import BLOCK
from onecard.model.rounding import noise_bits, round_to_bf16

_FIRST_TOP = 127
_SECOND_TOP = 255
# The smallest root of a positive second moment is then (2/255)**4 of the largest in its block: about as small
# as the smallest first moment, (1/127)**4 of the largest.
_SECOND_LOWEST = 2
# A block whose largest value is below this counts as zero: a device that flushes subnormal numbers would
# divide by zero.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Int8State(NamedTuple):
    """A moment in 8 bits. Codes of the first (signed) moment are int8, those of the second uint8."""

    codes: Tensor  # (n,) or (n / BLOCK, BLOCK), int8 or uint8
    scales: Tensor  # (n / BLOCK,), fp32: the largest |first moment|, or root of a second, of the block


class Hyper(NamedTuple):
    """AdamW's numbers of one step, as 0-dim fp32 tensors on the device of the parameters."""

    grad_scale: Tensor  # the gradient is divided by it
    lr: Tensor
    weight_decay: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    bias_correction1: Tensor  # 1 - beta1**step
    bias_correction2: Tensor  # 1 - beta2**step


def adamw_chunk_(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor | Int8State,
    exp_avg_sq: Tensor | Int8State,
    hyper: Hyper,
    key: Tensor,
    first: Tensor,
) -> None:
    """One step of torch.optim.AdamW, in place, on n parameters (a multiple of BLOCK).

    `grad` and `master` are fp32 or bf16, the moments fp32 or Int8State, in any combination (or float64,
    all of them). `key` is noise_key's number of this step as a 0-dim int32 tensor; `first` is where in
    the flat buffer the chunk begins, 0-dim int64 or int32.

    Tensors of n values may be (n,) or (n / BLOCK, BLOCK). Compiled, use the latter, which is one kernel: with
    (n,) the compiler copies every result to its place in a separate kernel.
    """
    compute = torch.promote_types(master.dtype, torch.float32)
    # Everything is in blocks: tensors must have one shape to be computed in one kernel.
    noise = _in_blocks(noise_bits(master.numel(), key, first, master.device))

    gradient = _in_blocks(grad).to(compute) * hyper.grad_scale.reciprocal()
    # Not beta * old + (1 - beta) * new: 1 - 0.999 has an error of 1e-5 in fp32, and only in this form does
    # the average still converge to the right value.
    m = decoded_blocks(exp_avg, compute)
    m = m + (gradient - m) * (1 - hyper.beta1)
    v = decoded_blocks(exp_avg_sq, compute)
    v = v + (gradient * gradient - v) * (1 - hyper.beta2)

    denominator = v.sqrt() * hyper.bias_correction2.rsqrt() + hyper.eps
    weights = _in_blocks(master).to(compute) * (1 - hyper.lr * hyper.weight_decay)
    weights = weights - (hyper.lr / hyper.bias_correction1) * (m / denominator)

    if master.dtype == torch.bfloat16:
        weights = round_to_bf16(weights, noise)
    _in_blocks(master).copy_(weights)
    _store_(exp_avg, m, noise)
    _store_(exp_avg_sq, v, noise)


def encode_first(exp_avg: Tensor, noise: Tensor | None = None) -> Int8State:
    """(n,) to int8, unbiased over noise (32 bits per element, from noise_bits) or to the nearest code."""
    blocks = _in_blocks(exp_avg).float()
    threshold = None if noise is None else _threshold(noise, bits=8)
    codes, scales = _encode_magnitude(blocks.abs(), _FIRST_TOP, threshold)
    return Int8State((codes * blocks.sign()).to(torch.int8).view(-1), scales)


def encode_second(exp_avg_sq: Tensor, noise: Tensor | None = None) -> Int8State:
    """(n,), none negative, to uint8. Over noise the square root is unbiased, because updates use it."""
    blocks = _in_blocks(exp_avg_sq).float()
    # A decay of 1 - 0.999 moves a code below 16 by less than 1/512: 8 bits of noise are too coarse for that.
    # The lower 8 of these 16 bits are the first moment's noise too, but they seldom decide here.
    threshold = None if noise is None else _threshold(noise, bits=16)
    codes, scales = _encode_magnitude(blocks.sqrt(), _SECOND_TOP, threshold)
    codes = torch.where(blocks > 0, codes.clamp_min(_SECOND_LOWEST), codes)
    return Int8State(codes.to(torch.uint8).view(-1), scales)


def decode(state: Int8State) -> Tensor:
    """The moment in fp32, as (n,)."""
    return decoded_blocks(state, torch.float32).view(-1)


def decoded_blocks(moment: Tensor | Int8State, dtype: torch.dtype) -> Tensor:
    """The moment as (n / BLOCK, BLOCK), in whatever format it is stored."""
    if isinstance(moment, Tensor):
        return _in_blocks(moment).to(dtype)
    codes, scales = _in_blocks(moment.codes).float(), moment.scales[:, None]
    if moment.codes.dtype == torch.uint8:
        return (_curve(codes, _SECOND_TOP) * scales).square().to(dtype)
    return (codes.sign() * _curve(codes, _FIRST_TOP) * scales).to(dtype)


def _store_(moment: Tensor | Int8State, blocks: Tensor, noise: Tensor) -> None:
    if isinstance(moment, Tensor):
        _in_blocks(moment).copy_(blocks)
        return
    encode = encode_second if moment.codes.dtype == torch.uint8 else encode_first
    codes, scales = encode(blocks, noise)
    moment.codes.copy_(codes.view_as(moment.codes))
    moment.scales.copy_(scales)


def _encode_magnitude(blocks: Tensor, top: int, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes 0 ... top (as fp32) and the scales of values that are not negative."""
    peak = blocks.amax(dim=1, keepdim=True)
    scales = torch.where(peak >= _SMALLEST_SCALE, peak, 0.0)
    fraction = blocks * torch.where(scales > 0, scales, 1.0).reciprocal()
    # The fourth root. On a GPU rsqrt is one instruction and sqrt several, which would dominate this kernel.
    place = fraction.rsqrt().rsqrt() * top
    if threshold is None:
        codes = (place + 0.5).floor().clamp_max(top)
    else:
        # The chance of the upper code is linear in the value, not in the code, or the mean would be off.
        lower = place.floor().clamp_max(top - 1)
        below, above = _curve(lower, top), _curve(lower + 1, top)
        codes = lower + (fraction - below > threshold * (above - below)).float()
    return codes, scales.view(-1)


def _curve(codes: Tensor, top: int) -> Tensor:
    """The fraction of its block's scale that a code stands for, without the sign."""
    return (codes / top).square().square()


def _threshold(noise: Tensor, bits: int) -> Tensor:
    """Uniform in (0, 1) from the upper half of noise: from its low 8 bits or from all 16."""
    # The half excludes 0 and 1: a value that equals a code up to fp32's rounding keeps that code.
    half = _in_blocks(noise) >> 16
    return ((half & (2**bits - 1)).float() + 0.5) * 2.0**-bits


def _in_blocks(x: Tensor) -> Tensor:
    if x.numel() % BLOCK:
        raise ValueError(f"{x.numel()} elements are not a multiple of {BLOCK}")
    return x.view(-1, BLOCK)
