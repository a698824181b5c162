"""Facts of a run, where each is from, and what is said where two sources disagree."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_logs import NOTES_HEAD, nanochat_log, nanogpt_log

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import find_card
from onecard.optim.schedule import learning_rate, trapezoid
from onecard.report import reading
from onecard.report.eta.estimate import estimate
from onecard.report.gathering.config_file import config_from
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import Known
from onecard.report.gathering.schedules import recognised
from onecard.report.log import Evaluations, Log, Planned, Start, Steps
from onecard.report.run_facts import RunFacts

ROOT = Path(__file__).resolve().parents[2]
BABY = "config/train_shakespeare_char.py"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no data is."""
    monkeypatch.chdir(tmp_path)


def facts(text: str, config: str | None = None, **known: Any) -> RunFacts:
    log = reading.read(text.encode())
    assert log is not None
    if config is not None:
        known["config"] = load_config(RunConfig, [str(ROOT / config)])
    return facts_of(log, Known(**known))


def lines(ms: float = 100.0, first: float = 10.9, mfu: float = 11.0, count: int = 30) -> str:
    return "".join(
        f"iter {n}: loss {first - 0.01 * n:.4f}, time {ms:.2f}ms, mfu {mfu if n > 4 else -100:.2f}%\n"
        for n in range(count)
    )


# --- one source, and which ----------------------------------------------------------------------


def test_a_nanogpt_head() -> None:
    found = facts(nanogpt_log(4384, range(0, 300, 10)))
    assert found.parameters == 40_953_216 and found.parameters_without_embeddings == 21_243_264
    assert (found.batch_size, found.block_size, found.gradient_accumulation_steps) == (16, 1024, 32)
    assert (found.tokens_per_step, found.vocab_size, found.tokenizer) == (524_288, 50_304, "gpt2")
    assert (found.last_step, found.eval_every, found.eval_tokens) == (6000, 500, 50 * 16 * 1024)
    assert {found.origin[name] for name in ("shape", "last_step", "batch_size")} == {"log"}
    assert found.notes == ()


def test_nanochats_head() -> None:
    found = facts(nanochat_log(9413, 40))
    assert (found.tokens_per_step, found.vocab_size, found.tokenizer) == (524_288, 32_768, "nanochat-32k")
    assert (found.flops_per_token, found.last_step, found.optimizer) == (8.87e8, 2520, "muon")
    assert found.card is not None and found.card.name == "RTX 4070" and found.origin["card"] == "log"


def test_lines_alone_leave_it_open() -> None:
    found = facts(lines())
    nothing = ("shape", "parameters", "tokens_per_step", "last_step", "card", "data", "eval_every")
    assert [getattr(found, name) for name in nothing] == [None] * len(nothing)
    assert found.tokenizer == "gpt2", "by its first loss, ln(50304)"


def test_options_count_before_the_log_and_the_log_before_the_config() -> None:
    found = facts(nanogpt_log(4384, range(100)), "config/train_gpt2.py", max_iters=7000)
    assert (found.last_step, found.origin["last_step"]) == (7000, "flag")
    assert (found.batch_size, found.origin["batch_size"]) == (16, "log")
    assert any("batch_size is 16 in the log and 12 in the config" in note for note in found.notes)
    assert any("40.56M" in note and "another run" in note for note in found.notes)


def test_a_command_line_is_named_as_the_source() -> None:
    steps = Steps(step=[0, 1, 2], ms=[900, 100, 100], loss=[10.9, 10.8, 10.7])
    log = Log(
        "nanochat", steps, Evaluations(), {"nproc_per_node": 8, "eval_tokens": 2_097_152, "eval_every": -1},
        {"last_step": 99}, (Start(steps, Evaluations()),),
        evidence={"nproc_per_node": "torchrun --nproc_per_node=8 -m scripts.base_train"},
    )  # fmt: skip
    found = facts_of(log, Known())
    assert (found.cards, found.origin["cards"]) == (8, "command")
    assert (found.eval_tokens, found.eval_every) == (2_097_152, 0)
    assert estimate(found).evaluations_left == 0
    assert facts_of(log, Known(cards=2)).cards == 2


# --- the vocabulary -----------------------------------------------------------------------------


def test_a_character_level_config_has_its_datas_vocabulary() -> None:
    """nanoGPT's baby GPT prints 10.65M parameters; with 50,304 tokens it would have 29.94M."""
    head = "found vocab_size = 65 (inside data/shakespeare_char/meta.pkl)\nnumber of parameters: 10.65M\n"
    for said in ("", "number of parameters: 10.65M\n", head):
        found = facts(said + lines(first=4.3), BABY)
        assert found.shape is not None and found.shape.vocab_size == 65, said
        assert (found.tokenizer, found.notes) == ("char", ())


