"""Mistakes: each found where it is, and not claimed where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.hardware.cards import all_cards
from onecard.report.findings import Mistake
from onecard.report.log import Evaluations, Start, Steps
from onecard.report.mistakes.all import mistakes_of
from onecard.report.run_facts import RunFacts, Schedule
from tests.report.made_runs import VOCABULARY, run, small_gpt, table

SHAPE = small_gpt(width=512, layers=8, heads=8)
STEPS = [0, 500, 1000, 2000, 3000, 4000, 5000]
TRAIN = [10.91, 5.74, 4.88, 4.43, 4.28, 4.20, 4.15]
VAL = [10.91, 5.75, 4.90, 4.45, 4.30, 4.22, 4.18]


def card(name: str) -> object:
    return next(each for each in all_cards() if each.name.endswith(name))


def sound(**changes: object) -> RunFacts:
    """A run with nothing wrong in it."""
    facts = table(
        STEPS, TRAIN, VAL, parameters=SHAPE.parameters, shape=SHAPE, tokens_per_step=524_288,
        block_size=1024, batch_size=16, gradient_accumulation_steps=32, vocab_size=VOCABULARY,
        tokenizer="gpt2", last_step=5000, schedule=Schedule("cosine", 5e-4, 5e-5, 250, 5000),
        train_tokens=3_000_000_000, eval_tokens=10_000_000, dropout=0.0, data="FineWeb", source="out-mine",
    )  # fmt: skip
    return replace(facts, **changes)  # type: ignore[arg-type]


def with_log(facts: RunFacts, **changes: object) -> RunFacts:
    return replace(facts, log=replace(facts.log, **changes))  # type: ignore[arg-type]


def found(facts: RunFacts) -> dict[str, Mistake]:
    return {mistake.key: mistake for mistake in mistakes_of(facts)}


def only(facts: RunFacts) -> Mistake:
    (mistake,) = mistakes_of(facts)
    return mistake


def test_a_sound_run_has_none() -> None:
    assert mistakes_of(sound()) == []
    assert mistakes_of(table([], [], [])) == []
    assert mistakes_of(table(STEPS, TRAIN, VAL)) == []


# --- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out-gpt-125m", "gpt2-124M-run3", "gpt2-small", "model_130M"])
def test_a_name_that_speaks_of_another_size(name: str) -> None:
    mistake = only(with_log(sound(), settings={"out_dir": name}))
    assert mistake.key == "size-meant"
    assert "The model has 51.5M parameters" in mistake.text
    assert name in mistake.text


@pytest.mark.parametrize(
    "name",
    [
        "out-fineweb10B",
        "fineweb-edu-10BT",
        "out-100M-tokens",
        "run-7",
        "gpt-50m",
        "124M-data-51M",
        "out-3B_tok",
    ],
)
def test_a_name_that_is_about_data_or_says_the_size(name: str) -> None:
    assert mistakes_of(with_log(sound(), settings={"out_dir": name})) == []
    assert mistakes_of(sound(source=f"/home/me/{name}")) == []


def test_gpt2s_layers_and_heads_with_half_its_width() -> None:
    narrow = small_gpt(width=384)
    mistake = only(sound(shape=narrow, parameters=narrow.parameters))
    assert mistake.key == "size-meant"
    assert "41M" in mistake.text
    assert "124M" in mistake.text
    assert mistake.change == "n_embd = 768   # was 384"
    assert "nats on as many tokens" in mistake.costs
    # The width alone is said, and the parameters fit twelve layers.
    told = with_log(sound(shape=None, parameters=narrow.parameters), settings={"n_embd": 384})
    assert only(told).change == "n_embd = 768   # was 384"
    assert mistakes_of(with_log(sound(shape=None, parameters=20_000_000), settings={"n_embd": 384})) == []


def test_far_too_few_tokens_for_the_size() -> None:
    large = small_gpt(width=1600, layers=48, heads=25)
    facts = sound(shape=large, parameters=large.parameters)
    mistake = only(facts)
    assert mistake.key == "tokens-too-few"
    assert "1.7 each" in mistake.text
    assert mistake.change == f"max_iters = {round(20 * large.parameters / 524_288)}   # was 5000"
    # A model that had learned before is another matter.
    assert mistakes_of(with_log(facts, evaluations=Evaluations(step=[0, 100], val=[3.1, 2.9]))) == []


def test_gpt2s_vocabulary_unpadded() -> None:
    odd = replace(SHAPE, vocab_size=50257)
    mistake = only(sound(shape=odd, vocab_size=50257))
    assert (mistake.key, mistake.change) == ("vocabulary", "vocab_size = 50304   # was 50257")
    pretrained = with_log(sound(shape=odd, vocab_size=50257), settings={"init_from": "gpt2"})
    assert mistakes_of(pretrained) == []


def test_accumulation_left_at_its_default() -> None:
    config = load_config(RunConfig, ["--batch_size=64", "--block_size=256", "--out_dir=out-mine"])
    facts = sound(
        config=config, gradient_accumulation_steps=40, batch_size=64, block_size=256, tokens_per_step=655_360,
        train_tokens=1_003_854, last_step=None,
    )  # fmt: skip
    assert "accumulation" in found(facts)
    assert "1.5 steps read all" in found(facts)["accumulation"].text
    assert "the default, not set" in found(facts)["accumulation"].evidence
    chosen = load_config(
        RunConfig, ["--gradient_accumulation_steps=40", "--batch_size=64", "--block_size=256"]
    )
    assert "accumulation" not in found(replace(facts, config=chosen))


def test_an_mfu_of_an_a100() -> None:
    steps = Steps(step=range(100), mfu=[-1.0] * 5 + [0.115] * 95, loss=[4.0] * 100)
    facts = run(steps, card=card("RTX 4070"))
    mistake = found(facts)["mfu-of-an-a100"]
    assert "it is 62%" in mistake.text
    assert "mfu-of-an-a100" not in found(replace(facts, card=card("A100 80GB SXM")))
    assert "mfu-of-an-a100" not in found(with_log(facts, format="onecard"))


# --- the learning rate --------------------------------------------------------------------------


def test_a_decay_that_is_made_for_another_length() -> None:
    long = Schedule("cosine", 6e-4, 6e-5, 200, 600_000)
    mistake = only(sound(schedule=long))
    assert mistake.key == "horizon-too-long"
    assert mistake.change == "lr_decay_iters = 5000   # was 600000"
    assert "100% of its peak" in mistake.text
    assert "0.05 to 0.2 nats" in mistake.costs
    assert mistakes_of(sound(schedule=replace(long, assumed=True))) == []
    assert mistakes_of(sound(schedule=replace(long, horizon=5200))) == []
    short = only(sound(schedule=Schedule("cosine", 6e-4, 6e-5, 200, 2000)))
    assert (short.key, short.change) == ("horizon-too-short", "lr_decay_iters = 5000   # was 2000")


def test_a_decay_that_the_log_contradicts_is_not_claimed() -> None:
    rates = Evaluations(step=STEPS, train=TRAIN, val=VAL, lr=[0, 5e-4, 5e-4, 4e-4, 2e-4, 1e-4, 6e-5])
    facts = with_log(sound(schedule=Schedule("cosine", 6e-4, 6e-5, 200, 600_000)), evaluations=rates)
    assert mistakes_of(facts) == []


def test_knobs_alone_say_it_too() -> None:
    settings = {"learning_rate": 6e-4, "min_lr": 6e-5, "lr_decay_iters": 600_000, "warmup_iters": 200}
    mistake = only(with_log(sound(schedule=None), settings=settings))
    assert mistake.key == "horizon-too-long"
    assert "lr_decay_iters = 600000" in mistake.evidence


@pytest.mark.parametrize(
    ("peak", "final", "key"),
    [(1e-4, 3e-4, "min-lr-above"), (1e-4, 6e-5, "min-lr-high"), (1e-3, 6e-5, ""), (6e-4, 0.0, "")],
)
def test_the_last_rate(peak: float, final: float, key: str) -> None:
    mistakes = found(sound(schedule=Schedule("cosine", peak, final, 200, 5000)))
    assert list(mistakes) == ([key] if key else [])
    if key:
        assert mistakes[key].change == f"min_lr = {0.1 * peak:g}   # was {final:g}"


@pytest.mark.parametrize(
    ("warmup", "key", "change"),
    [
        (250, "", ""),
        (1000, "", ""),
        (2000, "warmup-long", "warmup_iters = 250   # was 2000"),
        (8000, "warmup-too-long", "warmup_iters = 250   # was 8000"),
        (131_072_000, "warmup-unit", "warmup_iters = 250   # was 131072000"),
    ],
)
def test_the_warm_up(warmup: int, key: str, change: str) -> None:
    mistakes = found(sound(schedule=Schedule("cosine", 6e-4, 6e-5, warmup, 5000)))
    assert list(mistakes) == ([key] if key else [])
    if key:
        assert mistakes[key].change == change


def resumed(before: float, after: float) -> RunFacts:
    first = Steps(step=range(1000), loss=[4.0] * 1000, lr=[6e-4] * 300 + [before] * 700)
    second = Steps(step=range(1000, 2000), loss=[4.0] * 1000, lr=[after] * 1000)
    whole = Steps(step=range(2000), loss=[4.0] * 2000, lr=[*first.lr, *second.lr])
    return run(whole, starts=(Start(first, Evaluations()), Start(second, Evaluations())))


def test_a_rate_raised_by_a_longer_horizon() -> None:
    mistake = found(resumed(6e-5, 3e-4))["rate-raised"]
    assert "rose from 6e-05 to 0.0003" in mistake.text
    assert "step 1,000" in mistake.text
    assert "rate-raised" not in found(resumed(6e-5, 6e-5))
    assert "rate-raised" not in found(resumed(5.9e-4, 6e-4))


# --- the data -----------------------------------------------------------------------------------


def test_too_little_text_to_validate_on() -> None:
    mistake = only(sound(eval_tokens=5 * 1024))
    assert mistake.key == "validation-small"
    assert "5 sequences only" in mistake.text
    assert "± 0.34 nats" in mistake.text
    assert mistakes_of(sound(eval_tokens=None)) == []


def test_validation_that_is_the_training_text() -> None:
    exact = [10.9112, 5.7413, 4.8821, 4.4312, 4.2811, 4.2043, 4.1522]
    same = with_log(sound(), evaluations=Evaluations(step=STEPS, train=exact, val=exact))
    assert only(same).key == "validation-is-training"
    assert "5000: 4.1522/4.1522" in only(same).evidence
    # With two digits six of them may be equal by chance.
    near = with_log(sound(), evaluations=Evaluations(step=STEPS, train=TRAIN, val=TRAIN))
    assert mistakes_of(near) == []


def test_text_that_is_read_too_often() -> None:
    mistake = only(sound(train_tokens=100_000_000))
    assert mistake.key == "data-repeated"
    assert "26 times" in mistake.text
    assert mistake.change == "max_iters = 763   # was 5000"
    assert mistakes_of(sound(train_tokens=700_000_000)) == []


def test_dropout_where_every_text_is_new() -> None:
    mistake = only(sound(dropout=0.1))
    assert (mistake.key, mistake.change) == ("dropout", "dropout = 0   # was 0.1")
    assert "0.68 of its speed" in mistake.costs
    assert only(sound(dropout=0.1, train_tokens=None)).key == "dropout"  # FineWeb is larger than the run
    assert mistakes_of(sound(dropout=0.1, train_tokens=1_500_000_000)) == []
    assert mistakes_of(sound(dropout=0.1, train_tokens=None, data=None)) == []


def test_memorising_that_is_taken_for_progress() -> None:
    train = [4.2, 2.2, 1.6, 1.2, 0.9, 0.75, 0.62]
    val = [4.2, 2.4, 1.9, 1.8, 2.2, 2.9, 3.6]
    facts = table(STEPS, train, val, vocab_size=65, last_step=5000)
    mistake = only(facts)
    assert mistake.key == "memorised"
    assert "0.62 is no progress" in mistake.text
    assert mistake.change == "max_iters = 2000   # was 5000"
    assert "best val was 1.800 at step 2,000" in mistake.evidence
    # One line of it is enough: 0.67 on the training text and 3.9 on other.
    assert only(table([5000], [0.67], [3.90])).key == "memorised"


def test_what_costs_most_comes_first() -> None:
    facts = sound(dropout=0.1, schedule=Schedule("cosine", 6e-4, 6e-5, 200, 600_000), eval_tokens=5 * 1024)
    assert [mistake.key for mistake in mistakes_of(facts)] == [
        "horizon-too-long",
        "dropout",
        "validation-small",
    ]
