"""Many texts as UTF-8, which is what files hold and what encoders read.

Python's strings lie between the two: each is made of UTF-8, and made into UTF-8 again when an encoder wants
it, one after the other under Python's lock. That was a third of prepare's time (docs/lessons.md).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

# From this many bytes on a text is copied for an encoder: below, it is decoded as fast.
_WORTH_COPYING = 1000
_SAMPLE = ("ASCII, é, 你好, 🙂 " * 40).encode()


@dataclass
class Run:
    """Texts back to back: text n is data[at[n]:at[n + 1]]."""

    data: bytearray | memoryview
    at: list[int]


@dataclass
class Texts:
    """Texts in order, as valid UTF-8: whoever puts bytes in has made sure of that."""

    runs: list[Run] = field(default_factory=list)

    @classmethod
    def of(cls, strings: Iterable[str]) -> Texts:
        texts = cls()
        for string in strings:
            texts.append(well_formed(string).encode())
        return texts

    def append(self, utf8: bytes | memoryview) -> None:
        if not self.runs or not isinstance(self.runs[-1].data, bytearray):
            self.runs.append(Run(bytearray(), [0]))
        run = self.runs[-1]
        assert isinstance(run.data, bytearray)
        run.data += utf8
        run.at.append(len(run.data))

    def extend(self, other: Texts) -> None:
        self.runs += other.runs

    def __len__(self) -> int:
        return sum(len(run.at) - 1 for run in self.runs)

    def __iter__(self) -> Iterator[str]:
        for run in self.runs:
            whole = memoryview(run.data)
            for start, stop in itertools.pairwise(run.at):
                yield str(whole[start:stop], "utf-8")

    def for_encoder(self) -> list[str]:
        """For an encoder that asks each string for its UTF-8 and does nothing else with it.

        They may be wrong for every other purpose: see _copier.
        """
        copy = _copier()
        if copy is None:
            return list(self)
        return [string for run in self.runs for string in _strings(run, copy)]


def _strings(run: Run, copy: Callable[[int, int], str]) -> Iterator[str]:
    whole = memoryview(run.data)
    if not whole:
        yield from itertools.repeat("", len(run.at) - 1)
        return
    address = np.frombuffer(whole, np.uint8).ctypes.data
    for start, stop in itertools.pairwise(run.at):
        size = stop - start
        yield copy(address + start, size) if size >= _WORTH_COPYING else str(whole[start:stop], "utf-8")


def well_formed(text: str) -> str:
    """Lone surrogates (from JSON escapes or odd file names) have no UTF-8; they become replacement marks."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@functools.cache
def _copier() -> Callable[[int, int], str] | None:
    """A string whose UTF-8 is the bytes at an address, made by copying them; None where that does not work.

    CPython keeps ASCII as it is and gives it out as its own UTF-8. A new string that is marked as ASCII and
    filled with other UTF-8 is given out just so, with no conversion either way. To Python, which takes every
    byte for a character, it is another text: it must not be looked at, and be dropped soon. Tried out here
    before it is used at all.
    """
    if sys.implementation.name != "cpython":
        return None
    # All of them keep Python's lock: giving it up and waiting for it again would cost more than they do.
    c, python = ctypes, ctypes.pythonapi
    new = c.PYFUNCTYPE(c.py_object, c.c_ssize_t, c.c_uint32)(("PyUnicode_New", python))
    utf8_type = c.PYFUNCTYPE(c.c_void_p, c.py_object, c.POINTER(c.c_ssize_t))
    utf8_of = utf8_type(("PyUnicode_AsUTF8AndSize", python))
    move_type = c.PYFUNCTYPE(c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t)
    move = move_type(c.cast(c.memmove, c.c_void_p).value or 0)
    header = sys.getsizeof("") - 1  # characters lie behind it, and a zero behind them

    def copy(address: int, size: int) -> str:
        string: str = new(size, 127)
        move(id(string) + header, address, size)
        return string

    if sys.getsizeof(new(len(_SAMPLE), 127)) != header + len(_SAMPLE) + 1:
        return None
    size = c.c_ssize_t()
    sample = copy(np.frombuffer(_SAMPLE, np.uint8).ctypes.data, len(_SAMPLE))
    found = utf8_of(sample, c.byref(size))
    return copy if c.string_at(found, size.value) == _SAMPLE else None
