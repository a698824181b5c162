"""The cards onecard knows, and how a name finds one of them.

A name is read as words, not as a substring: "RTX 4070" inside "RTX 4070 Ti Super" must not count.
Brand words fall away, the remaining words have to be the same ones, and a memory size that is given
has to be the card's. Two things may stay unsaid, the form factor (SXM, PCIe) and the memory size;
where several cards differ only in these, the name is ambiguous and nothing is guessed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from onecard.errors import UserError
from onecard.language import _, number


class UnknownCardError(UserError):
    """A name that is none of ours, as opposed to one that is several."""


@dataclass(frozen=True)
class Card:
    """One row of gpus.toml. Rates are dense TFLOPS (int8: TOPS); None is "does not exist or not known"."""

    name: str
    memory_gb: float
    compute_capability: tuple[int, int] | None = None
    sm: int | None = None
    boost_mhz: float | None = None
    bandwidth_gbps: float | None = None
    l2_mb: float | None = None
    tdp_w: float | None = None
    bf16: float | None = None
    fp16: float | None = None  # where there is no bf16 and fp32 accumulation halves fp16acc
    fp16acc: float | None = None
    tf32: float | None = None
    fp8: float | None = None
    int8: float | None = None
    fp32: float | None = None
    note: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def l2_bytes(self) -> int | None:
        return int(self.l2_mb * 2**20) if self.l2_mb is not None else None

    def peak_tflops(self, dtype: str) -> float | None:
        """The rate that training in `dtype` can reach at best, or None where the card cannot do it.

        float16 is the fp32-accumulate rate, the same as bfloat16's. Of cards older than bf16 GeForce has one
        of its own; datacenter cards (T4, V100) do not halve it, so their fp16 figure stands.
        float32 is the TF32 rate where the card has TF32, because the trainer allows TF32 matmuls.
        """
        if dtype == "bfloat16":
            return self.bf16
        if dtype == "float16":
            return next((rate for rate in (self.bf16, self.fp16, self.fp16acc) if rate is not None), None)
        if dtype == "float32":
            return self.tf32 if self.tf32 is not None else self.fp32
        raise ValueError(f"no peak rate is defined for dtype {dtype!r}")


def is_laptop(card: Card) -> bool:
    return "laptop" in read_words(card.name).words


@cache
def all_cards() -> tuple[Card, ...]:
    """Every card in gpus.toml, in the file's order."""
    text = resources.files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(_card_from_table(table) for table in tomllib.loads(text)["card"])


def _card_from_table(table: dict[str, Any]) -> Card:
    fields = dict(table)
    if "compute_capability" in fields:
        # A string in the file: as a number, 12.0 and a future 12.10 would be the same as 12 and 12.1.
        major, minor = fields["compute_capability"].split(".")
        fields["compute_capability"] = (int(major), int(minor))
    fields["aliases"] = tuple(fields.get("aliases", ()))
    return Card(**fields)


# Words that say who made the card but not which card it is. "quadro" is missing on purpose: a Quadro RTX 6000
# is another card than any other RTX 6000.
_VENDOR_OF_WORD = {
    "nvidia": "nvidia",
    "geforce": "nvidia",
    "rtx": "nvidia",
    "gtx": "nvidia",
    "tesla": "nvidia",
    "amd": "amd",
    "radeon": "amd",
    "rx": "amd",
}
_FILLER_WORDS = frozenset({"gpu", "graphics", "card", "generation", "desktop", "desktops", "corporation"})
# The same in Spanish and German, and the small words between: never taken out of a longer word.
_SMALL_WORDS = frozenset({
    "the", "for", "of", "in", "with", "version",
    "de", "del", "la", "el", "una", "un", "para", "con", "en", "tarjeta", "gráfica", "grafica", "placa",
    "versión", "escritorio", "sobremesa", "ordenador", "pc",
    "die", "der", "das", "eine", "ein", "für", "fur", "fuer", "von", "mit", "im", "grafikkarte", "karte",
})  # fmt: skip
_SYNONYMS = {
    "mobile": "laptop", "notebook": "laptop", "laptops": "laptop", "notebooks": "laptop",
    "portátil": "laptop", "portatil": "laptop", "portátiles": "laptop", "portatiles": "laptop",
    "móvil": "laptop", "movil": "laptop",
}  # fmt: skip
_VARIANT_WORDS = frozenset({"ti", "super", "laptop", "ada", "xtx", "xt"})

