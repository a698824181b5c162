"""nanochat's architecture of 2026.

It adds to that of October 2025 (model/nanochat.py): windows of attention, value embeddings, the first layer's
input mixed in again before every layer, a little of the previous token in every token's embedding ("smear"),
and the middle layer's output subtracted from the last one's ("backout").

Parameters have nanochat's names, except queries, keys and values: they are one matrix here (`attn.c_attn`).

Shapes: B sequences, T tokens, D width, L layers, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard.arch.shapes import Nanochat2026Shape
from onecard.model.attention import windowed_kernel
from onecard.model.decoder import Decoder, NormRun, Parts, seed_of
from onecard.model.dropout import DropoutKeys
from onecard.model.layers import LayerCache
from onecard.model.loss import LossOptions, chunk_loss_
from onecard.model.loss_kernel import with_kernel
from onecard.model.nanochat import MLP, CausalSelfAttention
from onecard.model.nanochat_2026_block import (
    SAVED_FIELDS,
    BlockSpec,
    BlockTensors,
    EmbeddingTensors,
    LayerInputs,
    SharedAccumulators,
    begin_backward,
    begin_forward,
    block_backward,
    block_decode,
    block_forward,
    norm_backward,
    norm_forward,
)
from onecard.model.nanochat_block import Angles, rotary_angles
from onecard.model.nanochat_block import BlockTensors as Matrices

_ROTARY_BASE = 100_000.0
# A layer's two mixing numbers begin at a multiple of 16 bytes: compiled code copies what does not.
_MIX_STRIDE = 4

# Names of the weights before the first layer, in the order of EmbeddingTensors.
_EMBEDDING_NAMES = ("transformer.wte.weight", "smear_gate.weight", "smear_lambda")

_MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class GatedAttention(CausalSelfAttention):
    def __init__(self, shape: Nanochat2026Shape) -> None:
        super().__init__(shape.n_embd)
        self.ve_gate = nn.Linear(shape.value_gate_channels, shape.n_head, bias=False)


class Block(nn.Module):
    def __init__(self, shape: Nanochat2026Shape, *, value_embedding: bool) -> None:
        super().__init__()
        self.attn = GatedAttention(shape) if value_embedding else CausalSelfAttention(shape.n_embd)
        self.mlp = MLP(shape.n_embd)


class Transformer(nn.Module):
    def __init__(self, shape: Nanochat2026Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.h = nn.ModuleList(
            Block(shape, value_embedding=number in shape.layers_with_value_embedding)
            for number in range(shape.n_layer)
        )


class Nanochat2026(Decoder):
    shape: Nanochat2026Shape
    saved_fields = SAVED_FIELDS
    loss_options = LossOptions(softcap=15.0)

    def __init__(self, shape: Nanochat2026Shape) -> None:
        super().__init__(
            shape, Parts(block_forward, block_backward, norm_forward, norm_backward, with_kernel(chunk_loss_))
        )
        self.middle_layer = shape.middle_layer
        self.transformer = Transformer(shape)
        self.lm_head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.empty(shape.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(shape.n_layer))
        self.smear_gate = nn.Linear(shape.smear_gate_channels, 1, bias=False)
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))
        self.value_embeds = nn.ModuleDict(
            {str(i): nn.Embedding(shape.vocab_size, shape.n_embd) for i in shape.layers_with_value_embedding}
        )
        self._angles: Angles | None = None
        self._embed: Callable[..., Tensor] = begin_forward
        self._embed_backward: Callable[..., None] = begin_backward
        self.requires_grad_(False)

    def compile_parts(self, backend: str = "inductor") -> None:
        super().compile_parts(backend)
        options: Any = {"dynamic": False, "fullgraph": True, "backend": backend}
        self._embed = torch.compile(begin_forward, **options)
        self._embed_backward = torch.compile(begin_backward, **options)

    def _initialise(self, name: str, data: Tensor, seed: int) -> None:
        """Projections into the residual stream zero, matrices uniform, gates all but neutral."""
        shape, generator = self.shape, torch.Generator().manual_seed(seed_of(seed, name))
        ramp_L = torch.arange(shape.n_layer) / max(shape.n_layer - 1, 1)
        # The standard deviation is 1 / sqrt(width), as of a normal distribution, but without outliers.
        bound = math.sqrt(3 / shape.n_embd)
        if name.endswith("c_proj.weight") or name == "smear_lambda":
            data.zero_()
        elif name == "resid_lambdas":
            data.copy_(1.15 - 0.10 * ramp_L)
        elif name == "x0_lambdas":
            data.copy_(0.20 - 0.15 * ramp_L)
        elif name == "backout_lambda":
            data.fill_(0.2)
        elif name in ("transformer.wte.weight", "lm_head.weight"):
            data.normal_(0.0, 0.8 if "wte" in name else 0.001, generator=generator)
        elif name.endswith("_gate.weight"):
            data.uniform_(0.0, 0.02, generator=generator)
        else:
            bound *= 0.4 if name.endswith("c_fc.weight") else 1.0
            data.uniform_(-bound, bound, generator=generator)

    @property
    def spec(self) -> BlockSpec:
        """What is constant in a layer that sees all tokens and has no value embedding."""
        return BlockSpec(self.shape.n_head, self.kernel(), None, False)

    def layer_specs(self) -> list[BlockSpec]:
        spec, head = self.spec, self.lm_head.weight
        windowed = windowed_kernel(spec.attention, self.shape.head_dim, head.dtype, head.device)
        limited, with_values = spec._replace(attention=windowed), self.shape.layers_with_value_embedding
        return [
            (limited._replace(window=window) if window < self.shape.block_size else spec)._replace(
                value_embedding=number in with_values
            )
            for number, window in enumerate(self.shape.windows)
        ]

    def _place(self, name: str) -> tuple[int, str] | None:
        if name.startswith("value_embeds."):
            return int(name.split(".")[1]), "value_embed"
        return super()._place(name)

    def _block_tensors(self, by_name: Mapping[str, Tensor]) -> BlockTensors:
        matrices = Matrices(*(by_name[name] for name in _MATRICES))
        return BlockTensors(matrices, by_name.get("attn.ve_gate.weight"), by_name.get("value_embed"))

    def _begin(self, tokens_BT: Tensor, first_position: int, dropout: DropoutKeys | None) -> Tensor:
        """The residual stream in the weights' dtype, but fp32 where that is fp16 (as in GPT2._begin)."""
        assert dropout is None, "nanochat has no dropout"
        assert first_position + tokens_BT.shape[1] <= self.shape.block_size, "more tokens than positions"
        return self._embed(tokens_BT, self._embedding_weights(), self._stream_dtype)

    def _begin_decoding(self, tokens_BT: Tensor, cache: list[LayerCache]) -> Tensor:
        """`_begin` with the previous token in front, whose own row is then removed."""
        first = cache[0]
        before = [first.last_B1] if first.length and first.last_B1 is not None else []
        x_BTD = begin_forward(
            torch.cat((*before, tokens_BT), 1), self._embedding_weights(), self._stream_dtype
        )
        first.last_B1 = tokens_BT[:, -1:]
        return x_BTD[:, len(before) :]

    def _embedding_weights(self) -> EmbeddingTensors:
        return EmbeddingTensors(self.transformer.wte.weight, self.smear_gate.weight, self.smear_lambda)

    @property
    def _stream_dtype(self) -> torch.dtype:
        dtype = self.transformer.wte.weight.dtype
        return torch.float32 if dtype == torch.float16 else dtype

    def _layer_inputs(
        self, tokens_BT: Tensor, x_BTD: Tensor, first_position: int, dropout: DropoutKeys | None
    ) -> list[Any]:
        device, wide = x_BTD.device, torch.promote_types(x_BTD.dtype, torch.float32)
        if self._angles is None or self._angles.cos.device != device:
            self._angles = rotary_angles(self.shape.block_size, self.shape.head_dim, _ROTARY_BASE, device)
        angles = self._angles.part(first_position, tokens_BT.shape[1])
        mix_L4 = F.pad(torch.stack((self.resid_lambdas, self.x0_lambdas), 1).to(wide), (0, _MIX_STRIDE - 2))
        shared: list[SharedAccumulators | None] = [None] * self.shape.n_layer
        if torch.is_grad_enabled():
            x0_accumulator_BTD = torch.zeros_like(x_BTD, dtype=wide, requires_grad=False)
            rows = torch.zeros_like(mix_L4)[:, :2].unbind()
            shared = [SharedAccumulators(mix_accumulator_2, x0_accumulator_BTD) for mix_accumulator_2 in rows]
        x0_BTD = x_BTD.detach()
        return [
            LayerInputs(angles, tokens_BT, x0_BTD, mix_2, accumulators)
            for mix_2, accumulators in zip(mix_L4[:, :2].unbind(), shared, strict=True)
        ]

    def _begin_backward(
        self, tokens_BT: Tensor, dx_BTD: Tensor, layer_inputs: list[LayerInputs], dropout: DropoutKeys | None
    ) -> None:
        shared = [inputs.accumulators for inputs in layer_inputs if inputs.accumulators is not None]
        dmix_L2 = torch.stack([accumulators.mix_2 for accumulators in shared])
        for name, dmix_L in zip(("resid_lambdas", "x0_lambdas"), dmix_L2.unbind(1), strict=True):
            self._accumulators[name].add_(dmix_L.to(self._accumulators[name].dtype))
        acc = EmbeddingTensors(*(self._accumulators[name] for name in _EMBEDDING_NAMES))
        self._embed_backward(dx_BTD, shared[0].x0_BTD, tokens_BT, self._embedding_weights(), acc)

    def use_block_size(self, block_size: int) -> None:
        """Take any length: rotary positions have no limit."""
        self.shape = self.shape.with_block_size(block_size)
        self._angles = None

    def _last_norm(self) -> NormRun:
        accumulators = (self._accumulators.get("backout_lambda"),)
        return NormRun(self._parts, (self.backout_lambda,), accumulators, self.lm_head.weight.dtype)

    def _decode_layer(
        self, x_BTD: Tensor, weights: BlockTensors, spec: BlockSpec, inputs: LayerInputs, cache: LayerCache
    ) -> Tensor:
        return block_decode(x_BTD, weights, spec, inputs, cache)
