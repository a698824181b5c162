"""transformers' Trainer on paper: its GPT-2 and its Llama without a compiler, under autocast, fused AdamW.

What is written down here and easily missed:
- GPT-2's GELU is written with single operations: under autocast four float32 tensors as wide as the MLP.
- Its configuration drops a tenth of the embeddings, of the residual branches and of attention unless asked.
- Autocast casts the argument of every matrix product anew: queries, keys and values have a copy each.
- The loss has float32 logits; the logits that the model returns are cast to float32 once more.
- With gradient checkpointing a layer keeps its input alone, and is computed again in backward.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from onecard.arch.shapes import GPT2Shape
from onecard.plan.others.autograd import Shape, Tensor
from onecard.plan.others.eager import Eager
from onecard.plan.others.names import EMBEDDED, INNER, LOGITS_32, NORMED_QK, OTHERS, ROTATED
from onecard.plan.others.nanogpt_step import (
    ADAM,
    BATCH,
    EMBEDDING,
    LAYERS,
    LOGITS,
    NORMALISED,
    NORMED,
    PASSING,
    QKV,
    STREAM,
    WEIGHTS,
)


@dataclass(frozen=True)
class LlamaShape:
    """What determines the tensors of a Llama as transformers builds it: also Mistral, and the like."""

    n_layer: int
    n_head: int
    n_embd: int
    inner: int  # width of the MLP
    vocab_size: int
    block_size: int
    n_kv_head: int = 0  # 0: as many as queries
    tied: bool = False  # the head is the embedding

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head


class HuggingFaceStep(Eager):
    """A model's weights by name, and the Trainer's steps; `forward` is that of an architecture."""

    def __init__(
        self, shape: GPT2Shape | LlamaShape, batch_size: int, *, dtype: str = "bfloat16",
        dropout: bool = True, checkpointing: bool = False, limit: float = math.inf,
    ) -> None:  # fmt: skip
        super().__init__(limit)
        self.batch_size, self.dropout, self.checkpointing = batch_size, dropout, checkpointing
        self.vocab_size, self.n_layer = shape.vocab_size, shape.n_layer
        self.half, self.size = dtype != "float32", 4 if dtype == "float32" else 2
        self.prepare(shape.vocab_size, (batch_size, shape.block_size), (8, 8))

    def load(self) -> None:
        self.named = {
            name: self.tape.there(self.heap.take(WEIGHTS, *factors, 4), factors, 4, learned=True)
            for name, factors in self.parameters().items()
        }
        self.weights, self.buffers = list(self.named.values()), []
        self.next_batch()

    @abstractmethod
    def parameters(self) -> dict[str, Shape]:
        """Shapes by name."""

    def update(self, *, is_first: bool) -> None:
        if is_first:
            for weight in self.weights:
                for _ in range(2):
                    self.heap.take(ADAM, *weight.shape, 4)
        self.clear()

    def linear(self, what: str, x: Tensor, name: str) -> Tensor:
        tape = self.tape
        x = tape.cast(NORMED, x, self.size) if self.half else x
        bias = self.named.get(f"{name}.bias")
        return tape.linear(
            what, x, tape.copy(self.named[name], x.size), tape.copy(bias, x.size) if bias else None
        )

    def drop(self, what: str, x: Tensor) -> Tensor:
        return self.tape.dropout(what, x) if self.dropout else x

    def layers(self, x: Tensor, layer: Callable[..., Tensor]) -> Tensor:
        for number in range(self.n_layer):
            if self.checkpointing:
                x = self.tape.checkpoint(partial(layer, number=number), x)
            else:
                x = layer(x, number=number)
        return x

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.tape.autocast():
            logits, loss = self.loss(*self.model(tokens), targets)
        if self.half:
            self.tape.new(LOGITS_32, logits.shape, 4)  # accelerate's copy of what the model returns
        return loss

    @abstractmethod
    def model(self, tokens: Tensor) -> tuple[Tensor, str]:
        """The last norm's output, and the name of the head."""

    def loss(self, x: Tensor, head: str, targets: Tensor) -> tuple[Tensor, Tensor]:
        """With the logits. The targets are shifted here, in a copy."""
        tape = self.tape
        logits = self.linear(LOGITS, tape.mark(x, LAYERS), head)
        b, t = targets.shape
        # One sequence stays a part of the longer one that it is shifted in.
        shifted = tape.new(BATCH, (b, t + (b == 1)), targets.size)
        return logits, tape.cross_entropy(tape.cast(LOGITS_32, logits, 4), shifted)


