"""Facts that people write in sentences, in English, Spanish and German: "n_embd=384", "LR 5e-4", "RTX 4070".

What is said first counts, for later come comparisons and advice; a sentence that advises is passed over.
"""

from __future__ import annotations

import math
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
        "every", "cada", "alle", "after", "last", "next", "first", "of", "\u00faltimos", "\u00faltimas",
        "letzten",
        "de", "nach", "pr\u00f3ximas", "step", "iter", "each", "primeras", "primeros", "ersten", "than", "at",
    )
)  # fmt: skip
_RATE = r"([0-9]{1,2}(?:[.,][0-9]{1,4})?[eE]-[0-9]{1,2}|0[.,]0[0-9]{1,8})"


def _plain(text: str) -> str:
    """Without the points that part thousands in Spanish and German."""
    return text.replace(".", "") if re.fullmatch(r"\d{1,3}(?:\.\d{3})+", text) else text


def _count(found: re.Match[str]) -> int | None:
    value = amount(_plain(found[1]), found[2] if found.re.groups > 1 and found[2] else None)
    return round(value) if value is not None else None


def _rate(found: re.Match[str]) -> float | None:
    return number(found[1], thousands=False)


def _product(found: re.Match[str]) -> int | None:
    """Of all its factors, or the number that stands alone."""
    factors = [whole(_plain(text)) for text in found.groups() if text]
    return math.prod(n for n in factors if n) if all(factors) else None


def _share(found: re.Match[str]) -> tuple[float, float] | None:
    low = number(found[1], thousands=False)
    high = number(found[2], thousands=False) if found[2] else low
    return (low / 100, high / 100) if low is not None and high is not None else None


_DATA = (
    "FineWeb-Edu", "FineWeb", "OpenWebText", "TinyStories", "ClimbMix", "SlimPajama", "RedPajama",
    "WikiText-103", "DCLM", "Dolma", "the Pile", "C4", "OpenWebMath", "Shakespeare",
)  # fmt: skip


def _data(found: re.Match[str]) -> str:
    return next(name for name in _DATA if name.lower() == found[1].lower())


def _name(found: re.Match[str]) -> str:
    return found[1]


def _gpu(found: re.Match[str]) -> str:
    return " ".join(found[0].split())


