"""nanoGPT's forward and backward without torch.compile, as tensors come and go."""

from __future__ import annotations

from onecard.plan.others.caching_allocator import Block
from onecard.plan.others.nanogpt_step import (
    ATTENTION,
    EMBEDDING,
    FORWARD,
    GELU,
    LAYERS,
    LOG_SOFTMAX,
    LOG_SOFTMAX_32,
    LOGITS_GRADIENT,
    LOSS,
    NEW_GRADIENTS,
    NORMED,
    PASSING,
    QKV,
    SMALL,
    STREAM,
    UP,
    Saved,
    Step,
    Vectors,
)  # fmt: skip


class EagerStep(Step):
    """Without torch.compile: one kernel after the other, each with its own output."""

    def forward(self) -> None:
        D, heap, shape = self.shape.n_embd, self.heap, self.shape
        heap.moment = FORWARD
        # Names of GPT.forward, there until it returns.
        names = [self.wide(PASSING, D, 4), heap.take(PASSING, *self.positions, 4)]
        stream = self.wide(STREAM, D, 4)
        if self.dropout:
            dropped = self.wide(STREAM, D, 4)
            self.embedding_mask = self.mask()
            heap.give_back(stream)
            stream = dropped
        self.layers: list[Saved] = []
        for _ in range(shape.n_layer):
            saved = Saved()
            self.layers.append(saved)
            argument = self.norm(saved, stream)
            self.attend(saved)
            stream = self.project(saved, argument, 1)
            argument = self.norm(saved, stream)
            self.expand(saved)
            stream = self.project(saved, argument, 3)
        self.last = Saved()
        names += self.norm(self.last, stream)
        self.last.copies.append(self.copy(self.embedding))
        self.new_logits()
        self.log_softmax = self.wide(LOG_SOFTMAX, shape.vocab_size, self.size)
        self.float_copy = [self.wide(LOG_SOFTMAX_32, shape.vocab_size, 4)] if self.half else []
        heap.give_back(*names)
        self.drop_previous_logits()

    def evaluate(self) -> None:
        """Each tensor goes when its name does; the weights' copies stay as long as autocast does."""
        D, heap, V = self.shape.n_embd, self.heap, self.shape.vocab_size
        names = [self.wide(PASSING, D, 4), heap.take(PASSING, *self.positions, 4)]
        stream = self.wide(STREAM, D, 4)
        copies: list[Block] = []
        for _ in range(self.shape.n_layer):
            middle = self.evaluate_attention(copies)
            after = self.evaluate_mlp(copies)
            heap.give_back(middle, stream)
            stream = after
        last, cast = self.evaluate_norm()
        heap.give_back(stream)
        copies += self.copy(self.embedding)
        self.new_logits()
        heap.give_back(*cast)
        log_softmax = self.wide(LOG_SOFTMAX, V, self.size)
        float_copy = [self.wide(LOG_SOFTMAX_32, V, 4)] if self.half else []
        heap.give_back(log_softmax, *float_copy, last, *names)
        self.drop_previous_logits()
        heap.give_back(*copies)

    def evaluate_norm(self) -> tuple[Block, list[Block]]:
        """float32 out of a norm, and its cast for the matrix product."""
        D, heap = self.shape.n_embd, self.heap
        out = self.wide(PASSING, D, 4)
        heap.give_back(*(self.wide(SMALL, 1, 4) for _ in range(2)))
        return out, [self.wide(NORMED, D, self.size)] if self.half else []

    def evaluate_attention(self, copies: list[Block]) -> Block:
        D, heap, shape = self.shape.n_embd, self.heap, self.shape
        argument, cast = self.evaluate_norm()
        copies += self.copy(self.matrices[0])
        self.multiply("forward")
        qkv = self.wide(QKV, 3 * D, self.size)
        heap.give_back(*cast)
        mixed = self.wide(ATTENTION, D, self.size)
        heap.give_back(heap.take(SMALL, self.batch_size, shape.n_head, shape.block_size, 4))
        copies += self.copy(self.matrices[1])
        return self.evaluate_sum(D, mixed, qkv, argument)

    def evaluate_mlp(self, copies: list[Block]) -> Block:
        D, heap = self.shape.n_embd, self.heap
        argument, cast = self.evaluate_norm()
        copies += self.copy(self.matrices[2])
        up = self.wide(UP, 4 * D, self.size)
        heap.give_back(*cast)
        gelu = self.wide(GELU, 4 * D, self.size)
        heap.give_back(up)
        copies += self.copy(self.matrices[3])
        return self.evaluate_sum(D, gelu, argument)

    def evaluate_sum(self, width: int, *names: Block) -> Block:
        """c_proj, and the sum with the stream, which makes a new one."""
        out = self.wide(PASSING, width, self.size)
        self.heap.give_back(*names)
        total = self.wide(STREAM, width, 4)
        self.heap.give_back(out)
        return total

    def norm(self, saved: Saved, stream: Block) -> list[Block]:
        """float32 out of a norm; the matrix product that follows casts it and keeps the cast."""
        out = self.wide(PASSING if self.half else NORMED, self.shape.n_embd, 4)
        saved.streams.append(stream)
        saved.small.append([self.wide(SMALL, 1, 4) for _ in range(2)])
        saved.normed.append(self.wide(NORMED, self.shape.n_embd, self.size) if self.half else out)
        return [out] if self.half else []

    def project(self, saved: Saved, argument: list[Block], matrix: int) -> Block:
        """c_proj, dropout and the sum with the stream, which makes a new one."""
        D, heap = self.shape.n_embd, self.heap
        saved.copies.append(self.copy(self.matrices[matrix]))
        out = self.wide(PASSING, D, self.size)
        if self.dropout:
            dropped = self.wide(PASSING, D, self.size)
            saved.masks.append(self.mask())
            heap.give_back(out)
            out = dropped
        heap.give_back(*argument)
        total = self.wide(STREAM, D, 4)
        heap.give_back(out)
        return total

    def backward(self) -> None:
        D, heap, V = self.shape.n_embd, self.heap, self.shape.vocab_size
        heap.moment = LOSS
        gradient = self.wide(LOGITS_GRADIENT, V, 4)
        if self.half:
            heap.give_back(*self.float_copy)
            cast = self.wide(LOGITS_GRADIENT, V, self.size)
            heap.give_back(gradient)
            gradient = cast
        of_logits = self.wide(LOGITS_GRADIENT, V, self.size)
        heap.give_back(gradient, self.log_softmax)
        head = heap.take(NEW_GRADIENTS, *self.embedding, self.size)
        self.multiply("backward")
        out = self.wide(PASSING, D, self.size)
        heap.give_back(of_logits, *self.last.copies.pop(), self.last.normed.pop())
        head = self.to_float(head, NEW_GRADIENTS, *self.embedding)
        heap.moment = LAYERS
        stream = self.norm_backward(out, self.last, self.last_vectors)
        for saved in reversed(self.layers):
            stream = self.layer_backward(saved, stream)
        heap.moment = EMBEDDING
        if self.dropout:
            dropped = self.wide(PASSING, D, 4)
            heap.give_back(stream, *self.embedding_mask)
            stream = dropped
        summed = heap.take(PASSING, *self.positions, 4)
        self.keep(heap.take(self.fresh, *self.positions, 4))
        heap.give_back(summed)
        looked_up = heap.take(NEW_GRADIENTS, *self.embedding, 4)
        heap.give_back(stream)
        both = heap.take(self.fresh, *self.embedding, 4)
        heap.give_back(head, looked_up)
        self.keep(both)

    def to_float(self, gradient: Block, what: str, *matrix: int) -> Block:
        if not self.half:
            return gradient
        cast = self.heap.take(what, *matrix, 4)
        self.heap.give_back(gradient)
        return cast

    def product_backward(self, saved: Saved, of_output: Block, matrix: int) -> Block:
        """A matrix product's: the gradients of its weight and of its input."""
        heap, shape = self.heap, self.matrices[matrix]
        weight = heap.take(self.fresh, *shape, self.size)
        of_input = self.wide(PASSING, shape[1], self.size)
        source = {0: saved.normed, 1: [], 2: saved.normed, 3: saved.mlp}[matrix]  # 1: attention's own
        heap.give_back(of_output, *saved.copies.pop(), *([source.pop()] if source else []))
        self.keep(self.to_float(weight, self.fresh, *shape))
        return of_input

    def norm_backward(self, out: Block, saved: Saved, vectors: Vectors) -> Block:
        D, heap = self.shape.n_embd, self.heap
        if self.half:
            cast = self.wide(PASSING, D, 4)
            heap.give_back(out)
            out = cast
        gradient = self.wide(PASSING, D, 4)
        self.keep(*(heap.take(self.fresh, *vector, 4) for vector in vectors))
        heap.give_back(out, saved.streams.pop(), *saved.small.pop())
        return gradient

    def into_block(self, saved: Saved) -> Block:
        """The stream's gradient as c_proj's backward takes it: cast, and through the dropout."""
        out = self.wide(PASSING, self.shape.n_embd, self.size)
        if self.dropout:
            dropped = self.wide(PASSING, self.shape.n_embd, self.size)
            self.heap.give_back(out, *saved.masks.pop())
            out = dropped
        return out

    def layer_backward(self, saved: Saved, stream: Block) -> Block:
        half = len(self.vectors) // 2
        of_gelu = self.product_backward(saved, self.into_block(saved), 3)
        of_up = self.wide(PASSING, 4 * self.shape.n_embd, self.size)
        self.heap.give_back(of_gelu, saved.mlp.pop())
        out = self.product_backward(saved, of_up, 2)
        stream = self.add(stream, self.norm_backward(out, saved, self.vectors[:half]))
        of_mixed = self.product_backward(saved, self.into_block(saved), 1)
        out = self.product_backward(saved, self.attention_backward(saved, of_mixed), 0)
        return self.add(stream, self.norm_backward(out, saved, self.vectors[half:]))

    def add(self, *gradients: Block) -> Block:
        total = self.wide(PASSING, self.shape.n_embd, 4)
        self.heap.give_back(*gradients)
        return total
