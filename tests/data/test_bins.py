from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onecard.data.bins import TokenFile, open_split
from onecard.data.meta import datasets_in
from onecard.data.shards import SHARD_MAGIC
from onecard.errors import UserError


def write_bin(path: Path, ids: object, dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(ids).astype(dtype).tofile(path)
    return path


def write_shard(path: Path, ids: object, magic: int = SHARD_MAGIC, version: int = 1, count: int = -1) -> Path:
    ids_N = np.asarray(ids).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids_N) if count < 0 else count
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + ids_N.tobytes())
    return path


def test_reads_nanogpt_bins(tmp_path: Path) -> None:
    tokens = TokenFile.open(write_bin(tmp_path / "train.bin", range(100)))
    assert len(tokens) == 100
    rows_BL = tokens.gather([0, 95, 7], 5)
    assert rows_BL.dtype == np.int64
    assert rows_BL.tolist() == [[0, 1, 2, 3, 4], [95, 96, 97, 98, 99], [7, 8, 9, 10, 11]]
    assert tokens.read(3, 6).tolist() == [3, 4, 5]


def test_reading_past_the_end_is_a_bug_not_garbage(tmp_path: Path) -> None:
    tokens = TokenFile.open(write_bin(tmp_path / "train.bin", range(10)))
    with pytest.raises(IndexError):
        tokens.gather([8], 3)


def test_reads_uint32_where_meta_says_so(tmp_path: Path) -> None:
    write_bin(tmp_path / "train.bin", [70_000, 1, 2, 99_999], "<u4")
    (tmp_path / "meta.json").write_text(json.dumps({"schema": 1, "dtype": "uint32"}))
    tokens = open_split(tmp_path, "train", 2, 100_000)
    assert tokens.read(0, 4).tolist() == [70_000, 1, 2, 99_999]


def test_reads_llmc_shards_one_after_another(tmp_path: Path) -> None:
    write_shard(tmp_path / "fineweb_train_000001.bin", range(50))
    write_shard(tmp_path / "fineweb_train_000002.bin", range(50, 80))
    write_shard(tmp_path / "fineweb_val_000000.bin", range(500, 520))
    tokens = open_split(tmp_path, "train", 8, 50304)
    assert len(tokens) == 80
    assert tokens.gather([45, 50, 71], 9).tolist() == [
        list(range(45, 54)),
        list(range(50, 59)),
        list(range(71, 80)),
    ]
    assert len(open_split(tmp_path, "val", 8, 50304)) == 20
    write_shard(tmp_path / "fineweb_train_000003.bin", range(80, 90))
    assert tokens.refresh() == 90
    assert tokens.read(75, 90).tolist() == list(range(75, 90))


def test_a_shard_cut_short_or_of_a_new_version_is_refused(tmp_path: Path) -> None:
    short = write_shard(tmp_path / "a.bin", range(10), count=99)
    with pytest.raises(UserError, match="cut short") as caught:
        TokenFile.open(short)
    assert "99" in caught.value.why
    with pytest.raises(UserError, match="version 7"):
        TokenFile.open(write_shard(tmp_path / "b.bin", range(10), version=7))


def test_missing_dataset_lists_what_there_is(tmp_path: Path) -> None:
    write_bin(tmp_path / "data" / "stdlib" / "train.bin", range(10))
    (tmp_path / "data" / "not_a_dataset").mkdir()
    assert datasets_in(tmp_path / "data") == ["stdlib"]
    with pytest.raises(UserError, match="no dataset") as caught:
        open_split(tmp_path / "data" / "openwebtext", "train", 4, 100)
    assert "stdlib" in caught.value.why
    assert "onecard prepare" in caught.value.hint
    assert "openwebtext" in caught.value.hint


def test_missing_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no train\.bin"):
        open_split(tmp_path, "train", 4, 100)
    write_bin(tmp_path / "train.bin", range(10))
    with pytest.raises(UserError, match=r"no val\.bin"):
        open_split(tmp_path, "val", 4, 100)


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"abc", "damaged or not a token file")])
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_split(tmp_path, "train", 4, 100)


def test_too_short_for_a_block_names_one_that_works(tmp_path: Path) -> None:
    write_bin(tmp_path / "train.bin", range(1000))
    with pytest.raises(UserError, match="too short") as caught:
        open_split(tmp_path, "train", 1024, 50304)
    assert "--block_size=512" in caught.value.hint
    assert len(open_split(tmp_path, "train", 512, 50304)) == 1000
    assert len(open_split(tmp_path, "train", 999, 50304)) == 1000


