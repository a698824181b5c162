"""Next steps: each accepted by plan, the best gain an hour first, in the reader's own trainer before here."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from onecard import cli
from onecard.arch.shapes import GPT2Shape
from onecard.hardware.cards import find_card
from onecard.plan.options import Options
from onecard.report import reading
from onecard.report.findings import Forecast, ForecastPoint, Mistake, NextStep, Place
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import Known
from onecard.report.log import Evaluations, Log, Steps
from onecard.report.next.next_steps import next_steps_of
from onecard.report.next.offers import config_of, hours_of, same_hours_here
from onecard.report.place.placing import place_of
from onecard.report.run_facts import RunFacts, Schedule

SMALL = GPT2Shape(12, 12, 384, 50304, 1024, False)
ENDED = Schedule("cosine", 6e-4, 6e-5, 100, 5000)


def run(card: str | None = "RTX 4070", *, format: str = "nanogpt", **facts: Any) -> RunFacts:
    """A nanoGPT run of 41M parameters, ended after 2.6B tokens of FineWeb, unless said otherwise."""
    evaluations = Evaluations(step=[0, 2500, 5000], val=[10.9, 4.3, 4.1])
    shape = facts.get("shape") or SMALL
    usual: dict[str, Any] = {
        "shape": SMALL, "parameters": shape.parameters, "tokens_per_step": 2**19, "batch_size": 16,
        "block_size": 1024, "gradient_accumulation_steps": 32, "vocab_size": 50304, "tokenizer": "gpt2",
        "data": "FineWeb", "last_step": 5000, "schedule": ENDED, "card": find_card(card) if card else None,
    }  # fmt: skip
    steps = facts.pop("steps", Steps())
    log = Log(format, steps, evaluations, settings={"out_dir": "out-small"})
    return RunFacts(log, **(usual | facts))


def steps_of(facts: RunFacts, forecast: Forecast | None = None, **others: Any) -> list[NextStep]:
    return next_steps_of(facts, forecast or Forecast(), place_of(facts), **others)


def find(steps: list[NextStep], word: str) -> NextStep:
    (found,) = [step for step in steps if word in step.command or word in step.text]
    return found


# --- plan accepts them ---------------------------------------------------------------------------------


def plan(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = cli.main(["plan", *arguments, "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


CASES = [
    ("RTX 4070", 384),
    *(
        pytest.param(card, width, marks=pytest.mark.long)
        for card in ("RTX 4060 8GB", "RTX 3060 12GB", "RTX 4090", "RTX 5060 Ti 16GB", "A100 80GB SXM")
        for width in (384, 768)
    ),
]


@pytest.mark.parametrize(("card", "width"), CASES)
def test_plan_accepts_every_step(
    card: str, width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Config lines as nanoGPT would run them, commands as train would."""
    monkeypatch.chdir(tmp_path)
    shape = GPT2Shape(12, 12, width, 50304, 1024, False)
    facts = run(card, shape=shape)
    own = f"n_layer = 12\nn_head = 12\nn_embd = {width}\nbatch_size = 16\ngradient_accumulation_steps = 32\n"
    checked = 0
    for step in steps_of(facts):
        if step.trainer == "theirs" and " = " in step.command:
            Path("next.py").write_text(own + step.command + "\n", encoding="utf-8")
            words = ["next.py", "--gpu", card]
            if "n_embd" in step.command or "batch_size" in step.command:
                words += ["--as", "nanogpt"]
            code, said = plan(words, capsys)
            assert (code, said["fits"]) == (0, True), (step.command, said)
            checked += 1
        elif step.command.startswith("onecard train "):
            words = shlex.split(step.command)[2:]
            code, said = plan([*words, "--gpu", card, "--host-ram", "32"], capsys)
            assert (code, said["fits"]) == (0, True), (step.command, said)
            checked += 1
    assert checked >= 3


