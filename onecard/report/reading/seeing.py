"""Content without a run in it, named: what was seen, what lacks, which flag or verb helps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import BinaryIO

from onecard.errors import UserError
from onecard.language import _
from onecard.report.reading.head import WANTED
from onecard.report.reading.text import blocks, is_binary

_ENOUGH = 1 << 20  # bytes that show what it is
_TRACEBACK = re.compile(
    r"^\s*Traceback \(most recent call last\)|^\w*(?:Error|Exception): |CUDA out of memory", re.M
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
    what: str  # one sentence
    lacks: str = ""
    hint: str = ""

    def error(self, source: str) -> UserError:
        """For a person who gave this `source`."""
        return UserError(f"{source}: {self.what}", self.lacks, self.hint, exit_code=1)


def seen(content: bytes | BinaryIO) -> Seen:
    """What is in there instead of a log."""
    start = content[:_ENOUGH] if isinstance(content, bytes) else content.read(_ENOUGH)
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return _binary(kind)
    if not start.strip(b"\xef\xbb\xbf\xff\xfe\x00 \t\r\n"):
        return Seen("empty", _("there is nothing in it"), hint=_("give a log, or `-` and paste one"))
    if is_binary(start):
        return _binary("binary")
    return _of_text("".join(blocks(start)))


def _binary(kind: str) -> Seen:
    if kind == "compressed":
        return Seen(kind, _("it is compressed"), hint="zcat LOG.gz | onecard report -")
    if kind == "checkpoint":
        what = _("it is a checkpoint or another archive, not a log")
        return Seen(kind, what, hint=_("give the run's folder, or the log that the run printed"))
    return Seen(kind, _("it is no text"), hint=_("give the log that the run printed"))


def _of_text(text: str) -> Seen:
    line = "iter 200: loss 6.1234, time 4321.12ms, mfu 11.52%"
    usual = _("such a line is: {line}").format(line=line)
    if _TRACEBACK.search(text):
        what = _("it is an error message without a line about training")
        return Seen("traceback", what, hint=_("`onecard doctor -` explains error messages"))
    has_loss, has_time, has_step = (pattern.search(text) for pattern in (_LOSS, _TIME, _STEP))
    if has_loss and not has_step:
        what = _("there are losses in it, but nothing says of which steps")
        lacks = _("the Hugging Face Trainer shows steps in its progress bar and in trainer_state.json")
        return Seen(
            "losses-without-steps", what, lacks, _("give trainer_state.json, or the log with its bars")
        )
    if has_time and not has_loss:
        what = _("there are times in it, but no losses")
        return Seen(
            "times-without-losses",
            what,
            hint=_("add the lines that show the loss; {usual}").format(usual=usual),
        )
    if sum(name in WANTED for name in _CONFIG.findall(text)) >= 2:
        what = _("it is a config, and no line of a run")
        return Seen(
            "config", what, hint=_("`onecard plan FILE` says what such a run needs and how long it takes")
        )
    lacks = _("a log has a step and its loss in each line, or in a table's columns")
    return Seen("nothing", _("there is no line about training in it"), lacks, usual)
