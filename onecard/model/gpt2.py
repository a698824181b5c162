"""GPT-2 as nanoGPT builds it, with nanoGPT's parameter names, so that checkpoints pass both ways.

The modules hold the weights and their names; what a layer computes is in gpt2_block.py. Gradients do
not go through autograd to the weights: whoever trains gives every weight a total (`use_totals`), to
which the backward pass adds.

Shapes: B sequences, T tokens, D width (n_embd), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onecard.model.accumulate import add_to
from onecard.model.attention import usual_kernel
from onecard.model.compiling import limit_recompiling
from onecard.model.dropout import DropoutKeys, keys_for_layers
from onecard.model.gpt2_block import (
    KEPT_FIELDS,
    BlockSpec,
    BlockTensors,
    block_backward,
    block_decode,
    block_forward,
    norm,
    norm_backward,
    norm_forward,
)
from onecard.model.layers import LayerCache
from onecard.model.loss import chunk_loss_, default_chunk, linear_cross_entropy
from onecard.model.loss_kernel import with_kernel
from onecard.model.recompute import run_layer
from onecard.shapes import GPT2Shape

# Without cuDNN's: it builds a plan for every new length, and in decoding every length is new.
_DECODING_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_EMBEDDING = 0  # its dropout site; the layers' are in gpt2_block.py


class Parts(NamedTuple):
    """The functions a step is made of, plain or compiled."""

    block_forward: Callable[..., tuple[Tensor, ...]]
    block_backward: Callable[..., Tensor]
    norm_forward: Callable[..., tuple[Tensor, ...]]
    norm_backward: Callable[..., Tensor]
    chunk_loss: Callable[..., Tensor]


class LayerVisitor(Protocol):
    """Told when a layer's totals are about to be added to, and when they have been."""

    def begin(self, layer: int) -> None: ...
    def end(self, layer: int) -> None: ...


