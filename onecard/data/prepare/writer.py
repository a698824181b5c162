"""Writing a dataset so that nothing is lost: killed at any moment, it continues where it was.

A new dataset grows in `*.partial` files and is renamed when it is complete; more data for an existing
one is appended to its bins, whose readers count only what meta.json counts. Every few seconds the
tokens are flushed to disk and then `.prepare.json`, the journal, says how far they go: it holds the
meta.json of what is written so far. What lies behind that point after a kill is cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from onecard.data.bpe import BpeTokenizer
from onecard.data.meta import JOURNAL_NAME, META_SCHEMA, SPLITS, Split
from onecard.data.prepare.parquet import UNPACKED
from onecard.data.prepare.room import Room
from onecard.data.prepare.sources import Tally
from onecard.data.tokenizer import CharTokenizer, from_facts
from onecard.errors import UserError
from onecard.files import (
    DATA_JSON_BYTES,
    AlreadyLockedError,
    exclusive_lock,
    flush_to_disk,
    load_json,
    temporary_beside,
    write_json,
)
from onecard.language import _

# How what is held out was chosen.
BY_HASH = "by document hash"
BY_TAIL = "tail of the only document"
LOCK_NAME = ".prepare.lock"
TOKENIZER_NAME = "tokenizer.json"
CHARACTERS_NAME = "meta.pkl"
PARTIAL = ".partial"
# Between two commits: what a kill can cost.
COMMIT_SECONDS = 5.0
_HASH_BLOCK = 16 * 2**20
_BEGIN_BYTES = 8 * 2**20

Mode = Literal["new", "append"]


class JournalError(Exception):
    """What is on disk is not what the journal says."""


class _SplitWriter:
    """One growing token file with its counts and hash."""

    def __init__(self, path: Path, dtype: np.dtype[Any], so_far: dict[str, Any]) -> None:
        self.path = path
        self.tokens = int(so_far.get("tokens", 0))
        self.text_bytes = int(so_far.get("text_bytes", 0))
        self.documents = int(so_far.get("documents", 0))
        self._hash = hashlib.sha256()
        self._file: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        n_bytes = self.tokens * dtype.itemsize
        self._hash_first(n_bytes)
        if self.tokens and self._hash.hexdigest() != so_far.get("sha256"):
            self._file.close()
            raise JournalError(path.name)
        self._file.truncate(n_bytes)
        self._file.seek(n_bytes)
        self._on_its_way = n_bytes  # up to here it is written, or the system is about to

    def _hash_first(self, n_bytes: int) -> None:
        """hashlib cannot save its state: what is there is hashed again, which also proves it whole."""
        while n_bytes and (block := self._file.read(min(n_bytes, _HASH_BLOCK))):
            self._hash.update(block)
            n_bytes -= len(block)

    def append(self, pieces: list[NDArray[Any]]) -> None:
        for piece_N in pieces:
            view = memoryview(piece_N.view(np.uint8))  # type: ignore[arg-type]
            self._hash.update(view)
            self._file.write(view)
            self.tokens += len(piece_N)
        if self._file.tell() - self._on_its_way >= _BEGIN_BYTES:
            self._begin_to_sync()

    def _begin_to_sync(self) -> None:
        """Have the system write out what has come since the last time, now: commits wait for less then."""
        self._file.flush()
        start, self._on_its_way = self._on_its_way, self._file.tell()
        if hasattr(os, "posix_fadvise"):
            # Not needed soon: Linux begins with it at once, and waits for nothing.
            advice = os.POSIX_FADV_DONTNEED
            os.posix_fadvise(self._file.fileno(), start, self._on_its_way - start, advice)

    def sync(self) -> None:
        """Brings the tokens to the disk itself: the journal must never come before its data."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def facts(self) -> dict[str, Any]:
        return {
            "file": self.path.name.removesuffix(PARTIAL),
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "bytes_per_token": round(self.text_bytes / max(1, self.tokens), 6),
            "sha256": self._hash.hexdigest(),
        }

    def close(self) -> None:
        self._file.close()


