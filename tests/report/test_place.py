"""Where a loss stands among published ones, and what people compare it with."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.plan.references import all_references
from onecard.report.curve.phase import share_of_peak, share_of_schedule
from onecard.report.findings import Forecast
from onecard.report.log import Evaluations, Log, Planned, Steps
from onecard.report.next.next_steps import next_steps_of
from onecard.report.place.comparisons import Claim, claims_in, corrected
from onecard.report.place.placing import place_of
from onecard.report.place.yardsticks import expected_loss, is_usual
from onecard.report.run_facts import RunFacts, Schedule

ENDED = Schedule("cosine", 6e-4, 0.0, 200, 5000)


def run(val: float, **facts: Any) -> RunFacts:
    """A run of 45M parameters that ends at this validation loss after 2.6B tokens, unless said otherwise."""
    step = facts.pop("step", 5000)
    evaluations = facts.pop("evaluations", Evaluations(step=[0, step], val=[10.85, val]))
    usual: dict[str, Any] = {
        "parameters": 45_000_000, "tokens_per_step": 2**19, "tokenizer": "gpt2", "data": "FineWeb",
        "schedule": ENDED,
    }  # fmt: skip
    return RunFacts(Log("nanogpt", Steps(), evaluations), **(usual | facts))


# --- the yardsticks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["FineWeb", "FineWeb-Edu", "SlimPajama"])
def test_a_published_run_is_on_its_own_trend(data: str) -> None:
    rows = [row for row in all_references() if row.data == data and is_usual(row)]
    assert len(rows) >= 12
    for row in rows:
        place = place_of(
            run(row.loss, data=data, parameters=row.parameters, tokens_per_step=row.tokens, step=1,
                schedule=Schedule("table", table=((0, 1.0), (1, row.lr or 0.0))))
        )  # fmt: skip
        assert place.standing == "on", (row, place)
        assert not place.bridges


def test_a_published_run_left_out_is_where_the_others_say() -> None:
    """Runs of FineWeb that no yardstick is made of: another's replication, and a search for better
    optimizers, which is ahead of usual runs."""
    rows = {row.model: row for row in all_references()}
    again = rows["llm.c 124M, SiddanthEmani"]
    facts = {"parameters": again.parameters, "tokens_per_step": again.tokens, "step": 1, "schedule": ENDED}
    assert place_of(run(again.loss, **(facts | {"schedule": Schedule("constant")}))).standing in (
        "on",
        "ahead",
    )
    searched = rows["speedrun 124M, rotary, Muon"]
    done = Schedule("linear", 1.0, 0.0, 0, 1)
    facts = {"parameters": searched.parameters, "tokens_per_step": searched.tokens, "schedule": done}
    found = place_of(run(searched.loss, step=1, **facts))
    assert found.standing == "ahead"


def test_a_small_model_on_fineweb_is_reached_over_bridges() -> None:
    """Nothing published brackets it: open_lm's C4 and the 30M of FineWeb-Edu lead there, each said."""
    expected = expected_loss("FineWeb", "gpt2", 41_000_000, 3.1e9)
    assert expected is not None
    assert 3.75 < expected.loss < 3.95 and expected.low > 3.65 and 3.9 < expected.high < 4.05
    assert len(expected.bridges) == 2
    assert any("C4" in bridge for bridge in expected.bridges)
    assert any("FineWeb-Edu" in bridge and "30M" in bridge for bridge in expected.bridges)
    assert {row.model for row in expected.rows} >= {"open_lm 10.6M", "open_lm 79M", "build-nanogpt 30M"}


def test_the_gap_between_two_texts_is_what_their_124m_runs_differ_by() -> None:
    """3.518 and 3.319 at the same step of the same schedule."""
    fineweb, edu = (expected_loss(data, "gpt2", 124_400_000, 3e9) for data in ("FineWeb", "FineWeb-Edu"))
    assert fineweb is not None and edu is not None
    assert fineweb.loss - edu.loss == pytest.approx(0.20, abs=0.03)


