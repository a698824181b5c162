"""nanoGPT's training step as its tensors come and go: model.py under train.py's autocast, on one card.

Every tensor that is worth a name is taken from the allocator and given back in the order in which PyTorch
does it, eager or compiled as a whole. No size here is fitted to a measurement. Letters: B sequences of T
tokens, N = B·T, D width, V vocabulary, H heads; the last factor of a tensor is its bytes per value.

What is written down here and easily missed:
- `logits` of train.py's loop is a name that stays until the next micro-batch's logits replace them.
- Eager, cross_entropy takes log_softmax in 16 bits, and nll_loss a float32 copy of it (autocast's list).
- Compiled, the graph returns the logits, so its backward wants a gradient for them: a tensor of zeros, as
  large as they are, that lives through all of the backward. Its weight gradients come out at its end, all
  together, beside those of the micro-batches before.
- The head's weight is the embedding's: its gradient waits for the embedding's until the end of backward.
- train.py begins with an evaluation: nothing is kept for a backward, and the logits of the batch before stay
  until the new ones are there. What it leaves in the cache is what training finds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from onecard.arch.shapes import GPT2Shape
from onecard.language import N_
from onecard.plan.others.caching_allocator import MIB, Block, CachingAllocator

WEIGHTS = N_("weights")
GRADIENTS = N_("gradients")
ADAM = N_("AdamW's two averages")
COPIES = N_("16-bit copies of the weights")
STREAM = N_("residual stream")
NORMALISED = N_("normalised residual stream")
NORMED = N_("layer norms' outputs")
QKV = N_("queries, keys, values")
ATTENTION = N_("attention's outputs")
UP = N_("MLP before GELU")
GELU = N_("MLP after GELU")
MASKS = N_("dropout masks")
SMALL = N_("norms' and attention's statistics")
LOGITS = N_("logits")
LOG_SOFTMAX = N_("log softmax of the logits")
LOG_SOFTMAX_32 = N_("log softmax in float32")
LOGITS_GRADIENT = N_("gradient of the logits")
LOGITS_ZEROS = N_("zeros as gradient of the returned logits")
PASSING = N_("passing values of forward and backward")
NEW_GRADIENTS = N_("gradients of this micro-batch")
WORKSPACE = N_("cuBLAS workspaces")
BATCH = N_("tokens and targets")

LOADING = N_("loading the model")
EVALUATION = N_("the first evaluation, before any training")
FORWARD = N_("forward")
LOSS = N_("backward of the loss")
LAYERS = N_("backward of the layers")
EMBEDDING = N_("end of the backward, at the embedding")
UPDATE = N_("optimizer step")

EVALUATED = 3  # batches that are played: from the second on each is like the one before

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
    attention: list[Block] = field(
        default_factory=list
    )  # queries, keys and values, their mix, its statistics
    mlp: list[Block] = field(default_factory=list)  # before and after GELU


class Step(ABC):
    """A trainer's memory over its steps; forward and backward are eager's or compiled ones."""

    def __init__(
        self, shape: GPT2Shape, batch_size: int, *, half: bool, dropout: bool, limit: float = math.inf
    ) -> None:
        self.shape, self.batch_size, self.half, self.dropout = shape, batch_size, half, dropout
        self.heap = CachingAllocator(limit)
        self.size = 2 if half else 4  # bytes of what matrix products give
        D, bias = shape.n_embd, int(shape.bias)
        of_products: Vectors = [(3 * D,), (D,), (4 * D,), (D,)]
        self.vectors: Vectors = [*[(D,)] * (2 + 2 * bias), *of_products * bias]  # of a layer
        self.matrices = [(3 * D, D), (D, D), (4 * D, D), (D, 4 * D)]
        self.last_vectors: Vectors = [*[(D,)] * (1 + bias)]
        self.embedding, self.positions = (shape.vocab_size, D), (shape.block_size, D)
        self.gradients: list[Block] = []
        self.logits: Block | None = None
        self.previous_logits: Block | None = None
        self.embedding_mask: list[Block] = []
        self.multiplied: set[str] = set()  # threads that have
        self.adds = False  # a micro-batch after the first of its step

    def run(self, steps: int, accumulation: int, *, evaluates: bool = False) -> CachingAllocator:
        """Whole steps; with the evaluation before them, as train.py has it, or without."""
        take, self.heap.moment = self.heap.take, LOADING
        layers = (self.vectors + self.matrices) * self.shape.n_layer
        parameters = [self.embedding, self.positions, *layers, *self.last_vectors]
        for parameter in parameters:
            take(WEIGHTS, *parameter, 4)
        self.batch()
        if evaluates:
            self.evaluation()
        for step in range(steps):
            for micro in range(accumulation):
                self.adds = micro > 0
                self.forward()
                self.backward()
            self.heap.moment = UPDATE
            if step == 0:
                for parameter in sorted(
                    parameters, key=len, reverse=True
                ):  # train.py's groups: matrices first
                    take(ADAM, *parameter, 4)
                    take(ADAM, *parameter, 4)
            self.heap.give_back(*self.gradients)
            self.gradients = []
        return self.heap

    def batch(self) -> list[Block]:
        return [self.heap.take(BATCH, self.batch_size, self.shape.block_size, 8) for _ in range(2)]

    def evaluation(self) -> None:
        """estimate_loss(): batches of its own, beside the one that training waits with."""
        self.heap.moment = EVALUATION
        before: list[Block] = []
        for _ in range(EVALUATED):
            fresh = self.batch()
            self.heap.give_back(*before)
            before = fresh
            self.evaluate()
        self.heap.give_back(*before)
        if self.logits is not None:
            self.heap.give_back(self.logits)
        self.logits = self.previous_logits = None

    @abstractmethod
    def evaluate(self) -> None:
        """Forward of one batch without a backward to come."""

    @abstractmethod
    def forward(self) -> None:
        """One micro-batch's, tensor by tensor."""

    @abstractmethod
    def backward(self) -> None:
        """And back."""

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
