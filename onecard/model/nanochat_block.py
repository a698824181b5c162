"""One layer of nanochat (October 2025), forward and backward, with an explicit list of what is saved.

Saved are the same ten values of width D as in GPT-2's layer (see gpt2_block.py): x, qkv, y, x_mid, h. Norms,
rotations, normed queries and keys and the squared ReLU are recomputed.

Shapes: B sequences, T tokens, D width, H heads, Q channels per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.model.attention import attend, attend_backward
from onecard.model.gpt2_block import SAVED_FIELDS as SAVED_FIELDS  # the same fields, saved alike
from onecard.model.gpt2_block import SavedActivations
from onecard.model.layers import (
    LayerCache,
    heads,
    linear,
    linear_backward,
    merged,
    rms_norm,
    rms_norm_backward,
    rotate,
    split_heads,
)


class BlockTensors(NamedTuple):
    """The weights of a layer (`w`), or their gradient accumulators (`acc`)."""

    c_attn_weight: Tensor  # queries, keys and values one below the other
    attn_c_proj_weight: Tensor
    c_fc_weight: Tensor
    mlp_c_proj_weight: Tensor


class BlockSpec(NamedTuple):
    """What is constant in all layers, and compiled in."""

    n_head: int
    attention: str  # a kernel of model/attention.py


class Angles(NamedTuple):
    """Rotary position embedding of some positions: (T, Q / 2) each, fp32."""

    cos: Tensor
    sin: Tensor

    def part(self, first: int, length: int) -> Angles:
        return Angles(self.cos[first : first + length], self.sin[first : first + length])


@torch.inference_mode(False)  # the model keeps them: training may use those first needed by a sample
def rotary_angles(length: int, head_dim: int, base: float, device: torch.device) -> Angles:
    """Angles of all positions. In float64 until the end: large positions lose digits in fp32."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle_TQ = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return Angles(angle_TQ.cos().float().to(device), angle_TQ.sin().float().to(device))


def block_forward(x_BTD: Tensor, w: BlockTensors, spec: BlockSpec, angles: Angles) -> tuple[Tensor, ...]:
    """The layer's output and, after it, all of SavedActivations but x, which the caller has."""
    saved = _all_saved((x_BTD,), w, spec, angles)
    return mlp_output(saved.x_mid_BTD, saved.h_BTF, w), *saved[1:]


def block_decode(
    x_BTD: Tensor, w: BlockTensors, spec: BlockSpec, angles: Angles, cache: LayerCache
) -> Tensor:
    """The layer's output for tokens that follow those in the cache. They are added to it."""
    fresh = cache.length == 0
    assert fresh or x_BTD.shape[1] == 1, "a cache grows by one prompt, then token by token"
    q, k, v = heads(linear(rms_norm(x_BTD)[0], w.c_attn_weight), spec.n_head)
    k, v = cache.append(_placed(k, angles), v)
    y_BHTQ = F.scaled_dot_product_attention(_placed(q, angles), k, v, is_causal=fresh)
    x_mid_BTD = attention_output(x_BTD, merged(y_BHTQ), w)
    return mlp_output(x_mid_BTD, hidden(x_mid_BTD, w), w)


def block_backward(
    dout_BTD: Tensor,
    saved_first: tuple[Tensor, ...],
    w: BlockTensors,
    acc: BlockTensors,
    spec: BlockSpec,
    angles: Angles,
    noise_key: Tensor | None,
) -> Tensor:
    """The gradient of x; those of the weights are added to their accumulators."""
    saved = _all_saved(saved_first, w, spec, angles)
    dtype = w.c_fc_weight.dtype

    dx_mid_BTD = mlp_backward(dout_BTD, saved, w, acc, noise_key)

    # Attention: x_mid = x + y @ W_proj
    dy_BTD = linear_backward(
        dx_mid_BTD.to(dtype), saved.y_BTD, w.attn_c_proj_weight, acc.attn_c_proj_weight, None, noise_key, 2
    )
    q, k, v = heads(saved.qkv_BTE, spec.n_head)
    dy_BHTQ, y_BHTQ = (split_heads(t, spec.n_head) for t in (dy_BTD, saved.y_BTD))
    dq, dk, dv = attend_backward(
        spec.attention, dy_BHTQ, _placed(q, angles), _placed(k, angles), v, y_BHTQ, saved.lse
    )
    dq, dk = _placed_backward(dq, q, angles), _placed_backward(dk, k, angles)
    dqkv_BTE = torch.cat([merged(g) for g in (dq, dk, dv)], dim=-1)
    n_BTD, factor = rms_norm(saved.x_BTD)
    dn_BTD = linear_backward(
        dqkv_BTE, n_BTD.to(dtype), w.c_attn_weight, acc.c_attn_weight, None, noise_key, 3
    )
    return (dx_mid_BTD + rms_norm_backward(dn_BTD, n_BTD, factor)).to(dout_BTD.dtype)


