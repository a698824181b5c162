"""What was recorded, and how what is found today is held against it.

A recording is a file under recorded/: text, or JSON with floats rounded to 12 digits (as .json.gz where it is
large). ONECARD_RECORD_FROZEN=1 writes them anew. A difference is shown by its place and both values.
"""

from __future__ import annotations

import difflib
import gzip
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
RECORDING = bool(os.environ.get("ONECARD_RECORD_FROZEN"))
_WIDTH = 110
_SHOWN = 40  # differences of one file; more are counted
_GONE = "nothing"
EQUAL = 1e-9  # relative: the last digits of a sum are those of a Python or a libm


def frozen(
    name: str,
    found: Any,
    *,
    loose: Collection[str] = (),
    tolerance: float = 0.0,
    may_record: bool = True,
) -> None:
    """`found` is what is recorded as `name`; floats below the keys `loose` may be off by `tolerance`.

    Without `may_record` it is compared even while others record: the same must come about in another way.
    """
    path = RECORDED / name
    found = found if isinstance(found, str) else rounded(found)
    if RECORDING and may_record:
        _write(path, found)
    if not path.exists():
        pytest.fail(f"{name} is not recorded: make frozen", pytrace=False)
    different = differences(read(name), found, dict.fromkeys(loose, tolerance))
    if different:
        shown = "\n".join(different[:_SHOWN])
        more = f"\n... and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        pytest.fail(f"{name} differs; on purpose? make frozen\n{shown}{more}", pytrace=False)


def read(name: str) -> Any:
    path = RECORDED / name
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8")
    return text if path.suffix == ".txt" else json.loads(text)


def _write(path: Path, found: Any) -> None:
    text = found if isinstance(found, str) else pretty(found) + "\n"
    raw = text.encode("utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)


def rounded(value: Any) -> Any:
    """As JSON has it, floats to 12 digits: Pythons sum floats differently in the last ones."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.12g}")
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def pretty(value: Any, indent: int = 0) -> str:
    """JSON in which what fits on a line is on one: a difference between two versions is then short."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(flat) + indent <= _WIDTH:
        return flat
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {pretty(item, indent + 1)}" for key, item in value.items()]
    else:
        lines = [inner + pretty(item, indent + 1) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(lines) + "\n" + " " * indent + closing


def differences(
    was: Any, now: Any, loose: Mapping[str, float], *, tolerance: float = EQUAL, at: str = ""
) -> list[str]:
    """One line each: where, what was recorded, what is found."""
    if isinstance(was, str) and isinstance(now, str) and "\n" in was + now:
        compared = difflib.unified_diff(
            was.splitlines(), now.splitlines(), "recorded", "found", "", "", 1, ""
        )
        return [*([at] if at and was != now else []), *compared] if was != now else []
    places: list[tuple[str, Any, Any, float]]
    order: list[str] = []
    if isinstance(was, dict) and isinstance(now, dict):
        places = [
            (
                f"{at}.{key}" if at else key,
                was.get(key, _GONE),
                now.get(key, _GONE),
                loose.get(key, tolerance),
            )
            for key in dict.fromkeys([*was, *now])
        ]
        if list(was) != list(now) and sorted(was) == sorted(now):
            order = [f"{at}: another order of keys"]
    elif isinstance(was, list) and isinstance(now, list):
        longest = max(len(was), len(now))
        padded = [items + [_GONE] * (longest - len(items)) for items in (was, now)]
        places = [(f"{at}[{n}]", *pair, tolerance) for n, pair in enumerate(zip(*padded, strict=True))]
    else:
        return [] if _same(was, now, tolerance) else [f"{at}: {_short(was)} -> {_short(now)}"]
    return order + [
        line
        for place, before, after, off in places
        for line in differences(before, after, loose, tolerance=off, at=place)
    ]


def _same(was: Any, now: Any, tolerance: float) -> bool:
    numbers = all(isinstance(item, int | float) and not isinstance(item, bool) for item in (was, now))
    if numbers and (isinstance(was, float) or isinstance(now, float)):
        return math.isclose(was, now, rel_tol=tolerance, abs_tol=0.0 if tolerance == EQUAL else tolerance)
    return type(was) is type(now) and was == now


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + " ..."
