"""What a person names as a run: a folder, a file, or - for a paste; and what to say where no run is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onecard.errors import UserError
from onecard.language import _
from onecard.report import reading
from onecard.report.gathering.run_folder import RunFolder, run_folder
from onecard.report.gathering.source import named, opened
from onecard.report.log import Log

_LOOKED_AT = 2**16
_MOST_OF_A_SAMPLE = 2**14
_RULE = re.compile(rb"(?m)^-{15}\r?$")
# In the folder of a run: its log by the names that programs give it, the best first.
_NAMES = ("log.txt", "trainer_state.json", "checkpoint-*/trainer_state.json", "metrics.jsonl")
_ENDINGS = (".log", ".csv", ".tsv", ".jsonl", ".txt")


@dataclass(frozen=True)
class Input:
    """One run as it was named."""

    source: str
    log: Log
    folder: RunFolder | None
    sample: str = ""  # text of the run's model, where it stands in the log

    @property
    def name(self) -> str:
        """Short, for people: a folder's or a file's own name."""
        return "" if self.source == "-" else Path(self.source).resolve().name


def read_input(source: str) -> Input:
    path = source if source == "-" else str(_log_in(Path(source)) if _is_folder(source) else source)
    with opened(path, "report") as stream:
        log = reading.read(stream)
    if log is None:
        raise reading.seen(stream.content).error(named(source))
    return Input(source, log, run_folder(source), pasted_sample(stream.content))


def pasted_sample(content: bytes) -> str:
    """The last text of a model in a log: nanochat's lines from <|bos|> on, or what nanoGPT's sample.py prints
    between two rules."""
    if (end := content.rfind(b"<|bos|>")) >= 0:
        lines = (
            content[max(0, end - _LOOKED_AT) : end + _MOST_OF_A_SAMPLE]
            .decode("utf-8", "replace")
            .splitlines()
        )
        last = max(n for n, line in enumerate(lines) if "<|bos|>" in line)
        first = last
        while first and "<|bos|>" in lines[first - 1]:
            first -= 1
        return "\n".join(line.partition("<|bos|>")[2].strip() for line in lines[first : last + 1])
    found = list(_RULE.finditer(content, max(0, content.rfind(b"-" * 15) - _LOOKED_AT)))
    if len(found) < 2:
        return ""
    return content[found[-2].end() : found[-1].start()].decode("utf-8", "replace").strip()


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
            _("copy them from there: {hint}").format(
                hint=_("`onecard {verb} -` reads what you paste").format(verb="report")
            ),
            exit_code=1,
        )
    names = ", ".join(sorted(path.name for path in others)[:4])
    raise UserError(
        _("there is no run in {folder}").format(folder=folder),
        _("it has no log.txt, metrics.jsonl or trainer_state.json"),
        _("name the log itself: {names}").format(names=names) if others else "onecard report LOG",
        exit_code=1,
    )
