"""Numbers as programs, people and their countries write them."""

from __future__ import annotations

import math
import re

# In front of a number stands no letter; but of a wrapped line the space behind one of these words is lost.
_FRONT = r"(?:(?<![\w.])|(?<=loss)|(?<=time)|(?<=iter)|(?<=step)|(?<=mfu)|(?<=norm)|(?<=nan)(?=iter))"
_DIGITS = (
    r"(?:[0-9]{1,3}(?:[,_][0-9]{3})+(?![0-9_])(?:\.[0-9]+)?|[0-9]++(?:[.,][0-9]++)?|\.[0-9]++)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![\w]))?"
)
_NOT_FINITE = r"(?:[nN][aA][nN]|[iI][nN][fF](?:inity)?)(?=ms|[^\w]|$)"
NUMBER = rf"{_FRONT}[-+]?(?:{_DIGITS}|{_NOT_FINITE})"
NUMBERS = re.compile(f"({NUMBER})")

_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:[,_][0-9]{3})+(?:\.[0-9]+)?")
_GERMAN_THOUSANDS = re.compile(r"[0-9]{1,3}(?:[. ][0-9]{3})+")
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "mio": 1e6, "million": 1e6, "millones": 1e6, "b": 1e9, "mrd": 1e9,
            "bn": 1e9, "g": 1e9, "billion": 1e9, "t": 1e12, "%": 0.01}  # fmt: skip
_CELL = re.compile(
    rf"[~\u2248*`_'\"\s$+]*([-+]?(?:[0-9]{{1,3}}(?:[.,_ ][0-9]{{3}})+(?![0-9])|{_DIGITS}|nan|inf))\s*"
    r"(k|m|b|%|mio\.?|mrd\.?|ms|s)?[*`_'\"\s]*",
    re.IGNORECASE,
)


def number(text: str | None, *, thousands: bool = True) -> float | None:
    """None where there is none. `thousands`: may a comma before three digits be one of thousands?"""
    if text is None:
        return None
    if "," in text or "_" in text:
        if text.count(",") == 1 and "." not in text and not (thousands and _THOUSANDS.fullmatch(text)):
            text = text.replace(",", ".")
        text = text.replace(",", "").replace("_", "")
    try:
        return float(text)
    except ValueError:
        return None


def whole(text: str) -> int | None:
    found = number(text)
    return round(found) if found is not None and math.isfinite(found) else None


def amount(text: str, unit: str | None = None) -> float | None:
    """`3.1` and `B` is 3.1e9."""
    value = number(text.strip(), thousands=not unit)
    factor = _FACTORS.get((unit or "").strip().rstrip(".").lower())
    return None if value is None or factor is None else value * factor


def cell(text: str, *, counts: bool) -> float | None:
    """A table's cell. `counts`: is it a count (steps, tokens), in which a point or comma before three digits
    is one of thousands?"""
    found = _CELL.fullmatch(text)
    if found is None:
        return None
    digits, unit = found[1], (found[2] or "").rstrip(".").lower()
    if counts and _GERMAN_THOUSANDS.fullmatch(digits):
        digits = re.sub("[. ]", "", digits)
    elif " " in digits:
        return None
    value = number(digits, thousands=counts)
    return None if value is None else value * (1.0 if unit in ("ms", "s") else _FACTORS[unit])
