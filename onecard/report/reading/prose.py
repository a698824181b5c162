"""Facts that people write in sentences, in English, Spanish and German: "n_embd=384", "LR 5e-4", "RTX 4070".

What is said first counts, for later come comparisons and advice; a sentence that advises is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from onecard.report.reading.head import inline_settings
from onecard.report.reading.numbers import amount, number, whole

_N = r"([0-9]{1,3}(?:[.,][0-9]{3})+|[0-9]{1,12}(?:[.,][0-9]{1,3})?)"
_UNIT = r"\s?(k|K|M|B|T|Mio\.?|Mrd\.?|millones|million|billion|bn)"
# "every 500 steps", "the last 1000 steps" are no horizon.
_NO_PLACE = "".join(
    f"(?<!{word} )" for word in (
        "every", "cada", "alle", "after", "last", "next", "first", "of", "\u00faltimos", "\u00faltimas", "letzten",
        "de", "nach", "pr\u00f3ximas", "step", "iter", "each", "primeras", "primeros", "ersten", "than", "at",
    )
)  # fmt: skip
_RATE = r"([0-9]{1,2}(?:[.,][0-9]{1,4})?[eE]-[0-9]{1,2}|0[.,]0[0-9]{1,8})"


def _count(found: re.Match[str]) -> int | None:
    text = found[1]
    text = text.replace(".", "") if re.fullmatch(r"\d{1,3}(?:\.\d{3})+", text) else text
    value = amount(text, found[2] if found.re.groups > 1 and found[2] else None)
    return round(value) if value is not None else None


def _rate(found: re.Match[str]) -> float | None:
    return number(found[1], thousands=False)


def _product(found: re.Match[str]) -> int | None:
    a, b = whole(found[1]), whole(found[2])
    return a * b if a and b else None


def _share(found: re.Match[str]) -> tuple[float, float] | None:
    low = number(found[1], thousands=False)
    high = number(found[2], thousands=False) if found[2] else low
    return (low / 100, high / 100) if low is not None and high is not None else None


_DATA = (
    "FineWeb-Edu", "FineWeb", "OpenWebText", "TinyStories", "ClimbMix", "SlimPajama", "RedPajama", "WikiText-103",
    "DCLM", "Dolma", "the Pile", "C4", "OpenWebMath", "Shakespeare",
)  # fmt: skip


def _data(found: re.Match[str]) -> str:
    return next(name for name in _DATA if name.lower() == found[1].lower())


def _name(found: re.Match[str]) -> str:
    return found[1]


def _plain(value: Any) -> Callable[[re.Match[str]], Any]:
    return lambda found: value


def _gpu(found: re.Match[str]) -> str:
    return " ".join(found[0].split())


# (name, whether it is a setting, pattern, reader); the first pattern that finds something gives the value.
_CASE = re.IGNORECASE
RULES: tuple[tuple[str, bool, re.Pattern[str], Callable[[re.Match[str]], Any]], ...] = tuple(
    (name, is_setting, re.compile(pattern, flags), reader)
    for name, is_setting, pattern, flags, reader in (
        ("learning_rate", True,
         rf"(?:\blr|learning[ _]rate|tasa de aprendizaje|lernrate)\)?\s*(?:of|de|von|=|:|is|ist|es|was)?\s*{_RATE}",
         _CASE, _rate),
        ("min_lr", True, rf"\bmin[ _]lr\s*(?:of|de|von|=|:)?\s*{_RATE}", _CASE, _rate),
        ("block_size", True,
         rf"(?:block[ _]size|context(?: length)?|contexto|kontext(?:l\u00e4nge)?|sequence length|seq(?:uence)?[ _]len"
         rf"|longitud de secuencia|sequenzl\u00e4nge)\s*(?:of|de|von|=|:)?\s*{_N}\b(?!\s?[kKMB%])", _CASE, _count),
        ("gradient_accumulation_steps", True,
         rf"(?:grad(?:ient)?[-_ ]accum(?:ulation)?(?:[-_ ]steps)?|acumulaci\u00f3n de gradientes?"
         rf"|gradientenakkumulation)\s*(?:of|de|von|=|:)?\s*{_N}\b", _CASE, _count),
        ("batch_size", True, rf"\bbatch(?:[-_ ]?size)?\s*(?:of|de|von|=|:)?\s*{_N}(?= ?[\u00d7x*] ?grad)", _CASE, _count),
        ("max_iters", True, rf"(?:^|[\s(~\u2248]){_NO_PLACE}{_N}(k)?\s(?:iterations|iteraciones|iterationen|steps|pasos|schritte)"
         r"\b(?!\s(?:from|warm|de calent|per|pro|por))", _CASE, _count),
        ("max_iters", True, r"max_iters\s*[=:]\s*([0-9]{1,9})", _CASE, _count),
        ("warmup_iters", True, rf"(?:warm-?up|calentamiento|aufw\u00e4rm\w*)\s*(?:of|de|von|=|:)?\s*{_N}\b(?!\s?%)",
         _CASE, _count),
        ("dropout", True, r"dropout\s*(?:of|de|von|=|:)?\s*(0?[.,][0-9]{1,3}|0)(?![\w.,])", _CASE, _rate),
        ("dropout", True, r"\b(?:sin|no|ohne|without|zero|kein)\s+dropout", _CASE, _plain(0.0)),
        ("compile", True, r"\b(?:pytorch|torch)[ .]compile\b|compile\s*=\s*true", _CASE, _plain(True)),
        ("optimizer", True, r"\b(AdamW|Muon|Lion|Adafactor|SOAP|Shampoo)\b", 0, lambda found: found[1].lower()),
        ("weight_decay", True, r"weight[ _]decay\s*(?:of|de|von|=|:)?\s*(0[.,][0-9]{1,4})", _CASE, _rate),
        ("tokens_per_step", False, rf"{_N}\s?[\u00d7x*]\s?(512|1024|2048|4096|8192|1,024|2,048)\b(?!\s?[\u00d7x*])", 0,
         _product),
        ("tokens_per_step_about", False,
         rf"{_N}{_UNIT}\s*(?:de\s)?tokens?\s?(?:/|per|por|pro)\s?(?:iter|step|paso|schritt)", 0, _count),
        ("tokens_seen", False,
         rf"{_N}{_UNIT}\s*(?:de\s)?tokens?\s(?:seen|vistos|gesehen|processed|procesados|verarbeitet|so far)", _CASE,
         _count),
        ("parameters_about", False, rf"(?:^|[\s(~\u2248]){_N}(M|B|Mio\.?|millones|million)\s?(?:de\s)?"
         r"-?(?:par[a\u00e1]m|Param|params|weights)", _CASE, _count),
        ("parameters_about", False, rf"(?:^|[\s(~\u2248]){_N}(M)[- ](?:GPT|model|modelo|Modell|LLM)", 0, _count),
        ("train_tokens_about", False,
         rf"{_N}{_UNIT}\s*(?:de\s)?(?:raw\s)?tokens?\s(?:de|of|von|aus|from)\s(?:the\s|la\s)?[A-Z]", 0, _count),
        ("mfu", False,
         r"(?:MFU\s*(?:of|de|von|:|=|is|at)?\s*[~\u2248]?|[~\u2248])([0-9]{1,3}(?:[.,][0-9]+)?)"
         r"(?:\s?[-\u2013\u2014]\s?([0-9]{1,3}(?:[.,][0-9]+)?))?\s?%(?:\s(?:de\s)?MFU)?", 0, _share),
        ("gpu", False,
         r"\b(?:(?:NVIDIA\s)?(?:GeForce\s)?(?:RTX|GTX)\s?(?:PRO\s?)?[0-9]{4}\s?(?:Ti)?(?:\sSuper|\sSUPER)?(?:\sLaptop)?|RTX\sA[0-9]{4}"
         r"|(?:Tesla\s)?(?:T4|V100|P100|P40|M40)|(?:NVIDIA\s)?(?:A100|H100|H200|A6000|L40S?|L4|A10G?|B200))\b", 0, _gpu),
        ("tokenizer", False, r"GPT-?2(?:'s)?\s(?:BPE|tokeni[sz]er|tokens)|token\w+ (?:original )?(?:de|von) GPT-?2"
         r"|tiktoken gpt2|r50k", _CASE, _plain("gpt2")),
        ("tokenizer", False, r"character[- ]level|char[- ]level|a nivel de car\u00e1cter|zeichenweise", _CASE,
         _plain("char")),
        ("vocab_size", False, rf"(?:vocab(?:ulary|ulario|_size| size)?|Vokabular)\s*(?:of|de|von|=|:)?\s*{_N}\b(?!k)",
         _CASE, _count),
        ("vocab_size", False, r"([0-9]{2,3}[.,][0-9]{3}|[0-9]{4,6})\s(?:vocab|tokens? in the vocab)", _CASE, _count),
        ("data", False, rf"\b({'|'.join(_DATA)})\b", _CASE, _data),
        ("shard", False, r"\b(CC-MAIN-20[0-9]{2}-[0-9]{2})\b", 0, _name),
    )
)  # fmt: skip
_MAY_MATTER = re.compile(
    r"lr\b|rate|aprendizaje|lernrate|block|cont|kontext|seq|secuencia|accum|akkum|acumul|batch|iter|step|paso|schritt"
    r"|warm|calent|dropout|compile|adamw|muon|lion|soap|decay|token|param|\bM[ -]|mfu|rtx|gtx|[tvpalhb][0-9]{1,3}"
    r"|gpt|char|zeichen|vocab|vokab|vocabul|fineweb|openweb|stories|climb|pajama|wiki|dclm|dolma|pile|c4"
    r"|shakespeare|cc-main|=",
    re.IGNORECASE,
)
# What stands in such a sentence is not what the run is, but what it might be, or what others are.
_ADVICE = re.compile(
    r"\b(?:could|would|should|try|might|meant|wanted|instead of|typical|typically|expect|compare\w*|compared|versus|vs"
    r"|cabr[i\u00ed]a|podr[i\u00ed]as?|deber[i\u00ed]as?|prueba|quer[i\u00ed]as|t[i\u00ed]pic[ao]s?|esperado|comparar"
    r"|est[a\u00e1]ndar|standard|f[a\u00e1]cilmente|reach|llegar|"
    r"k\u00f6nnte\w*|w\u00fcrde\w*|sollte\w*|versuch\w*|passen|\u00fcblich\w*|typisch\w*|erreich\w*|vergleich\w*|wolltest)\b",
    _CASE,
)
# "MFU 11-12% is typical" is a figure of the run all the same.
_STILL = frozenset(("mfu", "gpu", "block_size", "gradient_accumulation_steps", "data"))
# The first iteration alone, as people quote it.
_FIRST_STEP = re.compile(
    r"(?:first (?:iteration|iter|step)|primera? (?:iteraci\u00f3n|paso)|erste[rn]? (?:iteration|schritt))\D{1,40}?"
    rf"{_N}\s?(ms|s|sec|seconds|segundos|sekunden)\b",
    _CASE,
)
MOST_LINES = 400  # of prose: a log of months has samples of the model's text in it


class Prose:
    """What sentences have said so far."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.evidence: dict[str, str] = {}
        self.first_step_ms: float | None = None
        self._lines = 0
        self._announced = False  # by advice with a colon at its end
        self._in_code = self._inside = False

    def read(self, line: str, *, begins: bool = False, ends: bool = False) -> bool:
        """Is this line advice, or of what a piece of advice announced? `begins`, `ends`: does the text begin or
        end with it, where it may be cut?"""
        plain = line.strip()
        if self._is_announced(plain):
            return True
        if (
            not plain
            or self._lines >= MOST_LINES
            or len(line) > 5000
            or line.count("|") > 2
            or not _MAY_MATTER.search(line)
        ):
            return False
        self._lines += 1
        advice = _ADVICE.search(line) is not None
        self._announced = advice and plain.endswith(":")
        self._first_step(line)
        if not advice:
            for name, value in inline_settings(line, {}).items():
                self._note(self.settings, name, value, f"{name} = {value}")
        for name, is_setting, pattern, reader in RULES:
            into = self.settings if is_setting else self.facts
            if name in into or (advice and name not in _STILL):
                continue
            found = pattern.search(line)
            if found is None or (begins and found.start() == 0) or (ends and found.end() == len(line)):
                continue
            if (value := reader(found)) is not None:
                self._note(into, name, value, found[0].strip(" ("))
        return advice

    def is_advice(self, line: str) -> bool:
        """Does a config's line stand among what was announced as advice?"""
        return self._is_announced(line.strip())

    def _is_announced(self, plain: str) -> bool:
        """Of "you could have tried:" what follows until an empty line or the end of the code is advice too."""
        if not self._announced:
            return False
        if plain.startswith("```") or plain.startswith("~~~"):
            self._in_code = not self._in_code
            self._announced = self._in_code
            return True
        if not self._in_code and (plain.startswith("#") or (not plain and self._inside)):
            self._announced = self._inside = False
            return False
        self._inside = self._inside or bool(plain)
        return True

    def _note(self, into: dict[str, Any], name: str, value: Any, said: str) -> None:
        if name not in into:
            into[name] = value
            self.evidence[name] = said

    def _first_step(self, line: str) -> None:
        if self.first_step_ms is None and (found := _FIRST_STEP.search(line)):
            value = number(found[1], thousands=False)
            if value is not None:
                self.first_step_ms = value if found[2].lower() == "ms" else 1000 * value
                self.evidence["first_step"] = found[0]
