"""The options of `onecard plan`, and times as people say them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import ClassVar

from onecard.config.knobs import Config, load_config, option
from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.language import N_, _
from onecard.plan.prices import CURRENCY, PRICE, Prices, usual_idle_watts

_CLOCK = r"([01]?[0-9]|2[0-3]):([0-5][0-9])"
_ZONE = re.compile(_CLOCK + r"(?::[0-9.]+)?\s*(?:z|[a-z]{3,4}|[+-][0-9:]{1,5})$")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


@dataclass(frozen=True, kw_only=True)
class Options(Config):
    """What `onecard plan` is asked, besides the config."""

    groups: ClassVar[tuple[str, ...]] = (N_("the card"), N_("what to answer"), N_("money"))

    # fmt: off
    gpu: str | None = option("str", "the card to plan for; this machine's unless given", group="the card", value="CARD")
    tflops: float | None = option("float", "its speed, where `onecard gpus` does not list it: dense bf16 with fp32 sums, in TFLOPS", group="the card", low=0.01, high=100_000, value="N")
    bandwidth: float | None = option("float", "its memory's bandwidth in GB/s, where `onecard gpus` does not list it. How much memory it has is in its name (\"12GB\") or --vram_limit", group="the card", low=0.01, high=1_000_000, value="N")
    watts: float | None = option("float", "its power limit in watts, for energy and money; a laptop card is slower at a lower limit", group="the card", low=0.01, high=100_000, value="N")
    host_ram: float | None = option("float", "GiB of RAM in its PC, 2 of which are left to the system. This machine's; with --gpu 32 are assumed", group="the card", low=0, high=1_000_000, value="GIB")
    memory: bool = option("bool", "the memory, line by line", group="what to answer")
    compare: bool = option("bool", "every kind of setting: exact, low-bit, recompute, offload", group="what to answer")
    stages: bool = option("bool", "what to turn on again after an emergency setting, in which order, and what each step gains", group="what to answer")
    largest: bool = option("bool", "the largest model and the longest block that fit, and the best model for a week", group="what to answer")
    by: str | None = option("str", "the best model for another time: 12h, 30d, \"sunday 20:00\", 2027-01-31", group="what to answer", value="TIME")
    as_: str | None = option("str", "what their own trainer would need, compiled and not: --as nanogpt, or nanochat for a --depth", group="what to answer", choices=("nanogpt", "nanochat"), value="TRAINER")
    formulas: bool = option("bool", "every line of the memory bill with its formula", group="what to answer")
    json: bool = option("bool", "everything, for programs", group="what to answer")
    price: str = option("str", "of a kWh, or a range of it: 0.30, 3-4", default=f"{PRICE:.2f}", group="money", value="N")
    currency: str = option("str", "of the price", default=CURRENCY, group="money", value="NAME")
    idle_watts: float | None = option("float", "what the PC draws besides the card: 80, in a laptop 25", group="money", low=0, high=100_000, value="N")
    # fmt: on
    steps_done: int = 0  # of a run that goes on

    def check(self) -> None:
        price_range(self.price)
        sizes = [name for name in ("largest", "by") if self.is_set(name)]
        others = [name for name in ("compare", "stages") if self.is_set(name)]
        alone = [*(name for name in others if name != "stages"), *sizes]
        if self.as_ is not None and alone:
            raise UserError(
                _("--as and --{name} do not go together").format(name=alone[0]),
                hint="onecard plan --help",
            )
        if sizes and others:
            raise UserError(
                _("--{one} and --{other} do not go together").format(one=sizes[0], other=others[0]),
                _("the one is about other models, the other about this one"),
                _("ask one after the other"),
            )

    @property
    def is_detailed(self) -> bool:
        """Is more asked than whether it fits, how fast it is and what it costs?"""
        more = (self.memory, self.compare, self.stages, self.largest, self.formulas, self.json)
        return any(more) or self.by is not None or self.as_ is not None

    def prices(self, card: Card) -> Prices:
        idle = usual_idle_watts(card) if self.idle_watts is None else self.idle_watts
        return Prices(*price_range(self.price), self.currency, idle)


@dataclass(frozen=True, kw_only=True)
class _Price(Config):
    price: float = option("float", "of the price", default=PRICE, low=0, high=1_000_000)


def price_range(text: str) -> tuple[float, float]:
    """0.30 or 3-4: the least and the most that a kWh costs."""
    between = re.fullmatch(r"(.*\d)\s*[-–]\s*([\d.].*)", text.strip())
    parts = between.groups() if between else (text,)
    found = sorted(load_config(_Price, [f"--price={part.strip()}"]).price for part in parts)
    return found[0], found[-1]


def budget_seconds(text: str, now: datetime) -> float:
    """A length (12h, 7d, 2w, 1 month) or a moment to be done by (Sunday 20:00, 2026-12-24 18:00).

    A moment is one of this machine's clock; between day and time may stand a space, a T or an underscore.
    """
    plain = text.strip().lower()
    units = {"h": 3600, "hour": 3600, "hours": 3600, "d": 86400, "day": 86400, "days": 86400, "w": 604800,
             "week": 604800, "weeks": 604800, "month": 30 * 86400, "months": 30 * 86400}  # fmt: skip
    digits = plain.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = plain[len(digits) :].strip()
    if unit in units:
        try:
            number = float(digits) if digits.strip() else 1.0
        except ValueError:
            number = math.nan
        if 0 < number * units[unit] < 1e10:
            return number * units[unit]
    moment = _moment(plain, now)
    if moment is None:
        why = _("it is a length or a moment in the future")
        if _ZONE.search(plain):
            why = _("a time zone is not understood: a moment is one of this machine's own clock")
        raise UserError(
            _("'{text}' is no time that can be planned for").format(text=text),
            why,
            "--by 7d, --by 12h, --by 'sunday 20:00', --by 2027-01-31",
        )
    return (moment - now).total_seconds()


def _moment(plain: str, now: datetime) -> datetime | None:
    """The moment that is meant; None for what is not understood whole: half a moment would be another one."""
    # ISO's 2026-12-24T18:00, and sunday_20:00 of who would rather not quote.
    between = r"(?:\s+|[_t])" if plain[:1].isdigit() else r"(?:\s+|_)"
    found = re.fullmatch(rf"(\S+?)(?:{between}{_CLOCK})?", plain)
    if found is None:
        return None
    day = found[1]
    clock = time(int(found[2]), int(found[3])) if found[2] else time(23, 59)
    matches = [n for n, name in enumerate(_DAYS) if len(day) >= 3 and name.startswith(day)]
    if matches:
        next_one = now.date() + timedelta(days=(matches[0] - now.weekday()) % 7)
        moment = datetime.combine(next_one, clock)
        return moment if moment > now else moment + timedelta(days=7)
    try:
        moment = datetime.combine(date.fromisoformat(day), clock)
    except ValueError:
        return None
    return moment if moment > now else None
