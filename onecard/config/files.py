"""Config files of `name = value` lines and `--name=value` arguments, read without executing anything.

nanoGPT's configs are Python files that it exec()s. Here they are parsed with `ast` and only what a
config needs is understood: literals, arithmetic on them, names assigned earlier, string
concatenation. Imports are skipped with a note; any other call or statement is a clear error. What
comes out is a list of Assignment; which names exist and what type they have is for knobs.py to know.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecard.errors import UserError
from onecard.language import N_, _

MAX_FILE_BYTES = 100_000  # a config is a page of text; a data file given by mistake is not parsed
MAX_INTEGER = 10**18
COMMAND_LINE = N_("command line")  # the origin of values given there
# A value that nobody wrote down: the model that is continued has it.
CHECKPOINT = N_("the checkpoint")
MAX_STRING = 10_000

Value = int | float | str | bool | None


@dataclass(frozen=True)
class Assignment:
    name: str
    value: Value
    origin: str  # "config/x.py:12" or "command line"


@dataclass
class ParsedFile:
    assignments: list[Assignment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_config_file(path: str | Path, known_defaults: Mapping[str, Any]) -> ParsedFile:
    """Parse one config file. `known_defaults` lets a file refer to a knob it has not set itself."""
    text = _read_text(Path(path))
    try:
        return _FileReader(str(path), text, known_defaults).read(_parse(text))
    except (RecursionError, MemoryError):
        why = _("a value in it is nested too deeply")
    except (SyntaxError, ValueError) as error:
        line, problem = getattr(error, "lineno", None), getattr(error, "msg", None) or error
        why = _("line {line}: {problem}").format(line=line, problem=problem) if line else str(problem)
    raise UserError(
        _("{path} is not a config file onecard can read").format(path=path),
        why,
        _hint(text),
    )


def _hint(text: str) -> str:
    """For what is given to plan in place of a config."""
    if "Traceback (most recent call last)" in text:
        return _("what went wrong, and what to change: onecard doctor LOG")
    if re.search(r"^(?:iter|step) \d+: (?:train )?loss ", text, re.M):
        return _("it is a log: onecard report LOG, or onecard eta LOG")
    return _("a config is lines of `name = value`, as in nanoGPT")


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 'C:\data' is a fine value; Python would warn of its backslash
        return ast.parse(text)


def _installed(path: Path) -> Path:
    """`config/demo.py` is read where pip has put the configs that come with onecard, if none is here."""
    there = Path(sys.prefix) / "share" / "onecard" / path
    return there if path.parts[:1] == ("config",) and not path.exists() and there.is_file() else path


def _read_text(path: Path) -> str:
    path = _installed(path)
    try:
        if path.is_dir():
            raise UserError(
                _("{path} is a folder, not a config file").format(path=path),
                hint=_("for the run in it: --out_dir={path}; for a config: {path}/NAME.py").format(path=path)
                if (path / "config.json").exists()
                else _("for a config: {path}/NAME.py").format(path=path),
            )
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)  # no more: pipes and devices do not tell their size
        if len(content) > MAX_FILE_BYTES:
            raise UserError(
                _("{path} is too large for a config file").format(path=path),
                _("configs end at {n:,} bytes; nothing of it was used").format(n=MAX_FILE_BYTES),
                _("did you mean to give a data file to `onecard prepare`?"),
            )
        # utf-8-sig: Windows editors put a mark in front.
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        folder = path.parent
        usual = Path("config")  # what comes with onecard
        names = [str(p) for p in (folder if folder.is_dir() else usual).glob("*.py")]
        near = difflib.get_close_matches(str(path), names, n=2, cutoff=0.75)
        hint = did_you_mean(near) or _("give the path of a file of `name = value` lines")
        raise UserError(_("there is no config file {path}").format(path=path), hint=hint) from None
    except UnicodeDecodeError as error:
        raise UserError(
            _("{path} is not text").format(path=path),
            _("byte {start} is not valid UTF-8").format(start=error.start),
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UserError(
            _("{path} cannot be read").format(path=shortened(str(path))),
            str(getattr(error, "strerror", None) or error),
        ) from None


class _FileReader:
    def __init__(self, path: str, text: str, known_defaults: Mapping[str, Any]) -> None:
        self.path = path
        self.lines = text.split("\n")  # as ast counts them; splitlines() also splits at form feeds
        self.known_defaults = known_defaults
        self.values: dict[str, Value] = {}
        self.parsed = ParsedFile()

    def read(self, tree: ast.Module) -> ParsedFile:
        for statement in tree.body:
            self._statement(statement)
        # A name nobody knows is a helper if the file uses it further on, and a misspelling if not.
        used = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        knobs = []
        for a in self.parsed.assignments:
            if a.name in self.known_defaults or not (a.name in used or a.name.startswith("_")):
                knobs.append(a)
            elif near := difflib.get_close_matches(a.name, self.known_defaults, n=1, cutoff=0.85):
                self.parsed.notes.append(
                    _("{where}: '{name}' is no knob; did you mean {near}?").format(
                        where=a.origin, name=a.name, near=near[0]
                    )
                )
        self.parsed.assignments = knobs
        return self.parsed

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                where = f"{self.path}:{node.lineno}"
                self.parsed.notes.append(
                    _("{where}: import ignored (configs are read, not run)").format(where=where)
                )
            case ast.Assign(targets=targets, value=value) if all(isinstance(t, ast.Name) for t in targets):
                for target in targets:
                    assert isinstance(target, ast.Name)
                    self._assign(target.id, value, node.lineno)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._assign(name, value, node.lineno)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass  # a docstring
            case ast.Expr(value=ast.Call()):
                raise self._error(node, _("a call is not understood in a config"), _(_CALL_HINT))
            case _other:
                what = _("only `name = value` lines are understood in a config")
                raise self._error(node, what, _(_CALL_HINT))

    def _assign(self, name: str, node: ast.expr, line: int) -> None:
        try:
            value = evaluate(node, self._lookup)
        except _CannotEvaluateError as problem:
            raise self._error(problem.node, problem.what, problem.hint) from None
        self.values[name] = value
        self.parsed.assignments.append(Assignment(name, value, f"{self.path}:{line}"))

    def _lookup(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        return self.known_defaults[name]

    def _error(self, node: ast.AST, what: str, hint: str) -> UserError:
        line = getattr(node, "lineno", 1)
        source = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        where = f"{self.path}:{line}"
        return UserError(_("{where}: {what}").format(where=where, what=what), source[:200], hint)


_CALL_HINT = N_("configs are read, not executed: write the value out, or give it on the command line")


class _CannotEvaluateError(Exception):
    def __init__(self, node: ast.AST, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.node, self.what, self.hint = node, what, hint


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}


def evaluate(node: ast.expr, lookup: Callable[[str], Value]) -> Value:
    """The value of a literal expression; every result is bounded, so no input can exhaust memory."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return _bounded(node, value)
        case ast.Name(id=name):
            try:
                return lookup(name)
            except KeyError:
                raise _CannotEvaluateError(
                    node, _("the name '{name}' has no value here").format(name=name)
                ) from None
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            inner = evaluate(operand, lookup)
            if isinstance(inner, str) or inner is None:
                raise _CannotEvaluateError(node, _("no arithmetic on {value}").format(value=shortened(inner)))
            return _bounded(node, _UNARY[type(op)](inner))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _binary(node, op, evaluate(left, lookup), evaluate(right, lookup))
        case ast.Call() if ast.unparse(node) == "str(time.time())":
            # The one call in nanoGPT's own configs: it makes a run name unique.
            return str(time.time())
        case ast.Call():
            raise _CannotEvaluateError(node, _("a call is not understood in a config"), _(_CALL_HINT))
        case _other:
            hint = _("use a number, a string, True or False")
            if "is_available" in ast.unparse(node) or "is_bf16_supported" in ast.unparse(node):
                hint = _("leave the line out: the best device and dtype there are will be used")
            raise _CannotEvaluateError(node, _("this value is not understood in a config"), hint)


