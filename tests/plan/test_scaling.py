"""The scaling law: what it was fitted to, what it must say, and how its ranges behave."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape
from onecard.plan import scaling
from onecard.plan.references import all_references
from onecard.plan.scaling import (
    JOINT_LAW,
    LAW,
    LossRange,
    best_for_tokens,
    counted_parameters,
    effective_tokens,
    in_bits_per_byte,
    predicted_loss,
    repetition_note,
    token_worth,
)

ROOT = Path(__file__).resolve().parents[2]
sizes = st.integers(1_000_000, 5_000_000_000)
horizons = st.floats(1e6, 1e12)
families = st.sampled_from(scaling.FAMILIES)


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_scaling", ROOT / "benchmarks" / "fit_scaling.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_scaling"] = module
    spec.loader.exec_module(module)
    return module


# --- bits per byte -----------------------------------------------------------------------------------


def test_bits_per_byte_are_the_same_loss_over_the_texts_bytes() -> None:
    """llm.c's 124M ended at 3.2722 nats: at the 4.46 bytes measured in a token of FineWeb, 1.06 bits."""
    nats = predicted_loss(124_000_000, 10.26e9)
    bits = in_bits_per_byte(nats)
    assert bits.unit == scaling.BITS and bits.to_json()["unit"] == "bits per byte, web text"
    assert bits.low < 3.2722 / math.log(2) / 4.46 < bits.high
    assert bits.high - bits.low > (nats.high - nats.low) / math.log(2) / 4.7


def test_the_bytes_of_a_token_hold_what_was_measured() -> None:
    results = ROOT / "benchmarks" / "results" / "2026-11-17-prepare-2-cores.json"
    speed = json.loads(results.read_text(encoding="utf-8"))["speed"]["prepare"]
    low, high = scaling.BYTES_PER_TOKEN
    assert low < speed["mb_per_s"] * 1e6 / speed["tokens_per_s"] < high


@given(sizes, horizons, families)
def test_bits_are_a_range_too(parameters: int, tokens: float, family: str) -> None:
    bits = in_bits_per_byte(predicted_loss(parameters, tokens, family=family))
    assert 0 < bits.low < bits.middle < bits.high
    longer = in_bits_per_byte(predicted_loss(parameters, 1.1 * tokens, family=family))
    assert longer.middle <= bits.middle


def test_the_page_tells_the_range_beside_nanochats_own_bits() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    d12 = Nanochat2026Shape(12, 6, 768, 32768, 2048)
    (run,) = (r for r in all_references() if r.model.startswith("nanochat d12") and r.loss == 0.78)
    assert run.tokens is not None
    early, late = (
        in_bits_per_byte(predicted_loss(counted_parameters(d12), tokens, family="nanochat"))
        for tokens in (0.655e9, run.tokens)
    )
    assert f"range for FineWeb is {late.low:.2f} to {late.high:.2f}" in page
    assert f"middle it falls by {early.middle - late.middle:.2f} here" in page


def width(loss: LossRange) -> float:
    return loss.high - loss.low


# --- where the constants come from ------------------------------------------------------------------


def test_the_constants_are_what_the_script_fits(fitting: ModuleType) -> None:
    base, joint = fitting.fit(), fitting.fit(joint=True)
    for ours, fitted in ((LAW, base.law), (JOINT_LAW, joint.law)):
        for n, d in ((10e6, 1e9), (41e6, 3e9), (124e6, 10e9), (350e6, 32e9)):
            assert ours.loss(n, d) == pytest.approx(fitted.loss(n, d), abs=0.005)
    assert base.rms == pytest.approx(0.035, abs=0.001)
    assert 2 * base.rms <= scaling.HALF_WIDTH
    assert base.still_high == scaling.STILL_HIGH


def test_the_page_about_it_has_the_same_constants_and_residuals(fitting: ModuleType) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    law = f"L = {LAW.floor} + {LAW.size} / N^{LAW.size_power} + {LAW.data} / D^{LAW.data_power}"
    assert law in page
    base = fitting.fit()
    for row, residual in zip(base.rows, base.residuals, strict=True):
        found = re.search(rf"\| {row.model} \| {row.tokens / 1e9:g}B \| {row.loss:.3f} \| (.*) \|", page)
        assert found and float(found[1]) == pytest.approx(residual, abs=0.0015)


