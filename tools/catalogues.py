"""Writes the gettext catalogues under onecard/locale: `make catalogues`.

The template has every sentence that onecard/ passes to `_` or `ngettext`; the .po files keep the translations
of those that are still there; the .mo files are what Python reads. New sentences are left empty, never
guessed from similar ones: the tests name them until somebody has translated them.

The same sources always give the same bytes: no dates, no version of the tool, no line numbers (they would
change with every line of code), sentences in alphabetical order and on one line each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).resolve().parents[1]
LOCALE = ROOT / "onecard" / "locale"
TEMPLATE = LOCALE / "onecard.pot"
LANGUAGES = {"es": "Spanish", "de": "German"}
# What a knob does is its third argument, what an option does its second; N_ marks what is translated where it
# is shown.
KEYWORDS: dict[str, Any] = {"_": None, "N_": None, "ngettext": (1, 2), "knob": (3,), "option": (2,)}


class PlainCatalog(Catalog):
    """With the headers that mean something, and no others."""

    @property
    def mime_headers(self) -> list[tuple[str, str]]:
        headers = [
            ("Project-Id-Version", "onecard"),
            ("MIME-Version", "1.0"),
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Transfer-Encoding", "8bit"),
        ]
        if self.locale is not None:
            # Both languages have two forms, with English's rule.
            headers += [("Language", str(self.locale)), ("Plural-Forms", "nplurals=2; plural=(n != 1);")]
        return [*headers[:-1], (headers[-1][0], headers[-1][1] + "\n")]


def po_path(language: str) -> Path:
    return LOCALE / language / "LC_MESSAGES" / "onecard.po"


def extracted() -> PlainCatalog:
    """Every sentence of the package, untranslated."""
    catalog = PlainCatalog(fuzzy=False, charset="utf-8", header_comment="# Sentences of onecard.")
    found: Iterable[Any] = extract_from_dir(str(ROOT / "onecard"), [("**.py", "python")], keywords=KEYWORDS)
    for filename, line, message, _comments, context in found:
        catalog.add(message, None, [(f"onecard/{filename}", line)], context=context)
    return _without_flags(catalog)


def updated(language: str, template: Catalog, before: bytes) -> PlainCatalog:
    """The template with the translations that are there."""
    comment = f"# {LANGUAGES[language]} translations of onecard's sentences."
    catalog = PlainCatalog(locale=language, fuzzy=False, charset="utf-8", header_comment=comment)
    old = read_po(BytesIO(before), locale=language)
    for message in template:
        if not message.id:
            continue
        known = old.get(message.id, message.context)
        said = known.string if known is not None and not known.fuzzy else None
        notes = known.user_comments if known is not None else ()
        catalog.add(message.id, said, message.locations, user_comments=notes, context=message.context)
    return _without_flags(catalog)


def _without_flags(catalog: PlainCatalog) -> PlainCatalog:
    """Which flags (python-format ...) are guessed depends on Babel's version."""
    for message in catalog:
        message.flags.clear()
    return catalog


def as_po(catalog: Catalog) -> bytes:
    buffer = BytesIO()
    write_po(buffer, catalog, width=0, sort_output=True, include_lineno=False, ignore_obsolete=True)
    return buffer.getvalue().rstrip() + b"\n"


def as_mo(catalog: Catalog) -> bytes:
    buffer = BytesIO()
    write_mo(buffer, catalog)
    return buffer.getvalue()


def files() -> dict[Path, bytes]:
    """What every catalogue file should hold, from the sources and the .po files as they are."""
    template = extracted()
    wanted = {TEMPLATE: as_po(template)}
    for language in LANGUAGES:
        path = po_path(language)
        catalog = updated(language, template, path.read_bytes() if path.exists() else b"")
        wanted |= {path: as_po(catalog), path.with_suffix(".mo"): as_mo(catalog)}
    return wanted


def main() -> int:
    for path, content in files().items():
        if path.exists() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        print(path.relative_to(ROOT))
    missing = [
        (language, message.id)
        for language in LANGUAGES
        for message in read_po(BytesIO(po_path(language).read_bytes()), locale=language)
        if message.id and not all(message.string if isinstance(message.string, tuple) else [message.string])
    ]
    for language, text in missing:
        print(f"{language}: not translated: {text}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
