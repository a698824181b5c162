"""When a run is done and what its card really does, on logs of runs whose speed is known."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from written_logs import D12_HEAD, NOTES_FLOPS, NOTES_HEAD, nanochat_log, nanogpt_log

from onecard import cli
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import find_card
from onecard.report import reading
from onecard.report.eta import eta_command
from onecard.report.eta.estimate import Eta, estimate
from onecard.report.eta.pace import step_range
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import Known
from onecard.run.directory import RunDirectory
from onecard.run.metrics import evaluation_line, iteration_line

CARD = find_card("RTX 4070")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_card_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eta_command, "local_gpus", list)


def eta_of(text: str, **known: Any) -> Eta:
    log = reading.read(text.encode())
    assert log is not None
    return estimate(facts_of(log, Known(**{"card": CARD, **known})))


Answer = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """`onecard eta ARGUMENTS`, with `pasted` on stdin."""

    def command(*arguments: str, pasted: bytes = b"") -> Answer:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pasted)))
        code = cli.main(["eta", *arguments])
        return (code, *capsys.readouterr())

    return command


@pytest.mark.parametrize("language", ["en", "es", "de"])
def test_the_answer_fits_a_terminal_of_80_columns(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    log = nanogpt_log(4384, range(0, 300, 10)).encode()
    wide = run("-", "--gpu", "RTX 4070", "--max-iters=6000", pasted=log)[1]
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("-", "--gpu", "RTX 4070", "--max-iters=6000", pasted=log)[1]
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert any(len(line) > 80 for line in wide.splitlines())
    assert len(shown.split()) == len(wide.split())


def test_of_a_card_that_is_sold_in_two_sizes_the_speed_is_known(run: Callable[..., Answer]) -> None:
    log = nanogpt_log(4384, range(0, 300, 10)).encode()
    code, out, _err = run("-", "--gpu", "RTX 4060 Ti", "--max-iters=6000", "--json", pasted=log)
    assert code == 0 and json.loads(out)["card"] == "RTX 4060 Ti" and json.loads(out)["peak_tflops"] == 44.1
    code, _out, err = run("-", "--gpu", "RTX 3080", "--max-iters=6000", pasted=log)
    assert code == 2 and "more than one card" in err


# --- 41M parameters on an RTX 4070 ---------------------------------------------------------------


def test_the_40m_model_on_a_4070() -> None:
    """11.5% of an A100 are 34-37 TFLOPS, 114-125k tokens/s, 4.2-5.4 s a step, and 7-9 h for 6000."""
    found = eta_of(nanogpt_log(4384, range(0, 300, 10)))
    assert found.log_mfu == pytest.approx(0.115, abs=0.002)
    assert found.flops_per_s is not None and 34e12 < found.flops_per_s < 37e12
    assert found.tokens_per_s is not None and 114_000 < found.tokens_per_s < 125_000
    assert found.mfu is not None and 0.59 < found.mfu < 0.64
    assert 4200 < found.step_ms.low < found.step_ms.mid < found.step_ms.high < 5400
    assert 7 * 3600 < found.remaining_s.mid + 290 * found.step_ms.mid / 1000 < 9 * 3600
    assert "312 TFLOPS" in found.mfu_explanation and "RTX 4070's 58.3" in found.mfu_explanation
    assert found.notes == ()


def test_the_pasted_lines_alone_say_what_the_card_does() -> None:
    """Without the head: FLOPs from the log's own MFU, and what is missing is named."""
    found = eta_of(nanogpt_log(4384, range(0, 200, 10), head=""), max_iters=6000)
    assert found.remaining_s.low < found.remaining_s.mid < found.remaining_s.high
    assert found.mfu == pytest.approx(NOTES_FLOPS / 4.384 / 58.3e12, rel=0.01)
    assert found.tokens_per_s is None
    assert any("--gradient-accumulation-steps" in note for note in found.notes)
    sized = eta_of(
        nanogpt_log(4384, range(0, 200, 10), head=""),
        max_iters=6000, batch_size=16, block_size=1024, gradient_accumulation_steps=32,
    )  # fmt: skip
    assert sized.tokens_per_s == pytest.approx(524_288 / 4.384, rel=0.01)


