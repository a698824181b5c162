"""Which files to read: text, jsonl and parquet, plain or compressed, in folders or alone, and stdlib."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import gzip
import io
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from onecard.data.hub.catalogue import NAMES
from onecard.errors import UserError, missing_package
from onecard.language import _, ngettext

STDLIB = "stdlib"
Kind = Literal["text", "jsonl", "parquet"]
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
Compression = Literal["", "gz", "zst"]
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
# Not read: what to do about them instead.
_ARCHIVES = {".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip", ".7z": "7z x", ".tar": "tar xf"}
_ARCHIVES |= {".tgz": "tar xzf", ".rar": "unrar x"}
# Not the library's code: what others installed, tests (missing on many machines), help texts in quotes.
_STDLIB_LEAVES_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data",
}  # fmt: skip
_STDLIB_LEAST_BYTES = 2**20
# What prepare writes is never its own input, should the text lie in the same folder.
OUTPUT_NAMES = {"train.bin", "val.bin", "meta.json", "meta.pkl", "tokenizer.json"}
_UNFINISHED = (".partial", ".part")
# Text is compressed to a tenth, logs to a fiftieth. What becomes more than this many times a file's size is a
# mistake, or was made to fill a disk; of a small file that is no harm, so this much is never refused.
_MOST_TIMES = 200
_NEVER_TOO_MUCH = 256 * 2**20


class BadFileError(UserError):
    """A file is not what it says. It will be replaced or left out, so what was read of it does not count."""


@dataclass(frozen=True)
class SourceFile:
    """One input file. `name` is how meta.json calls it: relative to what the user named."""

    path: Path
    size: int
    name: str
    kind: Kind
    compression: Compression = ""
    bounded: bool = True  # what it may unpack to; else the tokens that are wanted bound it

    def refuse_to_become(self, n_bytes: int) -> None:
        """What has become of the file so far, or will by what it says, is out of all proportion to it."""
        if not self.bounded or n_bytes <= max(_NEVER_TOO_MUCH, _MOST_TIMES * self.size):
            return
        raise BadFileError(
            _("{path} unpacks to {times:,} times its size or more").format(
                path=self.path, times=n_bytes // max(1, self.size)
            ),
            _("{size:,} bytes become at least {n_bytes:,.0f} MB; text becomes 3 to 10 times larger").format(
                size=self.size, n_bytes=n_bytes / 1e6
            ),
            _("if this is what you want, unpack it yourself, and give what comes out")
            if self.kind == "text"
            else _("if this is what you want, say where it ends: --tokens 100M"),
        )


_PICKLES = {".pkl", ".pickle"}  # nanoGPT's meta.pkl lies beside its text
_ABOUT = {"README", "LICENSE", "LICENCE", "NOTICE"}


@dataclass
class Tally:
    """What was passed over or mended on the way, for the notes at the end."""

    empty_files: int = 0
    empty_documents: int = 0
    binary_files: int = 0
    bad_bytes: int = 0
    json_files: int = 0
    about_files: int = 0
    outside_links: int = 0
    first_outside_link: str = ""

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Tally:
        """Out of a meta.json, which another version may have written or a hand changed."""
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        known: dict[str, Any] = {n: value for n, value in stored.items() if type(value) is kinds.get(n)}
        return cls(**known)

    def notes(self) -> list[str]:
        found = [
            (self.empty_files, _("{n:,} empty files skipped")),
            (self.empty_documents, _("{n:,} empty documents skipped")),
            (self.binary_files, _("{n:,} files skipped that are not text (archives, images …)")),
            (self.json_files, _("{n:,} .json files skipped that are not one object per line")),
            (self.about_files, _("{n:,} files skipped that are about the data (README, LICENSE)")),
            (self.bad_bytes, _("{n:,} places were not UTF-8 and became \ufffd")),
        ]
        notes = [text.format(n=count) for count, text in found if count]
        return [*notes, self.links_note()] if self.outside_links else notes

    def links_note(self) -> str:
        note = ngettext(
            "{n:,} link leads out of the folder and was not followed (the first: {first}); "
            "name its target to include it",
            "{n:,} links lead out of the folder and were not followed (the first: {first}); "
            "name their targets to include them",
            self.outside_links,
        )
        return note.format(n=self.outside_links, first=self.first_outside_link)


# ---------------------------------------------------------------- which files


def find_sources(inputs: list[str], tally: Tally, output_dir: Path | None = None) -> list[SourceFile]:
    """Every file behind the names a user gave, in an order that is the same everywhere."""
    files: list[SourceFile] = []
    output_dir = output_dir.resolve() if output_dir else None
    for given in inputs:
        path = Path(given)
        if given == STDLIB:
            files += _stdlib_files()
        elif path.is_dir():
            files += _folder_files(path, tally, output_dir)
        elif path.is_file():
            files.append(_named_file(path))
        else:
            raise _missing(path)
    kept = [file for file in files if file.size]
    tally.empty_files += len(files) - len(kept)
    if files and not kept:
        raise UserError(
            _("all {n} files in {inputs} are empty").format(n=len(files), inputs=", ".join(inputs))
        )
    return kept


def _named_file(path: Path) -> SourceFile:
    if ending := _archive(path):
        raise UserError(
            _("{path} is an archive").format(path=path),
            _("plain files are read, and those compressed with gzip or zstd"),
            f"{_ARCHIVES[ending]} {path}",
        )
    file = _source(path, path.name)
    if path.suffix.lower() in _PICKLES:
        raise UserError(
            _("{path} is not text").format(path=path),
            _("its name says that it is a Python pickle"),
            _("give the text it was made of"),
        )
    if file.kind == "text" and file.size and _is_binary(file):
        raise UserError(
            _("{path} is not UTF-8 text").format(path=path),
            _("it holds zero bytes, as UTF-16 and binary files do"),
            _("if it is UTF-16: iconv -f UTF-16 -t UTF-8 {path} > utf8.txt").format(path=path),
        )
    return file


def _archive(path: Path) -> str:
    """The ending by which a file is an archive (also inside a compression, as .tar.gz), or nothing."""
    return next((ending for ending in map(str.lower, path.suffixes[-2:]) if ending in _ARCHIVES), "")


def _source(path: Path, name: str) -> SourceFile:
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    inner = path.with_suffix("") if compression else path
    file = SourceFile(path, _size(path), name, _KINDS.get(inner.suffix.lower(), "text"), compression)
    if inner.suffix.lower() != ".json" or not file.size:
        return file
    if not _is_json_lines(file):
        raise _NotLinesError(
            _("{path} is JSON, but not one object per line").format(path=path),
            _("its braces and quotes would be trained on"),
            _("if it is an array: jq -c '.[]' {path} > {stem}.jsonl").format(path=path, stem=inner.stem),
        )
    return dataclasses.replace(file, kind="jsonl")


class _NotLinesError(UserError):
    """A .json file that is no jsonl."""


def _is_json_lines(file: SourceFile) -> bool:
    with open_stream(file) as stream:
        line = stream.readline(2**26).strip().removeprefix(b"\xef\xbb\xbf")
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _folder_files(folder: Path, tally: Tally, output_dir: Path | None) -> list[SourceFile]:
    binary_before = tally.binary_files
    files = []
    folder_name = folder.resolve().name
    for path in _walk(folder, set(), tally):
        if output_dir is not None and _is_output(path.name) and path.parent.resolve() == output_dir:
            continue
        try:
            file = _source(path, f"{folder_name}/{path.relative_to(folder).as_posix()}")
        except _NotLinesError:
            tally.json_files += 1
            continue
        if _archive(path) or (file.kind == "text" and file.size and _is_binary(file)):
            tally.binary_files += 1
            continue
        files.append(file)
    if any(file.kind != "text" for file in files):
        # A folder of parquet or jsonl, as fetched from the Hub: what describes it is not part of it.
        of_data = [file for file in files if file.kind != "text" or file.path.stem.upper() not in _ABOUT]
        tally.about_files += len(files) - len(of_data)
        files = of_data
    if not files:
        skipped = tally.binary_files - binary_before
        not_text = _("{n:,} files there are archives or not text")
        passed = not_text.format(n=skipped) if skipped else ""
        if tally.outside_links:
            passed = "\n".join(filter(None, [passed, tally.links_note()]))
        raise UserError(
            _("no text in the folder {folder}").format(folder=folder),
            passed or _("it is empty"),
            _("give .txt, .jsonl or .parquet files (also .gz or .zst), or folders of them"),
        )
    return files


def _is_output(name: str) -> bool:
    for ending in _UNFINISHED:
        name = name.removesuffix(ending)
    return name in OUTPUT_NAMES


def _stdlib_files() -> list[SourceFile]:
    """The running Python's library: always there, 10 MB and more, and the same for everyone on a version."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = _walk(root, _STDLIB_LEAVES_OUT) if root.is_dir() else iter(())
    files = [
        SourceFile(path, _size(path), f"{STDLIB}/{path.relative_to(root).as_posix()}", "text")
        for path in paths
        # Build settings of one machine, not library.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    if sum(file.size for file in files) < _STDLIB_LEAST_BYTES:
        raise UserError(
            _("this Python comes without the sources of its standard library"),
            _("looked under {root} (Python {version}): zipped, or compiled files only").format(
                root=root, version=sys.version.split()[0]
            ),
            _("give a text file instead: onecard prepare FILE.txt"),
        )
    return files


def _walk(folder: Path, leave_out: set[str], tally: Tally | None = None) -> Iterator[Path]:
    """The files below a folder, each once. Links that lead out of it are not followed but counted; without a
    tally they are."""

    def unreadable_folder(error: OSError) -> None:
        raise unreadable(Path(error.filename or folder), error)

    homes = _homes(folder)

    def leads_out(path: Path, real: str) -> bool:
        if tally is None or any(Path(real).is_relative_to(home) for home in homes):
            return False
        tally.outside_links += 1
        tally.first_outside_link = tally.first_outside_link or path.relative_to(folder).as_posix()
        return True

    seen: set[str] = set()
    for here, folders, names in os.walk(folder, onerror=unreadable_folder, followlinks=True):
        real_here = os.path.realpath(here)
        if real_here in seen or (real_here not in homes and leads_out(Path(here), real_here)):
            folders[:] = []
            continue
        seen.add(real_here)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        for name in sorted(names):
            path = Path(here) / name
            if name.startswith(".") or not path.is_file():
                continue
            is_link = path.is_symlink()
            real = os.path.realpath(path) if is_link else os.path.join(real_here, name)  # noqa: PTH118 - a hot loop
            if real not in seen and not (is_link and leads_out(path, real)):
                seen.add(real)
                yield path


def _homes(folder: Path) -> list[str]:
    """The folders a folder's files lie in: a snapshot of the Hub's cache is links to blobs beside it."""
    real = Path(os.path.realpath(folder))
    repos = [above.parent for above in real.parents if above.name == "snapshots"][:1]
    return [str(real), *(str(repo / "blobs") for repo in repos if (repo / "blobs").is_dir())]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def _is_binary(file: SourceFile) -> bool:
    if file.path.suffix.lower() in _PICKLES:
        return True
    with open_stream(file) as stream:
        return b"\0" in stream.read(8192)


def _missing(path: Path) -> UserError:
    parent = path.parent if path.parent.is_dir() else Path()
    near = difflib.get_close_matches(
        path.name, [*(entry.name for entry in parent.iterdir()), STDLIB, *NAMES], n=3
    )
    return UserError(
        _("there is no file or folder {path}, and no dataset of that name").format(path=path),
        _("did you mean {near}?").format(near=", ".join(near)) if near else "",
        _("onecard prepare FILES-OR-FOLDERS, or one of: {names}").format(names=", ".join([*NAMES, STDLIB])),
    )


def unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        _("cannot read {path}").format(path=path), str(getattr(error, "strerror", None) or error)
    )


