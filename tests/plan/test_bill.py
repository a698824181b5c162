"""The bill says what was measured, and behaves as memory does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from measured_runs import D32, H200, Run, d32_row, d32_run, nanochat_runs, table_runs

from onecard.arch import layout
from onecard.arch.layout import OFFLOAD, PIECES_ON_CARD, RECOMPUTE, Setting
from onecard.arch.parameters import parameters_of
from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, Shape
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.hardware.cards import all_cards
from onecard.plan import resident
from onecard.plan.activations import TRYING_OUT, sampling_moment
from onecard.plan.bill import (
    CONTEXT,
    Bill,
    Facts,
    bill_of,
    captured_bytes,
    checkpoint_bytes,
    host_lines,
    micro_batch_bytes,
    training_bill,
    workspace,
)
from onecard.plan.lines import GIB, total
from onecard.plan.update import UPDATE

MIB = 2**20
# Measured when the totals of two layers were on the card at a time instead of three.
TWO_PLACES = "onecard exact recompute=block offload=gradients 48L 1600 4x1024 acc8 cap11"
RUNS = [run for run in (*table_runs(), *nanochat_runs(), d32_run()) if run.name != TWO_PLACES]


def bill_of_run(run: Run) -> Bill:
    return training_bill(
        run.shape, run.setting, facts=Facts(by_muon=run.by_muon, refined=run.refined, compute_capability=H200)
    )


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Muon takes a few matrices together now; what was measured was measured when it took one by one."""
    monkeypatch.setattr(layout, "MUON_TOGETHER", 1)
    resident._resident.cache_clear()
    yield
    resident._resident.cache_clear()


@pytest.fixture
def tried_out_amid_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are tried out on one layer of each kind now; where this was measured all layers kept theirs."""
    for family in (GPT2Shape, NanochatShape, Nanochat2026Shape):
        monkeypatch.setattr(family, "layer_kinds", property(lambda shape: shape.n_layer))


@pytest.mark.usefixtures("one_by_one", "tried_out_amid_all")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_it_says_what_was_measured(run: Run) -> None:
    """The table's peaks are of steady steps; the others are of whole runs, which had kernels to try out."""
    bill = bill_of_run(run)
    bound = 0.015 if run.setting.cuda_graphs else 0.007
    first_step = bill.allocated - bill.steady if run in table_runs() else 0
    assert (bill.allocated - first_step) / GIB == pytest.approx(run.allocated_gib, rel=bound)
    if run.reserved_gib is not None:
        assert abs((bill.reserved - first_step) / GIB - run.reserved_gib) < 64 / 1024
        # What is promised to suffice did suffice.
        assert bill.need / GIB > run.reserved_gib


def test_a_smaller_last_micro_batch_is_captured_too() -> None:
    """32 sequences by 12: two of 12 and one of 8, each with memory of its own."""
    words = ["--batch_size=16", "--gradient_accumulation_steps=2", "--cuda_graphs=True", "--sample_tokens=0"]
    config = load_config(RunConfig, words).resolved()
    shape = config.shape(50304)

    def bill(micro_batch: int) -> Bill:
        return bill_of(config, shape, Setting(micro_batch, 1024, cuda_graphs=True), "bfloat16", H200)

    passes = micro_batch_bytes(shape, Setting(8, 1024), "bfloat16", 0.0)
    one, two = bill(16).graph_bytes, bill(12).graph_bytes
    assert two - one == pytest.approx(passes + one, abs=64 * MIB), "as the first, it keeps more than it takes"
    assert captured_bytes(shape, Setting(8, 1024), "bfloat16", 0.0) == two - one
    assert bill(12).allocated > bill(16).allocated, "less is computed at a time, and more is held"


def test_trying_kernels_out_is_the_worst_of_small_models_alone() -> None:
    """On one layer of each kind: 124M needs more later on, where all layers keep theirs."""
    setting = Setting(16, 4096, "block")
    large = training_bill(
        GPT2Shape(12, 12, 768, 50304, 1024, False), setting, facts=Facts(compute_capability=H200)
    )
    assert large.worst.name == large.tightest.name == "backward pass of a layer"
    assert large.allocated == large.steady
    small = training_bill(
        GPT2Shape(2, 2, 128, 256, 256, False), Setting(4, 4096), facts=Facts(compute_capability=H200)
    )
    assert small.worst.name == small.tightest.name == TRYING_OUT
    assert small.allocated > small.steady
    assert small.need - small.allocated >= 108 * MIB, "with 84 one of six ran out, by up to 24"


