"""Logs of every format are read as a person reads them; and what any damage leaves contradicts nothing."""

from __future__ import annotations

import math
import random
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onecard.report.log import Columns, Log
from onecard.report.reading import read, seen

LOGS = Path(__file__).parent / "logs"
FILES = {path.name.replace(".", "_") if path.suffix == ".tsv" else path.stem: path for path in LOGS.iterdir()}
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((LOGS / "expected.toml").read_text(encoding="utf-8"))
READABLE = sorted(name for name, row in EXPECTED.items() if "seen" not in row)
CUTS, MANY_CUTS = 20, 500


def content(name: str) -> bytes:
    return FILES[name].read_bytes()


@cache
def whole(name: str) -> Log:
    log = read(content(name))
    assert log is not None
    return log


def rows(columns: Columns, *names: str) -> list[list[float]]:
    return [list(row) for row in zip(*(getattr(columns, name) for name in names), strict=True)]


def near(expected: Any) -> Any:
    return expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_each_log_has_its_expected_values() -> None:
    assert set(EXPECTED) == set(FILES) - {"expected"}
    assert len(READABLE) >= 40
    assert len(EXPECTED) - len(READABLE) <= 5


@pytest.mark.parametrize("name", READABLE)
def test_a_log_is_read_as_its_lines_say(name: str) -> None:
    row, log = EXPECTED[name], whole(name)
    row = EXPECTED[row["same_as"]] if "same_as" in row else row
    assert log.format in row["format"].split("|")
    if "steps" in row:
        assert rows(log.steps, "step", "loss", "ms") == [near(values) for values in row["steps"]]
    expected = [near(values) for values in row.get("evaluations", [])]
    assert rows(log.evaluations, "step", "train", "val", "bpb") == expected
    for column in {"mfu", "lr", "tokens"} & set(row):
        assert list(getattr(log.steps, column)) == near(row[column])
    planned = [near(values) for values in row.get("planned", [])]
    assert rows(log.planned, "step", "tokens", "lr") == planned
    assert len(log.starts) == row.get("starts", 1)
    for said, expected_values in ((log.settings, row.get("settings", {})), (log.facts, row.get("facts", {}))):
        for key, value in expected_values.items():
            found = said.get(key)
            assert (list(found) if isinstance(found, tuple) else found) == near(value), key


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(READABLE)))
def test_what_cannot_be_read_is_named(name: str) -> None:
    assert read(content(name)) is None
    assert seen(content(name)).kind == EXPECTED[name]["seen"]


# --- cut anywhere -------------------------------------------------------------------------------


def agrees(part: Columns, all_of_it: Columns) -> bool:
    """Is each row of `part` one of the whole, with the same values where both say something?"""
    by_step = {row[0]: row for row in all_of_it}
    return all(
        row[0] in by_step
        and all(math.isnan(a) or math.isnan(b) or a == b for a, b in zip(row, by_step[row[0]], strict=True))
        for row in part
    )


def contradictions(part: Log | None, name: str) -> list[str]:
    log = whole(name)
    if part is None:
        return []
    found = []
    for start in part.starts:
        whole_starts = [*log.starts, log]
        if not any(agrees(start.steps, other.steps) for other in whole_starts):
            found.append(f"steps {start.steps}")
        if not any(agrees(start.evaluations, other.evaluations) for other in whole_starts):
            found.append(f"evaluations {start.evaluations}")
    for said, other in ((part.settings, log.settings), (part.facts, log.facts)):
        found += [
            f"{key}: {value} for {other[key]}"
            for key, value in said.items()
            if key in other and key != "progress" and not str(other[key]).endswith(str(value))
        ]
    return found


def cut(name: str, seed: int) -> bytes:
    whole_content = content(name)
    dice = random.Random(f"{name} {seed}")
    begin, end = sorted(dice.randrange(len(whole_content) + 1) for _ in range(2))
    if FILES[name].name == "nanogpt_utf16.txt":
        begin -= begin % 2
    match dice.randrange(3):
        case 0:
            return whole_content[:end]
        case 1:
            return whole_content[begin:]
    return whole_content[begin:end]


def check_cuts(name: str, seeds: range) -> None:
    for seed in seeds:
        wrong = contradictions(read(cut(name, seed)), name)
        assert wrong == [], (seed, cut(name, seed)[-200:], cut(name, seed)[:200])


@pytest.mark.parametrize("name", READABLE)
def test_a_cut_log_contradicts_nothing(name: str) -> None:
    check_cuts(name, range(CUTS))


@pytest.mark.long
@pytest.mark.parametrize("name", READABLE)
def test_a_log_cut_often_contradicts_nothing(name: str) -> None:
    check_cuts(name, range(CUTS, CUTS + MANY_CUTS))


@pytest.mark.parametrize("name", sorted(EXPECTED))
@pytest.mark.parametrize("block", [1, 7, 100, 1000])
def test_the_size_of_blocks_does_not_show(name: str, block: int) -> None:
    assert repr(read(content(name), block)) == repr(read(content(name)))
