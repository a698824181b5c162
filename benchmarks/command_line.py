"""What every results file says of how it was made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def command_line(words: Sequence[str] | None = None) -> str:
    """The command as anybody would type it: files by their names, without the folders of this machine."""
    script, *rest = sys.argv if words is None else words
    return " ".join(["python", f"benchmarks/{Path(script).name}", *map(_without_folder, rest)])


def _without_folder(word: str) -> str:
    name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if value.startswith(("/", "~", "..")):
        value = Path(value).name
    return f"{name}{equals}{value}"
