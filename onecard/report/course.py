"""What a run has taken so far and what it takes to its end: time, energy, money; and how fast it goes."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from onecard.hardware.cards import Card
from onecard.plan.cost import POWER_SHARE, rounded
from onecard.plan.prices import CURRENCY, PRICE, Prices, usual_idle_watts
from onecard.report.run_facts import RunFacts

_PACE_LINES = 400  # of the latest, where nothing better is known of the pace


@dataclass(frozen=True)
class Amount:
    """Of one thing; None is not known."""

    so_far: float | None = None
    left: float | None = None

    @property
    def whole(self) -> float | None:
        return None if self.so_far is None or self.left is None else self.so_far + self.left

    def times(self, factor: float | None) -> Amount:
        return Amount(
            *(None if v is None or factor is None else v * factor for v in (self.so_far, self.left))
        )


@dataclass(frozen=True)
class Money:
    """What a kWh costs, as the person says it; the PC's watts are the card's usual ones unless said."""

    low: float = PRICE
    high: float = PRICE
    currency: str = CURRENCY
    idle_watts: float | None = None

    def prices(self, card: Card) -> Prices:
        idle = usual_idle_watts(card) if self.idle_watts is None else self.idle_watts
        return Prices(self.low, self.high, self.currency, idle)


@dataclass(frozen=True)
class Pace:
    """How fast the run goes, as eta has it."""

    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None  # the true one, of the card's own peak
    peak_flops: float | None = None
    log_mfu: float | None = None
    mfu_explanation: str = ""
    evaluation_s: float = 0.0
    left_s: float | None = None
    predicted: bool = False  # by plan: the log has no times


@dataclass(frozen=True)
class Course:
    """The run in seconds, kWh and money."""

    pace: Pace = field(default_factory=Pace)
    seconds: Amount = field(default_factory=Amount)
    card_kwh: Amount = field(default_factory=Amount)
    pc_kwh: Amount = field(default_factory=Amount)
    cost: Amount = field(default_factory=Amount)
    cost_high: Amount = field(default_factory=Amount)
    currency: str = CURRENCY
    idle_watts: float = 0.0

    @property
    def tokens_per_kwh(self) -> float | None:
        """Of the whole PC."""
        per_s, seconds, kwh = self.pace.tokens_per_s, self.seconds.so_far, self.pc_kwh.so_far
        return per_s * seconds / kwh if per_s and seconds and kwh else None

    def to_json(self) -> dict[str, Any]:
        """Shares are fractions; nothing is null but what is not known."""
        return {
            "speed": {
                "tokens_per_s": rounded(self.pace.tokens_per_s, 1), "mfu": rounded(self.pace.mfu, 4),
                "step_s": rounded(self.pace.step_s, 5), "log_mfu": rounded(self.pace.log_mfu, 4),
                "log_mfu_explanation": self.pace.mfu_explanation or None,
            },
            "time": _amounts(self.seconds, "seconds", 1),
            "energy": {**_amounts(self.pc_kwh, "kwh", 3), "card_kwh": rounded(self.card_kwh.whole, 3)},
            "cost": {
                **_amounts(self.cost, "amount", 2), "currency": self.currency,
                **({"amount_high": rounded(self.cost_high.whole, 2)} if self.cost_high != self.cost else {}),
            },
        }  # fmt: skip


def _amounts(amount: Amount, unit: str, digits: int) -> dict[str, float | None]:
    """The whole first, under the name that plan has for it."""
    return {
        unit: rounded(amount.whole, digits),
        f"{unit}_so_far": rounded(amount.so_far, digits),
        f"{unit}_left": rounded(amount.left, digits),
    }


def course_of(facts: RunFacts, pace: Pace, money: Money) -> Course:
    so_far = facts.log.facts.get("train_runtime")
    if not isinstance(so_far, int | float) or not 0 < so_far < math.inf:
        so_far = None
        if pace.step_s is not None:
            so_far = facts.step * pace.step_s + len(facts.log.evaluations) * pace.evaluation_s
    left = pace.left_s
    if facts.last_step is not None and facts.step >= facts.last_step:
        left = 0.0
    if left is None and pace.step_s is not None and facts.last_step is not None:
        left = max(0, facts.last_step - facts.step) * pace.step_s
    seconds = Amount(so_far, left)
    card = facts.card
    if card is None or card.tdp_w is None:
        return Course(pace, seconds, currency=money.currency)
    prices = money.prices(card)
    watts = card.tdp_w * POWER_SHARE * facts.cards
    pc = seconds.times((watts + prices.idle_watts) / 3.6e6)
    return Course(
        pace, seconds, seconds.times(watts / 3.6e6), pc, pc.times(prices.low), pc.times(prices.high),
        prices.currency, prices.idle_watts,
    )  # fmt: skip


def pace_by_lines(facts: RunFacts) -> Pace:
    """What the lines alone say, where eta has no answer: the median of the latest."""
    steps = facts.log.last.steps
    times = [ms / 1000 for _step, ms in steps.pairs("ms")[1:] if 0 < ms < math.inf][-_PACE_LINES:]
    speeds = [speed for _step, speed in steps.pairs("tokens_per_s") if 0 < speed < math.inf][-_PACE_LINES:]
    step_s = statistics.median(times) if times else None
    speed = statistics.median(speeds) if speeds else None
    if speed is None and step_s and facts.tokens_per_step:
        speed = facts.tokens_per_step / step_s
    if step_s is None and speed and facts.tokens_per_step:
        step_s = facts.tokens_per_step / speed
    mfu = peak = None
    if facts.card is not None and facts.shape is not None and speed:
        dtype = facts.dtype if facts.dtype in ("float16", "float32") else "bfloat16"
        if tflops := facts.card.peak_tflops(dtype):
            peak = tflops * 1e12
            mfu = speed * facts.shape.flops_per_token / (peak * facts.cards)
    return Pace(step_s, speed, mfu, peak)