def test_the_shape_and_the_logs_mfu_give_the_tokens_where_the_log_does_not() -> None:
    head = "n_layer = 12\nn_head = 12\nn_embd = 384\n"
    found = eta_of(nanogpt_log(4384, range(0, 200, 10), head=head), max_iters=6000)
    assert found.tokens_per_s == pytest.approx(524_288 / 4.384, rel=0.01)


def test_a_first_iteration_alone_says_nothing() -> None:
    with pytest.raises(UserError, match="only the first iteration") as error:
        eta_of("iter 0: loss 10.88, time 27000.00ms, mfu -100.00%", max_iters=6000)
    assert error.value.exit_code == 1 and "27.0 s" in error.value.why


# --- the time of a step -------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.floats(1, 1e5), st.floats(0, 1e7), st.floats(0, 1e7), st.integers(2, 60), st.sampled_from([1, 5, 10])
)
def test_neither_evaluations_nor_compilation_move_the_step(
    ms: float, evaluation: float, compilation: float, lines: int, every: int
) -> None:
    numbers = range(0, (lines + 6) * every, every)
    log = nanogpt_log(
        ms, numbers, evaluations=10 * every, evaluation_ms=evaluation, compile_ms=compilation, jitter=0
    )
    found = eta_of(log)
    assert found.step_ms.mid == pytest.approx(ms, rel=0.01)
    assert found.step_ms.low <= found.step_ms.mid <= found.step_ms.high
    assert found.step_ms.high < 1.12 * ms + 0.01
    assert found.remaining_s.low <= found.remaining_s.mid <= found.remaining_s.high


def test_evaluations_to_come_are_in_the_remaining_time() -> None:
    numbers = range(0, 1200, 10)
    without = eta_of(nanogpt_log(4384, numbers, evaluation_ms=0))
    found = eta_of(nanogpt_log(4384, numbers, evaluation_ms=90_000))
    assert found.step_ms == without.step_ms
    assert found.evaluations_left == 10  # 1500, 2000 ... 6000
    assert found.evaluation_s.mid == pytest.approx(90, rel=0.01)
    assert found.remaining_s.mid - without.remaining_s.mid == pytest.approx(900, rel=0.01)


def test_an_evaluation_not_seen_yet_is_computed() -> None:
    """2 × 50 forward passes of a micro-batch, each a third of a thirty-second of a step."""
    found = eta_of(nanogpt_log(4384, range(0, 200, 10)))
    assert found.evaluation_s.mid == pytest.approx(2 * 50 / 32 * 4.384 / 3, rel=0.01)
    assert found.evaluation_s.low < found.evaluation_s.mid < found.evaluation_s.high


def test_one_evaluation_says_how_long_but_not_how_often() -> None:
    """At 500, and none from 420 to 690: it may come every 250 steps or every 500."""
    found = eta_of(nanogpt_log(4384, range(420, 700, 10), head="", jitter=0, compile_ms=0), max_iters=6000)
    assert found.evaluations_left == 22  # 750, 1000 ... 6000
    assert found.remaining_s.mid == pytest.approx(5310 * 4.384)
    assert found.remaining_s.high == pytest.approx(5310 * 4.384 * 1.02 + 22 * 90 * 1.2)
    assert any("--config" in note for note in found.notes)


def test_evaluations_are_known_by_the_config_where_their_lines_are_missing() -> None:
    log = nanogpt_log(4384, range(0, 1200, 10))
    only_iters = "\n".join(line for line in log.splitlines() if line.startswith("iter"))
    config = load_config(RunConfig, [str(ROOT / "config" / "train_fineweb.py")])
    found = eta_of(only_iters, config=config)
    assert found.remaining_s.mid == pytest.approx(eta_of(log).remaining_s.mid, rel=0.001)
    assert found.mfu == pytest.approx(eta_of(log).mfu, rel=0.001)


