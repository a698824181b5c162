"""PyTorch without a compiler, on paper: tensors that take memory, what backward wants kept, and backward.

A trainer's forward is written with these operations as its program has them. A tensor's memory goes when
its last name does, as in PyTorch, because a name here is a name of Python: `x = relu(x)` gives the old x
back unless something keeps it. Which tensors an operation keeps for its backward, and which ones its
backward takes in passing, are those of PyTorch's CUDA kernels. Backward goes through the nodes as the
engine does: the one made last first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from math import prod

from onecard.plan.others.caching_allocator import Block, CachingAllocator

Shape = tuple[int, ...]


class Storage:
    """Bytes of a tensor, given back when nothing holds them."""

    __slots__ = ("_block", "_heap", "bytes")

    def __init__(self, heap: CachingAllocator, block: Block, size: int) -> None:
        self._heap, self._block, self.bytes = heap, block, size

    def __del__(self) -> None:
        self._heap.give_back(self._block)


class Tensor:
    """A shape and bytes per value of some storage, and how to get back from it."""

    __slots__ = ("node", "shape", "size", "storage")

    def __init__(self, storage: Storage, shape: Shape, size: int, node: Node | Leaf | None) -> None:
        self.storage, self.shape, self.size, self.node = storage, shape, size, node

    def view(self, *shape: int) -> Tensor:
        return Tensor(self.storage, shape, self.size, self.node)


Backward = Callable[..., Sequence["Tensor | None"]]


class Leaf:
    """Where a parameter's gradient gathers: the first one stays as it is, others are added to it."""

    __slots__ = ("gradient",)
    order = float("inf")  # served at once

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class Node:
    """One operation: what it keeps, and what follows from the gradient of its output."""

    __slots__ = ("backward", "gradient", "inputs", "kept", "order")

    def __init__(
        self,
        order: int,
        inputs: tuple[Node | Leaf | None, ...],
        backward: Backward,
        kept: tuple[Storage, ...],
    ) -> None:
        self.order, self.inputs, self.backward, self.kept = order, inputs, backward, kept
        self.gradient: Tensor | None = None


class Tape:
    """Makes tensors and remembers how. `passing` names what a tensor of backward is, by its shape."""

    def __init__(self, heap: CachingAllocator, passing: Callable[[Shape], str]) -> None:
        self.heap, self._passing = heap, passing
        self.records = True  # False: as under no_grad
        self._made = 0

    def new(self, what: str, shape: Shape, size: int, node: Node | Leaf | None = None) -> Tensor:
        block = self.heap.take(what, *shape, size)
        return Tensor(Storage(self.heap, block, prod(shape) * size), shape, size, node)

    def passing(self, shape: Shape, size: int) -> Tensor:
        return self.new(self._passing(shape), shape, size)

    def there(self, block: Block, shape: Shape, size: int, *, learned: bool = False) -> Tensor:
        """A tensor that was made before, a parameter or a buffer."""
        storage = Storage(self.heap, block, prod(shape) * size)
        return Tensor(storage, shape, size, Leaf() if learned else None)

    def mark(self, x: Tensor, moment: str) -> Tensor:
        """The same tensor; when backward comes through here, it is the moment of that name."""

        def backward(gradient: Tensor) -> Sequence[Tensor]:
            self.heap.moment = moment
            return (gradient,)

        return self.record(Tensor(x.storage, x.shape, x.size, None), (x,), backward)

    def record(
        self, output: Tensor, inputs: Iterable[Tensor | None], backward: Backward, *kept: Tensor
    ) -> Tensor:
        """`backward` takes the gradient of the output and gives those of the inputs."""
        nodes = tuple(tensor.node if tensor is not None else None for tensor in inputs)
        if self.records and any(node is not None for node in nodes):
            self._made += 1
            output.node = Node(self._made, nodes, backward, tuple(tensor.storage for tensor in kept))
        return output

    def elementwise(
        self, what: str, x: Tensor, *, size: int = 0, keeps: str = "", passing: int = 0
    ) -> Tensor:
        """A kernel over all of x with an output of its own; `keeps` is "", "input" or "output".

        Its backward has an output of x's size, and `passing` more tensors like it beside that.
        """
        out = self.new(what, x.shape, size or x.size)
        shape, wanted = x.shape, x.size

        def backward(gradient: Tensor) -> Sequence[Tensor]:
            beside = [self.passing(shape, wanted) for _ in range(passing)]
            given = self.passing(shape, wanted)
            del beside
            return (given,)

        kept = {"": (), "input": (x,), "output": (out,)}[keeps]
        return self.record(out, (x,), backward, *kept)

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """function(x) of which nothing is kept but x: backward computes it again."""
        if not self.records:
            return function(x)
        self.records = False
        out = function(x)
        self.records = True
        storage, shape, size = x.storage, x.shape, x.size

        def backward(gradient: Tensor) -> Sequence[Tensor | None]:
            before = self.heap.moment
            again = Tensor(storage, shape, size, Leaf())
            self._go_back(function(again).node, gradient)
            self.heap.moment = before
            assert isinstance(again.node, Leaf)
            return (again.node.gradient,)

        self._made += 1
        out.node = Node(self._made, (x.node,), backward, (x.storage,))
        return out

    def backward(self, loss: Tensor) -> None:
        """Through all that led to it. What a node has kept goes as soon as it is through."""
        self._go_back(loss.node, self.passing((), loss.size))

    def _go_back(self, root: Node | Leaf | None, gradient: Tensor) -> None:
        assert isinstance(root, Node)
        root.gradient = gradient
        del gradient  # a name here would keep it
        waiting = _uses(root)
        ready: list[tuple[float, Node]] = [(-root.order, root)]
        while ready:
            _, node = heapq.heappop(ready)
            of_output, node.gradient = node.gradient, None
            inputs, given = node.inputs, list(node.backward(of_output))
            node.kept, node.inputs, node.backward = (), (), _done
            del of_output
            for number, target in enumerate(inputs):
                if target is None:
                    continue
                found, given[number] = given[number], None
                if target.gradient is None:
                    target.gradient = found  # a second one is added in place
                del found
                if isinstance(target, Node):
                    waiting[target.order] -= 1
                    if not waiting[target.order]:
                        heapq.heappush(ready, (-target.order, target))


def _done(_: Tensor) -> Sequence[Tensor]:
    raise AssertionError("backward goes through a node once")


def _nodes(root: Node) -> Iterable[Node]:
    seen, todo = {root.order}, [root]
    while todo:
        node = todo.pop()
        yield node
        for target in node.inputs:
            if isinstance(target, Node) and target.order not in seen:
                seen.add(target.order)
                todo.append(target)


def _uses(root: Node) -> dict[int, int]:
    """Of each node, how many gradients come to it."""
    found: dict[int, int] = {}
    for node in _nodes(root):
        for target in node.inputs:
            if isinstance(target, Node):
                found[target.order] = found.get(target.order, 0) + 1
    return found


def kept_bytes(loss: Tensor, others: Iterable[Tensor]) -> int:
    """What the way back from `loss` holds, each storage once, without those of `others` (weights, inputs)."""
    assert isinstance(loss.node, Node)
    apart = {id(tensor.storage) for tensor in others}
    storages = {id(s): s.bytes for node in _nodes(loss.node) for s in node.kept if id(s) not in apart}
    return sum(storages.values())
