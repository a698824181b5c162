"""`--apply`: a cure's lines written into a config file, once the difference was shown and the answer was
yes.

Only values change: comments, order, line ends and everything else stay. What is written is read back
first, as a run would read it; where another knob would change with it, nothing is written. The file as it
was is kept beside it.
"""

from __future__ import annotations

import ast
import difflib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.doctor.cures import Cure, Line
from onecard.errors import UserError
from onecard.files import flush_to_disk, read_bounded, temporary_beside
from onecard.language import _
from onecard.terminal import say, show

_MOST = 1_000_000  # bytes of a config
_ALSO_KNOWN = frozenset(field.name for field in knobs(SampleConfig))


@dataclass(frozen=True)
class Edit:
    """A config file before and after."""

    path: Path
    before: bytes
    after: bytes

    @property
    def diff(self) -> str:
        old, new = (text.decode("utf-8", "replace").splitlines() for text in (self.before, self.after))
        name = self.path.name
        return "\n".join(difflib.unified_diff(old, new, name, name, lineterm="", n=1))


def apply_cure(
    path: str,
    cures: Sequence[Cure],
    *,
    yes: bool,
    tell: Callable[[str], None] = show,
    ask: Callable[[], bool] | None = None,
) -> bool:
    """Was it written? The first cure with lines for their own trainer is. `tell` is given the difference."""
    cure = next((cure for cure in cures if cure.lines and cure.trainer != "onecard"), None)
    if cure is None:
        raise UserError(
            _("there is no change to write"), _("no cure for their trainer changes a line of this config"),
            "onecard plan CONFIG.py", exit_code=1,
        )  # fmt: skip
    edit = edit_of(Path(path), cure.lines)
    tell(edit.diff)
    if not yes and not (ask or _ask)():
        say(_("nothing was written; --yes writes without asking"))
        return False
    backup = write(edit)
    say(_("{path} is written; as it was: {backup}").format(path=path, backup=backup))
    return True


def _ask() -> bool:
    """Only where somebody is there to answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(_("write this? (y/N)"))
    return sys.stdin.readline().strip().lower() in ("y", "yes", "j", "ja", "s", "si", "s\u00ed")


def edit_of(path: Path, lines: Sequence[Line]) -> Edit:
    """The edited file, not yet written; UserError where it cannot be edited and nothing else change."""
    if path.suffix != ".py":
        raise UserError(
            _("{path} is no config file").format(path=path), _("--apply changes files of name = value lines"),
            "--config CONFIG.py",
        )  # fmt: skip
    try:
        before = read_bounded(path, _MOST)
        text = before.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(_("{path} cannot be read").format(path=path), str(error)) from None
    after = text
    for line in lines:
        after = _with_line(after, line)
    edit = Edit(path, before, after.encode("utf-8"))
    _check(edit, lines)
    return edit


def _with_line(text: str, line: Line) -> str:
    """The last assignment of this name gets the value; without one a line is added."""
    plain = text.removeprefix("\ufeff")
    mark = text[: len(text) - len(plain)]
    value = repr(line.value)
    found = [
        node for node in ast.parse(plain).body
        if isinstance(node, ast.Assign) and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name) and node.targets[0].id == line.name
    ]  # fmt: skip
    rows = [row + "\n" for row in plain.split("\n")]  # as the parser counts them
    rows[-1] = rows[-1][:-1]
    if not found:
        end = _line_end(plain)
        gap = end if rows[-1] else ""
        return mark + plain + gap + f"{line.name} = {value}{end}"
    node = found[-1].value
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    # Columns of the parser count bytes.
    head = rows[first].encode()[: node.col_offset].decode()
    tail = rows[last].encode()[node.end_col_offset :].decode()
    if not tail.strip() and line.was is not None:
        tail = f"   # was {line.was}" + tail
    return mark + "".join([*rows[:first], head + value + tail, *rows[last + 1 :]])


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _check(edit: Edit, lines: Sequence[Line]) -> None:
    """Read as a run would read it: the lines have their values, and nothing else has changed."""
    wanted = {line.name: line.value for line in lines}
    trial = temporary_beside(edit.path.with_suffix(".py"))
    trial = trial.with_name(trial.name + ".py")
    try:
        old = load_config(RunConfig, [str(edit.path)], also_known=_ALSO_KNOWN, check=False).values()
        trial.write_bytes(edit.after)
        new = load_config(RunConfig, [str(trial)], also_known=_ALSO_KNOWN, check=False).values()
    except OSError as error:
        raise UserError(_("{path} cannot be changed").format(path=edit.path), str(error)) from None
    finally:
        trial.unlink(missing_ok=True)
    missed = [name for name, value in wanted.items() if new.get(name) != value]
    moved = [name for name in new if name not in wanted and new[name] != old.get(name)]
    if missed or moved:
        raise UserError(
            _("{path} cannot be changed line by line").format(path=edit.path),
            _("other values follow from these: {names}").format(names=", ".join([*missed, *moved])),
            _("change it by hand: {lines}").format(
                lines="; ".join(f"{n} = {v!r}" for n, v in wanted.items())
            ),
        )


def write(edit: Edit) -> Path:
    """The file in one piece or not at all; returns the copy of what was there."""
    path = edit.path.resolve()  # of a link the file behind it
    try:
        if path.read_bytes() != edit.before:
            raise UserError(
                _("{path} has changed meanwhile").format(path=edit.path), hint=_("run the same command again")
            )
        backup = _backup(path, edit.before)
        trial = temporary_beside(path)
        try:
            trial.write_bytes(edit.after)
            shutil.copymode(path, trial)
            flush_to_disk(trial)
            trial.replace(path)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(_("{path} cannot be written").format(path=edit.path), str(error)) from None
    return backup


def _backup(path: Path, content: bytes) -> Path:
    """Beside it, under a name that nothing has."""
    for number in range(1000):
        backup = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            with backup.open("xb") as file:
                file.write(content)
            shutil.copymode(path, backup)
            return backup
        except FileExistsError:
            continue
    raise UserError(_("there are too many backups of {path}").format(path=path))