def test_an_evaluation_in_the_average_mfu_does_not_move_the_true_one() -> None:
    """nanoGPT's own figure is low for twenty lines after an evaluation."""
    log = nanogpt_log(4384, range(470, 600, 10), jitter=0, compile_ms=0, head="")
    found = eta_of(log, max_iters=6000)
    assert found.log_mfu is not None and found.log_mfu < 0.112
    assert found.flops_per_s == pytest.approx(NOTES_FLOPS / 4.384, rel=0.005)


def test_a_log_that_shows_only_evaluated_steps_has_no_answer() -> None:
    with pytest.raises(UserError, match="every line") as error:
        eta_of(nanogpt_log(4384, range(0, 5000, 500)))
    assert error.value.exit_code == 1


def test_the_error_bar_has_a_floor_that_falls_with_lines() -> None:
    for lines, floor in ((3, 0.10), (15, 0.05), (200, 0.02)):
        found = step_range([100.0] * lines)
        assert (found.mid, found.low, found.high) == (
            100,
            pytest.approx(100 - 100 * floor),
            100 + 100 * floor,
        )


def test_the_error_bar_knows_the_spread_the_latest_pace_and_hiccups() -> None:
    spread = [60.0, 140.0] * 4 + [100.0]
    error = 2 * 1.2533 * 1.4826 * 40 / 3
    assert step_range(spread).high == pytest.approx(100 + error)
    slowing = [100.0] * 40 + [130.0] * 20
    assert (step_range(slowing).mid, step_range(slowing).high) == (100, 130)
    hiccups = [100.0] * 90 + [250.0] * 10
    assert (step_range(hiccups).mid, step_range(hiccups).high) == (100, pytest.approx(115))
    asleep = [100.0] * 99 + [3.6e7]
    assert step_range(asleep).high == pytest.approx(102)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 1e7), min_size=1, max_size=50))
def test_the_bar_holds_the_median(ms: list[float]) -> None:
    found = step_range(ms)
    assert 0 <= found.low <= found.mid <= found.high


def test_a_resumed_run_counts_its_own_warm_up() -> None:
    text = nanogpt_log(9000, range(0, 300, 1)) + nanogpt_log(4000, range(250, 300, 1), head="")
    found = eta_of(text)
    assert (found.steps_used, found.steps_left) == (45, 5701)
    assert found.step_ms.mid == pytest.approx(4000, rel=0.01)


# --- how long the run is ------------------------------------------------------------------------


def test_each_program_counts_to_its_own_end() -> None:
    assert eta_of(nanogpt_log(4384, range(100))).steps_left == 5901  # iterations 100 to 6000
    assert eta_of(nanochat_log(9413, 100)).steps_left == 2420  # steps 100 to 2519
    lines = "\n".join(iteration_line(n, 5.0, 0.25, 0.3) for n in range(100))
    assert eta_of(lines, max_iters=6000).steps_left == 5900
    bars = [f" 10%|█  | {n}/5000 [12:34<1:53:06,  1.51s/it]" for n in (500, 501)]
    found = eta_of("\r".join(["{'loss': 3.2}", *bars]))
    assert (found.steps_left, found.loss) == (4499, None)  # a loss before the first bar is of no known step
    assert found.remaining_s.mid == pytest.approx(4499 * 1.51)


def test_a_horizon_in_tokens() -> None:
    assert eta_of(nanogpt_log(4384, range(100)), tokens=3_200_000_000).last_step == 6104
    with pytest.raises(UserError, match="horizon in tokens"):
        eta_of(nanogpt_log(4384, range(100), head=""), tokens=3_200_000_000)


def test_a_run_at_its_end_has_nothing_left() -> None:
    found = eta_of(nanochat_log(9413, 40, total=40))
    assert (found.steps_left, found.remaining_s.mid, found.remaining_s.high) == (0, 0, 0)
    assert eta_command.to_json(found, datetime.now().astimezone())["finish"] is None


