"""A trainer without a compiler: its forward is written with operations on paper, backward follows from it."""

from __future__ import annotations

from abc import abstractmethod

from onecard.plan.others.autograd import Leaf, Shape, Tensor, kept_bytes
from onecard.plan.others.nanogpt_step import BATCH, FORWARD, LOGITS_GRADIENT, LOSS, PASSING
from onecard.plan.others.operations import Operations
from onecard.plan.others.trainer import Trainer


class Eager(Trainer):
    """One kernel after the other, each with its own output. Who inherits says what forward is."""

    weights: list[Tensor]
    buffers: list[Tensor]
    tokens: Tensor
    targets: Tensor

    def prepare(self, vocab_size: int, batch: Shape, sizes: tuple[int, int]) -> None:
        """`batch` sequences of so many tokens; `sizes`: bytes of a token, and of a target."""
        self.tape = Operations(self.heap, lambda of: LOGITS_GRADIENT if of[-1:] == (vocab_size,) else PASSING)
        self._batch, self._sizes = batch, sizes

    @abstractmethod
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""

    def inputs(self) -> list[Tensor]:
        return [self.tape.new(BATCH, self._batch, size) for size in self._sizes]

    def next_batch(self) -> None:
        self.tokens, self.targets = self.inputs()

    def evaluate(self) -> None:
        self.tape.records = False
        self.forward(*self.inputs())
        self.tape.records = True

    def micro_batch(self) -> None:
        self.tape.adds = self.adds
        self.heap.moment = FORWARD
        loss = self.forward(self.tokens, self.targets)
        self.heap.moment = LOSS
        self.tape.backward(loss)
        self.next_batch()

    def clear(self) -> None:
        """Gradients go."""
        for weight in self.weights:
            assert isinstance(weight.node, Leaf)
            weight.node.gradient = None

    def kept_bytes(self) -> int:
        """What forward keeps for its backward, beside weights and inputs."""
        loss = self.forward(self.tokens, self.targets)
        return kept_bytes(loss, [*self.weights, *self.buffers, self.tokens, self.targets])
