"""Predicted speeds are near the measured ones, and change as speeds do."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from measured_runs import D32, D32_SETTING, Run, d32_row, rows_of, table_runs
from peers_measured import name_of, peers, setting_of, shape_of

from onecard.arch.layout import OFFLOAD, RECOMPUTE, Setting, default_chunk
from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, Shape
from onecard.hardware.cards import Card, all_cards, find_card
from onecard.hardware.measured import AttentionRate, MatmulRate, Measured
from onecard.plan.others.nanogpt_speed import nanogpt_step_time
from onecard.plan.ranges import spread_of
from onecard.plan.rates import Rates, rates_of
from onecard.plan.speed import StepTime, step_time


def known_rates(card: str, dtype: str = "bfloat16", measured: Measured | None = None) -> Rates:
    rates = rates_of(find_card(card), dtype, measured)
    assert rates is not None
    return rates


H200 = known_rates("H200")
RTX_4070 = known_rates("RTX 4070")

# Measured when that shared host needed a quarter to a half more time than at others for the same work:
# 576 wide is 21% faster with CUDA graphs, which take the host out of it; 1 and 4 sequences were a third and a
# quarter faster in the grid (benchmarks/results/plan_accuracy_*).
HOST_BOUND = {
    "onecard exact 12L 576 16x1024 acc4",
    *(f"onecard exact 12L 768 {batch}x1024 acc4" for batch in (1, 2, 4, 8)),
}


@pytest.mark.parametrize(
    "run",
    [run for run in table_runs() if run.name not in HOST_BOUND],
    ids=lambda run: run.name,
)
def test_our_speed_on_an_h200(run: Run) -> None:
    step = step_time(run.shape, run.setting, "bfloat16", H200, run.sequences)
    assert step.tokens_per_s == pytest.approx(run.tokens_per_s, rel=0.12)
    assert step.tokens == run.sequences * run.shape.block_size


def test_what_was_left_out_is_slower_than_predicted() -> None:
    """If it no longer is, the exceptions above have lost their reason."""
    for run in table_runs():
        if run.name in HOST_BOUND:
            step = step_time(run.shape, run.setting, "bfloat16", H200, run.sequences)
            assert 1.12 < step.tokens_per_s / run.tokens_per_s < 1.65, run.name


def test_d32_on_an_h200() -> None:
    row = d32_row("train")
    step = step_time(D32, D32_SETTING, "bfloat16", H200, 256, by_muon=True)
    assert step.seconds == pytest.approx(row["step_s"], rel=0.05)
    assert step.update == pytest.approx(row["update_s"], rel=0.10)


def test_public_logs_of_an_rtx_4070() -> None:
    d12 = Nanochat2026Shape(12, 6, 768, 32768, 2048)
    step = step_time(d12, Setting(8, default_chunk(32768)), "bfloat16", RTX_4070, 256, by_muon=True)
    assert step.tokens_per_s == pytest.approx(55_700, rel=0.15)
    small = GPT2Shape(12, 12, 384, 50304, 1024, False)
    theirs = nanogpt_step_time(small, 16, 512, RTX_4070, compiled=True)
    assert theirs.tokens_per_s == pytest.approx((114_000 + 125_000) / 2, rel=0.15)
    # As the card's own peak counts it, an MFU of 59 to 64%; nanoGPT divides by an A100's and says 11 to 12%.
    assert theirs.mfu == pytest.approx(0.615, rel=0.15)


# nanoGPT's own trainer on an H200, 12 layers, accumulation 4: width, micro-batch, compiled, tokens/s.
NANOGPT = [
    (384, 16, True, 925_290), (384, 16, False, 649_597), (576, 16, True, 658_565), (576, 16, False, 495_593),
    (576, 12, False, 423_058), (768, 16, True, 503_304), (768, 16, False, 396_703), (768, 8, True, 456_773),
    (768, 12, True, 477_382),
]  # fmt: skip


@pytest.mark.parametrize(("width", "batch", "compiled", "measured"), NANOGPT)
def test_nanogpts_speed_on_an_h200(width: int, batch: int, compiled: bool, measured: float) -> None:
    shape = GPT2Shape(12, 12, width, 50304, 1024, False)
    step = nanogpt_step_time(shape, batch, 4 * batch, known_rates("H200"), compiled=compiled)
    spread = spread_of(step, shape, batch, calibrated=True, engine="nanogpt")
    # float16, 12 at a time, is 15% slower than predicted: its launches take two thirds of a step.
    assert -spread.slower < measured / step.tokens_per_s - 1 < 0.11


def test_nanogpts_speed_beside_ours() -> None:
    by_width: dict[int, list[float]] = {}
    for row in rows_of("nanogpt"):
        case = row["case"]
        assert (case["n_layer"], case["batch"], case["block"]) == (12, 16, 1024)
        by_width.setdefault(case["n_embd"], []).append(row["tokens_per_s"])
    assert set(by_width) == {576, 768}
    for width, speeds in by_width.items():
        shape = GPT2Shape(12, width // 64, width, 50304, 1024, False)
        step = nanogpt_step_time(shape, 16, 64, known_rates("H200"), compiled=True)
        assert step.tokens_per_s == pytest.approx(statistics.median(speeds), rel=0.15)


DROPPING = [row for row in peers("onecard") + peers("nanogpt") if row["job"]["dropout"]]


def predicted(row: dict[str, Any], dropout: float) -> StepTime:
    job = row["job"]
    shape, sequences = shape_of(job), job["batch"] * job["accumulation"]
    if job["contender"] == "nanogpt":
        return nanogpt_step_time(
            shape, job["batch"], sequences, H200, compiled=job["compile"], dropout=dropout
        )
    return step_time(shape, setting_of(job), "bfloat16", H200, sequences, dropout=dropout)


@pytest.mark.parametrize("row", [row for row in DROPPING if row["job"]["n_layer"] >= 12], ids=name_of)
def test_dropout_is_priced(row: dict[str, Any]) -> None:
    """Those whose step the card's work decides, not the CPU's."""
    step, plain = (predicted(row, dropout) for dropout in (row["job"]["dropout"], 0.0))
    assert step.seconds == pytest.approx(row["seconds"], rel=0.08)
    assert step.seconds > plain.seconds


def test_dropout_costs_our_engine_more_than_nanogpt() -> None:
    """Measured at 12×1024 tokens of GPT-2 124M: ours 0.65 of the speed without, nanoGPT 0.93."""
    rows = {row["name"]: row for row in peers("onecard") + peers("nanogpt")}
    shares = {}
    for trainer in ("onecard", "nanogpt"):
        row, plain = (rows[f"{trainer} 12L768 12x1024 compiled{words}"] for words in (" dropout=0.1", ""))
        shares[trainer] = predicted(row, 0.0).seconds / predicted(row, 0.1).seconds
        assert shares[trainer] == pytest.approx(plain["seconds"] / row["seconds"], rel=0.08)
    assert shares["onecard"] < 0.7 < 0.9 < shares["nanogpt"]


def test_what_is_dropped_costs_the_same_however_much_it_is() -> None:
    (row,) = (r for r in DROPPING if r["name"] == "onecard 12L768 12x1024 compiled dropout=0.1")
    assert predicted(row, 0.5) == predicted(row, 0.1)


# --- properties ---------------------------------------------------------------------------------

SHAPES: st.SearchStrategy[Shape] = st.sampled_from(
    [
        GPT2Shape(12, 12, 768, 50304, 1024, False),
        GPT2Shape(6, 6, 384, 65, 256, False),
        GPT2Shape(48, 25, 1600, 50304, 1024, True),
        NanochatShape(20, 10, 1280, 65536, 2048),
        Nanochat2026Shape(12, 6, 768, 32768, 2048),
    ]
)
SETTINGS = st.builds(
    Setting,
    micro_batch=st.integers(1, 48),
    loss_chunk=st.integers(1, 40).map(lambda n: 128 * n),
    recompute=st.sampled_from(RECOMPUTE),
    offload=st.sampled_from(OFFLOAD),
    master_weights=st.sampled_from(["fp32", "bf16"]),
    optim_states=st.sampled_from(["fp32", "bf16", "int8"]),
    compile=st.booleans(),
    cuda_graphs=st.booleans(),
)
CARDS = st.sampled_from([card for card in all_cards() if card.peak_tflops("bfloat16") is not None])
quickly = hypothesis_settings(deadline=None, max_examples=60)


def timed(shape: Shape, setting: Setting, rates: Rates, sequences: int) -> StepTime:
    return step_time(shape, setting, "bfloat16", rates, sequences, by_muon=shape.arch != "gpt2")


def rates_for(card: Card) -> Rates:
    rates = rates_of(card, "bfloat16")
    assert rates is not None
    return rates


@given(SHAPES, SETTINGS, CARDS, st.integers(1, 300))
@quickly
def test_parts_are_positive_and_add_up(shape: Shape, setting: Setting, card: Card, sequences: int) -> None:
    step = timed(shape, setting, rates_for(card), sequences)
    assert sum(step.parts().values()) == pytest.approx(step.seconds)
    assert all(part >= 0 for part in step.parts().values())
    assert step.matmuls > 0 and step.attention > 0 and step.rest > 0 and step.loss > 0 and step.update > 0
    assert step.evaluated_per_s > step.tokens_per_s
    assert step.mfu is not None and 0 < step.mfu < 1


@given(SHAPES, SETTINGS, CARDS, st.integers(1, 300), st.floats(1.0, 5.0))
@quickly
def test_a_faster_card_is_never_slower(
    shape: Shape, setting: Setting, card: Card, sequences: int, factor: float
) -> None:
    rates = rates_for(card)
    before = timed(shape, setting, rates, sequences).seconds
    for name in ("matmul", "bandwidth", "attention", "to_card", "to_host"):
        faster = dataclasses.replace(rates, **{name: factor * getattr(rates, name)})
        assert timed(shape, setting, faster, sequences).seconds <= before * (1 + 1e-9), name
    for name in ("short", "narrow", "kernel", "launch"):
        faster = dataclasses.replace(rates, **{name: getattr(rates, name) / factor})
        assert timed(shape, setting, faster, sequences).seconds <= before * (1 + 1e-9), name


@given(SHAPES, SETTINGS, CARDS, st.integers(1, 300))
@quickly
def test_computing_again_is_never_faster(shape: Shape, setting: Setting, card: Card, sequences: int) -> None:
    rates = rates_for(card)
    none, mlp, block = (
        timed(shape, dataclasses.replace(setting, recompute=r), rates, sequences).seconds for r in RECOMPUTE
    )
    assert none <= mlp * (1 + 1e-9) and mlp <= block * (1 + 1e-9)


@given(SHAPES, SETTINGS, CARDS, st.integers(1, 20))
@quickly
def test_a_longer_step_gains_the_updates_share_at_most(
    shape: Shape, setting: Setting, card: Card, micro_batches: int
) -> None:
    rates = rates_for(card)
    once = timed(shape, setting, rates, setting.micro_batch)
    longer = timed(shape, setting, rates, micro_batches * setting.micro_batch)
    assert once.tokens_per_s <= longer.tokens_per_s * (1 + 1e-9)
    assert longer.seconds >= micro_batches * longer.micro * (1 - 1e-9)
    # Beside its micro-batches a step has one update, whoever it waits for.
    beside = once.seconds - once.micro
    assert longer.seconds <= micro_batches * longer.micro + beside * (1 + 1e-9)
    assert longer.update == once.update


@given(SHAPES, SETTINGS, CARDS, st.integers(1, 8), st.integers(1, 47))
@quickly
def test_an_uneven_last_micro_batch_costs_between_its_neighbours(
    shape: Shape, setting: Setting, card: Card, whole: int, rest: int
) -> None:
    assume(rest < setting.micro_batch)
    rates, size = rates_for(card), setting.micro_batch
    low, between, high = (timed(shape, setting, rates, n).seconds for n in (
        whole * size, whole * size + rest, (whole + 1) * size))  # fmt: skip
    assert low < between <= high * (1 + 1e-9)


@given(SHAPES, SETTINGS, CARDS)
@quickly
def test_without_the_compiler_it_is_slower(shape: Shape, setting: Setting, card: Card) -> None:
    rates = rates_for(card)
    fast, slow = (timed(shape, dataclasses.replace(setting, compile=c), rates, 64) for c in (True, False))
    assert fast.seconds < slow.seconds


# --- rates --------------------------------------------------------------------------------------


def record(card: str, tflops: float, launch_us: float = 5.0) -> Measured:
    return Measured(
        card=card, date="2026-11-01T10:00:00+00:00", dtype="bfloat16", ceiling_size=8192,
        ceiling_tflops=tflops, copy_gbps=450.0, reduce_gbps=450.0, h2d_gbps=12.5, d2h_gbps=13.0,
        launch_us=launch_us, matmuls=(MatmulRate(8192, 2304, 768, tflops, tflops, tflops),),
        attention=(AttentionRate(64, 1024, 30.0, 30.0),),
    )  # fmt: skip


def test_a_record_of_the_users_own_card_is_used() -> None:
    estimated = known_rates("RTX 4080")
    measured = known_rates("RTX 4080", measured=record("NVIDIA GeForce RTX 4080", 80.0, 4.0))
    assert not estimated.calibrated and measured.calibrated
    assert "2026-11-01" in measured.source and estimated.source == "the card's figures"
    assert (measured.bandwidth, measured.launch) == (450e9, pytest.approx(4e-6))
    assert (measured.to_card, measured.to_host) == (12.5e9, 13e9)
    assert 0.85 * 80e12 < measured.matmul < 80e12
    # Twice the ceiling is faster; the nominal peak, against which MFU counts, stays the card's.
    twice = known_rates("RTX 4080", measured=record("NVIDIA GeForce RTX 4080", 160.0, 4.0))
    shape, setting = GPT2Shape(12, 12, 768, 50304, 1024, False), Setting(16, 4096)
    assert timed(shape, setting, twice, 64).seconds < timed(shape, setting, measured, 64).seconds
    assert measured.peak == twice.peak == known_rates("RTX 4080").peak


def test_a_record_in_bf16_does_not_make_fp32_as_fast() -> None:
    measured = record("NVIDIA GeForce RTX 4080", 80.0)
    wide, narrow = (known_rates("RTX 4080", dtype, measured) for dtype in ("float32", "bfloat16"))
    plain_wide, plain_narrow = (known_rates("RTX 4080", dtype) for dtype in ("float32", "bfloat16"))
    assert wide.matmul / narrow.matmul == pytest.approx(plain_wide.matmul / plain_narrow.matmul)
    assert wide.matmul < narrow.matmul


def test_a_record_that_repeats_the_estimate_gives_about_the_same_speed() -> None:
    """A 4070 whose bench says what its figures say is as fast as one without a bench."""
    card = find_card("RTX 4070")
    estimate = rates_for(card)
    same = dataclasses.replace(
        record(card.name, estimate.matmul / 1e12 / 0.94, 10.0),
        copy_gbps=estimate.bandwidth / 1e9, h2d_gbps=22.0, d2h_gbps=22.0,
    )  # fmt: skip
    shape, setting = GPT2Shape(12, 12, 768, 50304, 1024, False), Setting(16, 4096)
    ours, theirs = (timed(shape, setting, r, 64).seconds for r in (
        estimate, known_rates("RTX 4070", measured=same)))  # fmt: skip
    assert theirs == pytest.approx(ours, rel=1e-6)


def test_what_a_card_cannot_compute_in_has_no_rate() -> None:
    without = [card for card in all_cards() if card.peak_tflops("bfloat16") is None]
    assert without and all(rates_of(card, "bfloat16") is None for card in without)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_no_card_is_given_more_than_its_figures(dtype: str) -> None:
    for card in all_cards():
        rates = rates_of(card, dtype)
        if rates is not None:
            assert rates.peak is not None and 0.4 * rates.peak < rates.matmul <= rates.peak, card.name
            assert rates.attention < rates.matmul
            assert card.bandwidth_gbps is None or rates.bandwidth < card.bandwidth_gbps * 1e9
            assert rates.calibrated == (card.name in ("H200 SXM", "RTX 4070"))