class DatasetWriter:
    """Both splits, the journal and meta.json. The folder must be locked (see LockedFolder)."""

    def __init__(self, folder: Path, mode: Mode, dtype: str, so_far: dict[str, Any]) -> None:
        """`so_far`: facts of each split that is continued; they say how much of its bin counts."""
        self.folder, self.mode = folder, mode
        self._committed_at = time.monotonic()
        ending = PARTIAL if mode == "new" else ""
        self._splits: dict[Split, _SplitWriter] = {}
        try:
            self._room = Room(folder)
            for split in SPLITS:
                path = folder / f"{split}.bin{ending}"
                self._splits[split] = _SplitWriter(path, np.dtype(dtype), so_far.get(split) or {})
        except OSError as error:
            raise cannot_write(folder, error) from error
        except JournalError:
            self.close()
            raise

    def append(self, split: Split, pieces: list[NDArray[Any]], text_bytes: int, documents: int) -> None:
        """Tokens of documents or parts of them, end-of-texts included, in the bins' own type."""
        writer = self._splits[split]
        try:
            writer.append(pieces)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        writer.text_bytes += text_bytes
        writer.documents += documents

    def tokens(self, split: Split) -> int:
        return self._splits[split].tokens

    def documents(self) -> int:
        return sum(writer.documents for writer in self._splits.values())

    def facts(self) -> dict[str, dict[str, Any]]:
        return {split: writer.facts() for split, writer in self._splits.items()}

    @property
    def commit_is_due(self) -> bool:
        """Asked after each batch: with little room left, what is there is kept while it can be."""
        return time.monotonic() - self._committed_at >= COMMIT_SECONDS or self._room.is_used_up()

    def commit(self, meta: dict[str, Any], extra: dict[str, Any]) -> None:
        """Makes it safe: from here on a kill loses nothing that is written. `meta` describes exactly that."""
        try:
            for writer in self._splits.values():
                writer.sync()
            write_journal(self.folder, {"mode": self.mode, "finished": False, "meta": meta, **extra})
            used_up = self._room.is_used_up()
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        self._committed_at = time.monotonic()
        if used_up:
            raise self._room.used_up(
                _("{folder} could not be finished; the {n:,} tokens so far are kept").format(
                    folder=self.folder, n=meta["tokens"]
                ),
                _("make room, or ask for fewer --tokens, and run the same command again: it continues"),
            )

    def finish(self, meta: dict[str, Any]) -> None:
        """Everything on disk and under its final name; from the journal on, a kill only repeats this."""
        try:
            for writer in self._splits.values():
                writer.sync()
                writer.close()
            write_journal(self.folder, {"mode": self.mode, "finished": True, "meta": meta})
            complete(self.folder, {"mode": self.mode, "meta": meta})
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def close(self) -> None:
        """Without finishing. What could not be written has been reported, or is not needed."""
        for writer in self._splits.values():
            with contextlib.suppress(OSError):
                writer.close()


# ---------------------------------------------------------------- the journal


def write_journal(folder: Path, journal: dict[str, Any]) -> None:
    write_json(folder / JOURNAL_NAME, {"schema": META_SCHEMA, **journal})
    flush_to_disk(folder)


def read_journal(folder: Path) -> dict[str, Any] | None:
    """How far an interrupted prepare came; None where there is none, or none that can be used."""
    try:
        journal = load_json(folder / JOURNAL_NAME, DATA_JSON_BYTES)
    except (OSError, ValueError):
        return None
    if (
        not isinstance(journal, dict)
        or journal.get("schema") != META_SCHEMA
        or not is_whole(journal.get("meta"))
    ):
        return None
    if not journal.get("finished") and not _says_where_to_go_on(journal):
        return None
    return (
        journal
        if isinstance(journal.get("meta"), dict) and journal.get("mode") in ("new", "append")
        else None
    )


def _says_where_to_go_on(journal: dict[str, Any]) -> bool:
    try:
        lowest, highest = journal["digests"]
        numbers = [lowest, journal.get("n_sources", 0), *journal["fingerprints"].values()]
        reached = journal["at_file_end"]
        whole = reached is None or is_whole({**journal["meta"], **reached})
        return whole and type(highest) is int and highest >= -1 and all(map(_is_count, numbers))
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**64


def is_whole(meta: Any) -> bool:
    """Whether a meta.json says all that is needed to go on from it: it may have been edited by hand."""
    try:
        place = meta["position"]
        numbers = [place["source"], place["item"], place["offset"], meta["split_at"], meta["tokens"]]
        for split in SPLITS:
            part = meta["splits"][split]
            numbers += [part["tokens"], part["text_bytes"], part["documents"]]
            assert isinstance(part["sha256"], str) and part["documents"] <= max(1, part["tokens"])
        texts = [meta["split"], meta["dtype"], meta["text_column"], meta["tokenizer"]["name"]]
        texts += [source["name"] for source in meta["sources"]]
        numbers += [source["bytes"] for source in meta["sources"]]
        passed_over = dict(meta["passed_over"])
        texts.append(passed_over.pop("first_outside_link", ""))
        numbers += passed_over.values()
        assert meta["passed_over"].keys() <= {field.name for field in dataclasses.fields(Tally)}
        assert meta["dtype"] in ("uint16", "uint32") and meta["split"] in (BY_HASH, BY_TAIL)
        return all(map(_is_count, numbers)) and all(isinstance(t, str) for t in texts)
    except (KeyError, TypeError, AttributeError, AssertionError, IndexError):
        return False


