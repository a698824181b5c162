from __future__ import annotations

import dataclasses
import gzip
import os
import pickle
import sysconfig
from pathlib import Path

import pytest

from onecard.data.prepare.sources import SourceFile, Tally, find_sources, open_stream
from onecard.errors import UserError


def found(*paths: Path | str, tally: Tally | None = None) -> list[SourceFile]:
    return find_sources([str(path) for path in paths], tally or Tally())


def write_zstd(path: Path, content: bytes) -> Path:
    pa = pytest.importorskip("pyarrow")
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(content)
    return path


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
    (tmp_path / "more.zip").write_bytes(b"PK")
    (tmp_path / "more.tar.gz").write_bytes(gzip.compress(b"text after all"))
    (tmp_path / "empty.txt").touch()
    tally = Tally()
    assert [file.name for file in found(tmp_path, tally=tally)] == [f"{tmp_path.name}/a.txt"]
    assert tally.binary_files == 3
    assert tally.empty_files == 1
    assert len(tally.notes()) == 2
    with pytest.raises(UserError, match="not UTF-8 text"):
        found(tmp_path / "picture.png")
    for name, command in (("more.zip", "unzip"), ("more.tar.gz", "tar xf")):
        with pytest.raises(UserError, match="is an archive") as caught:
            found(tmp_path / name)
        assert command in caught.value.hint