def _binary(node: ast.BinOp, op: ast.operator, left: Value, right: Value) -> Value:
    if isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add):
        return _bounded(node, left + right)
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        raise _CannotEvaluateError(
            node,
            _("no arithmetic on {one} and {other}").format(one=shortened(left), other=shortened(right)),
        )
    if isinstance(op, ast.Pow) and (abs(right) > 64 or abs(left) > 10**6):
        raise _CannotEvaluateError(node, _("this power is too large for a config"))
    try:
        result = _BINARY[type(op)](left, right)
    except (ArithmeticError, ValueError) as error:
        raise _CannotEvaluateError(node, _("this cannot be computed: {error}").format(error=error)) from None
    if not isinstance(result, int | float):
        raise _CannotEvaluateError(node, _("this does not give a real number"))
    return _bounded(node, result)


def did_you_mean(near: Sequence[str]) -> str:
    """A hint that names one or two; empty where there is none."""
    if len(near) > 1:
        return _("did you mean {one} or {other}?").format(one=near[0], other=near[1])
    return _("did you mean {name}?").format(name=near[0]) if near else ""


def shown_origin(origin: str) -> str:
    """Where a value was given: a line of a file, or words in the reader's language."""
    return _(origin) if origin else ""


def shortened(value: Value) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bounded(node: ast.AST, value: Value) -> Value:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise _CannotEvaluateError(node, _("this number is larger than {n:,}").format(n=MAX_INTEGER))
    if isinstance(value, str) and len(value) > MAX_STRING:
        raise _CannotEvaluateError(node, _("this text is longer than {n:,} characters").format(n=MAX_STRING))
    return value


# --- the command line ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """One `--name=value`; value None means the bare flag `--name`. A config file has name ''."""

    name: str
    value: str | None


def split_arguments(arguments: Iterable[str], takes_value: Callable[[str], bool]) -> list[Argument]:
    """`--name=value`, `--name value`, bare `--flag`, and config files, in the order given.

    `takes_value(name)` says whether a following word belongs to the flag: `--compile config/x.py`
    must not swallow the file, `--batch-size 8` must swallow the 8.
    """
    pending = list(arguments)
    result: list[Argument] = []
    while pending:
        word = pending.pop(0)
        if not word.startswith("-") or word == "-":
            result.append(Argument("", word))
            continue
        name, separator, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not name:
            raise UserError(_("'{word}' is not an option").format(word=word[:60]), hint="--name=value")
        if separator:
            result.append(Argument(name, value))
        elif pending and _belongs_to_flag(pending[0], takes_value(name)):
            result.append(Argument(name, pending.pop(0)))
        else:
            result.append(Argument(name, None))
    return result


def _belongs_to_flag(word: str, takes_value: bool) -> bool:
    if word.lower() in TRUE_WORDS | FALSE_WORDS | {"0", "1", "auto", "none"}:
        return True
    if not takes_value:
        return False
    return not word.startswith("--")


TRUE_WORDS = frozenset({"true", "yes", "on"})
FALSE_WORDS = frozenset({"false", "no", "off"})


def parse_argument_text(text: str) -> Value:
    """What a person typed after `=`: a literal or arithmetic if it is one, else the text itself."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return evaluate(tree.body, _no_names)
    except (_CannotEvaluateError, SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _no_names(name: str) -> Value:
    raise KeyError(name)
