"""One word for one thing: the glossary's other words stand nowhere in names, messages or pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What is said instead is in the glossary (docs/glossary.md). As regular expressions, of whole words.
BANNED = {
    r"hand(s|ed|ing)? (it |them |kernels )?out|the host busy|handing_out": "kernel launch",
    r"rehears\w*": "warm-up",
    r"visitors?|visiting|travell(er|ers|ing)|park|parked|unpark|at_home": "streamed buffers, host copy",
    r"wish(es|ed)?": "pause request",
    r"in vain": "retries",
    r"put out of the way": "quarantined",
    r"tells|told|telling|is told|are told": "reports, message",
    r"recalled": "unverified",
    r"recordings?|is_recorded|may_record": "CUDA graph, capture",
    r"as it stands|as they stand": "as given",
    r"carried out": "setting",
    r"neighbou?rs?": "other processes",
    r"draw text|draws? samples": "generate text",
}
_PATTERNS = {
    re.compile(rf"(?<![^\W_])({pattern})(?![^\W_])", re.IGNORECASE): said for pattern, said in BANNED.items()
}
ROOMS = (
    "arch", "cli", "config", "convert", "data", "errors", "files", "generate", "hardware", "language",
    "model", "optim", "plan", "report", "run", "terminal", "train",
)  # fmt: skip


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Names and strings of a module, docstrings among them; and its comments."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield line, node.value
    for number, text in enumerate(source.splitlines(), 1):
        if "#" in text:
            yield number, text.partition("#")[2]


def banned_in(text: str) -> str:
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)
    for pattern, said in _PATTERNS.items():
        if found := pattern.search(plain):
            return f"{found[0]!r}: say {said}"
    return ""


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_speaks_the_glossarys_words(room: str) -> None:
    place = ROOT / "onecard" / room
    paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{line}: {why}"
        for path in paths
        for line, text in words_of(path)
        if (why := banned_in(text))
    ]
    assert found == []


def test_the_pages_speak_the_glossarys_words() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        f"{path.name}:{number}: {why}"
        for path in pages
        if path.name != "glossary.md"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (why := banned_in(line))
    ]
    assert found == []


SEEN = ["_rehearse", "tells", "LayerVisitor", "it was told", "unpark", "kernels handed out"]


@pytest.mark.parametrize("text", SEEN)
def test_the_check_sees(text: str) -> None:
    assert banned_in(text)


@pytest.mark.parametrize("text", ["total", "drawing", "way", "sparkle", "recorded"])
def test_the_check_leaves_other_words_alone(text: str) -> None:
    assert not banned_in(text)
