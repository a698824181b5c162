"""What a report says of logs as people have them: nothing that is not so."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable

import pytest

from onecard.report import reading
from onecard.report.answer import Report, report_of
from onecard.report.gathering.known import Known
from onecard.report.gathering.schedules import recognised
from onecard.report.verdict import verdict_of

HEAD = "| Step | Train loss | Val loss |\n|---|---|---|\n"


def report(text: str) -> Report:
    log = reading.read(text.encode())
    assert log is not None
    return report_of(log, Known())


def keys(found: Report) -> set[str]:
    return {each.key for each in (*found.findings, *found.alarms)}


def cosine(step: int, end: int, warm: int = 700) -> float:
    if step < warm:
        return 6e-4 * (step + 1) / warm
    return 3e-4 * (1 + math.cos(math.pi * (step - warm) / (end - warm)))


def main_log(rows: Callable[[int], float], steps: range, rates: Callable[[int], float] | None = None) -> str:
    rate = "" if rates is None else " lr:{lr:.6f}"
    return "\n".join(f"s:{n} trl:{rows(n):.4f}" + (rate.format(lr=rates(n)) if rates else "") for n in steps)


# --- the schedule ---------------------------------------------------------------------------------------


def test_a_cosine_that_has_ended_is_seen_to_have_ended() -> None:
    """llm.c's main.log does not say how many steps a run has; its rates do."""
    rows = [(step, cosine(step, 19_560)) for step in range(19_560)]
    before = time.process_time()
    found = recognised(rows, None)
    assert time.process_time() - before < 2  # it took 20 s
    assert found is not None
    assert (found.kind, found.horizon) == ("cosine", 19_559)
    cut = recognised(rows[:12_000], None)
    assert cut is None or cut.kind == "unknown" or abs((cut.horizon or 0) / 19_560 - 1) < 0.03


def test_longer_runs_are_forecast_to_be_decayed_where_the_run_has_been() -> None:
    dice = random.Random(1)
    text = main_log(lambda n: 3 + 7 / (1 + n / 50) ** 0.6 + dice.gauss(0, 0.03), range(0, 4000, 5),
                    lambda n: cosine(n, 4000))  # fmt: skip
    forecast = report(text).forecast
    assert forecast is not None
    assert forecast.points[0].case == ""
    assert {point.case for point in forecast.points[1:]} == {"decayed and restarted", "longer from the start"}


# --- forecasts ------------------------------------------------------------------------------------------


def test_no_loss_below_zero_is_forecast() -> None:
    """A handful of batches, learned by heart."""
    dice = random.Random(2)
    text = main_log(lambda n: 10.9 * math.exp(-n / 40) + abs(dice.gauss(0, 0.002)) + 0.003, range(0, 400, 5))
    found = report(text)
    assert found.forecast is not None
    assert not found.forecast.points
    assert "zero" in found.forecast.refused


def test_of_a_cut_end_of_a_long_run_nothing_is_forecast() -> None:
    dice = random.Random(3)
    text = "\n".join(f"step {n}, loss: {2.86 + dice.gauss(0, 0.04):.4f}" for n in range(610_000, 610_200, 5))
    found = report(text)
    assert found.forecast is not None
    assert not found.forecast.points
    assert "610,000 to 610,195" in found.forecast.refused
    assert not [each for each in found.findings if "469" in each.text or "nats per doubling" in each.text]


def test_more_steps_are_never_forecast_to_end_higher() -> None:
    """A log of the second half, nearly flat: a law fitted to it has longer runs end above it."""
    dice = random.Random(4)
    text = "learning rate 0.025, 60,000 steps\n" + "\n".join(
        f"step:{n}/60000 "
        f"train_loss:{2.03 + 0.02 * math.sin((n - 30_000) * math.pi / 30_000) + dice.gauss(0, 0.05):.4f} "
        f"train_time:{1600 * n}ms step_avg:1600.00ms"
        for n in range(30_000, 60_001, 20)
    )
    forecast = report(text + "\n").forecast
    assert forecast is not None
    assert len(forecast.points) > 1
    assert all(point.loss < 2.032 for point in forecast.points)


def test_the_reason_for_no_forecast_is_true() -> None:
    text = "\n".join(
        f"{{'loss': {9 / n:.4f}, 'learning_rate': {1e-4 * (6 - n) / 5:.3e}, 'epoch': {n / 5:.2f}, "
        f"'step': {50 * n}}}"
        for n in range(1, 5)
    )
    found = report(text)
    assert found.forecast is not None
    assert "no loss" not in found.forecast.refused
    assert "4 points" in found.forecast.refused


