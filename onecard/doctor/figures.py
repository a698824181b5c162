"""Figures in sentences and tables, with their units: `~24–28 GB`, `1.900 millones de parámetros`,
`NT$500-800`.

English, Spanish and German. A point or a comma may stand before decimals or between thousands: which one
follows from the unit, for nobody has 1.100 of an hour, and from how many digits there are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_N = r"(?:\d{1,3}(?:[.,']\d{3}){1,4}(?![\d])|\d{1,9}(?:[.,]\d{1,4})?)"
_TO = r"\s?(?:[-\u2013\u2014~\u2192]|->|to|bis|a|y|and|und|hasta|or|o)\s?"
_MANY = (
    r"(?:(?P<many>k|K|M|B|T|Mio\.?|Mrd\.?|mil millones|millones|millions?|billions?|bn|Millionen"
    r"|Milliarden)\b)?"
)
# In this order: what is longer comes first.
_UNITS = (
    ("tokens/s", rf"\s?{_MANY}\s?(?:de |of )?(?:[Tt]ok(?:ens?)?)\s?(?:/|per|por|pro)\s?s\w{{0,8}}"),
    ("parameters", rf"\s?{_MANY}[ -]?(?:de |of )?(?:par[a\u00e1]m\w*|Param\w*|params?\b)"),
    ("tokens", rf"\s?{_MANY}\s?(?:de |of )?(?:raw |training )?(?:[Tt]ok(?:ens?)?)\b"),
    ("GB", r"\s?(?P<size>GiB|GB|MiB|MB|Gio|Go|gigabytes?)\b"),
    ("tflops", r"\s?(?:TFLOPS?|TFLOP/s|teraflops?)\b"),
    ("kwh", r"\s?kWh\b"),
    ("watts", r"\s?(?:W|watts?|vatios|Watt)\b"),
    ("%", r"\s?%"),
    ("ms", r"\s?(?:ms|milliseconds?|milisegundos?|Millisekunden)\b"),
    ("years", r"\s?(?:years?|a\u00f1os?|Jahren?|Jahre)\b"),
    ("months", r"\s?(?:months?|mes(?:es)?|Monaten?|Monate)\b"),
    ("weeks", r"\s?(?:weeks?|semanas?|Wochen?)\b"),
    ("days", r"\s?(?:days?|d[i\u00ed]as?|Tagen?|Tage)\b"),
    ("hours", r"\s?(?:hours?|hrs?|horas?|Stunden?|Std\.?|h)\b"),
    ("minutes", r"\s?(?:min(?:utes?|utos?|uten)?)\b"),
    ("seconds", r"\s?(?:sec(?:onds?)?|segundos?|Sekunden?|s)\b"),
    ("steps", r"(?P<thousand>k)?\s?(?:iterations?|iteraciones|Iterationen|steps|pasos|Schritten?)\b"),
    ("M", r"\s?(?P<many>M|B)\b(?!\s?(?:de |of )?tok)"),
)
_MONEY = r"(?P<money>NT\$|US\$|\$|\u20ac|\u00a3)\s?"
_SIGN = r"(?P<about>[~\u2248<>]|(?:ca\.|about|etwa|unos?) )?\s?"
_PATTERNS = tuple(
    (
        unit,
        re.compile(
            rf"(?<![\w.,/]){_SIGN}(?P<low>{_N})(?P<k>k)?(?:{_TO}~?(?P<high>{_N})(?P<k2>k)?)?{pattern}",
            re.IGNORECASE if unit not in ("M", "GB", "watts", "seconds", "parameters", "tokens") else 0,
        ),
    )
    for unit, pattern in _UNITS
)
_RATE = r"(?P<rate>\s?(?:/|per|por|pro)\s?kWh)?"
_PRICES = re.compile(
    rf"{_MONEY}(?P<low>{_N})(?:{_TO}(?:NT\$|US\$|\$|\u20ac|\u00a3)?\s?(?P<high>{_N}))?{_RATE}"
)
_EUROS = re.compile(
    rf"(?<![\w.,/])(?P<low>{_N})(?:{_TO}(?P<high>{_N}))?\s?(?P<money>\u20ac|EUR\b|[Ee]uros?\b){_RATE}"
)
_HAS_MONEY = re.compile(r"[$\u20ac\u00a3]|EUR\b|[Ee]uros?\b")
_TIMES = {
    "ms": 1e-3,
    "seconds": 1.0,
    "minutes": 60.0,
    "hours": 3600.0,
    "days": 86400.0,
    "weeks": 7 * 86400.0,
    "months": 30.4 * 86400.0,
    "years": 365.25 * 86400.0,
}
_FACTORS = {
    "k": 1e3,
    "m": 1e6,
    "b": 1e9,
    "t": 1e12,
    "mio": 1e6,
    "mrd": 1e9,
    "mil millones": 1e9,
    "millones": 1e6,
    "million": 1e6,
    "millions": 1e6,
    "billion": 1e9,
    "billions": 1e9,
    "bn": 1e9,
    "millionen": 1e6,
    "milliarden": 1e9,
}
# Of these people write thousands with a sign between.
_COUNTED = frozenset(
    ("M", "tokens", "parameters", "tokens/s", "hours", "steps", "money", "watts", "ms", "minutes", "kwh")
)
# Lines of logs and of errors: facts, and no claims.
_ROW = re.compile(
    r"\b(?:iter|step)\w*[ :=]{0,2}\d+.{0,14}\bloss\b|\bTried to allocate\b|\ballocated by PyTorch\b"
    r"|^\s*File \"|^W\d{4} "
)
MOST_LINES, _LONGEST = 500, 2000


@dataclass(frozen=True)
class Figure:
    """`unit` as above; times are in seconds with the unit "time", memory in bytes with "memory"."""

    unit: str
    low: float
    high: float
    words: str
    line: str  # the whole line that it stands in
    at: int  # its place there
    number: int  # the line's
    said: str = ""  # the unit as it is written: GB, GiB, days, $

    @property
    def is_range(self) -> bool:
        return self.high > self.low


def figures_in(text: str) -> list[Figure]:
    """In their order; a figure is of one unit alone."""
    found: list[Figure] = []
    lines = text.split("\n")
    if len(lines) > MOST_LINES:
        lines = lines[:MOST_LINES]
    for number, line in enumerate(lines):
        if len(line) <= _LONGEST and any(sign.isdigit() for sign in line) and not _ROW.search(line):
            found += _of_line(line.replace("*", " "), number)
    return found


def _of_line(line: str, number: int) -> list[Figure]:
    taken: list[tuple[int, int]] = []
    found: list[Figure] = []
    money = _HAS_MONEY.search(line) is not None
    patterns = [("money", _PRICES), ("money", _EUROS), *_PATTERNS] if money else _PATTERNS
    for unit, pattern in patterns:
        for match in pattern.finditer(line):
            if any(a < match.end() and match.start() < b for a, b in taken):
                continue
            taken.append(match.span())
            figure = _figure(unit, match, line, number)
            if figure is not None:
                found.append(figure)
    return sorted(found, key=lambda figure: figure.at)


def _figure(unit: str, match: re.Match[str], line: str, number: int) -> Figure | None:
    parts = match.groupdict()
    counted = unit in _COUNTED and not (parts.get("many") and _is_decimal(match["low"]))
    low = _value(match["low"], counted)
    high = _value(match["high"], counted) if match["high"] else low
    factor = 1.0
    if many := parts.get("many"):
        factor = _FACTORS[many.lower().rstrip(".")]
    if parts.get("k2") or parts.get("k") or parts.get("thousand"):
        low, high = (low * 1e3 if parts.get("k") or not high > low * 1e3 else low), high * 1e3
        if parts.get("k2") and not parts.get("k"):
            low *= 1e3 if low * 1e3 <= high and low < 1e3 else 1
    said = parts.get("size") or parts.get("money") or unit
    said = "\u20ac" if said[:3].lower() == "eur" else said
    if unit in _TIMES:
        factor, unit = _TIMES[unit], "time"
    elif unit == "GB":
        size = said.lower()
        factor = (2**30 if "gi" in size else 1e9) if size[0] == "g" else (2**20 if "mi" in size else 1e6)
        unit = "memory"
    elif unit == "money" and parts.get("rate"):
        unit = "price"
    elif unit == "tokens" and not parts.get("many") and high < 1000:
        return None
    if high < low:
        low, high = high, low
    return Figure(unit, low * factor, high * factor, match[0].strip(), line, match.start(), number, said)


def _is_decimal(text: str) -> bool:
    """1.9 and 1,9 and not 1.900."""
    return re.fullmatch(r"\d+[.,]\d{1,2}", text) is not None


def _value(text: str, counted: bool) -> float:
    text = text.replace(" ", "").replace("'", "")
    groups = re.split(r"[.,]", text)
    if len(groups) > 1 and all(len(group) == 3 for group in groups[1:]) and (counted or len(groups) > 2):
        return float("".join(groups))
    if len(groups) > 2:
        return float("".join(groups[:-1]) + "." + groups[-1])
    return float(text.replace(",", "."))
