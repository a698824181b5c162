"""Documents out of files: text, jsonl and parquet, in folders or alone, and Python's own library.

Memory stays bounded whatever the file: large texts come in pieces, parquet in batches of one column.
One bad byte never stops a long job (it becomes a replacement mark and is counted); a file that is
not what it says stops it at once, with the place.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from onecard.data.tokenizer import well_formed
from onecard.errors import UserError, missing_package

STDLIB = "stdlib"
# Larger texts come in pieces of about this many bytes.
PIECE_BYTES = 8 * 2**20
# A text without any white space is cut somewhere once it is this many times a piece.
_PIECES_UNCUT = 4
_PARQUET_ROWS = 256

Kind = Literal["text", "jsonl", "parquet"]
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED = {".gz": "gunzip -k", ".zst": "unzstd", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip"}
# Not the library's code: what others installed, tests (missing on many machines), help texts in quotes.
_STDLIB_LEAVES_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data",
}  # fmt: skip
_STDLIB_LEAST_BYTES = 2**20
# What prepare writes is never its own input, should the text lie in the same folder.
OUTPUT_NAMES = {"train.bin", "val.bin", "meta.json", "meta.pkl", "train.bin.partial", "val.bin.partial"}


@dataclass(frozen=True)
class SourceFile:
    """One input file. `name` is how meta.json calls it: relative to what the user named."""

    path: Path
    size: int
    name: str
    kind: Kind


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a large one; the parts follow each other and the last one says so.

    `digest` is the hash of the whole document; `read` how many bytes of the file are behind us.
    """

    text: str
    digest: int
    ends_document: bool
    read: int


@dataclass
class Tally:
    """What was passed over or mended on the way, for the notes at the end."""

    empty_files: int = 0
    empty_documents: int = 0
    binary_files: int = 0
    bad_bytes: int = 0

    def notes(self) -> list[str]:
        found = [
            (self.empty_files, "empty files skipped"),
            (self.empty_documents, "empty documents skipped"),
            (self.binary_files, "files skipped that are not text (archives, images …)"),
            (self.bad_bytes, "places were not UTF-8 and became \N{REPLACEMENT CHARACTER}"),
        ]
        return [f"{count:,} {what}" for count, what in found if count]


