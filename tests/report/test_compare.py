"""Runs against each other: at equal tokens, hours, FLOPs and kWh, and what is beyond noise."""

from __future__ import annotations

import random
from dataclasses import replace

import made_reports as made
import pytest

from onecard.report.answer import Report
from onecard.report.compare import Side, comparisons_of, differences, sides_of, why_not
from onecard.report.course import Amount
from onecard.report.log import Evaluations, Log, Steps
from onecard.report.options import ReportOptions
from onecard.report.pages.compare_command import compare_command, verdict


@pytest.fixture(autouse=True)
def exact_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onecard.report.compare.evaluation_error", lambda report: 0.0)


def run(
    name: str, better: float = 0.0, *, last: int = 6000, noise: float = 0.003, hours: float = 7.0
) -> Report:
    draw = random.Random(name)
    at = range(0, last + 1, 250)
    values = [made.falling(s) - better + draw.gauss(0, noise) for s in at]
    facts = replace(
        made.report().facts, log=Log("csv", Steps(), Evaluations(step=at, val=values)), source=name
    )
    course = replace(made.report().course, seconds=Amount(3600 * hours, 0.0))
    return replace(made.report(), facts=facts, name=name, course=course)


def compared(*reports: Report) -> list[Side]:
    return sides_of(reports)


def test_a_real_difference_is_seen_and_noise_is_not() -> None:
    sides = compared(run("a"), run("b", 0.08))
    found = comparisons_of(sides)
    assert [each.axis for each in found] == ["tokens", "hours", "flops", "kwh"]
    assert all(each.best == 1 and each.beyond_noise for each in found)
    assert found[0].lead == pytest.approx(0.08, abs=0.02)
    assert not comparisons_of(compared(run("a"), run("c", 0.002)))[0].beyond_noise


def test_twins_are_seldom_taken_for_different() -> None:
    wrong = 0
    for seed in range(100):
        found = comparisons_of(compared(run(f"a{seed}"), run(f"b{seed}")))
        wrong += found[0].beyond_noise
    assert wrong <= 10


def test_runs_are_compared_where_both_have_been() -> None:
    long, short = run("long", last=12_000), run("short", 0.0, last=3000)
    found = comparisons_of(compared(long, short))[0]
    assert found.amount == pytest.approx(3000 * 262_144)
    assert found.lead < 0.02


def test_the_faster_one_may_be_ahead_by_hours_alone() -> None:
    better, faster = run("better", 0.03, hours=14.0), run("faster", hours=7.0)
    sides = compared(better, faster)
    by = {each.axis: each for each in comparisons_of(sides)}
    assert by["tokens"].best == 0
    assert by["hours"].best == 1
    assert "other way round" in verdict(sides, list(by.values()))[1]


def test_what_differed_is_said() -> None:
    one, other = run("a"), run("b")
    one = replace(
        one,
        facts=replace(
            one.facts, dropout=0.2, log=replace(one.facts.log, settings={"beta2": 0.95, "out_dir": "a"})
        ),
    )
    other = replace(
        other,
        facts=replace(
            other.facts, dropout=0.0, log=replace(other.facts.log, settings={"beta2": 0.99, "out_dir": "b"})
        ),
    )
    assert set(differences(compared(one, other))) == {("dropout", "0.2", "0"), ("beta2", "0.95", "0.99")}


def test_losses_of_different_tokenizers_are_not_compared() -> None:
    other = replace(run("b"), facts=replace(run("b").facts, tokenizer="char"))
    sides = compared(run("a"), other)
    assert "tokenizers differ (char, gpt2)" in why_not(sides)
    assert verdict(sides, [])[0] == "These runs cannot be compared by their losses."


@pytest.mark.parametrize("form", [ReportOptions(), ReportOptions(json=True), ReportOptions(markdown=True)])
def test_each_form_names_who_is_ahead(form: ReportOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_command([run("a"), run("b", 0.08)], form) == 0
    assert "b is 0.0" in capsys.readouterr().out


def test_a_page_of_two_runs(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    from pathlib import Path

    target = Path(str(tmp_path)) / "both.html"
    compare_command([run("a"), run("b<i>", 0.08)], ReportOptions(html=str(target)))
    content = target.read_text(encoding="utf-8")
    assert "<i>" not in content.replace('<i class="k-', "")
    assert content.count('class="run1"') == 1
