"""nanochat's forward without torch.compile, written with operations on paper; backward follows from it.

2025 runs under autocast: products are 16-bit, RMS norms and squares float32, and with them the residual
stream. 2026 casts its weights itself, and everything but the logits is 16-bit.
"""

from __future__ import annotations

import math
from itertools import islice

from onecard.arch.shapes import Nanochat2026Shape
from onecard.plan.others.autograd import Tensor
from onecard.plan.others.eager import Eager
from onecard.plan.others.names import (
    CAPPED,
    EMBEDDED,
    INNER,
    LOGITS_32,
    NORMED_QK,
    RELU,
    ROTATED,
    SQUARED,
    VALUES,
)
from onecard.plan.others.nanochat_step import NanochatShapes, NanochatTrainer
from onecard.plan.others.nanogpt_step import (
    EMBEDDING,
    LAYERS,
    LOGITS,
    NORMED,
    PASSING,
    QKV,
    SMALL,
    STREAM,
)


class EagerNanochat(Eager, NanochatTrainer):
    """Either generation."""

    def __init__(
        self, shape: NanochatShapes, batch_size: int, *, dtype: str = "bfloat16", limit: float = math.inf
    ) -> None:
        super().__init__(shape, batch_size, dtype=dtype, limit=limit)
        sizes = (4, 8) if self.is_2025 else (8, 8)
        self.prepare(shape.vocab_size, (batch_size, shape.block_size), sizes)
        self.half = self.is_2025 and self.size == 2

    def load(self) -> None:
        super().load()
        p, there = self.parameters, self.tape.there
        kinds = [p.embedding, *p.value_embeddings]
        self.w_embedding, *values = (
            there(block, *kind, learned=True) for block, kind in zip(self.embeddings, kinds, strict=True)
        )
        self.w_values = dict(zip(sorted(p.valued), values, strict=True))
        matrices = iter(zip(self.matrices, p.matrices, strict=True))
        self.w_layers = [
            [there(block, *kind, learned=True) for block, kind in islice(matrices, 6 + (i in p.valued))]
            for i in range(self.shape.n_layer)
        ]
        self.w_head = there(self.head, *p.head, learned=True)
        self.w_scalars = [
            there(block, *kind, learned=True) for block, kind in zip(self.scalars, p.scalars, strict=True)
        ]
        of_layers = [weight for layer in self.w_layers for weight in layer]
        self.weights = [self.w_embedding, self.w_head, *values, *of_layers, *self.w_scalars]
        positions = (self.shape.block_size, self.shape.head_dim // 2)
        self.buffers = [there(block, positions, self.rotary_size) for block in self.rotary]
        self.next_batch()

    # --- forward

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if not self.is_2025:
            return self._forward_2026(tokens, targets)
        with self.tape.autocast():
            return self._forward_2025(tokens, targets)

    def _forward_2025(self, tokens: Tensor, targets: Tensor) -> Tensor:
        tape = self.tape
        x = tape.mark(tape.embedding(EMBEDDED, self.w_embedding, tokens), EMBEDDING)
        x = self.norm(STREAM, x)
        for weights in self.w_layers:
            x = self.block(x, weights, None)
        x = tape.mark(self.norm(NORMED, x), LAYERS)
        logits = self.linear(LOGITS, x, self.w_head)
        logits = tape.scale(CAPPED, tape.tanh(CAPPED, tape.scale(LOGITS, logits)))
        logits = tape.cast(LOGITS_32, logits, 4)
        return tape.cross_entropy(logits, targets)

    def _forward_2026(self, tokens: Tensor, targets: Tensor) -> Tensor:
        tape, shape = self.tape, self.shape
        assert isinstance(shape, Nanochat2026Shape)
        of_stream, of_start, smear_gate, smear, backout = self.w_scalars
        x = tape.mark(tape.embedding(EMBEDDED, self.w_embedding, tokens), EMBEDDING)
        x = tape.cast(EMBEDDED, x, self.size)
        x = self.norm(STREAM, x)
        x = self.smeared(x, smear_gate, smear)
        start = x
        middle = x
        for i, weights in enumerate(self.w_layers):
            scaled = tape.times(STREAM, x, self.number(of_stream))
            x = tape.add(STREAM, scaled, tape.times(PASSING, start, self.number(of_start)))
            del scaled
            values = None
            if i in self.w_values:
                values = tape.cast(VALUES, tape.embedding(VALUES, self.w_values[i], tokens), self.size)
            x = self.block(x, weights, values, shape.windows[i])
            if i == shape.middle_layer:
                middle = x
        x = tape.add(STREAM, x, tape.times(PASSING, middle, tape.copy(backout, x.size)))
        x = tape.mark(self.norm(NORMED, x), LAYERS)
        logits = self.linear(LOGITS, x, self.w_head)
        if shape.vocab_size < logits.shape[-1]:
            logits = tape.part(logits, (*logits.shape[:-1], shape.vocab_size))
        logits = tape.cast(LOGITS_32, logits, 4)
        logits = tape.scale(LOGITS_32, tape.tanh(CAPPED, tape.scale(LOGITS_32, logits)))
        return tape.cross_entropy(logits, targets)

    def number(self, vector: Tensor) -> Tensor:
        """One of a vector's."""
        return self.tape.part(vector, ())

    def smeared(self, x: Tensor, gate_weight: Tensor, smear: Tensor) -> Tensor:
        """Something of the token before, in all but the first."""
        tape, (b, t, width) = self.tape, x.shape
        later = tape.part(x, (b, t - 1, width))
        read = tape.part(later, (b, t - 1, gate_weight.shape[1]))
        if b > 1:  # rows of one sequence lie evenly; those of several have to be copied together
            read = tape.copied(PASSING, read)
        gate = tape.sigmoid(SMALL, self.linear(SMALL, read, gate_weight))
        gate = tape.times(SMALL, gate, tape.copy(smear, x.size))
        mixed = tape.times(PASSING, tape.part(x, (b, t - 1, width)), gate)
        mixed = tape.add(PASSING, tape.part(x, (b, t - 1, width)), mixed)
        return tape.together(STREAM, x.shape, tape.part(x, (b, 1, width)), mixed)

    def block(self, x: Tensor, weights: list[Tensor], values: Tensor | None, window: int = 0) -> Tensor:
        normed = self.norm(NORMED, x)
        x = self.tape.add(STREAM, x, self.attention(normed, weights, values, window))
        normed = self.norm(NORMED, x)
        return self.tape.add(STREAM, x, self.mlp(normed, weights))

    def attention(self, x: Tensor, weights: list[Tensor], values: Tensor | None, window: int) -> Tensor:
        tape, (b, t, width) = self.tape, x.shape
        heads = (b, t, self.shape.n_head, self.shape.head_dim)
        q, k, v = (self.linear(QKV, x, weights[i]).view(*heads) for i in range(3))
        if values is not None:
            gate = self.linear(SMALL, tape.part(x, (b, t, weights[6].shape[1])), weights[6])
            gate = tape.scale(SMALL, tape.sigmoid(SMALL, gate)).view(b, t, self.shape.n_head, 1)
            v = tape.add(QKV, v, tape.times(PASSING, values.view(*heads), gate))
        q, k = (tape.rotated(ROTATED, x, *self.buffers) for x in (q, k))
        q, k = (self.norm(NORMED_QK, x) for x in (q, k))
        if not self.is_2025:
            q, k = (tape.scale(NORMED_QK, x) for x in (q, k))
        mask = tape.window(t, self.size) if 0 < window < t else None
        q, k, v = (tape.cast(NORMED_QK, x, self.size) for x in (q, k, v))
        mixed = tape.attention(q, k, v, mask)
        return self.linear(PASSING, mixed.view(b, t, width), weights[3])

    def mlp(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        tape = self.tape
        x = self.linear(INNER, x, weights[4])
        active = tape.relu(RELU, x)
        x = tape.power(SQUARED, tape.cast(RELU, active, 4) if self.half else active)
        del active
        return self.linear(PASSING, x, weights[5])

    def norm(self, what: str, x: Tensor) -> Tensor:
        return self.tape.rms_norm(what, x)

    def linear(self, what: str, x: Tensor, weight: Tensor) -> Tensor:
        x = self.tape.cast(NORMED, x, 2) if self.half else x
        return self.tape.linear(what, x, self.tape.copy(weight, x.size))
