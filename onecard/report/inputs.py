"""What a person names as a run: a folder, a file, or - for a paste; and what to say where no run is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onecard.errors import UserError
from onecard.language import _
from onecard.report import reading
from onecard.report.log import Log
from onecard.report.run_folder import RunFolder, run_folder
from onecard.report.source import content_of, named

_LOOKED_AT = 2**16
_ERRORS = re.compile(rb"Traceback \(most recent call last\)|OutOfMemoryError|CUDA error|Segmentation fault")
# In the folder of a run: its log by the names that programs give it, the best first.
_NAMES = ("log.txt", "trainer_state.json", "checkpoint-*/trainer_state.json", "metrics.jsonl")
_ENDINGS = (".log", ".csv", ".tsv", ".jsonl", ".txt")


@dataclass(frozen=True)
class Input:
    """One run as it was named."""

    source: str
    log: Log
    folder: RunFolder | None

    @property
    def name(self) -> str:
        """Short, for people: a folder's or a file's own name."""
        return "" if self.source == "-" else Path(self.source).resolve().name


def read_input(source: str) -> Input:
    path = source if source == "-" else str(_log_in(Path(source)) if _is_folder(source) else source)
    content = content_of(path)
    log = reading.read(content)
    if log is None:
        raise _nothing(source, content)
    return Input(source, log, run_folder(source))


def _is_folder(source: str) -> bool:
    try:
        return Path(source).is_dir()
    except (OSError, ValueError):
        return False


def _log_in(folder: Path) -> Path:
    for name in _NAMES:
        if found := [path for path in folder.glob(name) if path.is_file()]:
            return max(found, key=lambda path: (len(path.parent.name), path.parent.name))
    others = [path for path in folder.iterdir() if path.suffix in _ENDINGS and path.is_file()]
    if len(others) == 1:
        return others[0]
    if (folder / "ckpt.pt").exists():
        raise UserError(
            _("{folder} has a checkpoint, and no log").format(folder=folder),
            _("nanoGPT prints its losses to the terminal and keeps none"),
            _("copy them from there: `onecard report -` reads what you paste"),
            exit_code=1,
        )
    names = ", ".join(sorted(path.name for path in others)[:4])
    raise UserError(
        _("there is no run in {folder}").format(folder=folder),
        _("it has no log.txt, metrics.jsonl or trainer_state.json"),
        _("name the log itself: {names}").format(names=names) if others else "onecard report LOG",
        exit_code=1,
    )


def _nothing(source: str, content: bytes) -> UserError:
    """Why there is no report."""
    head = content[:_LOOKED_AT]
    name = named(source)
    if not content.strip():
        return UserError(_("{source} is empty").format(source=name), exit_code=1)
    if _is_binary(head):
        return UserError(
            _("{source} is not text").format(source=name),
            _("a report is made from what a training program printed, or from a table"),
            "onecard report train.log",
            exit_code=1,
        )
    if found := _ERRORS.search(content):
        what = _("in {source} is an error, and no loss").format(source=name)
        why = found[0].decode()
        if b"OutOfMemory" in content or b"out of memory" in content:
            hint = _("which setting fits: onecard plan CONFIG.py; why nanoGPT's does not: --as nanogpt")
            return UserError(what, why, hint, exit_code=1)
        return UserError(what, why, _("add the lines with losses that came before it"), exit_code=1)
    return UserError(
        _("no losses were found in {source}").format(source=name),
        _("known are logs of nanoGPT, nanochat, onecard, llm.c, LitGPT, Hugging Face, and tables"),
        _("such lines are: {line}").format(line="step 500: train loss 5.8600, val loss 5.8612"),
        exit_code=1,
    )


def _is_binary(head: bytes) -> bool:
    """UTF-16 has NULs in every second place, and one of two marks in front; other text has none."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return False
    nulls = head.count(0)
    if nulls and max(head[0::2].count(0), head[1::2].count(0)) > 0.4 * len(head) > nulls * 0.4:
        return nulls > 0.6 * len(head)
    control = sum(head.count(sign) for sign in (*range(1, 7), *range(14, 27)))
    return nulls > 0 or control > 0.05 * len(head)