_CASE = re.IGNORECASE
_WORD = re.compile(r"\w")
# Between a name and its value: "LR 5e-4", "learning rate) of 5e-4", "block_size=1024".
_IS = r"\)?\s*(?:of|de|von|=|:|is|ist|es|was)?\s*"
_LENGTH = (
    r"(?:block[ _]size|block(?=\s[0-9]{3,5}\b)|context(?: length)?|contexto|kontext(?:l\u00e4nge)?"
    r"|seq(?:uence)?[ _]len(?:gth)?|longitud de secuencia|sequenzl\u00e4nge)"
)
_ACCUMULATION = (
    r"(?:grad(?:ient)?[-_ ]accum(?:ulation)?(?:[-_ ]steps)?|acumulaci\u00f3n de gradientes?"
    r"|gradientenakkumulation)"
)
_TIMES_GRADIENTS = r"(?=(?: ?[\u00d7x*]|,?(?: and| y| und)?) ?grad)"
_STEPS = r"(?:iterations|iteraciones|iterationen|steps|pasos|schritte)\b"
_BEHIND = r"(?!\s(?:from|warm|de calent|per|pro|por))"
_MANY = rf"{_N}{_UNIT}\s*(?:de\s)?(?:raw\s)?tokens?"
_TIMES = r"\s?[\u00d7x*]\s?"
_EACH_STEP = r"\s?(?:/|per|por|pro|je|a|each)\s?(?:iter|step|paso|schritt)"
_MILLIONS = r"(M|B|Mio\.?|millones|million|Millionen)"
_FRONT = r"(?:^|[\s(~\u2248*])"
_PERCENT = r"([0-9]{1,3}(?:[.,][0-9]+)?)(?:\s?[-\u2013\u2014]\s?([0-9]{1,3}(?:[.,][0-9]+)?))?\s?%"
_GPU = (
    r"\b(?:(?:NVIDIA\s)?(?:GeForce\s)?(?:RTX|GTX)\s?(?:PRO\s?)?[0-9]{4}\s?(?:Ti)?(?:\s(?:Super|SUPER))?(?:\sLaptop)?"
    r"|RTX\sA[0-9]{4}|(?:Tesla\s)?(?:T4|V100|P100|P40|M40)"
    r"|(?:NVIDIA\s)?(?:A100|H100|H200|A6000|L40S?|L4|A10G?|B200))\b"
)
# By name: a reader, and patterns, of which the first one that finds something gives the value.
_Rule = tuple[Callable[[re.Match[str]], Any], tuple[str, ...]]
_SETTINGS: dict[str, _Rule] = {
    "learning_rate": (_rate, (rf"(?:\blr|learning[ _]rate|tasa de aprendizaje|lernrate){_IS}{_RATE}",)),
    "min_lr": (_rate, (rf"\bmin[ _]lr{_IS}{_RATE}",)),
    "block_size": (_count, (rf"{_LENGTH}{_IS}{_N}\b(?!\s?[kKMB%])",)),
    "gradient_accumulation_steps": (_count, (rf"{_ACCUMULATION}{_IS}{_N}\b",)),
    "batch_size": (_count, (rf"\bbatch(?:[-_ ]?size)?{_IS}{_N}{_TIMES_GRADIENTS}",)),
    "max_iters": (
        _count, (rf"{_FRONT}{_NO_PLACE}{_N}(k)?\s{_STEPS}{_BEHIND}", r"max_iters\s*[=:]\s*([0-9]{1,9})")
    ),
    "warmup_iters": (_count, (rf"(?:warm-?up|calentamiento|aufw\u00e4rm\w*){_IS}{_N}\b(?!\s?%)",)),
    "weight_decay": (_rate, (rf"weight[ _]decay{_IS}(0[.,][0-9]{{1,4}})",)),
    "dropout": (_rate, (rf"dropout{_IS}(0?[.,][0-9]{{1,3}}|0)(?![\w.,])",)),
}  # fmt: skip
_FACTS: dict[str, _Rule] = {
    "tokens_per_step": (
        _product,
        (rf"(?:{_N}{_TIMES})?{_N}{_TIMES}(512|1024|2048|4096|8192|1,024|2,048)\b(?!\s?[\u00d7x*])",
         rf"(?<![\d.,\u00d7x*])(?<![\u00d7x*] ){_N}\s(?:de\s)?tokens?{_EACH_STEP}",
         rf"tokens?{_EACH_STEP}\w*\s?[:=]\s?{_N}\b(?!{_UNIT})"),
    ),
    "tokens_per_step_about": (_count, (rf"{_MANY}{_EACH_STEP}",)),
    "tokens_seen": (
        _count, (rf"{_MANY}\s(?:seen|vistos|gesehen|processed|procesados|verarbeitet|so far)",)
    ),
    "parameters_about": (
        _count,
        (rf"{_FRONT}{_N}\s?{_MILLIONS}\s?(?:de\s)?-?(?:par[a\u00e1]m|weights)",
         rf"{_FRONT}{_N}(M)[- ](?:GPT|model|modelo|LLM)\b"),
    ),
    "train_tokens_about": (
        _count, (rf"{_MANY}\s(?:de|of|von|aus|from)\s(?:the\s|la\s)?(?:FineWeb|OpenWeb|C4|Tiny|Wiki|text)",)
    ),
    "mfu": (
        _share,
        (rf"MFU(?:\s(?:of|de|von|is|at))?\s?[:=]?\s?[~\u2248]?{_PERCENT}", rf"{_PERCENT}\s(?:de\s)?MFU"),
    ),
    "gpu": (_gpu, (_GPU,)),
    "vocab_size": (
        _count,
        (rf"(?:vocab(?:ulary|ulario|_size| size)?|vokabular){_IS}{_N}\b(?!k)",
         r"([0-9]{2,3}[.,][0-9]{3}|[0-9]{4,6})\s(?:vocab|tokens? in the vocab)"),
    ),
    "data": (_data, (rf"\b({'|'.join(_DATA)})\b",)),
    "shard": (_name, (r"\b(CC-MAIN-20[0-9]{2}-[0-9]{2})\b",)),
}  # fmt: skip
# Names, and words that say so.
_WORDS: tuple[tuple[str, bool, Any, str], ...] = (
    ("dropout", True, 0.0, r"\b(?:sin|no|ohne|without|zero|kein)\s+dropout"),
    ("compile", True, True, r"\b(?:pytorch|torch)[ .]compile\b"),
    *(("optimizer", True, name.lower(), rf"\b{name}\b") for name in ("AdamW", "Muon", "Adafactor", "SOAP")),
    ("tokenizer", False, "gpt2",
     r"GPT-?2(?:'s)?\s(?:BPE|tokeni[sz]er|tokens)|token\w+ (?:original )?(?:de|von) GPT-?2|r50k"),
    ("tokenizer", False, "char", r"char(?:acter)?[- ]level|a nivel de car\u00e1cter|zeichenweise"),
)  # fmt: skip


