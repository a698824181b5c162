"""The words of `onecard plan` that are its own; all others belong to the config."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any

from onecard.config.knobs import knobs
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.language import _
from onecard.plan.cost import CURRENCY, PRICE, usual_idle_watts

_SWITCHES = ("json", "compare", "largest", "stages", "formulas")
_VALUES = ("gpu", "as", "idle_watts", "price", "currency", "by", "host_ram", "tflops", "bandwidth",
           "watts")  # fmt: skip
OWN_WORDS = (*_SWITCHES, *_VALUES)
_CLOCK = r"([01]?[0-9]|2[0-3]):([0-5][0-9])"
_ZONE = re.compile(_CLOCK + r"(?::[0-9.]+)?\s*(?:z|[a-z]{3,4}|[+-][0-9:]{1,5})$")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


@dataclass(frozen=True)
class Options:
    gpu: str | None = None
    as_: str | None = None  # "nanogpt": price nanoGPT's own trainer
    json: bool = False
    compare: bool = False
    largest: bool = False
    stages: bool = False
    formulas: bool = False
    idle_watts: float | None = None  # None: what is usual beside such a card
    price: float = PRICE
    currency: str = CURRENCY
    by: str | None = None  # a time budget
    host_ram: float | None = None  # GiB
    # Figures of the card, instead of the table's: see plan/machine.py.
    tflops: float | None = None
    bandwidth: float | None = None
    watts: float | None = None
    steps_done: int = 0  # of a run that goes on

    def idle_watts_beside(self, card: Card) -> float:
        return usual_idle_watts(card) if self.idle_watts is None else self.idle_watts


def split_words(words: Sequence[str]) -> tuple[Options, list[str]]:
    """Plan's own options, and the words for the config in their order."""
    found: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        name = name.replace("-", "_")
        if name in _SWITCHES:
            if equals and value.lower() not in ("true", "1", "yes"):
                raise UserError(_("--{name} takes no value").format(name=name))
            found[name] = True
        elif name in _VALUES:
            if not equals:
                if not queue or queue[0].startswith("--"):
                    raise UserError(_("--{name} needs a value").format(name=name), hint="onecard plan --help")
                value = queue.pop(0)
            found["as_" if name == "as" else name] = value
        else:
            rest.append(word)
    for name, most in (("idle_watts", 1e5), ("price", 1e6), ("host_ram", 1e6)):
        if name in found:
            found[name] = _number(name, found[name], most)
    for name, most in (("tflops", 1e5), ("bandwidth", 1e6), ("watts", 1e5)):
        if name in found:
            found[name] = _figure(name, found[name], most)
    for word in rest:
        _refuse_a_slip(word)
    others = [name for name in ("compare", "largest", "stages", "by") if name in found]
    if "as_" in found and others:
        raise UserError(
            _("--as and --{name} do not go together").format(name=others[0]), hint="onecard plan --help"
        )
    sizes = [name for name in ("largest", "by") if name in found]
    others = [name for name in ("compare", "stages") if name in found]
    if sizes and others:
        raise UserError(
            _("--{one} and --{other} do not go together").format(one=sizes[0], other=others[0]),
            _("the one is about other models, the other about this one"),
            _("ask one after the other"),
        )
    found |= {"as_": found["as_"].lower()} if "as_" in found else {}  # nanoGPT is how its name is written
    if found.get("as_", "nanogpt") != "nanogpt":
        raise UserError(
            _("--as cannot be '{value}'").format(value=found["as_"]),
            _("the other trainer that can be priced is nanoGPT's own"),
            "--as nanogpt",
        )
    return Options(**found), rest


def _refuse_a_slip(word: str) -> None:
    """`--compair` is one of ours misspelled, not a knob."""
    name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
    if not name or name in {f.name for f in knobs(RunConfig)}:
        return
    near = difflib.get_close_matches(name, OWN_WORDS, n=1, cutoff=0.75)
    knob = difflib.get_close_matches(name, [f.name for f in knobs(RunConfig)], n=1, cutoff=0.75)
    if near and not knob:
        raise UserError(
            _("there is no --{name}").format(name=name),
            hint=_("did you mean --{near}?").format(near=near[0].replace("_", "-")),
        )


def _number(name: str, text: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        point = text.replace(",", ".", 1)
        hint = f"--{name.replace('_', '-')}={point}" if re.fullmatch(r"\d+,\d+", text) else ""
        what = _("--{name} is '{text}'").format(name=name, text=text)
        raise UserError(what, _("it is a number from 0 to {most:,.0f}").format(most=most), hint)
    return number + 0.0  # -0 is a number from 0 on too, but nobody wants to read "-0.00"


def _figure(name: str, text: str, most: float) -> float:
    """Of a card: none is 0."""
    units = {"tflops": "TFLOPS (bf16, dense)", "bandwidth": "GB/s", "watts": "W"}
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= most:
        raise UserError(
            _("--{name} is '{text}'").format(name=name, text=text),
            _("it is a number above 0 and at most {most:,.0f}, in {unit}").format(
                most=most, unit=units[name]
            ),
            f"--{name} 200",
        )
    return number


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
    """None for what is not understood whole: half a moment would be another one."""
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
