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
from onecard.hardware.cards import Card
from onecard.plan.prices import Prices
from onecard.plan.speed import StepTime

# A card that trains is near its power limit; matmuls in bf16 with fp32 sums take most of it.
POWER_SHARE = 0.93
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
    amount_high: float | None  # at the higher price; the same where one price is given
    currency: str

    @property
    def days(self) -> float:
        return self.seconds / 86400

    @property
    def evaluation_share(self) -> float:
        return self.evaluation_s / self.seconds

    def finish(self, now: datetime) -> datetime | None:
        """When it is done; None beyond what a calendar holds."""
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
            "cost": {
                "amount": rounded(self.amount, 2), "currency": self.currency,
                **({"amount_high": rounded(self.amount_high, 2)} if self.amount_high != self.amount else {}),
            },
        }  # fmt: skip


def rounded(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None else None


def evaluations_of(config: RunConfig) -> int:
    """One before the first step and one every eval_interval, as nanoGPT does it too."""
    return config.max_iters // config.eval_interval + 1


def evaluation_seconds(config: RunConfig, step: StepTime) -> float:
    """One evaluation: eval_iters batches of both splits, forward alone."""
    return 2 * config.eval_iters * config.batch_size * config.block_size / step.evaluated_per_s


@dataclass(frozen=True)
class Training:
    """A run as its time is counted: the config's steps at this speed, with evaluations and checkpoints."""

    config: RunConfig
    step: StepTime
    checkpoint_bytes: int
    checkpoint_passes: int = CHECKPOINT_PASSES
    compiled: bool = True
    kinds_of_layers: int = 1

    @property
    def first_step_s(self) -> float:
        return _COMPILE + _COMPILE_PER_KIND * (self.kinds_of_layers - 1) if self.compiled else 5.0

    @property
    def saving_s(self) -> float:
        """Seconds to write one checkpoint."""
        return self.checkpoint_passes * self.checkpoint_bytes / DISK_BYTES_PER_S


def steps_within(seconds: float, run: Training) -> int:
    """Steps of such a run in a time that evaluations and checkpoints are part of."""
    each = evaluation_seconds(run.config, run.step) + run.saving_s
    left = seconds - run.first_step_s - each
    return max(0, int(left / (run.step.seconds + each / run.config.eval_interval)))


def cost_of(run: Training, card: Card, prices: Prices) -> Cost:
    """The config's whole run."""
    training, evaluations = run.config.max_iters * run.step.seconds, evaluations_of(run.config)
    evaluation = evaluations * evaluation_seconds(run.config, run.step)
    saving = evaluations * run.saving_s
    seconds = training + evaluation + saving + run.first_step_s
    times = (seconds, training, evaluation, saving, run.first_step_s)
    if card.tdp_w is None:
        return Cost(*times, None, None, None, None, prices.currency)
    watts, hours = card.tdp_w * POWER_SHARE, seconds / 3600
    card_kwh, pc_kwh = watts * hours / 1000, (watts + prices.idle_watts) * hours / 1000
    return Cost(*times, card_kwh, pc_kwh, pc_kwh * prices.low, pc_kwh * prices.high, prices.currency)
