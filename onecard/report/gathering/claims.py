"""Speeds that somebody claims in prose: of those below the floor it is said that they are impossible.

People paste an answer they were given elsewhere ("80-120 ms an iteration, 10-20 minutes in all") together
with their log, in any of the languages and with its dashes damaged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_N = r"(\d{1,3}(?:[.,]\d{3})+|\d{1,9}(?:[.,]\d{1,3})?)"
_TO = r"(?:\s*(?:[^\d\s.,;:()/+]{1,4}|to|bis|a)\s*" + _N + r")?"
_EACH = r"\s*(?:/|per|por|pro|an|a|je|cada)\s*"
_SECONDS = r"\s*(ms|s|sec|seconds?|segundos?|sekunden?)"
_PER_STEP = re.compile(_N + _TO + _SECONDS + _EACH + r"(?:iter|step|paso|schritt)\w*", re.IGNORECASE)
_MANY = r"\s*(k|m|millones(?:\s+de)?|millions?(?:\s+of)?|millionen|mio\.?)?\s*"
_PER_SECOND = re.compile(_N + _TO + _MANY + r"tok(?:ens?)?" + _EACH + r"s\w*", re.IGNORECASE)
_ALTOGETHER = r"(?:in all|in total|altogether|en total|insgesamt)"
_TIME = r"\s*(min(?:utes|utos|uten)?|hours?|horas?|stunden?|h)\s*"
_IN_ALL = re.compile(_N + _TO + _TIME + _ALTOGETHER, re.IGNORECASE)
_MOST_TEXT = 1_000_000  # characters: more is a log, and no prose


@dataclass(frozen=True)
class Claim:
    """`ms` a step at the slow end of what is claimed, and the words."""

    ms: float
    words: str


def claims_in(text: str, tokens_per_step: int | None, steps: int | None) -> list[Claim]:
    found: list[Claim] = []
    text = " ".join(text[:_MOST_TEXT].replace("*", "").split())
    for match in _PER_STEP.finditer(text):
        unit = 1.0 if match[3].lower() == "ms" else 1000.0
        found.append(Claim(unit * _number(match[2] or match[1]), match[0]))
    for match in _PER_SECOND.finditer(text) if tokens_per_step else ():
        factor = {"": 1.0, "k": 1e3}.get((match[3] or "").lower(), 1e6)
        if (speed := factor * _number(match[1], grouped=not match[3])) > 0:
            found.append(Claim(1000 * (tokens_per_step or 0) / speed, match[0]))
    for match in _IN_ALL.finditer(text) if steps else ():
        unit = 60_000.0 if match[3].lower().startswith("min") else 3_600_000.0
        found.append(Claim(unit * _number(match[2] or match[1]) / (steps or 1), match[0]))
    return found


def _number(text: str, *, grouped: bool = False) -> float:
    """`grouped`: are three digits behind a sign thousands, as in 194,000 tokens a second?"""
    if grouped and re.fullmatch(r"\d{1,3}(?:[.,]\d{3})+", text):
        return float(re.sub("[.,]", "", text))
    whole, sign, decimals = text.replace(",", ".").rpartition(".")
    return float(whole.replace(".", "") + sign + decimals)
