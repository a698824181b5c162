"""Plan's options, apart from the config's knobs; and times to be done by."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onecard.cli.parser import parse
from onecard.cli.verbs import VERBS
from onecard.config.knobs import knobs
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.plan.options import Options, budget_seconds
from onecard.plan.prices import CURRENCY, IDLE_WATTS, LAPTOP_IDLE_WATTS, PRICE


def split_words(words: list[str]) -> tuple[Options, list[str]]:
    options, rest = parse(VERBS["plan"], words)
    assert isinstance(options, Options)
    return options, rest


MONDAY = datetime(2026, 11, 16, 12, 0)
HOUR, DAY = 3600, 86400


def test_without_words_everything_is_usual() -> None:
    assert split_words([]) == (Options(), [])
    assert (float(Options().price), Options().currency, Options().idle_watts) == (PRICE, CURRENCY, None)


@pytest.mark.parametrize("name", ["json", "compare", "largest", "stages", "formulas"])
@pytest.mark.parametrize("spelling", ["--{}", "--{}=true", "--{}=True", "--{}=1", "--{}=yes"])
def test_switches(name: str, spelling: str) -> None:
    options, rest = split_words(["config/x.py", spelling.format(name), "--n_layer=3"])
    assert getattr(options, name) is True and rest == ["config/x.py", "--n_layer=3"]
    assert sum(getattr(options, n) is True for n in ("json", "compare", "largest", "stages", "formulas")) == 1


@pytest.mark.parametrize("value", ["maybe", "", "2"])
def test_a_switch_is_on_or_off(value: str) -> None:
    assert split_words(["--json=no"])[0].json is False
    with pytest.raises(UserError, match="--json takes True or False"):
        split_words([f"--json={value}"])


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--gpu", "RTX 4070"], "gpu", "RTX 4070"),
        (["--gpu=RTX 4070"], "gpu", "RTX 4070"),
        (["--as", "nanogpt"], "as_", "nanogpt"),
        (["--as=nanogpt"], "as_", "nanogpt"),
        (["--idle_watts=60"], "idle_watts", 60.0),
        (["--idle-watts", "60.5"], "idle_watts", 60.5),
        (["--price", "0"], "price", "0"),
        (["--host-ram=1e6"], "host_ram", 1e6),
        (["--price=3-4"], "price", "3-4"),
        (["--currency=CHF"], "currency", "CHF"),
        (["--by", "7d"], "by", "7d"),
        (["--by=sunday 20:00"], "by", "sunday 20:00"),
    ],
)
def test_values(words: list[str], field: str, value: object) -> None:
    options, rest = split_words(["a.py", *words, "--dtype=float16"])
    assert getattr(options, field) == value and rest == ["a.py", "--dtype=float16"]


@pytest.mark.parametrize("name", ["gpu", "as", "idle_watts", "price", "currency", "by"])
def test_a_missing_value_is_told(name: str) -> None:
    for words in ([f"--{name}"], [f"--{name}", "--json"]):
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} needs a value"):
            split_words(words)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e9", "two", "", "0,30"])
@pytest.mark.parametrize("name", ["price", "idle_watts"])
def test_bad_numbers_are_told(name: str, text: str) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} (takes a number, not|cannot be) "):
        split_words([f"--{name}={text}"])


@pytest.mark.parametrize(
    ("name", "most"),
    [("host_ram", "1,000,000"), ("price", "1,000,000"), ("idle_watts", "100,000"), ("tflops", "100,000"),
     ("watts", "100,000")],
)  # fmt: skip
def test_both_ends_of_a_number_are_told(name: str, most: str) -> None:
    with pytest.raises(UserError) as refused:
        split_words([f"--{name}=1e7"])
    assert re.search(rf"\b0(\.01)?\b.*\b{most}\b", refused.value.why)


@pytest.mark.parametrize("name", ["idle_watts", "host_ram"])
def test_minus_zero_is_zero(name: str) -> None:
    options, _rest = split_words([f"--{name}=-0"])
    assert str(getattr(options, name)) == "0.0"


def test_another_trainer_cannot_be_priced() -> None:
    with pytest.raises(UserError, match="--as cannot be 'llamafactory'"):
        split_words(["--as=llamafactory"])


KNOBS = st.sampled_from([f"--{field.name}=" for field in knobs(RunConfig)])


@given(st.lists(st.tuples(KNOBS, st.text(max_size=12)).map("".join)))
def test_the_configs_words_keep_their_order(words: list[str]) -> None:
    assert split_words(words) == (Options(), words)


@given(st.lists(st.text(max_size=12).map(lambda text: f"--x{text}")))
@example(["--xas"])  # a letter from --as, and no knob is as near
def test_other_words_keep_their_order_unless_one_looks_like_a_slip(words: list[str]) -> None:
    try:
        assert split_words(words) == (Options(), words)
    except UserError as refusal:
        names = [word.partition("=")[0][2:].replace("-", "_") for word in words]
        assert refusal.what in [f"there is no --{name}" for name in names]
        assert refusal.hint.startswith("did you mean --")


# --- times --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12h", 12 * HOUR),
        ("12 h", 12 * HOUR),
        ("1 hour", HOUR),
        ("7d", 7 * DAY),
        ("7 days", 7 * DAY),
        (" 7D ", 7 * DAY),
        ("day", DAY),
        ("1.5 days", 1.5 * DAY),
        ("2w", 14 * DAY),
        ("week", 7 * DAY),
        ("1 month", 30 * DAY),
        ("month", 30 * DAY),
        ("3 months", 90 * DAY),
    ],
)
def test_lengths(text: str, seconds: float) -> None:
    assert budget_seconds(text, MONDAY) == seconds


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("sunday 20:00", datetime(2026, 11, 22, 20, 0)),
        ("Sunday 20:00", datetime(2026, 11, 22, 20, 0)),
        ("sun 8:30", datetime(2026, 11, 22, 8, 30)),
        ("sunday", datetime(2026, 11, 22, 23, 59)),
        ("monday 13:00", datetime(2026, 11, 16, 13, 0)),
        ("monday 11:00", datetime(2026, 11, 23, 11, 0)),
        ("2026-12-24 18:00", datetime(2026, 12, 24, 18, 0)),
        ("2026-12-24T18:00", datetime(2026, 12, 24, 18, 0)),
        ("2026-12-24_18:00", datetime(2026, 12, 24, 18, 0)),
        ("2026-11-20_12:00", datetime(2026, 11, 20, 12, 0)),
        ("sunday_20:00", datetime(2026, 11, 22, 20, 0)),
        ("sat  8:30", datetime(2026, 11, 21, 8, 30)),
        ("2026-12-24", datetime(2026, 12, 24, 23, 59)),
        ("2026-11-16", datetime(2026, 11, 16, 23, 59)),
    ],
)
def test_moments(text: str, moment: datetime) -> None:
    assert MONDAY + timedelta(seconds=budget_seconds(text, MONDAY)) == moment


@pytest.mark.parametrize(
    "text",
    ["", "soon", "0d", "-3d", "7", "d7", "2026-11-15", "2026-11-16 11:00", "1999-01-01", "2026-02-30",
     "sunday 25:00", "sunday 20", "sunday 20:00:00:00", "su 20:00", "nan d", "1e12 d", "7 fortnights", "1 2d",
     "sunday -1:00", "2026-12-24T18:00+01:00", "2026-12-24T18", "2026-12-24_", "2026-12-24-18:00",
     "2026-12-24_18:00_", "2026-12-24 18:00 19:00", "2026-12-24x18:00", "sunday 2_0:00", "sunday 8:5"],
)  # fmt: skip
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no time that can be planned for"):
        budget_seconds(text, MONDAY)


@pytest.mark.parametrize("zone", ["+01:00", "+0100", "-05", "Z", " UTC", " CET", ":30+01:00"])
@pytest.mark.parametrize("between", ["_", "T", " "])
def test_a_time_zone_is_refused_by_name(between: str, zone: str) -> None:
    """It would be another moment than the one that is meant."""
    with pytest.raises(UserError, match="no time that can be planned for") as refused:
        budget_seconds(f"2027-01-31{between}20:00{zone}", MONDAY)
    assert "time zone" in refused.value.why and refused.value.exit_code == 2


@given(st.text(max_size=20), st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1)))
def test_whatever_is_written_is_a_positive_time_or_refused(text: str, now: datetime) -> None:
    try:
        seconds = budget_seconds(text, now)
    except UserError as refusal:
        assert "no time" in str(refusal)
    else:
        assert seconds > 0


@given(
    st.sampled_from(["mon", "tue", "wednesday", "thu", "friday", "sat", "sunday"]),
    st.integers(0, 23),
    st.integers(0, 59),
    st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1)),
)
def test_a_weekday_is_the_next_one(day: str, hour: int, minute: int, now: datetime) -> None:
    seconds = budget_seconds(f"{day} {hour}:{minute:02}", now)
    moment = now + timedelta(seconds=seconds)
    assert 0 < seconds <= 7 * DAY
    assert (moment.hour, moment.minute) == (hour, minute)
    assert moment.strftime("%A").lower().startswith(day)


def test_a_decimal_comma_is_answered_with_a_point() -> None:
    """German and Spanish output has commas, so people type them."""
    with pytest.raises(UserError) as refused:
        split_words(["--price=0,35"])
    assert refused.value.hint == "--price=0.35"
    with pytest.raises(UserError) as refused:
        split_words(["--price=a lot"])
    assert refused.value.hint == "onecard plan --help"


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("0.30", 0.3, 0.3), ("3-4", 3.0, 4.0), ("4 - 3", 3.0, 4.0), ("0.3–0.4", 0.3, 0.4), ("1e-1", 0.1, 0.1),
     ("-0", 0.0, 0.0), ("1e-1-2e-1", 0.1, 0.2)],
)  # fmt: skip
def test_a_price_may_be_a_range(text: str, low: float, high: float) -> None:
    prices = split_words([f"--price={text}"])[0].prices(Card("RTX 4070", 12))
    assert (prices.low, prices.high) == (low, high) and str(prices.low) != "-0.0"


@pytest.mark.parametrize("text", ["3-", "-3-4", "3-4-5", "3-x", "0,3-0,4"])
def test_half_a_range_is_no_price(text: str) -> None:
    with pytest.raises(UserError, match=r"--price (takes a number, not|cannot be) "):
        split_words([f"--price={text}"])


@pytest.mark.parametrize("name", ["RTX 4070 Laptop", "NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 3080 Mobile"])
def test_a_laptop_draws_less_beside_its_card(name: str) -> None:
    assert Options().prices(Card(name, 8)).idle_watts == LAPTOP_IDLE_WATTS < IDLE_WATTS
    assert Options().prices(Card("RTX 4070", 12)).idle_watts == IDLE_WATTS
    for watts in (0.0, 60.0):
        assert Options(idle_watts=watts).prices(Card(name, 8)).idle_watts == watts


@pytest.mark.parametrize("one", ["--largest", "--by=7d"])
@pytest.mark.parametrize("other", ["--compare", "--stages"])
def test_questions_about_other_models_and_about_this_one_are_two(one: str, other: str) -> None:
    with pytest.raises(UserError, match="do not go together") as refused:
        split_words([one, other])
    assert refused.value.exit_code == 2
    assert split_words([one])[0] != split_words([other])[0]
