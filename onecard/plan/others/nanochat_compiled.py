"""nanochat's forward and backward in one compiled graph each, as tensors come and go.

What forward keeps is the partitioner's choice, as it shows for these models (the same on a CPU): of a layer
the normed inputs of its products, queries and keys after rotation and after their norm, values, attention's
output, the MLP before and after squaring, and the stream twice. 2026's mixed stream is computed again. The
gradient of the logits is written over them. An embedding's gradient is summed in float32 and cast then. In
one thing the measured peaks decide: tokens are looked up again in backward, not kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from onecard.arch.shapes import Nanochat2026Shape
from onecard.plan.others.caching_allocator import Block
from onecard.plan.others.names import EMBEDDED, INNER, MASK, NORMED_QK, ROTATED, SQUARED, VALUES
from onecard.plan.others.nanochat_step import NanochatShapes, NanochatTrainer, Parameter
from onecard.plan.others.nanogpt_step import (
    ATTENTION,
    COPIES,
    EMBEDDING,
    FORWARD,
    GRADIENTS,
    LAYERS,
    LOGITS,
    LOSS,
    NEW_GRADIENTS,
    NORMED,
    PASSING,
    QKV,
    SMALL,
    STREAM,
    WORKSPACE,
    WORKSPACE_BYTES,
)


@dataclass
class Kept:
    """What a layer's forward leaves for its backward."""

    copies: list[Block] = field(default_factory=list)  # of c_q, c_k, c_v, c_proj, c_fc, c_proj
    normed: list[Block] = field(default_factory=list)  # of attention, of the MLP
    rotated: list[Block] = field(default_factory=list)
    attended: list[Block] = field(default_factory=list)  # queries, keys, values, their mix, its statistics
    values: list[Block] = field(default_factory=list)  # their embedding, and its gate's small ones
    middle: list[Block] = field(default_factory=list)  # stream between attention and MLP
    up: list[Block] = field(default_factory=list)
    squared: list[Block] = field(default_factory=list)
    after: list[Block] = field(default_factory=list)  # stream after the layer


