"""Texts that UTF-8 can write."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from onecard.data.prepare.parquet import _is_utf8
from onecard.data.texts import well_formed


@given(text=st.text(max_size=40))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert well_formed(text) == text


def test_lone_surrogates_become_marks() -> None:
    assert [well_formed(text) for text in ("a\ud83db", "\ud83d\ude42")] == ["a\ufffdb", "🙂"]


@given(raw=st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
@example(b"\xed\xa0\x80")  # half of a surrogate pair
@example(b"\xc0\x80")  # longer than it has to be
@example(b"\xf4\x90\x80\x80")  # beyond the last character
@example(b"\xf0\x9f\x99")  # cut short
@example(b"a" * 39 + b"\xff")
def test_arrow_and_python_agree_on_what_is_utf8(raw: bytes) -> None:
    """A row that Arrow finds well becomes a string as it is."""
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
