"""Cures: what plan refuses is never one, there is one wherever plan has one, and what was measured agrees."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onecard.plan.others
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.doctor.answering import Limits, diagnose
from onecard.doctor.asked import asked
from onecard.doctor.cures import in_theirs, nanogpt_cures
from onecard.hardware.cards import find_card
from onecard.plan.answer import question_of
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.machine import Figures, Target, find_target
from onecard.plan.search import chosen

PEERS = tomllib.loads((Path(onecard.plan.others.__file__).parent / "peers.toml").read_text(encoding="utf-8"))
MEASURED: list[dict[str, Any]] = PEERS["nanogpt"]
CARDS = ("RTX 3050 8GB", "RTX 3060 12GB", "RTX 4070", "RTX 4060 Ti 16GB", "RTX 3090")


def config_of(**values: Any) -> RunConfig:
    words = [f"--{name}={value}" for name, value in values.items()]
    return load_config(RunConfig, words, check=False)


def message(tried: str = "1.54 GiB") -> bytes:
    return f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}.".encode()


def with_memory(config: RunConfig, gib: float) -> Target:
    """A 4070 of which PyTorch may take so much."""
    target = find_target(config, "RTX 4070", None, Figures())
    return dataclasses.replace(target, allowed=int(gib * GIB) + CONTEXT, capacity=int((gib + 2) * GIB))


CONFIGS = st.fixed_dictionaries(
    {
        "n_layer": st.sampled_from((4, 6, 12, 24)),
        "n_head": st.sampled_from((6, 8, 12)),
        "n_embd": st.sampled_from((384, 576, 768, 1152)),
        "block_size": st.sampled_from((256, 512, 1024)),
        "batch_size": st.sampled_from((1, 3, 8, 12, 16, 24, 48)),
        "gradient_accumulation_steps": st.sampled_from((1, 4, 5, 32, 40)),
        "vocab_size": st.sampled_from((50304, 65, 32000)),
        "compile": st.booleans(),
    }
)


@settings(max_examples=15, deadline=None)
@given(values=CONFIGS, card=st.sampled_from(CARDS))
def test_a_cure_is_never_refused_and_there_is_one_wherever_there_can_be(
    values: dict[str, Any], card: str
) -> None:
    config = config_of(**values)
    found = diagnose(asked(message(), config, find_card(card)), Limits())
    target = find_target(config, card, None, Figures())
    here = [cure for cure in found.cures if cure.trainer == "onecard"]
    choice, _exact = chosen(question_of(config, target))
    assert bool(here) == (choice is not None)
    assert all(cure.spare >= 0 for cure in here)
    theirs = in_theirs(config, target)
    assert theirs is not None
    cures = [cure for cure in found.cures if cure.trainer == "nanogpt"]
    for cure in cures:
        lines = {line.name: line.value for line in cure.lines}
        changed = dataclasses.replace(config, **lines)  # type: ignore[arg-type]
        assert changed.tokens_per_step == config.tokens_per_step
        assert theirs.runs(changed.batch_size, compiled=changed.compile)
    smallest = [theirs.runs(1, compiled=compiled) for compiled in (True, False)]
    assert bool(cures) or not any(smallest)


@pytest.mark.parametrize("row", [row for row in MEASURED if "cap" in row], ids=str)
def test_what_fitted_and_what_ran_out_under_a_limit_agrees(row: dict[str, Any]) -> None:
    config = config_of(
        **{
            name: row[name]
            for name in (
                "n_layer",
                "n_head",
                "n_embd",
                "vocab_size",
                "block_size",
                "batch_size",
                "gradient_accumulation_steps",
                "dtype",
                "dropout",
            )
        },
        compile=row["compiled"],
    )
    theirs = in_theirs(config, with_memory(config, row["cap"]))
    assert theirs is not None
    assert theirs.runs(row["batch_size"], compiled=row["compiled"]) == row["fits"]


def test_no_cure_is_what_was_measured_to_run_out() -> None:
    ran_out = [row for row in MEASURED if not row["fits"]]
    assert ran_out
    for row in ran_out:
        config = config_of(
            **{
                name: row[name]
                for name in (
                    "n_layer",
                    "n_head",
                    "n_embd",
                    "vocab_size",
                    "block_size",
                    "batch_size",
                    "gradient_accumulation_steps",
                    "dtype",
                )
            },
            compile=row["compiled"],
        )
        theirs = in_theirs(config, with_memory(config, row["cap"]))
        assert theirs is not None
        for cure in nanogpt_cures(theirs, compiled=row["compiled"]):
            lines = {line.name: line.value for line in cure.lines}
            assert lines, "the config as it is ran out"
            after = {"batch_size": row["batch_size"], "compile": row["compiled"]} | lines
            for other in ran_out:
                same = all(other[name] == row[name] for name in ("n_layer", "n_embd", "block_size", "cap"))
                worse = other["batch_size"] <= after["batch_size"] and other["compiled"] == after["compile"]
                assert not (same and worse)