def test_nanochats_evaluations_are_not_in_its_times() -> None:
    """What its log does not say, their size, is in the upper bound alone; said by an option, it counts."""
    found = eta_of(nanochat_log(9413, 600))
    assert (found.evaluations_left, found.evaluation_s.mid, found.evaluation_s.low) == (9, 0, 0)
    assert found.remaining_s.mid == pytest.approx(found.step_ms.mid / 1000 * found.steps_left)
    assert found.evaluation_s.high == pytest.approx(1.5 * 80 * 9.413 / 3, rel=0.01)
    assert any("upper bound alone" in note and "--eval-tokens N says it" in note for note in found.notes)
    said = eta_of(nanochat_log(9413, 600), eval_tokens=40 * 524_288)
    assert said.evaluation_s.mid == pytest.approx(40 * 9.413 / 3, rel=0.01)
    assert said.remaining_s.mid == pytest.approx(found.remaining_s.mid + 9 * said.evaluation_s.mid)
    assert not any("evaluations" in note for note in said.notes)


def test_a_small_nanochat_runs_estimate_is_not_of_its_evaluations() -> None:
    """32,768 tokens a step: the default evaluation takes as long as 427 steps, with one every 250."""
    small = {"tokens": 32_768, "head": D12_HEAD.replace("524,288", "32,768")}
    found = eta_of(nanochat_log(590, 40, evaluate=0, **small))
    steps_alone = found.step_ms.mid / 1000 * found.steps_left
    assert found.remaining_s.mid == pytest.approx(steps_alone)
    assert found.remaining_s.high > 2 * steps_alone
    assert any("every 250 steps (--eval-tokens N and --eval-every N" in note for note in found.notes)
    said = eta_of(nanochat_log(590, 40, evaluate=0, **small), eval_every=1000, eval_tokens=327_680)
    assert said.evaluations_left == 3
    assert said.remaining_s.mid == pytest.approx(steps_alone + 3 * 10 * 0.59 / 3, rel=0.01)


# --- tokens per second --------------------------------------------------------------------------


def test_old_nanochats_tok_sec_is_put_right() -> None:
    log = nanochat_log(9413, 40, field="mfu", mfu=4.99, accumulation=32)
    found = eta_of(log)
    assert found.tokens_per_s == pytest.approx(524_288 / 9.413, rel=0.01)
    assert any("too small by 32" in note for note in found.notes)
    doubtful = eta_of(nanochat_log(9413, 40, field="mfu", mfu=4.99, accumulation=32, head=""))
    assert any("2025-10-26" in note for note in doubtful.notes)
    assert not any("too small" in note for note in eta_of(nanochat_log(9413, 40)).notes)


def test_nanochats_tokens_follow_from_its_speed() -> None:
    found = eta_of(nanochat_log(9413, 40, head=""))
    assert (found.tokens_per_step, found.last_step) == (524_288, 2520)


# --- the MFU, and why the log says something else -----------------------------------------------


def test_minus_100_percent() -> None:
    found = eta_of(nanogpt_log(4384, range(5)))
    assert found.log_mfu == -1.0
    assert found.mfu_explanation.startswith("-100% is no measurement")
    assert found.mfu == pytest.approx(0.615, abs=0.02)  # by the shape


def test_zero_percent_of_nanochat() -> None:
    found = eta_of(nanochat_log(9413, 40))
    assert found.log_mfu == 0
    assert "4090 alone" in found.mfu_explanation and "infinity" in found.mfu_explanation
    assert found.mfu == pytest.approx(49.4 / 58.3, rel=0.01)


def test_nanochat_of_2025_divides_by_an_h100() -> None:
    found = eta_of(nanochat_log(9413, 40, field="mfu", mfu=4.99, head=""))
    assert "H100's 989" in found.mfu_explanation
    assert found.mfu == pytest.approx(0.0499 * 989 / 58.3, rel=0.001)


def test_nanochats_own_peak_is_named() -> None:
    head = "GPU: NVIDIA GeForce RTX 4090 | Peak FLOPS (BF16): 1.65e+14\n"
    card = find_card("RTX 4090")
    found = eta_of(nanochat_log(3000, 40, mfu=60.0, head=head), card=card)
    assert "165.0 TFLOPS" in found.mfu_explanation
    assert found.flops_per_s == pytest.approx(0.6 * 165e12)