def test_the_logs_count_of_parameters_counts_before_an_assumed_vocabulary(tmp_path: Path) -> None:
    text = (ROOT / BABY).read_text().replace('"shakespeare_char"', '"poems"')
    assert '"poems"' in text
    (tmp_path / "poems.py").write_text(text)
    found = facts("number of parameters: 10.65M\n" + lines(first=6.0), str(tmp_path / "poems.py"))
    assert found.shape is not None and 50 <= found.shape.vocab_size <= 80
    assert any("10.65M" in note and "50,304" in note for note in found.notes)
    by_loss = facts(lines(first=4.4), str(tmp_path / "poems.py"))
    assert by_loss.shape is not None and by_loss.shape.vocab_size == round(math.exp(4.4))
    assert any("first loss of 4.40" in note for note in by_loss.notes)
    trained = facts(lines(first=3.1), str(tmp_path / "poems.py"))
    assert trained.shape is not None and trained.shape.vocab_size == 50_304 and trained.notes == ()


def test_a_first_loss_of_other_weights_is_not_that_of_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text('init_from = "gpt2"\ndataset = "letters"\nmax_iters = 100\n')
    found = facts(lines(first=4.2), str(tmp_path / "tune.py"))
    assert found.vocab_size == 50_304 and found.notes == ()


# --- the schedule -------------------------------------------------------------------------------


def test_a_configs_schedule() -> None:
    schedule = facts(lines(), "config/train_fineweb.py").schedule
    assert schedule is not None and not schedule.assumed
    assert (schedule.kind, schedule.peak, schedule.final) == ("cosine", 5e-4, 5e-5)
    assert (schedule.warmup_steps, schedule.horizon) == (300, 6000)


def test_what_nobody_says_is_assumed_and_marked() -> None:
    schedule = facts(lines(), max_iters=4000).schedule
    assert schedule is not None and schedule.assumed and (schedule.kind, schedule.horizon) == ("cosine", 4000)
    nanochat = facts(nanochat_log(100, 20)).schedule
    assert nanochat is not None and nanochat.assumed and nanochat.kind == "wsd"


def test_a_head_without_lr_decay_iters_has_nanogpts_600000() -> None:
    """The commonest mistake: the rate never falls."""
    head = NOTES_HEAD.replace("lr_decay_iters = max_iters\n", "")
    log = reading.read((head + lines()).encode())
    assert log is not None
    log = replace(log, settings={**log.settings, "learning_rate": 1e-3})
    schedule = facts_of(log, Known()).schedule
    assert schedule is not None and not schedule.assumed
    assert (schedule.peak, schedule.final, schedule.horizon) == (1e-3, 6e-5, 600_000)


def test_rows_still_to_come_are_the_schedule() -> None:
    steps = Steps(step=[0, 10, 20], loss=[10, 9, 8], lr=[0, 1e-3, 1e-3])
    planned = Planned(step=[30, 40], lr=[5e-4, 1e-4], tokens=[30_720, 40_960])
    found = facts_of(Log("csv", steps, Evaluations(), planned=planned), Known())
    assert found.schedule is not None and found.schedule.kind == "table"
    assert found.schedule.table == ((0, 0), (10, 1e-3), (20, 1e-3), (30, 5e-4), (40, 1e-4))
    assert (found.last_step, found.tokens_per_step) == (40, 1024)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(1000, 9000), st.floats(0.3, 0.95), st.sampled_from([0.0, 0.1]))
def test_a_cosine_is_recognised_by_the_rates_in_a_log(
    warmup: int, last: int, seen: float, final: float
) -> None:
    words = [f"--warmup_iters={warmup}", f"--max_iters={last}", f"--lr_decay_iters={last}"]
    config = load_config(RunConfig, [*words, f"--min_lr={6e-4 * final}"])
    rows = [
        (step, learning_rate(step, config)) for step in range(0, warmup + int(seen * (last - warmup)), 10)
    ]
    for horizon in (last, None):
        found = recognised(rows, horizon)
        assert found is not None
        if found.kind == "cosine":
            assert found.horizon == pytest.approx(
                last, rel=0.001 if horizon else 0.15
            ) and found.peak == pytest.approx(6e-4, rel=0.01)
        else:
            assert horizon is None and found.kind == "unknown"