def _always(value: Any) -> Callable[[re.Match[str]], Any]:
    return lambda found: value


# (name, whether it is a setting, pattern, reader).
RULES = (
    *(
        (name, into is _SETTINGS, re.compile(pattern, 0 if name == "gpu" else _CASE), reader)
        for into in (_SETTINGS, _FACTS)
        for name, (reader, patterns) in into.items()
        for pattern in patterns
    ),
    *(
        (name, setting, re.compile(pattern, _CASE), _always(value))
        for name, setting, value, pattern in _WORDS
    ),
)
_MAY_MATTER = re.compile(
    r"lr\b|rate|aprendizaje|block|cont|kontext|seq|secuencia|ac[ck]u?m|akkum|batch|iter|step|paso|schritt|warm|calent"
    r"|dropout|compile|adamw|muon|soap|decay|token|param|\bM[ -]|mfu|[rg]tx|[tvpalhb][0-9]{1,3}|gpt|char"
    r"|zeichen|vo[ck]ab|web|stories|climb|pajama|wiki|dclm|dolma|pile|c4|shakespeare|cc-main|=",
    _CASE,
)
# What stands in such a sentence is not what the run is, but what it might be, or what others are.
_ADVICE = re.compile(
    r"\b(?:could|would|should|try|might|meant|wanted|instead of|typical|typically|expect|compare\w*|versus|vs"
    r"|reach|standard|cabr[i\u00ed]a|podr[i\u00ed]as?|deber[i\u00ed]as?|prueba|quer[i\u00ed]as|t[i\u00ed]pic[ao]s?"
    r"|esperado|comparar|est[a\u00e1]ndar|f[a\u00e1]cilmente|llegar|k\u00f6nnte\w*|w\u00fcrde\w*|sollte\w*|versuch\w*"
    r"|passen|\u00fcblich\w*|typisch\w*|erreich\w*|vergleich\w*|wolltest)\b",
    _CASE,
)
# "MFU 11-12% is typical" is a figure of the run all the same.
_STILL = frozenset(("mfu", "gpu", "block_size", "gradient_accumulation_steps", "data"))
# The first iteration alone, as people quote it.
_FIRST_STEP = re.compile(
    r"(?:first (?:iteration|iter|step)|primera? (?:iteraci\u00f3n|paso)|erste[rn]? (?:iteration|schritt))"
    r"\D{1,40}?"
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
        """Is this line advice, or what advice announced? `begins`, `ends`: does the text begin or end
        with it, where it may be cut?"""
        plain = line.strip()
        if self._is_announced(plain):
            return True
        if (
            not plain
            or self._lines >= MOST_LINES
            or len(line) > 5000
            or line.count("|") > 2
            or line.count(" --") > 3  # a command line: its flags are no sentence
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
            if found is None or (ends and found.end() == len(line)):
                continue
            if begins and not _WORD.search(line, 0, found.start()):
                continue  # its own beginning may be lost
            if (value := reader(found)) is not None:
                self._note(into, name, value, found[0].strip(" ("))
        return advice

    def is_advice(self, line: str) -> bool:
        """Does a config's line stand among what was announced as advice?"""
        return self._is_announced(line.strip())

    def _is_announced(self, plain: str) -> bool:
        """Behind "you could have tried:" all is advice until an empty line or the end of the code."""
        if not self._announced:
            return False
        if plain.startswith(("```", "~~~")):
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
