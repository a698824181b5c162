"""Documents out of files, in batches, from any place on: what a killed prepare needs to continue.

Memory stays bounded whatever the file: large texts come in pieces, parquet in batches of one column.
One bad byte never stops a long job (it becomes a replacement mark and is counted); a file that is
not what it says stops it at once, with the place.
"""

from __future__ import annotations

import difflib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from onecard.data.prepare.sources import BadFileError, SourceFile, open_stream
from onecard.data.texts import well_formed
from onecard.language import _

# About this much text is handed on at a time: small enough for bounded memory, large enough that
# what a batch costs besides its text does not show.
BATCH_BYTES = 4 * 2**20
# Of very short documents no more than this go together, whatever their bytes.
MOST_TEXTS = 2**14
# Larger texts come in pieces of about this many bytes.
PIECE_BYTES = 4 * 2**20
# A text without any white space is cut somewhere once it is this many times a piece.
_PIECES_UNCUT = 8
_DIGEST_BYTES = 1024
DIGEST_SPAN = 2**32
_CUT = re.compile(rb"(?<=[A-Za-z0-9]) (?=[A-Za-z])|(?<=\S)\n(?=\S)")
_CUT_WINDOW = 2**16
# A line of JSON beyond this is no document but a mistake, or a bomb.
_LONGEST_LINE = 2**30
_MARK = b"\xef\xbb\xbf"  # the byte order mark that some editors begin a file with


class Place(NamedTuple):
    """How much of the sources is behind us: whole files, items of the next one, and its bytes.

    Items are rows, lines or pieces. Bytes (uncompressed) let lines and pieces be found again at once.
    """

    source: int = 0
    item: int = 0
    offset: int = 0


_START = Place()


@dataclass
class Batch:
    """Texts with all that is needed to write them, or to stop after any one of them.

    Parallel lists, not objects: there are tens of thousands of documents a second.
    """

    texts: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # UTF-8 bytes
    digests: list[int] = field(default_factory=list)  # of the whole document
    ends: list[bool] = field(default_factory=list)  # the document is complete with this text
    after: list[Place] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)  # empty documents passed over so far in this batch
    bad: list[int] = field(default_factory=list)  # replacement marks set so far in this batch
    end: Place = _START  # when all of it is done, what was passed over included
    n_empty: int = 0
    n_bad: int = 0
    n_bytes: int = 0
    characters: int = 0  # of an unfinished document, for the rule that cuts one text in two
    read: int = 0  # bytes of the files behind us, for the progress bar

    def add(self, utf8: bytes | memoryview, digest: int, ends: bool, after: Place) -> None:
        self.texts.append(str(utf8, "utf-8"))
        self.sizes.append(len(utf8))
        self.digests.append(digest)
        self.ends.append(ends)
        self.after.append(after)
        self.empty.append(self.n_empty)
        self.bad.append(self.n_bad)
        self.n_bytes += len(utf8)

    def extend(self, other: Batch) -> None:
        """What comes right after this one, in the same batch."""
        self.texts += other.texts
        self.sizes += other.sizes
        self.digests += other.digests
        self.ends += other.ends
        self.after += other.after
        self.empty += [self.n_empty + count for count in other.empty]
        self.bad += [self.n_bad + count for count in other.bad]
        self.end, self.read = other.end, other.read
        self.n_empty += other.n_empty
        self.n_bad += other.n_bad
        self.n_bytes += other.n_bytes


def document_digest(raw: bytes | memoryview) -> int:
    """CRC-32 of a document's first and last kilobyte and its length in bytes.

    It depends on nothing but the text, so equal documents fall on the same side of a split; and it
    costs the same for a long document as for a short one.
    """
    ends = zlib.crc32(raw[-_DIGEST_BYTES:], zlib.crc32(raw[:_DIGEST_BYTES]))
    return zlib.crc32(len(raw).to_bytes(8, "little"), ends)


def read_batches(file: SourceFile, column: str, start: Place, scratch: Path) -> Iterator[Batch]:
    """The documents of one file from `start` on. `scratch` may hold a temporary unpacked copy.

    `read` of each batch counts all of the file behind it. The last batch ends where the next file begins.
    """
    if file.kind == "jsonl":
        yield from _jsonl(file, column, start)
    elif file.kind == "text":
        yield from _text(file, start)
    else:
        from onecard.data.prepare.parquet import read_parquet

        yield from read_parquet(file, column, start, scratch)
    yield Batch(end=Place(start.source + 1), read=file.size)


# ---------------------------------------------------------------- text


def _text(file: SourceFile, start: Place) -> Iterator[Batch]:
    """One document. A large one comes in pieces, cut as bytes, so that each is found again by its offset."""
    with open_stream(file) as stream:
        whole = stream.read(PIECE_BYTES + 1)
        if len(whole) <= PIECE_BYTES:
            if not start.item:
                raw = whole.removeprefix(_MARK)
                yield _text_batch(file, raw, None, True, start)
            return
    digest = _stream_digest(file)
    with open_stream(file) as stream:
        skip_bytes(stream, start.offset)
        place, held, at_end = start, b"", False
        while not at_end:
            block = stream.read(PIECE_BYTES)
            at_end = not block
            held += block
            cut = len(held) if at_end else _place_to_cut(held)
            if cut or at_end:
                place = Place(place.source, place.item + 1, place.offset + cut)
                raw = held[:cut].removeprefix(_MARK) if place.item == 1 else held[:cut]
                held = held[cut:]
                # The end may come after a cut at the very end: then it is an empty piece that ends it.
                yield _text_batch(file, raw, digest, at_end, place)