class CompiledNanochat(NanochatTrainer):
    """With torch.compile of the whole model."""

    def __init__(
        self, shape: NanochatShapes, batch_size: int, *, dtype: str = "bfloat16", limit: float = math.inf
    ) -> None:
        super().__init__(shape, batch_size, dtype=dtype, limit=limit)
        self.windows = shape.windows if isinstance(shape, Nanochat2026Shape) else ()
        self.gradients: list[Block] = []
        self.multiplied: set[str] = set()

    def load(self) -> None:
        super().load()
        self.waiting = self.batch()

    def micro_batch(self) -> None:
        self.forward()
        self.backward()
        fresh = self.batch()
        self.heap.give_back(*self.waiting)
        self.waiting = fresh

    def clear(self) -> None:
        self.heap.give_back(*self.gradients)
        self.gradients = []

    def wide(self, what: str, width: int, size: int = 0) -> Block:
        return self.heap.take(what, self.batch_size, self.shape.block_size, width, size or self.size)

    def small(self, width: int, size: int) -> Block:
        return self.wide(SMALL, width, size)

    def copy(self, parameter: Parameter) -> list[Block]:
        """A weight in 16 bits, kept for the backward."""
        factors, size = parameter
        return [self.heap.take(COPIES, *factors, self.size)] if size != self.size else []

    def multiply(self, thread: str) -> None:
        """A thread's first matrix product takes its workspace, from whatever is free then, for good."""
        if thread not in self.multiplied:
            self.multiplied.add(thread)
            self.heap.take(WORKSPACE, WORKSPACE_BYTES)

    # --- forward

    def forward(self) -> None:
        D, heap, p = self.shape.n_embd, self.heap, self.parameters
        heap.moment = FORWARD
        embedded = self.wide(EMBEDDED, D, p.embedding[1])
        self.first = [self.small(1, 4)]
        if not self.is_2025:
            # What a token takes of the one before is computed first; its result starts every layer's stream.
            self.first += [*self.smeared(), self.wide(STREAM, D)]
        self.mask: list[Block] = []
        self.layers = [self.layer(0)]
        heap.give_back(embedded)
        self.layers += [self.layer(i) for i in range(1, self.shape.n_layer)]
        if not self.is_2025:
            heap.give_back(*self.layers[-1].after)
            self.layers[-1].after = [self.wide(STREAM, D)]  # less something of the middle layer's
        self.last = [self.small(1, 4), self.wide(NORMED, D)]
        self.head_copy = self.copy(p.head)
        self.multiply("forward")
        self.logits = self.wide(LOGITS, p.head[0][0])
        self.of_softmax = [self.small(1, 4) for _ in range(2)]

    def smeared(self) -> list[Block]:
        shape = self.shape
        assert isinstance(shape, Nanochat2026Shape)
        self.multiply("forward")
        return [self.small(shape.smear_gate_channels, self.size), self.small(1, self.size)]

    def layer(self, number: int) -> Kept:
        D, heap, p, kept = self.shape.n_embd, self.heap, self.parameters, Kept()
        kept.normed = [self.wide(NORMED, D), self.small(1, 4)]
        raw = []
        for i in range(3):
            kept.copies += self.copy(p.layer[i])
            self.multiply("forward")
            raw.append(self.wide(QKV, D))
        q, k, v = raw
        if number in p.valued:
            kept.values = [self.wide(VALUES, D, p.embedding[1]), *self.value_gate()]
        kept.rotated = [self.wide(ROTATED, D)]
        heap.give_back(q)
        kept.rotated.append(self.wide(ROTATED, D))
        heap.give_back(k)
        statistics = [self.small(self.shape.n_head, 4) for _ in range(2)]
        queries, keys = self.wide(NORMED_QK, D), self.wide(NORMED_QK, D)
        if self.windows and self.windows[number] < self.shape.block_size and not self.mask:
            self.mask = [heap.take(MASK, self.shape.block_size, self.shape.block_size, self.size)]
        kept.attended = [queries, keys, v, self.wide(ATTENTION, D), self.small(self.shape.n_head, 4)]
        kept.attended += statistics
        kept.copies += self.copy(p.layer[3])
        out = self.wide(PASSING, D)
        kept.middle = [self.wide(STREAM, D), self.small(1, 4)]
        kept.normed.append(self.wide(NORMED, D))
        heap.give_back(out)
        kept.copies += self.copy(p.layer[4])
        kept.up = [self.wide(INNER, 4 * D)]
        kept.squared = [self.wide(SQUARED, 4 * D)]
        kept.copies += self.copy(p.layer[5])
        out = self.wide(PASSING, D)
        kept.after = [self.wide(STREAM, D)]
        heap.give_back(out)
        return kept

    def value_gate(self) -> list[Block]:
        shape = self.shape
        assert isinstance(shape, Nanochat2026Shape)
        return [self.small(shape.value_gate_channels, self.size), self.small(shape.n_head, self.size)]

    def evaluate(self) -> None:
        """A graph of its own, without anything kept: each tensor goes after its last reader."""
        D, heap, p = self.shape.n_embd, self.heap, self.parameters
        batch = self.batch()
        stream = [self.wide(STREAM, D) for _ in range(1 if self.is_2025 else 3)]  # with start and middle
        for _ in range(self.shape.n_layer):
            blocks = [self.wide(NORMED, D)]
            self.multiply("forward")
            for i in range(3):
                copy = self.copy(p.layer[i])
                blocks.append(self.wide(QKV, D))
                heap.give_back(*copy)
            blocks += [self.wide(ATTENTION, D), self.small(self.shape.n_head, 4)]
            heap.give_back(*blocks)
            blocks = [self.wide(NORMED, D), self.wide(INNER, 4 * D)]
            heap.give_back(blocks.pop(0))
            blocks.append(self.wide(PASSING, D))
            heap.give_back(*blocks)
        normed = self.wide(NORMED, D)
        heap.give_back(*stream)
        copy = self.copy(p.head)
        logits = self.wide(LOGITS, p.head[0][0])
        heap.give_back(normed, *copy, *[self.small(1, 4) for _ in range(2)], logits, *batch)

    # --- backward

    @property
    def fresh(self) -> str:
        """What a gradient just computed is called: the first micro-batch's becomes .grad itself."""
        return NEW_GRADIENTS if self.adds else GRADIENTS

    def backward(self) -> None:
        D, heap, p = self.shape.n_embd, self.heap, self.parameters
        heap.moment = LOSS
        heap.give_back(*self.of_softmax)
        self.new: list[Block] = []
        weight = heap.take(self.fresh, *p.head[0], self.size)
        self.multiply("backward")
        out = self.wide(PASSING, D)
        heap.give_back(self.logits, *self.head_copy, *self.last)
        self.collect(weight, p.head)
        heap.moment = LAYERS
        stream = [self.wide(PASSING, D)]
        heap.give_back(out)
        if not self.is_2025:
            stream += [self.wide(PASSING, D) for _ in range(2)]  # of the middle layer's, of the start
        for number in reversed(range(self.shape.n_layer)):
            self.layer_backward(number, self.layers.pop())
        heap.moment = EMBEDDING
        self.collect_embedding(p.embedding)
        heap.give_back(*stream, *self.first, *self.mask)
        self.keep()

    def collect(self, weight: Block, parameter: Parameter) -> None:
        """The gradient in the weight's own precision."""
        factors, size = parameter
        if size != self.size:
            cast = self.heap.take(self.fresh, *factors, size)
            self.heap.give_back(weight)
            weight = cast
        self.new.append(weight)

    def collect_embedding(self, parameter: Parameter) -> None:
        factors, size = parameter
        summed = self.heap.take(NEW_GRADIENTS, *factors, 4)
        if size != 4:
            cast = self.heap.take(self.fresh, *factors, size)
            self.heap.give_back(summed)
            summed = cast
        self.new.append(summed)

    def keep(self) -> None:
        """The first micro-batch's gradients stay as .grad, those of later ones are added to them."""
        if self.adds:
            self.heap.give_back(*self.new)
        else:
            self.gradients += self.new
        self.new = []

    def product(self, kept: Kept, matrix: int, of_output: list[Block], source: list[Block]) -> Block:
        """A matrix product's backward: the gradients of its weight and of its input."""
        parameter = self.parameters.layer[matrix]
        weight = self.heap.take(self.fresh, *parameter[0], self.size)
        of_input = self.wide(PASSING, parameter[0][1])
        copies = [kept.copies.pop()] if kept.copies else []
        self.heap.give_back(*of_output, *source, *copies)
        self.collect(weight, parameter)
        return of_input

    def layer_backward(self, number: int, kept: Kept) -> None:
        D, heap = self.shape.n_embd, self.heap
        into = self.wide(PASSING, D)
        heap.give_back(*kept.after)
        of_squared = self.product(kept, 5, [into], kept.squared)  # squaring's backward writes over it
        heap.give_back(*kept.up)
        of_normed = self.product(kept, 4, [of_squared], [kept.normed.pop()])
        into = self.wide(PASSING, D)
        heap.give_back(of_normed, *kept.middle)
        of_mixed = self.product(kept, 3, [into], [])
        parts = [self.wide(PASSING, D) for _ in range(3)]
        if self.size == 2:
            padded = self.shape.n_head * (-(-self.shape.head_dim // 32) * 32)
            heap.give_back(self.wide(PASSING, padded, 4))
        heap.give_back(of_mixed, *kept.attended)
        if number in self.parameters.valued:
            heap.give_back(*kept.values)
            self.new.append(heap.take(self.fresh, *self.parameters.gate[0], 4))
            self.collect_embedding(self.parameters.embedding)
        heap.give_back(*kept.rotated)
        out = [self.product(kept, i, [parts[i]], []) for i in (2, 1, 0)]
        heap.give_back(*out, *kept.normed)
