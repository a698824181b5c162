"""nanoGPT's bill against measured runs, against itself, and against what people say of it."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onecard.arch.shapes import GPT2Shape
from onecard.plan.lines import GIB, total
from onecard.plan.others import nanogpt
from onecard.plan.others.caching_allocator import RanOutError
from onecard.plan.others.nanogpt import nanogpt_bill
from onecard.plan.others.nanogpt_compiled import CompiledStep
from onecard.plan.others.nanogpt_eager import EagerStep

CARD = 11 * GIB  # what a 12 GB card leaves to PyTorch
NOTES = GPT2Shape(12, 12, 576, 50304, 1024, False)
GPT2 = replace(NOTES, n_embd=768)


def shape_of(row: dict[str, Any]) -> GPT2Shape:
    return GPT2Shape(
        row["n_layer"], row["n_head"], row["n_embd"], row["vocab_size"], row["block_size"], bias=False
    )


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    """These were measured without the evaluation that train.py begins with."""
    names = ("dtype", "compiled", "dropout", "gradient_accumulation_steps")
    return {name: row[name] for name in names} | {"evaluates": False}


def bill_of(row: dict[str, Any]) -> Any:
    return nanogpt_bill(shape_of(row), row["batch_size"], **options_of(row))


def fits(shape: GPT2Shape, batch_size: int, **options: Any) -> bool:
    return nanogpt_bill(shape, batch_size, **options).within(CARD).ran_out is None


def name_of(row: dict[str, Any]) -> str:
    kind = "compiled" if row["compiled"] else "eager"
    size = f"{row['n_layer']}x{row['n_embd']}-{row['batch_size']}x{row['block_size']}"
    return f"{kind}-{size}-{row['dtype']}-{row['dropout']}"


PEERS = tomllib.loads(Path(nanogpt.__file__).with_name("peers.toml").read_text(encoding="utf-8"))["nanogpt"]
LOGITS = 16 * 1024 * 50304 * 2  # bytes of one copy: the tensor in the error message of a run that died
FINISHED = [row for row in PEERS if row["fits"]]
CAPPED = [row for row in PEERS if "cap" in row]


def test_rows_are_there() -> None:
    assert len(FINISHED) == 17 and len(CAPPED) == 5
    assert {row["compiled"] for row in FINISHED} == {True, False}


@pytest.mark.parametrize("row", FINISHED, ids=name_of)
def test_measured_run(row: dict[str, Any]) -> None:
    bill = bill_of(row)
    # The requirement is 5%; one that is held to 1% notices when a tensor is forgotten.
    assert bill.allocated / GIB == pytest.approx(row["allocated"], rel=0.01)
    assert bill.reserved / GIB == pytest.approx(row["reserved"], rel=0.01)


@pytest.mark.parametrize("row", [row for row in FINISHED if "first_allocated" in row], ids=name_of)
def test_first_step_has_no_averages_yet(row: dict[str, Any]) -> None:
    kind = CompiledStep if row["compiled"] else EagerStep
    heap = kind(shape_of(row), row["batch_size"], half=True, dropout=False).run(1, 4)
    assert heap.peak_allocated / GIB == pytest.approx(row["first_allocated"], rel=0.01)


@pytest.mark.parametrize("row", CAPPED, ids=name_of)
def test_run_under_a_cap(row: dict[str, Any]) -> None:
    """Where it ends is what PyTorch's error told, and what had been taken up to there."""
    cap = int(row["cap"] * GIB)
    confined = bill_of(row).within(cap)
    assert (confined.ran_out is None) == row["fits"]
    if confined.ran_out is not None:
        assert bill_of(row).allocated > cap
        assert round(confined.ran_out.tried / GIB, 2) == row["tried"]
        kind = CompiledStep if row["compiled"] else EagerStep
        step = kind(shape_of(row), row["batch_size"], half=True, dropout=False, limit=cap)
        with pytest.raises(RanOutError):
            step.run(3, 3)
        assert step.heap.peak_allocated / GIB == pytest.approx(row["allocated"], rel=0.002)
        assert step.heap.peak_reserved / GIB == pytest.approx(row["reserved"], rel=0.002)


