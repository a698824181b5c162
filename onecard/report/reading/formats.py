"""Formats of logs, one entry each: to read another one, add it here.

What a line says is read by the names in it (names.py), whatever the format. An entry adds by what its lines
are known, how they look where they were wrapped, and in what they mean something else than they say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

NANOGPT, NANOCHAT, NANOCHAT_2025, NANOCHAT_SFT = "nanogpt", "nanochat", "nanochat-2025", "nanochat-sft"
ONECARD, HUGGINGFACE, LLM_C, MODDED = "onecard", "huggingface", "llm.c", "modded-nanogpt"
LITGPT, CSV, JSONL, TABLE, KEY_VALUE = "litgpt", "csv", "jsonl", "table", "key-value"


@dataclass(frozen=True)
class Format:
    """How one program writes."""

    name: str
    # Found in a line whose numbers are replaced by 0 and whose runs of spaces are one space.
    line: str
    # The beginning of a line that a narrow window may have wrapped, and what it has when it is whole.
    begins: str | None = None
    whole: str | None = None
    enough: str | None = None  # what is better than nothing
    # Columns that are something else in this format: their names as in names.py; None is "leave it out".
    columns: Mapping[str, str | None] = field(default_factory=dict)
    percent: bool = False  # is the MFU in percent, without a sign?
    shared: bool = False  # do others write it too? Then it belongs to the one that wrote the other lines
    micro: str | None = None  # the key of a count of micro-steps
    whole_step: str | None = None  # what marks the micro-step that ends a step
    # Where an evaluation has no step of its own: how much less than the next line's its step is.
    evaluated_before: int | None = None


_N = r"[-+0-9][-+0-9.,e]{0,30}"
# The first one that fits is a line's.
FORMATS = (
    Format(
        ONECARD,
        r"^iter 0: loss 0, time 0ms, (?:mfu 0%, )?0 tok/s|^\{\"step\": ?0, \"(loss|train_loss)\": ?0.*"
        r"\"(step_seconds|eval_seconds|memory_gib)\": ?0",
    ),
    Format(
        NANOGPT, r"\biter ?0: loss ?0, time ?0 ?ms",
        begins=rf"(?<![A-Za-z_])iter\s*{_N}\s*:\s*lo?s?s?", whole=rf"time\s*{_N}\s*ms\s*,\s*mfu\s*{_N}\s*%",
        enough=rf"loss\s*{_N}\s*,\s*time\s*{_N}\s*ms",
    ),
    Format(
        NANOCHAT_2025, r"\bstep ?0/0 \(0%\) \| loss: ?0 \|(?! .{0,90}epoch:).{0,60}\| mfu: ?0",
        begins=rf"\bstep\s*{_N}/{_N}\s*\([\d.]{{1,12}}%\)\s*\|",
        whole=r"dt:.{1,120}mfu:\s*-?\d{1,9}\.\d\d", enough=rf"dt:\s*{_N}\s*ms", percent=True,
    ),
    Format(NANOCHAT, r"\bstep ?0/0 \(0%\) \| loss: ?0 \|", percent=True),
    Format(
        NANOCHAT_SFT,
        r"\b[sS]tep 0 \(0%\) ?\| loss: 0|\bStep 0(?:/0 \| Training| \| Validation) loss: 0",
        columns={"tokens": None}, percent=True,
    ),
    Format(NANOGPT, r"\bstep 0: train loss 0, val loss 0", shared=True),
    Format(NANOCHAT, r"^.{0,60}\bStep 0 \| Validation bpb: 0$", shared=True),
    Format(HUGGINGFACE, r"\{ ?['\"](loss|eval_loss|train_runtime)['\"]: ?['\"]?0"
           r"|^\{ ?\"epoch\": 0, .*\"step\": 0 ?\}",
           begins=r"\{\s*['\"](?:loss|eval_loss|train_runtime)['\"]", whole=r"\}"),
    Format(LLM_C, r"^step 0/0 \| (train )?loss 0 (\(|\| norm)|^val loss 0$|\bs:0 (tel|trl|eval):0",
           evaluated_before=1),
    Format(MODDED, r"\bstep:0/0 (val_loss|train_loss|train_time):0|\bs:0 (val_loss|loss):0"),
    Format(LITGPT, r"\bstep 0 ?\| loss train: 0|\biter 0: val loss 0, val time",
           columns={"val": None}, micro="iter", whole_step="(step)"),
)  # fmt: skip

WRAPPED = tuple(
    (re.compile(entry.begins), re.compile(entry.whole), re.compile(entry.enough or entry.whole))
    for entry in FORMATS
    if entry.begins and entry.whole
)
# Formats whose lines are of one run.
FAMILIES = {ONECARD: NANOGPT, NANOCHAT_2025: NANOCHAT}
_LINES = tuple((entry, re.compile(entry.line)) for entry in FORMATS)
KEYS = Format(KEY_VALUE, "")
JSON = Format(JSONL, "")


def format_of(skeleton: str) -> Format:
    """The format that a line is of: its text with 0 for every number."""
    for entry, pattern in _LINES:
        if pattern.search(skeleton):
            return entry
    return JSON if skeleton.lstrip().startswith("{") else KEYS
