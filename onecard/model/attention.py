"""Causal attention with its backward pass in the open, so that the block can say what it saves.

The kernels are PyTorch's own. They are called below autograd because a block keeps the packed
queries, keys and values itself; all a kernel adds to what is saved is its output and one log-sum-exp
per token and head. Which kernel is fastest differs by card, dtype and head size: `fastest_kernel`
measures.

Shapes: B sequences, H heads, T tokens, Q channels per head.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from onecard.model.dropout import keep_mask

aten = torch.ops.aten

# In the order in which they are preferred when measuring does not tell them apart.
GPU_KERNELS = ("cudnn", "flash", "efficient")
_REPEATS = 8
_TIE = 1.05


def attend(kernel: str, q_BHTQ: Tensor, k_BHTQ: Tensor, v_BHTQ: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, Q) and the log-sum-exp that its backward pass needs (empty for `open`)."""
    q, k, v = (_with_whole_rows(t) for t in (q_BHTQ, k_BHTQ, v_BHTQ))
    if kernel == "cpu":
        y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    elif kernel == "flash":
        y, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    elif kernel == "cudnn":
        y, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    elif kernel == "efficient":
        y, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    else:
        y, lse = attend_in_the_open(q, k, v), q.new_empty(0)
    return y, lse


def attend_backward(
    kernel: str, dy_BHTQ: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    T = q.shape[2]
    dy_BHTQ, q, k, v, y = (_with_whole_rows(t) for t in (dy_BHTQ, q, k, v, y))
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy_BHTQ, q, k, v, y, lse, 0.0, True)
    # Without dropout the kernels do not look at the generator's state they ask for.
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention_backward(
            dy_BHTQ, q, k, v, y, lse, None, None, T, T, 0.0, True, unused, unused
        )
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(
            dy_BHTQ, q, k, v, y, lse, unused, unused, None, None, None, T, T, 0.0, True
        )
    if kernel == "efficient":
        wanted = [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dy_BHTQ, q, k, v, None, y, lse, unused, unused, 0.0, wanted, True
        )
        return dq, dk, dv
    return attend_in_the_open_backward(dy_BHTQ, q, k, v)


def _with_whole_rows(t_BHTQ: Tensor) -> Tensor:
    """Below autograd nobody checks strides, and the kernels read a head's channels as neighbours."""
    return t_BHTQ if t_BHTQ.stride(-1) == 1 else t_BHTQ.contiguous()


def attend_in_the_open(
    q_BHTQ: Tensor,
    k_BHTQ: Tensor,
    v_BHTQ: Tensor,
    keys_B: Tensor | None = None,
    dropout: float = 0.0,
    site: int = 0,
) -> Tensor:
    """Attention with all T×T weights in memory: for dropout, which has a mask per weight that cannot
    be handed to the fused kernels, and for head sizes no kernel takes."""
    kept_BHTT = _weights(q_BHTQ, k_BHTQ) * _mask(q_BHTQ, keys_B, dropout, site)
    return kept_BHTT.to(v_BHTQ.dtype) @ v_BHTQ


def attend_in_the_open_backward(
    dy_BHTQ: Tensor,
    q_BHTQ: Tensor,
    k_BHTQ: Tensor,
    v_BHTQ: Tensor,
    keys_B: Tensor | None = None,
    dropout: float = 0.0,
    site: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the weights again: T×T memory exists for one layer at a time, and nothing is saved."""
    weights_BHTT = _weights(q_BHTQ, k_BHTQ)
    mask_BHTT = _mask(q_BHTQ, keys_B, dropout, site)
    dv = (weights_BHTT * mask_BHTT).to(dy_BHTQ.dtype).transpose(-2, -1) @ dy_BHTQ
    dweights_BHTT = (dy_BHTQ @ v_BHTQ.transpose(-2, -1)).to(weights_BHTT.dtype) * mask_BHTT
    rows_BHT1 = (dweights_BHTT * weights_BHTT).sum(-1, keepdim=True)
    dscores_BHTT = weights_BHTT * (dweights_BHTT - rows_BHT1) / math.sqrt(q_BHTQ.shape[-1])
    dscores_BHTT = dscores_BHTT.to(q_BHTQ.dtype)
    return dscores_BHTT @ k_BHTQ, dscores_BHTT.transpose(-2, -1) @ q_BHTQ, dv


def _weights(q_BHTQ: Tensor, k_BHTQ: Tensor) -> Tensor:
    """Softmax of the causal scores, in fp32 (or wider, where the inputs are)."""
    T, Q = q_BHTQ.shape[-2:]
    scores_BHTT = (q_BHTQ @ k_BHTQ.transpose(-2, -1)) / math.sqrt(Q)
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTQ.device).triu(1)
    wide = torch.promote_types(scores_BHTT.dtype, torch.float32)
    return scores_BHTT.to(wide).masked_fill(future_TT, float("-inf")).softmax(-1)


def _mask(q_BHTQ: Tensor, keys_B: Tensor | None, dropout: float, site: int) -> Tensor | float:
    if keys_B is None:
        return 1.0
    _, H, T, _ = q_BHTQ.shape
    kept_BHTT = keep_mask(keys_B, (H, T, T), dropout, site)
    return kept_BHTT * (1.0 / (1.0 - dropout))


def usual_kernel(head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """One that works, for those who do not train and so do not measure."""
    if device.type == "cpu":
        return "cpu"
    # The fused kernel that every card has wants whole 16 bytes, and no float64.
    fits = device.type == "cuda" and dtype != torch.float64 and head_dim * dtype.itemsize % 16 == 0
    return "efficient" if fits else "open"


def fastest_kernel(
    batch: int, n_head: int, block: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[str, dict[str, float]]:
    """The kernel to train with, and the milliseconds of every one that runs here (on a GPU)."""
    if not device.startswith("cuda"):
        return "cpu", {}
    # A few sequences suffice to rank them and leave memory for what comes.
    sizes = (min(batch, 4), block, 3, n_head, head_dim)
    q, k, v = torch.randn(sizes, device=device).to(dtype).permute(2, 0, 3, 1, 4)
    dy = torch.randn_like(q)
    times: dict[str, float] = {}
    for kernel in GPU_KERNELS:
        try:
            times[kernel] = _milliseconds(kernel, dy, q, k, v)
        # A kernel this card, dtype or head size does not have refuses in its own way.
        except (RuntimeError, NotImplementedError):
            continue
    if not times:
        return "open", times
    best = min(times.values())
    return next(kernel for kernel, taken in times.items() if taken <= _TIE * best), times


def _milliseconds(kernel: str, dy: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Forward and backward together, the median of a few."""
    taken = []
    for _ in range(_REPEATS):
        start, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
        start.record()
        y, lse = attend(kernel, q, k, v)
        grads = attend_backward(kernel, dy, q, k, v, y, lse)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    if not all(bool(g.isfinite().all()) for g in (y, *grads)):
        raise RuntimeError(f"{kernel} attention gives numbers that are not finite")
    return statistics.median(taken[2:])