def test_free_memory_in_pieces_does_not_help() -> None:
    """41M eager, 12 at a time: 9.6 GiB of tensors, but 11 GiB do not hold them as PyTorch places them."""
    small = replace(NOTES, n_embd=384)
    bill = nanogpt_bill(small, 12, compiled=False)
    assert bill.allocated < 0.9 * CARD < CARD < bill.reserved
    confined = bill.within(CARD)
    assert confined.ran_out is not None and confined.in_pieces and confined.retries > 0


def test_what_ends_only_after_many_micro_batches_has_not_run() -> None:
    """Three steps of three micro-batches get through; what lies where settles later."""
    small, memory = GPT2Shape(4, 4, 256, 65, 512, False), 416_350_702
    step = CompiledStep(small, 12, half=True, dropout=False, limit=memory)
    step.run(3, 3)
    assert step.heap.retries > 0
    assert nanogpt_bill(small, 12).within(memory).ran_out is not None


def test_emptying_the_cache_may_be_enough() -> None:
    small = replace(NOTES, n_layer=6, n_embd=384)
    memory = int(7.02 * GIB)
    assert nanogpt_bill(small, 7, compiled=False).reserved > memory
    confined = nanogpt_bill(small, 7, compiled=False).within(memory)
    assert confined.ran_out is None and confined.retries > 0 and not confined.in_pieces


def test_what_the_notes_say() -> None:
    # The advice was: batch 12, no compilation, float16. It runs out where the original run holds.
    assert nanogpt_bill(NOTES, 12, compiled=False, dtype="float16").allocated > CARD
    assert fits(NOTES, 16)
    assert fits(GPT2, 8) and fits(GPT2, 12)
    assert nanogpt_bill(GPT2, 16).allocated > CARD


def test_compilation_saves_memory_and_float16_does_not() -> None:
    eager, compiled = nanogpt_bill(NOTES, 16, compiled=False), nanogpt_bill(NOTES, 16)
    assert compiled.allocated < eager.allocated and compiled.reserved < eager.reserved
    assert nanogpt_bill(NOTES, 16, dtype="float16", compiled=False) == eager
    assert nanogpt_bill(NOTES, 16, dtype="float32", compiled=False).allocated > eager.allocated


def test_lines_name_the_copies_of_the_logits() -> None:
    lines = {line.name: line for line in nanogpt_bill(NOTES, 16).lines}
    copies = ("logits", "gradient of the logits", "zeros as gradient of the returned logits")
    for name in copies:
        assert lines[name].bytes == LOGITS
        assert lines[name].formula == "16·1024·50304·2"
    assert "log softmax in float32" not in lines  # fused away
    eager = nanogpt_bill(NOTES, 16, compiled=False)
    assert {line.name: line.bytes for line in eager.lines}["log softmax in float32"] == 2 * LOGITS
    assert eager.moment == "backward of the loss"


def test_weights_are_the_shapes_parameters() -> None:
    for bias in (False, True):
        shape = replace(NOTES, bias=bias)
        lines = {line.name: line.bytes for line in nanogpt_bill(shape, 16).lines}
        assert lines["weights"] == lines["gradients"] == 4 * shape.parameters
        assert lines["AdamW's two averages"] == 8 * shape.parameters


def test_peak_moves_to_where_memory_is() -> None:
    wide = GPT2Shape(48, 25, 1600, 50304, 128, False)
    assert nanogpt_bill(wide, 1).moment == "end of the backward, at the embedding"
    letters = GPT2Shape(6, 6, 384, 65, 256, False)  # hardly any logits
    assert nanogpt_bill(letters, 64, compiled=False).moment == "forward"
    assert nanogpt_bill(NOTES, 16).moment == "backward of the loss"


def test_dropout_costs_its_masks() -> None:
    plain, masked = nanogpt_bill(GPT2, 12), nanogpt_bill(GPT2, 12, dropout=0.1)
    masks = {line.name: line.bytes for line in masked.lines}["dropout masks"]
    assert masks == 25 * 12 * 1024 * 768
    assert masked.allocated - plain.allocated == pytest.approx(masks, rel=0.05)