@dataclass(frozen=True)
class LayerRun:
    """One layer in one micro-batch: what run_layer needs to know of it."""

    parts: Parts
    spec: BlockSpec
    number: int
    weights: BlockTensors
    totals: BlockTensors | None
    dropout: DropoutKeys | None
    noise_key: Tensor | None
    visitor: LayerVisitor | None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return self.parts.block_forward(x_BTD, self.weights, self.spec, self.dropout)

    def backward(self, dout_BTD: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        assert self.totals is not None
        if self.visitor is not None:
            self.visitor.begin(self.number)
        dx_BTD = self.parts.block_backward(
            dout_BTD, kept, self.weights, self.totals, self.spec, self.dropout, self.noise_key
        )
        if self.visitor is not None:
            self.visitor.end(self.number)
        return dx_BTD


@dataclass(frozen=True)
class NormRun:
    """The last norm, likewise: it keeps its input."""

    parts: Parts
    weight: Tensor
    bias: Tensor | None
    total_weight: Tensor | None
    total_bias: Tensor | None
    dtype: torch.dtype

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return self.parts.norm_forward(x_BTD, self.weight, self.bias, self.dtype)

    def backward(self, dn_BTD: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        return self.parts.norm_backward(
            dn_BTD, *kept, self.weight, self.bias, self.total_weight, self.total_bias
        )


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


class GPT2(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.shape = shape
        self.transformer = Transformer(shape)
        self.lm_head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.requires_grad_(False)
        self.recompute, self.loss_chunk = "none", default_chunk(shape.vocab_size)
        self.attention_kernel: str | None = None  # one of attention.py's; None: one that works
        self._totals: dict[str, Tensor] = {}
        self._layer_weights: list[BlockTensors] = []
        self._layer_totals: list[BlockTensors] = []
        self._visitor: LayerVisitor | None = None
        self._parts = Parts(block_forward, block_backward, norm_forward, norm_backward, chunk_loss_)

    @classmethod
    def uninitialised(cls, shape: GPT2Shape) -> GPT2:
        """On the CPU, with whatever the memory held: for those who fill every tensor themselves."""
        with torch.device("meta"):
            model = cls(shape)
        model.to_empty(device="cpu")
        model.lm_head.weight = model.transformer.wte.weight  # to_empty unties them
        return model

    @classmethod
    def initialised(cls, shape: GPT2Shape, seed: int) -> GPT2:
        """Fresh weights: normal 0.02, projections into the residual stream smaller, biases zero.

        Each tensor has a generator of its own, seeded by its name, on the CPU: the same seed gives
        the same weights on every device and whatever else the model contains.
        """
        model = cls.uninitialised(shape)
        for name, parameter in model.named_parameters():
            model._initialise(name, parameter.data, seed)
        return model

    def _initialise(self, name: str, data: Tensor, seed: int) -> None:
        if data.dim() < 2:
            data.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
            return
        std = 0.02 / math.sqrt(2 * self.shape.n_layer) if name.endswith("c_proj.weight") else 0.02
        data.normal_(0.0, std, generator=torch.Generator().manual_seed(_seed_of(seed, name)))

    def use_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these tensors from now on (by parameter name, the tied head left out)."""
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        self.lm_head.weight = self.transformer.wte.weight
        self._layer_weights = []

    def use_totals(self, totals: Mapping[str, Tensor], visitor: LayerVisitor | None = None) -> None:
        """Add gradients to these tensors from now on."""
        self._visitor = visitor
        self._totals = dict(totals)
        of_layer: list[dict[str, Tensor]] = [{} for _ in range(self.shape.n_layer)]
        for name, total in totals.items():
            if name.startswith("transformer.h."):
                _, _, layer, within = name.split(".", 3)
                of_layer[int(layer)][within] = total
        self._layer_totals = [_block_tensors(by_name) for by_name in of_layer]

    def layer_matrices(self) -> set[str]:
        """Names of the matrices inside layers: their totals may be bf16."""
        return {
            name
            for name, parameter in self.named_parameters()
            if name.startswith("transformer.h.") and parameter.dim() == 2
        }

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile a layer's two passes: all layers share one compilation, and start-up stays short."""

        limit_recompiling()

        def compiled(function: Any) -> Any:
            return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)

        parts = Parts(*map(compiled, self._parts))
        self._parts = parts._replace(chunk_loss=with_kernel(parts.chunk_loss))

    @property
    def spec(self) -> BlockSpec:
        form = "tanh" if self.shape.gelu_tanh else "none"
        head = self.lm_head.weight
        kernel = self.attention_kernel or usual_kernel(self.shape.head_dim, head.dtype, head.device)
        return BlockSpec(self.shape.n_head, form, kernel)

    def _layers(self) -> list[BlockTensors]:
        """Every layer's weights, collected once: walking the modules takes as long as a small layer."""
        if not self._layer_weights:
            self._layer_weights = [
                _block_tensors(dict(block.named_parameters())) for block in self.transformer.h
            ]
        return self._layer_weights

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._layer_weights = []  # .to() and its kin may put other tensors in their place
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def loss_sum(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        dropout: DropoutKeys | None = None,
        *,
        scale: Tensor | None = None,
        noise_key: Tensor | None = None,
    ) -> Tensor:
        """Summed loss of all targets that are not loss.IGNORE.

        With a `scale` (0-dim), the gradients of scale × loss are added to the totals. `noise_key`
        (0-dim int32) decides how totals in bf16 are rounded.
        """
        training = scale is not None
        with torch.set_grad_enabled(training):
            x_BTD = self._embed_dropped(tokens_BT, dropout).requires_grad_(training)
            n_BTD = self._through_layers(x_BTD, dropout, noise_key)
            loss = linear_cross_entropy(
                n_BTD.flatten(0, 1), self.lm_head.weight, targets_BT.flatten(),
                chunk=self.loss_chunk, scale=scale, chunk_loss=self._parts.chunk_loss,
                head_total_VD=self._totals.get("transformer.wte.weight"),
            )  # fmt: skip
            del n_BTD  # the backward pass keeps what it needs of it, which is nothing
            if training:
                loss.backward()  # type: ignore[no-untyped-call]
                assert x_BTD.grad is not None
                self._embed_backward(tokens_BT, x_BTD.grad, dropout)
        return loss.detach()

    def _through_layers(self, x_BTD: Tensor, dropout: DropoutKeys | None, noise_key: Tensor | None) -> Tensor:
        """From the embedding to the normalised last hidden state."""
        n_layer, spec = self.shape.n_layer, self.spec
        nothing: list[None] = [None] * n_layer
        totals = self._layer_totals if torch.is_grad_enabled() else nothing
        masks = dropout.for_layers(n_layer) if dropout is not None else nothing
        # A key of its own for every layer's rounding, for the same reason as dropout's.
        noise = nothing if noise_key is None else keys_for_layers(noise_key[None], n_layer)[:, 0]
        for i, (w, total, mask, key) in enumerate(zip(self._layers(), totals, masks, noise, strict=True)):
            layer = LayerRun(self._parts, spec, i, w, total, mask, key, self._visitor)
            x_BTD = run_layer(x_BTD, layer, KEPT_FIELDS[self.recompute])
        weight, bias = self.transformer.ln_f.weight, self.transformer.ln_f.bias
        dweight, dbias = (self._totals.get(f"transformer.ln_f.{kind}") for kind in ("weight", "bias"))
        last = NormRun(self._parts, weight, bias, dweight, dbias, self.lm_head.weight.dtype)
        return run_layer(x_BTD, last, fields=1)

    @torch.no_grad()
    def hidden(self, tokens_BT: Tensor, dropout: DropoutKeys | None = None) -> Tensor:
        """The normalised last hidden state."""
        return self._through_layers(self._embed_dropped(tokens_BT, dropout), dropout, None)

    @torch.no_grad()
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of every position."""
        return F.linear(self.hidden(tokens_BT), self.lm_head.weight)

    def new_cache(self, batch: int, capacity: int) -> list[LayerCache]:
        """Room for `capacity` tokens."""
        head = self.lm_head.weight
        size = (batch, self.shape.n_head, capacity, self.shape.head_dim)
        return [LayerCache(size, head.device, head.dtype) for _ in range(self.shape.n_layer)]

    @torch.no_grad()
    def next_logits(self, tokens_BT: Tensor, cache: list[LayerCache]) -> Tensor:
        """Logits (B, V) after the last of these tokens; the cache holds what came before them."""
        x_BTD = self._embed(tokens_BT, first_position=cache[0].length)
        with sdpa_kernel(_DECODING_BACKENDS):
            for weights, layer_cache in zip(self._layers(), cache, strict=True):
                x_BTD = block_decode(x_BTD, weights, self.spec, layer_cache)
        ln_f, head_VD = self.transformer.ln_f, self.lm_head.weight
        return F.linear(norm(x_BTD[:, -1], ln_f.weight, ln_f.bias).to(head_VD.dtype), head_VD)

    def crop_block_size(self, block_size: int) -> None:
        """Keep the first block_size positions only (a pretrained model on shorter sequences)."""
        assert block_size <= self.shape.block_size
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight.data[:block_size].clone(), requires_grad=False)
        wpe.num_embeddings = block_size
        self.shape = GPT2Shape(**{**self.shape.to_json(), "block_size": block_size})

    def _embed_dropped(self, tokens_BT: Tensor, dropout: DropoutKeys | None) -> Tensor:
        x_BTD = self._embed(tokens_BT, first_position=0)
        return x_BTD if dropout is None else dropout.apply(x_BTD, _EMBEDDING)

    def _embed(self, tokens_BT: Tensor, first_position: int) -> Tensor:
        """The residual stream begins: in the weights' dtype, but fp32 where that is fp16.

        Sums of many layers outgrow fp16's largest number; bf16 reaches as far as fp32.
        """
        T = tokens_BT.shape[1]
        assert first_position + T <= self.shape.block_size, "more tokens than position embeddings"
        wte_VD, wpe_TD = self.transformer.wte.weight, self.transformer.wpe.weight
        x_BTD = F.embedding(tokens_BT, wte_VD)
        if x_BTD.dtype == torch.float16:
            x_BTD = x_BTD.float()
        return x_BTD + wpe_TD[first_position : first_position + T]

    def _embed_backward(self, tokens_BT: Tensor, dx_BTD: Tensor, dropout: DropoutKeys | None) -> None:
        if dropout is not None:
            dx_BTD = dropout.apply(dx_BTD, _EMBEDDING)
        wte_total, wpe_total = (self._totals[f"transformer.{e}.weight"] for e in ("wte", "wpe"))
        dx_ND = dx_BTD.flatten(0, 1).to(wte_total.dtype)
        # Atomic additions on a GPU: the order of summation is not fixed, as in attention's backward pass.
        # (index_put_ sorts first, and takes 14 times as long on text, where some tokens are everywhere.)
        wte_total.index_add_(0, tokens_BT.flatten(), dx_ND)
        add_to(wpe_total[: dx_BTD.shape[1]], dx_BTD.sum(0, dtype=wpe_total.dtype))


def _block_tensors(by_name: Mapping[str, Tensor]) -> BlockTensors:
    return BlockTensors(*map(by_name.get, _BLOCK_NAMES))  # type: ignore[arg-type]  # weights are there


def _seed_of(seed: int, name: str) -> int:
    # Not hash(): it is salted per process.
    value = seed
    for byte in name.encode():
        value = (value * 1_000_003 + byte) % (2**61 - 1)
    return value
