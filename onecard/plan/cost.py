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

from onecard.config.run import RunConfig
from onecard.hardware.cards import Card, read_words
from onecard.plan.speed import StepTime

# A card that trains is near its power limit; matmuls in bf16 with fp32 sums take most of it.
POWER_SHARE = 0.93
# The rest of the PC: processor waiting for the card, board, disks, losses of the supply.
IDLE_WATTS = 80.0
# Of a laptop: a frugal processor, one board, and a screen that is dimmed or off while nobody looks.
LAPTOP_IDLE_WATTS = 25.0
PRICE, CURRENCY = 0.30, "EUR"
DISK_BYTES_PER_S = 8e8
CHECKPOINT_PASSES = 3  # ours is written, flushed, and read again to be sure
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

    @property
    def evaluation_share(self) -> float:
        return self.evaluation_s / self.seconds

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


def usual_idle_watts(card: Card) -> float:
    """What the rest of the PC draws: a card whose name says laptop is in one."""
    return LAPTOP_IDLE_WATTS if "laptop" in read_words(card.name).words else IDLE_WATTS


def evaluations_of(config: RunConfig) -> int:
    """One before the first step and one every eval_interval, as nanoGPT does it too."""
    return config.max_iters // config.eval_interval + 1


def evaluation_seconds(config: RunConfig, step: StepTime) -> float:
    """One evaluation: eval_iters batches of both splits, forward alone."""
    return 2 * config.eval_iters * config.batch_size * config.block_size / step.evaluated_per_s


def first_step_seconds(compiled: bool, kinds_of_layers: int = 1) -> float:
    return _COMPILE + _COMPILE_PER_KIND * (kinds_of_layers - 1) if compiled else 5.0


def steps_within(
    seconds: float,
    config: RunConfig,
    step: StepTime,
    checkpoint_bytes: int,
    *,
    compiled: bool,
    kinds_of_layers: int = 1,
) -> int:
    """How many steps such a run takes in a time that evaluations and checkpoints are part of.

    What cost_of adds up, the other way round.
    """
    each = evaluation_seconds(config, step) + CHECKPOINT_PASSES * checkpoint_bytes / DISK_BYTES_PER_S
    left = seconds - first_step_seconds(compiled, kinds_of_layers) - each
    return max(0, int(left / (step.seconds + each / config.eval_interval)))


def cost_of(
    config: RunConfig,
    step: StepTime,
    card: Card,
    checkpoint_bytes: int,
    *,
    compiled: bool,
    kinds_of_layers: int = 1,
    checkpoint_passes: int = CHECKPOINT_PASSES,
    idle_watts: float = IDLE_WATTS,
    price: float = PRICE,
    currency: str = CURRENCY,
) -> Cost:
    """The config's whole run."""
    training = config.max_iters * step.seconds
    evaluations = evaluations_of(config)
    evaluation = evaluations * evaluation_seconds(config, step)
    saving = evaluations * checkpoint_passes * checkpoint_bytes / DISK_BYTES_PER_S
    first = first_step_seconds(compiled, kinds_of_layers)
    seconds = training + evaluation + saving + first
    if card.tdp_w is None:
        return Cost(seconds, training, evaluation, saving, first, None, None, None, currency)
    watts = card.tdp_w * POWER_SHARE
    hours = seconds / 3600
    card_kwh = watts * hours / 1000
    pc_kwh = (watts + idle_watts) * hours / 1000
    return Cost(seconds, training, evaluation, saving, first, card_kwh, pc_kwh, pc_kwh * price, currency)