def test_an_a100_and_cards_beyond_it() -> None:
    log = nanogpt_log(800, range(100))
    assert "right here" in eta_of(log, card=find_card("A100 80GB SXM")).mfu_explanation
    fast = eta_of(nanogpt_log(400, range(100)), card=find_card("H100 SXM"))
    assert fast.log_mfu is not None and fast.log_mfu > 1 and fast.mfu is not None and fast.mfu < 0.5
    assert "Above 100%" in fast.mfu_explanation
    assert "not possible" in eta_of(nanogpt_log(400, range(100))).mfu_explanation


def test_onecards_mfu_needs_no_correction() -> None:
    lines = "\n".join(iteration_line(n, 5.0, 0.25, 0.3) for n in range(100))
    found = eta_of(lines, max_iters=6000)
    assert found.mfu == pytest.approx(0.3)
    assert "nothing to correct" in found.mfu_explanation
    assert eta_of(lines, max_iters=6000, card=None).mfu == pytest.approx(0.3)


def test_without_a_card_it_says_how_to_name_one() -> None:
    found = eta_of(nanogpt_log(4384, range(100)), card=None)
    assert found.mfu is None and any("--gpu" in note for note in found.notes)


def test_a_shape_and_a_log_that_disagree_are_noticed() -> None:
    found = eta_of(nanogpt_log(4384, range(100), flops=NOTES_FLOPS * 1.3))
    assert any("the log's own MFU" in note for note in found.notes)
    four = eta_of(nanogpt_log(4384, range(100), flops=NOTES_FLOPS / 4))
    assert any("one of 4 cards" in note for note in four.notes)


def test_an_mfu_of_a_hundredth_of_a_percent_is_too_coarse_to_compare() -> None:
    """A small model on a CPU: 0.014% is printed as 0.01%."""
    found = eta_of(nanogpt_log(4384 * 800, range(100), jitter=0))
    assert found.log_mfu == pytest.approx(0.0001)
    assert not any("the log's own MFU" in note for note in found.notes)


def test_the_config_of_another_run_is_noticed() -> None:
    config = load_config(RunConfig, [str(ROOT / "config" / "train_gpt2.py")])
    found = eta_of(nanogpt_log(4384, range(100)), config=config)
    assert any("another run" in note for note in found.notes)
    assert found.mfu == pytest.approx(NOTES_FLOPS / 4.384 / 58.3e12, rel=0.01)


def test_float32_is_measured_against_the_cards_tf32() -> None:
    half, full = (
        eta_of(nanogpt_log(4384, range(100), head=NOTES_HEAD.replace("bfloat16", dtype)))
        for dtype in ("bfloat16", "float32")
    )
    assert CARD.tf32 is not None and full.peak_flops == CARD.tf32 * 1e12
    assert half.peak_flops == 58.3e12


# --- the door -----------------------------------------------------------------------------------

KEYS = {"format", "steps_seen", "step_ms", "tokens_per_s", "mfu", "log_mfu", "mfu_explanation", "remaining_s",
        "finish", "loss"}  # fmt: skip


def test_json_on_stdin(run: Callable[..., Answer]) -> None:
    pasted = nanogpt_log(4384, range(0, 200, 10)).encode("utf-16")
    code, out, err = run("-", "--gpu", "RTX 4070", "--json", pasted=pasted)
    answer = json.loads(out)
    assert (code, err) == (0, "") and answer.keys() >= KEYS
    assert (answer["format"], answer["steps_seen"]) == ("nanogpt", 20)
    assert set(answer["step_ms"]) == {"median", "low", "high"}
    assert set(answer["remaining_s"]) == {"mid", "low", "high"}
    finish = datetime.fromisoformat(answer["finish"])
    left = finish - datetime.now().astimezone()
    assert abs(left - timedelta(seconds=answer["remaining_s"]["mid"])) < timedelta(seconds=60)