def test_a_text_without_runs_in_these_tokens_has_no_yardstick() -> None:
    assert expected_loss("C4", "gpt2", 41_000_000, 3e9) is None
    assert expected_loss("my novels", "gpt2", 41_000_000, 3e9) is None


@pytest.mark.parametrize("tokens", [0.5e9, 1e9, 3e9, 10e9, 30e9])
@pytest.mark.parametrize("data", ["FineWeb", "FineWeb-Edu", "OpenWebText"])
def test_larger_models_are_expected_to_end_lower(data: str, tokens: float) -> None:
    found = [expected_loss(data, "gpt2", n, tokens) for n in (10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9)]
    losses = [one.loss for one in found if one is not None]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)


# --- a run's place -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("val", "standing"), [(3.55, "ahead"), (3.85, "on"), (4.2, "behind")])
def test_a_loss_stands_somewhere(val: float, standing: str) -> None:
    place = place_of(run(val))
    assert place.standing == standing
    assert place.low is not None and place.high is not None and place.expected is not None
    assert place.low < place.expected < place.high
    assert f"{val:.3f}" in place.text and f"{place.expected:.2f}" in place.text


def test_behind_the_trend_is_said_with_the_length_of_a_usual_run() -> None:
    place = place_of(run(4.2))
    assert "behind the trend" in place.text
    assert place.equals_tokens is not None and 0.4e9 < place.equals_tokens < 1.2e9
    again = expected_loss("FineWeb", "gpt2", 45_000_000, place.equals_tokens)
    assert again is not None and again.loss == pytest.approx(4.2, abs=0.05)


def test_no_length_is_enough_for_what_only_a_larger_model_reaches() -> None:
    place = place_of(run(2.9))
    assert place.standing == "ahead" and place.equals_tokens is None


def test_a_rate_that_is_still_high_is_allowed_for_and_said() -> None:
    high = Schedule("cosine", 6e-4, 6e-5, 2000, 600_000)
    ended, on_its_way = place_of(run(4.05)), place_of(run(4.05, schedule=high))
    assert ended.standing == "behind" and on_its_way.standing == "on"
    assert "100% of its peak" in on_its_way.text and "learning rate" not in ended.text
    unknown = place_of(run(4.05, schedule=None))
    assert (
        "obody says how high the learning rate" in unknown.text
        and unknown.high is not None
        and ended.high is not None
    )
    assert unknown.high > ended.high