def test_id_outside_the_vocabulary_is_found_before_the_run(tmp_path: Path) -> None:
    ids_N = np.zeros(5000, int)
    ids_N[4321] = 300
    write_bin(tmp_path / "train.bin", ids_N)
    with pytest.raises(UserError, match="token id 300 at position 4,321"):
        open_split(tmp_path, "train", 16, 256)
    assert len(open_split(tmp_path, "train", 16, 301)) == 5000


def test_id_the_scan_missed_is_found_when_read(tmp_path: Path) -> None:
    ids_N = np.zeros(100_000, int)
    ids_N[50_001] = 300
    tokens = TokenFile.open(write_bin(tmp_path / "train.bin", ids_N))
    tokens.check_ids(256, scan_bytes=1000)
    assert tokens.gather([0, 99_000], 100).max() == 0
    with pytest.raises(UserError, match="token id 300 at position 50,001"):
        tokens.gather([0, 50_000], 100)


def test_scan_covers_both_ends_of_a_large_file(tmp_path: Path) -> None:
    for position in (0, 99_999):
        ids_N = np.zeros(100_000, int)
        ids_N[position] = 300
        tokens = TokenFile.open(write_bin(tmp_path / f"{position}.bin", ids_N))
        with pytest.raises(UserError, match="token id 300"):
            tokens.check_ids(256, scan_bytes=1000)


def test_growth_is_seen_by_refresh_only(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "train.bin", range(10))
    tokens = TokenFile.open(path)
    with path.open("ab") as file:
        file.write(np.arange(10, 20).astype("<u2").tobytes() + b"\x01")  # half a token at the end
    assert len(tokens) == 10
    assert tokens.refresh() == 20
    assert tokens.read(8, 20).tolist() == list(range(8, 20))


def test_a_file_replaced_by_rename_stays_readable_until_refresh(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "train.bin", range(10))
    tokens = TokenFile.open(path)
    write_bin(tmp_path / "new", range(30)).replace(path)
    assert len(tokens) == 10
    assert tokens.refresh() == 30
    path.unlink()
    assert tokens.refresh() == 30
    assert tokens.read(29, 30).tolist() == [29]


@pytest.mark.parametrize("others", [range(100, 130), [0, 1, 2, 3, 4, 5, 6, 7, 8, 99, 10], range(5), []])
def test_other_data_in_its_place_is_left_alone(tmp_path: Path, others: object) -> None:
    """The run goes on with what it began with, which its map still holds."""
    path = write_bin(tmp_path / "train.bin", range(10))
    tokens = TokenFile.open(path)
    write_bin(tmp_path / "new", others).replace(path)
    assert tokens.refresh() == 10
    assert tokens.read(0, 10).tolist() == list(range(10))


@pytest.mark.parametrize("unfinished", ["empty", "half a header", "header only", "cut short", "other ids"])
def test_a_shard_that_is_not_whole_yet_joins_when_it_is(tmp_path: Path, unfinished: str) -> None:
    write_shard(tmp_path / "x_train_000001.bin", range(50))
    tokens = open_split(tmp_path, "train", 8, 100)
    whole = write_shard(tmp_path / "whole", range(50, 90)).read_bytes()
    parts = {"empty": b"", "half a header": whole[:100], "header only": whole[:1024],
             "cut short": whole[:1060]}  # fmt: skip
    second = tmp_path / "x_train_000002.bin"
    second.write_bytes(parts[unfinished]) if unfinished in parts else write_shard(
        second, range(60_000, 60_040)
    )
    assert tokens.refresh() == 50
    assert tokens.read(40, 50).tolist() == list(range(40, 50))
    second.write_bytes(whole)
    assert tokens.refresh() == 90
    assert tokens.read(48, 52).tolist() == [48, 49, 50, 51]


def test_a_file_cut_under_the_run_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "train.bin", range(60_000))
    tokens = TokenFile.open(path)
    with path.open("r+b") as file:
        file.truncate(10)
    with pytest.raises(UserError, match="became shorter"):
        tokens.gather([50_000], 100)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{not json", "cannot read"),
        ("[]", "not a onecard meta.json"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "dtype": "float16"}', "dtype 'float16'"),
        ('{"schema": 1, "splits": {"train": {"tokens": 11}}}', "does not belong"),
    ],
)
def test_meta_json_that_cannot_be_trusted(tmp_path: Path, meta: str, message: str) -> None:
    write_bin(tmp_path / "train.bin", range(10))
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(UserError, match=message):
        open_split(tmp_path, "train", 4, 100)