def test_one_layer_of_each_kind_is_kept_while_kernels_are_tried_out() -> None:
    shape = Nanochat2026Shape(8, 2, 64, 64, 1024)
    assert shape.layer_kinds == 3  # long windows are in layers with a value embedding only
    bill = training_bill(shape, Setting(2, 64), facts=Facts(compute_capability=H200))
    kept = {m.name: line.bytes for m in bill.moments for line in m.lines if line.name.startswith("kept")}
    assert 3 * kept["loss"] == 8 * kept[TRYING_OUT]


def test_all_kinds_of_runs_are_among_them() -> None:
    kinds = {(r.setting.recompute, r.setting.offload, r.setting.exact) for r in RUNS}
    assert {("none", "none", True), ("mlp", "none", True), ("block", "none", True)} <= kinds
    assert {("block", "optimizer", True), ("block", "none", False), ("block", "gradients", False)} <= kinds
    assert {r.shape.arch for r in RUNS} == {"gpt2", "nanochat-2025", "nanochat-2026"}
    assert len(RUNS) >= 20


def test_where_it_differs_one_more_layer_is_on_the_card() -> None:
    (run,) = (run for run in table_runs() if run.name == TWO_PLACES)
    assert PIECES_ON_CARD == 3
    a_layer = 4 * sum(p.place for p in parameters_of(run.shape) if p.name.startswith("transformer.h.0.") and
                      p.kind == "layers")  # fmt: skip
    assert bill_of_run(run).steady - a_layer == pytest.approx(run.allocated_gib * GIB, rel=0.001)


def test_the_buffer_that_clears_the_cache_is_as_large_as_the_cards() -> None:
    """Cards of one compute capability differ: charged is the largest, or the card's own."""
    for card in all_cards():
        if card.compute_capability is None or card.l2_mb is None:
            continue
        for known in (None, card.l2_bytes):
            bill = training_bill(
                GPT2Shape(2, 2, 64, 64, 64, False), Setting(1, 64), facts=Facts(l2_bytes=known,
                compute_capability=card.compute_capability),
            )  # fmt: skip
            (tried,) = (moment for moment in bill.moments if moment.name == TRYING_OUT)
            (buffer,) = (line.bytes for line in tried.lines if line.name.startswith("a buffer"))
            assert buffer >= card.l2_mb * 2**20, card.name
        if card.name == "RTX 4070":
            assert buffer == 36 * 2**20


def _to_sample(shape: Shape, sequences: int, tokens: int) -> int:
    """Bytes of bf16 weights, the caches, and what the libraries take."""
    moment = sampling_moment(shape, sequences, tokens, "bfloat16")
    return 2 * shape.parameters + moment.bytes + workspace(H200).bytes + 52 * MIB


@pytest.mark.usefixtures("tried_out_amid_all")
def test_what_d32_takes_of_the_card_and_the_host() -> None:
    row, bill = d32_row("train"), bill_of_run(d32_run())
    assert bill.process / GIB == pytest.approx(row["whole_card_gib"], abs=0.1)
    assert bill.process / GIB < 11
    assert bill.host / GIB == pytest.approx(row["pinned_gib"], rel=0.01)
    assert total(host_lines(bill)) / GIB >= bill.host / GIB + 2
    # Two samples of 64 tokens, from the model alone.
    sampled = d32_row("sample")["peak_reserved_gib"]
    assert sampled < _to_sample(D32, 2, 65) / GIB < 1.05 * sampled


