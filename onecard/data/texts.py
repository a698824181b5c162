"""Texts that UTF-8 can write, which is what files hold and what encoders read."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """Lone surrogates (from JSON escapes or odd file names) have no UTF-8; they become replacement marks."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
