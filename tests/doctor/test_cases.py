"""Errors, logs and questions in the forms of public threads: each with the answer that is true, and why.

No answer may be wrong; that nothing is known is said in at most ten.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.doctor.answering import Limits, diagnose
from onecard.doctor.asked import asked
from onecard.doctor.diagnosis import Diagnosis
from onecard.doctor.show import lines_of
from onecard.hardware.cards import match_rates

MOST_UNKNOWN = 10
CASES: list[dict[str, Any]] = [
    case
    for path in sorted(Path(__file__).parent.glob("cases*.toml"))
    for case in tomllib.loads(path.read_text(encoding="utf-8"))["case"]
]


def answer(case: dict[str, Any]) -> Diagnosis:
    words = case.get("config")
    config = load_config(RunConfig, [f"--{word}" for word in words], check=False) if words else None
    card = match_rates(case["gpu"]) if "gpu" in case else None
    return diagnose(asked(case["text"].encode(), config, card), Limits())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_answer_is_the_true_one(case: dict[str, Any]) -> None:
    found = answer(case)
    assert found.key == case["key"], (found.key, found.what)
    for name in ("cause", "tensor", "moment"):
        if name in case:
            assert getattr(found, name) == case[name], (name, getattr(found, name))
    if "cause_not" in case:
        assert found.cause != case["cause_not"]
    said = "\n".join(lines_of(found, full=True))
    assert case.get("says", "") in said
    assert "says_not" not in case or case["says_not"] not in said


def test_there_are_enough_cases_and_few_without_an_answer() -> None:
    assert len(CASES) >= 60
    assert len({case["name"] for case in CASES}) == len(CASES)
    assert all(case["why"] for case in CASES)
    unknown = [case["name"] for case in CASES if not answer(case).is_known]
    assert len(unknown) <= MOST_UNKNOWN, unknown
