"""Amounts as people read them: in a unit, and with as many digits, that nothing comes out as 0.0."""

from __future__ import annotations

from onecard.language import _, number
from onecard.plan.lines import GIB

FEW_KWH = 0.1  # less is shown in Wh


def duration(seconds: float) -> str:
    """A time in the unit that a person would use."""
    if seconds < 0.1:
        return _("{n:.0f} ms").format(n=1000 * seconds)
    if seconds < 0.95:
        return _("{n:.1f} s").format(n=seconds)
    if seconds < 90:
        return _("{n:.0f} s").format(n=seconds)
    if seconds < 5400:
        return _("{n:.0f} min").format(n=seconds / 60)
    if seconds < 2 * 86400:
        return _("{n:.1f} h").format(n=seconds / 3600)
    if seconds < 1000 * 86400:
        return _("{n:.1f} days").format(n=seconds / 86400)
    return _("{n:,.0f} years").format(n=seconds / 86400 / 365)


def count(tokens: float) -> str:
    """A number as people write it: 1.54M, 3.15B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return number(tokens / size, ".3g") + letter
    return number(tokens, ".0f")


def digits(value: float) -> str:
    """The form of a figure with two digits that count, and none behind the point from 10 on."""
    return ",.0f" if value >= 9.95 else ".1f" if value >= 0.995 else ".2g" if value >= 0.001 else ".0f"


def speed(tokens_per_s: float, step_seconds: float) -> str:
    if step_seconds < 0.1:
        text = _("{n:,.0f} tokens/s, {ms:.1f} ms a step")
        return text.format(n=tokens_per_s, ms=1000 * step_seconds)
    return _("{n:,.0f} tokens/s, {s:.2f} s a step").format(n=tokens_per_s, s=step_seconds)


def energy(card_kwh: float, pc_kwh: float, idle_watts: float) -> str:
    if card_kwh < FEW_KWH:
        text = _("{card:,.1f} Wh by the card, {pc:,.1f} by the whole PC ({watts:.0f} W besides the card)")
        return text.format(card=1000 * card_kwh, pc=1000 * pc_kwh, watts=idle_watts)
    text = _("{card:,.1f} kWh by the card, {pc:,.1f} by the whole PC ({watts:.0f} W besides the card)")
    return text.format(card=card_kwh, pc=pc_kwh, watts=idle_watts)


def kwh_cell(kwh: float) -> str:
    """Where the heading is the unit."""
    return number(kwh, ",.1f" if kwh >= FEW_KWH else ".4f")


def price_text(price: float) -> str:
    """The price of a kWh: two decimals, or as many more as it takes to be right to one in ten thousand."""
    if 0 < price < 1e-6:
        return number(price, ".3g")
    digits = next((n for n in range(2, 10) if abs(round(price, n) - price) <= 1e-4 * abs(price)), 10)
    return number(price + 0.0, f",.{digits}f")  # + 0.0: minus zero is zero


def gib(bytes_: float, digits: int = 2) -> str:
    """Where the heading is the unit."""
    return number(bytes_ / GIB, f".{digits}f")


def file_size(bytes_: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if bytes_ >= 0.1 * size:
            return number(bytes_ / size, ".1f") + " " + unit
    return number(bytes_ / 1e3, ".1f") + " kB"