def test_one_micro_batch_needs_no_gradients_in_forward() -> None:
    one = nanogpt_bill(NOTES, 16, gradient_accumulation_steps=1)
    several = nanogpt_bill(NOTES, 16)
    assert several.allocated - one.allocated == pytest.approx(4 * NOTES.parameters, rel=0.1)


SHAPES = st.builds(
    lambda layers, heads, channels, vocab, block, bias: GPT2Shape(
        layers, heads, heads * channels, vocab, block, bias
    ),
    st.integers(1, 12), st.integers(1, 12), st.sampled_from([16, 32, 48, 64, 128]), st.integers(65, 50304),
    st.sampled_from([64, 128, 256, 1024, 2048]), st.booleans(),
)  # fmt: skip
SETTINGS = st.fixed_dictionaries({
    "compiled": st.booleans(), "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
    "dropout": st.sampled_from([0.0, 0.1]), "gradient_accumulation_steps": st.integers(1, 5),
})  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 32), SETTINGS)
def test_lines_add_up_and_their_formulas_are_their_bytes(
    shape: GPT2Shape, batch_size: int, options: dict[str, Any]
) -> None:
    bill = nanogpt_bill(shape, batch_size, **options)
    assert total(bill.lines) == bill.allocated <= bill.reserved
    for line in bill.lines:
        products = (term.replace(" × ", "·").split("·") for term in line.formula.split(" + "))
        assert sum(math.prod(int(factor) for factor in product) for product in products) == line.bytes


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(1, 16), SETTINGS, st.floats(0.3, 1.5))
def test_what_is_reserved_is_enough_and_less_than_its_tensors_is_not(
    shape: GPT2Shape, batch_size: int, options: dict[str, Any], share: float
) -> None:
    bill = nanogpt_bill(shape, batch_size, **options)
    memory = int(share * bill.reserved)
    confined = bill.within(memory)
    if memory >= bill.reserved:
        assert confined.ran_out is None and confined.retries == 0
        micros = min(options["gradient_accumulation_steps"], 3)
        played = bill.step(bill.reserved).run(3, micros, evaluates=True)
        assert played.retries == 0
    if memory < bill.allocated:
        assert confined.ran_out is not None and confined.retries > 0
    if confined.ran_out is not None:
        assert confined.ran_out.allocated <= confined.ran_out.reserved <= memory


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 16), SETTINGS)
@example(
    # A vocabulary twice as large packs better here: 230 KiB less are allocated for tensors that ask for more.
    GPT2Shape(1, 3, 144, 65, 1024, bias=False), 2,
    {"compiled": False, "dtype": "float32", "dropout": 0.1, "gradient_accumulation_steps": 1},
)  # fmt: skip
@example(
    # Twice the batch moves the peak to another moment, where tensors ask for less and pack worse.
    GPT2Shape(4, 10, 640, 65, 64, bias=False), 1,
    {"compiled": False, "dtype": "float32", "dropout": 0.0, "gradient_accumulation_steps": 1},
)  # fmt: skip
def test_more_of_anything_needs_more(shape: GPT2Shape, batch_size: int, options: dict[str, Any]) -> None:
    """How well tensors pack into the allocator's blocks is luck, and so is which of two moments about alike
    becomes the peak. Never is there less than the smaller model's tensors asked for at theirs.
    """

    def allocated(shape: GPT2Shape, batch_size: int) -> int:
        return nanogpt_bill(shape, batch_size, **options).allocated

    larger = [
        replace(shape, **{name: 2 * getattr(shape, name)})
        for name in ("n_layer", "n_embd", "block_size", "vocab_size")
    ]
    lines = nanogpt_bill(shape, batch_size, **options).lines
    asked = total(line for line in lines if line.name != "rounding to whole blocks")
    assert allocated(shape, 2 * batch_size) > asked
    for other in larger:
        assert allocated(other, batch_size) > asked