def test_a_validation_loss_is_not_held_against_a_forecast_of_training_losses() -> None:
    rows = [
        {"loss": 0.6 + 0.9 / n, "learning_rate": 5e-5 * (1 - n / 10.4), "epoch": n / 10, "step": 100 * n}
        for n in range(1, 11)
    ]
    rows.insert(5, {"eval_loss": 1.04, "epoch": 0.5, "step": 500})
    state = {"global_step": 1000, "max_steps": 1040, "log_history": rows}
    found = report(json.dumps(state, indent=2))
    assert found.end is not None
    assert found.end.high < 1
    second = verdict_of(found)[1]
    assert second.startswith("Its validation loss is 1.040 at step 500; its training loss should end between")
    finish = [step for step in found.next_steps if "let it finish" in step.text]
    assert all(step.gain is None or step.gain[1] < 0.3 for step in finish)


# --- the verdict ----------------------------------------------------------------------------------------


def test_an_old_evaluation_is_of_its_own_step() -> None:
    text = HEAD + "| 0 | ~10.4 | — |\n| 500 | ~5.6 | 5.61 |\n| 1,000 | ~5.1 | 5.15 |\n| 10,000 | ~3.9 | — |\n"
    found = report(text)
    assert verdict_of(found)[1] == "Its validation loss is 5.15 at step 1,000."
    from onecard.report.pages.tables import losses

    assert [row[0] for row in losses(found).rows] == ["0", "500", "1,000", "10,000"]


def test_nothing_has_fallen_from_a_figure_to_itself() -> None:
    dice = random.Random(5)
    text = "\n".join(
        f"step {n}: train loss {2.02 + dice.gauss(0, 0.01):.4f}, val loss {2.0312 - n / 1e9:.4f}"
        for n in range(30_000, 60_000, 3000)
    )
    assert "from 2.03 to 2.03" not in verdict_of(report(text))[0]


def test_a_continued_run_has_no_vocabulary_of_its_first_loss() -> None:
    """Its validation loss stands still at 3.7, and a vocabulary of 41 it has not."""
    text = (
        HEAD
        + "| 1 | 3.777 | 3.7283 |\n| 2500 | — | 3.7224 |\n| 5000 | 3.41 | 3.7116 |\n| 7500 | — | 3.7186 |\n"
    )
    assert not report(text).alarms


def test_a_loss_below_any_of_web_text_reads_like_nothing_known() -> None:
    text = "defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)\n" + "\n".join(
        f"step {n}: train loss {1.5 + 9.4 / (1 + n / 30):.4f}, val loss {1.52 + 9.4 / (1 + n / 30):.4f}"
        for n in range(0, 20_000, 500)
    )
    assert "reads-like" not in keys(report(text))


def test_a_run_that_is_lost_is_not_to_be_gone_on_with() -> None:
    text = "\n".join(
        f"iter {n}: loss {'nan' if n > 3000 else format(4 + math.sin(n) / 20, '.4f')}, "
        "time 1100.00ms, mfu 15.0%"
        for n in range(2500, 3200, 10)
    )
    steps = report(text).next_steps
    assert [step.command.splitlines() for step in steps] == [
        ["init_from = 'resume'", "learning_rate = 0.0003"]
    ]
    assert "before step 3,010" in steps[0].text


# --- mistakes -------------------------------------------------------------------------------------------


def test_a_rate_that_rises_is_one_mistake_and_no_gain_of_thousands() -> None:
    text = (
        "learning_rate = 1e-3\nmin_lr = 1e4\nmax_iters = 40000\ntokens per iteration will be: 8,192\n"
        "number of parameters: 29.94M\n"
    ) + "\n".join(
        f"step {n}: train loss {1.5 + 9.4 / (1 + n / 30):.4f}, val loss {1.6 + 9.4 / (1 + n / 30):.4f}\n"
        f"iter {n}: loss {1.5 + 9.4 / (1 + n / 30):.4f}, time 50.00ms, mfu 9.00%"
        for n in range(0, 40_001, 2000)
    )
    found = report(text)
    assert [mistake.key for mistake in found.mistakes if "min_lr" in mistake.change] == ["min-lr-above"]
    assert not [mistake for mistake in found.mistakes if "hardly falls" in mistake.text]
    assert all(step.gain is None or step.gain[1] < 5 for step in found.next_steps)