def test_text_of_a_file(run: Callable[..., Answer], tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(nanogpt_log(4384, range(0, 600, 10)))
    code, out, err = run(str(path), "--gpu=4070")
    assert (code, err) == (0, "")
    assert "steps 0 to 590 of 6,000" in out and "2 of warm-up and evaluations left out" in out
    assert "of 58.3 TFLOPS (RTX 4070)" in out and "11 evaluations of 1m30s" in out


def test_the_log_names_its_card(run: Callable[..., Answer]) -> None:
    _code, out, _err = run("-", "--json", pasted=nanochat_log(9413, 40).encode())
    assert json.loads(out)["card"] == "RTX 4070"


def test_this_machines_card_is_the_default(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eta_command, "local_gpus", lambda: [SimpleNamespace(card=CARD)])
    _code, out, _err = run("-", "--json", pasted=nanogpt_log(4384, range(20)).encode())
    assert json.loads(out)["card"] == "RTX 4070"


def test_a_runs_folder(run: Callable[..., Answer], tmp_path: Path) -> None:
    """Its lines could be nanoGPT's; the config beside them says whose they are, and how long the run is."""
    directory = RunDirectory(tmp_path)
    directory.write_config(load_config(RunConfig, ["--max_iters=1000", "--eval_interval=100"]))
    lines = [evaluation_line(100, 5.0, 5.0), *(iteration_line(n, 5.0, 0.25, 0.3) for n in range(100, 150))]
    directory.log_path.write_text("\n".join(lines))
    for path in (tmp_path, directory.log_path):
        code, out, _err = run(str(path), "--json")
        answer = json.loads(out)
        assert (code, answer["format"], answer["steps_left"]) == (0, "onecard", 850)
        assert answer["evaluations_left"] == 9
        assert answer["tokens_per_s"] == pytest.approx(491_520 / 0.25)


def test_no_training_lines_is_no_answer(run: Callable[..., Answer]) -> None:
    code, out, err = run("-", pasted=b"nothing of a run\n")
    assert (code, out) == (1, "") and "no training lines" in err


def test_a_traceback_is_sent_to_the_doctor(run: Callable[..., Answer]) -> None:
    code, out, err = run("-", pasted=b"Traceback (most recent call last):\n")
    assert (code, out) == (1, "") and "onecard doctor LOG" in err


def test_without_a_horizon_it_tells_what_it_can(run: Callable[..., Answer]) -> None:
    """Speed and true MFU were the question; the time left is said to be unknown."""
    pasted = nanogpt_log(4384, range(20), head="").encode()
    more = ("--batch-size=16", "--block-size=1024", "--gradient-accumulation-steps=32", "--gpu=RTX 4070")
    code, out, _ = run("-", *more, pasted=pasted)
    assert code == 0 and "tokens/s" in out and "--max-iters" in out and "up to step 19" in out
    code, out, _ = run("-", *more, "--json", pasted=pasted)
    told = json.loads(out)
    assert told["tokens_per_s"] > 0 and told["mfu"] > 0
    assert told["remaining_s"] is told["finish"] is told["steps_left"] is told["max_iters"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "LOG"),
        (["missing.log"], "there is no log missing.log"),
        (["-", "--max-iters=6000", "--gpu=RTX 4071"], "4071"),
        (["-", "--max-iters=6000", "--tokens=3.2B"], "keep one of them"),
        (["-", "--tokens=many"], "tokens takes a number of tokens"),
        (["-", "--max-iters=6000", "--batch-size=0"], "the least is 1"),
        (["-", "--max-iters=6000", "--batch-size=16"], "--block-size, --gradient-accumulation-steps"),
        (["-", "--config=missing.py"], "no config file missing.py"),
        (["-", "--max-iter=6000"], "--max-iters"),
    ],
)
def test_wrong_use(
    run: Callable[..., Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments, pasted=nanogpt_log(4384, range(20), head="").encode())
    assert (code, out) == (2, "") and err.startswith("error: ")
    assert told in err


def test_a_config_file_tells_what_the_log_does_not(run: Callable[..., Answer]) -> None:
    pasted = nanogpt_log(4384, range(0, 200, 10), head="").encode()
    config = str(ROOT / "config" / "train_fineweb.py")
    code, out, _err = run("-", "--config", config, "--gpu=4070", "--json", pasted=pasted)
    answer = json.loads(out)
    assert (code, answer["max_iters"], answer["tokens_per_step"]) == (0, 6000, 524_288)
    assert answer["notes"] == []


def test_a_loss_that_is_no_number_is_null(run: Callable[..., Answer]) -> None:
    pasted = nanogpt_log(4384, range(20)) + "iter 20: loss nan, time 4384.00ms, mfu 11.50%\n"
    code, out, _err = run("-", "--json", pasted=pasted.encode())
    answer = json.loads(out)
    assert (code, answer["loss"]) == (0, None)
    assert any("diverged" in note for note in answer["notes"])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**12 - 1), st.floats(0.001, 1e11), st.floats(-100, 1e6)), max_size=12
    ),
    st.integers(0, 10**18),
)
def test_every_log_that_can_be_read_gets_an_answer_or_a_reason(
    lines: list[tuple[int, float, float]], horizon: int
) -> None:
    text = "\n".join(f"iter {n}: loss 1.0, time {ms:.3f}ms, mfu {mfu:.2f}%" for n, ms, mfu in lines)
    log = reading.read(text.encode())
    assume(log is not None)
    assert log is not None
    try:
        found = estimate(facts_of(log, Known(max_iters=horizon, card=CARD)))
    except UserError:
        return
    now = datetime.now().astimezone()
    assert eta_command.to_text(found, now)
    assert "NaN" not in json.dumps(eta_command.to_json(found, now))


