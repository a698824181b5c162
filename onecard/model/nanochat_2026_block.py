"""One layer of nanochat as of 2026, forward and backward, with an explicit list of what is saved.

    u = resid_lambda · x + x0_lambda · x0        x0 is what entered the first layer
    q, k, v = c_attn(norm(u)),  v += gate · value embedding of the token, in alternate layers
    x_mid = u + c_proj(attention(q, k, v)),  out = x_mid + MLP(norm(x_mid)) as in October 2025

Saved are the same ten values of width D as in GPT-2's layer (see gpt2_block.py): x, qkv, y, x_mid, h.
u, norms, rotations, gates and the sums of values and embeddings are recomputed: if the sums replaced the
values inside qkv, the compiler would copy all of qkv. x0 is one tensor for all layers.

The mixing numbers, the gates and the gradient of x0 (a sum over all layers) are fp32.
Shapes: B sequences, T tokens, D width, H heads, Q channels per head, G channels that open a gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.model.accumulate import add_rows, add_to
from onecard.model.attention import attend, attend_backward, hidden_keys
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
from onecard.model.nanochat_block import Angles, attention_output, hidden, mlp_backward, mlp_output
from onecard.model.nanochat_block import BlockTensors as Matrices  # the same four

_SHARPNESS = 1.2  # of queries and of keys, after their norm
_GATE_RANGE = 3.0


class BlockTensors(NamedTuple):
    """The weights of a layer (`w`), or their gradient accumulators (`acc`)."""

    matrices: Matrices
    ve_gate_HG: Tensor | None
    value_embed_VD: Tensor | None


class BlockSpec(NamedTuple):
    """What is constant in all layers of a kind, and compiled in."""

    n_head: int
    attention: str  # a kernel of model/attention.py
    window: int | None  # tokens a query sees before its own; None: all
    value_embedding: bool


class SharedAccumulators(NamedTuple):
    """Gradient accumulators of what a layer takes besides x and its weights."""

    mix_2: Tensor  # of this layer
    x0_BTD: Tensor  # of all layers together, fp32


class LayerInputs(NamedTuple):
    """Per-layer inputs: what a layer takes besides x and its weights."""

    angles: Angles
    tokens_BT: Tensor
    x0_BTD: Tensor
    mix_2: Tensor  # resid_lambda and x0_lambda
    accumulators: SharedAccumulators | None  # None: no gradients are taken


def block_forward(x_BTD: Tensor, w: BlockTensors, spec: BlockSpec, inputs: LayerInputs) -> tuple[Tensor, ...]:
    """The layer's output and, after it, all of SavedActivations but x, which the caller has."""
    saved = _all_saved((x_BTD,), w, spec, inputs)
    return mlp_output(saved.x_mid_BTD, saved.h_BTF, w.matrices), *saved[1:]


def block_decode(
    x_BTD: Tensor, w: BlockTensors, spec: BlockSpec, inputs: LayerInputs, cache: LayerCache
) -> Tensor:
    """The layer's output for tokens that follow those in the cache. They are added to it."""
    fresh = cache.length == 0
    assert fresh or x_BTD.shape[1] == 1, "a cache grows by one prompt, then token by token"
    u_BTD = _mixed(x_BTD, inputs)
    n_BTD = rms_norm(u_BTD)[0]
    q, k, v = heads(linear(n_BTD, w.matrices.c_attn_weight), spec.n_head)
    k, v = cache.append(_placed(k, inputs.angles), _values(v, n_BTD, w, spec, inputs))
    seen_TT = None
    if spec.window is not None and k.shape[2] > spec.window + 1:
        if fresh:
            seen_TT = ~hidden_keys(k.shape[2], spec.window, k.device)
        else:
            k, v = (t[:, :, -spec.window - 1 :] for t in (k, v))
    y_BHTQ = F.scaled_dot_product_attention(
        _placed(q, inputs.angles), k, v, attn_mask=seen_TT, is_causal=fresh and seen_TT is None
    )
    x_mid_BTD = attention_output(u_BTD, merged(y_BHTQ), w.matrices)
    return mlp_output(x_mid_BTD, hidden(x_mid_BTD, w.matrices), w.matrices)


