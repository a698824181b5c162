from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecard.data.prepare import parquet, reading
from onecard.data.prepare.origin import LocalFiles
from onecard.data.prepare.reading import Batch, Place, document_digest
from onecard.data.prepare.sources import Tally, find_sources
from onecard.errors import UserError


@dataclass(frozen=True)
class Piece:
    """One text of a batch."""

    text: str
    size: int
    digest: int
    ends: bool
    after: Place


def batches_of(*paths: Path | str, column: str = "text", start: Place | None = None) -> list[Batch]:
    files = find_sources([str(path) for path in paths], Tally())
    scratch = files[0].path.parent
    return list(LocalFiles(files).read(column, start or Place(), scratch))


def pieces_in(batches: list[Batch]) -> list[Piece]:
    return [
        Piece(*row)
        for batch in batches
        for row in zip(batch.texts, batch.sizes, batch.digests, batch.ends, batch.after, strict=True)
    ]


def pieces_of(*paths: Path | str, column: str = "text", tally: Tally | None = None) -> list[Piece]:
    batches = batches_of(*paths, column=column)
    if tally is not None:
        tally.empty_documents += sum(batch.n_empty for batch in batches)
        tally.bad_bytes += sum(batch.n_bad for batch in batches)
    return pieces_in(batches)


def texts_of(*paths: Path | str, column: str = "text", tally: Tally | None = None) -> list[str]:
    return [piece.text for piece in pieces_of(*paths, column=column, tally=tally)]


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: dict[str, list[object]], row_group: int = 2) -> Path:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(rows), path, row_group_size=row_group)
    return path


def test_each_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\r\n", newline="")
    (tmp_path / "a.md").write_text("\ufefffirst", encoding="utf-8")
    assert texts_of(tmp_path) == ["first", "second\r\n"]
    piece = pieces_of(tmp_path / "a.md")[0]
    assert piece == Piece("first", 5, document_digest(b"first"), True, Place(1))


def test_bad_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good \xff bad \xe4\xbd end, and a real \xef\xbf\xbd")
    tally = Tally()
    assert texts_of(tmp_path, tally=tally) == ["good \ufffd bad \ufffd end, and a real \ufffd"]
    assert tally.bad_bytes == 2
    assert "2 places were not UTF-8" in tally.notes()[0]


# ---------------------------------------------------------------- large texts


def test_large_text_comes_in_pieces_of_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)
    text = "\ufeff" + "".join(f"words of line {number} ñ 你好\n\n   " for number in range(100))
    path = tmp_path / "large.txt"
    path.write_text(text, encoding="utf-8")
    pieces = pieces_of(path)
    assert len(pieces) > 10
    assert "".join(piece.text for piece in pieces) == text[1:]
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.digest for piece in pieces} == {document_digest(text[1:].encode())}
    assert sum(piece.size for piece in pieces) == len(text[1:].encode())
    assert max(len(piece.text.encode()) for piece in pieces) < 300
    # Cut only between two words.
    for before, after in itertools.pairwise(pieces):
        assert before.text[-1].isalnum()
        assert after.text[0] == " " and after.text[1].isalpha()


@pytest.mark.parametrize("unit", ["x", " ", "好"])
def test_large_text_without_a_place_to_cut_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)
    path = tmp_path / "large.txt"
    path.write_text(unit * 5000, encoding="utf-8")
    pieces = pieces_of(path)
    assert "".join(piece.text for piece in pieces) == unit * 5000
    assert max(len(piece.text) for piece in pieces) <= 1000


def test_bad_bytes_at_the_edge_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 64)
    raw = b"a" * 63 + "\ufffd".encode() + b"b" * 61 + b"\xff tail \xe4\xbd"
    path = tmp_path / "large.txt"
    path.write_bytes(raw)
    tally = Tally()
    assert "".join(texts_of(path, tally=tally)) == raw.decode("utf-8", "replace")
    assert tally.bad_bytes == 2


