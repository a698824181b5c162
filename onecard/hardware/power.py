"""The power limit at which a card does the most work for a joule.

The limit is the user's to set: it needs rights that onecard does not ask for, and it concerns everything else
on the card. So the walk through the limits says which command to run, waits until the driver reports the new
limit, and measures. Nothing here changes a setting.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from onecard.errors import UserError
from onecard.hardware.measured import Load
from onecard.language import _

MEASURE_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
_LOOK_EVERY_S = 0.5
# nvidia-smi takes whole watts or hundredths; drivers round.
_SAME_LIMIT_W = 0.6

Ended = Literal["done", "interrupted", "timed out"]


class PowerSensors(Protocol):
    """What the walk needs to see (onecard/hardware/sensors.py)."""

    def read(self) -> Load: ...
    def power_limit_w(self) -> float | None: ...
    def allowed_limits_w(self) -> tuple[float, float] | None: ...
    def index(self) -> int | None: ...


@dataclass(frozen=True)
class PowerPoint:
    """The card under a steady load at one limit."""

    limit_w: float
    tflops: float
    power_w: float
    clock_mhz: float | None = None
    temperature_c: float | None = None

    @property
    def tflops_per_watt(self) -> float:
        """TFLOPS a watt are 1e12 operations a joule: the work that a unit of energy buys."""
        return self.tflops / self.power_w


@dataclass(frozen=True)
class PowerSweep:
    points: tuple[PowerPoint, ...]
    original_w: float
    current_w: float | None  # at the end
    restore_command: str
    ended: Ended = "done"

    @property
    def best(self) -> PowerPoint | None:
        return max(self.points, key=lambda point: point.tflops_per_watt, default=None)

    @property
    def to_restore(self) -> bool:
        return self.current_w is None or abs(self.current_w - self.original_w) > _SAME_LIMIT_W


def parse_limits(text: str) -> list[float]:
    """'200,170,140' in the order given."""
    try:
        limits = [float(word.strip().lower().removesuffix("w")) for word in text.split(",") if word.strip()]
        if not limits or not all(0 < limit < math.inf for limit in limits):
            raise ValueError
    except ValueError:
        raise UserError(
            _("'{text}' is not a list of power limits").format(text=text),
            why=_("it takes watts, separated by commas"),
            hint="onecard bench --power-limits 200,170,140",
        ) from None
    return list(dict.fromkeys(limits))


def limit_command(limit_w: float, index: int | None, platform: str = sys.platform) -> str:
    """What the user runs. On Windows it wants an administrator's terminal instead of sudo."""
    sudo = "" if platform == "win32" else "sudo "
    card = "" if index is None else f"-i {index} "
    return f"{sudo}nvidia-smi {card}-pl {limit_w:g}"


def sweep(
    limits: Sequence[float],
    sensors: PowerSensors | None,
    measure: Callable[[float], tuple[float, Load]],
    *,
    say: Callable[[str], None],
    patience: float = PATIENCE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> PowerSweep:
    """Walk through the limits as the user sets them. Ctrl-C and a long wait end it with what there is."""
    original = sensors.power_limit_w() if sensors is not None else None
    if sensors is None or original is None or sensors.read().power_w is None:
        raise UserError(
            _("power limits cannot be compared here"),
            why=_("the driver's library (NVML) does not report this card's power and its limit"),
            hint=_("nvidia-smi -q -d POWER   must show both; some laptops and virtual machines hide them"),
            exit_code=1,
        )
    _check_allowed(limits, sensors)
    index = sensors.index()
    points: list[PowerPoint] = []
    ended: Ended = "done"
    try:
        for limit in limits:
            if not _wait_for(limit, sensors, limit_command(limit, index), say, patience, sleep, clock):
                late = _("the limit did not become {limit:g} W within {patience:.0f} s")
                say(late.format(limit=limit, patience=patience))
                ended = "timed out"
                break
            say(_("measuring at {limit:g} W").format(limit=limit))
            tflops, load = measure(MEASURE_SECONDS)
            if load.power_w is None:
                raise UserError(
                    _("the driver stopped reporting the card's power while it was measured"), exit_code=1
                )
            points.append(PowerPoint(limit, tflops, load.power_w, load.clock_mhz, load.temperature_c))
    except KeyboardInterrupt:
        ended = "interrupted"
    restore = limit_command(original, index)
    return PowerSweep(tuple(points), original, sensors.power_limit_w(), restore, ended)


def _check_allowed(limits: Sequence[float], sensors: PowerSensors) -> None:
    allowed = sensors.allowed_limits_w()
    outside = [limit for limit in limits if allowed and not allowed[0] <= limit <= allowed[1]]
    if allowed and outside:
        raise UserError(
            _("this card does not take a power limit of {limit:g} W").format(limit=outside[0]),
            why=_("it takes {least:g} to {most:g} W").format(least=allowed[0], most=allowed[1]),
            hint=_("leave it out of --power-limits"),
        )


def _wait_for(
    limit: float,
    sensors: PowerSensors,
    command: str,
    say: Callable[[str], None],
    patience: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> bool:
    """Did the driver come to report this limit?"""
    until = clock() + patience
    asked = False
    while True:
        reported = sensors.power_limit_w()
        if reported is not None and abs(reported - limit) <= _SAME_LIMIT_W:
            return True
        if clock() >= until:
            return False
        if not asked:
            say(_("run this in another terminal (Ctrl-C ends):   {command}").format(command=command))
            asked = True
        sleep(_LOOK_EVERY_S)
