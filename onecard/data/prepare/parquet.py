"""Parquet to batches of texts, from any row on."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onecard.data.prepare import reading
from onecard.data.prepare.reading import PIECE_BYTES, Batch, Place, document_digest, missing_column, repaired
from onecard.data.prepare.room import Room
from onecard.data.prepare.sources import BadFileError, SourceFile, open_stream, unreadable
from onecard.errors import UserError, missing_package
from onecard.language import _

_MOST_ROWS = 4096
# Of one batch of rows while Arrow spells them out, however often a short file repeats a long text.
_SPELLED_OUT_BYTES = 64 * 2**20
# An empty row costs time as well, and a file can hold billions of them in a kilobyte.
_ROW_BYTES = 8
# A page begins with Thrift's compact fields 1, 2 and 3, each an i32: kind, unpacked size, packed size.
_I32_FIELD, _DICTIONARY_PAGE = 0x15, 2
UNPACKED = ".unpacked-"


def read_parquet(file: SourceFile, column: str, start: Place, scratch: Path) -> Iterator[Batch]:
    """The rows of one file from `start` on; a compressed file is unpacked into `scratch` first."""
    if not file.compression:
        yield from _rows(file, file.path, column, start)
        return
    with _unpacked(file, scratch) as path:
        yield from _rows(file, path, column, start)


@contextlib.contextmanager
def _unpacked(file: SourceFile, scratch: Path) -> Iterator[Path]:
    """Parquet is read from its end, which a compressed stream does not offer: unpack it first."""
    room, hint = Room(scratch), _("make room, or unpack it yourself, then run the same command again")
    could_not = _("{path} could not be unpacked in {folder}").format(path=file.path, folder=scratch)
    with tempfile.NamedTemporaryFile(dir=scratch, prefix=UNPACKED, suffix=".parquet") as copy:
        with open_stream(file) as stream:
            while block := stream.read(PIECE_BYTES):
                if room.is_used_up():
                    raise room.used_up(could_not, hint)
                try:
                    copy.write(block)
                except OSError as error:
                    raise UserError(
                        _("no room to unpack {path} in {scratch}").format(path=file.path, scratch=scratch),
                        str(error.strerror or error),
                        hint,
                    ) from error
        copy.flush()
        yield Path(copy.name)


def _rows(file: SourceFile, path: Path, column: str, start: Place) -> Iterator[Batch]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_package("pyarrow", "train", _("reading parquet")) from error
    # Arrow's own allocator costs a quarter more than the system's when large buffers come and go.
    pa.set_memory_pool(pa.system_memory_pool())
    row = start.item
    try:
        # Without read-ahead of whole row groups: a batch of one column at a time.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as table:
            kind = _text_type(table.schema_arrow, column, file.path)
            groups, before = _groups_from(table.metadata, row)
            rows = max(1, table.metadata.num_rows)
            size = _column_bytes(table, column)
            file.refuse_to_become(max(size, rows * _ROW_BYTES))  # as far as the file says it
            per_batch, unpacked = _rows_per_batch(table, path, column, size), 0
            skip = row - before
            for part in table.iter_batches(per_batch, row_groups=groups, columns=[column], use_threads=False):
                array = part.column(0)
                if skip:
                    skipped = min(skip, len(array))
                    skip -= skipped
                    array = array.slice(skipped)
                    if not len(array):
                        continue
                if str(array.type) == "string_view":
                    array = array.cast(kind)
                for piece in _bounded(array):
                    # One layout for plain and dictionary columns.
                    plain = piece if piece.type == kind else piece.cast(kind)
                    batch = _parquet_batch(plain, start.source, row)
                    row += len(piece)
                    unpacked += batch.n_bytes + _ROW_BYTES * len(piece)
                    file.refuse_to_become(unpacked)
                    batch.read = file.size * row // rows
                    yield batch
    # pyarrow reports damage as ArrowInvalid (a ValueError) or OSError.
    # Two columns of one name are a KeyError.
    except (pa.ArrowException, ValueError, OSError, KeyError) as error:
        if isinstance(error, PermissionError | FileNotFoundError):
            raise unreadable(file.path, error) from error
        raise BadFileError(
            _("{path}, row {row:,}: not a readable parquet file").format(path=file.path, row=row),
            str(error).partition("\n")[0] or type(error).__name__,
            _("it may be cut short: fetch it again, and compare its size with the original"),
        ) from error


def _text_type(schema: Any, column: str, path: Path) -> Any:
    """The plain string type to read a column as, or what is wrong with it."""
    import pyarrow as pa

    if column not in schema.names:
        raise missing_column(str(path), column, schema.names)
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind):
        return pa.string()  # a column of nothing but empty documents
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"):
        raise BadFileError(
            _("{path}: column '{column}' is not text but {kind}").format(path=path, column=column, kind=kind)
        )
    return pa.string() if pa.types.is_string(kind) else pa.large_string()


def _groups_from(metadata: Any, row: int) -> tuple[list[int], int]:
    """The row groups that hold rows from `row` on, and how many rows lie before them."""
    before = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if before + rows > row:
            return list(range(group, metadata.num_row_groups)), before
        before += rows
    return [], before


def _columns_of(table: Any, column: str) -> Iterator[Any]:
    """What the file says about a column in each row group."""
    metadata = table.metadata
    # With nested columns beside it, the text is not at its number in the schema.
    number = next((n for n in range(metadata.num_columns) if table.schema.column(n).path == column), 0)
    for group in range(metadata.num_row_groups):
        yield metadata.row_group(group).column(number)


def _column_bytes(table: Any, column: str) -> int:
    """The bytes of a column before dictionaries are spelled out."""
    return sum(part.total_uncompressed_size for part in _columns_of(table, column))


def _rows_per_batch(table: Any, path: Path, column: str, size: int) -> int:
    rows = int(reading.BATCH_BYTES / max(1.0, size / max(1, table.metadata.num_rows)))
    with path.open("rb") as file:
        longest = max((_longest_repeated(part, file) for part in _columns_of(table, column)), default=0)
    return max(1, min(rows, _MOST_ROWS, _SPELLED_OUT_BYTES // max(1, longest)))


def _longest_repeated(part: Any, file: BinaryIO) -> int:
    """The longest text that a row group may hold once and have in every row, at most."""
    if "DELTA_BYTE_ARRAY" in part.encodings:  # each row says how much of the one before it begins with
        return int(part.total_uncompressed_size)
    start = part.data_page_offset
    if part.has_dictionary_page and 0 < (part.dictionary_page_offset or 0) < start:
        start = part.dictionary_page_offset
    file.seek(start)
    header = file.read(16)
    try:
        kind, at = _i32(header, 0)
        unpacked = _i32(header, at)[0]
    except (IndexError, ValueError):
        return int(part.total_uncompressed_size)
    return unpacked if kind == _DICTIONARY_PAGE else 0


def _i32(header: bytes, at: int) -> tuple[int, int]:
    """A field's value, and where the next field begins."""
    if header[at] != _I32_FIELD:
        raise ValueError("another field")
    value = shift = 0
    while True:
        at += 1
        value |= (header[at] & 0x7F) << shift
        shift += 7
        if header[at] < 0x80:
            return value >> 1 ^ -(value & 1), at + 1


