"""A log read as simply as it can be: the whole text at once, every line by every pattern in turn.

What onecard.report.logs does in blocks and many lines at a time has to come out the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from onecard.report import log_patterns as p
from onecard.report.log_text import TERMINAL

Found = tuple[list[dict[str, Any]], dict[int, dict[int, float]], float | None]


def read_slowly(text: str) -> Found:
    """The starts, the bars and the last loss beside them."""
    starts: list[dict[str, Any]] = [_start()]
    bars: dict[int, dict[int, float]] = {}
    loss: float | None = None
    for line in _joined(re.split(r"\r\n|\n|\r", TERMINAL.sub("", text))):
        here = starts[-1]
        if found := p.ITER.search(line):
            _add(starts, "iter", found)
        elif found := p.STEP.search(line):
            _add(starts, "step", found)
        elif found := p.EVALUATED.search(line):
            here["evaluations"].append(int(found[1] or found[2]))
            here["of_onecard"] |= "iter" in here["steps"] and bool(p.BITS_PER_BYTE.search(line))
        elif found := p.TRAINER.search(line):
            loss = p.number(found[1])
        elif found := p.BAR.search(line):
            if (rate := float(found[3])) > 0:
                ms = 1000 * rate if found[4] == "s/it" else 1000 / rate
                bars.setdefault(int(found[2]), {})[int(found[1])] = ms
        else:
            if p.START.search(line):
                if here["steps"]:
                    starts.append(here := _start())
                here["of_onecard"] |= "training tokens in " in line
            if found := p.SETTING.match(line):
                value = p.setting(found[2], here["settings"]) if found[1] in p.WANTED else None
                here["settings"] |= {found[1]: value} if value is not None else {}
                continue
            for name, pattern, reader in p.FACTS:
                if (match := pattern.search(line)) and (value := reader(match[1])) is not None:
                    here["facts"][name] = value
    return starts, bars, loss


def _start() -> dict[str, Any]:
    return {"steps": {}, "evaluations": [], "settings": {}, "facts": {}, "of_onecard": False}


def _joined(lines: list[str]) -> Iterator[str]:
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        for begins, whole in ((p.ITER_BEGINS, p.ITER), (p.STEP_BEGINS, p.STEP)):
            if not begins.search(line):
                continue
            for more in range(4):
                piece = "".join(lines[index - 1 : index + more])
                if more and (_begins(lines, index + more - 1) or len(piece) > 1000):
                    break
                found = whole.search(piece)
                if found and found["mfu"] is not None:
                    line, index = piece, index + more
                    break
                if found and not whole.search(line):
                    line = piece
            break
        yield line


def _begins(lines: list[str], index: int) -> bool:
    if index >= len(lines) or not lines[index].strip():
        return True
    return any(q.search(lines[index]) for q in (p.ITER_BEGINS, p.STEP_BEGINS, p.EVALUATED, p.START))


def _add(starts: list[dict[str, Any]], kind: str, found: re.Match[str]) -> None:
    here, step, ms = starts[-1], int(found["step"]), p.number(found["ms"])
    if ms is None or not 1e-3 <= ms < 1e12:
        return
    earlier = here["steps"].get(kind, [])
    if earlier and step == earlier[-1][0]:
        return
    if earlier and step < earlier[-1][0]:
        evaluations = [n for n in here["evaluations"][-1:] if n == step]
        here = {"steps": {}, "evaluations": evaluations, "settings": dict(here["settings"]),
                "facts": dict(here["facts"]), "of_onecard": here["of_onecard"]}  # fmt: skip
        starts.append(here)
    percent, speed = p.number(found["mfu"]), p.number(found["speed"])
    mfu = percent / 100 if percent is not None and abs(percent) < float("inf") else None
    speed = speed if speed and abs(speed) < float("inf") else None
    if kind == "step":
        here["facts"] |= {"last_step": int(found["last"])} if found["last"] else {}
        if found["field"]:
            has_epoch = "epoch:" in (found["rest"] or "")
            here["facts"] |= {"mfu_field": found["field"].lower(), "has_epoch": has_epoch}
    elif speed is not None:
        here["of_onecard"] = True
    after = here["evaluations"][-1:] == [step]
    here["steps"].setdefault(kind, []).append((step, ms, p.number(found["loss"]), mfu, speed, after))