def test_a_rate_that_nobody_said_is_not_brought_down() -> None:
    """Evaluation lines as nanoGPT's are written by many small programs, whose rates are their own."""
    text = "\n".join(
        f"step {n}: train loss {2.6 + 8.3 / (1 + n / 20):.4f}, val loss {2.7 + 8.2 / (1 + n / 20):.4f}"
        for n in range(0, 1601, 200)
    )
    assert not [step for step in report(text).next_steps if "bring the learning rate down" in step.text]


def test_a_table_whose_rate_still_rises_is_of_a_warm_up() -> None:
    text = "| Step | Train Loss | Val Loss | LR |\n|---|---|---|---|\n" + "".join(
        f"| {n} | {9.3 - n / 250:.3f} | {9.4 - n / 250:.3f} | {n * 1.5e-7:.2e} |\n"
        for n in (0, 250, 500, 750)
    )
    assert "rate-warm-up" in keys(report(text))


# --- logs that begin with their program -----------------------------------------------------------------

PROGRAM = """
class GPT:
    def __init__(self, vocab_size: int, num_layers: int, model_dim: int):
        self.lm_head = Linear(model_dim, next_multiple(vocab_size, n=128))
        seq_len = 4096
BLOCK_SIZE = 128
train_seq_len = 48*1024 # of each card
grad_accum_steps = 8 // world_size
model = GPT(vocab_size=50257, num_layers=16, num_heads=8, model_dim=1024)
====
"""
SMI = "".join(f"|   {n}  NVIDIA H100 80GB HBM3          On  | 00000000:0{n}:00.0 Off |\n" for n in range(8))


def test_sizes_in_a_program_are_not_those_of_the_run() -> None:
    rows = "\n".join(
        f"step:{n}/1000 val_loss:{3 + 7.8 / (1 + n / 60):.4f} "
        f"train_time:{60 * (n if n < 600 else 2 * n - 600)}ms "
        f"step_avg:{60 + n / 20:.2f}ms"
        for n in range(0, 1001, 25)
    )  # fmt: skip
    found = report(PROGRAM + SMI + rows)
    facts = found.facts
    assert (facts.tokens_per_step, facts.gradient_accumulation_steps) == (None, None)
    assert facts.block_size != 128
    assert facts.cards == 8
    assert {mistake.key for mistake in found.mistakes} == set()
    assert "slower" not in keys(found)


def test_flags_of_a_command_are_no_prose() -> None:
    flags = " --use-context 1 --rank 4 --dropout 0.5 --gate 1"
    text = "Running: /opt/venv/bin/torchrun --nproc_per_node=1 -m scripts.base_train --max-seq-len 2048"
    text += flags + "\n"
    rows = "\n".join(
        f"step {n:05d}/00400 ({n / 4:.2f}%) | loss: {4 + 6 / (1 + n / 30):.6f} | lrm: 1.00 | dt: 384.00ms | "
        f"tok/sec: 683,000 | bf16_mfu: 3.00 | epoch: 1 | total time: 1.00m"
        for n in range(0, 400, 2)
    )  # fmt: skip
    log = reading.read((text + rows).encode())
    assert log is not None
    found = report_of(log, Known())
    assert found.facts.block_size == 2048


def test_one_evaluation_in_bits_does_not_hide_the_curve() -> None:
    from onecard.report.pages.plotting import curves_of

    rows = "\n".join(
        f"step {n:05d}/00400 ({n / 4:.2f}%) | loss: {4 + 6 / (1 + n / 30):.6f} | lrm: 1.00 | dt: 384.00ms | "
        f"tok/sec: 683,000 | bf16_mfu: 3.00 | epoch: 1 | total time: 1.00m"
        for n in range(0, 400, 2)
    )  # fmt: skip
    curves = curves_of(report(rows + "\nStep 00400 | Validation bpb: 1.2320\n").facts)
    assert len(curves.train) == 200
    assert curves.unit == "nats"


