"""A log, taken block by block: rows of any format, and the facts around them."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from onecard.language import _
from onecard.report.reading import formats, head
from onecard.report.reading.formats import FAMILIES, HUGGINGFACE, KEY_VALUE
from onecard.report.reading.joining import joined as joined_lines
from onecard.report.reading.lines import Row, Shape, Shapes
from onecard.report.reading.prose import Prose
from onecard.report.reading.runs import Runs
from onecard.report.reading.tables import SlashLists, Table, header, is_rule
from onecard.report.reading.trainer import Trainer, read_end

_LONGEST_LINE = 20_000  # characters: beyond that it is no line of a log
_MOST_SHARED = 5000
_BULK = 2000  # rows of a table at a time
_MAY_BE_ROW = re.compile(r"loss|bpb|val|train|trl:|tel:|verlust|rdida|step|iter|norm", re.IGNORECASE)
_QUOTE = re.compile(r"^(?:\s{0,3}>)+ ?")
_RANK = re.compile(
    r"^\s*\[?(?:default|[rR]ank ?|RANK ?|gpu|GPU ?)(\d{1,5})\]?:? |^\s*(\d{1,4}): (?=iter |[sS]tep |\{')"
)


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

    def __post_init__(self) -> None:
        self._shapes = Shapes()
        self._slashes = SlashLists()
        self._table: Table | None = None
        self._losses_of_tables: set[str] = set()
        self._waiting: list[str] = []
        self._first = True  # is the next line the text's first?
        self._cut = False  # may the last line have lost its end?
        self._shared: list[tuple[str, Row]] = []  # until it is known whose they are
        self._unplaced: Row | None = None
        self._held: list[tuple[Shape, Row]] = []
        self._ranks, self._has_first_rank = 0, False
        self._of_other_ranks: list[str] = []

    # --- block by block ---------------------------------------------------------------------------

    def read(self, block: str) -> None:
        """A block of whole lines."""
        block, self._waiting = "\n".join([*self._waiting, block]), []
        end = block.rfind("\n") + 1
        self._cut = end < len(block)
        shape = self._shapes.most_frequent() if self._table is None else None
        if shape is None or not end:
            self._read_lines(block.split("\n"), ends=False)
            return
        block, tail = block[:end], block[end:]
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
        self._waiting[-1] += tail

    def finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._read_lines(waiting, ends=True, last=True)
        for name, row in self._shared:
            self._runs(self._vote(name, 1)).add(row, self.settings, self.facts)
        if not self._has_first_rank and self._of_other_ranks:
            self._has_first_rank = True
            rank = _RANK.match(self._of_other_ranks[0])
            prefix = rank[0] if rank else ""
            self._read_lines(
                [line[len(prefix) :] for line in self._of_other_ranks if line.startswith(prefix)],
                ends=True,
                last=True,
            )
        self._release()
        self._slash_rows()
        self.trainer.finish(self._runs(HUGGINGFACE), self.settings, self.facts)
        self._vote(HUGGINGFACE, int(self.trainer.has_rows))

    @property
    def has_rows(self) -> bool:
        return self.trainer.has_rows or any(runs.rows for runs in self.runs.values())

    def _many(self, shape: Shape, parts: list[str], width: int) -> None:
        """Whole lines of one shape that follow each other."""
        if not parts:
            return
        groups = [parts[place::width] for place in range(width - 1)]
        columns = shape.many(groups)
        if columns is None or self._held or self._shared or self._unplaced is not None:
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
            has_bar = "/it]" in lines[index] or "it/s]" in lines[index]
            if has_bar and self.trainer.bar(lines[index]):
                index, self._first = index + 1, False
                continue
            may_be_quick = not ends and self._table is None and not self._held
            if may_be_quick and lines[index][:2] == "{'" and self.trainer.quick_row(lines[index]):
                index, self._first = index + 1, False
                continue
            joined = joined_lines(lines, index, ends=ends)
            if joined is None:
                break
            line, index = joined
            is_last = index >= len(lines) or line.endswith(lines[-1])
            self._line(line, cut=last and self._cut and is_last)
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

    # --- one by one -------------------------------------------------------------------------------

    def _line(self, line: str, *, cut: bool) -> None:
        first, self._first = self._first, False
        if len(line) > _LONGEST_LINE:
            return
        if ">" in line[:8]:
            line = _QUOTE.sub("", line)
        if self._is_of_another_rank(line):
            return
        if "'train_runtime'" in line and (end := read_end(line)):
            self.trainer.speed = end
            return
        if '"log_history": [{' in line:
            line = line[line.rindex("{") :]
        if self._table is not None:
            if (row := self._table.row(line, cut=cut)) is not None:
                if self._table.is_left_out:
                    return
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
        if (table := header(line)) is not None:
            self._begin_table(table)
            return
        if ("/" in line or "\u2192" in line) and self._slashes.take(line, cut=cut):
            return
        self._slash_rows()
        self._read_head(line, cut=cut, first=first)

    def _slash_rows(self) -> None:
        for row in self._slashes.rows():
            self._vote(formats.TABLE, 1)
            self._runs(formats.TABLE).add(row, self.settings, self.facts, evaluated="train" in row)

    def _is_of_another_rank(self, line: str) -> bool:
        """Several processes print the same: the first of them is enough, or any where it says nothing."""
        if line[:1] not in "[0123456789rRgGd \t" or (found := _RANK.match(line)) is None:
            return False
        rank = int(found[1] or found[2])
        self._ranks = max(self._ranks, rank + 1)
        if self._ranks > 1:
            self.facts["cards"] = self._ranks
        if rank and len(self._of_other_ranks) < _MOST_SHARED and not self._has_first_rank:
            self._of_other_ranks.append(line)
        self._has_first_rank = self._has_first_rank or rank == 0
        return rank != 0

    def _read_row(self, line: str, *, cut: bool, first: bool) -> bool:
        found = self._shapes.of(line)
        if found is None:
            return False
        shape, numbers = found
        rows = [
            row for row in shape.rows(numbers, cut=cut) if "step" in row or shape.format.name != KEY_VALUE
        ]
        if first and rows and not line.lstrip().startswith("{"):
            rows[0] = shape.without_beginning(rows[0])
            rows = rows if len(rows[0]) > 1 else rows[1:]
        for row in rows:
            if first and shape.plans[0].bare:
                self._held = [(shape, row)]
            elif self._held:
                self._held.append((shape, row))
                if len({held["step"] for _shape, held in self._held if "step" in held}) > 2:
                    self._release()
            else:
                self._row(shape, row)
        return bool(rows)

    def _release(self) -> None:
        """A text may begin in the middle of its first line's step: that one counts if the next ones go on at
        the same distance."""
        held, self._held = self._held, []
        steps = sorted({row["step"] for _shape, row in held if "step" in row})
        sound = (
            len(steps) > 2 and steps[1] - steps[0] == steps[2] - steps[1] and held[0][1]["step"] == steps[0]
        )
        for shape, row in held if sound else held[1:]:
            self._row(shape, row)

    def _row(self, shape: Shape, row: Row) -> None:
        entry = shape.format
        if "step" not in row:
            if entry.name == HUGGINGFACE:
                self.trainer.row(row)
                self.trainer.like(shape)
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
        if entry.shared and not self.votes:
            self._shared.append((entry.name, row))
            if len(self._shared) < _MOST_SHARED:
                return
            (_name, row), self._shared = self._shared[-1], self._shared[:-1]
        if entry.shared and self.votes:
            family = max(self.votes, key=lambda name: self.votes[name].total())
        else:
            family = self._vote(entry.name, 1)
        if self._unplaced is not None and entry.evaluated_before is not None:
            self._place(row["step"] - entry.evaluated_before)
        for known, fact in (("last", "last_step"), ("progress", "progress")):
            if known in row:
                self.facts[fact] = row.pop(known)
                self._whole_last_step()
        if "micro" in row:
            self._micro_steps(row)
        elif entry.micro:
            row.pop("ms", None)
        waiting, self._shared = self._shared, []
        for earlier in (*(shared for _name, shared in waiting), row):
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
        runs, losses = self._runs(table.format), table.losses
        if before is not None and before.columns == table.columns and table.format == formats.CSV:
            runs.begin()
        elif runs.rows and table.format == formats.TABLE and losses & self._losses_of_tables:
            table.is_left_out = True
            self.remark(_("a second table with losses is left out: one run is read"))
        self._losses_of_tables |= losses
        if table.several:
            self.remark(_("the table has several runs: the first one is read"))

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    # --- what stands around rows ------------------------------------------------------------------

    def _read_head(self, line: str, *, cut: bool, first: bool) -> None:
        if (command := head.command_of(line)) is not None and not cut:
            if self.has_rows and head.is_offered(line, command):
                return  # what the program proposes when it has ended is not what was run
            settings, evidence = head.command_settings(command)
            self.commands |= settings
            self.evidence = {"command": command[:500], **self.evidence, **evidence}
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
        return family

    def _runs(self, family: str) -> Runs:
        return self.runs.setdefault(family, Runs())


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