SHAPES: st.SearchStrategy[Shape] = st.builds(
    lambda arch, layers, heads, vocabulary, block: {
        "gpt2": lambda: GPT2Shape(layers, heads, 64 * heads, vocabulary, block, False),
        "2025": lambda: NanochatShape(layers, heads, 128 * heads, vocabulary, block),
        "2026": lambda: Nanochat2026Shape(layers, heads, 128 * heads, vocabulary, block),
    }[arch](),
    st.sampled_from(["gpt2", "2025", "2026"]),
    st.integers(2, 40),
    st.integers(1, 20),
    st.integers(1, 2000).map(lambda n: 64 * n),
    st.sampled_from([128, 256, 1024, 2048, 8192]),
)
SETTINGS = st.builds(
    Setting,
    micro_batch=st.integers(1, 64),
    loss_chunk=st.integers(1, 64).map(lambda n: 128 * n),
    recompute=st.sampled_from(RECOMPUTE),
    offload=st.sampled_from(OFFLOAD),
    master_weights=st.sampled_from(["fp32", "bf16"]),
    optim_states=st.sampled_from(["fp32", "bf16", "int8"]),
    compile=st.booleans(),
    cuda_graphs=st.booleans(),
)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])


def bill_for(shape: Shape, setting: Setting, dtype: str) -> Bill:
    muon = shape.arch != "gpt2"
    return training_bill(
        shape, setting, dtype, facts=Facts(by_muon=muon, refined=isinstance(shape, Nanochat2026Shape))
    )


def need(shape: Shape, setting: Setting, dtype: str) -> int:
    return bill_for(shape, setting, dtype).need


@given(SHAPES, SETTINGS, DTYPES)
@hypothesis_settings(deadline=None)
def test_more_of_anything_never_needs_less(shape: Shape, setting: Setting, dtype: str) -> None:
    least = need(shape, setting, dtype)
    head = 64 if shape.arch == "gpt2" else 128
    larger: list[Shape] = [
        dataclasses.replace(shape, n_layer=shape.n_layer + 1),
        dataclasses.replace(shape, n_head=shape.n_head + 1, n_embd=shape.n_embd + head),
        dataclasses.replace(shape, vocab_size=shape.vocab_size + 64),
        dataclasses.replace(shape, block_size=2 * shape.block_size),
    ]
    assert all(need(other, setting, dtype) >= least for other in larger)
    more = dataclasses.replace(setting, micro_batch=setting.micro_batch + 1)
    # An update does not see how its step is split.
    by_update = any("update" in line.name for line in bill_for(shape, more, dtype).tightest.lines)
    assert need(shape, more, dtype) >= least + (not by_update)
    rows = dataclasses.replace(setting, loss_chunk=setting.loss_chunk + 128)
    assert need(shape, rows, dtype) >= least


@given(SHAPES, SETTINGS, DTYPES)
@hypothesis_settings(deadline=None)
def test_computing_again_never_needs_more(shape: Shape, setting: Setting, dtype: str) -> None:
    """A captured graph apart, which packs it less well."""
    plain = dataclasses.replace(setting, cuda_graphs=False)
    none, mlp, block = (need(shape, dataclasses.replace(plain, recompute=r), dtype) for r in RECOMPUTE)
    assert block <= mlp <= none


@given(SHAPES, SETTINGS, DTYPES)
@hypothesis_settings(deadline=None)
def test_offloading_costs_the_card_streamed_buffers_at_most(
    shape: Shape, setting: Setting, dtype: str
) -> None:
    muon = shape.arch != "gpt2"
    plain = dataclasses.replace(setting, offload="none", cuda_graphs=False)
    at_home = training_bill(shape, plain, dtype, facts=Facts(by_muon=muon))
    assert at_home.host == 0
    assert not any(line.name == "buffers streamed from RAM" for line in at_home.lines)
    for offload in ("optimizer", "gradients"):
        bill = training_bill(
            shape, dataclasses.replace(plain, offload=offload), dtype, facts=Facts(by_muon=muon)
        )
        streamed = sum(line.bytes for line in bill.lines if line.name == "buffers streamed from RAM")
        # A master that was computed with itself now has a copy on the card that is. And what comes from host
        # memory is updated in larger pieces, of which an uncompiled low-bit update takes copies.
        passing = ("weights to compute with", "the update's temporaries")
        copies = sum(line.bytes for line in bill.lines if line.name in passing)
        assert bill.need <= at_home.need + streamed + copies
        assert bill.host > 0 and streamed > 0