@contextlib.contextmanager
def open_stream(file: SourceFile) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed on the way; what goes wrong while reading names the file."""
    try:
        if file.compression == "zst":
            with _decompressed(file, _zstd_stream(file.path), 2**20) as stream:
                yield stream
        elif file.compression == "gz":
            with _decompressed(file, gzip.open(file.path, "rb"), io.DEFAULT_BUFFER_SIZE) as stream:
                yield stream
        else:
            with file.path.open("rb") as stream:
                yield stream
    except (OSError, EOFError, zlib.error) as error:
        if file.compression and not isinstance(error, PermissionError | FileNotFoundError):
            raise BadFileError(
                _("{path} is damaged: it could not be decompressed").format(path=file.path),
                str(error).partition("\n")[0] or type(error).__name__,
                _("it may be cut short: fetch it again, and compare its size with the original"),
            ) from error
        raise unreadable(file.path, error) from error


def _zstd_stream(path: Path) -> Any:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing_package("pyarrow", "train", _("reading .zst files")) from error
    return pa.input_stream(str(path), compression="zstd")


def _decompressed(file: SourceFile, stream: Any, ahead: int) -> io.BufferedReader:
    """Arrow's streams read, but know no lines; `ahead` bytes at a time where less is asked for."""
    return io.BufferedReader(_RawStream(file, stream), ahead)


class _RawStream(io.RawIOBase):
    """What io.BufferedReader needs of a stream that can only read; counts what comes out."""

    def __init__(self, file: SourceFile, stream: Any) -> None:
        self._file = file
        self._stream = stream
        self._n_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._stream.read(len(buffer))
        buffer[: len(block)] = block
        self._n_bytes += len(block)
        self._file.refuse_to_become(self._n_bytes)
        return len(block)

    def close(self) -> None:
        self._stream.close()
        super().close()