# ---------------------------------------------------------------- jsonl and parquet


def test_jsonl(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"text": "one"}, {"text": ""}, {"text": None}, {"text": "zwei ñ"}]
    )
    path.write_bytes(path.read_bytes() + b"\n\n")
    tally = Tally()
    pieces = pieces_of(path, tally=tally)
    assert [piece.text for piece in pieces] == ["one", "zwei ñ"]
    assert pieces[0].digest == document_digest(b"one")
    assert tally.empty_documents == 2
    assert texts_of(write_jsonl(tmp_path / "b.jsonl", [{"body": "x"}]), column="body") == ["x"]


def test_jsonl_with_half_an_emoji_is_mended(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}\n')
    assert texts_of(tmp_path / "a.jsonl") == ["a\ufffd b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut sho', "line 2, column 10: not JSON"),
        ("plain words", "line 2, column 1: not JSON"),
        ("[" * 100_000, "line 2"),
        ("[1]", "line 2: not an object"),
        ('{"text": 5}', "line 2: column 'text' is not text but int"),
        ('{"content": "x", "id": 1}', "line 2: no column 'text'"),
    ],
)
def test_jsonl_faults_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message) as caught:
        texts_of(path)
    assert str(path) in caught.value.what
    if "no column" in message:
        assert caught.value.why == "there are: content, id"
        assert "--text-column content" in caught.value.hint


def test_parquet(tmp_path: Path) -> None:
    rows: dict[str, list[object]] = {"text": ["one", None, "", "four", "fünf"], "id": [1, 2, 3, 4, 5]}
    tally = Tally()
    path = write_parquet(tmp_path / "a.parquet", rows)
    pieces = pieces_of(path, tally=tally)
    assert [piece.text for piece in pieces] == ["one", "four", "fünf"]
    assert tally.empty_documents == 2
    assert [piece.after for piece in pieces] == [Place(0, 1), Place(0, 4), Place(0, 5)]
    assert batches_of(path)[-1].read == path.stat().st_size
    assert batches_of(path)[-1].end == Place(1)


def test_parquet_with_a_dictionary_column(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    assert texts_of(write_parquet(tmp_path / "a.parquet", {"text": column})) == ["a", "b", "a"]


def test_parquet_faults(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"content": ["x"], "id": [1]})
    with pytest.raises(UserError, match="no column 'text'") as caught:
        texts_of(path)
    assert caught.value.why == "there are: content, id"
    with pytest.raises(UserError, match="column 'id' is not text but int64"):
        texts_of(path, column="id")
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"cut\.parquet, row 0: not a readable parquet") as caught:
        texts_of(cut)
    assert "cut short" in caught.value.hint


def test_parquet_damaged_inside_names_the_row(tmp_path: Path) -> None:
    rows: dict[str, list[object]] = {"text": [f"document {number} " * 50 for number in range(2000)]}
    path = write_parquet(tmp_path / "a.parquet", rows, row_group=500)
    raw = bytearray(path.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 2000] = b"\xff" * 2000
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"a\.parquet, row [\d,]+: not a readable parquet"):
        texts_of(path)


