"""GPT-2 as nanoGPT builds it, with nanoGPT's parameter names, so that checkpoints convert both ways.

Shapes: B sequences, T tokens, D width (n_embd), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard.arch.shapes import GPT2Shape
from onecard.model.accumulate import add_to
from onecard.model.decoder import Decoder, NormRun, Parts, seed_of
from onecard.model.dropout import DropoutKeys
from onecard.model.gpt2_block import (
    SAVED_FIELDS,
    BlockSpec,
    BlockTensors,
    block_backward,
    block_decode,
    block_forward,
    norm_backward,
    norm_forward,
)
from onecard.model.layers import LayerCache
from onecard.model.loss import chunk_loss_
from onecard.model.loss_kernel import with_kernel

_EMBEDDING = 0  # its dropout site; the layers' are in gpt2_block.py


class LayerNorm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None


class CausalSelfAttention(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.c_proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)


class MLP(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.c_proj = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)


class Block(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(shape.n_embd, shape.bias)
        self.attn = CausalSelfAttention(shape)
        self.ln_2 = LayerNorm(shape.n_embd, shape.bias)
        self.mlp = MLP(shape)


# Names of a layer's tensors within their block, in the order of BlockTensors.
_BLOCK_NAMES = tuple(
    f"{module}.{kind}"
    for module in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
)


class Transformer(nn.Module):
    """All but the head; a module of its own because nanoGPT's parameter names begin with it."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.wpe = nn.Embedding(shape.block_size, shape.n_embd)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.ln_f = LayerNorm(shape.n_embd, shape.bias)


class GPT2(Decoder):
    shape: GPT2Shape
    saved_fields = SAVED_FIELDS
    head_name = "transformer.wte.weight"  # tied

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__(
            shape, Parts(block_forward, block_backward, norm_forward, norm_backward, with_kernel(chunk_loss_))
        )
        self.transformer = Transformer(shape)
        self.lm_head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self._tie()
        self.requires_grad_(False)

    def _tie(self) -> None:
        self.lm_head.weight = self.transformer.wte.weight

    def _initialise(self, name: str, data: Tensor, seed: int) -> None:
        """Normal 0.02, projections into the residual stream smaller, biases zero."""
        if data.dim() < 2:
            data.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
            return
        std = 0.02 / math.sqrt(2 * self.shape.n_layer) if name.endswith("c_proj.weight") else 0.02
        data.normal_(0.0, std, generator=torch.Generator().manual_seed(seed_of(seed, name)))

    @property
    def spec(self) -> BlockSpec:
        form = "tanh" if self.shape.gelu_tanh else "none"
        return BlockSpec(self.shape.n_head, form, self.kernel())

    def _block_tensors(self, by_name: Mapping[str, Tensor]) -> BlockTensors:
        return BlockTensors(*map(by_name.get, _BLOCK_NAMES))  # type: ignore[arg-type]  # weights are there

    def _begin(self, tokens_BT: Tensor, first_position: int, dropout: DropoutKeys | None) -> Tensor:
        """The residual stream in the weights' dtype, but fp32 where that is fp16: sums over many layers
        exceed fp16's largest number. bf16 has the range of fp32."""
        T = tokens_BT.shape[1]
        assert first_position + T <= self.shape.block_size, "more tokens than position embeddings"
        wte_VD, wpe_TD = self.transformer.wte.weight, self.transformer.wpe.weight
        x_BTD = F.embedding(tokens_BT, wte_VD)
        if x_BTD.dtype == torch.float16:
            x_BTD = x_BTD.float()
        x_BTD = x_BTD + wpe_TD[first_position : first_position + T]
        return x_BTD if dropout is None else dropout.apply(x_BTD, _EMBEDDING)

    def _begin_backward(
        self, tokens_BT: Tensor, dx_BTD: Tensor, layer_inputs: list[Any], dropout: DropoutKeys | None
    ) -> None:
        if dropout is not None:
            dx_BTD = dropout.apply(dx_BTD, _EMBEDDING)
        wte_acc, wpe_acc = (self._accumulators[f"transformer.{e}.weight"] for e in ("wte", "wpe"))
        # Atomic additions on a GPU: the order of summation is not fixed, as in attention's backward pass.
        # (index_put_ sorts first, and takes 14 times as long on text, where some tokens are frequent.)
        wte_acc.index_add_(0, tokens_BT.flatten(), dx_BTD.flatten(0, 1).to(wte_acc.dtype))
        add_to(wpe_acc[: dx_BTD.shape[1]], dx_BTD.sum(0, dtype=wpe_acc.dtype))

    def _layer_inputs(
        self, tokens_BT: Tensor, x_BTD: Tensor, first_position: int, dropout: DropoutKeys | None
    ) -> list[Any]:
        n_layer = self.shape.n_layer
        return [None] * n_layer if dropout is None else list(dropout.for_layers(n_layer))

    def _last_norm(self) -> NormRun:
        ln_f = self.transformer.ln_f
        acc = tuple(self._accumulators.get(f"transformer.ln_f.{kind}") for kind in ("weight", "bias"))
        return NormRun(self._parts, (ln_f.weight, ln_f.bias), acc, self.lm_head.weight.dtype)

    def _decode_layer(
        self, x_BTD: Tensor, weights: BlockTensors, spec: BlockSpec, inputs: None, cache: LayerCache
    ) -> Tensor:
        return block_decode(x_BTD, weights, spec, cache)

    def use_block_size(self, block_size: int) -> None:
        """Keep the first block_size positions only (a pretrained model on shorter sequences)."""
        assert block_size <= self.shape.block_size
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight.data[:block_size].clone(), requires_grad=False)
        wpe.num_embeddings = block_size
        self.shape = self.shape.with_block_size(block_size)
