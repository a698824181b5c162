"""Muon: momentum whose update is made orthogonal, one matrix at a time.

An update with all singular values near one moves every direction of a matrix alike, where AdamW's is
dominated by a few. The orthogonal factor comes from a polynomial in the matrix itself, a handful of
matmuls in bf16; it need not be exact, and is not.

One matrix (or the three of a packed projection) at a time: a whole model stacked by shape, as others do
it, needs two more copies of its matrices for the duration of a step.

Momentum may be fp32, bf16 or int8 in blocks; low-bit storage is rounded stochastically, as in lowbit.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onecard.model.rounding import noise_bits, round_to_bf16
from onecard.optim.lowbit import BLOCK, Int8State, decode, encode_first

Momentum = Tensor | Int8State

# Five steps of x -> a x + b (x xᵀ) x + c (x xᵀ)² x. Newton-Schulz: the same odd quintic each time, steep at
# zero, as in Muon's first publication. Polar Express (arXiv 2505.16932): the best quintic for each step.
ITERATIONS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "newton-schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar-express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
# Polar Express diverges above one: room for the rounding of the norm in bf16.
_CUSHION = {"newton-schulz": 1.0, "polar-express": 1.02}


class MuonHyper(NamedTuple):
    """What changes from step to step, as 0-dim fp32 tensors on the device of the parameters."""

    grad_scale: Tensor  # the gradient is divided by it
    lr: Tensor
    weight_decay: Tensor
    momentum: Tensor


def orthogonalised(g_POI: Tensor, method: str = "polar-express") -> Tensor:
    """Near the orthogonal factor of each (O, I) matrix, in bf16 (float64 stays, for tests)."""
    x = g_POI if g_POI.dtype == torch.float64 else g_POI.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the products are then of the smaller side
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * _CUSHION[method] + 1e-7)
    for a, b, c in ITERATIONS[method]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def muon_matrix_(
    grad_OI: Tensor,
    master_OI: Tensor,
    momentum: Momentum,
    hyper: MuonHyper,
    key: Tensor,
    first: Tensor,
    *,
    parts: int = 1,
    method: str = "polar-express",
) -> None:
    """One step on one matrix, in place.

    `parts` matrices lie one below the other (queries, keys, values) and are made orthogonal apart.
    `master` is fp32 or bf16, `momentum` a tensor like it or an Int8State over its padded elements. The
    step is larger for tall matrices, by the root of rows over columns. `key` and `first` choose the
    noise of low-bit storage, as in lowbit.adamw_chunk_.
    """
    compute = torch.promote_types(master_OI.dtype, torch.float32)
    gradient_OI = grad_OI.to(compute) / hyper.grad_scale
    before_OI = _read(momentum, master_OI.shape, compute)
    average_OI = before_OI + (gradient_OI - before_OI) * (1 - hyper.momentum)
    # Nesterov's: as if the average had already taken the step it is about to take.
    ahead_OI = gradient_OI + (average_OI - gradient_OI) * hyper.momentum
    rows, columns = master_OI.shape[0] // parts, master_OI.shape[1]
    update_OI = orthogonalised(ahead_OI.view(parts, rows, columns), method).view(master_OI.shape).to(compute)
    stretch = max(1.0, rows / columns) ** 0.5

    weights_OI = master_OI.to(compute) * (1 - hyper.lr * hyper.weight_decay)
    weights_OI = weights_OI - hyper.lr * stretch * update_OI
    low_bit = master_OI.dtype == torch.bfloat16 or not _is_full(momentum)
    noise = noise_bits(_padded(master_OI.numel()), key, first, master_OI.device) if low_bit else None
    if master_OI.dtype == torch.bfloat16:
        assert noise is not None
        weights_OI = round_to_bf16(weights_OI, noise[: master_OI.numel()].view(master_OI.shape))
    master_OI.copy_(weights_OI)
    _write(momentum, average_OI, noise)


def _is_full(momentum: Momentum) -> bool:
    return isinstance(momentum, Tensor) and momentum.dtype != torch.bfloat16


def _padded(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


def _read(momentum: Momentum, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if isinstance(momentum, Int8State):
        return decode(momentum)[: shape.numel()].view(shape).to(dtype)
    return momentum.view(shape).to(dtype)


def _write(momentum: Momentum, average_OI: Tensor, noise: Tensor | None) -> None:
    count = average_OI.numel()
    if isinstance(momentum, Int8State):
        flat = torch.nn.functional.pad(average_OI.reshape(-1), (0, _padded(count) - count))
        state = encode_first(flat, noise)
        momentum.codes.copy_(state.codes.view_as(momentum.codes))
        momentum.scales.copy_(state.scales)
    elif momentum.dtype == torch.bfloat16:
        assert noise is not None
        # The upper half of the noise: the lower one rounds the weight.
        rounded = round_to_bf16(average_OI.reshape(-1), noise[:count] >> 16)
        momentum.view(-1).copy_(rounded)
    else:
        momentum.view(average_OI.shape).copy_(average_OI)