# --- the first lines of a log
FIRST_LINES = (
    "step 0: train loss 10.9000, val loss 10.9000\n"
    "iter 0: loss 10.9000, time 154425.28ms, mfu -100.00%\n"
    "iter 10: loss 10.2727, time 4322.77ms, mfu 11.66%\n"
    "iter 20: loss 9.7500, time 4354.20ms, mfu 11.65%\n"
)


def test_the_first_evaluation_is_not_taken_to_come_every_few_steps() -> None:
    found = eta_of(FIRST_LINES, max_iters=600_000)
    assert found.remaining_s is not None
    steps_alone = found.step_ms.high * found.steps_left / 1000
    assert found.evaluations_left == 300
    assert steps_alone < found.remaining_s.high <= steps_alone + 300 * 151
    assert any("2,000 steps is assumed" in note and "200" in note for note in found.notes)
    # 200 batches of each split are a sixth of 40 steps' micro-batches: 3.3 steps, and half more for the bound
    known = eta_of(
        FIRST_LINES, max_iters=600_000, gradient_accumulation_steps=40, batch_size=12, block_size=1024
    )
    assert known.evaluation_s.high == pytest.approx(1.5 * 10 / 3 * known.step_ms.mid / 1000)


def test_an_evaluation_where_the_default_has_none_is_no_default() -> None:
    lines = "step 500: train loss 3.0, val loss 3.0\n" + "".join(
        f"iter {n}: loss 3.0, time {9000 if n == 500 else 1000}.00ms, mfu 11.00%\n"
        for n in range(400, 700, 10)
    )
    found = eta_of(lines, max_iters=10_000)
    assert not any("assumed" in note for note in found.notes)
    assert any("upper bound alone" in note for note in found.notes)


