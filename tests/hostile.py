"""Files as a careless program, a broken disk or a stranger leaves them, from a seed."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PLACE = "\u2603 a value goes here"
VALUES = [
    "1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 5000, "1" + "0" * 4000, "-1", "0", "0.5", "-0.0",
    "1e308", "1" + "0" * 19, "16777216", "1000000000", "true", "false", "null", '"3"', '""', '"text"',
    '"\\ud800"', '"\\u0000"', "[]", "{}", "[[1]]", '{"a": {"a": 1}}', '"' + "x" * 10**6 + '"',
    "[" * 100_000 + "]" * 100_000, "[" * 900 + "]" * 900, "[" + "0," * 10**5 + "0]",
    '["a", "a", "", "<|endoftext|>"]',
]  # fmt: skip


def _places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there are values, the content itself among them."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        inside = list(content.items())
    elif isinstance(content, list):
        inside = list(enumerate(content[:20]))
    return [path, *(place for key, value in inside for place in _places(value, (*path, key)))]


def _with(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(content, dict):
        return {
            key: _with(inner, path[1:], value) if key == path[0] else inner for key, inner in content.items()
        }
    return [_with(inner, path[1:], value) if at == path[0] else inner for at, inner in enumerate(content)]


def other_value(text: str, chance: random.Random) -> str:
    content = json.loads(text)
    # Whatever is near the top is as likely as whatever there is a lot of.
    places = _places(content)
    depth = chance.choice(sorted({len(place) for place in places}))
    path = chance.choice([place for place in places if len(place) == depth])
    text = json.dumps(_with(content, path, _PLACE), ensure_ascii=False)
    return text.replace(json.dumps(_PLACE, ensure_ascii=False), chance.choice(VALUES))


def without_a_key(text: str, chance: random.Random) -> str:
    content = json.loads(text)
    path = chance.choice([place for place in _places(content) if place and isinstance(place[-1], str)])
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return json.dumps(content)


def key_twice(text: str, chance: random.Random) -> str:
    content = json.loads(text)
    name = chance.choice(sorted(content))
    return json.dumps(content)[:-1] + f", {json.dumps(name)}: {chance.choice(VALUES)}}}"


def another_key(text: str, chance: random.Random) -> str:
    content = json.loads(text)
    path = chance.choice([place for place in _places(content) if place and isinstance(place[-1], str)])
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[chance.choice(["", "\ud800", "__class__", "x" * 10_000])] = inner.pop(path[-1])
    return json.dumps(content)


def wrapped(text: str, chance: random.Random) -> str:
    return chance.choice(["[%s]", '{"a": %s}', "%s %s", "\ufeff%s", "%s\0"]).replace("%s", text)


TEXTS: list[Callable[[str, random.Random], str]] = [
    *[other_value] * 5, without_a_key, key_twice, another_key, wrapped,
]  # fmt: skip


def truncated(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def encoded(path: Path, chance: random.Random) -> None:
    text = path.read_text(encoding="utf-8") or "{}"
    kind = chance.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"])
    path.write_bytes(text.encode(kind))


def wide(path: Path, chance: random.Random) -> None:
    """Small on disk, large in memory."""
    many = 15 * 2**20
    path.write_bytes(
        chance.choice(
            [
                b"[" + b"[]," * (many // 3) + b"0]",
                b"[" + b'{"a":1},' * (many // 8) + b"0]",
                b"{" + b",".join(b'"%d":{}' % n for n in range(many // 12)) + b"}",
                b'{"schema": 1, "a": "' + b"\\ud83d\\ude00" * (many // 12) + b'"}',
                b"[" + b"0.5," * (many // 4) + b"0]",
            ]
        )
    )


def fifo(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def a_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path, chance: random.Random) -> None:
    os.truncate(path, 23 * 2**30)


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.choice([b"", b"\0" * 4096, b"null", b"\xff\xfe\xfd"]))


FILES: list[Callable[[Path, random.Random], None]] = [
    truncated, encoded, wide, fifo, endless, a_folder, huge, empty,
]  # fmt: skip


def harmed(path: Path, chance: random.Random) -> str:
    """Does one thing to a JSON file, or to a line of a file of lines; what it was."""
    if chance.random() < 0.4:
        kind = chance.choice(FILES)
        kind(path, chance)
        return kind.__name__
    change = chance.choice(TEXTS)
    before = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = before.splitlines()
        at = chance.randrange(len(lines))
        lines[at] = change(lines[at], chance)
        text = "\n".join(lines) + "\n"
    else:
        before = json.dumps(json.loads(before))  # as the changed text is written
        text = change(before, chance)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return f"{change.__name__} ({_difference(before, text)})"


def _difference(before: str, text: str) -> str:
    """Where they begin to differ, for the message of a test."""
    at = next((n for n, (one, other) in enumerate(zip(before, text, strict=False)) if one != other), 0)
    return f"{before[max(0, at - 30) : at + 30]!r} became {text[max(0, at - 30) : at + 60]!r}"


def sealed_again(path: Path) -> bool:
    """What says by itself, or in a file beside it, that it is as it was written says so of this, too."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 2**24:
        return False
    if path.name == "state.json":
        content = path.read_bytes()
        manifest = json.loads((path.parent / "manifest.json").read_text())
        manifest["files"]["state.json"] = {
            "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(),
        }  # fmt: skip
        (path.parent / "manifest.json").write_text(json.dumps(manifest))
        return True
    if path.name != "config.json":
        return False
    from onecard.run.stored import seal

    try:
        content = json.loads(path.read_bytes())
        content["seal"] = seal({name: content.get(name) for name in ("values", "set_by_user")})
        path.write_text(json.dumps(content))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False
    return True