# "12GB", "12 GiB" and, standing alone, "12g". A10G is a card, not 10 GB.
_MEMORY = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)[\s_-]*gi?b(?![^\W_])|(?<![\w.])(\d+)g(?!\w)")
_TRADEMARK = re.compile(r"\((?:r|tm)\)|[®™]")
# Runs of letters or of digits, so that "rtx4070", "RTX 4070" and "RTX-4070" read the same; a letter outside
# ASCII is a word too and so makes a name unknown rather than being overlooked.
_RUN = re.compile(r"sxm\d?|hbm\d?e?|[^\W\d_]+|\d+")
_KNOWN_WORDS = sorted(
    {*_VENDOR_OF_WORD, *_FILLER_WORDS, *_SYNONYMS, *_VARIANT_WORDS, "pcie", "pro", "sff", "titan"},
    key=lambda word: (-len(word), word),
)
_GLUED_WORDS = re.compile("|".join([*_KNOWN_WORDS, "[a-z]$"]))


@dataclass(frozen=True)
class CardWords:
    """What a name says, once spelling is taken out of it."""

    words: tuple[str, ...]  # in order, brand words dropped: ("4070", "ti", "super"), ("h", "100")
    form_factors: frozenset[str]
    memory_gb: frozenset[float]
    vendors: frozenset[str]

    @property
    def identity(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """What two names must share to mean one model: "Ti Super" is "Super Ti", but "S40L" is no L40S."""
        model = tuple(word for word in self.words if word not in _VARIANT_WORDS)
        return model, frozenset(self.words) & _VARIANT_WORDS


@lru_cache(maxsize=1024)
def read_words(text: str) -> CardWords:
    """Take a card's name apart: "NVIDIA GeForce RTX4070Ti SUPER 16GB" is 4070 + ti + super, 16 GB."""
    text = _TRADEMARK.sub(" ", text.lower())
    memory = frozenset(float(number or alone) for number, alone in _MEMORY.findall(text))
    words: list[str] = []
    form_factors: set[str] = set()
    vendors: set[str] = set()
    for word in _split(_MEMORY.sub(" ", text)):
        if word in _VENDOR_OF_WORD:
            vendors.add(_VENDOR_OF_WORD[word])
        elif word == "pcie" or word.startswith("sxm"):
            form_factors.add(word)
        elif word not in _FILLER_WORDS | _SMALL_WORDS:
            words.append(_SYNONYMS.get(word, word))
    return CardWords(tuple(words), frozenset(form_factors), memory, frozenset(vendors))


def _split(text: str) -> Iterable[str]:
    for run in _RUN.findall(text):
        # "tisuper" and "geforcertx" come apart only if known words cover them; one letter may be left over,
        # the first of the model's own name ("RTXA6000").
        parts = _GLUED_WORDS.findall(run)
        yield from parts if "".join(parts) == run else [run]


def match_card(text: str, memory_gib: float | None = None) -> Card | None:
    """The one card this name means, or None where it means none of ours or more than one.

    memory_gib is what the driver reports: it breaks ties, and it keeps a card that shares its name with
    one of ours but has other memory (RTX 4070, 12 GB) from being taken for it.
    """
    candidates = _candidates(text, memory_gib)
    return candidates[0] if len(candidates) == 1 else None


def match_rates(text: str) -> Card | None:
    """The card where only speed matters: cards that differ in memory alone are one, without its size."""
    candidates = _candidates(text, None)
    rates = {(c.bf16, c.fp16, c.fp16acc, c.tf32, c.fp32, c.compute_capability) for c in candidates}
    if len(candidates) < 2 or len(rates) > 1:
        return match_card(text)
    # Where they differ in more than memory (A100 SXM and PCIe), the name that is shown says less as well.
    names = [[word for word in c.name.split() if not _MEMORY.fullmatch(word.lower())] for c in candidates]
    shared = [word for word in names[0] if all(word in name for name in names)]
    return replace(candidates[0], name=" ".join(shared))


def find_card(text: str, memory_gib: float | None = None) -> Card:
    """The card of that name; anything other than exactly one is a UserError that names the near ones."""
    candidates = _candidates(text, memory_gib)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        # The one with the most memory: where two share a name, people who train have that one.
        example = max(candidates, key=lambda card: card.memory_gb)
        raise UserError(
            _("'{name}' could be more than one card").format(name=text),
            why=_("it fits {cards}").format(cards=_all_of(candidates)),
            hint=_("say which, for example '{card}'").format(card=example.name),
        )
    raise _unknown_card(text, memory_gib)


def _candidates(text: str, memory_gib: float | None) -> list[Card]:
    said = read_words(text)
    return [
        card
        for card in all_cards()
        if any(_same_card(said, read_words(name), card) for name in (card.name, *card.aliases))
        and _memory_fits(said, memory_gib, card)
    ]


def _same_card(said: CardWords, ours: CardWords, card: Card) -> bool:
    return (
        said.identity == ours.identity
        and all(any(_same_form_factor(a, b) for b in ours.form_factors) for a in said.form_factors)
        and said.vendors <= {_vendor(card)}
    )


def _same_form_factor(a: str, b: str) -> bool:
    """SXM4 is an SXM, but SXM2 is not SXM3."""
    return a.startswith(b) or b.startswith(a)


def _vendor(card: Card) -> str:
    return next(iter(read_words(card.name).vendors), "nvidia")


def _memory_fits(said: CardWords, memory_gib: float | None, card: Card) -> bool:
    """A size in the name is the one on the box; a reported one is up to 8% less (ECC, reserved memory).

    The nearest pair of cards that share a name, 10 and 12 GB, is 17% apart.
    """
    if any(size != card.memory_gb for size in said.memory_gb):
        return False
    return memory_gib is None or 0.87 * card.memory_gb <= memory_gib <= 1.08 * card.memory_gb


def _unknown_card(text: str, memory_gib: float | None) -> UnknownCardError:
    said = read_words(text)
    list_them_all = _("onecard gpus --all   lists every known card")
    if not said.words:
        return UnknownCardError(_("'{name}' does not name a card").format(name=text), hint=list_them_all)
    namesakes = [card for card in all_cards() if read_words(card.name).identity == said.identity]
    near = namesakes + [card for card in _near(said) if card not in namesakes]
    sizes = [number(size, "g") + " GB" for size in sorted(said.memory_gb)]
    if memory_gib is not None:
        sizes.append(number(memory_gib, ".1f") + " GiB")
    why = ""
    if namesakes and sizes and not any(_memory_fits(said, memory_gib, card) for card in namesakes):
        why = _("onecard knows {cards}; one with {size} is a different card")
        why = why.format(cards=_all_of(namesakes), size=sizes[-1])
    elif namesakes:
        why = _("onecard knows {cards}; this is a different variant").format(cards=_all_of(namesakes))
    hint = ""
    if near:
        hint = _("did you mean {names}?").format(names=_listed(near[:4], _("{names} or {last}"))) + "\n"
    return UnknownCardError(
        _("no known card is called '{name}'").format(name=text), why, hint + list_them_all
    )


def _near(said: CardWords) -> list[Card]:
    """Cards with the same model number or, failing these, with a name a typo away; nearest first."""
    spelled = "".join(said.words)
    # Shorter numbers prove no kinship: A100, H100 and V100 are three families.
    numbers = {word for word in said.words if word.isdigit() and len(word) >= 4}
    likeness: dict[Card, float] = {}
    relatives: set[Card] = set()
    for card in all_cards():
        theirs = read_words(card.name).words
        likeness[card] = SequenceMatcher(None, spelled, "".join(theirs)).ratio()
        if sorted(spelled) == sorted("".join(theirs)):
            likeness[card] = 1.0  # two digits swapped: the commonest slip, which the ratio underrates
        if numbers & set(theirs):
            relatives.add(card)
    found = relatives or {card for card, ratio in likeness.items() if ratio >= 0.6}
    return sorted((card for card in all_cards() if card in found), key=lambda card: -likeness[card])


def _all_of(cards: list[Card]) -> str:
    return _listed(cards, _("{names} and {last}"))


def _listed(cards: list[Card], several: str) -> str:
    *names, last = [card.name for card in cards]
    return several.format(names=", ".join(names), last=last) if names else last
