"""The language a person reads: English in the code, the others as gettext catalogues under locale/.

ONECARD_LANG decides, else the usual variables (LANGUAGE, LC_ALL, LC_MESSAGES, LANG). What programs read
(JSON, logs, keys, formulas) stays English. Catalogues are .po files with their compiled .mo beside them; a
test holds the two together.
"""

from __future__ import annotations

import gettext
import os
from functools import cache
from pathlib import Path

LANGUAGES = ("en", "es", "de")
CATALOGUES = Path(__file__).parent / "locale"


def wanted_language() -> str:
    """The first language asked for that there is; English otherwise."""
    names = (os.environ.get(n, "") for n in ("ONECARD_LANG", "LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"))
    asked = next((name for name in names if name), "en")
    for name in asked.split(":"):
        language = name.partition(".")[0].partition("_")[0].lower()
        if language in LANGUAGES:
            return language
        if language in ("c", "posix"):
            break
    return "en"


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation("onecard", CATALOGUES, [language], fallback=True)


def _(text: str) -> str:
    """This sentence in the reader's language. Values go in afterwards: _("{n} days").format(n=3)."""
    return _catalogue(wanted_language()).gettext(text)


def ngettext(one: str, many: str, count: int) -> str:
    return _catalogue(wanted_language()).ngettext(one, many, count)
