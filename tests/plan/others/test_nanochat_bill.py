"""nanochat's bill against measured runs, against what its own code keeps, and against itself."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_trainers import RESULTS, name_of, rows, shape_of, trainer_of

from onecard.arch.shapes import Nanochat2026Shape, NanochatShape
from onecard.errors import UserError
from onecard.plan.lines import GIB, total
from onecard.plan.others.bills import AnyShape, bill_of_trainer, is_confirmed
from onecard.plan.others.nanochat_compiled import CompiledNanochat
from onecard.plan.others.nanochat_eager import EagerNanochat

MIB = 2**20
MEASURED = rows("nanochat")
D12 = Nanochat2026Shape.of_depth(12, 32768, 2048)
SAVED = json.loads(sorted(RESULTS.glob("*-nanochat-saved.json"))[-1].read_text())["rows"]


def test_rows_are_there() -> None:
    kinds = {(row["job"]["contender"], row["job"]["compile"]) for row in MEASURED}
    assert len(MEASURED) == 20 and len(kinds) == 4
    assert {row["job"]["n_layer"] for row in MEASURED} == {4, 8, 12, 20}


@pytest.mark.parametrize("row", MEASURED, ids=name_of)
def test_measured_run(row: dict[str, Any]) -> None:
    """The requirement is 5%; one that is held to half a percent notices when a tensor is forgotten."""
    job, peaks = row["job"], row["peaks"]
    for moment, steps in (("first", 1), ("steady", 3)):
        heap = trainer_of(job).run(steps, job["accumulation"], evaluates=job["evaluates"])
        assert heap.peak_allocated == pytest.approx(peaks[moment]["allocated"], rel=0.005)
        assert heap.peak_reserved == pytest.approx(peaks[moment]["reserved"], rel=0.06)
    if job["evaluates"]:
        heap = trainer_of(job).run(0, 1, evaluates=True)
        assert heap.peak_allocated == pytest.approx(peaks["evaluation"]["allocated"], rel=0.005)
        assert heap.peak_reserved == pytest.approx(peaks["evaluation"]["reserved"], rel=0.08)


@pytest.mark.parametrize("row", MEASURED, ids=name_of)
def test_measured_update(row: dict[str, Any]) -> None:
    """Muon's stacks are there beside matrices and gradients, in 2026; in 2025 one matrix at a time."""
    trainer = trainer_of(row["job"])
    trainer.run(2, 1)
    trainer.micro_batch()
    trainer.heap.peak_allocated = 0
    trainer.update(is_first=False)
    assert trainer.heap.peak_allocated == pytest.approx(row["update"], rel=0.015)


@pytest.mark.parametrize("measured", [9502, 9448], ids=["H200", "RTX 4070"])
def test_d12_as_two_cards_had_it(measured: int) -> None:
    bill = bill_of_trainer("nanochat", D12, 8)
    assert bill.allocated / MIB == pytest.approx(measured, rel=0.01)  # required: 3%
    assert bill.confirmed and bill.most == bill.reserved
    assert bill.within(11 * GIB).ran_out is None
    assert bill_of_trainer("nanochat", D12, 8, compiled=False).within(11 * GIB).ran_out is not None


@pytest.mark.parametrize("row", SAVED, ids=lambda row: f"{row['generation']}-{row['dtype']}-{row['n_layer']}")
def test_what_is_kept_for_backward_is_what_its_own_code_keeps(row: dict[str, Any]) -> None:
    """Counted by benchmarks/nanochat_saved.py with saved_tensors_hooks: the same bytes."""
    sizes = {name: row[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")}
    if row["generation"] == 2025:
        shape: AnyShape = NanochatShape(**sizes)
    else:
        shape = Nanochat2026Shape(**sizes, window_pattern=row["window_pattern"])
    step = EagerNanochat(shape, row["batch"], dtype=row["dtype"])
    step.load()
    step.tape.pads_masks = False
    assert step.kept_bytes() == row["kept"]


def test_both_generations_and_precisions_were_counted() -> None:
    counts = [(row["generation"], row["dtype"]) for row in SAVED]
    assert {kind: counts.count(kind) for kind in set(counts)} == {
        (2025, "float32"): 20, (2026, "float32"): 20, (2026, "bfloat16"): 20,
    }  # fmt: skip


def test_nothing_is_lost_from_step_to_step() -> None:
    """After a step there is what there was before it, and the optimizer's averages."""
    for shape in (NanochatShape.of_depth(4, 4096, 256), Nanochat2026Shape.of_depth(4, 4096, 256)):
        for kind in (CompiledNanochat, EagerNanochat):
            trainer = kind(shape, 2)
            after = [trainer.run(1, 2).allocated]
            for _ in range(2):
                trainer.micro_batch()
                trainer.update(is_first=False)
                after.append(trainer.heap.allocated)
            assert after[0] == after[1] == after[2]


def test_gpt2_is_not_nanochats() -> None:
    from onecard.arch.shapes import GPT2Shape

    with pytest.raises(UserError, match="nanochat does not have gpt2"):
        bill_of_trainer("nanochat", GPT2Shape(12, 12, 768, 50304, 1024, False), 8)


def test_what_no_card_has_confirmed_is_marked() -> None:
    for row in MEASURED:
        assert is_confirmed("nanochat", shape_of(row["job"]), row["job"]["batch"], "bfloat16")
    far = bill_of_trainer("nanochat", Nanochat2026Shape.of_depth(4, 4096, 256), 1)
    assert not far.confirmed and far.most == round(1.15 * far.reserved)
    assert not bill_of_trainer("nanochat", D12, 8, dtype="float32").confirmed


SHAPES = st.builds(
    lambda generation, layers, heads, channels, vocab, block: generation(
        layers, heads, heads * channels, 64 * vocab, block
    ),
    st.sampled_from([NanochatShape, Nanochat2026Shape]), st.integers(1, 8), st.integers(1, 6),
    st.sampled_from([32, 64, 128]), st.integers(1, 500), st.sampled_from([64, 256, 1024, 2048]),
)  # fmt: skip
SETTINGS = st.fixed_dictionaries({
    "compiled": st.booleans(), "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
    "gradient_accumulation_steps": st.integers(1, 4),
})  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 16), SETTINGS, st.floats(0.4, 1.2))
def test_lines_add_up_and_memory_is_enough_or_not(
    shape: AnyShape, batch_size: int, options: dict[str, Any], share: float
) -> None:
    bill = bill_of_trainer("nanochat", shape, batch_size, **options)
    assert total(bill.lines) == bill.allocated <= bill.reserved
    for line in bill.lines:
        products = (term.replace(" × ", "·").split("·") for term in line.formula.split(" + "))
        assert sum(math.prod(int(factor) for factor in product) for product in products) == line.bytes
    memory = int(share * bill.reserved)
    confined = bill.within(memory)
    if memory >= bill.reserved:
        assert confined.ran_out is None
    if memory < bill.allocated:
        assert confined.ran_out is not None
        assert confined.ran_out.allocated <= confined.ran_out.reserved <= memory


@settings(max_examples=20, deadline=None)
@given(SHAPES, st.integers(1, 8), SETTINGS)
def test_twice_the_batch_needs_more(shape: AnyShape, batch_size: int, options: dict[str, Any]) -> None:
    """How tensors pack into the allocator's blocks is luck: never less than the smaller one's asked for."""
    lines = bill_of_trainer("nanochat", shape, batch_size, **options).lines
    asked = total(line for line in lines if line.name != "rounding to whole blocks")
    assert bill_of_trainer("nanochat", shape, 2 * batch_size, **options).allocated >= asked