def _bounded(array: Any) -> Iterator[Any]:
    """Rows of about a batch's bytes together: a dictionary may have hidden how long they are."""
    import pyarrow as pa

    first, size = 0, 0
    coded = pa.types.is_dictionary(array.type)
    if not coded and array.nbytes <= 2 * reading.BATCH_BYTES:
        yield array
        return
    import pyarrow.compute as pc  # takes as long as a batch

    lengths = pc.binary_length(array.dictionary).take(array.indices) if coded else pc.binary_length(array)
    for number, length in enumerate(lengths.to_pylist()):
        size += length or 0
        if size >= reading.BATCH_BYTES:
            yield array.slice(first, number + 1 - first)
            first, size = number + 1, 0
    if first < len(array):
        yield array.slice(first)


def _parquet_batch(array: Any, source: int, first_row: int) -> Batch:
    """Texts from Arrow's buffers: sizes and digests come without encoding anything again."""
    count = len(array)
    batch = Batch(end=Place(source, first_row + count))
    offset_type = np.int32 if str(array.type) == "string" else np.int64
    offsets, data = array.buffers()[1:]
    at = np.frombuffer(
        offsets, offset_type, count + 1, array.offset * np.dtype(offset_type).itemsize
    ).tolist()
    raw = memoryview(data) if data is not None else memoryview(b"")
    null = array.is_null().to_pylist() if array.null_count else None
    if null is None and 0 not in np.diff(at) and _is_utf8(array):
        return _all_well(array, raw, at, source, first_row)
    for number in range(count):
        start, stop = at[number], at[number + 1]
        if start == stop or (null is not None and null[number]):
            batch.n_empty += 1
            continue
        document, bad = repaired(bytes(raw[start:stop]))
        batch.n_bad += bad
        batch.add(document, document_digest(document), True, Place(source, first_row + number + 1))
    return batch


def _is_utf8(array: Any) -> bool:
    """A file may say that it holds text and hold anything."""
    try:
        array.validate(full=True)
    except ValueError:
        return False
    return True


def _all_well(array: Any, raw: memoryview, at: list[int], source: int, first_row: int) -> Batch:
    """Documents of rows that are all text, which is nearly always so, and much faster."""
    count = len(at) - 1
    documents = [raw[start:stop] for start, stop in itertools.pairwise(at)]
    return Batch(
        texts=array.to_pylist(),
        sizes=[len(document) for document in documents],
        digests=[document_digest(document) for document in documents],
        ends=[True] * count,
        after=[Place(source, row) for row in range(first_row + 1, first_row + count + 1)],
        empty=[0] * count,
        bad=[0] * count,
        end=Place(source, first_row + count),
        n_bytes=at[-1] - at[0],
    )