def test_parquet_that_is_not_utf8_is_mended_and_counted(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    raw = pa.array([b"good", b"bad \xff byte"], pa.binary())
    column = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    tally = Tally()
    pieces = pieces_of(write_parquet(tmp_path / "a.parquet", {"text": column}), tally=tally)
    assert [piece.text for piece in pieces] == ["good", "bad \ufffd byte"]
    assert [piece.size for piece in pieces] == [4, 12]
    assert tally.bad_bytes == 1


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_parquet_text_in_all_its_forms(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    column = pa.array(["a", None, "ñ" * 20, "", "d"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pa, kind)())
    other = pa.array([{"deep": 1, "deeper": "x"}] * 5)
    path = write_parquet(tmp_path / "a.parquet", {"nested": other, "text": column})
    assert texts_of(path) == ["a", "ñ" * 20, "d"]


def test_parquet_inside_gzip_is_unpacked_and_the_copy_removed(tmp_path: Path) -> None:
    plain = write_parquet(tmp_path / "a.parquet", {"text": ["one", "two"]})
    packed = tmp_path / "b.parquet.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert texts_of(packed) == ["one", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["b.parquet.gz"]


def test_batches_stay_small_whatever_a_file_hides(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    column = pa.array(["x" * 20_000]).dictionary_encode().take(pa.array([0] * 3000))
    path = write_parquet(tmp_path / "a.parquet", {"text": column}, row_group=10**6)
    assert path.stat().st_size < 50_000
    batches = batches_of(path)
    assert sum(len(batch.texts) for batch in batches) == 3000
    assert max(batch.n_bytes for batch in batches) < 2 * reading.BATCH_BYTES
    for piece in parquet._bounded(column):
        # Spelled out together, long ones would not fit into one array.
        assert pa.types.is_dictionary(piece.type) and len(piece) <= reading.BATCH_BYTES // 20_000 + 1
    short = tmp_path / "b.jsonl"
    short.write_text('{"text": "a"}\n' * 50_000)
    assert max(len(batch.texts) for batch in batches_of(short)) <= reading.MOST_TEXTS


# What a process of its own needs at most to read a file, in MB beyond what importing needs.
_READ = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from onecard.data.prepare.origin import LocalFiles
from onecard.data.prepare.reading import Place
from onecard.data.prepare.sources import Tally, find_sources
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
files, before, read = find_sources(sys.argv[1:], Tally()), peak(), 0
try:
    for batch in LocalFiles(files).read("text", Place(), Path()):
        read += batch.n_bytes
except Exception as error:
    print(error)
print(read, peak() - before)
"""


@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY", "claimed", "rows"])
def test_parquet_that_stands_for_gigabytes_is_stopped_in_bounded_memory(
    tmp_path: Path, encoding: str
) -> None:
    """Less than a hundred kilobytes each: one text in every row, a page that unpacks, rows without end."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    if encoding == "rows":
        column = pa.nulls(40_000_000, pa.string())
    elif encoding == "dictionary":
        column = pa.array(["x" * 2**20]).dictionary_encode().take(pa.array([0] * 3000))
    else:
        column = pa.array(["x" * 2**20] * 300)
    path, table = tmp_path / "a.parquet", pa.table({"text": column})
    if encoding in ("claimed", "DELTA_BYTE_ARRAY"):
        how = {"text": "PLAIN" if encoding == "claimed" else encoding}
        pq.write_table(table, path, compression="zstd", use_dictionary=False, column_encoding=how)
    else:
        # Without Arrow's own schema, which would say that it is a dictionary.
        pq.write_table(table, path, compression="zstd", row_group_size=10**9, store_schema=False)
    assert path.stat().st_size < 100_000
    del table, column
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(path)], capture_output=True, text=True, check=True, timeout=100
    )
    *error, figures = done.stdout.splitlines()
    read, megabytes = map(int, figures.split())
    assert "a.parquet unpacks to" in error[0]
    assert read < 300 * 10**6
    assert read == 0 or encoding in ("dictionary", "DELTA_BYTE_ARRAY")  # else it is known without reading
    assert megabytes < 450


def test_how_long_a_repeated_text_may_be_is_read_from_the_file(tmp_path: Path) -> None:
    """Rows of a batch are so few that Arrow can spell them out; ordinary text comes a batch at a time."""
    pq = pytest.importorskip("pyarrow.parquet")
    long = write_parquet(tmp_path / "a.parquet", {"text": ["x" * 10**6] * 200})
    short = write_parquet(tmp_path / "b.parquet", {"text": [f"text {n} " * 100 for n in range(5000)]})
    for path, least, most in ((long, 1, 70), (short, 500, 5000)):
        with pq.ParquetFile(path) as table:
            size = parquet._column_bytes(table, "text")
            assert least <= parquet._rows_per_batch(table, path, "text", size) <= most
    assert len(texts_of(long)) == 200 and len(texts_of(short)) == 5000


def test_what_is_about_the_data_is_not_in_it(tmp_path: Path) -> None:
    """As a dataset's folder comes from the Hub; a folder of notes may well begin with a README."""
    hub, notes = tmp_path / "hub", tmp_path / "notes"
    for folder in (hub, notes):
        folder.mkdir()
        (folder / "README.md").write_text("what it is")
        (folder / "LICENSE").write_text("what is allowed")
        (folder / "more.md").write_text("some text")
    write_parquet(hub / "a.parquet", {"text": ["one", "two"]})
    tally = Tally()
    found = find_sources([str(hub)], tally)
    assert [file.path.name for file in found] == ["a.parquet", "more.md"]
    assert tally.notes() == ["2 files skipped that are about the data (README, LICENSE)"]
    assert len(find_sources([str(notes)], Tally())) == 3


# ---------------------------------------------------------------- going on from any place


TEXTS = st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=12)


