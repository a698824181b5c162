"""The house's own rules: who may import whom, how long a room may be, what the base install can do."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "onecard"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the top of the house to the bottom: a room may import its own modules and rooms above it.
ROOMS = (
    "terminal", "language", "errors", "files", "arch", "config", "hardware", "plan", "data", "model", "optim",
    "convert", "run", "generate", "train", "report", "doctor", "ui", "cli",
)  # fmt: skip
FREE = ("__init__", "__main__")

MAX_LINES = 400
MAX_LOOP_LINES = 300

LIGHT_ROOMS = (
    "errors", "language", "terminal", "arch", "config", "hardware", "plan", "report", "doctor", "cli",
)  # fmt: skip
HEAVY = (
    "torch", "numpy", "pyarrow", "safetensors", "tiktoken", "fastokens", "rustbpe", "huggingface_hub",
    "transformers",
)  # fmt: skip

# Behaves as if the heavy packages were not installed: no finder finds them.
WITHOUT_HEAVY = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def name_of(path: Path) -> str:
    """`onecard.data.bins` for onecard/data/bins.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """`data` for onecard.data.bins; `__init__` for onecard itself."""
    return module.split(".")[1] if "." in module else "__init__"


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module of onecard) for every import, at the top level or inside a function."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from onecard import cli` imports a room, `from onecard import __version__` does not.
            names = [base if base != "onecard" else f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "onecard":
                yield node.lineno, name


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    here = room_of(module)
    if here in FREE:
        return []
    found = []
    for line, name in imports_of(source, module, is_package):
        room = room_of(name)
        if room == "__version__" or room == here:
            continue
        if room not in ROOMS or ROOMS.index(room) > ROOMS.index(here):
            found.append(f"{module}:{line} imports {name}")
    return found


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


# --- what a terminal is sent ---------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path))
def test_only_terminal_py_writes_to_terminals(path: Path) -> None:
    """It spells out what a terminal would obey: say, show, show_json, write, console."""
    if path.name == "terminal.py":
        return
    calls = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    ]
    written = [ast.unparse(call.func) for call in calls]
    own = {
        "print",
        "Console",
        "rich.print",
        "sys.stdout.write",
        "sys.stderr.write",
        "sys.stdout.buffer.write",
    }
    assert not own & set(written)


# --- who may import whom ------------------------------------------------------------------------


def test_every_module_belongs_to_a_room() -> None:
    assert MODULES
    assert {room_of(name_of(path)) for path in MODULES} <= {*ROOMS, *FREE}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path))
def test_a_module_imports_only_its_own_room_and_rooms_above_it(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), name_of(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "import onecard.cli",
        "import os, onecard.train.loop as loop",
        "from onecard import cli",
        "from onecard.train.loop import train",
        "from ..train import loop",
        "from .. import cli",
        "def f():\n    from onecard.generate.sample import sample_text",
        "if TYPE_CHECKING:\n    from onecard.run.load import LoadedModel",
        "from onecard.attic import old",
    ],
)
def test_the_check_sees_an_import_from_below(source: str) -> None:
    assert len(violations(source, "onecard.data.bins")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from onecard import __version__",
        "from onecard.errors import UserError",
        "from onecard.data.order import permute",
        "from . import order",
        "from .order import permute",
        "from ..hardware.cards import Card",
        "import torch, onecarder.cli",
    ],
)
def test_the_check_allows_an_import_from_above(source: str) -> None:
    assert violations(source, "onecard.data.bins") == []