def _all_saved(
    first: tuple[Tensor, ...], w: BlockTensors, spec: BlockSpec, angles: Angles
) -> SavedActivations:
    """All fields: the first ones as given, the missing ones computed."""
    if len(first) == SAVED_FIELDS["none"]:
        return SavedActivations(*first)
    if len(first) == SAVED_FIELDS["mlp"]:
        x, qkv, y, lse, x_mid = first
        return SavedActivations(x, qkv, y, lse, x_mid, hidden(x_mid, w))
    (x_BTD,) = first
    qkv_BTE = linear(rms_norm(x_BTD)[0], w.c_attn_weight)
    q, k, v = heads(qkv_BTE, spec.n_head)
    y_BHTQ, lse = attend(spec.attention, _placed(q, angles), _placed(k, angles), v)
    y_BTD = merged(y_BHTQ)
    x_mid_BTD = attention_output(x_BTD, y_BTD, w)
    return SavedActivations(x_BTD, qkv_BTE, y_BTD, lse, x_mid_BTD, hidden(x_mid_BTD, w))


def _placed(q_BHTQ: Tensor, angles: Angles) -> Tensor:
    """Queries or keys at their positions: rotated, then normed, in their own dtype."""
    return rms_norm(rotate(q_BHTQ, *angles))[0].to(q_BHTQ.dtype)


def _placed_backward(dplaced_BHTQ: Tensor, q_BHTQ: Tensor, angles: Angles) -> Tensor:
    n_BHTQ, factor = rms_norm(rotate(q_BHTQ, *angles))
    return rotate(rms_norm_backward(dplaced_BHTQ, n_BHTQ, factor), angles.cos, -angles.sin).to(q_BHTQ.dtype)


def attention_output(x_BTD: Tensor, y_BTD: Tensor, w: BlockTensors) -> Tensor:
    """x_mid, the residual stream after attention."""
    return x_BTD + linear(y_BTD, w.attn_c_proj_weight).to(x_BTD.dtype)


def hidden(x_mid_BTD: Tensor, w: BlockTensors) -> Tensor:
    """h, the MLP's inner values before the squared ReLU."""
    return linear(rms_norm(x_mid_BTD)[0], w.c_fc_weight)


def mlp_output(x_mid_BTD: Tensor, h_BTF: Tensor, w: BlockTensors) -> Tensor:
    return x_mid_BTD + linear(h_BTF.relu().square(), w.mlp_c_proj_weight).to(x_mid_BTD.dtype)


def mlp_backward(
    dout_BTD: Tensor, saved: SavedActivations, w: BlockTensors, acc: BlockTensors, noise_key: Tensor | None
) -> Tensor:
    """The gradient of x_mid, where out = x_mid + relu(h)² @ W_out."""
    dtype = w.c_fc_weight.dtype
    positive_BTF = saved.h_BTF.relu()
    da_BTF = linear_backward(
        dout_BTD.to(dtype), positive_BTF.square(), w.mlp_c_proj_weight, acc.mlp_c_proj_weight, None,
        noise_key, 0,
    )  # fmt: skip
    dh_BTF = 2 * da_BTF * positive_BTF
    n_BTD, factor = rms_norm(saved.x_mid_BTD)
    dn_BTD = linear_backward(dh_BTF, n_BTD.to(dtype), w.c_fc_weight, acc.c_fc_weight, None, noise_key, 1)
    # Gradients of both paths are added in fp32 and rounded once.
    return (dout_BTD + rms_norm_backward(dn_BTD, n_BTD, factor)).to(dout_BTD.dtype)


def norm_forward(x_BTD: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The norm before the head, as a layer of its own (model/recompute.py). Only x is saved."""
    return (rms_norm(x_BTD)[0].to(dtype),)


def norm_backward(dn_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    n_BTD, factor = rms_norm(x_BTD)
    return rms_norm_backward(dn_BTD, n_BTD, factor).to(x_BTD.dtype)
