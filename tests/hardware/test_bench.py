"""`onecard bench` on the CPU: the same code as on a card, in tiny sizes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_measured import RECORD

from onecard.cli import main
from onecard.errors import UserError
from onecard.hardware import bench_show
from onecard.hardware.bench import Bench, measure
from onecard.hardware.bench_show import device_to_measure, show, widths_of
from onecard.hardware.bench_sizes import CARD_SIZES, CPU_SIZES
from onecard.hardware.measured import Load, load_measured, records_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_cpu_is_measured_in_seconds_and_leaves_a_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "narrow.py"
    config.write_text("n_layer = 2\nn_head = 2\nn_embd = 96\nvocab_size = 320\n")
    started = time.process_time()
    assert main(["bench", str(config), "--device", "cpu", "--seconds", "2", "--json"]) == 0
    assert time.process_time() - started < 30  # a few seconds; the first import of torch may be among them
    out, err = capsys.readouterr()
    assert err == ""  # no terminal, no bar
    answer = json.loads(out)
    (path,) = records_folder().glob("*.json")
    assert answer.pop("file") == str(path)
    assert json.loads(path.read_text()) == answer
    measured = load_measured(answer["card"])
    assert measured is not None
    assert measured.to_json() == answer
    assert (measured.dtype, measured.pinned, measured.load) == ("float32", False, Load())
    shapes = {(rate.tokens, rate.n, rate.k) for rate in measured.matmuls}
    # In two seconds of a busy machine not all of them; those left out are named.
    for tokens, n, k in ((256, 96, 96), (256, 288, 96), (256, 384, 96)):
        assert ((tokens, n, k) in shapes) != (f"matmul {tokens} × {n} × {k}: no time" in measured.skipped)
    assert {(rate.head_dim, rate.block) for rate in measured.attention} == {
        (64, 64),
        (64, 128),
        (128, 64),
        (128, 128),
    }
    # No processor computes a millionth or a thousandfold of this.
    rates = [measured.ceiling_tflops, *(rate.tflops("all") for rate in measured.matmuls)]
    assert all(1e-5 < rate < 100 for rate in rates)
    assert all(0.05 < rate < 5000 for rate in (measured.copy_gbps, measured.reduce_gbps, measured.h2d_gbps))
    assert 0.05 < measured.launch_us < 5000
    assert all(0 < measured.matmul_tflops(t, n, k) < 100 for t, n, k in ((1, 1, 1), (9999, 77, 12345)))


def test_a_timed_call_takes_the_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from onecard.hardware import bench as module

    bench = Bench("cpu", CPU_SIZES)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    # A clock of its own: how long a real call takes depends on who else uses the machine.
    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.004 * calls + (1.0 if calls > 20 else 0.0))
    assert bench.seconds_per_call(call, budget=0.1) == pytest.approx(0.004)  # one interrupted repeat in five
    # Once to choose a kernel, once to see how many go into a sixth of the budget, then six times as many.
    assert calls == 1 + 1 + 6 * 4


def test_the_three_products_are_those_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    tokens, n, k = 48, 24, 16
    pool = torch.randn(tokens * k + tokens * n + n * k)
    out, totals = torch.zeros(tokens * n), torch.zeros(n * k)
    seen: list[torch.Tensor] = []

    def call_once(self: Bench, call: Any, budget: float) -> float:
        call()
        seen.append((totals if len(seen) == 2 else out).clone())
        return 1e-3

    monkeypatch.setattr(Bench, "seconds_per_call", call_once)
    rate = Bench("cpu", CPU_SIZES)._matmul((tokens, n, k), pool, out, totals, 1.0)
    x, dy, w = pool[: tokens * k], pool[tokens * k :][: tokens * n], pool[-n * k :]
    layer = torch.nn.Linear(k, n, bias=False)
    layer.weight.data = w.view(n, k).clone()
    x = x.view(tokens, k).clone().requires_grad_()
    y = layer(x)
    y.backward(dy.view(tokens, n))
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(seen[0].view(tokens, n), y.detach())
    torch.testing.assert_close(seen[1][: tokens * k].view(tokens, k), x.grad)
    torch.testing.assert_close(seen[2].view(n, k), layer.weight.grad)
    assert rate.forward_tflops == rate.dx_tflops == rate.dw_tflops == pytest.approx(2e-9 * tokens * n * k)


def test_the_load_is_read_while_the_card_works_and_the_first_boost_does_not_count() -> None:
    class Boosting:
        """250 W and 2900 MHz in the first two readings, however long they take; then it settles."""

        def __init__(self) -> None:
            self.readings = 0

        def read(self) -> Load:
            self.readings += 1
            early = self.readings <= 2
            return Load(2900.0 if early else 2500.0, 250.0 if early else 200.0, None, 200.0)

    sensors: Any = Boosting()
    tflops, load = Bench("cpu", replace(CPU_SIZES, ceiling=64), sensors).sustained(0.0)
    assert tflops > 0 and sensors.readings == 4  # the fewest there are
    assert load == Load(2500.0, 200.0, None, 200.0)


def test_without_time_only_whole_levels_are_kept_and_the_rest_is_named() -> None:
    bench = Bench("cpu", CPU_SIZES)
    levels = bench.sizes.levels()
    rates, notes = bench.matmuls(levels, seconds=0.0)
    assert len(rates) == 1  # something, even on the slowest machine
    assert len(notes) == sum(map(len, levels)) - 1
    assert all("no time" in note for note in notes)
    assert f"matmul {rates[0].tokens} × {rates[0].n} × {rates[0].k}: no time" not in notes


def test_a_level_that_ran_out_of_time_is_dropped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from onecard.hardware import bench as module

    bench = Bench("cpu", CPU_SIZES)
    levels = bench.sizes.levels()
    made: list[Any] = []
    real = Bench._matmul

    def counted(self: Bench, shape: Any, *rest: Any) -> Any:
        made.append(shape)
        return real(self, shape, *rest)

    monkeypatch.setattr(Bench, "_matmul", counted)
    # Time ends after the second product of the second level.
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0 if len(made) < len(levels[0]) + 2 else 10.0)
    rates, notes = bench.matmuls(levels, seconds=0.5)
    assert [(rate.tokens, rate.n, rate.k) for rate in rates] == levels[0]
    assert len(notes) == len(levels[1])


def test_what_does_not_fit_is_left_out_or_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_free_bytes", lambda self: 1_500_000)
    bench = Bench("cpu", replace(CPU_SIZES, copy_bytes=2**18))
    assert bench.sizes.ceiling < CPU_SIZES.ceiling
    levels = bench.sizes.levels()
    rates, notes = bench.matmuls(levels, seconds=0.5)
    assert 0 < len(rates) < sum(map(len, levels))
    assert "matmul 256 × 512 × 128: too large for the free memory" in notes
    assert all(bench._bytes_of((rate.tokens, rate.n, rate.k)) <= 1_200_000 for rate in rates)


def test_a_full_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_free_bytes", lambda self: 3 * 2**20)
    with pytest.raises(UserError, match="too little free memory to measure: 3 MiB") as error:
        Bench("cpu", CARD_SIZES)
    assert error.value.exit_code == 1


def test_the_grid_is_what_training_multiplies() -> None:
    levels = CARD_SIZES.levels([(1536, 65536), (768, 50304)])
    assert [level[0][0] for level in levels] == [4096, 16384, 1024]
    assert levels[1][:3] == [(16384, 1536, 1536), (16384, 4608, 1536), (16384, 6144, 1536)]  # one's own first
    assert {(4096, 65536, 1536), (4096, 50304, 2048)} <= set(levels[0])
    assert (4096, 50304, 1536) not in levels[0]
    for level in levels:
        assert len(set(level)) == len(level)
    assert {k for _, _, k in CARD_SIZES.levels()[0]} == {384, 768, 1024, 1280, 2048}


def test_a_config_brings_its_width_and_vocabulary(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text("n_head = 9\nn_embd = 576\nstart = 'sampling knobs are passed over'\n")
    assert widths_of(str(config)) == [(576, 50304)]
    config.write_text("depth = 20\n")
    assert widths_of(str(config)) == [(1280, 32768)]
    config.write_text("depth = 32\ngeneration = 2025\n")
    assert widths_of(str(config)) == [(2048, 65536)]


def test_without_a_card_the_way_out_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_show, "resolve_device", lambda requested: "cpu")
    assert main(["bench"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no graphics card here to measure" in err
    assert "onecard bench --device cpu" in err
    assert not records_folder().exists()
    assert device_to_measure("CPU") == "cpu"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "0"], "it is a number from 1 to 600"),
        (["--seconds", "nan"], "takes a number"),
        (["--device", "tpu"], "is not one onecard can compute on"),
        (["no_such_config.py", "--device", "cpu"], "no_such_config.py"),
        (["--power-limits", "lots"], "not a list of power limits"),
        (["--power-limits", "200", "--device", "cpu"], "not for the CPU"),
        (["config/demo.py", "--power-limits", "200"], "takes no config"),
    ],
)
def test_wrong_use_is_told(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_the_table_puts_the_nominal_figure_beside_the_measured_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(RECORD, "/somewhere/record.json")
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["matmul", "8192³,", "sustained", "56", "TFLOPS", "58.3", "TFLOPS", "96%"] in rows
    assert ["memory,", "copy", "440", "GB/s", "504", "GB/s", "87%"] in rows
    assert ["host", "to", "card", "24", "GB/s"] in rows
    assert "under load: 2500 MHz, 195 W, 66 °C, power limit 200 W" in out
    assert "left out: matmul 1 × 2 × 3: no time" in out
    assert "/somewhere/record.json" in out
    assert max(map(len, out.splitlines())) <= 80
    # A width's layers: 3, 1, 4 and 4 widths squared, at the rates of 16,384 tokens.
    parts = ((3, RECORD.matmul_tflops(16384, 2304, 768)), (1, RECORD.matmul_tflops(16384, 768, 768)))
    up = RECORD.matmul_tflops(16384, 3072, 768)
    whole = 12 / (sum(work / rate for work, rate in parts) + 8 / up)
    assert ["layers", "768", "wide,", "16384", "tokens", f"{whole:.4g}", "TFLOPS"] in [
        row[:7] for row in rows
    ]


def test_a_card_nobody_knows_has_no_nominal_figures(capsys: pytest.CaptureFixture[str]) -> None:
    show(replace(RECORD, card="Made-up 9000", load=Load(), skipped=()), None)
    out = capsys.readouterr().out
    assert "%" not in out
    assert "under load" not in out
    assert "left out" not in out


def test_a_folder_that_cannot_be_written_costs_the_record_not_the_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(bench_show, "measure", lambda *args, **kwargs: RECORD)
    assert main(["bench", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "56 TFLOPS" in out
    assert "could not be kept" in err


def test_the_measurement_says_where_it_is() -> None:
    said: list[str] = []
    measure("cpu", seconds=1.0, say=said.append)
    assert said[0].startswith("load, ")
    assert "matmul 256 × 64 × 64" in said
    assert said[-3:] == ["memory", "RAM", "launches"]