def test_test_files_have_names_of_their_own() -> None:
    """They are no package: two of one name cannot be collected in one go."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert {name for name in names if names.count(name) > 1} == set()


# --- size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path))
def test_a_module_can_be_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= (MAX_LOOP_LINES - 1 if path == PACKAGE / "train" / "loop.py" else MAX_LINES)


MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 8
# Code lines of a room: no blank lines, comments or docstrings. Raised only with a reason, in the commit.
BUDGET = {
    "terminal": 180, "language": 80, "errors": 50, "files": 160, "arch": 570, "config": 1240,
    "hardware": 1690, "plan": 5225, "data": 5400, "model": 1910, "optim": 1255, "convert": 1185,
    "run": 1625, "generate": 400, "train": 4360, "doctor": 4350, "report": 10600, "cli": 700, "__init__": 1,
    "__main__": 3,
}  # fmt: skip


def functions_of(source: str) -> Iterator[ast.FunctionDef]:
    """All but kernels: what a Triton kernel is given is its pointers, strides and sizes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and "jit" not in ast.dump(ast.List(node.decorator_list)):
            yield node


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path))
def test_a_function_fits_a_screen_and_takes_few_parameters(path: Path) -> None:
    for function in functions_of(path.read_text(encoding="utf-8")):
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= MOST_LINES_OF_A_FUNCTION, f"{function.name} has {lines} lines"
        given = function.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        assert len([n for n in names if n not in ("self", "cls")]) <= MOST_PARAMETERS, function.name


def code_lines(source: str) -> int:
    """Lines with code: no blanks, no comments, no docstrings."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(first := node.body[0], ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
        for line in range(first.lineno, (first.end_lineno or 0) + 1)
    }
    nothing = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    found = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in nothing
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(found - docstrings)


def test_code_lines_are_counted() -> None:
    source = (
        '"""What.\n\nMore."""\n\n# why\nx = (1,\n     2)  # two\n\n\ndef f():\n    """Doc."""\n    return x\n'
    )
    assert code_lines(source) == 4


def test_a_room_keeps_its_budget() -> None:
    lines: dict[str, int] = {}
    for path in MODULES:
        room = room_of(name_of(path))
        lines[room] = lines.get(room, 0) + code_lines(path.read_text(encoding="utf-8"))
    over = {
        room: (count, BUDGET.get(room, 0)) for room, count in lines.items() if count > BUDGET.get(room, 0)
    }
    assert over == {}
    assert {room for room in BUDGET if BUDGET[room] > 1.1 * lines.get(room, 0) + 20} == set(), "lower these"


# --- the base install ---------------------------------------------------------------------------


def test_the_light_rooms_import_without_the_heavy_packages(tmp_path: Path) -> None:
    light = [name_of(path) for path in MODULES if room_of(name_of(path)) in LIGHT_ROOMS]
    assert {"onecard.cli", "onecard.cli.verbs", "onecard.hardware.machine", "onecard.hardware.show"} <= set(
        light
    )
    result = python("-c", f"{WITHOUT_HEAVY}\nimport {', '.join(light)}\n", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_light_rooms_leave_the_heavy_packages_alone_where_they_are_installed(tmp_path: Path) -> None:
    light = [name_of(path) for path in MODULES if room_of(name_of(path)) in LIGHT_ROOMS]
    code = f"import sys, {', '.join(light)}\nprint(sorted({set(HEAVY)!r} & set(sys.modules)))"
    result = python("-c", code, cwd=tmp_path)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


@pytest.mark.parametrize(
    "arguments", [["train"], ["sample"], ["prepare", "stdlib"], ["export", "out", "model"], ["bench"]]
)
def test_a_verb_that_needs_more_than_the_base_install_names_the_extra(
    tmp_path: Path, arguments: list[str]
) -> None:
    code = f"{WITHOUT_HEAVY}\nfrom onecard.cli import main\nraise SystemExit(main({arguments!r}))"
    result = python("-c", code, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert re.search(r"hint: (pip install .*\[train\]'|use the clone's own Python)", result.stderr)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["gpus", "--all"], ["gpus", "4070"], ["gpus", "--json"]])
def test_the_cards_are_shown_by_the_base_install(tmp_path: Path, arguments: list[str]) -> None:
    code = f"{WITHOUT_HEAVY}\nfrom onecard.cli import main\nraise SystemExit(main({arguments!r}))"
    result = python("-c", code, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "RTX 4070" in result.stdout


def test_help_comes_at_once(tmp_path: Path) -> None:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        result = python("-m", "onecard", "--help", cwd=tmp_path)
        seconds.append(time.perf_counter() - started)
        assert result.returncode == 0
        assert "onecard train" in result.stdout
    assert min(seconds) < 0.3