def test_the_price_of_a_step_is_plans(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    step = find(steps_of(run(), options=Options(price="0.50")), "n_embd = 768")
    Path("next.py").write_text(step.command, encoding="utf-8")
    _code, said = plan(["next.py", "--gpu", "RTX 4070", "--as", "nanogpt"], capsys)
    assert step.hours == pytest.approx(said["time"]["seconds"] / 3600, rel=0.01)
    assert step.kwh and step.cost == pytest.approx(0.5 * step.kwh)
    assert step.gain is not None and 0.2 < step.gain[0] < step.gain[1] < 0.5


def test_what_nanogpt_has_no_room_for_is_not_suggested_to_it() -> None:
    facts = run("RTX 4060 8GB", shape=GPT2Shape(12, 12, 768, 50304, 1024, False))
    assert not [step for step in steps_of(facts) if step.trainer == "theirs" and "n_embd" in step.command]
    assert [step for step in steps_of(facts) if step.command.startswith("onecard train")]


# --- which, and in which order -------------------------------------------------------------------------


def test_steps_in_their_trainer_come_first_by_gain_an_hour() -> None:
    steps = steps_of(run())
    kinds = [step.trainer for step in steps if step.gain is not None]
    assert kinds == sorted(kinds, key=lambda kind: kind != "theirs") and set(kinds) == {"theirs", "onecard"}
    for trainer in ("theirs", "onecard"):
        rates = [
            sum(step.gain) / step.hours
            for step in steps
            if step.gain is not None and step.hours and step.trainer == trainer
        ]
        assert rates == sorted(rates, reverse=True)
    assert all(step.source for step in steps if step.gain is not None)


def test_a_longer_run_has_its_decay_at_its_end_and_the_forecasts_gain() -> None:
    point = ForecastPoint(15_000, 15_000 * 2**19, 3.9, 3.85, 3.95, "decayed and restarted")
    end = ForecastPoint(5000, 5000 * 2**19, 4.1, 4.09, 4.11)
    step = find(steps_of(run(), Forecast((end, point))), "lr_decay_iters = 15000")
    assert "max_iters = 15000" in step.command and "'resume'" in step.command
    assert step.gain == pytest.approx((0.15, 0.25)) and "forecast" in step.source
    by_law = find(steps_of(run()), "lr_decay_iters = 15000")
    assert by_law.gain is not None and 0.05 < by_law.gain[0] < by_law.gain[1] < 0.3 and "law" in by_law.source


def test_hours_are_the_logs_own_where_it_has_times() -> None:
    steps = Steps(step=list(range(40)), ms=[9000.0] * 5 + [2000.0] * 35)
    longer = find(steps_of(run(steps=steps)), "lr_decay_iters = 15000")
    assert longer.hours == pytest.approx(10_000 * 2 / 3600)
    assert hours_of(run(steps=steps), Options()) == pytest.approx(5000 * 2 / 3600)


def test_hours_of_another_model_follow_the_runs_own_pace() -> None:
    """Where steps take longer than plan says, those of the next model are expected to as well."""
    by_plan = find(steps_of(run()), "n_embd = 768").hours
    own = hours_of(run(), Options())
    assert by_plan is not None and own is not None
    slow = Steps(step=list(range(40)), ms=[1.5 * own * 3.6e6 / 5000] * 40)
    slower = find(steps_of(run(steps=slow)), "n_embd = 768").hours
    assert slower == pytest.approx(1.5 * by_plan, rel=0.02)


def test_several_cards_are_not_taken_for_one() -> None:
    steps = Steps(step=list(range(40)), ms=[2000.0] * 40)
    one, four = (find(steps_of(run(steps=steps, cards=n)), "'resume'") for n in (1, 4))
    assert one.hours == four.hours and one.kwh and four.kwh and four.kwh > 3 * one.kwh * 0.9
    assert not [
        step for step in steps_of(run(cards=4)) if step.trainer == "theirs" and "batch_size" in step.command
    ]


@pytest.mark.parametrize("columns", [{"ms": [0.0] * 9}, {"ms": [1e300] * 9}, {"tokens_per_s": [1e-300] * 9}])
def test_a_time_that_is_none_is_not_believed(columns: dict[str, list[float]]) -> None:
    steps = Steps(step=list(range(9)), **columns)
    assert hours_of(run(steps=steps), Options()) == hours_of(run(), Options())


def test_a_run_that_is_not_done_is_let_finish() -> None:
    facts = run(last_step=8000, schedule=Schedule("cosine", 6e-4, 6e-5, 100, 8000))
    steps = steps_of(facts, Forecast((ForecastPoint(8000, None, 3.95, 3.92, 3.99),)))
    step = find(steps, "let it finish")
    assert "3,000" in step.text and step.gain == pytest.approx((0.11, 0.18)) and step.hours


def test_a_rate_that_never_came_down_is_brought_down() -> None:
    facts = run(schedule=Schedule("cosine", 6e-4, 6e-5, 2000, 600_000, assumed=True), last_step=600_000)
    steps = steps_of(facts)
    step = find(steps, "bring the learning rate down")
    assert "lr_decay_iters = 6000" in step.command and step.gain is not None and step.gain[0] > 0.02
    assert not [other for other in steps_of(run()) if "bring the learning rate" in other.text]
    assert "--extend" not in find(steps, "--init_from=resume").command


def test_what_was_meant_is_said() -> None:
    mistake = Mistake("another-size", "", "", "n_embd = 768   # was 384")
    assert "that were meant" in find(steps_of(run(), mistakes=[mistake]), "n_embd = 768").text


def test_without_a_card_the_flag_is_named_and_no_size_promised() -> None:
    steps = steps_of(run(None))
    assert [step for step in steps if "--gpu" in step.text]
    assert all(step.hours is None and step.kwh is None and step.cost is None for step in steps)
    assert not [step for step in steps if "batch_size" in step.command and step.trainer == "theirs"]


def test_little_text_is_not_read_more_than_four_times() -> None:
    facts = run(train_tokens=10**9)  # 2.6 passes already
    longer = find(steps_of(facts), "'resume'")
    assert "max_iters = 7600" in longer.command
    done = run(train_tokens=6 * 10**8)
    assert not [step for step in steps_of(done) if "resume" in step.command]


def test_an_uncompiled_run_is_compiled() -> None:
    assert "compile = True" in [step.command for step in steps_of(run(compiled=False))]
    assert "compile = True" not in [step.command for step in steps_of(run(compiled=True))]


@pytest.mark.parametrize(
    ("format", "command"),
    [
        (
            "nanogpt",
            "python sample.py --out_dir=out-small --device=cuda --num_samples=10 --max_new_tokens=512",
        ),
        ("onecard", "onecard sample out-small"),
        ("huggingface", "onecard sample out-small"),
        ("table", "python sample.py --out_dir=out-small --device=cuda --num_samples=10 --max_new_tokens=512"),
    ],
)
def test_samples_are_asked_for_in_the_trainers_own_words(format: str, command: str) -> None:
    assert steps_of(run(format=format))[-1].command == command


def test_a_run_of_onecards_goes_on_with_its_own_words() -> None:
    steps = steps_of(run(format="onecard", folder="runs/a b"))
    step = find(steps, "--init_from=resume")
    assert shlex.split(step.command)[2] == "--out_dir=runs/a b" and "--n_embd" not in step.command
    assert not [step for step in steps if step.trainer == "theirs" and step.command]


def test_a_run_goes_on_from_the_rate_it_has() -> None:
    ended, high = run(), run(schedule=Schedule("constant", 6e-4))
    assert "--extend=rewarm --extend_lr=0.0003" in find(steps_of(ended), "--init_from=resume").command
    assert "--extend=decay" in find(steps_of(high), "--init_from=resume").command


def test_better_text_is_said_without_a_gain_in_nats() -> None:
    step = find(steps_of(run()), "--edu")
    assert step.gain is None and "CORE" in step.text and "0.260" in step.text
    assert "climbmix" in find(steps_of(run(data="FineWeb-Edu")), "CORE").command


def test_a_run_of_which_little_is_known_gets_what_needs_nothing() -> None:
    facts = RunFacts(Log("table", Steps(), Evaluations(step=[0, 100], val=[10.9, 7.0])))
    steps = next_steps_of(facts, Forecast(refused="too short"), Place("", cannot="unknown"))
    assert steps and all(step.command == "" or step.command.startswith("onecard") for step in steps)


# --- the same hours of a better model ------------------------------------------------------------------


def test_the_same_hours_here_are_those_of_the_run() -> None:
    steps = Steps(step=list(range(40)), ms=[5000.0] * 40)
    facts = run(steps=steps)
    found = same_hours_here(facts)
    assert found is not None
    assert found.price.hours == pytest.approx(5000 * 5 / 3600)
    assert found.point.low < found.point.loss < found.point.high
    assert found.point.tokens and found.point.tokens == found.point.step * 2**19
    half = same_hours_here(run(steps=Steps(step=list(range(40)), ms=[2500.0] * 40)))
    assert half is not None and half.point.loss > found.point.loss


@pytest.mark.parametrize(
    "facts", [{"card": None}, {"tokenizer": "char"}, {"tokens_per_step": None, "config": None}]
)
def test_the_same_hours_are_refused_where_nothing_compares(facts: dict[str, Any]) -> None:
    assert same_hours_here(run(**facts)) is None


def test_the_config_of_a_run_has_its_own_step() -> None:
    config = config_of(run(dropout=0.1))
    assert config is not None and config.tokens_per_step == 2**19 and config.dropout == 0.1
    assert config_of(RunFacts(Log("table", Steps(), Evaluations()))) is None


@pytest.fixture(autouse=True)
def no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


def test_hours_are_those_of_the_mfu_that_is_said() -> None:
    """ "MFU 11-12%" is 7.3 hours of 6,000 steps: what comes next is offered for these, not for plan's 7.7."""
    text = (
        "My RTX 4070, n_layer=12 n_head=12 n_embd=384, 524,288 tokens per iteration, max_iters=6000, {mfu}\n"
        "| step | train | val |\n|---|---|---|\n| 0 | 10.88 | 10.88 |\n| 3000 | 4.30 | 4.32 |\n"
        "| 6000 | 4.14 | 4.17 |\n"
    )
    hours = []
    for mfu in ("MFU 11-12%", "", "MFU 9%"):
        log = reading.read(text.format(mfu=mfu).encode())
        assert log is not None
        found = hours_of(facts_of(log, Known()), Options())
        assert found is not None
        hours.append(found)
    assert hours[0] == pytest.approx(7.3, abs=0.1) and hours[1] == pytest.approx(7.7, abs=0.2)
    assert hours[2] == pytest.approx(11.5 / 9 * hours[0], rel=0.02)