def test_dicts_read_quickly_are_those_read_one_by_one() -> None:
    """Of one shape many follow each other, and odd ones stand between them."""
    rows = [
        f"{{'loss': {3 + 8 / n:.4f}, 'learning_rate': {5e-5 / n:.3e}, 'epoch': {n / 50:.2f}}}"
        for n in range(1, 41)
    ]
    rows[20] = "{'loss': nan, 'learning_rate': 1e-5, 'epoch': 0.42}"
    rows[30] = "{'eval_loss': 3.9, 'eval_runtime': 9.1, 'epoch': 0.62}"
    bars = [f"{line}\n  5%|#    | {10 * n}/400 [10:00<1:00:00,  1.50s/it]" for n, line in enumerate(rows, 1)]
    text = "  0%|     | 10/400 [10:00<1:00:00,  1.50s/it]\n" + "\n".join(bars)
    whole, pieces = reading.read(text.encode()), reading.read(text.encode(), 64)
    assert whole is not None
    assert whole == pieces
    losses = dict(whole.steps.pairs("loss"))
    assert losses[10] == 11
    assert math.isinf(losses[200])
    assert whole.evaluations.pairs("val") == [(300, 3.9)]


# --- odd logs -------------------------------------------------------------------------------------------


def start(steps: range, seed: int) -> str:
    dice = random.Random(seed)
    return "".join(
        f"iter {n}: loss {3 + 7.8 / (1 + n / 60) ** 0.6 + dice.gauss(0, 0.03):.4f}, "
        "time 100.00ms, mfu 11.52%\n"
        for n in steps
    )


def test_a_start_that_repeats_steps_is_held_against_the_same_steps() -> None:
    """A crash at 1,990, gone on with from 1,500: the same losses once more are no jump."""
    again = "Resuming training from out\n"
    found = report(start(range(0, 2000, 10), 1) + again + start(range(1500, 6000, 10), 2))
    assert "resume" in keys(found)
    assert "resume-higher" not in keys(found)


def test_a_loss_that_falls_fast_falls_on_over_a_resume() -> None:
    found = report(
        start(range(0, 1500, 10), 1) + "Resuming training from out\n" + start(range(1500, 6000, 10), 2)
    )
    assert "resume-higher" not in keys(found)


def test_losses_that_no_run_has_are_no_numbers() -> None:
    rows = ["1e308", "-1e308", "3.1", "1e-308", "inf", "3.0"] * 20
    text = "".join(f"iter {n}: loss {loss}, time 100.00ms, mfu 11.5%\n" for n, loss in enumerate(rows))
    found = report(text)
    assert all(len(each.text) < 300 for each in (*found.findings, *found.alarms))
    fallen = report("step,loss\n" + "".join(f"{n},{10 ** (n // 10)}\n" for n in range(0, 3000, 10)))
    assert [alarm.key for alarm in fallen.alarms] == ["not-a-number"]
    assert len(verdict_of(fallen)[1]) < 100


def test_losses_of_bytes_are_not_held_against_losses_of_tokens() -> None:
    """Nothing but the first losses says that one run counts bytes: 5.5 nats are 256 of them."""
    from onecard.report.compare import sides_of, why_not

    logs = [
        "\n".join(
            f"step:{n}/5000 val_loss:{end + (begin - end) / (1 + n / 50):.4f} "
            f"train_time:{40 * n}ms step_avg:40.00ms"
            for n in range(0, 5001, 100)
        )
        for begin, end in ((5.55, 0.92), (6.94, 2.02))
    ]
    assert "5.55" in why_not(sides_of([report(text) for text in logs]))
    assert why_not(sides_of([report(logs[0]), report(logs[0])])) == ""


@pytest.mark.parametrize("rows", [30, 300])
def test_a_log_may_end_in_the_middle_of_any_line(rows: int) -> None:
    """Also where many lines are read at a time and the last one looks whole."""
    text = "\n".join(
        f"step {n:5d} | loss: {3 + 8 / (1 + n / 60):.6f} | lr 6.0000e-04 | dt: 712.84ms | tok/sec: 735488.80"
        for n in range(rows)
    )
    whole = reading.read(text.encode(), 512)
    assert whole is not None
    for cut in range(1, 60):
        log = reading.read(text[:-cut].encode(), 512)
        assert log is not None
        losses = log.steps.pairs("loss")
        assert losses == whole.steps.pairs("loss")[: len(losses)]


def test_a_run_that_its_clock_has_stopped_has_nothing_left() -> None:
    rows = "\n".join(
        f"step:{n}/20000 train_loss:{2 + 5 / (1 + n / 50):.4f} train_time:{48 * n}ms step_avg:48.00ms"
        for n in range(0, 12_001, 200)
    )
    found = report(rows + "\nstopping_early: wallclock_cap train_time:576000ms step:12000/20000\n")
    assert found.facts.last_step == 12_000
    assert not [step for step in found.next_steps if "let it finish" in step.text]
