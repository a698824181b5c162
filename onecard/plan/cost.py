"""From seconds a step to days, kilowatt-hours and money.

time     steps × seconds a step + evaluations (forward passes over eval_iters blocks of two splits)
         + checkpoints + the first step's compilation
energy   the card at its share of its power limit, and what the rest of the PC draws
money    kilowatt-hours × price
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from onecard.config import RunConfig
from onecard.hardware.cards import Card
from onecard.plan.speed import StepTime

# A card that trains is near its power limit; matmuls in bf16 with fp32 sums take most of it.
POWER_SHARE = 0.93
# The rest of the PC: processor waiting for the card, board, disks, losses of the supply.
IDLE_WATTS = 80.0
PRICE, CURRENCY = 0.30, "EUR"
DISK_BYTES_PER_S = 8e8
# Cold, the compiler needs about this; later runs find it done.
_COMPILE = 40.0
_COMPILE_PER_KIND = 15.0


@dataclass(frozen=True)
class Cost:
    seconds: float
    training_s: float
    evaluation_s: float
    checkpoint_s: float
    first_step_s: float  # of which compilation
    card_kwh: float | None  # None, and with it the next two: nobody knows what the card draws
    pc_kwh: float | None
    amount: float | None
    currency: str

    @property
    def days(self) -> float:
        return self.seconds / 86400

    def finish(self, now: datetime) -> datetime | None:
        """None beyond what a calendar holds."""
        try:
            return now + timedelta(seconds=self.seconds)
        except OverflowError:
            return None

    def to_json(self, now: datetime) -> dict[str, Any]:
        finish = self.finish(now)
        return {
            "time": {
                "seconds": round(self.seconds, 1),
                "finish": finish.isoformat(timespec="minutes") if finish else None,
                "evaluation_s": round(self.evaluation_s, 1),
                "first_step_s": round(self.first_step_s, 1),
            },
            "energy": {"kwh": rounded(self.pc_kwh, 3), "card_kwh": rounded(self.card_kwh, 3)},
            "cost": {"amount": rounded(self.amount, 2), "currency": self.currency},
        }


def rounded(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None else None


def cost_of(
    config: RunConfig,
    step: StepTime,
    card: Card,
    checkpoint_bytes: int,
    *,
    compiled: bool,
    kinds_of_layers: int = 1,
    idle_watts: float = IDLE_WATTS,
    price: float = PRICE,
    currency: str = CURRENCY,
) -> Cost:
    """The config's whole run."""
    steps = config.max_iters
    training = steps * step.seconds
    evaluations = steps // config.eval_interval + 1
    evaluated = 2 * config.eval_iters * config.batch_size * config.block_size
    evaluation = evaluations * evaluated / step.evaluated_per_s
    saving = evaluations * 3 * checkpoint_bytes / DISK_BYTES_PER_S  # written, read again to be sure, flushed
    first = _COMPILE + _COMPILE_PER_KIND * (kinds_of_layers - 1) if compiled else 5.0
    seconds = training + evaluation + saving + first
    if card.tdp_w is None:
        return Cost(seconds, training, evaluation, saving, first, None, None, None, currency)
    watts = card.tdp_w * POWER_SHARE
    hours = seconds / 3600
    card_kwh = watts * hours / 1000
    pc_kwh = (watts + idle_watts) * hours / 1000
    return Cost(seconds, training, evaluation, saving, first, card_kwh, pc_kwh, pc_kwh * price, currency)
