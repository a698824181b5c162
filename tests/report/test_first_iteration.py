"""What is said before any step shows the pace: plan's figure, the floor, and which claims cannot be true."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from written_logs import NOTES_HEAD, nanogpt_log

from onecard import cli
from onecard.errors import UserError
from onecard.hardware.cards import find_card
from onecard.report import reading
from onecard.report.eta import eta_command
from onecard.report.eta.estimate import Eta, estimate
from onecard.report.gathering.claims import claims_in
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import NANOGPT, Known
from onecard.report.log import Evaluations, Log, Steps

CARD = find_card("RTX 4070")
CONFIG = str(Path(__file__).resolve().parents[2] / "config" / "train_fineweb.py")
FIRST = "step 0: train loss 10.9421, val loss 10.9398\niter 0: loss 10.9407, time 31402.77ms, mfu -100.00%\n"
TOKENS = 524_288
FLOOR_MS = 1000 * 299_983_104 * TOKENS / 58.3e12  # 2.70 s
Answer = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    monkeypatch.setattr(eta_command, "local_gpus", list)

    def command(pasted: str, *arguments: str) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pasted.encode())))
        code = cli.main(["eta", "-", *arguments])
        return (code, *capsys.readouterr())

    return command


def eta_of(text: str, **known: Any) -> Eta:
    log = reading.read(text.encode())
    assert log is not None
    return estimate(facts_of(log, Known(**{"card": CARD, **known})))


def of_prose(**said: Any) -> Log:
    """What a reader finds where no line of a step is."""
    return Log("nanogpt", Steps(), Evaluations(), said, {}, evidence=dict.fromkeys(said, "prose"))


# --- iteration 0 --------------------------------------------------------------------------------


def test_of_the_first_iteration_of_41m_on_a_4070_hours_are_predicted() -> None:
    """Real ones take 4.2 to 5.4 s an iteration, 7 to 9 h for 6000; 2.70 s is the floor."""
    found = eta_of(NOTES_HEAD + FIRST)
    assert found.steps_used == 0 and found.prediction is not None
    assert found.floor_ms == pytest.approx(FLOOR_MS, rel=0.001) and 2690 < found.floor_ms < 2710
    assert 4200 < found.step_ms.mid < 5400
    assert FLOOR_MS <= found.step_ms.low < found.step_ms.mid < found.step_ms.high < 2 * found.step_ms.mid
    assert found.remaining_s is not None and 7 * 3600 < found.remaining_s.mid < 9 * 3600
    assert found.tokens_per_s is not None and found.tokens_per_s < 194_500
    assert found.mfu_explanation.startswith("-100% is no measurement")


@pytest.mark.parametrize("language", ["en", "es", "de"])
def test_it_is_an_answer_in_every_language(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, err = run(FIRST, f"--config={CONFIG}", "--gpu=RTX 4070")
    assert (code, err) == (0, "")
    assert ("2.70 s" if language == "en" else "2,70 s") in out
    assert ("31.40 s" if language == "en" else "31,40 s") in out
    assert "nanoGPT" in out and "-100%" in out and "iter 10: loss" in out


def test_its_json_says_that_it_is_predicted(run: Callable[..., Answer]) -> None:
    found = json.loads(run(FIRST, f"--config={CONFIG}", "--gpu=RTX 4070", "--json")[1])
    assert found["predicted"] is True and found["steps_used"] == 0
    assert found["floor_ms"] == pytest.approx(FLOOR_MS, rel=0.001)
    measured = run(nanogpt_log(4384, range(0, 200, 10)), "--gpu=RTX 4070", "--json")[1]
    assert json.loads(measured)["predicted"] is False


def test_a_step_takes_no_longer_than_the_first_one() -> None:
    slow = eta_of(NOTES_HEAD + FIRST)
    quick = eta_of(NOTES_HEAD + "iter 0: loss 10.9407, time 4500.00ms, mfu -100.00%\n")
    assert quick.step_ms.high == 4500 < slow.step_ms.high
    assert quick.step_ms.low <= quick.step_ms.mid <= quick.step_ms.high
    absurd = eta_of(NOTES_HEAD + "iter 0: loss 10.9407, time 700.00ms, mfu -100.00%\n")
    assert absurd.step_ms.mid == absurd.floor_ms
    assert any("less than this card can" in note for note in absurd.notes)
    assert not any("less than this card can" in note for note in quick.notes)


def test_without_sizes_or_a_card_it_says_which_flags_would_help() -> None:
    with pytest.raises(UserError, match="only the first iteration") as error:
        eta_of(FIRST, max_iters=6000)
    assert "--config FILE" in error.value.hint and "--gpu" not in error.value.hint
    with pytest.raises(UserError) as error:
        eta_of(FIRST, card=None)
    assert "--config FILE" in error.value.hint and "--gpu" in error.value.hint


def test_of_two_cards_the_step_is_about_half_as_long() -> None:
    one, two = eta_of(NOTES_HEAD + FIRST), eta_of(NOTES_HEAD + FIRST, cards=2)
    assert two.floor_ms == pytest.approx(FLOOR_MS / 2, rel=0.001)
    assert two.step_ms.mid == pytest.approx(one.step_ms.mid / 2, rel=0.001)


def test_of_nanochat_the_figure_for_its_model_is_taken() -> None:
    """55,700 tokens/s are public of this very run on this card."""
    line = "step 00000/02520 (0.00%) | loss: 10.397 | lrm: 0.03 | dt: 52000.00ms | tok/sec: 10,082 | "
    head = "Vocab size: 32,768\nTotal batch size 524,288 => gradient accumulation steps: 32\n"
    log = reading.read((head + line + "bf16_mfu: 0.00").encode())
    assert log is not None
    log = Log(log.format, log.steps, log.evaluations, {"depth": 12, **log.settings}, log.facts, log.starts)
    found = estimate(facts_of(log, Known(card=CARD, batch_size=None)))
    assert found.prediction is not None and found.tokens_per_s == pytest.approx(55_700, rel=0.25)
    assert any("nanochat's own trainer" in note for note in found.notes)


# --- after a resume -----------------------------------------------------------------------------

RESUMED = "iter 5000: loss 4.2100, time 29000.00ms, mfu -100.00%\n"


def test_the_first_iteration_of_a_resumed_run_is_called_that() -> None:
    with pytest.raises(UserError, match=r"first iteration after a resume is in this log \(step 5,000\)"):
        eta_of(RESUMED, max_iters=6000)


def test_after_a_resume_the_pace_before_it_counts() -> None:
    before = reading.read(nanogpt_log(4000, range(4800, 5040, 10), compile_ms=0).encode())
    resumed = reading.read(RESUMED.encode())
    assert before is not None and resumed is not None
    curve = Steps(step=[5000], ms=[29_000], loss=[4.21], mfu=[-1])
    log = Log(before.format, curve, Evaluations(), before.settings, before.facts, (before.last, resumed.last))
    found = estimate(facts_of(log, Known(card=CARD)))
    assert found.step_ms.mid == pytest.approx(4000, rel=0.01)
    assert found.steps_left == 1000
    assert any("step 5,000" in note and "the start before it" in note for note in found.notes)


# --- prose alone --------------------------------------------------------------------------------


def test_prose_alone_is_enough() -> None:
    """40M parameters, 16 × 32 × 1024, 6000 iterations, a card: no line of a log."""
    log = of_prose(
        parameters=40_000_000, batch_size=16, gradient_accumulation_steps=32, block_size=1024, max_iters=6000,
        gpu="RTX 4070",
    )  # fmt: skip
    facts = facts_of(log, Known())
    assert facts.tokens_per_step == TOKENS and facts.origin["batch_size"] == "prose"
    found = estimate(facts)
    assert found.floor_ms == pytest.approx(FLOOR_MS, rel=0.03)
    assert found.remaining_s is not None and 6.5 * 3600 < found.remaining_s.mid < 9.5 * 3600
    assert any("12 layers of width 384" in note for note in found.notes)
    shown = eta_command.to_text(found, datetime(2026, 5, 1, tzinfo=UTC))
    assert "an estimate from what is said" in shown and "at least" in shown


def test_an_mfu_that_is_said_gives_the_pace() -> None:
    """A table of losses and "MFU 10-11%": 31 to 34 TFLOPS, 4.6 to 5.0 s for 157 TFLOP."""
    said = {"n_layer": 12, "n_head": 12, "n_embd": 384, "batch_size": 16, "gradient_accumulation_steps": 32,
            "block_size": 1024, "gpu": "RTX 4070"}  # fmt: skip
    losses = Evaluations(step=[0, 800, 1600], val=[10.9, 5.4, 4.8], train=[10.9, 5.3, 4.8])
    table = Log("table", Steps(), losses, said, {"mfu": (0.10, 0.11)}, evidence=dict.fromkeys(said, "prose"))
    found = estimate(facts_of(table, Known(max_iters=2000)))
    assert found.flops_per_s is not None and 31e12 < found.flops_per_s < 35e12
    assert 4550 < found.step_ms.low < found.step_ms.mid < found.step_ms.high < 5060
    assert found.steps_left == 400 and found.prediction is not None and found.prediction.program == ""
    impossible = replace(table, facts={"mfu": (0.4, 0.5)})
    assert estimate(facts_of(impossible, Known(max_iters=2000))).step_ms.low > FLOOR_MS


def test_minus_100_percent_in_prose_is_explained(run: Callable[..., Answer]) -> None:
    pasted = "iter 0: loss 10.9407, time 31402.77ms\nund warum steht da **-100%** MFU?\n"
    notes = json.loads(run(pasted, f"--config={CONFIG}", "--gpu=RTX 4070", "--json")[1])["notes"]
    assert any("-100% is no measurement" in note for note in notes)


def test_prose_that_names_no_card_asks_for_one() -> None:
    with pytest.raises(UserError, match="no time of any step") as error:
        estimate(facts_of(of_prose(parameters=40_000_000, batch_size=16), Known()))
    assert "--gpu" in error.value.hint


# --- claims -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("90–140 ms per iteration", 140),
        ("rund **90 bis 140 ms pro Iteration**", 140),
        ("90‚Äì140 ms por iteración", 140),
        ("0,5 s/iter", 500),
        ("1.2 a 2.4 millones de tokens/seg", 1000 * TOKENS / 1.2e6),
        ("1,500,000 tokens/s", 1000 * TOKENS / 1.5e6),
        ("900k tokens per second", 1000 * TOKENS / 9e5),
        ("unos 12-24 minutos en total", 240),
        ("2 Stunden insgesamt", 1200),
    ],
)
def test_claims_are_read_at_their_slow_end(text: str, ms: float) -> None:
    (claim,) = claims_in(text, TOKENS, 6000)
    assert claim.ms == pytest.approx(ms)


def test_claims_below_the_floor_are_called_impossible(run: Callable[..., Answer]) -> None:
    claims = "Sobre 90–140 ms por iteración, 12-24 minutos en total; o quizá 4.8 s/iter.\n"
    words = (f"--config={CONFIG}", "--gpu=RTX 4070", "--json")
    notes = json.loads(run(FIRST + claims, *words)[1])["notes"]
    (note,) = (note for note in notes if "impossible" in note)
    assert "90–140 ms por iteración" in note and "12-24 minutos en total" in note and "2.70 s" in note
    assert "4.8" not in note
    measured = nanogpt_log(4384, range(0, 200, 10))
    assert any("impossible" in note for note in json.loads(run(measured + claims, *words)[1])["notes"])


def test_a_logs_own_lines_are_no_claims(run: Callable[..., Answer]) -> None:
    """Where they are faster than the card can be, the card or the config is another one."""
    bars = [f" 10%|█  | {n}/5000 [12:34<1:53:06,  1.51s/it]\n" for n in (500, 501, 502)]
    pasted = "{'loss': 3.2}\n" + "".join(bars)
    notes = json.loads(run(pasted, f"--config={CONFIG}", "--gpu=RTX 4070", "--json")[1])["notes"]
    assert not any("impossible" in note for note in notes)


def test_the_format_of_these_logs_is_nanogpts() -> None:
    log = reading.read(FIRST.encode())
    assert log is not None and log.format == NANOGPT


@pytest.mark.parametrize(
    "said",
    [
        "16 x 32 x 1024 tokens per iteration",
        "512 \u00d7 1,024 tokens a step",
        "524,288 tokens per iteration",
        "524.288 tokens por iteraci\u00f3n",
        "524.288 Tokens pro Schritt",
        "tokens per step: 524288",
        "batch 16, grad accum 32, block 1024",
    ],
)
def test_tokens_of_an_iteration_are_read_as_people_write_them(said: str) -> None:
    head = f"My first iteration took 27 seconds, RTX 4070, 40M parameters, {said}, 6000 iterations.\n"
    log = reading.read(head.encode())
    assert log is not None
    assert facts_of(log, Known()).tokens_per_step == TOKENS


def test_the_shape_of_a_tensor_is_no_step() -> None:
    log = reading.read(b"first step 27 s, 40M parameters, empty_strided_cuda((16 x 1024 x 50304) bf16)\n")
    assert log is not None and facts_of(log, Known()).tokens_per_step is None