def document_digest(text: str) -> int:
    """64 bits that depend on nothing but the text: equal documents fall on the same side of a split."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


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
        raise UserError(f"all {len(files)} files in {', '.join(inputs)} are empty")
    return kept


def _named_file(path: Path) -> SourceFile:
    if path.suffix.lower() in _COMPRESSED:
        raise UserError(
            f"{path} is compressed", "only plain files are read", f"{_COMPRESSED[path.suffix.lower()]} {path}"
        )
    file = SourceFile(path, _size(path), path.name, _kind(path))
    if file.kind == "text" and _is_binary(path):
        raise UserError(
            f"{path} is not UTF-8 text",
            "it holds zero bytes, as UTF-16 and binary files do",
            f"if it is UTF-16: iconv -f UTF-16 -t UTF-8 {path} > utf8.txt",
        )
    return file


def _folder_files(folder: Path, tally: Tally, output_dir: Path | None) -> list[SourceFile]:
    binary_before = tally.binary_files
    files = []
    for path in _walk(folder, leave_out=set()):
        if output_dir is not None and path.name in OUTPUT_NAMES and path.parent.resolve() == output_dir:
            continue
        kind = _kind(path)
        if path.suffix.lower() in _COMPRESSED or (kind == "text" and _is_binary(path)):
            tally.binary_files += 1
            continue
        name = (Path(folder.resolve().name) / path.relative_to(folder)).as_posix()
        files.append(SourceFile(path, _size(path), name, kind))
    if not files:
        skipped = tally.binary_files - binary_before
        raise UserError(
            f"no text in the folder {folder}",
            f"{skipped:,} files there are compressed or not text" if skipped else "it is empty",
            "give .txt, .jsonl or .parquet files, or folders of them",
        )
    return files


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
            "this Python comes without the sources of its standard library",
            f"looked under {root} (Python {sys.version.split()[0]}): zipped, or compiled files only",
            "give a text file instead: onecard prepare FILE.txt",
        )
    return files


def _walk(folder: Path, leave_out: set[str]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error)

    for here, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        for name in sorted(names):
            path = Path(here) / name
            if not name.startswith(".") and path.is_file():
                yield path


def _kind(path: Path) -> Kind:
    return _KINDS.get(path.suffix.lower(), "text")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _is_binary(path: Path) -> bool:
    with _open(path) as file:
        return b"\0" in file.read(8192)


def _missing(path: Path) -> UserError:
    parent = path.parent if path.parent.is_dir() else Path()
    near = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()] + [STDLIB], n=3)
    return UserError(
        f"there is no file or folder {path}",
        f"did you mean {', '.join(near)}?" if near else "",
        "onecard prepare FILES-OR-FOLDERS, or: onecard prepare stdlib",
    )


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}", str(error.strerror or error))


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def file_sha256(path: Path) -> str:
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- what is in them


def read_documents(file: SourceFile, text_column: str, tally: Tally) -> Iterator[Piece]:
    """The documents of one file, in order."""
    try:
        if file.kind == "jsonl":
            yield from _jsonl(file, text_column, tally)
        elif file.kind == "parquet":
            yield from _parquet(file, text_column, tally)
        elif file.size <= PIECE_BYTES:
            yield from _whole_text(file, tally)
        else:
            yield from _large_text(file, tally)
    except OSError as error:
        raise _unreadable(file.path, error) from error


def _decode(raw: bytes, tally: Tally) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("utf-8", "replace")
        tally.bad_bytes += text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
        return text


def _whole(text: str, read: int) -> Piece:
    return Piece(text, document_digest(text), True, read)


def _whole_text(file: SourceFile, tally: Tally) -> Iterator[Piece]:
    with _open(file.path) as handle:
        text = _decode(handle.read(), tally).removeprefix("\ufeff")
    if text:
        yield _whole(text, file.size)
    else:
        tally.empty_documents += 1


def _large_text(file: SourceFile, tally: Tally) -> Iterator[Piece]:
    """Pieces are cut where a word ends and white space begins: there GPT-2 cuts too, so ids do not change."""
    hasher = hashlib.blake2b(digest_size=8)
    for text, _ in _chunks(file, Tally()):
        hasher.update(text.encode("utf-8"))
    digest = int.from_bytes(hasher.digest(), "big")

    held = ""
    for text, read in _chunks(file, tally):
        held += text
        cut = _last_word_end(held)
        if not cut and len(held) > _PIECES_UNCUT * PIECE_BYTES:
            cut = len(held) - 1
        if cut:
            yield Piece(held[:cut], digest, False, read)
            held = held[cut:]
    yield Piece(held, digest, True, file.size)


def _chunks(file: SourceFile, tally: Tally) -> Iterator[tuple[str, int]]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    marks, marks_in_file, before, read = 0, 0, b"", 0
    with _open(file.path) as handle:
        while raw := handle.read(PIECE_BYTES):
            text = decoder.decode(raw)
            marks += text.count("\ufffd")
            marks_in_file += (before + raw).count(b"\xef\xbf\xbd")
            before = raw[-2:]
            yield (text if read else text.removeprefix("\ufeff")), read + len(raw)
            read += len(raw)
    if rest := decoder.decode(b"", final=True):
        marks += len(rest)
        yield rest, read
    tally.bad_bytes += marks - marks_in_file


def _last_word_end(text: str) -> int:
    """The last place where a white character follows one that is not; 0 if there is none near the end."""
    for at in range(len(text) - 1, max(0, len(text) - 2**20), -1):
        if text[at].isspace() and not text[at - 1].isspace():
            return at
    return 0


def _jsonl(file: SourceFile, column: str, tally: Tally) -> Iterator[Piece]:
    read = 0
    with _open(file.path) as handle:
        for number, raw in enumerate(handle, start=1):
            read += len(raw)
            line = _decode(raw, tally).strip()
            if number == 1:
                line = line.removeprefix("\ufeff")
            if not line:
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                syntax = error if isinstance(error, json.JSONDecodeError) else None
                at = f", column {syntax.colno}" if syntax else ""
                raise UserError(
                    f"{file.path}, line {number:,}{at}: not JSON",
                    f"{syntax.msg if syntax else error}: {line[:60]!r}",
                    "each line must be one object, such as {" + f'"{column}": "…"' + "}",
                ) from error
            text = _field(row, column, f"{file.path}, line {number:,}")
            if text:
                yield _whole(well_formed(text), read)
            else:
                tally.empty_documents += 1


def _field(row: Any, column: str, place: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{place}: not an object but {type(row).__name__}")
    if column not in row:
        raise missing_column(place, column, [str(key) for key in row])
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{place}: column '{column}' is not text but {type(text).__name__}")
    return text or ""


def missing_column(place: str, column: str, there: list[str]) -> UserError:
    near = difflib.get_close_matches(column, there, n=1) or there[:1]
    return UserError(
        f"{place}: no column '{column}'",
        f"there are: {', '.join(there) or 'none'}",
        f"--text-column {near[0]}" if near else "",
    )


def _parquet(file: SourceFile, column: str, tally: Tally) -> Iterator[Piece]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_package("pyarrow", "train", "reading parquet") from error
    done = 0
    try:
        # Without a memory map or read-ahead of whole files: a batch of one column at a time.
        with pq.ParquetFile(file.path, pre_buffer=False) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise missing_column(str(file.path), column, schema.names)
            kind = schema.field(column).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UserError(f"{file.path}: column '{column}' is not text but {kind}")
            rows = max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[column]):
                for text in batch.column(0).to_pylist():
                    done += 1
                    if text:
                        yield _whole(well_formed(text), file.size * done // rows)
                    else:
                        tally.empty_documents += 1
    # pyarrow reports damage as ArrowInvalid (a ValueError), OSError or a UnicodeDecodeError.
    except (pa.ArrowException, ValueError, OSError) as error:
        raise UserError(
            f"{file.path}, row {done:,}: not a readable parquet file",
            str(error).partition("\n")[0] or type(error).__name__,
            "it may be cut short: fetch it again, and compare its size with the original",
        ) from error
