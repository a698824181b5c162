"""`onecard bench` on a CUDA card: figures that can be true, in the time it promises."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

from onecard.hardware.bench import Bench, computing_on, describe, measure
from onecard.hardware.bench_sizes import CARD_SIZES
from onecard.hardware.cards import match_card
from onecard.hardware.measured import Measured, load_measured, save_measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


@pytest.fixture(scope="module")
def timed() -> tuple[Measured, float]:
    started = time.monotonic()
    measured = measure("cuda", seconds=20.0, own=[(576, 32768)])
    return measured, time.monotonic() - started


@pytest.fixture
def measured(timed: tuple[Measured, float]) -> Measured:
    return timed[0]


def test_it_is_over_when_it_said(timed: tuple[Measured, float]) -> None:
    assert timed[1] < 40


def test_the_figures_are_near_the_nominal_ones(measured: Measured) -> None:
    card = match_card(measured.card, measured.memory_gib)
    if card is None:
        pytest.skip(f"{measured.card} has no nominal figures")
    if peak := card.peak_tflops(measured.dtype):
        assert 0.30 < measured.ceiling_tflops / peak < 1.05
    if card.bandwidth_gbps:
        assert 0.50 < measured.copy_gbps / card.bandwidth_gbps < 1.05
        assert 0.50 < measured.reduce_gbps / card.bandwidth_gbps < 1.05


def test_no_product_beats_the_ceiling_by_much(measured: Measured) -> None:
    # Products that draw less power run at a higher clock; more than that would be a wrong clock.
    for rate in measured.matmuls:
        for tflops in (rate.forward_tflops, rate.dx_tflops, rate.dw_tflops):
            assert 0.005 < tflops / measured.ceiling_tflops < 1.3, rate
    wide, narrow = (measured.matmul_tflops(4096, 4 * width, width) for width in (2048, 384))
    assert wide > narrow
    for attention in measured.attention:
        # Only half of what is counted is computed: the causal mask.
        assert 0.02 < attention.tflops / measured.ceiling_tflops < 2.0, attention


def test_the_bus_and_the_launches_are_possible(measured: Measured) -> None:
    for gbps in (measured.h2d_gbps, measured.d2h_gbps):
        assert 0.5 < gbps < 1000
    assert 0.5 < measured.launch_us < 100


def test_nothing_is_left_out_on_a_card_with_room(measured: Measured) -> None:
    if (measured.memory_gib or 0) < 11 or torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("a small or a busy card")
    assert not any("memory" in note for note in measured.skipped)
    own = {(rate.tokens, rate.n) for rate in measured.matmuls if rate.k == 576}
    assert {(4096, 1728), (4096, 32768)} <= own


def test_the_record_is_found_by_the_name_the_driver_gives(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_measured(measured)
    name, memory_gib, _ = describe("cuda")
    assert load_measured(name, memory_gib) == measured


def test_the_sensors_tell_a_load_or_nothing(measured: Measured) -> None:
    load = measured.load
    if load.power_w is not None and load.power_limit_w is not None:
        assert 0.2 < load.power_w / load.power_limit_w < 1.15
    if load.clock_mhz is not None:
        assert 200 < load.clock_mhz < 4000


def test_a_second_measurement_agrees(measured: Measured) -> None:
    with computing_on("cuda"):
        again, _ = Bench("cuda", CARD_SIZES).sustained(3.0)
    assert again == pytest.approx(measured.ceiling_tflops, rel=0.15)


def test_nothing_stays_on_the_card(measured: Measured) -> None:
    torch._C._cuda_clearCublasWorkspaces()  # those of whatever ran before in this process too
    gc.collect()  # and what tests before this one have left lying about
    assert torch.cuda.memory_allocated() < 2**26
