"""The time of a step where the log does not show it yet: plan's figure for its trainer, and the least that
the card allows.

The floor is arithmetic: the FLOPs of a step over what the card can do at best. No claim below it can be true.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, GPT2Shape, Shape
from onecard.config.resolve import setting_of
from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.hardware.measured import load_measured
from onecard.language import _
from onecard.plan.others.nanogpt_speed import nanogpt_step_time
from onecard.plan.ranges import Spread, spread_of
from onecard.plan.rates import Rates, rates_of
from onecard.plan.speed import StepTime, step_time
from onecard.report.eta.mfu import A100_FLOPS, peak_of
from onecard.report.eta.pace import Range
from onecard.report.gathering.known import HUGGINGFACE, NANOCHATS, ONECARD
from onecard.report.log import Steps
from onecard.report.run_facts import RunFacts

# Shares that the figure may be off: of a card that it was fitted to, of any other, and of a trainer that plan
# has no figure of its own for.
_MORE_CARDS = 0.15  # that the exchange of gradients may take
_LAYERS = 12  # of a GPT of which only the parameters are known
_GPT2_BATCH = 12


@dataclass(frozen=True)
class Prediction:
    step_ms: Range
    floor_ms: float  # no step is shorter
    tokens_per_s: float
    flops_per_s: float  # of all cards
    first_ms: float | None  # the first iteration's own time
    program: str  # whose figure of plan's it is; empty: it follows from the MFU that is said
    notes: tuple[str, ...] = ()


def predicted(facts: RunFacts, seen: Steps) -> Prediction | None:
    """None where the model, its batch or the card are not known. `seen`: the first step, if there is one."""
    notes: list[str] = []
    shape = facts.shape or _shape_of(facts.parameters, facts.block_size, notes)
    peak, _note = peak_of(facts)
    card, tokens = facts.card, facts.tokens_per_step
    if shape is None or card is None or peak is None or not tokens:
        return None
    flops = tokens * (facts.flops_per_token or shape.flops_per_token)
    floor_ms = 1000 * flops / (peak * facts.cards)
    step_ms = _by_stated_mfu(facts, flops, floor_ms)
    program = "" if step_ms is not None else _program(facts, shape)
    if step_ms is None:
        step_ms = _by_plan(facts, shape, card, floor_ms, notes)
    if step_ms is None:
        return None
    first_ms = seen.ms[0] if len(seen) else None
    if first_ms is not None and first_ms < step_ms.high:
        # A step takes no longer than the first one, with all that is in it besides.
        most = max(first_ms, floor_ms)
        step_ms = Range(min(step_ms.mid, most), min(step_ms.low, most), most)
        if first_ms < floor_ms:
            notes.append(
                _(
                    "the first iteration took less than this card can: is it another card, several "
                    "(--gpus N), or the config of another run?"
                )
            )
    seconds = step_ms.mid / 1000
    return Prediction(step_ms, floor_ms, tokens / seconds, flops / seconds, first_ms, program, tuple(notes))


def _by_stated_mfu(facts: RunFacts, flops: float, floor_ms: float) -> Range | None:
    """By nanoGPT's MFU as people quote it ("11-12%"); None where there is none that this card can have."""
    stated = facts.log.facts.get("mfu")
    if facts.log.format in (*NANOCHATS, ONECARD, HUGGINGFACE) or not isinstance(stated, tuple):
        return None
    low, high = stated
    if not 0 < low <= high:
        return None
    slow, fast = (1000 * flops / (share * A100_FLOPS * facts.cards) for share in (low, high))
    if fast < floor_ms:
        return None
    return Range((slow + fast) / 2, min(fast, 0.98 * (slow + fast) / 2), max(slow, 1.02 * (slow + fast) / 2))


