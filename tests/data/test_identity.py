"""Is it the data the run began with: all of it, however it is stored, and whatever was added."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onecard.data import identity as module
from onecard.data.bins import TokenFile
from onecard.data.identity import Identity, Mark
from onecard.errors import UserError

TOKENS = np.random.default_rng(0).integers(0, 5000, 10_000).astype(np.uint16)


def written(path: Path, tokens: np.ndarray, dtype: str = "uint16") -> TokenFile:
    tokens.astype(dtype).tofile(path)
    return TokenFile.open(path, dtype)


def marks(tokens: TokenFile, known: Mark | None = None) -> Mark:
    found = Identity("data/x", {"train": tokens}, {"train": known or {}})
    found._thread.join()
    return found.marks()["train"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 999)


def test_a_mark_is_the_hash_of_all_tokens(tmp_path: Path) -> None:
    found = marks(written(tmp_path / "a", TOKENS))
    assert found == {"tokens": 10_000, "sha256": hashlib.sha256(TOKENS.tobytes()).hexdigest(), "as": "<u2"}
    assert marks(written(tmp_path / "b", TOKENS), found) == found


@pytest.mark.parametrize("at", [0, 1, 5_000, 9_998, 9_999])
def test_one_other_token_anywhere_is_other_data(tmp_path: Path, at: int) -> None:
    known = marks(written(tmp_path / "a", TOKENS))
    other = TOKENS.copy()
    other[at] ^= 1
    with pytest.raises(UserError, match="data/x is not the data this run began with") as refused:
        marks(written(tmp_path / "b", other), known)
    assert "10,000 tokens" in refused.value.why and "--dataset" in refused.value.hint


def test_shorter_data_is_other_data(tmp_path: Path) -> None:
    known = marks(written(tmp_path / "a", TOKENS))
    with pytest.raises(UserError, match="not the data") as refused:
        marks(written(tmp_path / "b", TOKENS[:-1]), known)
    assert "9,999" in refused.value.why


def test_appended_tokens_are_the_same_data_and_marked_from_then_on(tmp_path: Path) -> None:
    known = marks(written(tmp_path / "a", TOKENS))
    longer = np.concatenate([TOKENS, TOKENS[:500]])
    grown = marks(written(tmp_path / "b", longer), known)
    assert grown == marks(written(tmp_path / "c", longer))
    longer[10_100] ^= 1
    marks(written(tmp_path / "d", longer), known)
    with pytest.raises(UserError):
        marks(written(tmp_path / "d", longer), grown)


def test_the_same_tokens_stored_wider_or_narrower_are_the_same_data(tmp_path: Path) -> None:
    narrow, wide = written(tmp_path / "a", TOKENS), written(tmp_path / "b", TOKENS, "uint32")
    marks(wide, marks(narrow))
    marks(narrow, marks(wide))
    # 65,536 more is another token, though it ends in the same 16 bits.
    other = TOKENS.astype(np.uint32)
    other[7_000] += 65_536
    with pytest.raises(UserError):
        marks(written(tmp_path / "c", other, "uint32"), marks(narrow))


def test_a_mark_of_the_beginning_alone_counts_for_it(tmp_path: Path) -> None:
    """As older versions left it: of 64-bit tokens, and no word on that."""
    old = {"tokens": 4_000, "sha256": hashlib.sha256(TOKENS[:4_000].astype("<i8").tobytes()).hexdigest()}
    tokens = written(tmp_path / "a", TOKENS)
    assert marks(tokens, old) == marks(tokens)
    with pytest.raises(UserError):
        marks(written(tmp_path / "b", TOKENS[::-1]), old)


def test_much_data_is_compared_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = marks(written(tmp_path / "a", TOKENS))
    other = TOKENS.copy()
    other[-1] ^= 1
    monkeypatch.setattr(module, "_AT_ONCE", 0)
    begun, plain = threading.Event(), TokenFile.stored

    def stored(self: TokenFile, start: int, stop: int) -> Iterator[Any]:
        begun.wait()
        return plain(self, start, stop)

    monkeypatch.setattr(TokenFile, "stored", stored)
    found = Identity("data/x", {"train": written(tmp_path / "b", other)}, {"train": known})
    found.check()
    begun.set()
    with pytest.raises(UserError, match="not the data"):
        found.check(wait=True)
    with pytest.raises(UserError):
        found.check()
    assert found.marks()["train"] == known, "what was not verified has no other mark"


def test_stopped_in_the_middle_it_has_the_mark_of_what_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 0)
    tokens = written(tmp_path / "a", TOKENS)
    plain, calls = TokenFile.stored, []

    def stored(self: TokenFile, start: int, stop: int) -> object:
        calls.append(start)
        if len(calls) == 4:
            found._stopped.set()
        return plain(self, start, stop)

    found = Identity.__new__(Identity)
    monkeypatch.setattr(TokenFile, "stored", stored)
    Identity.__init__(found, "data/x", {"train": tokens}, {})
    found._thread.join()
    part = found.marks()["train"]
    assert part["tokens"] == 3 * 999
    assert part["sha256"] == hashlib.sha256(TOKENS[: 3 * 999].tobytes()).hexdigest()
    monkeypatch.setattr(TokenFile, "stored", plain)
    assert marks(tokens, part)["tokens"] == 10_000


def test_several_files_are_one_row_of_tokens(tmp_path: Path) -> None:
    for number, part in enumerate(np.split(TOKENS, 4)):
        part.tofile(tmp_path / f"x_train_{number}.bin")
    row = TokenFile(sorted(tmp_path.glob("*.bin")), np.dtype("<u2"))
    assert marks(row) == marks(written(tmp_path / "whole", TOKENS))
