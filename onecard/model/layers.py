"""The operations of a layer, each with an explicit backward pass.

A backward pass returns the gradient of its input and adds those of its weights to their accumulators (`acc`).
Norms compute in fp32 (or wider, where the input is); matmuls in the dtype of their weights.

Shapes: B sequences, T tokens, N = B×T rows, H heads, Q channels per head, O outputs, I inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.model.accumulate import add_outer, add_to

aten = torch.ops.aten

LAYER_NORM_EPSILON = 1e-5
# More elements than any matrix has, so that no two matrices of a layer share noise.
_SITE_STRIDE = 2**28


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in the dtype of the weight."""
    x = x.to(weight_OI.dtype)
    return F.linear(x, weight_OI, None if bias_O is None else bias_O.to(x.dtype))


def linear_backward(
    dout: Tensor, x: Tensor, weight_OI: Tensor, acc_OI: Tensor, bias_acc_O: Tensor | None,
    noise_key: Tensor | None, site: int,
) -> Tensor:  # fmt: skip
    """The gradient of x. `site` is the matrix's number within its layer."""
    rows_NO = dout.reshape(-1, dout.shape[-1])
    add_outer(acc_OI, rows_NO, x.reshape(-1, x.shape[-1]), noise_key, site * _SITE_STRIDE)
    if bias_acc_O is not None:
        add_to(bias_acc_O, rows_NO.sum(0, dtype=bias_acc_O.dtype))
    return (rows_NO @ weight_OI).view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The norm in fp32, and the statistics its backward pass needs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    n, mean, rstd = aten.native_layer_norm(
        x.to(wide), weight.shape, weight.to(wide), None if bias is None else bias.to(wide), LAYER_NORM_EPSILON
    )
    return n, (mean, rstd)


def layer_norm_backward(
    dn: Tensor, x: Tensor, stats: tuple[Tensor, Tensor], weight: Tensor, bias: Tensor | None,
    weight_acc: Tensor, bias_acc: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of x in fp32: the caller adds that of the residual path before it rounds."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dx, dweight, dbias = aten.native_layer_norm_backward(
        dn.to(wide), x.to(wide), weight.shape, *stats, weight.to(wide),
        None if bias is None else bias.to(wide), [True, True, bias is not None],
    )  # fmt: skip
    add_to(weight_acc, dweight)
    if bias_acc is not None:
        add_to(bias_acc, dbias)
    return dx


# What torch's rms_norm adds under the root for every input it computes in fp32.
RMS_EPSILON = torch.finfo(torch.float32).eps


def rms_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """x divided by its root mean square along the last dimension, in fp32, and the factor applied."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if torch.compiler.is_compiling():
        x = x.to(wide)
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_EPSILON)
    else:
        # Nothing is fused: without a wide copy and its squares a third of the bytes is moved.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        factor = torch.rsqrt(norm.square() / x.shape[-1] + RMS_EPSILON)
    return x * factor, factor


def rms_norm_backward(dn: Tensor, n: Tensor, factor: Tensor) -> Tensor:
    """The gradient of x from the norm's result, in fp32."""
    dn = dn.to(n.dtype)
    along = (dn * n).mean(-1, keepdim=True)
    if torch.compiler.is_compiling():
        return factor * (dn - n * along)
    return torch.addcmul(dn, n, along, value=-1).mul_(factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of the last dimension, whose halves are the two coordinates.

    The angle is negative, as in nanochat. With -sin it is the inverse, which is also the backward pass.
    """
    first, second = x.chunk(2, dim=-1)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    # Nothing is fused: each half is written directly, without temporaries and without a final copy.
    rotated = torch.empty(x.shape, dtype=torch.result_type(x, cos), device=x.device)
    one, other = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=one).addcmul_(second, sin)
    torch.mul(second, cos, out=other).addcmul_(first, sin, value=-1)
    return rotated


def heads(qkv_BTE: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a packed projection as queries, keys and values, (B, H, T, Q)."""
    B, T, E = qkv_BTE.shape
    q, k, v = qkv_BTE.view(B, T, 3, n_head, E // 3 // n_head).permute(2, 0, 3, 1, 4)
    return q, k, v


def merged(y_BHTQ: Tensor) -> Tensor:
    """The heads joined: (B, T, D)."""
    B, H, T, Q = y_BHTQ.shape
    return y_BHTQ.transpose(1, 2).reshape(B, T, H * Q)


def split_heads(y_BTD: Tensor, n_head: int) -> Tensor:
    """The reverse of `merged`: a (B, H, T, Q) view."""
    B, T, D = y_BTD.shape
    return y_BTD.view(B, T, n_head, D // n_head).transpose(1, 2)


class LayerCache:
    """Keys and values of the tokens already seen by one layer, for decoding."""

    def __init__(self, size: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.k_BHTQ = torch.empty(size, device=device, dtype=dtype)
        self.v_BHTQ = torch.empty(size, device=device, dtype=dtype)
        self.length = 0
        self.last_B1: Tensor | None = None  # the last token itself, for architectures that read it

    def append(self, k_BHTQ: Tensor, v_BHTQ: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values in the cache, with these added to it."""
        end = self.length + k_BHTQ.shape[2]
        self.k_BHTQ[:, :, self.length : end] = k_BHTQ
        self.v_BHTQ[:, :, self.length : end] = v_BHTQ
        self.length = end
        return self.k_BHTQ[:, :, :end], self.v_BHTQ[:, :, :end]

    def take(self, other: LayerCache) -> None:
        """Begin as a copy of another cache; one sequence there is copied to all sequences here."""
        self.append(other.k_BHTQ, other.v_BHTQ)
        if other.last_B1 is not None:
            self.last_B1 = other.last_B1.expand(len(self.k_BHTQ), 1)
