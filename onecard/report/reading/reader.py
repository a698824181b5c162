"""A log, taken block by block: rows of any format, and the facts around them."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from onecard.report.log import Log, Planned, Start, Steps
from onecard.report.reading import formats, head
from onecard.report.reading.formats import (
    FAMILIES,
    HUGGINGFACE,
    KEY_VALUE,
    NANOCHAT,
    NANOGPT,
    ONECARD,
    WRAPPED,
)
from onecard.report.reading.lines import Row, Shape, Shapes
from onecard.report.reading.prose import Prose
from onecard.report.reading.runs import OneStart, Runs, whole_curve
from onecard.report.reading.tables import SlashLists, Table, header, is_rule
from onecard.report.reading.trainer import Trainer, read_end

_WRAPS = 3  # a line of nanochat's has 160 characters: two breaks in a narrow window, three in a tiny one
_LONGEST_JOINED = 1000
_OBJECT_LINES = 60
_BULK = 2000  # rows of a table at a time
_MAY_BE_ROW = re.compile(r"loss|bpb|val|train|trl:|tel:|verlust|rdida|step|iter|norm", re.IGNORECASE)
_BEGINS = re.compile(
    r"\bstep\s+\d{1,12}:\s*train loss|\bStep\s+\d{1,12}\s*\||^\s*step:\d|^\s*\{", re.IGNORECASE
)
_QUOTE = re.compile(r"^(?:\s{0,3}>)+ ?")
_RANK = re.compile(
    r"^\s*\[?(?:default|rank ?|Rank ?|RANK ?|gpu|GPU ?)([0-9]{1,5})\]?:? |^\s*([0-9]{1,4}): (?=iter |[sS]tep |\{')"
)
_OBJECT = re.compile(r"\{\s*$")


@dataclass
class Reader:
    """Everything seen so far."""

    runs: dict[str, Runs] = field(default_factory=dict)  # by family of formats
    votes: dict[str, Counter[str]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    prose: Prose = field(default_factory=Prose)
    trainer: Trainer = field(default_factory=Trainer)
    evidence: dict[str, str] = field(default_factory=dict)
    commands: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    words: Counter[str] = field(default_factory=Counter)  # of what was seen and is no row

    def __post_init__(self) -> None:
        self._shapes = Shapes()
        self._slashes = SlashLists()
        self._table: Table | None = None
        self._waiting: list[str] = []
        self._first = True  # is the next line the text's first?
        self._cut = False  # may the last line have lost its end?
        self._family = ""
        self._anybodys: list[Row] = []
        self._unplaced: Row | None = None
        self._first_bare: Row | None = None
        self._second_bare: Row | None = None
        self._rank: int | None = None

    # --- block by block ---------------------------------------------------------------------------

    def read(self, block: str) -> None:
        """A block of whole lines."""
        if self._waiting:
            block = "\n".join([*self._waiting, block])
            self._waiting = []
        self._cut = not block.endswith("\n")
        shape = self._shapes.most_frequent() if self._table is None else None
        if shape is None:
            self._read_lines(block.split("\n"), ends=False)
            return
        width = len(shape.used) + 1
        parts = shape.pattern.split(block)
        between = parts[::width]
        begin = 0
        for index, text in enumerate(between[:-1]):
            if text == "\n":
                continue
            self._many(shape, parts[begin * width + 1 : index * width], width)
            begin = index
            lines = text.split("\n")
            # The empty pieces at both ends are the line feeds of whole lines beside them.
            self._read_lines(lines[1 if index else 0 : -1], ends=True)
        self._many(shape, parts[begin * width + 1 : -1], width)
        rest = between[-1].split("\n")
        self._read_lines(rest[1:] if len(between) > 1 else rest, ends=False)

    def finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._read_lines(waiting, ends=True, last=True)
        for row in self._anybodys:
            self._runs(NANOCHAT).add(row, self.settings, self.facts)
            self.votes.setdefault(NANOCHAT, Counter())[NANOCHAT] += 1
        if self._first_bare is not None:
            self._settle_bare(None)
        self.trainer.finish(self._runs(HUGGINGFACE), self.settings, self.facts)
        if self.trainer.has_rows:
            self.votes.setdefault(HUGGINGFACE, Counter())[HUGGINGFACE] += 1

    def _many(self, shape: Shape, parts: list[str], width: int) -> None:
        """Whole lines of one shape that follow each other."""
        if not parts:
            return
        groups = [parts[place::width] for place in range(width - 1)]
        columns = shape.many(groups)
        if columns is None or self._anybodys or self._unplaced is not None:
            for numbers in zip(*groups, strict=True):
                everything = ["0"] * (len(shape.gaps) - 1)
                for index, text in zip(shape.used, numbers, strict=True):
                    everything[index] = text
                for row in shape.rows(everything):
                    self._row(shape, row)
            return
        name = shape.format.name
        family = self._vote(name, len(columns["step"]))
        for known in ("last", "progress"):
            if known in columns:
                self.facts["last_step" if known == "last" else known] = columns.pop(known)[-1]
                self._whole_last_step()
        micro = columns.pop("micro", None)
        columns.pop("epoch", None)
        if micro is not None:
            self._micro_steps({"micro": micro[-1], "step": columns["step"][-1]})
        self._runs(family).add_many(columns, self.settings, self.facts)

    def _read_lines(self, lines: list[str], *, ends: bool, last: bool = False) -> None:
        index = 0
        if not ends:
            last_line = lines.pop()  # empty, or a line that may go on
        while index < len(lines):
            if self._table is not None and self._table.separator in (",", "\t") and len(lines) - index > 8:
                index = self._read_table(lines, index)
                if index >= len(lines):
                    break
            joined = self._joined(lines, index, ends=ends)
            if joined is None:
                break
            line, index = joined
            self._line(line, cut=last and self._cut and index >= len(lines))
        if not ends:
            self._waiting = [*lines[index:], last_line]

    def _read_table(self, lines: list[str], begin: int) -> int:
        """Reads plain rows of a table many at a time; the index of the first line that is none."""
        assert self._table is not None
        while len(lines) - begin > 8:
            some = lines[begin : min(begin + _BULK, len(lines) - 1)]
            if not some or (columns := self._table.many(some)) is None:
                return begin
            self._vote(self._table.format, len(some))
            self._runs(self._table.format).add_many(_of_table(columns), self.settings, self.facts)
            begin += len(some)
        return begin

    # --- lines that go on in the next ---------------------------------------------------------------

    def _joined(self, lines: list[str], index: int, *, ends: bool) -> tuple[str, int] | None:
        """(a line as its program wrote it, the index of what follows); None where the next lines are needed."""
        line = lines[index]
        if _OBJECT.search(line):
            return _object(lines, index, ends)
        if line.endswith("\\") and head.MAY_BE_COMMAND.search(line):
            more = index
            while more < len(lines) and lines[more].endswith("\\") and more - index < _OBJECT_LINES:
                more += 1
            if more >= len(lines) and not ends:
                return None
            return " ".join(part.rstrip("\\ ") for part in lines[index : more + 1]), more + 1
        for begins, whole, enough in WRAPPED:
            found = begins.search(line)
            if not found or whole.search(line):
                continue
            best = line if enough.search(line) else None
            for more in range(1, _WRAPS + 1):
                if index + more >= len(lines):
                    if not ends:
                        return None
                    break
                following = lines[index + more]
                piece = "".join(lines[index : index + more + 1])
                if not following.strip() or len(piece) > _LONGEST_JOINED or _is_beginning(following):
                    break
                if whole.search(piece):
                    return piece, index + more + 1
                if best is None and enough.search(piece):
                    best = piece
            return best or line, index + 1
        return line, index + 1

    # --- one by one -------------------------------------------------------------------------------

    def _line(self, line: str, *, cut: bool) -> None:
        first, self._first = self._first, False
        if ">" in line[:8]:
            line = _QUOTE.sub("", line)
        if self._is_of_another_rank(line):
            return
        if self._table is not None:
            if (row := self._table.row(line, cut=cut)) is not None:
                self._vote(self._table.format, 1)
                self._runs(self._table.format).add(_row_of_table(row), self.settings, self.facts)
                return
            if is_rule(line):
                return
            self._table.lines_without_rows += 1
            if self._table.lines_without_rows > 3:
                self._table = None
        if _MAY_BE_ROW.search(line) and self._read_row(line, cut=cut, first=first):
            return
        if "<" in line and self.trainer.bar(line):
            return
        if (table := header(line)) is not None:
            self._begin_table(table)
            return
        if "/" in line or "\u2192" in line:
            rows = self._slashes.rows(line, cut=cut)
            for row in rows:
                self._vote(formats.TABLE, 1)
                self._runs(formats.TABLE).add(_row_of_table(row), self.settings, self.facts)
            if rows:
                return
        self._read_head(line, cut=cut, first=first)

    def _is_of_another_rank(self, line: str) -> bool:
        """Several processes print the same: the first one that speaks is enough."""
        if line[:1] not in "[0123456789rRgGd \t" or (found := _RANK.match(line)) is None:
            return False
        rank = int(found[1] or found[2])
        if self._rank is None or (rank == 0 and not self.runs):
            self._rank = rank
        if rank != self._rank:
            self.facts["cards"] = max(int(self.facts.get("cards", 1)), rank + 1)
        return rank != self._rank

    def _read_row(self, line: str, *, cut: bool, first: bool) -> bool:
        found = self._shapes.of(line)
        if found is None:
            return False
        shape, numbers = found
        rows = [
            row for row in shape.rows(numbers, cut=cut) if "step" in row or shape.format.name != KEY_VALUE
        ]
        for row in rows:
            if first and shape.plans[0].bare:
                # The text may begin in the middle of its first line's step.
                self._first_bare, self._bare_format = row, shape
                continue
            if self._first_bare is not None:
                self._settle_bare(row)
            self._row(shape, row)
        return bool(rows)

    def _settle_bare(self, following: Row | None) -> None:
        """A step at the very beginning of a text counts where the next one shows that all of it is there."""
        row, self._first_bare = self._first_bare, None
        if row is not None and following is not None and row["step"] in (0.0, following.get("step")):
            self._row(self._bare_format, row)

    def _row(self, shape: Shape, row: Row) -> None:
        entry = shape.format
        if "step" not in row:
            if entry.name == HUGGINGFACE and "epoch" in row:
                self.trainer.row(row)
            elif entry.evaluated_before is not None and "val" in row:
                self._unplaced = row
                if (seen := self._last_step(entry.name)) is not None:
                    self._place(seen)
            elif "micro" in row and "val" in row and (every := self.facts.get("micro_steps_per_step")):
                step = row.pop("micro") / every
                if step.is_integer():
                    self._runs(entry.name).add({**row, "step": step}, self.settings, self.facts)
            return
        if not any(name in row for name in ("loss", "train", "val", "bpb", "ms", "lr", "tokens")):
            return
        if not shape.is_whole_step and row.get("micro") != row["step"]:
            return
        if not entry.name and not self._family:
            self._anybodys.append(row)
            del self._anybodys[:-64]
            return
        family = self._vote(entry.name, 1) if entry.name else self._family
        if self._unplaced is not None and entry.evaluated_before is not None:
            self._place(row["step"] - entry.evaluated_before)
        for known, fact in (("last", "last_step"), ("progress", "progress")):
            if known in row:
                self.facts[fact] = row.pop(known)
                self._whole_last_step()
        if "micro" in row:
            self._micro_steps(row)
        waiting, self._anybodys = self._anybodys, []
        for earlier in (*waiting, row):
            self._runs(family).add(earlier, self.settings, self.facts)

    def _whole_last_step(self) -> None:
        if "last_step" in self.facts:
            self.facts["last_step"] = int(self.facts["last_step"])

    def _micro_steps(self, row: Row) -> None:
        """How many micro-steps a step has, where a line shows both."""
        micro, step = row.pop("micro"), row["step"]
        if step and micro % step == 0:
            self.facts["micro_steps_per_step"] = int(micro / step)
        if "ms" in row:
            row["ms"] *= self.facts.get("micro_steps_per_step", math.nan)

    def _last_step(self, family: str) -> float | None:
        runs = self.runs.get(family)
        return runs.starts[-1].steps.step[-1] if runs and runs.starts and len(runs.starts[-1].steps) else None

    def _place(self, step: float) -> None:
        row, self._unplaced = self._unplaced, None
        if row is not None and step >= 0:
            self._runs(formats.LLM_C).add({**row, "step": step}, self.settings, self.facts)

    def _begin_table(self, table: Table) -> None:
        before, self._table = self._table, table
        runs = self._runs(table.format)
        if before is not None and before.columns == table.columns:
            runs.begin()

    # --- what stands around rows ------------------------------------------------------------------

    def _read_head(self, line: str, *, cut: bool, first: bool) -> None:
        if "'train_runtime'" in line and (end := read_end(line)):
            self.trainer.speed = end
        if (command := head.command_of(line)) is not None and not cut:
            settings, evidence = head.command_settings(command)
            self.commands |= settings
            self.evidence |= evidence
            self.evidence.setdefault("command", command[:500])
            return
        known_word = any(word in line for word in head.HEAD_WORDS)
        if known_word and head.START.search(line):
            self._start()
        if cut and line[-1:].isalnum():
            line = line[: line.rfind(" ") + 1]  # its last word may have lost its end
        said = (
            head.settings_of(line, self.settings, first=first)
            if "=" in line or ":" in line or "|" in line
            else {}
        )
        facts = head.facts_of(line) if known_word else {}
        if not said and not facts:
            self.prose.read(line, begins=first, ends=cut)
            return
        if said and self.prose.is_advice(line):
            return
        self.settings.update(said)
        self.facts.update(facts)

    def _start(self) -> None:
        if any(len(runs.starts) and not runs.is_fresh for runs in self.runs.values()):
            self.settings, self.facts = dict(self.settings), dict(self.facts)
            for runs in self.runs.values():
                runs.begin()

    # --- where rows go ----------------------------------------------------------------------------

    def _vote(self, name: str, count: int) -> str:
        """The family of a format, which has `count` rows more."""
        family = FAMILIES.get(name, name)
        self.votes.setdefault(family, Counter())[name] += count
        if name not in (formats.CSV, formats.TABLE):
            self._family = family
        return family

    def _runs(self, family: str) -> Runs:
        return self.runs.setdefault(family, Runs())

    # --- the answer -------------------------------------------------------------------------------

    def log(self) -> Log | None:
        with_rows = {family: runs for family, runs in self.runs.items() if runs.rows}
        weak = (formats.CSV, formats.TABLE, KEY_VALUE)
        if not with_rows:
            return self._first_step_alone()
        family = max(with_rows, key=lambda name: (with_rows[name].rows, name not in weak))
        runs = with_rows[family]
        starts = [start for start in runs.starts if len(start)]
        name = self.votes[family].most_common(1)[0][0] if self.votes.get(family) else family
        if family in weak or family == formats.JSONL:
            starts = _in_order(starts)
            for start in starts:
                _complete(start)
        name = _nanogpt_or_onecard(starts, self.votes[family]) if family == NANOGPT else name
        curve = whole_curve(starts)
        planned = Planned()
        if family in (formats.CSV, formats.TABLE, formats.JSONL):
            curve, planned = _without_planned(curve)
        trained = [start for start in starts if len(start.steps)] or starts
        settings, facts, evidence = self._said(trained[-1])
        return Log(
            format=name,
            steps=curve.steps,
            evaluations=curve.evaluations,
            settings=settings,
            facts=facts,
            starts=(curve,) if len(starts) == 1 else tuple(Start(s.steps, s.evaluations) for s in starts),
            planned=planned,
            remarks=tuple(self.remarks),
            evidence=evidence,
        )

    def _said(self, start: OneStart) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
        """The log's own words first, then the command line's, then those of prose."""
        settings = {**self.prose.settings, **self.commands, **start.settings}
        facts = {**self.prose.facts, **start.facts}
        if "cards" not in facts and isinstance(cards := settings.get("nproc_per_node"), int):
            facts["cards"] = cards
        if isinstance(tokens := settings.get("eval_tokens"), int):
            facts.setdefault("eval_tokens", tokens)
        printed = {*start.settings, *start.facts}
        evidence = {**self.prose.evidence, **self.evidence}
        return settings, facts, {name: words for name, words in evidence.items() if name not in printed}

    def _first_step_alone(self) -> Log | None:
        """What people quote of a run that has just begun: "the first iteration took 27 seconds"."""
        if (ms := self.prose.first_step_ms) is None:
            return None
        settings, facts, evidence = self._said(OneStart(self.settings, self.facts))
        start = Start(Steps(step=[0.0], ms=[ms]), whole_curve([OneStart()]).evaluations)
        return Log(KEY_VALUE, start.steps, start.evaluations, settings, facts, (start,), evidence=evidence)


def _is_beginning(line: str) -> bool:
    """Is this no continuation, but a line of its own?"""
    return bool(
        _BEGINS.search(line) or head.START.search(line) or any(begins.search(line) for begins, *_ in WRAPPED)
    )


def _object(lines: list[str], index: int, ends: bool) -> tuple[str, int] | None:
    """A JSON object that is spread over lines, as one; of nested ones the innermost."""
    for more in range(index + 1, index + _OBJECT_LINES):
        if more >= len(lines):
            if not ends:
                return None
            break
        if _OBJECT.search(lines[more]):
            break
        if "}" in lines[more]:
            pieces = [
                lines[index][lines[index].rindex("{") :].strip(),
                *(line.strip() for line in lines[index + 1 : more + 1]),
            ]
            return " ".join(pieces), more + 1
    return lines[index], index + 1


def _row_of_table(row: Row) -> Row:
    """A table's row: "train" alone is a step's loss."""
    if "train" in row and "val" not in row and "bpb" not in row:
        row = {**row, "loss": row["train"]}
        del row["train"]
    return row


def _of_table(columns: dict[str, list[float]]) -> dict[str, list[float]]:
    if "train" in columns and not {"val", "bpb"} & set(columns):
        columns = {("loss" if name == "train" else name): values for name, values in columns.items()}
    return columns


def _in_order(starts: list[OneStart]) -> list[OneStart]:
    """People also list the newest first: then each row looks like another start."""
    if len(starts) > 2 and all(
        len(start) <= 2 and len(start.steps) < 2 and len(start.evaluations) < 2 for start in starts
    ):
        runs = Runs()
        for start in reversed(starts):
            for columns, sort in ((start.evaluations, "e"), (start.steps, "s")):
                for values in columns:
                    named = {n: v for n, v in zip(columns.NAMES, values, strict=True) if not math.isnan(v)}
                    if sort == "s" or "val" in named or "bpb" in named:
                        runs.add(named, start.settings, start.facts)
        return runs.starts
    return starts


def _complete(start: OneStart) -> None:
    """Where training losses stand in more rows than validation losses, they are the curve of all of them."""
    if not any(not math.isnan(loss) for loss in start.steps.loss):
        return
    said = {
        step: value
        for step, value in zip(start.evaluations.step, start.evaluations.train, strict=True)
        if not math.isnan(value)
    }
    if not said:
        return
    rows = {values[0]: dict(zip(Steps.NAMES, values, strict=True)) for values in start.steps}
    lr = dict(zip(start.evaluations.step, start.evaluations.lr, strict=True))
    tokens = dict(zip(start.evaluations.step, start.evaluations.tokens, strict=True))
    for step, value in said.items():
        row = rows.setdefault(step, {"step": step, "lr": lr[step], "tokens": tokens[step]})
        if math.isnan(row.get("loss", math.nan)):
            row["loss"] = value
    merged = Steps()
    for step in sorted(rows):
        merged.append(**rows[step])
    start.steps = merged


def _without_planned(curve: Start) -> tuple[Start, Planned]:
    """Rows behind the last loss that have a rate or tokens: the schedule still to come."""
    steps, at = curve.steps, len(curve.steps)
    last = curve.evaluations.step[-1] if len(curve.evaluations) else -1.0
    while (
        at and math.isnan(steps.loss[at - 1]) and math.isnan(steps.ms[at - 1]) and steps.step[at - 1] > last
    ):
        at -= 1
    rest = steps.part(at, None)
    planned = Planned(step=rest.step, tokens=rest.tokens, lr=rest.lr)
    if not len(rest):
        return curve, planned
    kept = steps.part(None, at)
    assert isinstance(kept, Steps)
    return Start(kept, curve.evaluations), planned


def _nanogpt_or_onecard(starts: list[OneStart], votes: Counter[str]) -> str:
    """nanoGPT shows -100% at first and an MFU always; onecard never the one and not always the other."""
    steps = starts[-1].steps
    if any(mfu < 0 for start in starts for mfu in start.steps.mfu):
        return NANOGPT
    shown = [not math.isnan(mfu) for mfu in steps.mfu]
    of_onecard = votes[ONECARD] > 0 or starts[-1].facts.get("is_onecards", False)
    at_once = len(shown) > 0 and steps.step[0] == 0 and shown[0]
    return ONECARD if of_onecard or at_once else NANOGPT