def test_the_range_holds_every_loss_it_was_fitted_to(fitting: ModuleType) -> None:
    assert 0.7 * scaling.HALF_WIDTH < max(abs(r) for r in fitting.fit().residuals) < scaling.HALF_WIDTH


def test_a_range_holds_the_fits_that_decide_otherwise(fitting: ModuleType) -> None:
    apart = fitting.spreads(fitting.fit())
    assert len(apart) == 100
    for (n, d), (distance, name) in apart.items():
        assert distance <= scaling.half_width(n, d), (n, d, name)
    # And is not so wide that it says nothing where they agree.
    inside = [
        distance for (n, d), (distance, _) in apart.items() if scaling.half_width(n, d) == scaling.HALF_WIDTH
    ]
    assert len(inside) >= 8
    assert max(inside) > 0.6 * scaling.HALF_WIDTH


def test_the_worth_of_a_token_holds_what_was_measured(fitting: ModuleType) -> None:
    measured = fitting.multipliers()
    assert scaling.WORTH[0] == math.floor(10 * min(measured.values())) / 10
    assert scaling.WORTH[1] == math.ceil(10 * max(measured.values())) / 10


# --- what it must say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tokens", "loss"), [("llm.c 124M", 10.26e9, 3.2722), ("llm.c 350M", 31.5e9, 2.9282)]
)
def test_the_ends_of_llmcs_runs_are_within(model: str, tokens: float, loss: float) -> None:
    (row,) = (row for row in all_references() if (row.model, row.tokens) == (model, tokens))
    assert row.loss == loss
    predicted = predicted_loss(row.parameters, tokens)
    assert predicted.standing(loss) == "within"
    assert not predicted.extrapolated


def test_a_small_run_well_above_the_trend_is_behind_it() -> None:
    predicted = predicted_loss(45_000_000, 2.9e9)
    assert 3.75 < predicted.middle < 3.95
    assert predicted.high > 3.9
    assert predicted.standing(4.2) == "behind"
    assert not predicted.extrapolated


@pytest.mark.parametrize(
    ("name", "family"), [("gpt2", "gpt2"), ("matched", "nanochat"), ("2025", "nanochat")]
)
def test_our_own_short_runs_are_within_the_wide_range_of_short_runs(name: str, family: str) -> None:
    found = []
    for file in ("tokens-to-loss", "tight-recipe"):
        path = ROOT / "benchmarks" / "results" / f"2026-11-16-{file}-h200.json"
        found += [row for row in json.loads(path.read_text())["rows"] if row["contender"] == name]
    (row,) = found
    predicted = predicted_loss(row["parameters"], row["tokens"], family=family)
    assert predicted.extrapolated
    assert predicted.standing(row["val_loss"]) == "within"


def test_llmcs_runs_on_their_way_are_within_once_their_learning_rate_is_known(fitting: ModuleType) -> None:
    rows = [row for row in fitting.rows_of() if row.data == "FineWeb"]
    assert len(rows) == 12
    for row in rows:
        predicted = predicted_loss(row.parameters, row.tokens)
        assert predicted.standing(row.loss, row.lr) == "within"


def test_standing_has_three_answers() -> None:
    loss = LossRange(3.0, 3.1, 3.2, "", False)
    assert [loss.standing(x) for x in (2.99, 3.0, 3.2, 3.21)] == ["ahead", "within", "within", "behind"]
    # With the learning rate at its peak 0.074 more are allowed, and fewer are enough to be ahead.
    assert [loss.standing(x, 1.0) for x in (3.05, 3.1, 3.27, 3.28)] == ["ahead", "within", "within", "behind"]


# --- how ranges behave ------------------------------------------------------------------------------


@given(sizes, horizons, families, st.floats(1.01, 100))
def test_more_parameters_or_more_tokens_never_raise_the_loss(n: int, d: float, family: str, k: float) -> None:
    here = predicted_loss(n, d, family=family).middle
    assert predicted_loss(round(n * k), d, family=family).middle < here or here >= scaling.NOTHING_LEARNED
    assert predicted_loss(n, d * k, family=family).middle < here or here >= scaling.NOTHING_LEARNED


