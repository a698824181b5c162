"""A verdict in two sentences, the figures behind it, and what programs get."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import made_reports as made
import pytest

from onecard.hardware.cards import find_card
from onecard.report.answer import Report, last_loss, sample_of
from onecard.report.course import Amount, Money, Pace, course_of, pace_by_lines
from onecard.report.findings import Finding
from onecard.report.log import Evaluations, Log, Steps
from onecard.report.pages.plotting import rates_of
from onecard.report.pages.programs import to_json
from onecard.report.pages.tables import losses
from onecard.report.run_facts import RunFacts, Schedule
from onecard.report.verdict import verdict_of


@pytest.mark.parametrize(
    ("report", "health", "begins"),
    [
        (made.report(), "healthy", "Healthy: the validation loss has fallen from"),
        (made.wrong(), "healthy-but", "Healthy, but: A model of 117M was meant"),
        (made.diverging(), "not-healthy", "Not healthy: the run has been diverging since step 5,200."),
        (made.without_numbers(), "unknown", "Whether this run is healthy cannot be known"),
    ],
)
def test_the_first_sentence_is_whether_it_is_healthy(report: Report, health: str, begins: str) -> None:
    assert report.health == health
    assert verdict_of(report)[0].startswith(begins)


def test_a_run_on_its_way_is_said_to_end_somewhere() -> None:
    said = verdict_of(made.report())[1]
    assert "should end between 3.25 and 3.31" in said
    assert "1.57B tokens" in said


def test_a_run_that_has_ended_is_compared_with_usual_ones() -> None:
    assert "where usual runs of its size end at 2.90 to 3.00" in verdict_of(made.wrong())[1]


def test_a_run_that_ended_above_what_is_usual_is_behind() -> None:
    behind = replace(made.wrong(), mistakes=())
    assert behind.health == "healthy-but"
    assert verdict_of(behind)[0] == "Healthy, but behind what usual runs of its size reach."


def test_a_run_that_has_just_begun_is_behind_nobody() -> None:
    behind = replace(made.wrong(), mistakes=(), forecast=None)
    for last_step, expected in ((100_000, False), (10_000, True), (6000, True)):
        report = replace(behind, facts=replace(behind.facts, last_step=last_step))
        assert report.behind is expected
        assert ("usual runs" in verdict_of(report)[1]) is expected


def test_a_few_steps_are_no_verdict() -> None:
    few = made.report(last=60, end=10_000, lines=31)
    assert few.health == "unknown"
    assert verdict_of(few)[0].startswith("Nothing is wrong in the 60 steps")


def test_two_sentences_whoever_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for language in ("en", "es", "de"):
        monkeypatch.setenv("ONECARD_LANG", language)
        for make in made.EVERY.values():
            first, second = verdict_of(make())
            assert first.endswith((".", "2J"))
            assert second.endswith(".")


def test_single_steps_are_averaged_where_there_is_no_evaluation() -> None:
    log = Log("nanogpt", made.log_of(2001, 6000, noise=0.1).steps, Evaluations())
    loss = last_loss(RunFacts(log))
    assert loss is not None
    assert loss.split == "train"
    assert loss.value == pytest.approx(made.falling(5950), abs=0.05)


def test_time_energy_and_money_are_of_what_was_and_what_is_to_come() -> None:
    facts = replace(made.report().facts, last_step=10_000)
    course = course_of(facts, Pace(step_s=4.0, left_s=16_000.0), Money(0.2, 0.4, "CHF", 100.0))
    assert course.seconds == Amount(24_000.0, 16_000.0)
    watts = 200 * 0.93 + 100  # the card's power limit, near which it trains, and the PC
    assert find_card("RTX 4070").tdp_w == 200
    assert course.pc_kwh.so_far == pytest.approx(watts * 24_000 / 3.6e6)
    assert course.cost.whole == pytest.approx(0.2 * watts * 40_000 / 3.6e6)
    assert course.cost_high.whole == pytest.approx(0.4 * watts * 40_000 / 3.6e6)


def test_the_pace_is_that_of_the_latest_lines() -> None:
    pace = pace_by_lines(made.report().facts)
    assert pace.step_s == pytest.approx(4.36, rel=0.01)
    assert pace.tokens_per_s == pytest.approx(262_144 / 4.36, rel=0.01)


def test_rates_of_the_log_come_before_those_of_a_schedule() -> None:
    facts = made.report().facts
    assert rates_of(facts)[-1][1] == pytest.approx(6e-4)
    bare = replace(facts, log=Log("csv", Steps(step=[1, 2], loss=[3.0, 2.0]), Evaluations()))
    assert rates_of(bare)[-1] == pytest.approx((10_000, 6e-5))
    assumed = replace(bare, schedule=replace(bare.schedule or Schedule("cosine"), assumed=True))
    assert rates_of(assumed) == []


def test_losses_stand_in_a_table_at_round_steps() -> None:
    section = losses(made.report())
    assert section.headings == ("step", "tokens", "training", "validation")
    assert section.rows[0][0] == "0"
    assert section.rows[-1][0] == "6,000"
    assert section.rows[-1][1] == "1.57B"
    assert float(section.rows[-1][3]) == pytest.approx(made.falling(6000) + 0.02, abs=0.01)


def test_programs_get_the_keys_that_were_promised() -> None:
    found = to_json(made.report())
    again = json.loads(json.dumps(found, allow_nan=False))
    assert isinstance(again["verdict"], str)
    for key in (
        "place",
        "forecast",
        "mistakes",
        "next_steps",
        "speed",
        "time",
        "energy",
        "cost",
        "findings",
        "facts",
    ):
        assert key in again
    assert set(again["forecast"][0]) == {"step", "tokens", "loss", "low", "high", "case"}
    assert again["forecast"][0]["step"] == 10_000
    assert again["speed"]["tokens_per_s"] == 60_100.0
    assert again["speed"]["mfu"] == 0.41
    assert again["time"]["seconds"] == 43_600
    assert again["facts"]["parameters"] == {"value": 54_000_000, "from": "log"}


def test_programs_get_no_number_that_json_has_not() -> None:
    bad = replace(
        made.report(),
        findings=(Finding("x", "x", None, 1, math.nan),),
        course=replace(made.report().course, pace=Pace(math.inf, math.nan)),
    )
    json.dumps(to_json(bad), allow_nan=False)


def test_the_newest_sample_of_the_runs_folder_is_shown(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "samples").mkdir()
    for step, text in ((500, "aa"), (12_000, "the newest"), (3000, "bb")):
        (folder / "samples" / f"step-{step:08d}.txt").write_text(text + "\n")
    found = sample_of(replace(made.report().facts, folder=str(folder)))
    assert found is not None
    assert (found.text, found.step) == ("the newest", 12_000)


def test_a_loss_in_bits_is_not_said_to_end_in_nats() -> None:
    made_report = made.report()
    evaluations = Evaluations(step=[0, 3000, 6000], bpb=[3.2, 1.2, 1.1])
    log = replace(made_report.facts.log, evaluations=evaluations)
    report = replace(made_report, facts=replace(made_report.facts, log=log))
    assert "1.100 bits per byte" in verdict_of(report)[1]
    assert "its training loss should end between 3.25 and 3.31" in verdict_of(report)[1]
