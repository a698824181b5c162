from __future__ import annotations

import itertools
import json
import sysconfig
from pathlib import Path

import pytest

from onecard.data import sources
from onecard.data.sources import Piece, Tally, document_digest, find_sources, read_documents
from onecard.errors import UserError


def pieces_of(*paths: Path | str, column: str = "text", tally: Tally | None = None) -> list[Piece]:
    tally = tally or Tally()
    files = find_sources([str(path) for path in paths], tally)
    return [piece for file in files for piece in read_documents(file, column, tally)]


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
    assert piece == Piece("first", document_digest("first"), True, 8)


def test_folders_are_walked_in_order_and_hidden_things_left_out(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    for name in ("z/1.txt", "a/2.txt", "a/.hidden.txt", ".git/config", "m.py", "a/b/c.txt"):
        path = corpus / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    files = find_sources([str(corpus)], Tally())
    assert [file.name for file in files] == [
        "corpus/m.py",
        "corpus/a/2.txt",
        "corpus/a/b/c.txt",
        "corpus/z/1.txt",
    ]
    assert all(file.size == file.path.stat().st_size for file in files)


def test_files_that_are_not_text_are_skipped_in_folders_and_refused_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "more.jsonl.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "empty.txt").touch()
    tally = Tally()
    assert texts_of(tmp_path, tally=tally) == ["text"]
    assert tally.binary_files == 2
    assert tally.empty_files == 1
    assert len(tally.notes()) == 2
    with pytest.raises(UserError, match="not UTF-8 text"):
        texts_of(tmp_path / "picture.png")
    with pytest.raises(UserError, match="compressed") as caught:
        texts_of(tmp_path / "more.jsonl.gz")
    assert "gunzip" in caught.value.hint


def test_missing_path_offers_near_names(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("To be")
    with pytest.raises(UserError, match="no file or folder") as caught:
        texts_of(tmp_path / "shakespear.txt")
    assert "shakespeare.txt" in caught.value.why


def test_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text in the folder"):
        texts_of(tmp_path)
    (tmp_path / "a.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="no text in the folder") as caught:
        texts_of(tmp_path)
    assert "compressed" in caught.value.why
    (tmp_path / "a.zip").rename(tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="are empty"):
        texts_of(tmp_path)


def test_bad_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good \xff bad \xe4\xbd end, and a real \xef\xbf\xbd")
    tally = Tally()
    assert texts_of(tmp_path, tally=tally) == ["good \ufffd bad \ufffd end, and a real \ufffd"]
    assert tally.bad_bytes == 2
    assert "2 places were not UTF-8" in tally.notes()[0]


# ---------------------------------------------------------------- large texts


def test_large_text_comes_in_pieces_of_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    text = "\ufeff" + "".join(f"line {number} ñ 你好\n\n   " for number in range(100))
    path = tmp_path / "large.txt"
    path.write_text(text, encoding="utf-8")
    pieces = pieces_of(path)
    assert len(pieces) > 10
    assert "".join(piece.text for piece in pieces) == text[1:]
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.digest for piece in pieces} == {document_digest(text[1:])}
    assert max(len(piece.text.encode()) for piece in pieces) < 300
    # Cut only where a word ends and white space begins.
    for before, after in itertools.pairwise(pieces):
        assert not before.text[-1].isspace()
        assert after.text[0].isspace()


@pytest.mark.parametrize("unit", ["x", " ", "好"])
def test_large_text_without_a_place_to_cut_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    path = tmp_path / "large.txt"
    path.write_text(unit * 5000, encoding="utf-8")
    pieces = pieces_of(path)
    assert "".join(piece.text for piece in pieces) == unit * 5000
    assert max(len(piece.text) for piece in pieces) <= 600


def test_bad_bytes_at_the_edge_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
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
    assert pieces[0].digest == document_digest("one")
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
    assert pieces[-1].read == path.stat().st_size


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


# ---------------------------------------------------------------- stdlib


def test_stdlib_is_there_and_large_enough() -> None:
    files = find_sources(["stdlib"], Tally())
    names = [file.name for file in files]
    assert "stdlib/json/decoder.py" in names
    assert not any("/test/" in name or "site-packages" in name for name in names)
    assert sum(file.size for file in files) > 10_000_000
    assert names == [file.name for file in find_sources(["stdlib"], Tally())]


def test_stdlib_of_a_stripped_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in (tmp_path, tmp_path / "python311.zip"):
        monkeypatch.setattr(sysconfig, "get_paths", lambda root=root: {"stdlib": str(root)})
        with pytest.raises(UserError, match="without the sources"):
            find_sources(["stdlib"], Tally())