class HuggingFaceGPT2(HuggingFaceStep):
    """GPT2LMHeadModel."""

    def __init__(self, shape: GPT2Shape, batch_size: int, **options: object) -> None:
        super().__init__(shape, batch_size, **options)  # type: ignore[arg-type]
        self.shape = shape

    def parameters(self) -> dict[str, Shape]:
        D = self.shape.n_embd
        found: dict[str, Shape] = {
            "embedding": (self.shape.vocab_size, D), "positions": (self.shape.block_size, D),
        }  # fmt: skip
        of_layer: dict[str, Shape] = {
            "norm": (D,), "norm.bias": (D,), "qkv": (3 * D, D), "qkv.bias": (3 * D,), "out": (D, D),
            "out.bias": (D,), "norm2": (D,), "norm2.bias": (D,), "up": (4 * D, D), "up.bias": (4 * D,),
            "down": (D, 4 * D), "down.bias": (D,),
        }  # fmt: skip
        for number in range(self.n_layer):
            found |= {f"{number}.{name}": factors for name, factors in of_layer.items()}
        return found | {"last": (D,), "last.bias": (D,)}

    def norm(self, what: str, x: Tensor, name: str) -> Tensor:
        return self.tape.layer_norm(what, x, self.named[name], self.named[f"{name}.bias"])

    def model(self, tokens: Tensor) -> tuple[Tensor, str]:
        tape, D = self.tape, self.shape.n_embd
        numbers = tape.new(BATCH, (self.shape.block_size,), 8)
        embedded = tape.mark(tape.embedding(EMBEDDED, self.named["embedding"], tokens), EMBEDDING)
        positions = tape.embedding(PASSING, self.named["positions"], numbers).view(
            1, self.shape.block_size, D
        )
        x = tape.add(STREAM, embedded, positions)
        x = self.drop(STREAM, x)
        x = self.layers(x, self.layer)
        return self.norm(NORMED, x, "last"), "embedding"

    def layer(self, x: Tensor, number: int) -> Tensor:
        tape = self.tape
        normed = self.norm(PASSING, x, f"{number}.norm")
        x = tape.add(STREAM, x, self.attention(normed, number))
        normed = self.norm(PASSING, x, f"{number}.norm2")
        return tape.add(STREAM, x, self.mlp(normed, number))

    def attention(self, x: Tensor, number: int) -> Tensor:
        tape, D = self.tape, self.shape.n_embd
        b, t, _ = x.shape
        heads = (b, t, self.shape.n_head, self.shape.head_dim)
        mixed = tape.packed_attention(self.linear(QKV, x, f"{number}.qkv"), heads).view(b, t, D)
        return self.drop(PASSING, self.linear(PASSING, mixed, f"{number}.out"))

    def mlp(self, x: Tensor, number: int) -> Tensor:
        """0.5·x · (1 + tanh(√(2/π) · (x + 0.044715·x³))), operation by operation."""
        tape = self.tape
        x = self.linear(INNER, x, f"{number}.up")
        half = tape.scale(INNER, x)
        cubed = tape.scale(PASSING, tape.power(PASSING, tape.cast(INNER, x, 4)))
        inside = tape.scale(PASSING, tape.add(PASSING, x, cubed))
        del cubed
        outside = tape.scale(INNER, tape.tanh(INNER, inside))
        del inside
        x = tape.times(INNER, half, outside)
        del half, outside
        return self.drop(PASSING, self.linear(PASSING, x, f"{number}.down"))


