"""GPT-2 as nanoGPT builds it, with nanoGPT's parameter names, so that checkpoints pass both ways.

Shapes: B sequences, T tokens, D width (n_embd), H heads, Q channels per head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from onecard.model.dropout import DropoutKeys, keep_mask
from onecard.model.loss import linear_cross_entropy_sum
from onecard.shapes import GPT2Shape

# Without cuDNN's: it builds a plan for every new length, and in decoding every length is new.
_DECODING_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Dropout sites; those within a layer are told apart from other layers' by that layer's keys.
_EMBEDDING, _ATTENTION, _ATTENTION_OUT, _MLP_OUT = range(4)


class LayerCache:
    """Keys and values of the tokens already seen by one layer, for decoding."""

    def __init__(
        self, batch: int, shape: GPT2Shape, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        size = (batch, shape.n_head, capacity, shape.head_dim)
        self.k_BHTQ = torch.empty(size, device=device, dtype=dtype)
        self.v_BHTQ = torch.empty(size, device=device, dtype=dtype)
        self.length = 0

    def append(self, k_BHTQ: Tensor, v_BHTQ: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k_BHTQ.shape[2]
        self.k_BHTQ[:, :, self.length : end] = k_BHTQ
        self.v_BHTQ[:, :, self.length : end] = v_BHTQ
        self.length = end
        return self.k_BHTQ[:, :, :end], self.v_BHTQ[:, :, :end]


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias, under nanoGPT's parameter names."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.n_head = shape.n_head
        self.c_attn = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.c_proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x_BTD: Tensor, dropout: DropoutKeys | None, cache: LayerCache | None) -> Tensor:
        B, T, D = x_BTD.shape
        q_BHTQ, k_BHTQ, v_BHTQ = (
            part.view(B, T, self.n_head, D // self.n_head).transpose(1, 2)
            for part in self.c_attn(x_BTD).split(D, 2)
        )
        if dropout is not None:
            # A mask per attention weight cannot be handed to the fused kernels. Computing scores in
            # the open and again in the backward pass keeps T×T memory to one layer at a time.
            y_BHTQ = checkpoint(
                _attention_with_dropout, q_BHTQ, k_BHTQ, v_BHTQ, dropout, _ATTENTION,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
        elif cache is not None:
            fresh = cache.length == 0
            assert fresh or T == 1, "a cache grows by one prompt, then token by token"
            k_BHTQ, v_BHTQ = cache.append(k_BHTQ, v_BHTQ)
            y_BHTQ = F.scaled_dot_product_attention(q_BHTQ, k_BHTQ, v_BHTQ, is_causal=fresh)
        else:
            y_BHTQ = F.scaled_dot_product_attention(q_BHTQ, k_BHTQ, v_BHTQ, is_causal=True)
        y_BTD = self.c_proj(y_BHTQ.transpose(1, 2).reshape(B, T, D))
        return y_BTD if dropout is None else dropout.apply(y_BTD, _ATTENTION_OUT)


def _attention_with_dropout(
    q_BHTQ: Tensor, k_BHTQ: Tensor, v_BHTQ: Tensor, dropout: DropoutKeys, site: int
) -> Tensor:
    _, H, T, Q = q_BHTQ.shape
    scores_BHTT = (q_BHTQ @ k_BHTQ.transpose(-2, -1)) / math.sqrt(Q)
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTQ.device).triu(1)
    weights_BHTT = scores_BHTT.masked_fill(future_TT, float("-inf")).softmax(-1)
    kept_BHTT = keep_mask(dropout.keys_B, (H, T, T), dropout.probability, site)
    weights_BHTT = weights_BHTT * kept_BHTT * (1.0 / (1.0 - dropout.probability))
    return weights_BHTT.to(v_BHTQ.dtype) @ v_BHTQ


class MLP(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.c_proj = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)
        self.gelu_form = "tanh" if shape.gelu_tanh else "none"

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTD), approximate=self.gelu_form))


class Block(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(shape.n_embd, shape.bias)
        self.attn = CausalSelfAttention(shape)
        self.ln_2 = LayerNorm(shape.n_embd, shape.bias)
        self.mlp = MLP(shape)

    def forward(
        self,
        x_BTD: Tensor,
        dropout: DropoutKeys | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD), dropout, cache)
        y_BTD = self.mlp(self.ln_2(x_BTD))
        return x_BTD + (y_BTD if dropout is None else dropout.apply(y_BTD, _MLP_OUT))


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
        self._loss_sum = linear_cross_entropy_sum

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

    @property
    def blocks(self) -> Iterator[Block]:
        return (block for block in self.transformer.h if isinstance(block, Block))

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile block by block: all layers share one compilation, and start-up stays short."""
        for block in self.blocks:
            block.compile(dynamic=False, backend=backend)
        self._loss_sum = torch.compile(linear_cross_entropy_sum, dynamic=False, backend=backend)

    def hidden(self, tokens_BT: Tensor, dropout: DropoutKeys | None = None) -> Tensor:
        """The normalised last hidden state, for training and evaluation."""
        x_BTD = self._embed(tokens_BT, first_position=0)
        if dropout is not None:
            x_BTD = dropout.apply(x_BTD, _EMBEDDING)
        n_layer = self.shape.n_layer
        by_layer = dropout.for_layers(n_layer) if dropout is not None else [None] * n_layer
        for block, layer_dropout in zip(self.blocks, by_layer, strict=True):
            x_BTD = block(x_BTD, layer_dropout)
        return self.transformer.ln_f(x_BTD)

    def loss_sum(self, tokens_BT: Tensor, targets_BT: Tensor, dropout: DropoutKeys | None = None) -> Tensor:
        """Summed loss of all targets that are not loss.IGNORE."""
        return self._loss_sum(self.hidden(tokens_BT, dropout), self.lm_head.weight, targets_BT)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of every position."""
        return self.lm_head(self.hidden(tokens_BT))

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype | None = None) -> list[LayerCache]:
        """Room for `capacity` tokens. `dtype` is what attention computes in, where autocast makes it
        another than the weights'."""
        device, dtype = self.lm_head.weight.device, dtype or self.lm_head.weight.dtype
        return [LayerCache(batch, self.shape, capacity, device, dtype) for _ in self.blocks]

    def next_logits(self, tokens_BT: Tensor, cache: list[LayerCache]) -> Tensor:
        """Logits (B, V) after the last of these tokens; the cache holds what came before them."""
        x_BTD = self._embed(tokens_BT, first_position=cache[0].length)
        with sdpa_kernel(_DECODING_BACKENDS):
            for block, layer_cache in zip(self.blocks, cache, strict=True):
                # .forward on purpose: a compiled __call__ would compile again for every cache length.
                x_BTD = block.forward(x_BTD, cache=layer_cache)
        return self.lm_head(self.transformer.ln_f(x_BTD[:, -1]))

    def crop_block_size(self, block_size: int) -> None:
        """Keep the first block_size positions only (a pretrained model on shorter sequences)."""
        assert block_size <= self.shape.block_size
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight.data[:block_size].clone())
        wpe.num_embeddings = block_size
        self.shape = GPT2Shape(**{**self.shape.to_json(), "block_size": block_size})

    def _embed(self, tokens_BT: Tensor, first_position: int) -> Tensor:
        T = tokens_BT.shape[1]
        assert first_position + T <= self.shape.block_size, "more tokens than position embeddings"
        positions_T = torch.arange(first_position, first_position + T, device=tokens_BT.device)
        return self.transformer.wte(tokens_BT) + self.transformer.wpe(positions_T)


def _seed_of(seed: int, name: str) -> int:
    # Not hash(): it is salted per process.
    value = seed
    for byte in name.encode():
        value = (value * 1_000_003 + byte) % (2**61 - 1)
    return value
