"""Causal attention with an explicit backward pass, so that the block decides what is saved.

The kernels are PyTorch's own. They are called below autograd, because a block saves the packed queries,
keys and values itself. A kernel adds only its output and one log-sum-exp per token and head to what is
saved. Which kernel is fastest depends on card, dtype and head size: `fastest_kernel` measures.

With a `window` a query sees itself and that many keys before it; without one, all keys before it.

Shapes: B sequences, H heads, T tokens, Q channels per head.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from onecard.model.dropout import keep_mask

aten = torch.ops.aten

# In order of preference where the measured times are about equal.
GPU_KERNELS = ("cudnn", "flash", "efficient")
WINDOWED_GPU_KERNELS = ("flash", "efficient")
_REPEATS = 8
_TIE = 1.05


def attend(
    kernel: str, q_BHTQ: Tensor, k_BHTQ: Tensor, v_BHTQ: Tensor, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, Q) and the log-sum-exp that its backward pass needs (empty for `open`)."""
    q, k, v = (_with_whole_rows(t) for t in (q_BHTQ, k_BHTQ, v_BHTQ))
    window = _limiting(window, q)
    if window is not None and kernel == "cpu":
        mask_TT = _added_mask(q, window)
        y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask_TT)
    elif window is not None and kernel != "open":
        assert kernel in WINDOWED_GPU_KERNELS, f"{kernel} attention has no windows"
        y, lse = torch.ops.onecard.attend_window(kernel, *_heads_inside(q, k, v), window)
        y = y.transpose(1, 2)
    elif kernel == "cpu":
        y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    elif kernel == "flash":
        y, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    elif kernel == "cudnn":
        y, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    elif kernel == "efficient":
        y, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    else:
        y, lse = attend_in_the_open(q, k, v, window=window), q.new_empty(0)
    return y, lse


