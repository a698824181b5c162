"""What a card carries at most is at most: one step more does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from questions import D32, NOTES, asked

from onecard.plan.answer import Answer, cost_of_choice
from onecard.plan.largest import (
    _best,
    _with,
    best_for_time,
    find_largest,
    largest_models,
    longest_blocks,
    of_depth,
)
from onecard.plan.options import Options

DAY = 86400.0


@pytest.fixture(scope="module")
def on_12_gb() -> Answer:
    return asked(NOTES, gib=11.0)


@pytest.mark.parametrize("words", [NOTES, D32], ids=["gpt2", "nanochat"])
@pytest.mark.parametrize("gib", [4.0, 8.0])
def test_the_largest_model_fits_and_a_layer_more_does_not(words: list[str], gib: float) -> None:
    found = asked(words, gib=gib)
    sizes = largest_models(found)
    assert [size.kind for size in sizes] == ["exact", "low-bit"]
    for size in sizes:
        choice = size.choice
        assert choice.fits and choice.setting.exact == (size.kind == "exact")
        layers = choice.question.shape.n_layer
        low_bit = size.kind == "low-bit"
        more = _with(found.question, of_depth(found.question.config, layers + 1))
        assert _best(more, low_bit=low_bit) is None or layers == 64
        assert size.to_json()["n_layer"] == layers
        assert choice.question.config.tokens_per_step == found.config.tokens_per_step
    # Fewer bits, no smaller model.
    assert sizes[1].choice.question.shape.parameters >= sizes[0].choice.question.shape.parameters


def test_more_memory_carries_more() -> None:
    small, large = (largest_models(asked(NOTES, gib=gib))[0].choice.question.shape for gib in (3.0, 11.0))
    assert large.parameters > small.parameters


@pytest.mark.parametrize("depth", [2, 7, 12, 33])
def test_of_another_depth_heads_divide_the_width(depth: int, on_12_gb: Answer) -> None:
    changed = of_depth(on_12_gb.question.config, depth)
    shape = changed.shape(50304)
    assert shape.n_layer == depth and shape.n_embd % shape.n_head == 0 and shape.n_embd % 128 == 0
    assert 64 * depth <= shape.n_embd < 64 * depth + 128 or shape.n_embd == 128


def test_the_longest_block_fits_and_twice_as_long_does_not() -> None:
    found = asked(NOTES, gib=3.0)
    for size in longest_blocks(found):
        choice = size.choice
        assert choice.fits
        config = choice.question.config
        assert config.tokens_per_step == found.config.tokens_per_step
        twice = dataclasses.replace(
            config, block_size=2 * config.block_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps // 2,
        )  # fmt: skip
        longer = _with(found.question, twice)
        low_bit = size.kind == "low-bit"
        assert twice.block_size > 131_072 or _best(longer, low_bit=low_bit) is None
        assert longer.answer(choice.setting).bill.process > choice.bill.process


def test_the_best_model_for_a_time_is_a_range(on_12_gb: Answer) -> None:
    week, month = (best_for_time(on_12_gb, days * DAY) for days in (7, 30))
    for found in (week, month):
        assert 1 <= len(found) <= 5
        assert all(c.choice.fits and c.loss.low < c.loss.middle < c.loss.high for c in found)
        middles = [c.loss.middle for c in found]
        assert middles == sorted(middles)
    assert month[0].loss.middle < week[0].loss.middle
    # More time goes into a larger model, and each sees what fits into the time.
    assert month[0].choice.question.shape.parameters > week[0].choice.question.shape.parameters
    for candidate in week:
        # Evaluations and checkpoints are part of the week, by the formula of any other plan.
        config = candidate.choice.question.config
        whole = cost_of_choice(candidate.choice, on_12_gb.target, Options())
        assert whole is not None and candidate.tokens == config.max_iters * config.tokens_per_step
        assert candidate.evaluation_s == pytest.approx(whole.evaluation_s) and whole.evaluation_s > 0
        assert whole.seconds <= 7 * DAY
        assert whole.seconds == pytest.approx(7 * DAY, rel=0.01)
        assert candidate.to_json()["loss"] == sorted(candidate.to_json()["loss"])


def test_without_a_speed_there_is_no_best(on_12_gb: Answer) -> None:
    blind = dataclasses.replace(on_12_gb, question=dataclasses.replace(on_12_gb.question, rates=None))
    assert best_for_time(blind, 7 * DAY) == []


def test_rows_are_called_what_they_are_and_tell_how() -> None:
    """Bits that the user has set are no exact training, and are not listed twice."""
    pinned = asked([*D32, "--master_weights=bf16", "--optim_states=int8"], gib=11.0)
    assert [size.kind for size in largest_models(pinned)] == ["low-bit"]
    for candidate in best_for_time(asked(NOTES, gib=11.0), 7 * DAY):
        told = candidate.to_json()
        assert told["total_gib"] <= 11.0
        assert (told["host_gib"] > 0) == (told["settings"]["offload"] != "none")


def test_little_text_is_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5 MB of tokens are not for a model that fills the card; 60 GB are."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "openwebtext"
    folder.mkdir(parents=True)
    for megabytes, limited in ((2.5, True), (60_000, False)):
        with (folder / "train.bin").open("wb") as file:
            file.truncate(int(megabytes * 1e6))
        answer = asked(["--max_iters=1000", "--warmup_iters=10", "--vocab_size=50304"], gib=11.8)
        found = find_largest(answer, 7 * DAY)
        parameters = max(size.choice.question.shape.parameters for size in found.largest)
        assert (found.text_limit is not None) == limited and (parameters < 10e6) == limited
        tokens = answer.data_tokens
        assert tokens is not None and all(c.tokens <= 8 * tokens for c in found.candidates)
        assert len(found.candidates) == (1 if limited else 5)
