"""PyTorch on paper: when memory goes, what is kept, and what backward brings."""

from __future__ import annotations

import pytest

from onecard.plan.others.autograd import Leaf, Tensor, kept_bytes
from onecard.plan.others.caching_allocator import CachingAllocator, RanOutError
from onecard.plan.others.operations import Operations

SHAPE = (4, 1024)  # values; 16 KiB in float32
BYTES = 4 * 4 * 1024


def tape_of(limit: float = float("inf")) -> Operations:
    return Operations(CachingAllocator(limit), lambda _: "passing")


def learned(tape: Operations, *shape: int) -> Tensor:
    return tape.there(tape.heap.take("weights", *shape, 4), shape, 4, learned=True)


def test_memory_goes_with_the_last_name() -> None:
    tape = tape_of()
    x = tape.new("x", SHAPE, 4)
    view = x.view(1, *SHAPE)
    del x
    assert tape.heap.allocated == BYTES
    del view
    assert tape.heap.allocated == 0


def test_without_a_weight_nothing_is_kept() -> None:
    tape = tape_of()
    x = tape.new("x", SHAPE, 4)
    x = tape.relu("x", x)
    assert tape.heap.allocated == BYTES and x.node is None


def test_an_operation_keeps_what_its_backward_reads() -> None:
    tape = tape_of()
    weight = learned(tape, *SHAPE)
    squared = tape.power("squared", tape.relu("relu", weight))  # both keep the same tensor
    assert kept_bytes(squared, [weight]) == BYTES
    assert tape.heap.allocated == 3 * BYTES
    summed = tape.add("sum", squared, squared)  # keeps nothing
    assert kept_bytes(summed, [weight]) == BYTES


def test_backward_gives_back_what_was_kept_and_leaves_gradients() -> None:
    tape = tape_of()
    weight = learned(tape, *SHAPE)
    out = tape.tanh("out", tape.relu("relu", weight))
    tape.backward(out)
    del out
    assert isinstance(weight.node, Leaf) and weight.node.gradient is not None
    assert tape.heap.allocated == 2 * BYTES  # the weight and its gradient
    tape.backward(tape.relu("relu", weight))  # added to the first one
    assert tape.heap.allocated == 2 * BYTES
    weight.node.gradient = None
    assert tape.heap.allocated == BYTES


def test_a_tensor_used_twice_has_one_gradient() -> None:
    """x + relu(x): the node before waits for both."""
    tape = tape_of()
    weight = learned(tape, *SHAPE)
    x = tape.scale("x", weight)
    tape.backward(tape.add("sum", x, tape.relu("relu", x)))
    del x
    assert tape.heap.allocated == 2 * BYTES
    assert tape.heap.peak_allocated <= 6 * BYTES


def test_what_is_computed_again_is_not_kept() -> None:
    def layers(tape: Operations, weight: Tensor) -> Tensor:
        return tape.tanh("c", tape.tanh("b", tape.tanh("a", weight)))

    kept = []
    for checkpoints in (False, True):
        tape = tape_of()
        weight = learned(tape, *SHAPE)
        x = tape.scale("x", weight)
        out = tape.checkpoint(lambda of, tape=tape: layers(tape, of), x) if checkpoints else layers(tape, x)
        kept.append(kept_bytes(out, [weight]))
        tape.backward(out)
        del x, out
        assert tape.heap.allocated == 2 * BYTES
    assert kept == [3 * BYTES, BYTES]


def test_autocasts_copies_stay_until_it_ends() -> None:
    tape = tape_of()
    tape.records = False
    weight = learned(tape, *SHAPE)
    with tape.autocast():
        tape.copy(weight, 2)
        assert tape.heap.allocated == BYTES + BYTES // 2
    assert tape.heap.allocated == BYTES


def test_a_limit_ends_it_and_nothing_is_lost() -> None:
    tape = tape_of(limit=2**21)
    with pytest.raises(RanOutError):
        tape.new("large", (2**21,), 4)
    assert tape.heap.allocated == 0
