"""nanoGPT's forward and backward in one compiled graph each, as tensors come and go."""

from __future__ import annotations

from onecard.plan.others.caching_allocator import Block
from onecard.plan.others.nanogpt_step import (
    ATTENTION,
    EMBEDDING,
    FORWARD,
    LAYERS,
    LOGITS_GRADIENT,
    LOGITS_ZEROS,
    LOSS,
    NEW_GRADIENTS,
    NORMALISED,
    NORMED,
    PASSING,
    QKV,
    SMALL,
    Saved,
    Step,
)  # fmt: skip


class CompiledStep(Step):
    """With torch.compile of the whole model: Inductor fuses what lies between matrix products.

    What its forward keeps for the backward is the partitioner's choice: of a norm the normalised stream in
    float32 and what the matrix product reads, and of everything else what eager keeps too.
    """

    def forward(self) -> None:
        D, heap = self.shape.n_embd, self.heap
        heap.moment = FORWARD
        self.embedding_mask = self.mask()
        stream = self.wide(PASSING, D, 4)  # summed into in place
        self.layers: list[Saved] = []
        for _ in range(self.shape.n_layer):
            saved = Saved()
            self.layers.append(saved)
            self.norm(saved)
            self.attend(saved)
            out = self.project(saved, 1)
            self.norm(saved)
            heap.give_back(out)
            self.expand(saved)
            heap.give_back(self.project(saved, 3))
        self.last = Saved()
        self.norm(self.last)
        heap.give_back(stream)
        self.last.copies.append(self.copy(self.embedding))
        self.new_logits()
        self.of_softmax = [self.wide(SMALL, 1, 4) for _ in range(2)]  # the largest logit, log of the sum
        self.drop_previous_logits()

    def evaluate(self) -> None:
        """A graph of its own, without anything kept: each tensor goes after its last reader."""
        D, heap, shape = self.shape.n_embd, self.heap, self.shape
        stream = self.wide(PASSING, D, 4)
        for _ in range(shape.n_layer):
            normed = self.evaluate_norm()
            qkv = self.evaluate_product(0, 3 * D, normed)
            mixed = self.wide(ATTENTION, D, self.size)
            heap.give_back(qkv, heap.take(SMALL, self.batch_size, shape.n_head, shape.block_size, 4))
            out = self.evaluate_product(1, D, mixed)
            normed = self.evaluate_norm()
            heap.give_back(out)
            up = self.evaluate_product(2, 4 * D, normed)  # GELU writes over it
            heap.give_back(self.evaluate_product(3, D, up))
        normed = self.evaluate_norm()
        heap.give_back(stream)
        copy = self.copy(self.embedding)
        self.new_logits()
        heap.give_back(normed, *copy)
        heap.give_back(*(self.wide(SMALL, 1, 4) for _ in range(2)))
        self.drop_previous_logits()

    def evaluate_norm(self) -> Block:
        return self.wide(NORMED, self.shape.n_embd, self.size)

    def evaluate_product(self, matrix: int, width: int, source: Block) -> Block:
        copy = self.copy(self.matrices[matrix])
        self.multiply("forward")
        out = self.wide(QKV if matrix == 0 else PASSING, width, self.size)
        self.heap.give_back(source, *copy)
        return out

    def norm(self, saved: Saved) -> None:
        D = self.shape.n_embd
        saved.small.append([self.wide(SMALL, 1, 4)])
        saved.streams.append(self.wide(NORMALISED, D, 4))
        saved.normed.append(self.wide(NORMED, D, self.size))

    def project(self, saved: Saved, matrix: int) -> Block:
        saved.copies.append(self.copy(self.matrices[matrix]))
        out = self.wide(PASSING, self.shape.n_embd, self.size)
        saved.masks.append(self.mask())
        return out

    def backward(self) -> None:
        D, heap, V = self.shape.n_embd, self.heap, self.shape.vocab_size
        heap.moment = LOSS
        zeros = self.wide(LOGITS_ZEROS, V, self.size)
        of_logits = self.wide(LOGITS_GRADIENT, V, self.size)
        heap.give_back(*self.of_softmax)
        head = heap.take(NEW_GRADIENTS, *self.embedding, self.size)
        self.multiply("backward")
        out = self.wide(PASSING, D, self.size)
        heap.give_back(of_logits, *self.last.copies.pop(), self.last.normed.pop())
        heap.moment = LAYERS
        stream = self.wide(PASSING, D, 4)  # summed into in place
        new = [heap.take(self.fresh, *vector, 4) for vector in self.last_vectors]
        into = self.norm_backward(self.last, out)
        for saved in reversed(self.layers):
            out = self.product_backward(saved, into, 3, new)
            heap.give_back(saved.mlp.pop())  # GELU's backward writes over its gradient
            into = self.norm_backward(saved, self.product_backward(saved, out, 2, new))
            of_mixed = self.product_backward(saved, into, 1, new)
            out = self.product_backward(saved, self.attention_backward(saved, of_mixed), 0, new)
            new += [heap.take(self.fresh, *vector, 4) for vector in self.vectors]
            into = self.norm_backward(saved, out)
        heap.moment = EMBEDDING
        heap.give_back(into)
        new.append(heap.take(self.fresh, *self.positions, 4))
        new.append(heap.take(self.fresh, *self.embedding, 4))  # the head's is added in place
        heap.give_back(stream, head, zeros, *self.embedding_mask)
        self.keep(*new)

    def norm_backward(self, saved: Saved, out: Block) -> Block:
        """Adds to the stream's gradient and casts it for the matrix product below."""
        into = self.wide(PASSING, self.shape.n_embd, self.size)
        masks = saved.masks.pop() if saved.masks else []
        self.heap.give_back(out, saved.streams.pop(), *saved.small.pop(), *masks)
        return into

    def product_backward(self, saved: Saved, of_output: Block, matrix: int, new: list[Block]) -> Block:
        heap, shape = self.heap, self.matrices[matrix]
        weight = heap.take(self.fresh, *shape, self.size)
        of_input = self.wide(PASSING, shape[1], self.size)
        source = {0: saved.normed, 1: [], 2: saved.normed, 3: saved.mlp}[matrix]  # 1: attention's own
        heap.give_back(of_output, *saved.copies.pop(), *([source.pop()] if source else []))
        if self.half:
            cast = heap.take(self.fresh, *shape, 4)
            heap.give_back(weight)
            weight = cast
        new.append(weight)
        return of_input