class HuggingFaceLlama(HuggingFaceStep):
    """LlamaForCausalLM; it has no dropout."""

    def __init__(self, shape: LlamaShape, batch_size: int, **options: object) -> None:
        super().__init__(shape, batch_size, **options)  # type: ignore[arg-type]
        self.shape = shape

    def parameters(self) -> dict[str, Shape]:
        shape, D = self.shape, self.shape.n_embd
        beside = shape.kv_heads * shape.head_dim
        of_layer: dict[str, Shape] = {
            "q": (D, D), "k": (beside, D), "v": (beside, D), "out": (D, D), "gate": (shape.inner, D),
            "up": (shape.inner, D), "down": (D, shape.inner), "norm": (D,), "norm2": (D,),
        }  # fmt: skip
        found: dict[str, Shape] = {"embedding": (shape.vocab_size, D)}
        for number in range(self.n_layer):
            found |= {f"{number}.{name}": factors for name, factors in of_layer.items()}
        return found | {"last": (D,)} | ({} if shape.tied else {"head": (shape.vocab_size, D)})

    def norm(self, what: str, x: Tensor, name: str) -> Tensor:
        """x · 1/√(mean of squares), times a weight: both factors are kept."""
        tape = self.tape
        scale = tape.root_of_squares(x)
        return tape.times(what, tape.times(NORMALISED, x, scale), self.named[name])

    def model(self, tokens: Tensor) -> tuple[Tensor, str]:
        tape, shape = self.tape, self.shape
        x = tape.mark(tape.embedding(EMBEDDED, self.named["embedding"], tokens), EMBEDDING)
        positions = (1, shape.block_size, shape.head_dim)
        rotary = [tape.new(OTHERS, positions, 4) for _ in range(2)]
        x = self.layers(x, partial(self.layer, rotary=rotary))
        return self.norm(NORMED, x, "last"), "embedding" if shape.tied else "head"

    def layer(self, x: Tensor, number: int, rotary: list[Tensor]) -> Tensor:
        tape = self.tape
        normed = self.norm(PASSING, x, f"{number}.norm")
        x = tape.add(STREAM, x, self.attention(normed, number, rotary))
        normed = self.norm(PASSING, x, f"{number}.norm2")
        return tape.add(STREAM, x, self.mlp(normed, number))

    def attention(self, x: Tensor, number: int, rotary: list[Tensor]) -> Tensor:
        tape, shape = self.tape, self.shape
        b, t, _ = x.shape
        q = self.linear(QKV, x, f"{number}.q").view(b, t, shape.n_head, shape.head_dim)
        k, v = (
            self.linear(QKV, x, f"{number}.{name}").view(b, t, shape.kv_heads, shape.head_dim)
            for name in "kv"
        )
        q, k = self.rotated(q, *rotary), self.rotated(k, *rotary)
        mixed = tape.attention(*(tape.cast(NORMED_QK, x, self.size) for x in (q, k, v)))
        return self.linear(PASSING, mixed.view(b, t, shape.n_embd), f"{number}.out")

    def rotated(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """x · cos + (halves of x changed round) · sin, in the positions' precision."""
        tape, half = self.tape, (*x.shape[:-1], x.shape[-1] // 2)
        plain = tape.times(PASSING, x, cosines)
        changed = tape.together(PASSING, x.shape, tape.scale(PASSING, tape.part(x, half)), tape.part(x, half))
        return tape.add(ROTATED, plain, tape.times(PASSING, changed, sines))

    def mlp(self, x: Tensor, number: int) -> Tensor:
        tape = self.tape
        active = tape.silu(INNER, self.linear(INNER, x, f"{number}.gate"))
        inner = tape.times(INNER, active, self.linear(INNER, x, f"{number}.up"))
        return self.linear(PASSING, inner, f"{number}.down")