def block_backward(
    dout_BTD: Tensor,
    saved_first: tuple[Tensor, ...],
    w: BlockTensors,
    acc: BlockTensors,
    spec: BlockSpec,
    inputs: LayerInputs,
    noise_key: Tensor | None,
) -> Tensor:
    """The gradient of x. Those of weights, x0 and mixing numbers are added to their accumulators."""
    saved = _all_saved(saved_first, w, spec, inputs)
    dtype = w.matrices.c_fc_weight.dtype
    dx_mid_BTD = mlp_backward(dout_BTD, saved, w.matrices, acc.matrices, noise_key)

    # Attention: x_mid = u + y @ W_proj
    dy_BTD = linear_backward(
        dx_mid_BTD.to(dtype), saved.y_BTD, w.matrices.attn_c_proj_weight, acc.matrices.attn_c_proj_weight,
        None, noise_key, 2,
    )  # fmt: skip
    n_BTD, factor = rms_norm(_mixed(saved.x_BTD, inputs))
    q, k, v = heads(saved.qkv_BTE, spec.n_head)
    v = _values(v, n_BTD, w, spec, inputs)
    dy_BHTQ, y_BHTQ = (split_heads(t, spec.n_head) for t in (dy_BTD, saved.y_BTD))
    placed = _placed(q, inputs.angles), _placed(k, inputs.angles)
    dq, dk, dv = attend_backward(spec.attention, dy_BHTQ, *placed, v, y_BHTQ, saved.lse, spec.window)
    dq, dk = _placed_backward(dq, q, inputs.angles), _placed_backward(dk, k, inputs.angles)
    dqkv_BTE = torch.cat([merged(g) for g in (dq, dk, dv)], dim=-1)
    dn_BTD = linear_backward(
        dqkv_BTE, n_BTD.to(dtype), w.matrices.c_attn_weight, acc.matrices.c_attn_weight, None, noise_key, 3
    )
    if spec.value_embedding:
        dn_BTG = _value_embedding_backward(dv, n_BTD, w, acc, inputs, noise_key)
        dn_BTD = dn_BTD.to(n_BTD.dtype) + F.pad(dn_BTG, (0, n_BTD.shape[-1] - dn_BTG.shape[-1]))
    return _mixed_backward(dx_mid_BTD + rms_norm_backward(dn_BTD, n_BTD, factor), saved.x_BTD, inputs)


def _all_saved(
    first: tuple[Tensor, ...], w: BlockTensors, spec: BlockSpec, inputs: LayerInputs
) -> SavedActivations:
    """All fields: the first ones as given, the missing ones computed."""
    if len(first) == SAVED_FIELDS["none"]:
        return SavedActivations(*first)
    if len(first) == SAVED_FIELDS["mlp"]:
        x, qkv, y, lse, x_mid = first
        return SavedActivations(x, qkv, y, lse, x_mid, hidden(x_mid, w.matrices))
    (x_BTD,) = first
    u_BTD = _mixed(x_BTD, inputs)
    n_BTD = rms_norm(u_BTD)[0]
    qkv_BTE = linear(n_BTD, w.matrices.c_attn_weight)
    q, k, v = heads(qkv_BTE, spec.n_head)
    placed = _placed(q, inputs.angles), _placed(k, inputs.angles)
    y_BHTQ, lse = attend(spec.attention, *placed, _values(v, n_BTD, w, spec, inputs), spec.window)
    y_BTD = merged(y_BHTQ)
    x_mid_BTD = attention_output(u_BTD, y_BTD, w.matrices)
    return SavedActivations(x_BTD, qkv_BTE, y_BTD, lse, x_mid_BTD, hidden(x_mid_BTD, w.matrices))


def _mixed(x_BTD: Tensor, inputs: LayerInputs) -> Tensor:
    """u, summed in fp32 and rounded once."""
    resid, from_x0 = inputs.mix_2.unbind()
    return (_wide(x_BTD) * resid + _wide(inputs.x0_BTD) * from_x0).to(x_BTD.dtype)


