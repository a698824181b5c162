"""One layer of GPT-2, forward and backward, with an explicit list of what is saved in between.

Autograd would save 16 values of width D per token and layer. The backward pass needs 10 of them: the
outputs of matmuls and attention, and the two residual states. Norms, GELU and dropout masks are cheap
to recompute:

    saved      width per token     recompute='none'   'mlp'   'block'
    x          D                   yes                yes     yes
    qkv        3 D                 yes                yes
    y          D (+ H log-sums)    yes                yes
    x_mid      D                   yes                yes
    h          4 D                 yes

Forward and backward are plain functions of tensors, each compiled once for all layers. What is saved
passes through `save_for_backward` in model/recompute.py, where a test counts it.

The residual stream has the dtype of x, matmuls that of the weights; norms compute in fp32.
Shapes: B sequences, T tokens, N = B×T rows, D width, H heads, Q channels per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.model.attention import (
    attend,
    attend_backward,
    attend_in_the_open,
    attend_in_the_open_backward,
)
from onecard.model.dropout import DropoutKeys
from onecard.model.layers import (
    LayerCache,
    heads,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    merged,
    split_heads,
)

aten = torch.ops.aten

# Dropout sites within a layer; each layer has keys of its own.
_ATTENTION, _ATTENTION_OUT, _MLP_OUT = range(1, 4)


class BlockTensors(NamedTuple):
    """The weights of a layer (`w`), or their gradient accumulators (`acc`)."""

    ln_1_weight: Tensor
    ln_1_bias: Tensor | None
    c_attn_weight: Tensor
    c_attn_bias: Tensor | None
    attn_c_proj_weight: Tensor
    attn_c_proj_bias: Tensor | None
    ln_2_weight: Tensor
    ln_2_bias: Tensor | None
    c_fc_weight: Tensor
    c_fc_bias: Tensor | None
    mlp_c_proj_weight: Tensor
    mlp_c_proj_bias: Tensor | None


class BlockSpec(NamedTuple):
    """What is constant in all layers, and compiled in."""

    n_head: int
    gelu_form: str  # 'none' or 'tanh', PyTorch's names
    attention: str  # a kernel of model/attention.py


class SavedActivations(NamedTuple):
    """What the backward pass needs of the forward pass, in the order of computation."""

    x_BTD: Tensor
    qkv_BTE: Tensor
    y_BTD: Tensor
    lse: Tensor
    x_mid_BTD: Tensor
    h_BTF: Tensor


# How many of these fields, from the first, each setting of `recompute` saves.
SAVED_FIELDS = {"none": 6, "mlp": 5, "block": 1}


def block_forward(
    x_BTD: Tensor, w: BlockTensors, spec: BlockSpec, dropout: DropoutKeys | None
) -> tuple[Tensor, ...]:
    """The layer's output and, after it, all of SavedActivations but x, which the caller has."""
    saved = _all_saved((x_BTD,), w, spec, dropout)
    return _mlp_output(saved.x_mid_BTD, saved.h_BTF, w, spec, dropout), *saved[1:]


def block_decode(x_BTD: Tensor, w: BlockTensors, spec: BlockSpec, cache: LayerCache) -> Tensor:
    """The layer's output for tokens that follow those in the cache. They are added to it."""
    fresh = cache.length == 0
    assert fresh or x_BTD.shape[1] == 1, "a cache grows by one prompt, then token by token"
    q, k, v = heads(_qkv(x_BTD, w), spec.n_head)
    k, v = cache.append(k, v)
    y_BHTQ = F.scaled_dot_product_attention(q, k, v, is_causal=fresh)
    x_mid_BTD = _attention_output(x_BTD, merged(y_BHTQ), w, None)
    return _mlp_output(x_mid_BTD, _hidden(x_mid_BTD, w), w, spec, None)


def block_backward(
    dout_BTD: Tensor,
    saved_first: tuple[Tensor, ...],
    w: BlockTensors,
    acc: BlockTensors,
    spec: BlockSpec,
    dropout: DropoutKeys | None,
    noise_key: Tensor | None,
) -> Tensor:
    """The gradient of x; those of the weights are added to their accumulators."""
    saved = _all_saved(saved_first, w, spec, dropout)
    dtype = w.c_fc_weight.dtype

    # The MLP: out = x_mid + dropout(gelu(h) @ W_out)
    dmlp_BTD = dout_BTD.to(dtype)
    if dropout is not None:
        dmlp_BTD = dropout.apply(dmlp_BTD, _MLP_OUT)
    da_BTF = linear_backward(
        dmlp_BTD, F.gelu(saved.h_BTF, approximate=spec.gelu_form),
        w.mlp_c_proj_weight, acc.mlp_c_proj_weight, acc.mlp_c_proj_bias, noise_key, 0,
    )  # fmt: skip
    dh_BTF = aten.gelu_backward(da_BTF, saved.h_BTF, approximate=spec.gelu_form)
    n_BTD, stats = layer_norm(saved.x_mid_BTD, w.ln_2_weight, w.ln_2_bias)
    dn_BTD = linear_backward(
        dh_BTF, n_BTD.to(dtype), w.c_fc_weight, acc.c_fc_weight, acc.c_fc_bias, noise_key, 1
    )
    dx_mid_BTD = dout_BTD + layer_norm_backward(
        dn_BTD, saved.x_mid_BTD, stats, w.ln_2_weight, w.ln_2_bias, acc.ln_2_weight, acc.ln_2_bias
    )
    # Gradients of both paths are added in fp32 and rounded once.
    dx_mid_BTD = dx_mid_BTD.to(dout_BTD.dtype)

    # Attention: x_mid = x + dropout(y @ W_proj)
    dproj_BTD = dx_mid_BTD.to(dtype)
    if dropout is not None:
        dproj_BTD = dropout.apply(dproj_BTD, _ATTENTION_OUT)
    dy_BTD = linear_backward(
        dproj_BTD, saved.y_BTD, w.attn_c_proj_weight, acc.attn_c_proj_weight, acc.attn_c_proj_bias,
        noise_key, 2,
    )  # fmt: skip
    dqkv_BTE = _attention_backward(dy_BTD, saved, spec, dropout)
    n_BTD, stats = layer_norm(saved.x_BTD, w.ln_1_weight, w.ln_1_bias)
    dn_BTD = linear_backward(
        dqkv_BTE, n_BTD.to(dtype), w.c_attn_weight, acc.c_attn_weight, acc.c_attn_bias, noise_key, 3
    )
    dx_BTD = dx_mid_BTD + layer_norm_backward(
        dn_BTD, saved.x_BTD, stats, w.ln_1_weight, w.ln_1_bias, acc.ln_1_weight, acc.ln_1_bias
    )
    return dx_BTD.to(dout_BTD.dtype)