@given(sizes, horizons, families)
def test_a_range_is_in_order_and_never_narrow(n: int, d: float, family: str) -> None:
    loss = predicted_loss(n, d, family=family)
    assert LAW.floor <= loss.low <= loss.middle <= loss.high <= scaling.NOTHING_LEARNED
    assert loss.high - loss.middle >= 0.03 or loss.high == scaling.NOTHING_LEARNED
    assert loss.middle - loss.low >= 0.03 or loss.low == LAW.floor
    assert loss.basis


@pytest.mark.parametrize(
    ("near", "far", "per_decade"),
    [
        ((40_000_000, 3e9), (20_000_000, 3e9), scaling.SMALLER),
        ((350_000_000, 10e9), (700_000_000, 10e9), scaling.LARGER),
        ((10_000_000, 0.2e9), (10_000_000, 0.1e9), scaling.SHORTER),
        ((350_000_000, 32e9), (350_000_000, 64e9), scaling.LONGER),
        ((100_000_000, 1e9), (100_000_000, 0.5e9), scaling.FEWER),
        ((50_000_000, 32e9), (40_000_000, 32e9), scaling.MORE),
    ],
)
def test_outside_the_region_a_range_grows_with_the_distance(
    near: tuple[int, float], far: tuple[int, float], per_decade: float
) -> None:
    decades = abs(math.log10(near[0] / far[0] * near[1] / far[1]))
    grown = width(predicted_loss(*far)) - width(predicted_loss(*near))
    of_the_size = max(0.0, math.log10(scaling.NEXT_SIZE / far[0])) - max(
        0.0, math.log10(scaling.NEXT_SIZE / near[0])
    )
    assert grown == pytest.approx(2 * per_decade * decades + scaling.HIGHER * of_the_size)
    assert predicted_loss(*far).extrapolated
    # Only a model that is too small itself reads so little and yet ten tokens per parameter.
    assert predicted_loss(*near).extrapolated == (near[0] == 10_000_000)


@pytest.mark.parametrize("size", [20e6, 30e6, 41e6, 60e6])
def test_a_straight_line_between_measured_neighbours_is_inside(size: float) -> None:
    """What a person reads off open_lm's 10.6M and 79M at 3.2B tokens, whose law has another floor."""
    share = math.log(size / 10.6e6) / math.log(79 / 10.6)
    read_off = 4.52 + share * (3.643 - 4.52)
    loss = predicted_loss(round(size), 3.2e9)
    assert loss.low < read_off < loss.high


def test_inside_the_region_a_range_is_as_wide_as_the_residuals() -> None:
    assert width(predicted_loss(124_000_000, 2e9)) == pytest.approx(2 * scaling.HALF_WIDTH)


@given(sizes, horizons)
def test_nanochat_is_never_expected_behind_gpt2_and_less_surely_ahead_later(n: int, d: float) -> None:
    ours, theirs = predicted_loss(n, d, family="nanochat"), predicted_loss(n, d)
    assert ours.middle < theirs.middle or theirs.middle == scaling.NOTHING_LEARNED
    assert 1.0 <= token_worth(d)[0] <= scaling.WORTH[0]
    assert token_worth(10 * d)[0] <= token_worth(d)[0]
    assert ours.extrapolated


def test_nanochats_range_goes_from_its_best_worth_to_its_least_and_as_wide_as_its_real_length() -> None:
    n, d, (least, most) = 124_000_000, 64e6, scaling.WORTH
    loss = predicted_loss(n, d, family="nanochat")
    assert scaling.half_width(n, d) > scaling.half_width(n, least * d)
    assert loss.low == pytest.approx(LAW.loss(n, most * d) - scaling.half_width(n, d))
    assert loss.high == pytest.approx(LAW.loss(n, least * d) + scaling.half_width(n, d))


