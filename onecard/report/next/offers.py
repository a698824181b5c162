"""What plan says of a run that might come next: whether it fits the card, how long it takes, what that costs.

A next step is shown only with what this module has checked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from dataclasses import dataclass
from datetime import datetime

from onecard.arch.shapes import GPT2Shape
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.plan.answer import Answer, answer, question_of
from onecard.plan.cost import POWER_SHARE, Cost
from onecard.plan.largest import Candidate, best_for_time
from onecard.plan.machine import USUAL_HOST_RAM, Target, find_target
from onecard.plan.options import Options
from onecard.plan.others.as_trainer import priced
from onecard.report.eta.predicted import predicted
from onecard.report.findings import ForecastPoint
from onecard.report.log import Steps
from onecard.report.run_facts import RunFacts

_WARM_UP = 5  # steps of a process that compile and tune
_SHORTEST, _LONGEST = 0.2, 1e5  # hours that another model is looked for
_SLOWEST = 1e6  # seconds a step: more is no time
_BATCH_SIZES = (4, 8, 16, 32)
_FASTER = 1.03  # times: less is no reason to change a batch size
_NAMES = {"FineWeb": "fineweb", "FineWeb-Edu": "fineweb-edu", "OpenWebText": "openwebtext",
          "ClimbMix": "climbmix"}  # fmt: skip


@dataclass(frozen=True)
class Price:
    """What hours of a card come to; None is not known."""

    hours: float | None = None
    kwh: float | None = None
    amount: float | None = None


@dataclass(frozen=True)
class SameHours:
    """The best model onecard knows for the hours a run takes on this card."""

    point: ForecastPoint
    command: str
    parameters: int
    price: Price
    unit: str  # of its loss: scaling.NATS or scaling.BITS


def config_of(facts: RunFacts) -> RunConfig | None:
    """The run as a config; None where too little of it is known."""
    if facts.config is not None:
        return facts.config
    shape = facts.shape
    if shape is None or not facts.tokens_per_step:
        return None
    batch = facts.batch_size or 16
    micros = facts.gradient_accumulation_steps or max(1, facts.tokens_per_step // (batch * shape.block_size))
    said = {
        "arch": shape.arch.partition("-")[0], "n_layer": shape.n_layer, "n_head": shape.n_head,
        "n_embd": shape.n_embd, "block_size": shape.block_size, "vocab_size": shape.vocab_size,
        "batch_size": batch, "gradient_accumulation_steps": micros, "bias": getattr(shape, "bias", False),
        "max_iters": facts.last_step or max(facts.step, 1), "dataset": dataset_of(facts),
    }  # fmt: skip
    if facts.shape is not None and facts.shape.arch == "nanochat-2025":
        said["generation"] = 2025
    if facts.dropout:
        said["dropout"] = facts.dropout
    try:
        return load_config(RunConfig, [f"--{name}={value}" for name, value in said.items()])
    except UserError:
        return None


def dataset_of(facts: RunFacts) -> str:
    """A folder below data/."""
    if facts.config is not None and facts.config.is_set("dataset"):
        return facts.config.dataset
    return _NAMES.get(facts.data or "", "fineweb")


def target_of(config: RunConfig, card: Card) -> Target | None:
    """The card in a PC that people have."""
    try:
        return find_target(config, card.name, USUAL_HOST_RAM)
    except UserError:
        return None


def price_of(cost: Cost) -> Price:
    return Price(cost.seconds / 3600, cost.pc_kwh, cost.amount)


def price_of_hours(hours: float, card: Card | None, options: Options, cards: int = 1) -> Price:
    if card is None or card.tdp_w is None:
        return Price(hours)
    prices = options.prices(card)
    kwh = (cards * card.tdp_w * POWER_SHARE + prices.idle_watts) * hours / 1000
    return Price(hours, kwh, kwh * prices.low)


def measured_step_seconds(facts: RunFacts) -> float | None:
    """By the log's own times, else its speeds, else the MFU that is said of it."""
    steps = facts.log.last.steps
    times = [ms for _step, ms in steps.pairs("ms")[_WARM_UP:]]
    speeds = [speed for _step, speed in steps.pairs("tokens_per_s")[_WARM_UP:] if speed > 0]
    if times:
        seconds = statistics.median(times) / 1000
    elif speeds and facts.tokens_per_step:
        seconds = facts.tokens_per_step / statistics.median(speeds)
    elif isinstance(facts.log.facts.get("mfu"), tuple) and (pace := predicted(facts, Steps())) is not None:
        seconds = pace.step_ms.mid / 1000 if not pace.program else math.inf
    else:
        return None
    return seconds if 0 < seconds < _SLOWEST else None