def _mixed_backward(du_BTD: Tensor, x_BTD: Tensor, inputs: LayerInputs) -> Tensor:
    assert inputs.accumulators is not None
    resid, from_x0 = inputs.mix_2.unbind()
    du_BTD = _wide(du_BTD)
    sums = [(du_BTD * _wide(t)).sum() for t in (x_BTD, inputs.x0_BTD)]
    add_to(inputs.accumulators.mix_2, torch.stack(sums))
    add_to(inputs.accumulators.x0_BTD, du_BTD * from_x0)
    return (du_BTD * resid).to(x_BTD.dtype)


def _values(v_BHTQ: Tensor, n_BTD: Tensor, w: BlockTensors, spec: BlockSpec, inputs: LayerInputs) -> Tensor:
    """What attention mixes: values, with the token's embedding where the layer has one."""
    if not spec.value_embedding:
        return v_BHTQ
    v_BTHQ = v_BHTQ.transpose(1, 2)
    sum_BTHQ = _wide(v_BTHQ) + _gate(n_BTD, w) * _value_embeddings(w, inputs, spec.n_head)
    return sum_BTHQ.to(v_BHTQ.dtype).transpose(1, 2)


def _gate(n_BTD: Tensor, w: BlockTensors) -> Tensor:
    """(B, T, H, 1): each head's factor for its value embedding."""
    assert w.ve_gate_HG is not None
    logit_BTH = linear(n_BTD[..., : w.ve_gate_HG.shape[1]], w.ve_gate_HG)
    return _GATE_RANGE * torch.sigmoid(_wide(logit_BTH))[..., None]


def _value_embeddings(w: BlockTensors, inputs: LayerInputs, n_head: int) -> Tensor:
    assert w.value_embed_VD is not None
    rows_BTD = _wide(F.embedding(inputs.tokens_BT, w.value_embed_VD))
    return rows_BTD.view(*inputs.tokens_BT.shape, n_head, -1)


