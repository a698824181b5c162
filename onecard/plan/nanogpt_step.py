"""nanoGPT's training step as its tensors come and go: model.py under train.py's autocast, on one card.

Every tensor that is worth a name is taken from the allocator and given back in the order in which PyTorch
does it, eager or compiled as a whole. Nothing here is fitted to a measurement. Letters: B sequences of T
tokens, N = B·T, D width, V vocabulary, H heads; the last factor of a tensor is its bytes per value.

What is written down here and easily missed:
- `logits` of train.py's loop is a name that stays until the next micro-batch's logits replace them.
- Eager, cross_entropy takes log_softmax in 16 bits, and nll_loss a float32 copy of it (autocast's list).
- Compiled, the graph returns the logits, so its backward wants a gradient for them: a tensor of zeros, as
  large as they are, that lives through all of the backward. Its weight gradients come out at its end, all
  together, beside those of the micro-batches before.
- The head's weight is the embedding's: its gradient waits for the embedding's until the end of backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onecard.plan.caching_allocator import MIB, Block, CachingAllocator
from onecard.shapes import GPT2Shape

WEIGHTS = "weights"
GRADIENTS = "gradients"
ADAM = "AdamW's two averages"
COPIES = "16-bit copies of the weights"
STREAM = "residual stream"
NORMALISED = "normalised residual stream"
NORMED = "layer norms' outputs"
QKV = "queries, keys, values"
ATTENTION = "attention's outputs"
UP = "MLP before GELU"
GELU = "MLP after GELU"
MASKS = "dropout masks"
SMALL = "norms' and attention's statistics"
LOGITS = "logits"
LOG_SOFTMAX = "log softmax of the logits"
LOG_SOFTMAX_32 = "log softmax in float32"
LOGITS_GRADIENT = "gradient of the logits"
LOGITS_ZEROS = "zeros as gradient of the returned logits"
PASSING = "passing values of forward and backward"
NEW_GRADIENTS = "gradients of this micro-batch"
WORKSPACE = "cuBLAS workspaces"
BATCH = "tokens and targets"

FORWARD = "forward"
LOSS = "backward of the loss"
LAYERS = "backward of the layers"
EMBEDDING = "end of the backward, at the embedding"
UPDATE = "optimizer step"

# cuBLAS keeps one per thread that multiplies matrices (forward's and backward's). This is PyTorch's size on
# Hopper, where the figures were measured; on other cards it is 8 MiB.
WORKSPACE_BYTES = 32 * MIB


Vectors = list[tuple[int, ...]]


@dataclass
class Saved:
    """What a layer's forward leaves for its backward; of the last norm and the head only the lists."""

    streams: list[Block] = field(default_factory=list)  # what the two norms need: read (eager) or normalised
    normed: list[Block] = field(default_factory=list)
    small: list[list[Block]] = field(default_factory=list)  # of each norm
    copies: list[list[Block]] = field(default_factory=list)  # of c_attn, c_proj, c_fc, c_proj
    masks: list[list[Block]] = field(default_factory=list)
    attention: list[Block] = field(default_factory=list)  # queries, keys and values, their mix, its statistics
    mlp: list[Block] = field(default_factory=list)  # before and after GELU