def test_where_nanochats_advantage_is_an_assumption_the_basis_says_so() -> None:
    assert token_worth(64e6) == scaling.WORTH
    assert token_worth(6.4e9) == token_worth(64e9) == (1.0, scaling.WORTH[1])
    assert "assumption" in predicted_loss(124_000_000, 1e9, family="nanochat").basis
    assert "assumption" not in predicted_loss(124_000_000, 5e7, family="nanochat").basis
    assert "1.0 to 3.5" in predicted_loss(124_000_000, 1e10, family="nanochat").basis
    assert "outside" in predicted_loss(2_000_000_000, 1e9).basis
    assert "outside" not in predicted_loss(124_000_000, 2e9).basis
    assert "nanochat" not in predicted_loss(124_000_000, 1e9).basis


# --- repeated text ----------------------------------------------------------------------------------


def test_text_that_is_not_repeated_counts_in_full() -> None:
    assert effective_tokens(5e8, 1e9) == 5e8
    assert effective_tokens(1e9, 1e9) == 1e9
    assert effective_tokens(1e9, math.inf) == 1e9


def test_four_passes_are_nearly_as_good_as_fresh_text_and_a_hundred_are_not() -> None:
    assert 0.92 < effective_tokens(4e9, 1e9) / 4e9 < 0.95
    assert effective_tokens(100e9, 1e9) < 16.4e9


def test_endless_repeats_end_at_one_pass_and_the_decay_constant() -> None:
    assert effective_tokens(1e15, 1e9) == pytest.approx(1e9 * (1 + 15.387756))


@given(st.floats(1e6, 1e11), st.floats(1e6, 1e11), st.floats(1.001, 10))
def test_more_reading_is_worth_more_but_never_more_than_fresh_text(d: float, unique: float, k: float) -> None:
    worth = effective_tokens(d, unique)
    assert min(d, unique) * (1 - 1e-9) <= worth <= d * (1 + 1e-9)
    assert effective_tokens(d * k, unique) >= worth
    assert effective_tokens(d, unique * k) >= worth * (1 - 1e-9)


def test_many_passes_are_told() -> None:
    assert repetition_note(4e9, 1e9) is None
    note = repetition_note(10e9, 1e9)
    assert note is not None and "10.0 passes" in note and "7.81B" in note


# --- which model ------------------------------------------------------------------------------------


def test_models_are_ranked_and_those_too_near_are_told() -> None:
    ranked = best_for_tokens([(10_600_000, 30e9), (124_000_000, 10e9), (350_000_000, 3.5e9)])
    assert [model.parameters for model in ranked] == [350_000_000, 124_000_000, 10_600_000]
    assert [model.not_distinguishable for model in ranked] == [True, True, False]
    assert [model.loss.middle for model in ranked] == sorted(model.loss.middle for model in ranked)


def test_a_clear_winner_shares_its_place_with_nobody() -> None:
    ranked = best_for_tokens([(10_600_000, 1e9), (350_000_000, 30e9)])
    assert [model.not_distinguishable for model in ranked] == [False, False]
    assert best_for_tokens([]) == []
    assert not best_for_tokens([(124_000_000, 1e9)])[0].not_distinguishable


def test_of_equals_the_smaller_model_comes_first() -> None:
    # So short that neither has learned anything.
    ranked = best_for_tokens([(2_000_000, 1.0), (1_000_000, 1.0)])
    assert [model.parameters for model in ranked] == [1_000_000, 2_000_000]


def test_little_text_moves_the_choice_towards_the_larger_model() -> None:
    # Plenty of text favours the small model's 40B tokens; of a text of 50M they are worth no more than 0.8B.
    options = [(60_000_000, 40e9), (200_000_000, 4e9)]
    plenty, little = best_for_tokens(options), best_for_tokens(options, unique_tokens=5e7)
    assert plenty[0].parameters == 60_000_000
    assert little[0].parameters == 200_000_000
    assert little[0].loss.middle > plenty[0].loss.middle


def test_value_embeddings_are_not_counted() -> None:
    nanochat = Nanochat2026Shape.of_depth(12, 50304, 1024)
    values = nanochat.parameters_by_part()["value embeddings"]
    assert values > 0
    assert counted_parameters(nanochat) == nanochat.parameters - values
    gpt2 = GPT2Shape(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, block_size=1024, bias=False)
    assert counted_parameters(gpt2) == gpt2.parameters == 124_373_760