def complete(folder: Path, journal: dict[str, Any]) -> None:
    """The last steps, each of which may already be done: renames, meta.json, and no journal any more."""
    if journal["mode"] == "new":
        for split in SPLITS:
            partial = folder / f"{split}.bin{PARTIAL}"
            if partial.exists():
                partial.replace(folder / f"{split}.bin")
        _write_for_others(folder, journal["meta"]["tokenizer"])
        flush_to_disk(folder)
    # After the bins: it counts their tokens, so a reader notices a mix.
    write_json(folder / "meta.json", journal["meta"])
    flush_to_disk(folder)
    (folder / JOURNAL_NAME).unlink(missing_ok=True)
    flush_to_disk(folder)


def _write_for_others(folder: Path, facts: dict[str, Any]) -> None:
    """The tokenizer as other programs read it beside its data; onecard reads meta.json."""
    try:
        before = load_json(folder / "meta.json", DATA_JSON_BYTES)["tokenizer"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        before = None
    for name, kind in ((TOKENIZER_NAME, "bpe"), (CHARACTERS_NAME, "char")):
        path = folder / name
        if path.exists() and before != kind:
            continue  # somebody else's: the text may lie in the same folder
        if facts["name"] != kind:
            path.unlink(missing_ok=True)
            continue
        tokenizer = from_facts(facts)
        if isinstance(tokenizer, BpeTokenizer):
            write_json(path, json.loads(tokenizer.tokenizer_json()))
        elif isinstance(tokenizer, CharTokenizer):
            _write_characters(path, tokenizer.characters)


def _write_characters(path: Path, characters: str) -> None:
    """nanoGPT's meta.pkl: numbers and strings alone, which unpickling cannot turn into anything else."""
    content = {
        "vocab_size": len(characters),
        "itos": dict(enumerate(characters)),
        "stoi": {character: number for number, character in enumerate(characters)},
    }
    temporary = temporary_beside(path)
    temporary.write_bytes(pickle.dumps(content, protocol=4))
    temporary.replace(path)


def discard(folder: Path) -> None:
    """Forget an interrupted prepare; a finished dataset beside it stays."""
    journal = read_journal(folder)
    for split in SPLITS:
        (folder / f"{split}.bin{PARTIAL}").unlink(missing_ok=True)
    meta_path = folder / "meta.json"
    if journal is not None and journal["mode"] == "append" and meta_path.exists():
        # What had been appended goes; the bins are what meta.json says again.
        try:
            meta = load_json(meta_path, DATA_JSON_BYTES)
            itemsize = np.dtype(str(meta["dtype"])).itemsize
            for split in SPLITS:
                path = folder / f"{split}.bin"
                n_bytes = int(meta["splits"][split]["tokens"]) * itemsize
                if path.exists() and path.stat().st_size > n_bytes:
                    os.truncate(path, n_bytes)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not ours to judge here: whoever opens the dataset will say
    (folder / JOURNAL_NAME).unlink(missing_ok=True)


# ---------------------------------------------------------------- the folder


class LockedFolder:
    """A dataset's folder, held by one prepare at a time; one made for nothing is removed again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = exclusive_lock(folder / LOCK_NAME)
        except AlreadyLockedError:
            what = _("another onecard prepare is writing {folder}").format(folder=folder)
            raise UserError(what, hint=_("wait for it, or choose another --name")) from None
        except OSError as error:
            raise cannot_write(folder, error) from error

    def __enter__(self) -> LockedFolder:
        for leftover in self.folder.glob(f"{UNPACKED}*"):
            leftover.unlink(missing_ok=True)  # of a kill
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()
        if self._made and [entry.name for entry in self.folder.iterdir()] == [LOCK_NAME]:
            (self.folder / LOCK_NAME).unlink()
            self.folder.rmdir()


def cannot_write(folder: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            _("the disk is full: {folder} could not be finished").format(folder=folder),
            _("what .prepare.json there counts is kept; an earlier version of the dataset is untouched"),
            _("make room and run the same command again: it continues"),
        )
    return UserError(_("cannot write {path}").format(path=folder), str(error.strerror or error))
