"""The record of a card's measurement: rates between measured sizes, files good and bad."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.hardware.measured import (
    AttentionRate,
    Load,
    MatmulRate,
    Measured,
    card_slug,
    load_measured,
    records_folder,
    save_measured,
)
from onecard.language import _

RECORD = Measured(
    card="NVIDIA GeForce RTX 4070",
    date="2026-03-01T12:00:00+00:00",
    dtype="bfloat16",
    ceiling_size=8192,
    ceiling_tflops=56.0,
    copy_gbps=440.0,
    reduce_gbps=460.0,
    h2d_gbps=24.0,
    d2h_gbps=25.0,
    launch_us=4.0,
    matmuls=tuple(
        MatmulRate(tokens, n * width, width, forward, forward + 1, forward - 1)
        for tokens, base in ((1024, 20.0), (4096, 30.0), (16384, 40.0))
        for width, more in ((384, 0.0), (768, 5.0), (2048, 9.0))
        for n, forward in ((1, base + more), (3, base + more + 2), (4, base + more + 3))
    ),
    attention=(AttentionRate(64, 1024, 30.0, 20.0), AttentionRate(64, 2048, 50.0, 40.0)),
    load=Load(2500.0, 195.0, 66.0, 200.0),
    memory_gib=11.99,
    driver="550.1",
    torch="2.11.0",
    seconds=19.5,
    skipped=("matmul 1 × 2 × 3: no time",),
)
Size = st.integers(min_value=1, max_value=2**18)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    records_folder().mkdir(parents=True)
    return records_folder()


# --- rates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["all", "forward", "dx", "dw"])
def test_a_measured_shape_has_its_measured_rate(which: Any) -> None:
    for rate in RECORD.matmuls:
        assert RECORD.matmul_tflops(rate.tokens, rate.n, rate.k, which) == rate.tflops(which)


def test_all_three_products_together_take_the_sum_of_their_times() -> None:
    rate = MatmulRate(1, 1, 1, forward_tflops=10.0, dx_tflops=20.0, dw_tflops=40.0)
    assert rate.tflops("all") == pytest.approx(3 / (0.1 + 0.05 + 0.025))
    # Backward is two thirds of attention's work: 1 at 30 and 2 at 20.
    assert RECORD.attention_tflops(64, 1024) == pytest.approx(3 / (1 / 30 + 2 / 20))


def test_halfway_in_logarithms_is_halfway_between_the_rates() -> None:
    low, high = (RECORD.matmul_tflops(tokens, 2304, 768) for tokens in (4096, 16384))
    assert RECORD.matmul_tflops(8192, 2304, 768) == pytest.approx((low + high) / 2)
    low, high = (RECORD.matmul_tflops(4096, n, 768) for n in (768, 2304))
    assert RECORD.matmul_tflops(4096, round(768 * 3**0.5), 768) == pytest.approx((low + high) / 2, rel=1e-3)
    low, high = (RECORD.attention_tflops(64, block) for block in (1024, 2048))
    assert RECORD.attention_tflops(64, round(1024 * 2**0.5)) == pytest.approx((low + high) / 2, rel=1e-3)


@given(tokens=Size, n=Size, k=Size)
def test_no_shape_is_faster_than_the_fastest_measured(tokens: int, n: int, k: int) -> None:
    rates = [rate.tflops("all") for rate in RECORD.matmuls]
    found = RECORD.matmul_tflops(tokens, n, k)
    assert 0 < found <= max(rates)
    if 2 * tokens * n * k >= min(rate.flops for rate in RECORD.matmuls):
        assert found >= min(rates)


@given(
    rates=st.lists(st.floats(0.01, 3000.0), min_size=2, max_size=6),
    first=st.integers(1, 4096),
    tokens=Size,
)
def test_between_two_measured_sizes_the_rate_is_between_theirs(
    rates: list[float], first: int, tokens: int
) -> None:
    points = tuple(MatmulRate(first * 2**i, 512, 512, rate, rate, rate) for i, rate in enumerate(rates))
    record = replace(RECORD, matmuls=points, launch_us=1e-9)
    below = max((p for p in points if p.tokens <= tokens), key=lambda p: p.tokens, default=points[0])
    above = min((p for p in points if p.tokens >= tokens), key=lambda p: p.tokens, default=points[-1])
    low, high = sorted((below.tflops("all"), above.tflops("all")))
    assert low <= record.matmul_tflops(tokens, 512, 512) <= high


@given(tokens=st.tuples(Size, Size), n=st.tuples(Size, Size), k=Size)
def test_where_larger_was_faster_larger_is_not_slower(
    tokens: tuple[int, int], n: tuple[int, int], k: int
) -> None:
    wide = [max(k, size) for size in n]
    small = RECORD.matmul_tflops(min(tokens), min(wide), k)
    large = RECORD.matmul_tflops(max(tokens), max(wide), k)
    assert small <= large * (1 + 1e-9)


@given(tokens=Size, n=Size, k=Size)
def test_a_layer_back_is_the_layer_there_with_forward_and_dx_changing_places(
    tokens: int, n: int, k: int
) -> None:
    there = [RECORD.matmul_tflops(tokens, n, k, which) for which in ("forward", "dx", "dw", "all")]
    back = [RECORD.matmul_tflops(tokens, k, n, which) for which in ("dx", "forward", "dw", "all")]
    if n != k:
        assert there == back


def test_a_tiny_product_takes_at_least_the_time_of_a_launch() -> None:
    flops = 2 * 16 * 64 * 64
    assert RECORD.matmul_tflops(16, 64, 64) == pytest.approx(flops / 4e-6 / 1e12)


# --- files --------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was(folder: Path) -> None:
    path = save_measured(RECORD)
    assert path == folder / "nvidia-geforce-rtx-4070-12gib.json"
    assert list(folder.iterdir()) == [path]
    for name in ("NVIDIA GeForce RTX 4070", "rtx4070", "RTX 4070 12GB"):
        assert load_measured(name) == RECORD
    content = json.loads(path.read_text())
    assert content["schema"] == 1
    assert "2 * tokens * n * k" in content["units"]["matmul"]


def test_a_record_is_english_whatever_the_readers_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", "de")
    note = _("matmul {shape}: no time").format(shape="1 × 2 × 3")
    assert note != RECORD.skipped[0]
    assert replace(RECORD, skipped=(note,)).to_json() == RECORD.to_json()


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert records_folder() == tmp_path / "onecard" / "bench"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert records_folder() == tmp_path / "home" / ".cache" / "onecard" / "bench"


def test_another_card_has_no_record() -> None:
    save_measured(RECORD)
    for name in ("RTX 4070 Ti", "RTX 4080", "RTX 4070 Laptop", "Made-up 9000", ""):
        assert load_measured(name) is None
    assert load_measured("RTX 4070", memory_gib=16.0) is None
    assert load_measured("RTX 4070", memory_gib=11.6) == RECORD


def test_a_card_nobody_knows_is_found_by_its_words_and_memory() -> None:
    eight, sixteen = (replace(RECORD, card="NVIDIA Made-up 9000", memory_gib=size) for size in (8.0, 16.0))
    assert save_measured(eight) != save_measured(sixteen)
    assert load_measured("Made-up 9000", 7.9) == eight
    assert load_measured("Made-up 9000", 15.9) == sixteen
    assert load_measured("Made-up 9001", 15.9) is None


def test_of_two_records_the_newer_one_counts(folder: Path) -> None:
    # By the date inside, time zones included, not by name or by when the file was copied here.
    newer = replace(RECORD, date="2026-03-02T01:00:00+00:00", copy_gbps=1.0)
    older = replace(RECORD, date="2026-03-02T02:00:00+02:00", copy_gbps=2.0)
    for names in (("a", "b"), ("b", "a")):
        for name, record in zip(names, (newer, older), strict=True):
            path = folder / f"{name}.json"
            path.write_text(json.dumps(record.to_json()))
            os.utime(path, (ord(name) * 1e6, ord(name) * 1e6))
        assert load_measured("RTX 4070") == newer


def damaged(**changes: Any) -> str:
    return json.dumps(RECORD.to_json() | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\ud800".encode("utf-16", "surrogatepass"),
        damaged()[:-40],
        damaged(schema=0),
        damaged(schema=2),
        json.dumps({k: v for k, v in RECORD.to_json().items() if k != "launch_us"}),
        damaged(launch_us=0),
        damaged(copy_gbps=float("nan")),
        damaged(copy_gbps="fast"),
        damaged(card=None),
        damaged(dtype="float64"),
        damaged(date="yesterday"),
        damaged(date=7),
        damaged(matmuls=[]),
        damaged(matmuls=[{"tokens": 1}]),
        damaged(matmuls=7),
        damaged(matmuls=[RECORD.to_json()["matmuls"][0] | {"dx_tflops": -1.0}]),
        damaged(attention=[]),
        damaged(load=None),
        damaged(memory_gib="a lot"),
        damaged(copy_gbps=1e308),
        damaged(launch_us=1e-300),
        damaged(ceiling_tflops=10**400),
        "[" * 100_000,
    ],
)
def test_a_broken_or_old_file_is_passed_over_with_a_note(
    folder: Path, text: str | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "nvidia-geforce-rtx-4070-12gib.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    notes: list[str] = []
    assert load_measured("RTX 4070", note=notes.append) is None
    assert len(notes) == 1
    assert str(path) in notes[0]
    assert load_measured("RTX 4070") is None
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"note: {notes[0]}\n")
    # A good one beside it counts, and then the broken one is nobody's concern.
    (folder / "good.json").write_text(json.dumps(RECORD.to_json()))
    assert load_measured("RTX 4070", note=notes.append) == RECORD
    assert len(notes) == 1


def test_without_a_folder_there_is_no_record_and_no_note(folder: Path) -> None:
    folder.rmdir()
    notes: list[str] = []
    assert load_measured("RTX 4070", note=notes.append) is None
    assert notes == []


def test_a_slug_is_a_file_name_on_every_system() -> None:
    assert card_slug("NVIDIA GeForce RTX 4070 Ti SUPER", 15.99) == "nvidia-geforce-rtx-4070-ti-super-16gib"
    assert card_slug("../CPU Intel(R) Xeon(R) @ 2.20GHz/") == "cpu-intel-r-xeon-r-2-20ghz"
    assert card_slug("卡") == "unnamed"
