"""Content without a run in it, named: what was seen, what lacks, which flag or verb helps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onecard.errors import UserError
from onecard.language import _
from onecard.report.reading.head import WANTED
from onecard.report.reading.text import Stream, blocks, is_binary

_ENOUGH = 1 << 20  # bytes that show what it is
_ERROR = re.compile(
    r"Traceback \(most recent call last\)|OutOfMemoryError|CUDA out of memory|CUDA error|Segmentation fault"
)
_CONFIG = re.compile(r"^\s*(?:--)?([A-Za-z_]\w{2,40})\s*[=:]\s*\S", re.M)
_LOSS = re.compile(r"(?:loss|verlust|p\u00e9rdida|bpb)\W{1,6}[0-9]", re.IGNORECASE)
_TIME = re.compile(r"(?:s/it|it/s)\]|\b(?:time|dt)\W{1,3}[0-9.]+\s?m?s\b|\btok/s", re.IGNORECASE)
_STEP = re.compile(r"\b(?:step|iter\w*|paso|schritt)\W{0,3}[0-9]", re.IGNORECASE)
_MAGIC = ((b"PK\x03\x04", "checkpoint"), (b"\x1f\x8b", "compressed"), (b"(\xb5/\xfd", "compressed"),
          (b"BZh", "compressed"), (b"\xfd7zXZ", "compressed"))  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What a content is that no run could be read from."""

    kind: str  # stable and English
    what: str  # one sentence with {source} in it
    lacks: str = ""
    hint: str = ""

    def error(self, source: str) -> UserError:
        """For a person who named it so."""
        return UserError(self.what.format(source=source), self.lacks, self.hint, exit_code=1)


def seen(content: bytes | Stream) -> Seen:
    """What is in there instead of a log."""
    start = content[:_ENOUGH] if isinstance(content, bytes) else (content.read(_ENOUGH) or b"")
    if not start.strip(b"\xef\xbb\xbf\xff\xfe\x00 \t\r\n"):
        return Seen("empty", _("{source} is empty"))
    kind = next((kind for magic, kind in _MAGIC if start.startswith(magic)), "")
    if kind == "compressed":
        return Seen(kind, _("{source} is compressed"), hint="zcat LOG.gz | onecard report -")
    if kind or is_binary(start):
        lacks = _("a report is made from what a training program printed, or from a table")
        return Seen(kind or "binary", _("{source} is not text"), lacks, "onecard report train.log")
    return _of_text("".join(blocks(start)))


def _of_text(text: str) -> Seen:
    if found := _ERROR.search(text):
        hint = _("what went wrong, and what to change: onecard doctor LOG")
        return Seen("traceback", _("{source} has an error in it, and no losses"), found[0], hint)
    has_loss, has_time, has_step = (pattern.search(text) for pattern in (_LOSS, _TIME, _STEP))
    if has_loss and not has_step:
        what = _("{source} has losses, but nothing says of which steps")
        lacks = _("the Hugging Face Trainer shows steps in its progress bar and in trainer_state.json")
        return Seen(
            "losses-without-steps", what, lacks, _("give trainer_state.json, or the log with its bars")
        )
    if has_time and not has_loss:
        hint = _("add the lines that show the loss")
        return Seen("times-without-losses", _("{source} has times, but no losses"), hint=hint)
    if sum(name in WANTED for name in _CONFIG.findall(text)) >= 2:
        hint = _("what such a run needs, and how long it takes: onecard plan CONFIG.py")
        return Seen("config", _("{source} is a config, and no log"), hint=hint)
    return Seen(
        "nothing",
        _("no losses were found in {source}"),
        _("known are logs of nanoGPT, nanochat, onecard, llm.c, LitGPT, Hugging Face, and tables"),
        _("such lines are: {line}").format(line="step 500: train loss 5.8600, val loss 5.8612"),
    )
