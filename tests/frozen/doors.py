"""The command line as a person calls it, in a folder of its own: it answers the same on every machine."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from onecard.cli import main

ROOT = Path(__file__).resolve().parents[2]
# How names of variables begin that stay as they are on this machine; all others are left out.
_INHERITED = (
    "PATH", "PYTHON", "PYTEST", "VIRTUAL_ENV", "LD_", "SYSTEMROOT", "TMP", "LANG", "LC_", "TZ",
    "OMP_", "MKL_", "ONEDNN_", "ATEN_",
)  # fmt: skip


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class _Stream(io.TextIOWrapper):
    """A pipe; `seen` hears every piece that is written."""

    def __init__(self, seen: Callable[[str], None] | None = None) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="\n", write_through=True)
        self._seen = seen

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._seen is not None:
            self._seen(text)
        return count

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode("utf-8")


@contextlib.contextmanager
def surroundings(folder: Path, **more: str) -> Iterator[None]:
    """80 columns without colour, in `folder`, with no cache and no home of a user."""
    home = folder / ".home"
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}
    own = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "HOME": str(home), "HF_HUB_OFFLINE": "1",
           "XDG_CACHE_HOME": str(home / "cache"), "ONECARD_LANG": "en"}  # fmt: skip
    before = Path.cwd()
    with mock.patch.dict(os.environ, kept | own | more, clear=True):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def onecard(
    *words: str, folder: Path, pasted: bytes = b"", seen: Callable[[str], None] | None = None, **more: str
) -> Answer:
    """`onecard WORDS` in `folder`; `pasted` is its stdin, and `seen` reads stderr along."""
    out, err = _Stream(), _Stream(seen)
    with (
        surroundings(folder, **more),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(pasted))),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err),
    ):
        try:
            code = main(list(words))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 2
    return Answer(code, out.text(), err.text())


def with_configs(folder: Path) -> Path:
    """The configs that are shipped, as config/NAME.py."""
    shutil.copytree(ROOT / "config", folder / "config", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def without_paths(text: str, folder: Path) -> str:
    """The folders of this machine by a name; and no spaces at the end of a line."""
    text = text.replace(str(folder), "FOLDER").replace(str(ROOT), "CLONE")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