def _value_embedding_backward(
    dv_BHTQ: Tensor, n_BTD: Tensor, w: BlockTensors, acc: BlockTensors, inputs: LayerInputs,
    noise_key: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of the channels that open the gate."""
    assert w.ve_gate_HG is not None and acc.ve_gate_HG is not None and acc.value_embed_VD is not None
    dtype, channels = w.ve_gate_HG.dtype, w.ve_gate_HG.shape[1]
    gate_BTH1 = _gate(n_BTD, w)
    dv_BTHQ = _wide(dv_BHTQ.transpose(1, 2))
    add_rows(acc.value_embed_VD, inputs.tokens_BT, (gate_BTH1 * dv_BTHQ).flatten(2))
    embedded_BTHQ = _value_embeddings(w, inputs, dv_BTHQ.shape[2])
    dgate_BTH1 = (dv_BTHQ * embedded_BTHQ).sum(-1, keepdim=True)
    dlogit_BTH = (dgate_BTH1 * gate_BTH1 * (1 - gate_BTH1 / _GATE_RANGE))[..., 0].to(dtype)
    return linear_backward(
        dlogit_BTH, n_BTD[..., :channels].to(dtype), w.ve_gate_HG, acc.ve_gate_HG, None, noise_key, 4
    )


def _placed(q_BHTQ: Tensor, angles: Angles) -> Tensor:
    """Queries or keys at their positions: rotated, normed and scaled, in their own dtype."""
    return (rms_norm(rotate(q_BHTQ, *angles))[0] * _SHARPNESS).to(q_BHTQ.dtype)


def _placed_backward(dplaced_BHTQ: Tensor, q_BHTQ: Tensor, angles: Angles) -> Tensor:
    n_BHTQ, factor = rms_norm(rotate(q_BHTQ, *angles))
    drotated_BHTQ = rms_norm_backward(_wide(dplaced_BHTQ) * _SHARPNESS, n_BHTQ, factor)
    return rotate(drotated_BHTQ, angles.cos, -angles.sin).to(q_BHTQ.dtype)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


# --- before the first layer
class EmbeddingTensors(NamedTuple):
    """The weights before the first layer (`w`), or their gradient accumulators (`acc`)."""

    wte_VD: Tensor
    smear_gate_1G: Tensor
    smear_lambda_1: Tensor


def begin_forward(tokens_BT: Tensor, w: EmbeddingTensors, dtype: torch.dtype) -> Tensor:
    """The normed embedding, to which every token but the first adds a little of its predecessor's."""
    n_BTD = rms_norm(F.embedding(tokens_BT, w.wte_VD))[0]
    gate_BS1 = _smear_gate(n_BTD, w.smear_gate_1G)
    smeared_BSD = n_BTD[:, 1:] + w.smear_lambda_1 * gate_BS1 * n_BTD[:, :-1]
    return torch.cat((n_BTD[:, :1], smeared_BSD), dim=1).to(dtype)


def begin_backward(
    dx_BTD: Tensor, dx0_BTD: Tensor, tokens_BT: Tensor, w: EmbeddingTensors, acc: EmbeddingTensors
) -> None:
    """Add the weights' gradients. The first layer's input and x0 are one tensor with two gradients."""
    n_BTD, factor = rms_norm(F.embedding(tokens_BT, w.wte_VD))
    gate_BS1 = _smear_gate(n_BTD, w.smear_gate_1G)
    dx_BTD = dx0_BTD + dx_BTD
    dsmeared_BSD, before_BSD = dx_BTD[:, 1:], n_BTD[:, :-1]
    damount_BS1 = (dsmeared_BSD * before_BSD).sum(-1, keepdim=True)
    add_to(acc.smear_lambda_1, (damount_BS1 * gate_BS1).sum()[None])
    dlogit_BS1 = damount_BS1 * w.smear_lambda_1 * gate_BS1 * (1 - gate_BS1)
    channels = w.smear_gate_1G.shape[1]
    add_to(acc.smear_gate_1G, (dlogit_BS1 * n_BTD[:, 1:, :channels]).sum((0, 1))[None])
    dbefore_BSD = w.smear_lambda_1 * gate_BS1 * dsmeared_BSD
    dn_BSG = dlogit_BS1 * w.smear_gate_1G[0]
    dn_BTD = dx_BTD + F.pad(dbefore_BSD, (0, 0, 0, 1))
    dn_BTD = dn_BTD + F.pad(dn_BSG, (0, n_BTD.shape[-1] - channels, 1, 0))
    add_rows(acc.wte_VD, tokens_BT, rms_norm_backward(dn_BTD, n_BTD, factor))


def _smear_gate(n_BTD: Tensor, smear_gate_1G: Tensor) -> Tensor:
    """(B, T - 1, 1), in fp32: one small sum is not worth a matmul."""
    opening_BSG = n_BTD[:, 1:, : smear_gate_1G.shape[1]] * smear_gate_1G[0]
    return torch.sigmoid(opening_BSG.sum(-1, keepdim=True))


# --- after the last layer
def norm_forward(
    x_BTD: Tensor, middle_BTD: Tensor, dtype: torch.dtype, backout_1: Tensor
) -> tuple[Tensor, ...]:
    """The norm before the head, of x less a part of the middle layer's output. Both inputs are saved."""
    return (rms_norm(_wide(x_BTD) - backout_1 * _wide(middle_BTD))[0].to(dtype),)


def norm_backward(
    dn_BTD: Tensor, x_BTD: Tensor, middle_BTD: Tensor, backout_1: Tensor, accumulator_1: Tensor
) -> tuple[Tensor, Tensor]:
    middle_BTD = _wide(middle_BTD)
    n_BTD, factor = rms_norm(_wide(x_BTD) - backout_1 * middle_BTD)
    dx_BTD = rms_norm_backward(dn_BTD, n_BTD, factor)
    add_to(accumulator_1, -(dx_BTD * middle_BTD).sum()[None])
    return dx_BTD.to(x_BTD.dtype), (-backout_1 * dx_BTD).to(x_BTD.dtype)