def _all_saved(
    first: tuple[Tensor, ...], w: BlockTensors, spec: BlockSpec, dropout: DropoutKeys | None
) -> SavedActivations:
    """All fields: the first ones as given, the missing ones computed."""
    if len(first) == SAVED_FIELDS["none"]:
        return SavedActivations(*first)
    if len(first) == SAVED_FIELDS["mlp"]:
        x, qkv, y, lse, x_mid = first
        return SavedActivations(x, qkv, y, lse, x_mid, _hidden(x_mid, w))
    (x_BTD,) = first
    qkv_BTE = _qkv(x_BTD, w)
    q, k, v = heads(qkv_BTE, spec.n_head)
    if dropout is None:
        y_BHTQ, lse = attend(spec.attention, q, k, v)
    else:
        y_BHTQ = attend_in_the_open(q, k, v, dropout.keys_B, dropout.probability, _ATTENTION)
        lse = x_BTD.new_empty(0)
    y_BTD = merged(y_BHTQ)
    x_mid_BTD = _attention_output(x_BTD, y_BTD, w, dropout)
    return SavedActivations(x_BTD, qkv_BTE, y_BTD, lse, x_mid_BTD, _hidden(x_mid_BTD, w))


def _qkv(x_BTD: Tensor, w: BlockTensors) -> Tensor:
    return linear(norm(x_BTD, w.ln_1_weight, w.ln_1_bias), w.c_attn_weight, w.c_attn_bias)


def _attention_output(x_BTD: Tensor, y_BTD: Tensor, w: BlockTensors, dropout: DropoutKeys | None) -> Tensor:
    """x_mid, the residual stream after attention."""
    out_BTD = linear(y_BTD, w.attn_c_proj_weight, w.attn_c_proj_bias)
    return x_BTD + (out_BTD if dropout is None else dropout.apply(out_BTD, _ATTENTION_OUT)).to(x_BTD.dtype)


def _hidden(x_mid_BTD: Tensor, w: BlockTensors) -> Tensor:
    return linear(norm(x_mid_BTD, w.ln_2_weight, w.ln_2_bias), w.c_fc_weight, w.c_fc_bias)


def _mlp_output(
    x_mid_BTD: Tensor, h_BTF: Tensor, w: BlockTensors, spec: BlockSpec, dropout: DropoutKeys | None
) -> Tensor:
    a_BTF = F.gelu(h_BTF, approximate=spec.gelu_form)
    out_BTD = linear(a_BTF, w.mlp_c_proj_weight, w.mlp_c_proj_bias)
    out_BTD = out_BTD if dropout is None else dropout.apply(out_BTD, _MLP_OUT)
    return x_mid_BTD + out_BTD.to(x_mid_BTD.dtype)


def _attention_backward(
    dy_BTD: Tensor, saved: SavedActivations, spec: BlockSpec, dropout: DropoutKeys | None
) -> Tensor:
    """The gradient of qkv."""
    q, k, v = heads(saved.qkv_BTE, spec.n_head)
    dy_BHTQ, y_BHTQ = (split_heads(t, spec.n_head) for t in (dy_BTD, saved.y_BTD))
    if dropout is None:
        grads = attend_backward(spec.attention, dy_BHTQ, q, k, v, y_BHTQ, saved.lse)
    else:
        grads = attend_in_the_open_backward(dy_BHTQ, q, k, v, dropout.keys_B, dropout.probability, _ATTENTION)
    return torch.cat([merged(g) for g in grads], dim=-1)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return layer_norm(x, weight, bias)[0]


def norm_forward(
    x_BTD: Tensor, dtype: torch.dtype, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """The norm before the head, as a layer of its own (model/recompute.py). Only x is saved."""
    return (norm(x_BTD, weight, bias).to(dtype),)


def norm_backward(
    dn_BTD: Tensor, x_BTD: Tensor, weight: Tensor, bias: Tensor | None, weight_acc: Tensor,
    bias_acc: Tensor | None,
) -> Tensor:  # fmt: skip
    _, stats = layer_norm(x_BTD, weight, bias)
    return layer_norm_backward(dn_BTD, x_BTD, stats, weight, bias, weight_acc, bias_acc).to(x_BTD.dtype)