def _by_plan(facts: RunFacts, shape: Shape, card: Card, floor_ms: float, notes: list[str]) -> Range | None:
    found = _step_time(facts, shape, card, notes)
    if found is None or facts.tokens_per_step is None:
        return None
    step, spread = found
    share = 1000 * facts.tokens_per_step / (step.tokens * facts.cards)
    mid = max(step.seconds * share, floor_ms)
    low, high = (seconds * share for seconds in spread.seconds(step.seconds))
    if facts.cards > 1:
        high *= 1 + _MORE_CARDS
    if facts.compiled is None and (eager := _eager(facts, shape, card)):
        high = max(high, mid * eager / step.seconds)
    return Range(mid, max(low, floor_ms), max(high, mid))


def _program(facts: RunFacts, shape: Shape) -> str:
    """Whose trainer plan's figure is of."""
    return "nanoGPT" if isinstance(shape, GPT2Shape) and facts.log.format != ONECARD else "onecard"


def _shape_of(parameters: int | None, block_size: int | None, notes: list[str]) -> GPT2Shape | None:
    """A GPT of twelve layers with about so many parameters: FLOPs hardly depend on how they lie."""
    if parameters is None:
        return None
    block = block_size or 1024
    shapes = (
        GPT2Shape(_LAYERS, width // 64, width, GPT2_PADDED_VOCABULARY, block, False)
        for width in range(64, 8193, 64)
    )
    shape = min(shapes, key=lambda shape: abs(shape.parameters - parameters))
    if abs(shape.parameters / parameters - 1) > 0.25:
        return None
    text = _(
        "the model's sizes are not said: {n:,} layers of width {width:,} with {vocabulary:,} tokens, which "
        "have {millions:.0f}M parameters, are taken"
    )
    notes.append(
        text.format(
            n=_LAYERS, width=shape.n_embd, vocabulary=shape.vocab_size, millions=shape.parameters / 1e6
        )
    )
    return shape


def _step_time(facts: RunFacts, shape: Shape, card: Card, notes: list[str]) -> tuple[StepTime, Spread] | None:
    """A step's time by plan on one card, and how far off it may be."""
    rates, dtype = _rates(facts, card)
    if rates is None:
        return None
    dropout = facts.dropout or 0.0
    assert facts.tokens_per_step is not None
    sequences = max(1, facts.tokens_per_step // shape.block_size)
    batch = min(facts.batch_size or _GPT2_BATCH, sequences)
    if _program(facts, shape) == "nanoGPT" and isinstance(shape, GPT2Shape):
        step = nanogpt_step_time(
            shape, batch, sequences, rates, compiled=facts.compiled is not False, dtype=dtype,
            dropout=dropout,
        )  # fmt: skip
        engine = "nanogpt" if facts.log.format != HUGGINGFACE else "other"
        return step, spread_of(step, shape, batch, calibrated=rates.calibrated, engine=engine)
    setting = Setting(batch, batch * shape.block_size)
    if facts.config is not None:
        setting = setting_of(facts.config, shape)
    by_muon = facts.optimizer == "muon"
    try:
        step = step_time(shape, setting, dtype, rates, sequences, by_muon=by_muon, dropout=dropout)
    except (UserError, ArithmeticError, KeyError):
        return None
    engine = "onecard"
    if facts.log.format in NANOCHATS:
        notes.append(
            _("plan has no figure for nanochat's own trainer: onecard's for the same model is taken")
        )
        engine = "other"
    return step, spread_of(step, shape, setting.micro_batch, calibrated=rates.calibrated, engine=engine)


def _rates(facts: RunFacts, card: Card) -> tuple[Rates | None, str]:
    dtype = facts.dtype or "bfloat16"
    if dtype == "bfloat16" and card.bf16 is None:
        dtype = "float16"
    return rates_of(card, dtype, load_measured(card.name, card.memory_gb)), dtype


def _eager(facts: RunFacts, shape: Shape, card: Card) -> float | None:
    """Seconds of a step of nanoGPT without the compiler."""
    rates, dtype = _rates(facts, card)
    if rates is None or not isinstance(shape, GPT2Shape) or facts.log.format == ONECARD:
        return None
    assert facts.tokens_per_step is not None
    sequences = max(1, facts.tokens_per_step // shape.block_size)
    batch = min(facts.batch_size or _GPT2_BATCH, sequences)
    return nanogpt_step_time(shape, batch, sequences, rates, compiled=False, dtype=dtype).seconds