def test_a_cpus_log_is_not_asked_for_a_card(tmp_path: Path, run: Callable[..., Answer]) -> None:
    lines = "".join(f"iter {n}: loss 3.0, time 100.00ms, 5,131 tok/s, lr 1e-3, eta 3s\n" for n in range(30))
    head = "tokens per iteration will be: 512; 10,142 training tokens in data/x; {}, float32\n"
    _, out, _ = run("-", "--max-iters=99", pasted=(head.format("cpu") + lines).encode())
    assert "on a CPU" in out and "--gpu" not in out
    _, out, _ = run("-", "--max-iters=99", pasted=(head.format("cuda") + lines).encode())
    assert "--gpu" in out
    pasted = "Overriding: device = cpu\n" + FIRST_LINES
    _, out, _ = run("-", "--max-iters=99", pasted=pasted.encode())
    assert "--gpu" not in out
    out_dir = RunDirectory(tmp_path / "out")
    with out_dir.claimed(fresh=False):
        out_dir.write_config(load_config(RunConfig, ["--max_iters=99"]))
        out_dir.log_path.write_text(lines)
        out_dir.events_path.write_text(
            json.dumps({"event": "started", "step": 0, "device": "cpu"}) + "\n{cut"
        )
        _, out, _ = run(str(out_dir.path))
        assert "on a CPU" in out and "paused" not in out
        (out_dir.path / "paused").touch()
        _, out, _ = run(str(out_dir.path))
        assert "the run is paused" in " ".join(out.split()) and "--resume-now" in out
    _, out, _ = run(str(out_dir.path))
    assert "paused" not in out, "its job is gone"


# --- what is told of odd logs, and of options that do not fit them


def test_a_moving_average_after_an_evaluation_is_explained() -> None:
    told = "nanoGPT shows a moving average"
    lately = eta_of(nanogpt_log(4384, range(0, 520, 10), jitter=0))
    assert lately.mfu is not None and f"less than the {100 * lately.mfu:.0f}% above" in lately.mfu_explanation
    assert told in lately.mfu_explanation
    long_ago = eta_of(nanogpt_log(4384, range(0, 990, 10), jitter=0))
    assert told not in long_ago.mfu_explanation
    without = eta_of(nanogpt_log(4384, range(0, 520, 10), jitter=0, evaluations=0))
    assert told not in without.mfu_explanation


def test_tok_sec_of_one_micro_batch_is_known_by_the_model_it_would_be() -> None:
    """It has 0.9 GFLOPs a token; by a 64th of its tokens it would have 57."""
    of_a_step = {"field": "mfu", "mfu": 4.99, "head": ""}
    whole = eta_of(nanochat_log(9413, 40, **of_a_step))
    assert whole.tokens_per_step == 524_288 and not any("B parameters" in note for note in whole.notes)
    in_part = eta_of(nanochat_log(9413, 40, accumulation=64, **of_a_step))
    assert in_part.tokens_per_step is in_part.tokens_per_s is None
    assert any("of one micro-batch" in note and "9B parameters" in note for note in in_part.notes)
    assert not any("taken as printed" in note for note in in_part.notes)
    assert in_part.mfu == whole.mfu
    with_head = eta_of(nanochat_log(9413, 40, accumulation=64, field="mfu", mfu=4.99))
    assert with_head.tokens_per_step == 524_288, "the head tells"


@pytest.mark.parametrize("end", ["--max-iters=100", "--tokens=1M"])
def test_an_end_that_the_log_is_past_is_refused(run: Callable[..., Answer], end: str) -> None:
    log = nanogpt_log(4384, range(0, 300, 10)).encode()
    code, out, err = run("-", end, pasted=log)
    assert (code, out) == (1, "") and "the log is past that end" in err and "step 290" in err
    assert run("-", "--max-iters=290", pasted=log)[0] == 0, "its last line may be of the last step"


def test_lines_of_the_trainer_without_times_have_no_answer(run: Callable[..., Answer]) -> None:
    pasted = b"{'loss': 3.2, 'learning_rate': 0.001, 'epoch': 0.1}\n"
    code, out, err = run("-", pasted=pasted)
    assert (code, out) == (1, "") and "Hugging Face Trainer, but no times" in err and "s/it]" in err
    bars = " 10%|█  | 500/5000 [12:34<1:53:06,  1.51s/it]\n 10%|█  | 501/5000 [12:35<1:53:04,  1.51s/it]\n"
    assert run("-", pasted=pasted + bars.encode())[0] == 0


@pytest.mark.parametrize("count", ["0", "-5"])
def test_a_run_has_a_step_at_least(run: Callable[..., Answer], count: str) -> None:
    code, out, err = run("-", f"--max-iters={count}", pasted=nanogpt_log(4384, range(20)).encode())
    assert (code, out) == (2, "") and f"--max-iters cannot be {count}" in err and "the least is 1" in err
