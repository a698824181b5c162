"""Writing a dataset so that it is there whole or not at all.

Tokens go to `*.partial` files beside the final ones and are renamed when everything is on disk.
A run that ends early, for whatever reason, leaves what was there before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from onecard.data.bins import Split
from onecard.errors import UserError
from onecard.files import AlreadyLockedError, exclusive_lock, flush_to_disk

SPLITS: tuple[Split, ...] = ("train", "val")
LOCK_NAME = ".prepare.lock"
_BUFFER_TOKENS = 2**20


class _SplitWriter:
    """One growing token file with its counts and hash."""

    def __init__(self, final: Path, dtype: np.dtype[Any]) -> None:
        self.final = final
        self.partial = final.with_name(final.name + ".partial")
        self._dtype = dtype
        self._file: BinaryIO = self.partial.open("wb")
        self.restart()

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash = hashlib.sha256()
        self._waiting: list[NDArray[np.uint32]] = []
        self._n_waiting = 0
        self.documents = self.tokens = self.text_bytes = 0

    def append(self, ids_N: NDArray[np.uint32]) -> None:
        self._waiting.append(ids_N)
        self._n_waiting += len(ids_N)
        self.tokens += len(ids_N)
        if self._n_waiting >= _BUFFER_TOKENS:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            data = np.concatenate(self._waiting).astype(self._dtype).tobytes()
            self._waiting, self._n_waiting = [], 0
            self._hash.update(data)
            self._file.write(data)

    def finish(self) -> dict[str, Any]:
        """Everything on disk, not only in the system's cache: a rename must never come before its data."""
        self._write()
        self._file.flush()
        os.fsync(self._file.fileno())
        return {
            "file": self.final.name,
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "bytes_per_token": round(self.text_bytes / max(1, self.tokens), 6),
            "sha256": self._hash.hexdigest(),
        }

    def close(self) -> None:
        self._file.close()


class DatasetWriter:
    """Both splits and meta.json of one dataset; use as a context manager, and `commit` at the end."""

    def __init__(self, folder: Path, dtype: str, eot: int | None) -> None:
        self.folder = folder
        self._eot_1 = None if eot is None else np.array([eot], np.uint32)
        self._made_folder = not folder.exists()
        self._splits: dict[Split, _SplitWriter] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = _lock(folder / LOCK_NAME)
            for split in SPLITS:
                self._splits[split] = _SplitWriter(folder / f"{split}.bin", np.dtype(dtype).newbyteorder("<"))
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def restart(self) -> None:
        """Forget what was written so far."""
        for writer in self._splits.values():
            writer.restart()

    def append(self, split: Split, ids_N: NDArray[np.uint32], text_bytes: int, ends_document: bool) -> None:
        """Tokens of a document or a part of one; end-of-text follows the last part."""
        writer = self._splits[split]
        try:
            writer.append(ids_N)
            if ends_document and self._eot_1 is not None:
                writer.append(self._eot_1)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        writer.text_bytes += text_bytes
        writer.documents += ends_document

    def tokens(self) -> int:
        return sum(writer.tokens for writer in self._splits.values())

    def finish(self) -> dict[str, dict[str, Any]]:
        """Close the books: counts and hash per split, all of it on disk under its partial name."""
        try:
            return {split: writer.finish() for split, writer in self._splits.items()}
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def commit(self, meta: dict[str, Any]) -> None:
        """Rename into place. meta.json comes last: it counts the tokens, so a reader notices a mix."""
        try:
            meta_partial = self.folder / "meta.json.partial"
            with meta_partial.open("w", encoding="utf-8") as file:
                json.dump(meta, file, indent=1, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            for writer in self._splits.values():
                writer.close()
                writer.partial.replace(writer.final)
            meta_partial.replace(self.folder / "meta.json")
            flush_to_disk(self.folder)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._splits.values():
            writer.close()
            writer.partial.unlink(missing_ok=True)
        (self.folder / "meta.json.partial").unlink(missing_ok=True)
        self._lock_file.close()
        if self._made_folder and [entry.name for entry in self.folder.iterdir()] == [LOCK_NAME]:
            (self.folder / LOCK_NAME).unlink()
            self.folder.rmdir()


def _lock(path: Path) -> BinaryIO:
    """Two writers into one file would mix their tokens."""
    try:
        return exclusive_lock(path)
    except AlreadyLockedError:
        raise UserError(
            f"another onecard prepare is writing {path.parent}", hint="wait for it, or choose another --name"
        ) from None


def _cannot_write(folder: Path, error: OSError) -> UserError:
    if error.errno == errno.ENOSPC:
        return UserError(
            f"the disk is full: {folder} could not be finished",
            "what was written of it is removed again; an earlier version of it is untouched",
            "make room, or put the data elsewhere with --out-root",
        )
    return UserError(f"cannot write {folder}", str(error.strerror or error))