def write_corpus(folder: Path, rows: list[str | None], kind: str, text: bytes) -> Path:
    if kind == "parquet":
        return write_parquet(folder / "a.parquet", {"text": list(rows), "n": list(range(len(rows)))})
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines + b"\n")
        return folder / "a.jsonl"
    if kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines[:20]) + gzip.compress(lines[20:] + b"\n"))
        return folder / "a.jsonl.gz"
    path = folder / f"a.{kind}"
    if kind.endswith("zst"):
        pa = pytest.importorskip("pyarrow")
        with pa.output_stream(str(path), compression="zstd") as stream:
            stream.write(lines if kind == "jsonl.zst" else text)
    else:
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    return path


@settings(max_examples=40, deadline=None)
@given(
    rows=TEXTS.filter(len),
    text=st.binary(min_size=1, max_size=400),
    kind=st.sampled_from(["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst"]),
    data=st.data(),
)
def test_reading_can_go_on_after_any_text(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str | None], text: bytes, kind: str, data: Any
) -> None:
    """Whatever is read from a place on is what the whole reading gives after it, tallies included."""
    folder = tmp_path_factory.mktemp("corpus")
    piece_bytes, batch_bytes = data.draw(st.integers(8, 60)), data.draw(st.integers(1, 60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", piece_bytes)
        patch.setattr(reading, "BATCH_BYTES", batch_bytes)
        text = text.replace(b"\0", b" ") or b"x"
        path = write_corpus(folder, rows, kind, text)
        batches = batches_of(path)
        pieces = pieces_in(batches)
        if kind.startswith("txt"):
            assert "".join(p.text for p in pieces) == text.removeprefix(b"\xef\xbb\xbf").decode(
                "utf-8", "replace"
            )
        else:
            assert [p.text for p in pieces] == [row for row in rows if row]
        assert batches[-1].end == Place(1)
        empty, bad = sum(b.n_empty for b in batches), sum(b.n_bad for b in batches)
        before_empty = before_bad = number = 0
        for batch in batches:
            for index in range(len(batch.texts)):
                number += 1
                rest = batches_of(path, start=batch.after[index])
                assert pieces_in(rest) == pieces[number:]
                assert before_empty + batch.empty[index] + sum(b.n_empty for b in rest) == empty
                assert before_bad + batch.bad[index] + sum(b.n_bad for b in rest) == bad
            before_empty, before_bad = before_empty + batch.n_empty, before_bad + batch.n_bad


@given(st.binary(max_size=3000), st.binary(min_size=1, max_size=5))
def test_the_digest_depends_on_the_text_alone(raw: bytes, more: bytes) -> None:
    assert document_digest(raw) == document_digest(memoryview(raw))
    assert 0 <= document_digest(raw) < reading.DIGEST_SPAN
    assert document_digest(raw + more) != document_digest(raw)
