"""Figures of `onecard eta`: those that are refused, those that are passed over, and how they are written."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

import pytest
from written_logs import nanogpt_log

from onecard import cli
from onecard.hardware.cards import find_card
from onecard.report import reading
from onecard.report.eta import eta_command
from onecard.report.eta.estimate import estimate
from onecard.report.eta.mfu import percent
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import Known

Answer = tuple[int, str, str]
LOG = nanogpt_log(4384, range(0, 200, 10))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """`onecard eta - ARGUMENTS` of what is pasted."""
    monkeypatch.setattr(eta_command, "local_gpus", list)

    def command(pasted: str, *arguments: str) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pasted.encode())))
        code = cli.main(["eta", "-", *arguments])
        return (code, *capsys.readouterr())

    return command


def strict_json(text: str) -> dict[str, Any]:
    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


# --- whole numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max-iters", "batch-size", "block-size", "gradient-accumulation-steps"])
@pytest.mark.parametrize("value", ["12.7", "6000.9", "many", "nan", "1e400", "True", ""])
def test_a_fraction_is_not_rounded_but_refused(run: Callable[..., Answer], name: str, value: str) -> None:
    code, out, err = run(LOG, f"--{name}={value}")
    assert (code, out) == (2, "")
    assert err == f"error: --{name} takes a whole number, not '{value}'\nhint: onecard eta --help\n"


@pytest.mark.parametrize("value", ["6000", "6_000", "6e3", "6000.0", "6*1000"])
def test_a_whole_number_may_be_written_as_in_a_config(run: Callable[..., Answer], value: str) -> None:
    code, out, _err = run(LOG, f"--max-iters={value}", "--json")
    assert code == 0 and strict_json(out)["max_iters"] == 6000
    code, _out, err = run(LOG, f"--max-iters={'9' * 30}")
    assert code == 2 and "too large" in err


# --- absurd ones --------------------------------------------------------------------------------


@pytest.mark.parametrize("mfu", ["1e305", "-1e305", "99999999.00", "-101.00", "nan", "inf"])
def test_an_absurd_mfu_is_passed_over(run: Callable[..., Answer], mfu: str) -> None:
    lines = "".join(f"iter {n}: loss 3.0000, time 100.00ms, mfu {mfu}%\n" for n in range(10, 50, 10))
    words = ("--gpu=RTX 4070", "--max-iters=99", "--json")
    code, out, _err = run(lines, *words)
    found = strict_json(out)
    assert code == 0 and found["log_mfu"] is found["mfu"] is found["tflops"] is None
    usual = lines.replace(mfu, "11.00")
    assert strict_json(run(usual, *words)[1])["log_mfu"] == 0.11
    last = f"iter 50: loss 3.0000, time 100.00ms, mfu {mfu}%\n"
    mixed = strict_json(run(usual + last, *words)[1])
    assert (mixed["log_mfu"], mixed["steps_seen"]) == (0.11, 5)


def test_minus_100_percent_is_not_absurd_and_neither_is_a_faster_card() -> None:
    for shown in ("-100.00", "723.55"):
        log = reading.read(f"iter 10: loss 3.0000, time 100.00ms, mfu {shown}%".encode())
        assert log is not None and log.steps.mfu[0] == pytest.approx(float(shown) / 100)


def test_what_json_has_no_number_for_is_null() -> None:
    told = {"mfu": float("inf"), "step": {"low": float("nan"), "high": 2.5}, "notes": [float("-inf"), "inf"]}
    assert eta_command._strict(told) == {
        "mfu": None,
        "step": {"low": None, "high": 2.5},
        "notes": [None, "inf"],
    }


# --- how they are written -----------------------------------------------------------------------


def test_one_line_is_not_lines(run: Callable[..., Answer]) -> None:
    line = "iter 10: loss 3.0000, time 100.00ms, mfu 11.00%\n"
    assert "nanoGPT log: 1 line, of step 10\n" in run(line)[1]
    assert "nanoGPT log: 2 lines, up to step 11\n" in run(line + line.replace("iter 10", "iter 11"))[1]


@pytest.mark.parametrize(
    ("now", "bounds"),
    [
        (datetime(2026, 12, 30, 12, tzinfo=UTC), "2026-12-31 21:20 (12-31 18:00 – 2027-01-01 00:40)"),
        (datetime(2026, 12, 30, 16, tzinfo=UTC), "2027-01-01 01:20 (2026-12-31 22:00 – 01-01 04:40)"),
        (datetime(2026, 6, 30, 12, tzinfo=UTC), "2026-07-01 21:20 (07-01 18:00 – 07-02 00:40)"),
    ],
)
def test_a_bound_in_another_year_says_which(now: datetime, bounds: str) -> None:
    lines = "".join(f"iter {n}: loss 3.0000, time 1000.00ms, mfu 11.00%\n" for n in (10, 20))
    log = reading.read(lines.encode())
    assert log is not None
    assert bounds in eta_command.to_text(estimate(facts_of(log, Known(max_iters=120_020))), now)


@pytest.mark.parametrize(("language", "told"), [("en", "11.52%"), ("es", "11,52%"), ("de", "11,52%")])
def test_percent_has_the_languages_decimal_mark(
    language: str, told: str, run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    assert percent(0.1152) == told
    lines = "".join(f"iter {n}: loss 3.0000, time 100.00ms, mfu 11.52%\n" for n in (10, 20))
    text = run(lines, "--max-iters=99", "--gpu=RTX 4070")[1]
    assert f"({told})" in text and (language == "en" or "11.52" not in text)
    explained = strict_json(run(lines, "--max-iters=99", "--gpu=RTX 4070", "--json")[1])["mfu_explanation"]
    assert "11.52% of 312" in explained and find_card("RTX 4070").name in explained