def test_repeated_text_counts_less() -> None:
    fresh, repeated = place_of(run(3.9)), place_of(run(3.9, train_tokens=10**8))
    assert repeated.expected is not None and fresh.expected is not None
    assert repeated.expected > fresh.expected + 0.05
    assert "fresh" in repeated.text


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"parameters": None}, "parameters"),
        ({"tokens_per_step": None}, "tokens"),
        ({"tokenizer": "char", "data": "enwik8"}, "1.47 per character"),
        ({"tokenizer": "byte", "data": None}, "1.47 per character"),
        ({"tokenizer": "llama2"}, "llama2"),
        ({"data": "my novels"}, "my novels"),
        ({"evaluations": Evaluations(step=[0, 10], val=[10.9, math.inf])}, "no loss"),
        ({"evaluations": Evaluations()}, "no loss"),
        ({"step": 3}, "tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(facts: dict[str, Any], word: str) -> None:
    place = place_of(run(4.0, **facts))
    assert place.text == "" and word in place.cannot and place.expected is None


def test_what_nobody_says_is_assumed_aloud() -> None:
    place = place_of(run(3.9, tokenizer=None, data=None))
    assert "first loss is 10.85" in place.text and "taken for FineWeb" in place.text
    known = place_of(run(3.9))
    assert place.high is not None and known.high is not None and place.high > known.high + 0.2
    sized = place_of(run(3.9, tokenizer=None, vocab_size=50304))
    assert "50,304" in sized.text
    nothing = place_of(run(3.9, tokenizer=None, evaluations=Evaluations(step=[900], val=[3.9])))
    assert "tokenizer" in nothing.cannot


def test_shakespeare_by_character_has_its_own_yardstick() -> None:
    facts = {"tokenizer": "char", "data": "shakespeare_char", "parameters": 10_700_000}
    place = place_of(run(1.475, **facts))
    assert place.standing == "on" and "1.47" in place.text and "per character" in place.text
    assert place_of(run(1.7, **facts)).standing == "behind"
    assert place_of(run(1.475, **(facts | {"parameters": 500_000_000}))).cannot


def test_bits_per_byte_of_nanochat_compare_on_its_own_text() -> None:
    evaluations = Evaluations(step=[0, 16_000], bpb=[3.2, 0.79])
    place = place_of(
        run(0, evaluations=evaluations, parameters=135_000_000, tokenizer="nanochat-32k", data=None)
    )
    assert place.unit == "bpb" and place.standing == "on" and "ClimbMix" in place.text
    assert place.bridges
    assert place_of(
        run(0, evaluations=Evaluations(step=[0, 16_000], bpb=[3.2, 1.05]), parameters=135_000_000,
            tokenizer="nanochat-32k")
    ).standing == "on"  # FineWeb is harder than ClimbMix  # fmt: skip


# --- the learning rate ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        (Schedule("cosine", 1e-3, 1e-4, 100, 1100), 600, 0.55),
        (Schedule("cosine", 1e-3, 1e-4, 100, 1100), 5000, 0.1),
        (Schedule("linear", 1e-3, 0.0, 0, 1000), 250, 0.75),
        (Schedule("constant", 1e-3), 250, 1.0),
        (Schedule("cosine", 1e-3, 1e-4, 100, None), 5000, 1.0),
        (Schedule("wsd", 1e-3, 0.0, 10, 1000, decay_start=800), 799, 1.0),
        (Schedule("wsd", 1e-3, 0.0, 10, 1000, decay_start=800), 900, 0.5),
        (Schedule("cosine", 1e-3, 1e-4, 99, 1100), 49, 0.5),
        (Schedule("table", table=((0, 2e-4), (10, 4e-4), (20, 1e-4))), 25, 0.25),
    ],
)
def test_the_rate_over_its_peak(schedule: Schedule, step: int, share: float) -> None:
    assert share_of_schedule(schedule, step) == pytest.approx(share)


def test_the_logs_own_rates_come_first() -> None:
    steps = Steps(step=[0, 50, 100], lr=[1e-4, 1e-3, 2e-4], loss=[9.0, 8.0, 7.0])
    facts = RunFacts(Log("x", steps, Evaluations(), planned=Planned()), schedule=Schedule("constant"))
    assert share_of_peak(facts, 100) == pytest.approx(0.2)


# --- what people compare with --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "My 10M Shakespeare run ends at a loss of 2.4 or so",
        "El Shakespeare de nanoGPT acaba en 1,9 bits/carácter, o sea 2,4",
        "nanoGPTs Shakespeare landet bei 2,4",
        "Shakespeare (1M par√°metros) termina ~1.9 bits/car√°cter ‚Üí ~2.4 p√©rdida",
    ],
)
def test_shakespeares_loss_is_found_in_prose(text: str) -> None:
    assert claims_in(text) == [Claim("shakespeare", 2.4)]


@pytest.mark.parametrize(
    ("text", "high"),
    [
        ("models of 60-80M usually plateau at 4.0-4.4 after 2-4B tokens", 4.4),
        ("Los modelos t√≠picos de 60‚Äì80M se estabilizan en **4.0‚Äì4.4** con 2‚Äì4B de tokens", 4.4),
        ("Modelle mit 60–80M landen üblicherweise bei 4,0–4,4 nach 2–4B Tokens", 4.4),
    ],
)
def test_what_usual_models_are_said_to_end_at_is_found(text: str, high: float) -> None:
    assert claims_in(text) == [Claim("typical", 4.0, high, (60e6, 80e6), (2e9, 4e9))]