def test_missing_path_offers_near_names(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("To be")
    with pytest.raises(UserError, match="no file or folder") as caught:
        found(tmp_path / "shakespear.txt")
    assert "shakespeare.txt" in caught.value.why


def test_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text in the folder"):
        found(tmp_path)
    (tmp_path / "a.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="no text in the folder") as caught:
        found(tmp_path)
    assert "archives" in caught.value.why
    (tmp_path / "a.zip").rename(tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="are empty"):
        found(tmp_path)


def test_compressed_files_are_known_by_both_endings(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    (tmp_path / "b.jsonl.GZ").write_bytes(gzip.compress(b"{}"))
    write_zstd(tmp_path / "c.txt.zst", b"three")
    (tmp_path / "d.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    files = found(tmp_path)
    assert [(file.kind, file.compression) for file in files] == [
        ("text", "gz"), ("jsonl", "gz"), ("text", "zst"), ("parquet", "gz"),
    ]  # fmt: skip
    with open_stream(files[0]) as first, open_stream(files[2]) as third:
        assert (first.read(), third.read()) == (b"one", b"three")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
def test_a_damaged_archive_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = os.urandom(50_000).hex().encode()
    if name.endswith("gz"):
        path.write_bytes(gzip.compress(content))
    else:
        write_zstd(path, content)
    path.write_bytes(path.read_bytes()[:20_000])
    file = found(path)[0]
    with pytest.raises(UserError, match="damaged") as caught, open_stream(file) as stream:
        while stream.read(1000):
            pass
    assert str(path) in caught.value.what
    assert "cut short" in caught.value.hint
    path.write_bytes(b"this is no archive at all, whatever it says")
    with pytest.raises(UserError, match="damaged"), open_stream(file) as stream:
        stream.read()


def test_json_is_read_by_lines_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "array.json").write_text('[{"text": "one"}]')
    (tmp_path / "one.json").write_text('{\n "text": "one"\n}')
    tally = Tally()
    files = found(tmp_path, tally=tally)
    assert [(file.path.name, file.kind) for file in files] == [("lines.json", "jsonl")]
    assert tally.json_files == 2
    assert "2 .json files skipped" in tally.notes()[0]
    with pytest.raises(UserError, match="not one object per line") as caught:
        found(tmp_path / "array.json")
    assert "jq -c" in caught.value.hint


def test_links_that_stay_inside_are_followed_and_each_file_is_read_once(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / ".kept").mkdir(parents=True)
    (corpus / "a.txt").write_text("a")
    (corpus / ".kept" / "b.txt").write_text("b")
    (corpus / "again.txt").symlink_to("a.txt")
    (corpus / "linked").symlink_to(".kept")
    (corpus / "linked too").symlink_to(corpus / ".kept")
    (corpus / ".kept" / "back").symlink_to(corpus)
    (corpus / "gone.txt").symlink_to("nowhere.txt")
    tally = Tally()
    assert [file.name for file in found(corpus, tally=tally)] == ["corpus/a.txt", "corpus/linked/b.txt"]
    assert tally.notes() == []


def test_links_that_lead_out_are_not_followed_and_said_so(tmp_path: Path) -> None:
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "corpus of others"
    corpus.mkdir()
    elsewhere.mkdir()
    (corpus / "a.txt").write_text("a")
    (elsewhere / "secret.txt").write_text("b")
    (corpus / "linked").symlink_to("../corpus of others")
    tally = Tally()
    assert [file.name for file in found(corpus, tally=tally)] == ["corpus/a.txt"]
    assert tally.notes() == [
        "1 link leads out of the folder and was not followed (the first: linked); "
        "name its target to include it"
    ]
    (corpus / "also.txt").symlink_to(elsewhere / "secret.txt")
    (corpus / "via").symlink_to("linked")
    tally = Tally()
    assert [file.name for file in found(corpus, tally=tally)] == ["corpus/a.txt"]
    told = "3 links lead out of the folder and were not followed (the first: also.txt)"
    assert tally.notes()[0].startswith(told)
    # Named, they are wanted; a folder may be named by a link to it.
    assert [file.name for file in found(corpus / "also.txt")] == ["also.txt"]
    tally = Tally()
    assert [file.path.name for file in found(corpus / "linked", tally=tally)] == ["secret.txt"]
    assert not tally.outside_links
    (corpus / "a.txt").unlink()
    with pytest.raises(UserError, match="no text in the folder") as caught:
        found(corpus)
    assert "3 links lead out" in caught.value.why


def test_a_tally_is_read_from_whatever_meta_json_holds() -> None:
    told = Tally(empty_files=2, outside_links=3, first_outside_link="a")
    assert Tally.of(dataclasses.asdict(told)) == told
    assert Tally.of(
        {"empty_files": 2, "of another version": 1, "bad_bytes": "many", "binary_files": None}
    ) == (Tally(empty_files=2))


def test_a_snapshot_of_the_hubs_cache_is_made_of_links(tmp_path: Path) -> None:
    """Its files lie beside it, in blobs/; other links there lead out as everywhere."""
    repo = tmp_path / "datasets--a--b"
    snapshot = repo / "snapshots" / "0123" / "data"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "ffff").write_text("text")
    (tmp_path / "other.txt").write_text("other")
    (snapshot / "0.txt").symlink_to("../../../blobs/ffff")
    (snapshot / "1.txt").symlink_to(tmp_path / "other.txt")
    for folder in (snapshot.parent, snapshot):
        tally = Tally()
        assert [file.path.name for file in found(folder, tally=tally)] == ["0.txt"]
        assert tally.outside_links == 1


def test_a_pickle_is_no_text_however_it_is_written(tmp_path: Path) -> None:
    """Protocol 0 is letters and line ends."""
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": {"a": 1}}, protocol=0))
    (tmp_path / "input.txt").write_text("text")
    tally = Tally()
    assert [file.path.name for file in found(tmp_path, tally=tally)] == ["input.txt"]
    assert tally.binary_files == 1
    with pytest.raises(UserError, match=r"meta\.pkl is not text"):
        found(tmp_path / "meta.pkl")


# ---------------------------------------------------------------- out of all proportion


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_stream_that_unpacks_without_end_is_stopped(tmp_path: Path, name: str) -> None:
    """A hundred kilobytes that stand for more than a hundred megabytes."""
    line = b'{"text": "again and again"}\n'
    content = line * (400 * 2**20 // len(line))
    path = tmp_path / name
    if name.endswith(".zst"):
        write_zstd(path, content)
    else:
        path.write_bytes(gzip.compress(content, 9))
    file = found(path)[0]
    with (
        pytest.raises(UserError, match=rf"{name} unpacks to \d[\d,]* times its size") as caught,
        open_stream(file) as stream,
    ):
        while stream.read(2**20):
            pass
    assert f"{file.size:,} bytes become" in caught.value.why
    assert ("--tokens" if "jsonl" in name else "unpack it yourself") in caught.value.hint
    with open_stream(dataclasses.replace(file, bounded=False)) as stream:
        assert sum(len(block) for block in iter(lambda: stream.read(2**20), b"")) == len(content)


def test_text_that_is_only_repetitive_is_read(tmp_path: Path) -> None:
    """A log, 60 times as large as its archive; and a small file, whatever it becomes."""
    log = "".join(f"02:14:{n % 60:02} INFO worker {n % 7}: done in {n % 13} ms\n" for n in range(10**5))
    for name, content in (("log.txt.gz", log.encode()), ("zeros.txt.zst", b" " * 2**24)):
        path = tmp_path / name
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(content))
        else:
            write_zstd(path, content)
        with open_stream(found(path)[0]) as stream:
            assert stream.read() == content


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
