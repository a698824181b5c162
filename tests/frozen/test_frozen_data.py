"""The bytes that `prepare` writes: of all kinds of files, by each tokenizer, after kills and growth."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_corpus
from doors import Answer, onecard
from recorder import frozen

pytest.importorskip("pyarrow")
CASES: dict[str, tuple[str, ...]] = {
    "txt": ("corpus/a.txt", "--tokenizer=byte"),
    "jsonl": ("corpus/b.jsonl", "--tokenizer=byte"),
    "parquet": ("corpus/c.parquet", "--tokenizer=byte"),
    "txt.gz": ("corpus/d.txt.gz", "--tokenizer=byte"),
    "jsonl.gz": ("corpus/e.jsonl.gz", "--tokenizer=byte"),
    "jsonl.zst": ("corpus/f.jsonl.zst", "--tokenizer=byte"),
    "byte": ("corpus", "--tokenizer=byte"),
    "char": ("corpus", "--tokenizer=char"),
    "gpt2": ("corpus",),
    "bpe": ("corpus", "--train-tokenizer=512"),
    "part": ("corpus", "--tokenizer=byte", "--tokens=9000", "--val-fraction=0.3"),
    "char-of-one-file": ("corpus/a.txt", "--tokenizer=char", "--val-fraction=0.05"),
}
# Who made it, not what: the version of onecard.
VERSIONS = ("onecard",)
# How well zlib, zstd and pyarrow pack is theirs: of packed files the content counts.
PACKED = (".gz", ".zst", ".parquet")


def prepare(folder: Path, *words: str) -> Answer:
    return onecard("prepare", *words, "--name=made", folder=folder)


def facts_of(folder: Path) -> dict[str, Any]:
    """meta.json without versions; of each bin its hash, its first tokens, and where it would differ."""
    found: dict[str, Any] = {"files": sorted(path.name for path in folder.iterdir())}
    for name in ("train.bin", "val.bin"):
        content = (folder / name).read_bytes()
        found[name] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "tokens": len(content) // 2,
            "first": np.frombuffer(content[:40], "<u2").tolist(),
            "pieces": " ".join(
                f"{zlib.crc32(content[n : n + 2048]):08x}" for n in range(0, len(content), 2048)
            ),
        }
    meta = json.loads((folder / "meta.json").read_text())
    for source in meta["sources"]:
        if source["name"].endswith(PACKED):
            source |= {"bytes": "...", "sha256": "..."}
    return found | {"meta": {name: value for name, value in meta.items() if name not in VERSIONS}}


@pytest.mark.parametrize("case", CASES)
def test_what_prepare_writes_is_as_recorded(case: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    answer = prepare(tmp_path, *CASES[case])
    assert answer.code == 0, answer.err
    frozen(f"data/{case}.json", facts_of(tmp_path / "data" / "made"))
    again = prepare(tmp_path, *CASES[case])
    assert again.code == 0, again.err
    frozen(f"data/{case}.json", facts_of(tmp_path / "data" / "made"), may_record=False)


class _KilledError(BaseException):
    """What nobody catches."""


def killed_after(calls: int, original: Any) -> Any:
    left = iter(range(calls))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise _KilledError
        return original(*arguments, **options)

    return call


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("case", ["byte", "bpe"])
def test_killed_and_given_again_prepare_writes_the_recorded_bytes(
    case: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the first call of the system's `name`, then at the second ... until it gets through."""
    write_corpus(tmp_path / "corpus")
    kills, answer = 0, None
    while answer is None:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, killed_after(kills, getattr(os, name)))
            try:
                answer = prepare(tmp_path, *CASES[case])
            except _KilledError:
                kills += 1
    assert answer.code == 0, answer.err
    assert kills >= 3, "it was killed in the middle"
    frozen(f"data/{case}.json", facts_of(tmp_path / "data" / "made"), may_record=False)


def test_grown_in_three_steps_the_data_are_the_recorded_ones(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    sizes = []
    for tokens in (["--tokens=4000"], ["--tokens=15000"], []):
        answer = prepare(tmp_path, *CASES["byte"], *tokens)
        assert answer.code == 0, answer.err
        sizes.append((tmp_path / "data" / "made" / "train.bin").stat().st_size)
    assert sizes == sorted(set(sizes)), "each step added something"
    frozen("data/byte.json", facts_of(tmp_path / "data" / "made"), may_record=False)


def test_a_file_more_is_appended_as_recorded(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    last = (tmp_path / "corpus" / "f.jsonl.zst").rename(tmp_path / "f.jsonl.zst")
    assert prepare(tmp_path, *CASES["gpt2"]).code == 0
    last.rename(tmp_path / "corpus" / "f.jsonl.zst")
    answer = prepare(tmp_path, *CASES["gpt2"])
    assert answer.code == 0, answer.err
    frozen("data/appended.json", facts_of(tmp_path / "data" / "made"))
