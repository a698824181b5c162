"""Alarms of a run's facts: what is said of logs, of evaluations alone and of short tables."""

from __future__ import annotations

import math

import pytest

from onecard.language import english_of
from onecard.report.curve.alarms import alarms_of
from onecard.report.findings import Finding
from onecard.report.log import Evaluations
from onecard.report.run_facts import RunFacts, Schedule
from tests.report.made_runs import VOCABULARY, curve, losses, run, steps_of, table


def only(facts: RunFacts) -> Finding:
    (found,) = alarms_of(facts)
    return found


def test_a_healthy_run_raises_none() -> None:
    vals = Evaluations(step=range(0, 4000, 250), val=[curve(s) + 0.02 for s in range(0, 4000, 250)])
    assert alarms_of(run(steps_of(losses(0)), vals, vocab_size=VOCABULARY)) == []


def test_a_run_that_diverges_says_since_when() -> None:
    values = [loss + min(5.0, max(0.0, (i - 2500) / 40)) for i, loss in enumerate(losses(1))]
    found = only(run(steps_of(values), vocab_size=VOCABULARY))
    assert (found.key, found.good) == ("diverging", False)
    assert found.step is not None
    assert abs(found.step - 2500) < 60
    assert f"since step {found.step:,}" in found.text


def test_a_run_that_came_back_is_not_diverging_any_more() -> None:
    values = [loss + (3.0 if 1500 <= i < 1900 else 0.0) for i, loss in enumerate(losses(2))]
    found = only(run(steps_of(values), vocab_size=VOCABULARY))
    assert (found.key, found.good) == ("diverging-passed", None)
    assert "came down again" in found.text


def test_not_a_number_comes_first_and_names_float16_where_it_was() -> None:
    values = losses(3, 900)
    values[700:] = [math.inf] * 200
    found = alarms_of(run(steps_of(values), vocab_size=VOCABULARY, dtype="float16"))[0]
    assert (found.key, found.step) == ("not-a-number", 700)
    assert "float16" in found.text


def test_a_rate_that_is_down_at_nothing_is_named_as_the_cause() -> None:
    """A plateau has a cause where the log shows one."""
    rates = [6e-4 if i < 800 else 0.0 for i in range(4000)]
    values = [loss + max(0.0, curve(800) - curve(i)) for i, loss in enumerate(losses(4))]
    found = only(run(steps_of(values, lr=rates), vocab_size=VOCABULARY))
    assert found.key == "stuck"
    assert "the learning rate is down" in found.text


def test_harder_text_is_no_plateau_where_the_validation_loss_falls_on() -> None:
    values = [loss + max(0.0, curve(600) - curve(i)) for i, loss in enumerate(losses(5))]
    steps = range(0, 4000, 250)
    alone = run(steps_of(values), vocab_size=VOCABULARY)
    assert [found.key for found in alarms_of(alone)] == ["stuck"]
    beside = run(
        steps_of(values), Evaluations(step=steps, val=[curve(s) for s in steps]), vocab_size=VOCABULARY
    )
    assert alarms_of(beside) == []


MEMORISED = (
    [0, 250, 500, 750, 1000, 1250, 1500],
    [4.2, 2.3, 1.7, 1.3, 0.95, 0.7, 0.5],
    [4.2, 2.4, 1.9, 1.75, 1.9, 2.2, 2.6],
)


def test_memorising_is_seen_in_a_short_table() -> None:
    found = only(table(*MEMORISED, vocab_size=65))
    assert (found.key, found.step) == ("memorising", 750)
    assert "1.750" in found.text
    assert "step 750" in found.text


def test_both_losses_rising_is_not_memorising() -> None:
    steps = [0, 500, 1000, 1500, 2000, 2500, 3000, 3500]
    val = [10.8, 5.9, 4.9, 4.5, 5.6, 6.9, 7.4, 7.6]
    found = only(table(steps, [loss - 0.02 for loss in val], val, vocab_size=VOCABULARY))
    assert (found.key, found.step) == ("diverging", 1500)


@pytest.mark.parametrize("level", [10.8, 7.5])
def test_a_table_of_a_run_that_learns_nothing_or_stops(level: float) -> None:
    steps = [0, 250, 500, 1000, 2000, 4000]
    val = [10.82, max(level, 9.0), max(level, 8.2), level, level, level]
    found = only(table(steps, val, val, vocab_size=VOCABULARY))
    assert found.key == "not-learning"
    assert f"{level:.2f}" in found.text


def test_a_healthy_table_raises_none() -> None:
    steps = [0, 500, 1000, 2000, 3000, 4000, 5000]
    val = [10.9, 5.7, 4.8, 4.4, 4.25, 4.17, 4.13]
    facts = table(steps, [loss - 0.02 for loss in val], val, vocab_size=VOCABULARY)
    assert alarms_of(facts) == []
    assert alarms_of(table([0], [10.9], [10.9])) == []
    assert alarms_of(table([], [], [])) == []


def test_one_nan_in_the_middle_is_history() -> None:
    values = losses(6, 900)
    values[500] = math.inf
    found = only(run(steps_of(values), vocab_size=VOCABULARY, schedule=Schedule("constant", 1e-3, 1e-3)))
    assert (found.key, found.step) == ("not-a-number-passed", 500)


def test_sentences_have_their_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_LANG", "de")
    text = only(table(*MEMORISED, vocab_size=65)).text
    assert str(english_of(text)).startswith("The model memorises its text since step")