def by_nanogpt(config: RunConfig, card: Card, options: Options) -> tuple[RunConfig, Price] | None:
    """The config in its own batch size, or where another is faster on this card in that, with the same tokens
    a step; None where nanoGPT runs out of memory in every one, or nobody knows how fast it is."""
    found = nanogpt_splits(config, card, options)
    if not found:
        return None
    best = min(found, key=lambda one: one[1].hours or 0.0)
    own = next((one for one in found if one[0].batch_size == config.batch_size), best)
    return best if (own[1].hours or 0.0) > _FASTER * (best[1].hours or 0.0) else own


def nanogpt_splits(config: RunConfig, card: Card, options: Options) -> list[tuple[RunConfig, Price]]:
    """Every batch size with which compiled nanoGPT fits the card."""
    if config.arch != "gpt2" or config.by_muon or (target := target_of(config, card)) is None:
        return []
    sequences = config.sequences_per_step
    sizes = {n for n in (config.batch_size, *_BATCH_SIZES) if n <= sequences and sequences % n == 0}
    found = []
    for size in sorted(sizes):
        split = dataclasses.replace(
            config, batch_size=size, gradient_accumulation_steps=sequences // size, total_batch_size=None
        )
        question = question_of(split, target)
        if not isinstance(question.shape, GPT2Shape):
            return []
        offer = priced(question, target, options, compiled=True)
        if offer.cost is None:
            return []
        # Where PyTorch has to give memory back and take it anew nothing is left for a desktop.
        if offer.fits and offer.need <= target.allowed:
            found.append((split, price_of(offer.cost)))
        elif size > config.batch_size:
            break
    return found


def by_onecard(config: RunConfig, card: Card, options: Options) -> tuple[Answer, Price] | None:
    """None where plan finds no setting that fits, or nobody knows how fast it is."""
    target = target_of(config, card)
    if target is None:
        return None
    found = answer(config, target, options, datetime.now())
    cost = found.cost(found.choice) if found.choice is not None else None
    return (found, price_of(cost)) if found.fits and cost is not None else None


def hours_of(facts: RunFacts, options: Options) -> float | None:
    """What the whole run takes: by its log, else by plan's figure for nanoGPT."""
    config = config_of(facts)
    steps = facts.last_step or facts.step
    seconds = measured_step_seconds(facts)
    if seconds is not None and steps:
        return seconds * steps / 3600
    if config is None or facts.card is None or facts.cards > 1:
        return None
    offer = by_nanogpt(dataclasses.replace(config, max_iters=max(steps, 1)), facts.card, options)
    return offer[1].hours if offer is not None else None


def same_hours_here(facts: RunFacts, options: Options | None = None) -> SameHours | None:
    """A model of the best size for the hours of this run on this card, of the architecture that needs the
    fewest tokens. None where the card or the hours are not known, or nothing compares."""
    options = options or Options()
    hours = hours_of(facts, options)
    if facts.card is None or facts.cards > 1 or hours is None or not _SHORTEST < hours < _LONGEST:
        return None
    if facts.tokenizer not in (None, "gpt2"):
        return None
    block = facts.block_size or (facts.shape.block_size if facts.shape is not None else 1024)
    micros = max(1, (facts.tokens_per_step or 2**19) // (16 * block))
    words = ("--arch=nanochat", "--vocab_size=50304", f"--dataset={dataset_of(facts)}")
    batch = (f"--block_size={block}", "--batch_size=16", f"--gradient_accumulation_steps={micros}")
    best = _best_within((*words, *batch, "--max_iters=6000"), facts.card, round(hours, 2), facts.train_tokens)
    if best is None:
        return None
    flags = " ".join([*words, best.flags, "--out_dir=out-next"])
    config = best.choice.question.config
    point = ForecastPoint(
        config.max_iters, round(best.tokens), best.loss.middle, best.loss.low, best.loss.high, "same hours"
    )
    price = price_of_hours(hours, facts.card, options)
    return SameHours(
        point, f"onecard train {flags}", best.choice.question.shape.parameters, price, best.loss.unit
    )


@functools.lru_cache(maxsize=4)
def _best_within(
    words: tuple[str, ...], card: Card, hours: float, unique_tokens: int | None
) -> Candidate | None:
    """Of models that the law cannot tell apart, the one whose range ends lowest."""
    try:
        config = load_config(RunConfig, words)
    except UserError:
        return None
    target = target_of(config, card)
    if target is None:
        return None
    found = best_for_time(answer(config, target, Options(), datetime.now()), hours * 3600, unique_tokens)
    tied = [one for one in found if one.not_distinguishable] or found[:1]
    return min(tied, key=lambda one: one.loss.high, default=None)
