"""Where the files of a dataset come from: this machine, or the Hugging Face Hub one after the other."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onecard.data.prepare.progress import Progress
from onecard.data.prepare.reading import Batch, Place, read_batches
from onecard.data.prepare.sources import SourceFile, unreadable
from onecard.errors import UserError
from onecard.files import StoppedError, file_sha256
from onecard.language import _

# Parquet of text is usually compressed to less than half, gzip and zstd to a third and less.
_TEXT_PER_PARQUET_BYTE = 2.5
_TEXT_PER_COMPRESSED_BYTE = 3.0
# Smaller files are hashed when their hash is asked for: a thread for each would cost more.
_HASHED_LATER = 2**20
_END_BYTES = 2**20


class Origin(ABC):
    """An ordered list of files, each of which can be had as a local file when its turn comes."""

    # What meta.json says about a dataset known by name; None for files of the user's own.
    dataset: dict[str, Any] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, number: int) -> str: ...

    @abstractmethod
    def size(self, number: int) -> int: ...

    @abstractmethod
    def open(self, number: int) -> SourceFile:
        """The file, here; may have to wait for a download."""

    @abstractmethod
    def sha256(self, number: int) -> str:
        """The hash of a file that has been opened."""

    @abstractmethod
    def text_bytes(self) -> int:
        """About how much text there is in all files."""

    def release(self, number: int) -> None:  # noqa: B027 - nothing to do unless it was fetched
        """The file is not needed any more."""

    def status(self) -> str:
        """What is going on besides reading, for the progress bar."""
        return ""

    def fingerprints(self, count: int) -> dict[str, int]:
        """Facts for the journal that show that the first files are still the same without reading them."""
        return {}

    def finished(self) -> None:  # noqa: B027 - nothing to tidy up unless something was fetched
        """Everything that was wanted is written."""

    def close(self) -> None:  # noqa: B027 - nothing to stop unless something runs
        """Stop whatever runs in the background."""

    @property
    def total_bytes(self) -> int:
        return sum(self.size(number) for number in range(len(self)))

    @abstractmethod
    def partly_read(self, number: int) -> dict[str, Any]:
        """What shows later that a file of which only the beginning was used is still the same."""

    def facts(self, whole: int, partly: bool, reading: bool) -> list[dict[str, Any]]:
        """Facts of so many whole files for meta.json, and perhaps the next, as far as it was used."""
        facts: list[dict[str, Any]] = [
            {"name": self.name(number), "bytes": self.size(number), "sha256": self.sha256(number)}
            for number in range(whole)
        ]
        if partly:
            entry = {"name": self.name(whole), "bytes": self.size(whole)}
            facts.append(entry if reading else entry | self.partly_read(whole))
        return facts

    def read(self, text_column: str, start: Place, scratch: Path) -> Iterator[Batch]:
        """All texts from `start` on. `read` counts the bytes of all files behind."""
        before = sum(self.size(number) for number in range(start.source))
        for number in range(start.source, len(self)):
            file = self.open(number)
            place = start if number == start.source else Place(number)
            for batch in read_batches(file, text_column, place, scratch):
                batch.read += before
                yield batch
            before += self.size(number)


class _Hashing:
    """SHA-256 of a file in a thread of its own, which ends at once when it is not wanted any more."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._stop = threading.Event()
        self._outcome: str | BaseException | None = None
        self._thread: threading.Thread | None = None
        if file.size > _HASHED_LATER:
            self._thread = threading.Thread(target=self._run, name="onecard-hash", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = file_sha256(self._file.path, self._stop)
        except OSError as error:
            self._outcome = unreadable(self._file.path, error)
        except StoppedError as error:
            self._outcome = error

    def result(self) -> str:
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        assert self._outcome is not None, "it ran"
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def stop(self) -> None:
        self._stop.set()


class LocalFiles(Origin):
    """Files of this machine. Each is hashed in the background while it is read."""

    def __init__(self, files: list[SourceFile]) -> None:
        self.files = files
        self._modified_ns: dict[int, int] = {}
        self._hashing: dict[int, _Hashing] = {}
        self._sha256: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.files)

    def name(self, number: int) -> str:
        return self.files[number].name

    def size(self, number: int) -> int:
        return self.files[number].size

    def open(self, number: int) -> SourceFile:
        file = self.files[number]
        if number not in self._hashing and number not in self._sha256:
            self._modified_ns[number] = _modified_ns(file)
            self._hashing[number] = _Hashing(file)
        return file

    def look_over(self, text_column: str, scratch: Path) -> Iterator[Batch]:
        """Reads all texts once, before they are read for good."""
        for number, file in enumerate(self.files):
            yield from read_batches(file, text_column, Place(number), scratch)

    def sha256(self, number: int) -> str:
        if number not in self._sha256:
            file = self.open(number)
            digest = self._hashing.pop(number).result()
            # Hashed and read at different times: only a file that did not change has one hash.
            if _modified_ns(file) != self._modified_ns[number] or file.path.stat().st_size != file.size:
                raise UserError(
                    _("{path} changed while it was being read").format(path=file.path),
                    hint=_("run the same command again, with --force if it then asks for it"),
                )
            self._sha256[number] = digest
        return self._sha256[number]

    def partly_read(self, number: int) -> dict[str, Any]:
        # Not the hash of all of it: the rest may be a hundred times what was used.
        return {"sha256_of_ends": _sha256_of_ends(self.files[number])}

    def text_bytes(self) -> int:
        return sum(_text_estimate(file) for file in self.files)

    def fingerprints(self, count: int) -> dict[str, int]:
        known = self._modified_ns
        return {str(number): known[number] for number in range(count) if number in known}

    def close(self) -> None:
        for hashing in list(self._hashing.values()):
            hashing.stop()

    def continuing(
        self, listed: list[dict[str, Any]], fingerprints: dict[str, int], show: bool
    ) -> LocalFiles | str:
        """The files in the order of an earlier prepare, new ones after them; else what differs.

        A file whose size and time of change are those of the journal is the same; else its hash says.
        """
        left: dict[tuple[str, int], list[SourceFile]] = {}
        for file in reversed(self.files):
            left.setdefault((file.name, file.size), []).append(file)
        total, done = sum(int(entry.get("bytes", 0)) for entry in listed), 0
        ordered = LocalFiles([])
        with Progress(_("comparing files"), total, show) as progress:
            for number, entry in enumerate(listed):
                same = left.get((str(entry.get("name")), int(entry.get("bytes", 0))))
                if not same:
                    missing = _("{name} is not among the files given, or has another size")
                    return missing.format(name=entry.get("name"))
                file, digest = same.pop(), entry.get("sha256")
                modified_ns = _modified_ns(file)
                if fingerprints.get(str(number)) != modified_ns and not _is_same(file, entry):
                    return _("{name} has changed").format(name=entry.get("name"))
                ordered.files.append(file)
                ordered._modified_ns[number] = modified_ns
                if digest is not None:
                    ordered._sha256[number] = digest
                done += file.size
                progress.update(done, 0, 0)
        taken = {id(file) for file in ordered.files}
        ordered.files += [file for file in self.files if id(file) not in taken]
        return ordered


def _modified_ns(file: SourceFile) -> int:
    try:
        return file.path.stat().st_mtime_ns
    except OSError as error:
        raise UserError(
            _("cannot read {path}").format(path=file.path), str(error.strerror or error)
        ) from error


def _is_same(file: SourceFile, entry: dict[str, Any]) -> bool:
    if "sha256" in entry:
        return _Hashing(file).result() == entry["sha256"]
    return "sha256_of_ends" in entry and _sha256_of_ends(file) == entry["sha256_of_ends"]


def _sha256_of_ends(file: SourceFile) -> str:
    """The hash of the first and the last megabyte."""
    try:
        with file.path.open("rb") as stream:
            digest = hashlib.sha256(stream.read(_END_BYTES))
            stream.seek(max(0, file.size - _END_BYTES))
            digest.update(stream.read(_END_BYTES))
    except OSError as error:
        raise unreadable(file.path, error) from error
    return digest.hexdigest()


def _text_estimate(file: SourceFile) -> int:
    if file.kind == "parquet":
        return int(file.size * _TEXT_PER_PARQUET_BYTE)
    return int(file.size * _TEXT_PER_COMPRESSED_BYTE) if file.compression else file.size
