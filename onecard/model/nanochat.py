"""nanochat's architecture of October 2025, that of its d20 and d32.

Parameters have nanochat's names, except queries, keys and values: they are one matrix here
(`attn.c_attn`), which convert/ splits.

Shapes: B sequences, T tokens, D width, H heads, Q channels per head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard.arch.shapes import NanochatShape
from onecard.model.decoder import Decoder, NormRun, Parts, seed_of
from onecard.model.dropout import DropoutKeys
from onecard.model.layers import LayerCache, rms_norm, rms_norm_backward
from onecard.model.loss import LossOptions, chunk_loss_
from onecard.model.loss_kernel import with_kernel
from onecard.model.nanochat_block import (
    SAVED_FIELDS,
    Angles,
    BlockSpec,
    BlockTensors,
    block_backward,
    block_decode,
    block_forward,
    norm_backward,
    norm_forward,
    rotary_angles,
)

_ROTARY_BASE = 10_000.0


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(width)
        self.mlp = MLP(width)


# Names of a layer's tensors within their block, in the order of BlockTensors.
_BLOCK_NAMES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class Transformer(nn.Module):
    def __init__(self, shape: NanochatShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.h = nn.ModuleList(Block(shape.n_embd) for _ in range(shape.n_layer))


class Nanochat(Decoder):
    shape: NanochatShape
    saved_fields = SAVED_FIELDS
    loss_options = LossOptions(softcap=15.0)

    def __init__(self, shape: NanochatShape) -> None:
        super().__init__(
            shape, Parts(block_forward, block_backward, norm_forward, norm_backward, with_kernel(chunk_loss_))
        )
        self.transformer = Transformer(shape)
        self.lm_head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self._angles: Angles | None = None
        self.requires_grad_(False)

    def _initialise(self, name: str, data: Tensor, seed: int) -> None:
        """Embedding normal 1, head almost zero, projections into the residual stream zero."""
        if name.endswith("c_proj.weight"):
            data.zero_()
            return
        stds = {"transformer.wte.weight": 1.0, "lm_head.weight": 0.001}
        std = stds.get(name, 1 / math.sqrt(self.shape.n_embd))
        data.normal_(0.0, std, generator=torch.Generator().manual_seed(seed_of(seed, name)))

    @property
    def spec(self) -> BlockSpec:
        return BlockSpec(self.shape.n_head, self.kernel())

    def _block_tensors(self, by_name: Mapping[str, Tensor]) -> BlockTensors:
        return BlockTensors(*(by_name[name] for name in _BLOCK_NAMES))

    def _begin(self, tokens_BT: Tensor, first_position: int, dropout: DropoutKeys | None) -> Tensor:
        """The normed embedding, in the weights' dtype, but fp32 where that is fp16 (as in GPT2._begin)."""
        assert dropout is None, "nanochat has no dropout"
        assert first_position + tokens_BT.shape[1] <= self.shape.block_size, "more tokens than positions"
        wte_VD = self.transformer.wte.weight
        dtype = torch.float32 if wte_VD.dtype == torch.float16 else wte_VD.dtype
        return rms_norm(F.embedding(tokens_BT, wte_VD))[0].to(dtype)

    def _begin_backward(
        self, tokens_BT: Tensor, dx_BTD: Tensor, layer_inputs: list[Any], dropout: DropoutKeys | None
    ) -> None:
        accumulator_VD = self._accumulators["transformer.wte.weight"]
        n_BTD, factor = rms_norm(F.embedding(tokens_BT, self.transformer.wte.weight))
        drows_BTD = rms_norm_backward(dx_BTD, n_BTD, factor)
        accumulator_VD.index_add_(0, tokens_BT.flatten(), drows_BTD.flatten(0, 1).to(accumulator_VD.dtype))

    def _layer_inputs(
        self, tokens_BT: Tensor, x_BTD: Tensor, first_position: int, dropout: DropoutKeys | None
    ) -> list[Any]:
        device = self.lm_head.weight.device
        if self._angles is None or self._angles.cos.device != device:
            self._angles = rotary_angles(self.shape.block_size, self.shape.head_dim, _ROTARY_BASE, device)
        return [self._angles.part(first_position, tokens_BT.shape[1])] * self.shape.n_layer

    def use_block_size(self, block_size: int) -> None:
        """Take any length: rotary positions have no limit."""
        self.shape = self.shape.with_block_size(block_size)
        self._angles = None

    def _last_norm(self) -> NormRun:
        return NormRun(self._parts, (), (), self.lm_head.weight.dtype)

    def _decode_layer(
        self, x_BTD: Tensor, weights: BlockTensors, spec: BlockSpec, inputs: Angles, cache: LayerCache
    ) -> Tensor:
        return block_decode(x_BTD, weights, spec, inputs, cache)