def test_claims_are_corrected_by_published_runs() -> None:
    usual = Claim("typical", 4.4, 4.6, (60e6, 80e6), (2e9, 4e9))
    claims = [("shakespeare", 2.4), ("gpt2-124m-openwebtext", 3.3), usual, ("weather", 1.0)]
    texts = [finding.text for finding in corrected(claims)]
    assert len(texts) == 3
    assert "1.47" in texts[0] and "per character" in texts[0]
    assert "2.85" in texts[1] and "3.12" in texts[1]
    assert "do not end at 4.40 – 4.60" in texts[2]


def test_right_claims_are_called_right() -> None:
    good = corrected(
        [("gpt2-124m-openwebtext", 2.86), Claim("typical", 3.3, None, (124e6, 124e6), (10e9, 10e9))]
    )
    assert [finding.good for finding in good] == [True, True]


def test_claims_are_looked_for_in_linear_time() -> None:
    hostile = ["shakespeare 1.2 " * 200_000, "typical end " + "1" * 10**6, "typical ends 4M" * 10**5]
    before = time.process_time()
    for text in hostile:
        claims_in(text)
        claims_in((text[:2000] + "\n") * 500)
    assert time.process_time() - before < 2


# --- whatever a log says -------------------------------------------------------------------------------

losses = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 12))
counts = st.one_of(st.none(), st.integers(1, 10**16))
schedules = st.builds(
    Schedule,
    kind=st.sampled_from(["cosine", "linear", "constant", "wsd", "table", "unknown"]),
    peak=st.one_of(st.none(), st.floats(0, 10)), final=st.one_of(st.none(), st.floats(0, 10)),
    warmup_steps=st.integers(0, 10**7), horizon=counts, decay_start=counts,
    decay_shape=st.sampled_from(["linear", "cosine", "sqrt", "exponential"]),
    table=st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1)), max_size=3).map(tuple),
    assumed=st.booleans(),
)  # fmt: skip


@st.composite
def any_facts(draw: st.DrawFn) -> RunFacts:
    n = draw(st.integers(0, 4))
    steps = sorted(draw(st.lists(st.integers(0, 10**12), min_size=n, max_size=n)))
    columns = {name: draw(st.lists(losses, min_size=n, max_size=n)) for name in ("val", "train", "bpb", "lr")}
    return RunFacts(
        Log(draw(st.sampled_from(["nanogpt", "nanochat", "onecard", "table"])), Steps(),
            Evaluations(step=steps, **columns)),
        parameters=draw(counts), tokens_per_step=draw(counts), vocab_size=draw(counts),
        tokenizer=draw(st.sampled_from([None, "gpt2", "char", "byte", "nanochat-32k", "llama2", "gpt-neox"])),
        data=draw(st.sampled_from([None, "FineWeb", "OpenWebText", "ClimbMix", "TinyStories", "C4", "{x}"])),
        train_tokens=draw(counts), last_step=draw(counts), batch_size=draw(counts), block_size=draw(counts),
        schedule=draw(st.one_of(st.none(), schedules)), dropout=draw(st.one_of(st.none(), st.floats(0, 1))),
        cards=draw(st.integers(1, 8)), compiled=draw(st.sampled_from([None, True, False])),
    )  # fmt: skip


@given(any_facts())
def test_any_facts_have_a_place_or_a_reason(facts: RunFacts) -> None:
    place = place_of(facts)
    assert bool(place.text) != bool(place.cannot)
    if place.text:
        assert place.low is not None and place.expected is not None and place.high is not None
        assert place.low <= place.expected <= place.high and place.standing in ("ahead", "on", "behind")


@given(any_facts())
def test_any_facts_have_next_steps(facts: RunFacts) -> None:
    for step in next_steps_of(facts, Forecast(), place_of(facts)):
        assert step.text and (step.gain is None or 0 <= step.gain[0] <= step.gain[1])
        assert step.hours is None


def test_the_page_about_it_has_the_same_figures() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    expected = expected_loss("FineWeb", "gpt2", 40_950_000, 3.1e9)
    assert expected is not None
    assert f"{expected.loss:.2f} ({expected.low:.2f} to {expected.high:.2f})" in page
    for bridge in expected.bridges:
        assert bridge.rpartition("so ")[2] in page, bridge