class Step:
    """A trainer's memory over its steps; forward and backward are the eager or the compiled ones below."""

    def __init__(self, shape: GPT2Shape, batch_size: int, *, half: bool, dropout: bool) -> None:
        self.shape, self.batch_size, self.half, self.dropout = shape, batch_size, half, dropout
        self.heap = CachingAllocator()
        self.size = 2 if half else 4  # bytes of what matrix products give
        D, bias = shape.n_embd, int(shape.bias)
        self.vectors: Vectors = [(D,)] * (2 + 2 * bias) + [(3 * D,), (D,), (4 * D,), (D,)] * bias  # of a layer
        self.matrices = [(3 * D, D), (D, D), (4 * D, D), (D, 4 * D)]
        self.last_vectors: Vectors = [(D,)] * (1 + bias)
        self.embedding, self.positions = (shape.vocab_size, D), (shape.block_size, D)
        self.gradients: list[Block] = []
        self.logits: Block | None = None
        self.previous_logits: Block | None = None
        self.embedding_mask: list[Block] = []
        self.multiplied: set[str] = set()  # threads that have
        self.adds = False  # a micro-batch after the first of its step

    def run(self, steps: int, accumulation: int) -> CachingAllocator:
        take = self.heap.take
        layers = (self.vectors + self.matrices) * self.shape.n_layer
        parameters = [self.embedding, self.positions, *layers, *self.last_vectors]
        for parameter in parameters:
            take(WEIGHTS, *parameter, 4)
        for _ in range(2):
            take(BATCH, self.batch_size, self.shape.block_size, 8)
        for step in range(steps):
            for micro in range(accumulation):
                self.adds = micro > 0
                self.forward()
                self.backward()
            self.heap.moment = UPDATE
            if step == 0:
                for parameter in sorted(parameters, key=len, reverse=True):  # train.py's groups: matrices first
                    take(ADAM, *parameter, 4)
                    take(ADAM, *parameter, 4)
            self.heap.give_back(*self.gradients)
            self.gradients = []
        return self.heap

    def forward(self) -> None:
        raise NotImplementedError

    def backward(self) -> None:
        raise NotImplementedError

    def wide(self, what: str, width: int, size: int) -> Block:
        """A tensor of so many values of so many bytes for every token."""
        return self.heap.take(what, self.batch_size, self.shape.block_size, width, size)

    def copy(self, matrix: tuple[int, ...]) -> list[Block]:
        """Autocast's copy of a weight, made when a forward first uses it and kept for the backward."""
        return [self.heap.take(COPIES, *matrix, self.size)] if self.half else []

    def mask(self) -> list[Block]:
        return [self.wide(MASKS, self.shape.n_embd, 1)] if self.dropout else []

    @property
    def fresh(self) -> str:
        """What a gradient just computed is called: the first micro-batch's becomes .grad itself."""
        return NEW_GRADIENTS if self.adds else GRADIENTS

    def keep(self, *gradients: Block) -> None:
        """The first micro-batch's gradients stay as .grad, those of later ones are added to them."""
        if self.adds:
            self.heap.give_back(*gradients)
        else:
            self.gradients += gradients

    def multiply(self, thread: str) -> None:
        """A thread's first matrix product takes its workspace, from whatever is free then, for good."""
        if thread not in self.multiplied:
            self.multiplied.add(thread)
            self.heap.take(WORKSPACE, WORKSPACE_BYTES)

    def new_logits(self) -> None:
        self.previous_logits, self.logits = self.logits, self.wide(LOGITS, self.shape.vocab_size, self.size)

    def drop_previous_logits(self) -> None:
        """train.py's name for them now means the new ones."""
        if self.previous_logits is not None:
            self.heap.give_back(self.previous_logits)

    def attend(self, saved: Saved) -> None:
        D, shape = self.shape.n_embd, self.shape
        saved.copies.append(self.copy(self.matrices[0]))
        self.multiply("forward")
        saved.attention = [
            self.wide(QKV, 3 * D, self.size),
            self.wide(ATTENTION, D, self.size),
            self.heap.take(SMALL, self.batch_size, shape.n_head, shape.block_size, 4),
        ]

    def expand(self, saved: Saved) -> None:
        saved.copies.append(self.copy(self.matrices[2]))
        saved.mlp = [self.wide(what, 4 * self.shape.n_embd, self.size) for what in (UP, GELU)]

    def attention_backward(self, saved: Saved, of_mixed: Block) -> Block:
        """Flash attention sums the gradient of the queries in float32, heads padded to 32 channels."""
        D, heap = self.shape.n_embd, self.heap
        parts = [self.wide(PASSING, D, self.size) for _ in range(3)]
        if self.half:
            padded = self.shape.n_head * (-(-self.shape.head_dim // 32) * 32)
            heap.give_back(self.wide(PASSING, padded, 4))
        heap.give_back(of_mixed, *saved.attention)
        joined = self.wide(PASSING, 3 * D, self.size)
        heap.give_back(*parts)
        return joined


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
        new = [heap.take(NEW_GRADIENTS, *vector, 4) for vector in self.last_vectors]
        into = self.norm_backward(self.last, out)
        for saved in reversed(self.layers):
            out = self.product_backward(saved, into, 3, new)
            heap.give_back(saved.mlp.pop())  # GELU's backward writes over its gradient
            into = self.norm_backward(saved, self.product_backward(saved, out, 2, new))
            of_mixed = self.product_backward(saved, into, 1, new)
            out = self.product_backward(saved, self.attention_backward(saved, of_mixed), 0, new)
            new += [heap.take(NEW_GRADIENTS, *vector, 4) for vector in self.vectors]
            into = self.norm_backward(saved, out)
        heap.moment = EMBEDDING
        heap.give_back(into)
        new.append(heap.take(NEW_GRADIENTS, *self.positions, 4))
        new.append(heap.take(NEW_GRADIENTS, *self.embedding, 4))  # the head's is added in place
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
        weight = heap.take(NEW_GRADIENTS, *shape, self.size)
        of_input = self.wide(PASSING, shape[1], self.size)
        source = {0: saved.normed, 1: [], 2: saved.normed, 3: saved.mlp}[matrix]  # 1: attention's own
        heap.give_back(of_output, *saved.copies.pop(), *([source.pop()] if source else []))
        if self.half:
            cast = heap.take(NEW_GRADIENTS, *shape, 4)
            heap.give_back(weight)
            weight = cast
        new.append(weight)
        return of_input