@given(SHAPES, SETTINGS, DTYPES)
@hypothesis_settings(deadline=None)
def test_low_bits_never_need_more(shape: Shape, setting: Setting, dtype: str) -> None:
    """But for a copy: in fp16 or fp32 a bf16 master cannot be computed with. And products before rounding,
    and copies of an uncompiled update, which are the most of small models."""
    muon = shape.arch != "gpt2"
    exact = dataclasses.replace(setting, master_weights="fp32", optim_states="fp32", cuda_graphs=False)
    low = dataclasses.replace(exact, master_weights="bf16", optim_states="int8")
    bills = [training_bill(shape, s, dtype, facts=Facts(by_muon=muon)) for s in (exact, low)]
    copies = [sum(x.bytes for x in b.resident.card if x.name == "weights to compute with") for b in bills]
    before_rounding = 4 * 4 * shape.n_embd**2
    needs = [total(b.resident.card) - c for b, c in zip(bills, copies, strict=True)]
    assert needs[1] <= needs[0]
    assert bills[1].host <= bills[0].host
    if dtype == "bfloat16" and bills[1].tightest.name != UPDATE:
        assert bills[1].need <= bills[0].need + before_rounding
        if shape.n_layer > 8:
            assert bills[1].need < bills[0].need


@given(SHAPES, SETTINGS, DTYPES, st.sampled_from([None, (8, 6), (8, 9), (9, 0), (12, 0)]))
@hypothesis_settings(deadline=None)
def test_lines_add_up(shape: Shape, setting: Setting, dtype: str, capability: tuple[int, int] | None) -> None:
    bill = training_bill(shape, setting, dtype, facts=Facts(compute_capability=capability, sample_tokens=100))
    graph = 0 if bill.worst.name == TRYING_OUT else bill.graph_bytes
    assert bill.steady <= total(bill.lines) + graph == bill.allocated <= bill.reserved < bill.need
    assert total(bill.all_lines()) == bill.process == bill.need + CONTEXT
    assert all(line.bytes > 0 and line.formula for line in bill.all_lines())
    assert bill.worst in bill.moments
    assert bill.graph_bytes or bill.worst.bytes == max(m.bytes for m in bill.moments)
    assert (bill.graph_bytes > 0) == (setting.cuda_graphs and setting.offload != "gradients")
    said = bill.to_json()
    assert said["total_gib"] == pytest.approx(sum(line["gib"] for line in said["lines"]), abs=0.001)
    assert said["total_gib"] == round(bill.process / GIB, 4)
    assert said["host_gib"] == pytest.approx(sum(line["gib"] for line in said["host_lines"]), abs=0.001)
    assert bool(bill.host) == (setting.offload != "none")


def test_a_config_pays_for_what_it_asks() -> None:
    words = ["--n_layer=4", "--n_head=4", "--n_embd=256", "--vocab_size=1024", "--block_size=256"]
    setting = Setting(8, 1024)

    def bill(*more: str) -> Bill:
        config = load_config(RunConfig, [*words, *more])
        return bill_of(config, config.shape(1024), setting, "bfloat16", (8, 9))

    assert bill("--dropout=0.1").need > bill().need
    muon = {line.name for line in bill("--optimizer=muon").lines}
    assert "Muon's room" in muon and "Muon's room" not in {line.name for line in bill().lines}
    assert bill("--sample_tokens=64").moments[-1].name == "sampling"


def test_other_cards_have_smaller_workspaces() -> None:
    assert workspace((9, 0)).bytes == workspace(None).bytes == 64 * MIB
    assert workspace((8, 9)).bytes == 2 * 8_519_680


def test_a_checkpoint_is_masters_and_states() -> None:
    shape = GPT2Shape(12, 12, 768, 50304, 1024, False)
    exact, low = Setting(1, 128), Setting(1, 128, master_weights="bf16", optim_states="int8")
    assert checkpoint_bytes(shape, exact, False) == pytest.approx(12 * shape.parameters, rel=0.001)
    assert checkpoint_bytes(shape, low, False) == pytest.approx(4 * shape.parameters, rel=0.02)
    # Where they live does not change what they are.
    assert checkpoint_bytes(
        shape, dataclasses.replace(exact, offload="gradients"), False
    ) == checkpoint_bytes(shape, exact, False)
