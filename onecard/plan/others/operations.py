"""PyTorch's operations on paper: what each takes, keeps for its backward, and takes again in backward.

Of the CUDA kernels: RMS norm keeps its input and one number a row; flash attention keeps queries, keys,
values, its output and one number a query; `pow` keeps its input, and its backward has two tensors more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

from onecard.plan.others.autograd import Shape, Tape, Tensor
from onecard.plan.others.names import MASK
from onecard.plan.others.nanogpt_step import (
    ATTENTION,
    COPIES,
    GRADIENTS,
    LOG_SOFTMAX_32,
    MASKS,
    NEW_GRADIENTS,
    PASSING,
    SMALL,
    WORKSPACE,
    WORKSPACE_BYTES,
)

# PyTorch's attention with a mask wants rows of whole 16-byte pieces.
_MASK_GRAIN = 8


class Operations(Tape):
    """What a trainer's forward is written with."""

    adds = False  # a micro-batch after the first of its step
    pads_masks = True  # as CUDA's kernel wants them; a CPU does not
    _multiplied: frozenset[str] = frozenset()
    _cached: list[Tensor] | None = None

    # --- parameters

    @property
    def fresh(self) -> str:
        """What a gradient just computed is called: the first micro-batch's becomes .grad itself."""
        return NEW_GRADIENTS if self.adds else GRADIENTS

    def gradient(self, shape: Shape, size: int) -> Tensor:
        return self.new(self.fresh, shape, size)

    def copy(self, weight: Tensor, size: int) -> Tensor:
        """A weight in another precision; itself where it has it already."""
        if weight.size == size:
            return weight
        shape, wanted = weight.shape, weight.size
        out = self.new(COPIES, shape, size)
        if self._cached is not None:
            self._cached.append(out)
        return self.record(out, (weight,), lambda _: (self.gradient(shape, wanted),))

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Its copies of weights stay until it ends, whether backward wants them or not."""
        self._cached = []
        try:
            yield
        finally:
            self._cached = None

    def multiply(self, thread: str) -> None:
        """A thread's first matrix product takes its workspace, from whatever is free then, for good."""
        if thread not in self._multiplied:
            self._multiplied |= {thread}
            self.heap.take(WORKSPACE, WORKSPACE_BYTES)

    # --- matrix products and lookups

    def embedding(self, what: str, weight: Tensor, tokens: Tensor) -> Tensor:
        out = self.new(what, (*tokens.shape, weight.shape[1]), weight.size)
        shape, size = weight.shape, weight.size
        return self.record(out, (weight,), lambda _: (self.gradient(shape, size),), tokens)

    def linear(self, what: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert x.size == weight.size
        self.multiply("forward")
        rows, columns = weight.shape
        out = self.new(what, (*x.shape[:-1], rows), x.size)
        shape, size, wanted = x.shape, x.size, x.node is not None

        def backward(_: Tensor) -> Sequence[Tensor | None]:
            self.multiply("backward")
            of_bias = self.gradient((rows,), size) if bias_wanted else None
            of_weight = self.gradient((rows, columns), size)
            return (self.passing(shape, size) if wanted else None, of_weight, of_bias)

        bias_wanted = bias is not None
        return self.record(out, (x, weight, bias), backward, x, weight)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Of (B, T, H, Q): flash attention, or with a mask the memory-efficient one, which keeps that too."""
        shapes, size = [tensor.shape for tensor in (q, k, v)], q.size
        out, statistics = self._mixed(q.shape, size)

        def backward(_: Tensor) -> Sequence[Tensor]:
            expanded = shapes[0] if shapes[1] != shapes[0] else ()  # keys and values of each query head
            beside = [self.passing(expanded, size) for _ in range(2)] if expanded else []
            given = [self.passing(shape, size) for shape in shapes]
            self._summed_in_float(shapes[0], size)
            del beside
            return given

        kept = [q, k, v, out, statistics, *([mask] if mask is not None else [])]
        return self.record(out, (q, k, v), backward, *kept)

    def packed_attention(self, x: Tensor, heads: Shape) -> Tensor:
        """The same, of queries, keys and values that are parts of x; their gradients are copied together."""
        shape, size = x.shape, x.size
        out, statistics = self._mixed(heads, size)

        def backward(_: Tensor) -> Sequence[Tensor]:
            parts = [self.passing(heads, size) for _ in range(3)]
            self._summed_in_float(heads, size)
            joined = self.passing(shape, size)
            del parts
            return (joined,)

        return self.record(out, (x,), backward, x, out, statistics)

    def _mixed(self, heads: Shape, size: int) -> tuple[Tensor, Tensor]:
        """Attention's output, and one number a query."""
        return self.new(ATTENTION, heads, size), self.new(SMALL, (heads[0], heads[2], heads[1]), 4)

    def _summed_in_float(self, heads: Shape, size: int) -> None:
        """Backward sums the gradient of the queries in float32, heads padded to 32 channels."""
        if size == 2:
            self.passing((*heads[:3], -(-heads[3] // 32) * 32), 4)

    def window(self, tokens: int, size: int) -> Tensor:
        """Which of the earlier tokens a query sees, put together anew in each layer."""
        whole = (tokens, tokens)
        causal = self.new(PASSING, whole, 1)
        distance = self.new(PASSING, whole, 8)
        near = self.new(PASSING, whole, 1)
        del distance
        both = self.new(PASSING, whole, 1)
        del near, causal
        filled = self.new(MASK, whole, size)
        del both
        if self.pads_masks and tokens % _MASK_GRAIN:
            return self.new(MASK, (tokens, -(-tokens // _MASK_GRAIN) * _MASK_GRAIN), size)
        return filled

    # --- norms and what is done value by value

    def rms_norm(self, what: str, x: Tensor) -> Tensor:
        out = self.new(what, x.shape, x.size)
        statistics = self.new(SMALL, (*x.shape[:-1], 1), 4)
        shape, size = x.shape, x.size
        return self.record(out, (x,), lambda _: (self.passing(shape, size),), x, statistics)

    def layer_norm(self, what: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = self.new(what, x.shape, x.size)
        statistics = [self.new(SMALL, (*x.shape[:-1], 1), 4) for _ in range(2)]
        shape, size, vector = x.shape, x.size, weight.shape

        def backward(_: Tensor) -> Sequence[Tensor]:
            return (self.passing(shape, size), self.gradient(vector, 4), self.gradient(vector, 4))

        return self.record(out, (x, weight, bias), backward, x, *statistics)

    def cast(self, what: str, x: Tensor, size: int) -> Tensor:
        return x if x.size == size else self.elementwise(what, x, size=size)

    def scale(self, what: str, x: Tensor) -> Tensor:
        """Times, or divided by, a number of the program."""
        return self.elementwise(what, x)

    def relu(self, what: str, x: Tensor) -> Tensor:
        return self.elementwise(what, x, keeps="output")

    def tanh(self, what: str, x: Tensor) -> Tensor:
        return self.elementwise(what, x, keeps="output")

    def sigmoid(self, what: str, x: Tensor) -> Tensor:
        return self.elementwise(what, x, keeps="output")

    def power(self, what: str, x: Tensor) -> Tensor:
        return self.elementwise(what, x, keeps="input", passing=2)

    def silu(self, what: str, x: Tensor) -> Tensor:
        return self.elementwise(what, x, keeps="input")

    def dropout(self, what: str, x: Tensor) -> Tensor:
        out = self.new(what, x.shape, x.size)
        mask = self.new(MASKS, x.shape, 1)
        shape, size = x.shape, x.size
        return self.record(out, (x,), lambda _: (self.passing(shape, size),), mask)

    def add(self, what: str, a: Tensor, b: Tensor) -> Tensor:
        """Of one shape, or b of a shorter one. The sum has the larger precision."""
        out = self.new(what, a.shape, max(a.size, b.size))
        shapes, sizes = (a.shape, b.shape), (a.size, b.size)

        def backward(gradient: Tensor) -> Sequence[Tensor]:
            return [self._fitted(gradient, *of) for of in zip(shapes, sizes, strict=True)]

        return self.record(out, (a, b), backward)

    def times(self, what: str, a: Tensor, b: Tensor) -> Tensor:
        """Each factor is kept where the other wants a gradient. b may be of a shorter shape."""
        out = self.new(what, a.shape, a.size if prod(b.shape) == 1 else max(a.size, b.size))
        wanted = [tensor.node is not None for tensor in (a, b)]
        shapes, sizes, whole = (a.shape, b.shape), (a.size, b.size), out.size

        def backward(gradient: Tensor) -> Sequence[Tensor | None]:
            products = [self.passing(gradient.shape, whole) if one else None for one in wanted]
            return [
                self._fitted(product, shape, size) if product is not None else None
                for product, shape, size in zip(products, shapes, sizes, strict=True)
            ]

        kept = [*([b] if wanted[0] else []), *([a] if wanted[1] else [])]
        return self.record(out, (a, b), backward, *kept)

    def _fitted(self, gradient: Tensor, shape: Shape, size: int) -> Tensor:
        """Summed and cast to what it is the gradient of."""
        if prod(shape) < prod(gradient.shape):
            gradient = self.passing(shape, gradient.size)
        return gradient if gradient.size == size else self.passing(shape, size)

    def root_of_squares(self, x: Tensor) -> Tensor:
        """1 / square root of the mean of squares of each row: `pow` keeps x, the root its result."""
        squares = self.power(PASSING, x)
        shape, size, row = x.shape, x.size, (*x.shape[:-1], 1)
        mean = self.new(SMALL, row, size)
        self.record(mean, (squares,), lambda _: (self.passing(shape, size),))
        del squares
        root = self.new(SMALL, row, size)
        return self.record(root, (mean,), lambda _: (self.passing(row, size),), root)

    # --- parts and wholes

    def part(self, x: Tensor, shape: Shape) -> Tensor:
        """A view of a part of x. Its gradient is as large as x, with zeros around it."""
        whole, size = x.shape, x.size
        out = Tensor(x.storage, shape, size, None)
        return self.record(out, (x,), lambda _: (self.passing(whole, size),))

    def together(self, what: str, whole: Shape, *parts: Tensor) -> Tensor:
        """Parts beside each other. Their gradients are views."""
        shapes = [part.shape for part in parts]
        out = self.new(what, whole, parts[0].size)
        return self.record(out, parts, lambda gradient: [gradient.view(*shape) for shape in shapes])

    def copied(self, what: str, x: Tensor) -> Tensor:
        """Contiguous, where a view is not."""
        return self.elementwise(what, x)

    def rotated(self, what: str, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotary positions in nanochat's way: halves of the channels times cosines and sines."""
        half = (*x.shape[:-1], x.shape[-1] // 2)
        first, second = self.part(x, half), self.part(x, half)
        upper = self.add(PASSING, self.times(PASSING, first, cosines), self.times(PASSING, second, sines))
        negated = self.new(SMALL, sines.shape, sines.size)
        lower = self.add(PASSING, self.times(PASSING, first, negated), self.times(PASSING, second, cosines))
        return self.together(what, x.shape, upper, lower)

    # --- loss

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean over tokens: log softmax, which is kept, and one number a token of it."""
        shape, size = logits.shape, logits.size
        log_softmax = self.new(LOG_SOFTMAX_32, shape, size)
        self.record(log_softmax, (logits,), lambda _: (self.passing(shape, size),), log_softmax)
        loss = self.new(SMALL, (), size)
        count = self.new(SMALL, (), size)  # of tokens
        return self.record(
            loss, (log_softmax,), lambda _: (self.passing(shape, size),), log_softmax, targets, count
        )
