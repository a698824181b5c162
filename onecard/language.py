"""The language a person reads: English in the code, the others as gettext catalogues under locale/.

ONECARD_LANG decides, else the usual variables (LANGUAGE, LC_ALL, LC_MESSAGES, LANG): the first that is set.
LANGUAGE may be a list, as everywhere (fr:es:en); of it the first language that there is counts. C and POSIX
mean English, and so does a language that is not here.

What programs read (JSON, logs, keys) stays English: with --json a command speaks English
altogether. Numbers in sentences and tables have the language's own points and commas: 4,396 tokens/s would be
four of them in Spanish or German.

Catalogues are .po files with their compiled .mo beside them; `make catalogues` writes both, and a test holds
them together.
"""

from __future__ import annotations

import gettext
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

LANGUAGES = ("en", "es", "de")
CATALOGUES = Path(__file__).parent / "locale"

_english_only: ContextVar[bool] = ContextVar("english_only", default=False)


def wanted_language() -> str:
    """The first language asked for that there is; English otherwise."""
    if _english_only.get():
        return "en"
    names = (os.environ.get(n, "") for n in ("ONECARD_LANG", "LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"))
    asked = next((name for name in names if name), "en")
    for name in asked.split(":"):
        # es, es_MX, es_MX.UTF-8, de_DE@euro, and es-MX as people write it
        language = re.split(r"[-_.@]", name.strip(), maxsplit=1)[0].lower()
        if language in LANGUAGES:
            return language
        if language in ("c", "posix"):
            break
    return "en"


@contextmanager
def english(on: bool = True) -> Iterator[None]:
    """For what a program will read: inside, sentences are English whatever the reader's language."""
    before = _english_only.set(on or _english_only.get())
    try:
        yield
    finally:
        _english_only.reset(before)


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation("onecard", CATALOGUES, [language], fallback=True)


_SWAPPED = str.maketrans(",.", ".,")


def number(value: float, form: str) -> str:
    """A number as the language writes it; `form` is Python's, such as ",.1f"."""
    text = format(value, form)
    return text if wanted_language() == "en" else _Sentence(text.translate(_SWAPPED), text)


def figures(text: str) -> str:
    """English text with its figures as the language writes them: formulas, and remarks that a table holds."""
    if wanted_language() == "en":
        return text
    return re.sub(r"\d[\d.,]*\d", lambda found: found[0].translate(_SWAPPED), text)


class _Number(float):
    def __format__(self, form: str) -> str:
        return number(
            int(self) if self.is_integer() and "f" not in form and "%" not in form else float(self), form
        )


class _Sentence(str):
    """A translated sentence, with its English. Numbers put into it are written as its language does."""

    english: str

    def __new__(cls, text: str, english: str = "") -> _Sentence:
        sentence = super().__new__(cls, text)
        sentence.english = english
        return sentence

    def format(self, *values: object, **named: object) -> str:
        text = super().format(*map(_local, values), **{name: _local(value) for name, value in named.items()})
        in_english = {name: english_of(value) for name, value in named.items()}
        return _Sentence(text, self.english.format(*map(english_of, values), **in_english))


def _local(value: object) -> object:
    return _Number(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def english_of(value: object) -> object:
    """A sentence as the code has it, for logs on disk, which stay English; any other value as it is."""
    return value.english if isinstance(value, _Sentence) else value


def _(text: str) -> str:
    """This sentence in the reader's language. Values go in afterwards: _("{n} days").format(n=3)."""
    language = wanted_language()
    return text if language == "en" else _Sentence(_catalogue(language).gettext(text), text)


def N_(text: str) -> str:  # noqa: N802 - gettext's own name
    """Marks a sentence that is translated where it is shown."""
    return text


def ngettext(one: str, many: str, count: int) -> str:
    """The same where the number decides between two forms."""
    translated = _catalogue(wanted_language()).ngettext(one, many, count)
    return _Sentence(translated, one if count == 1 else many)


def joined(parts: Iterable[str], separator: str = ", ") -> str:
    """Sentences one after the other, with their English."""
    parts = list(parts)
    return _Sentence(separator.join(parts), separator.join(str(english_of(part)) for part in parts))