def attend_backward(
    kernel: str, dy_BHTQ: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values."""
    T = q.shape[2]
    dy_BHTQ, q, k, v, y = (_with_whole_rows(t) for t in (dy_BHTQ, q, k, v, y))
    window = _limiting(window, q)
    if window is not None and kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy_BHTQ, q, k, v, y, lse, 0.0, False, attn_mask=_added_mask(q, window)
        )
    if window is not None and kernel != "open":
        inside = _heads_inside(dy_BHTQ, q, k, v, y)
        dq, dk, dv = torch.ops.onecard.attend_window_backward(kernel, *inside, lse, window)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy_BHTQ, q, k, v, y, lse, 0.0, True)
    # Without dropout the kernels do not read the generator state that they take.
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
    return attend_in_the_open_backward(dy_BHTQ, q, k, v, window=window)


def _with_whole_rows(t_BHTQ: Tensor) -> Tensor:
    """The tensor with contiguous channels. The kernels rely on it, and below autograd nothing checks it."""
    return t_BHTQ if t_BHTQ.stride(-1) == 1 else t_BHTQ.contiguous()


def _limiting(window: int | None, q_BHTQ: Tensor) -> int | None:
    """The window, or None where it hides nothing: the last of T queries has T - 1 keys before it."""
    return None if window is None or window >= q_BHTQ.shape[2] - 1 else window


def hidden_keys(length: int, window: int | None, device: torch.device) -> Tensor:
    """(T, T), True where a query does not see a key."""
    all_TT = torch.ones(length, length, dtype=torch.bool, device=device)
    hidden_TT = all_TT.triu(1)
    return hidden_TT if window is None else hidden_TT | all_TT.tril(-window - 1)


def _added_mask(q_BHTQ: Tensor, window: int) -> Tensor:
    T = q_BHTQ.shape[2]
    return q_BHTQ.new_zeros(T, T).masked_fill(hidden_keys(T, window, q_BHTQ.device), float("-inf"))


def _heads_inside(*tensors_BHTQ: Tensor) -> tuple[Tensor, ...]:
    """(B, T, H, Q), as the kernels below PyTorch's own dispatch take them."""
    return tuple(t.transpose(1, 2) for t in tensors_BHTQ)


# Custom operators: PyTorch's shape function for one of these kernels ignores windows and fails under the
# compiler (2.13). Gradients and outputs are (B, T, H, Q) and dense, whatever the inputs are.
_LIBRARY: Any = torch.library.Library("onecard", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("attend_window(str kernel, Tensor q, Tensor k, Tensor v, int window) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attend_window_backward(str kernel, Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, "
    "int window) -> (Tensor, Tensor, Tensor)"
)
_CAUSAL = 1  # the efficient kernel's number for a causal mask from the top left


def _attend_window(kernel: str, q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    if kernel == "flash":
        y, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, T, T, 0.0, True, False, window_size_left=window, window_size_right=0
        )
    else:
        # This kernel counts the query's own key with its window.
        y, lse, *_ = aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.0, _CAUSAL, True, window_size=window + 1
        )
    return y.contiguous(), lse


def _attend_window_backward(
    kernel: str, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    T = q.shape[1]
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    if kernel == "flash":
        grads = aten._flash_attention_backward(
            dy, q, k, v, y, lse, None, None, T, T, 0.0, True, unused, unused,
            window_size_left=window, window_size_right=0,
        )  # fmt: skip
    else:
        *grads, _ = aten._efficient_attention_backward(
            dy, q, k, v, None, y, None, None, T, T, lse, 0.0, unused, unused, _CAUSAL, False,
            window_size=window + 1,
        )  # fmt: skip
    dq, dk, dv = (g.contiguous() for g in grads)
    return dq, dk, dv


def _fake_attend_window(kernel: str, q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    rows = T if kernel == "flash" else -(-T // 32) * 32  # the efficient kernel pads its log-sums
    return q.new_empty(q.shape), q.new_empty(B, H, rows, dtype=torch.float32)


def _fake_attend_window_backward(
    kernel: str, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_LIBRARY.impl("attend_window", _attend_window, "CUDA")
_LIBRARY.impl("attend_window_backward", _attend_window_backward, "CUDA")
torch.library.register_fake("onecard::attend_window", _fake_attend_window)
torch.library.register_fake("onecard::attend_window_backward", _fake_attend_window_backward)


def attend_in_the_open(
    q_BHTQ: Tensor,
    k_BHTQ: Tensor,
    v_BHTQ: Tensor,
    keys_B: Tensor | None = None,
    dropout: float = 0.0,
    site: int = 0,
    window: int | None = None,
) -> Tensor:
    """Attention with all T×T weights in memory: for dropout, whose mask per weight the fused kernels do
    not take, and for head sizes that no kernel supports."""
    kept_BHTT = _weights(q_BHTQ, k_BHTQ, window) * _mask(q_BHTQ, keys_B, dropout, site)
    return kept_BHTT.to(v_BHTQ.dtype) @ v_BHTQ


def attend_in_the_open_backward(
    dy_BHTQ: Tensor,
    q_BHTQ: Tensor,
    k_BHTQ: Tensor,
    v_BHTQ: Tensor,
    keys_B: Tensor | None = None,
    dropout: float = 0.0,
    site: int = 0,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. The weights are recomputed, so that nothing T×T is saved."""
    weights_BHTT = _weights(q_BHTQ, k_BHTQ, window)
    mask_BHTT = _mask(q_BHTQ, keys_B, dropout, site)
    dv = (weights_BHTT * mask_BHTT).to(dy_BHTQ.dtype).transpose(-2, -1) @ dy_BHTQ
    dweights_BHTT = (dy_BHTQ @ v_BHTQ.transpose(-2, -1)).to(weights_BHTT.dtype) * mask_BHTT
    rows_BHT1 = (dweights_BHTT * weights_BHTT).sum(-1, keepdim=True)
    dscores_BHTT = weights_BHTT * (dweights_BHTT - rows_BHT1) / math.sqrt(q_BHTQ.shape[-1])
    dscores_BHTT = dscores_BHTT.to(q_BHTQ.dtype)
    return dscores_BHTT @ k_BHTQ, dscores_BHTT.transpose(-2, -1) @ q_BHTQ, dv


def _weights(q_BHTQ: Tensor, k_BHTQ: Tensor, window: int | None) -> Tensor:
    """Softmax of the causal scores, in fp32 (or wider, where the inputs are)."""
    T, Q = q_BHTQ.shape[-2:]
    scores_BHTT = (q_BHTQ @ k_BHTQ.transpose(-2, -1)) / math.sqrt(Q)
    hidden_TT = hidden_keys(T, window, q_BHTQ.device)
    wide = torch.promote_types(scores_BHTT.dtype, torch.float32)
    return scores_BHTT.to(wide).masked_fill(hidden_TT, float("-inf")).softmax(-1)


def _mask(q_BHTQ: Tensor, keys_B: Tensor | None, dropout: float, site: int) -> Tensor | float:
    if keys_B is None:
        return 1.0
    _, H, T, _ = q_BHTQ.shape
    kept_BHTT = keep_mask(keys_B, (H, T, T), dropout, site)
    return kept_BHTT * (1.0 / (1.0 - dropout))


def usual_kernel(head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """A kernel that works, for callers that do not train and so do not measure."""
    if device.type == "cpu":
        return "cpu"
    # The fused kernel that runs on every card needs head sizes of whole 16 bytes, and has no float64.
    fits = device.type == "cuda" and dtype != torch.float64 and head_dim * dtype.itemsize % 16 == 0
    return "efficient" if fits else "open"


def fastest_kernel(
    batch: int, n_head: int, block: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[str, dict[str, float]]:
    """The kernel to train with, and the milliseconds of every kernel that runs here (on a GPU)."""
    if not device.startswith("cuda"):
        return "cpu", {}
    # A few sequences are enough to rank the kernels, and leave memory for the run.
    sizes = (min(batch, 4), block, 3, n_head, head_dim)
    q, k, v = torch.randn(sizes, device=device).to(dtype).permute(2, 0, 3, 1, 4)
    dy = torch.randn_like(q)
    times: dict[str, float] = {}
    for kernel in GPU_KERNELS:
        try:
            times[kernel] = _milliseconds(kernel, dy, q, k, v)
        except torch.OutOfMemoryError:
            raise  # not a property of the kernel
        # A kernel that does not support this card, dtype or head size raises either of these.
        except (RuntimeError, NotImplementedError):
            continue
    if not times:
        return "open", times
    best = min(times.values())
    return next(kernel for kernel, taken in times.items() if taken <= _TIE * best), times


@functools.cache
def windowed_kernel(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel for layers with a window, where layers without compute with `kernel`.

    cuDNN's has no windows. Of the others the first that gives finite numbers here is taken, and remembered.
    """
    if kernel in ("cpu", "open"):
        return kernel
    for candidate in WINDOWED_GPU_KERNELS:
        try:
            q, k, v, dy = torch.randn(4, 1, 1, 64, head_dim, device=device).to(dtype)
            y, lse = attend(candidate, q, k, v, window=16)
            grads = attend_backward(candidate, dy, q, k, v, y, lse, window=16)
            if all(bool(g.isfinite().all()) for g in (y, *grads)):
                return candidate
        except torch.OutOfMemoryError:
            raise  # not a property of the kernel
        # A kernel that does not support this card, dtype or head size raises either of these.
        except (RuntimeError, NotImplementedError):
            continue
    return "open"


def _milliseconds(kernel: str, dy: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Time of forward and backward together, the median of a few runs."""
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