def _text_batch(file: SourceFile, raw: bytes, digest: int | None, ends: bool, after: Place) -> Batch:
    batch, first = Batch(), after.item <= 1
    if ends:
        # Nothing is left of the file: going on from here must not find an empty end of it.
        after = Place(after.source + 1)
    raw, batch.n_bad = repaired(raw)
    if raw or not first:
        batch.add(raw, document_digest(raw) if digest is None else digest, ends, after)
    else:
        batch.n_empty = 1
    # With compression the bytes read are not known; the last piece says all of them.
    batch.read = file.size if ends else min(file.size, after.offset)
    batch.end = after
    return batch


def _place_to_cut(held: bytes) -> int:
    """The last place where every tokenizer here cuts anyway, seen from both sides; 0 if none is near.

    Before a single space between a letter or digit and a letter, and after a single line end between
    things that are not white. A text without any such place in _PIECES_UNCUT pieces is cut between two
    characters, which may cost a token there.
    """
    for end in range(len(held), 0, -_CUT_WINDOW):
        start = max(0, end - _CUT_WINDOW - 8)
        for match in reversed(list(_CUT.finditer(held, start, end))):
            if match[0] == b" ":
                return match.start()
            around = held[max(0, match.start() - 4) : match.start()], held[match.end() : match.end() + 4]
            before, after = (side.decode("utf-8", "ignore") for side in around)
            if before and after and not before[-1].isspace() and not after[0].isspace():
                return match.end()
    if len(held) <= _PIECES_UNCUT * PIECE_BYTES:
        return 0
    # Never inside a character: its later bytes are 10xxxxxx.
    at = len(held) - 1
    while at > len(held) - 4 and held[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _stream_digest(file: SourceFile) -> int:
    """document_digest of a text too large to hold."""
    with open_stream(file) as stream:
        head = tail = stream.read(_DIGEST_BYTES + len(_MARK)).removeprefix(_MARK)
        length = len(head)
        while block := stream.read(PIECE_BYTES):
            tail = (tail + block)[-_DIGEST_BYTES:]
            length += len(block)
    ends = zlib.crc32(tail[-_DIGEST_BYTES:], zlib.crc32(head[:_DIGEST_BYTES]))
    return zlib.crc32(length.to_bytes(8, "little"), ends)


def skip_bytes(stream: BinaryIO, count: int) -> None:
    """Go to an offset of the uncompressed bytes; gzip and zstd can only be read up to there."""
    if count and stream.seekable():
        stream.seek(count)
        return
    while count and (block := stream.read(min(count, PIECE_BYTES))):
        count -= len(block)


def decode(raw: bytes) -> tuple[str, int]:
    """The text, and how many places were not UTF-8."""
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = raw.decode("utf-8", "replace")
        return text, text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")


def repaired(raw: bytes) -> tuple[bytes, int]:
    """Valid UTF-8, and how many places were not."""
    text, bad = decode(raw)
    return (text.encode() if bad else raw), bad


# ---------------------------------------------------------------- jsonl


def _jsonl(file: SourceFile, column: str, start: Place) -> Iterator[Batch]:
    with open_stream(file) as stream:
        skip_bytes(stream, start.offset)
        batch, place = Batch(), start
        while raw := stream.readline(_LONGEST_LINE):
            if len(raw) == _LONGEST_LINE:
                raise BadFileError(
                    _("{path}, line {item:,} is longer than 1 GiB").format(
                        path=file.path, item=place.item + 1
                    )
                )
            place = Place(place.source, place.item + 1, place.offset + len(raw))
            line, bad = decode(raw)
            batch.n_bad += bad
            if place.item == 1:
                line = line.removeprefix("\ufeff")
            if line := line.strip():
                text = well_formed(_field(line, column, file.path, place.item))
                if text:
                    data = text.encode()
                    batch.add(data, document_digest(data), True, place)
                else:
                    batch.n_empty += 1
            if batch.n_bytes >= BATCH_BYTES or len(batch.sizes) >= MOST_TEXTS:
                batch.end, batch.read = place, min(place.offset, file.size)
                yield batch
                batch = Batch()
        batch.end, batch.read = place, file.size
        yield batch


def _field(line: str, column: str, path: Path, number: int) -> str:
    place = _("{path}, line {n:,}").format(path=path, n=number)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        syntax = error if isinstance(error, json.JSONDecodeError) else None
        at = _(", column {n}").format(n=syntax.colno) if syntax else ""
        raise BadFileError(
            _("{place}{at}: not JSON").format(place=place, at=at),
            f"{syntax.msg if syntax else error}: {line[:60]!r}",
            _("each line must be one object, such as {example}").format(example=f'{{"{column}": "…"}}'),
        ) from error
    if not isinstance(row, dict):
        raise BadFileError(
            _("{place}: not an object but {name}").format(place=place, name=type(row).__name__)
        )
    if column not in row:
        raise missing_column(place, column, [str(key) for key in row])
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise BadFileError(
            _("{place}: column '{column}' is not text but {name}").format(
                place=place, column=column, name=type(text).__name__
            )
        )
    return text or ""


def missing_column(place: str, column: str, there: list[str]) -> BadFileError:
    near = difflib.get_close_matches(column, there, n=1) or there[:1]
    return BadFileError(
        _("{place}: no column '{column}'").format(place=place, column=column),
        _("there are: {names}").format(names=", ".join(there)) if there else _("there are none"),
        f"--text-column {near[0]}" if near else "",
    )