def test_a_trapezoid_is_recognised_once_it_falls() -> None:
    words = [
        "--depth=4",
        "--max_iters=1000",
        "--warmdown_ratio=0.4",
        "--final_lr_frac=0.0",
        "--warmup_iters=40",
    ]
    config = load_config(RunConfig, words)
    rows = [(step, trapezoid(step, config)) for step in range(0, 800, 10)]
    found = recognised(rows, 1000)
    assert found is not None and (found.kind, found.decay_shape, found.horizon) == ("wsd", "linear", 1000)
    assert found.decay_start == pytest.approx(600, abs=10) and found.final == pytest.approx(0.0, abs=0.01)
    flat = recognised(rows[:50], 1000)
    assert flat is not None and flat.kind == "unknown"


# --- length and evaluations ---------------------------------------------------------------------


def test_the_share_that_is_done_gives_the_end_away() -> None:
    """nanochat's SFT prints `step 00240 (30.00%)`, and no number of steps."""
    steps = Steps(step=range(241), ms=[500.0] * 241, loss=[1.1] * 241)
    log = Log("nanochat-sft", steps, Evaluations(), {}, {"progress": 0.3}, (Start(steps, Evaluations()),))
    found = facts_of(log, Known())
    assert found.last_step == 800
    left = estimate(found)
    assert left.steps_left == 559 and left.remaining_s is not None
    assert left.remaining_s.mid == pytest.approx(559 * 0.5)


def test_a_config_of_another_batch_does_not_make_the_evaluation_longer() -> None:
    head = "tokens per iteration will be: 512\n"
    found = facts(head + lines(), "config/train_fineweb.py")
    assert found.tokens_per_step == 512 and found.eval_tokens == 50 * 512 // 32
    assert any("512 tokens by the log and 524,288 by the config" in note for note in found.notes)


# --- cards --------------------------------------------------------------------------------------


def test_the_number_of_cards_follows_from_nanogpts_mfu() -> None:
    """491,520 tokens of GPT-2 in 250 ms are eight A100s at 68%; its own MFU is that of one."""
    card = find_card("A100 40GB SXM")
    head = "tokens per iteration will be: 491,520\nnumber of parameters: 123.59M\n"
    mfu = 100 * 491_520 / 8 * 854_438_400 / 0.25 / 312e12
    text = head + lines(ms=250, mfu=mfu)
    found = estimate(facts(text, card=card))
    assert found.facts.cards == 8 and found.mfu == pytest.approx(mfu / 100, rel=0.01) and found.mfu < 1
    assert any("one of 8 cards" in note and "--gpus N" in note for note in found.notes)
    said = estimate(facts(text, card=card, cards=8))
    assert said.mfu == pytest.approx(found.mfu) and not any("cards" in note for note in said.notes)


@pytest.mark.parametrize(("name", "tflops"), [("V100 PCIe 16GB", 112.0), ("T4", 65.0)])
def test_a_card_without_bfloat16_has_the_peak_of_float16(name: str, tflops: float) -> None:
    for head in (NOTES_HEAD, NOTES_HEAD.replace("dtype = 'bfloat16'\n", "")):
        found = estimate(facts(nanogpt_log(9000, range(60), head=head), card=find_card(name)))
        assert found.peak_flops == pytest.approx(tflops * 1e12, rel=0.05)
        assert found.mfu is not None and any("has no bfloat16" in note for note in found.notes)
    half = NOTES_HEAD.replace("bfloat16", "float16")
    found = estimate(facts(nanogpt_log(9000, range(60), head=half), card=find_card(name)))
    assert found.mfu is not None and found.notes == ()


# --- somebody else's config ---------------------------------------------------------------------


def test_a_misspelt_knob_that_is_not_needed_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text("batch_size = 8\nlearning_rte = 1e-3\nmy_own_thing = 3\nmax_iters = 500\n")
    config, notes = config_from(str(path))
    assert (config.batch_size, config.max_iters) == (8, 500)
    assert len(notes) == 2 and "theirs.py:2" in notes[0] and "learning_rte" in notes[0]
    path.write_text("batch_sise = 8\n")
    with pytest.raises(UserError, match="batch_sise"):
        config_from(str(path))


def test_a_contradiction_in_a_config_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text("learning_rate = 1e-4\nmin_lr = 1e-3\nn_embd = 384\n")
    config, notes = config_from(str(path))
    assert config.n_embd == 384 and config.min_lr == 1e-3
    assert len(notes) == 1 and "min_lr 0.001 is above learning_rate" in notes[0]
