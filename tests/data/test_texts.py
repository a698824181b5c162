"""Texts as UTF-8: what goes in comes out, for people and for encoders."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onecard.data import texts as module
from onecard.data.prepare.parquet import _is_utf8
from onecard.data.texts import Run, Texts

LONG = "naïve café, 你好, 🙂🏳️‍🌈 \x00\x7f\u0080\uffff\U0010ffff " * 40
SOME_TEXTS = st.lists(st.text(max_size=20) | st.sampled_from([LONG, "plain ASCII " * 200, "é" * 5000]))


@pytest.fixture(autouse=True)
def fresh_copier() -> Iterator[None]:
    module._copier.cache_clear()
    yield
    module._copier.cache_clear()


def utf8_of(string: str) -> bytes:
    """As an encoder asks for it."""
    asking = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t))
    ask = asking(("PyUnicode_AsUTF8AndSize", ctypes.pythonapi))
    size = ctypes.c_ssize_t()
    found = ask(string, ctypes.byref(size))
    return ctypes.string_at(found, size.value)


@given(first=SOME_TEXTS, second=SOME_TEXTS, third=SOME_TEXTS)
def test_what_goes_in_comes_out(first: list[str], second: list[str], third: list[str]) -> None:
    texts, data = Texts.of(first), b"".join(text.encode() for text in second)
    ends = [len("".join(second[:n]).encode()) for n in range(len(second) + 1)]
    texts.extend(Texts([Run(memoryview(b"before" + data + b"after"), [6 + end for end in ends])]))
    for text in third:
        texts.append(text.encode())
    strings = [*first, *second, *third]
    assert list(texts) == strings and len(texts) == len(strings)
    assert [utf8_of(string) for string in texts.for_encoder()] == [text.encode() for text in strings]


def test_long_texts_are_copied_not_decoded() -> None:
    """Else nothing would be gained. In this interpreter the way must be open, or prepare is slow on it."""
    (string,) = Texts.of([LONG]).for_encoder()
    assert len(string) == len(LONG.encode()) and string.isascii()
    assert string != LONG, "to Python it is another text"


def test_they_outlive_what_they_were_copied_from() -> None:
    texts = Texts.of([LONG, LONG[::-1]])
    strings = texts.for_encoder()
    run = texts.runs[0]
    assert isinstance(run.data, bytearray)
    run.data[:] = b"x" * len(run.data)
    assert [utf8_of(string) for string in strings] == [LONG.encode(), LONG[::-1].encode()]


def test_lone_surrogates_become_marks() -> None:
    assert list(Texts.of(["a\ud83db", "\ud83d\ude42"])) == ["a\ufffdb", "🙂"]


@pytest.mark.parametrize("what", ["another interpreter", "another layout", "another answer"])
def test_where_it_does_not_work_strings_are_decoded(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "another interpreter":
        monkeypatch.setattr(sys.implementation, "name", "pypy")
    elif what == "another layout":
        monkeypatch.setattr(module.sys, "getsizeof", lambda thing: 64)
    else:
        monkeypatch.setattr(module.ctypes, "string_at", lambda address, size: b"something else")
    assert Texts.of([LONG, ""]).for_encoder() == [LONG, ""]


@given(raw=st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
@example(b"\xed\xa0\x80")  # half of a surrogate pair
@example(b"\xc0\x80")  # longer than it has to be
@example(b"\xf4\x90\x80\x80")  # beyond the last character
@example(b"\xf0\x9f\x99")  # cut short
@example(b"a" * 39 + b"\xff")
def test_arrow_and_python_agree_on_what_is_utf8(raw: bytes) -> None:
    """What is copied for an encoder was looked at by Arrow alone, and other bytes would end the process."""
    offsets = pa.array([0, 3, 3 + len(raw), 6 + len(raw)], pa.int32()).buffers()[1]
    array = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"xyz" + raw + b"xyz"))
    try:
        raw.decode()
        right = True
    except UnicodeDecodeError:
        right = False
    assert _is_utf8(array) is right
    assert _is_utf8(array.slice(2)) is True


def test_a_character_in_two_rows_is_in_neither() -> None:
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    assert not _is_utf8(pa.StringArray.from_buffers(2, offsets, pa.py_buffer("é".encode())))
