"""nanochat's training steps: what both generations have in common, and their optimizers.

What is written down here and easily missed:
- Embeddings are bfloat16, and so are their gradients and AdamW's averages of them.
- A model is allocated in float32 and its embeddings are cast then: what that leaves free stays in the cache.
- 2025: torch's fused AdamW for embedding and head, and Muon matrix by matrix.
- 2026: Muon stacks all gradients of a shape, of all shapes before the first update, and all weights, which
  stay until the last update: matrices and their gradients are there twice.
"""

from __future__ import annotations

from abc import abstractmethod

from onecard.arch.shapes import Nanochat2026Shape, NanochatShape
from onecard.plan.others.caching_allocator import Block
from onecard.plan.others.names import MOMENTUM, MUON_PASSING, OTHERS, STACKS
from onecard.plan.others.nanogpt_step import ADAM, BATCH, WEIGHTS
from onecard.plan.others.trainer import Trainer

NanochatShapes = NanochatShape | Nanochat2026Shape
Parameter = tuple[tuple[int, ...], int]  # a shape, and bytes per value

VOCABULARY_GRAIN = 64  # 2026 pads it to a multiple
ROTARY_BLOCKS = 10  # so many blocks' positions are computed in advance


class Parameters:
    """Shapes and precision of all that is learned, in the order of the model."""

    def __init__(self, shape: NanochatShapes, embedding_size: int) -> None:
        D, L = shape.n_embd, shape.n_layer
        V = shape.vocab_size
        if isinstance(shape, Nanochat2026Shape):
            V = -(-V // VOCABULARY_GRAIN) * VOCABULARY_GRAIN
        self.embedding: Parameter = ((V, D), embedding_size)
        self.head: Parameter = ((V, D), 4)
        self.layer: tuple[Parameter, ...] = (*[((D, D), 4)] * 4, ((4 * D, D), 4), ((D, 4 * D), 4))
        self.valued: frozenset[int] = frozenset()
        self.gate: Parameter = ((1, 1), 4)
        self.scalars: tuple[Parameter, ...] = ()
        if isinstance(shape, Nanochat2026Shape):
            self.valued = frozenset(shape.layers_with_value_embedding)
            self.gate = ((shape.n_head, shape.value_gate_channels), 4)
            self.scalars = (((L,), 4), ((L,), 4), ((1, shape.smear_gate_channels), 4), ((1,), 4), ((1,), 4))
        self.value_embeddings = [self.embedding] * len(self.valued)
        self.matrices = [p for i in range(L) for p in (*self.layer, *[self.gate] * (i in self.valued))]
        self.by_adam: list[Parameter] = [self.head, self.embedding, *self.value_embeddings, *self.scalars]

    def groups(self) -> list[list[Parameter]]:
        """Matrices of one shape, in the order of the shapes."""
        return [[p for p in self.matrices if p == kind] for kind in sorted(set(self.matrices))]


class NanochatTrainer(Trainer):
    """Either generation; forward and backward are eager's or compiled ones."""

    def __init__(self, shape: NanochatShapes, batch_size: int, *, dtype: str, limit: float) -> None:
        super().__init__(limit)
        self.shape, self.batch_size = shape, batch_size
        self.is_2025 = isinstance(shape, NanochatShape)
        self.size = 4 if dtype == "float32" else 2  # bytes of what matrix products give
        # 2026 keeps float32 embeddings where it computes in float16.
        self.parameters = Parameters(
            shape, 2 if dtype == "bfloat16" or (self.is_2025 and self.size == 2) else 4
        )

    def load(self) -> None:
        take, p = self.heap.take, self.parameters
        embeddings = [p.embedding, *p.value_embeddings]
        whole = [take(WEIGHTS, *factors, 4) for factors, _ in embeddings]
        self.matrices = [take(WEIGHTS, *factors, size) for factors, size in p.matrices]
        self.head = take(WEIGHTS, *p.head[0], p.head[1])
        self.scalars = [take(WEIGHTS, *factors, size) for factors, size in p.scalars]
        self.positions = (ROTARY_BLOCKS * self.shape.block_size, self.shape.head_dim // 2)
        self.rotary = [take(OTHERS, *self.positions, self.rotary_size) for _ in range(2)]
        self.embeddings: list[Block] = []
        for block, (factors, size) in zip(whole, embeddings, strict=True):
            self.embeddings.append(block if size == 4 else take(WEIGHTS, *factors, size))
            if size != 4:
                self.heap.give_back(block)

    @property
    def rotary_size(self) -> int:
        return 2 if self.is_2025 else self.size

    def batch(self) -> list[Block]:
        tokens, take = (self.batch_size, self.shape.block_size), self.heap.take
        return [take(BATCH, *tokens, 4 if self.is_2025 else 8), take(BATCH, *tokens, 8)]

    def update(self, *, is_first: bool) -> None:
        if self.is_2025:
            self._update_2025(is_first)
        else:
            self._update_2026(is_first)
        self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Gradients go."""

    def _update_2025(self, is_first: bool) -> None:
        take = self.heap.take
        if is_first:
            for factors, size in (self.parameters.head, self.parameters.embedding):
                for _ in range(2):
                    take(ADAM, *factors, size)
        for factors, size in self.parameters.matrices:
            if is_first:
                take(MOMENTUM, *factors, size)
            self._orthogonalize(1, factors)

    def _update_2026(self, is_first: bool) -> None:
        take, give_back = self.heap.take, self.heap.give_back
        stacks = [take(STACKS, len(group), *group[0][0], 4) for group in self.parameters.groups()]
        if is_first:
            for factors, size in self.parameters.by_adam:
                for _ in range(2):
                    take(ADAM, *factors, size)
        for group in self.parameters.groups():
            (rows, columns), size = group[0]
            if is_first:
                take(MOMENTUM, len(group), rows, columns, size)
                take(MOMENTUM, len(group), max(rows, columns), size)
            stacks.append(take(STACKS, len(group), rows, columns, size))
            self._orthogonalize(len(group), (rows, columns))
        give_back(*stacks)

    def _orthogonalize(self, count: int, factors: tuple[int, ...]) -> None:
        """Compiled: the products of the matrices' shorter sides, the matrices in 16 bits, old and new, and
        in 2026 what the measured peaks of its update have beside that: one more in 16 and one in 32 bits.
        """
        rows, columns = sorted(factors)
        take = self.heap.take
        sizes = (2, 2) if self.is_2025 else (4, 2, 2, 2)
        blocks = [take(MUON_PASSING, count, rows, columns, size) for size in sizes]
        blocks += [take(MUON_PASSING, count, rows, rows, 2) for _ in range(2)]
        self.heap.give_back(*blocks)
