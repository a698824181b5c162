"""Reading token files: nanoGPT's headerless bins and llm.c's shards, as they lie on disk.

A `TokenFile` is one long row of tokens, however many files it is spread over. It is mapped, not
loaded, and may grow while a run reads it (`refresh` looks again).
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onecard.config.vocabulary import DataRecipe
from onecard.data.meta import (
    Split,
    counted_while_growing,
    later_shards,
    read_meta,
    split_files,
)
from onecard.data.missing import missing_data
from onecard.data.shards import layout
from onecard.errors import UserError
from onecard.files import open_plain
from onecard.language import _

# What is looked at before a run starts; the rest is checked batch by batch as it is read.
SCAN_BYTES = 64 * 2**20
_SCAN_WINDOW_BYTES = 2**20
_LOOK = 4096  # tokens


class _Part:
    """One mapped file and where its tokens begin."""

    def __init__(
        self, path: Path, dtype: np.dtype[Any], growing: bool = False, limit: int | None = None
    ) -> None:
        """`limit`: how many of its tokens count, where prepare is appending more."""
        self.path = path
        try:
            self._file: BinaryIO = open_plain(path)
        except OSError as error:
            raise UserError(
                _("cannot read {path}").format(path=path), str(error.strerror or error)
            ) from error
        n_bytes = os.fstat(self._file.fileno()).st_size
        if growing:
            # Whoever appends may be in the middle of a token.
            n_bytes -= n_bytes % dtype.itemsize
        if n_bytes == 0:
            raise UserError(
                _("{path} is empty").format(path=path),
                hint=_("prepare the data again: onecard prepare PATH --force"),
            )
        offset, count, dtype = layout(path, self._file.read(12), n_bytes, dtype)
        if limit is not None:
            count = min(count, limit)
        # A map of exactly what is there now: a file that grows is mapped anew by refresh().
        self._map = mmap.mmap(self._file.fileno(), n_bytes, access=mmap.ACCESS_READ)
        self._needed_bytes = offset + count * dtype.itemsize
        self.tokens_N: NDArray[Any] = np.frombuffer(self._map, dtype, count, offset)

    def continues(self, before: _Part) -> bool:
        """Does this file begin with what that one holds? Both ends and the middle are compared."""
        ours_N, theirs_N = self.tokens_N, before.tokens_N
        count = len(theirs_N)
        if len(ours_N) < count or ours_N.dtype != theirs_N.dtype:
            return False
        before.check_not_truncated()
        looks = [slice(at, min(at + _LOOK, count)) for at in (0, count // 2, max(0, count - _LOOK))]
        return all(np.array_equal(ours_N[look], theirs_N[look]) for look in looks)

    def check_not_truncated(self) -> None:
        """Reading a map past the end of its file kills the process: look before every read."""
        if os.fstat(self._file.fileno()).st_size < self._needed_bytes:
            raise _changed(self.path)

    def close(self) -> None:
        self._file.close()
        # The map itself goes with the last array that looks into it.


class TokenFile:
    """A read-only row of token ids over one or several files."""

    def __init__(
        self,
        paths: list[Path],
        dtype: np.dtype[Any],
        vocab_size: int | None = None,
        split: Split | None = None,
    ) -> None:
        """`split`: of a dataset whose meta.json says how many tokens count while more are appended."""
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._split = split
        self._map(paths)

    @classmethod
    def open(
        cls, path: Path | str, dtype: str | np.dtype[Any] = "uint16", vocab_size: int | None = None
    ) -> TokenFile:
        """The tokens of one file: nanoGPT's format in the given dtype, or a shard with llm.c's header."""
        return cls([Path(path)], np.dtype(dtype).newbyteorder("<"), vocab_size)

    def _map(self, paths: list[Path], growing: bool = False) -> None:
        while True:
            limit = counted_while_growing(paths[0].parent, self._split) if self._split else None
            parts = [_Part(path, self._dtype, growing or limit is not None, limit) for path in paths]
            # prepare may have begun or ended between the look and the mapping.
            if not self._split or limit == counted_while_growing(paths[0].parent, self._split):
                break
            for part in parts:
                part.close()
        self._parts = parts
        self._ends = list(np.cumsum([len(part.tokens_N) for part in self._parts], dtype=np.int64).tolist())

    @property
    def path(self) -> Path:
        return self._parts[0].path

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def itemsize(self) -> int:
        return int(self._parts[0].tokens_N.dtype.itemsize)

    @property
    def stored_as(self) -> str:
        """How a token is written: `<u2` or `<u4`."""
        return str(self._parts[0].tokens_N.dtype.str)

    def stored(self, start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Tokens as they lie in the files, without a copy: a piece for each file they are in."""
        before = 0
        for part, end in zip(self._parts, self._ends, strict=True):
            if start < end and before < stop:
                part.check_not_truncated()
                yield part.tokens_N[max(start - before, 0) : stop - before]
            before = end

    def refresh(self) -> int:
        """Look again, so that what was appended or renamed into place is seen. The new length.

        What is there only in part (a download), or is other data than was there, is left out: a run that has
        all its tokens goes on with them.
        """
        old, ends = self._parts, self._ends
        present = [part.path for part in old if part.path.exists()]
        if len(present) < len(old):
            return len(self)  # a file removed under the run stays readable through its map
        later = later_shards(present[-1])
        for count in range(len(later), -1, -1):
            try:
                self._map([*present, *later[:count]], growing=True)
                self._check_since(old)
            except UserError:
                self._parts, self._ends = old, ends
                continue
            for part in old:
                part.close()
            break
        return len(self)

    def _check_since(self, old: list[_Part]) -> None:
        """Refuses a file that is not what was there, and more that can be trained on."""
        for before, now in zip(old, self._parts, strict=False):
            if not now.continues(before):
                raise _changed(now.path)
        if self._vocab_size is not None:
            for number in range(len(old), len(self._parts)):
                self._check_part(number, self._vocab_size, SCAN_BYTES)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        row_L: NDArray[np.int64] = self.gather([start], stop - start)[0]
        return row_L

    def gather(self, positions: ArrayLike, length: int) -> NDArray[np.int64]:
        """Rows of `length` tokens beginning at each position: [B, length]."""
        position_B = np.asarray(positions, dtype=np.int64)
        tokens_BL = np.empty((len(position_B), length), dtype=np.int64)
        for part in self._parts:
            part.check_not_truncated()
        for row, position in enumerate(position_B.tolist()):
            self._copy(position, tokens_BL[row])
        if self._vocab_size is not None and tokens_BL.size and int(tokens_BL.max()) >= self._vocab_size:
            row, column = np.argwhere(tokens_BL >= self._vocab_size)[0]
            raise self._out_of_vocabulary(int(tokens_BL[row, column]), int(position_B[row] + column))
        return tokens_BL

    def _copy(self, start: int, into_L: NDArray[np.int64]) -> None:
        """Copy from `start`, across file ends where need be."""
        stop = start + len(into_L)
        if start < 0 or stop > len(self):
            raise IndexError(f"tokens {start}..{stop} of {len(self)}")
        done = 0
        number = bisect.bisect_right(self._ends, start)
        while done < len(into_L):
            part_start = self._ends[number - 1] if number else 0
            piece = self._parts[number].tokens_N[start + done - part_start : stop - part_start]
            into_L[done : done + len(piece)] = piece
            done += len(piece)
            number += 1

    def check_ids(self, vocab_size: int, scan_bytes: int = SCAN_BYTES) -> None:
        """Look for an id the model has no embedding for, in evenly spread windows of at most `scan_bytes`."""
        self._vocab_size = vocab_size
        for number in range(len(self._parts)):
            self._check_part(number, vocab_size, scan_bytes)

    def _check_part(self, number: int, vocab_size: int, scan_bytes: int) -> None:
        tokens_N, before = self._parts[number].tokens_N, self._ends[number - 1] if number else 0
        if vocab_size > np.iinfo(tokens_N.dtype).max:
            return
        share = max(1, scan_bytes * len(tokens_N) // max(1, len(self)))
        for start, stop in _windows(len(tokens_N), tokens_N.dtype.itemsize, share):
            window_W = tokens_N[start:stop]
            if int(window_W.max()) >= vocab_size:
                at = int(np.argmax(window_W >= vocab_size))
                raise self._out_of_vocabulary(int(window_W[at]), before + start + at)

    def _out_of_vocabulary(self, token: int, position: int) -> UserError:
        number = bisect.bisect_right(self._ends, position)
        return UserError(
            _(
                "{path} holds token id {token:,} at position {position:,}, "
                "but the model has {vocab_size:,} tokens"
            ).format(
                path=self._parts[number].path, token=token, position=position, vocab_size=self._vocab_size
            ),
            _("the data was written with another tokenizer, or with another number format"),
            _("--vocab_size={n} or more, or prepare the data again").format(n=-(-(token + 1) // 64) * 64),
        )


def _windows(n_tokens: int, itemsize: int, scan_bytes: int) -> list[tuple[int, int]]:
    """Everything when it is small, else windows from the first token to the last, evenly spread."""
    if n_tokens * itemsize <= scan_bytes:
        width, count = _SCAN_WINDOW_BYTES // itemsize, -(-n_tokens * itemsize // _SCAN_WINDOW_BYTES)
        return [(number * width, min(n_tokens, (number + 1) * width)) for number in range(count)]
    width = min(_SCAN_WINDOW_BYTES, scan_bytes) // itemsize
    count = max(2, scan_bytes // (width * itemsize))
    starts = np.linspace(0, n_tokens - width, count).astype(np.int64).tolist()
    return [(start, start + width) for start in starts]


def _changed(path: Path) -> UserError:
    return UserError(
        _("{path} became shorter while a run was using it").format(path=path),
        _("the present epoch counts on tokens that are no longer there"),
        _("restore the file, or start a new run on the changed data with another --out_dir"),
    )


def changed_under_run(tokens: object, have: int, need: int) -> UserError:
    """The error for a state that remembers more tokens than the data now has."""
    path = getattr(tokens, "path", _("the token file"))
    error = _changed(Path(path))
    covers = _("the present epoch covers {need:,} tokens, the file has {have:,}")
    error.why = covers.format(need=need, have=have)
    return error


def open_split(
    data_dir: Path | str, split: Split, block_size: int, vocab_size: int, recipe: DataRecipe | None = None
) -> TokenFile:
    """The tokens of one split, checked for everything that would otherwise fail hours later.

    `recipe`: how to prepare some where there are none.
    """
    data_dir = Path(data_dir)
    paths = split_files(data_dir, split) if data_dir.is_dir() else []
    if not paths:
        raise missing_data(data_dir, split, recipe or DataRecipe())
    meta = read_meta(data_dir)
    dtype = str(meta.get("dtype", "uint16")) if meta else "uint16"
    if dtype not in ("uint16", "uint32"):
        raise UserError(
            _("{path} says dtype {dtype!r}; known are uint16 and uint32").format(
                path=data_dir / "meta.json", dtype=dtype
            )
        )
    tokens = TokenFile(paths, np.dtype(dtype).newbyteorder("<"), split=split)
    _check_against_meta(tokens, meta, split)
    if len(tokens) < block_size + 1:
        largest = len(tokens) - 1
        raise UserError(
            _("{path} is too short for block_size {block_size}").format(
                path=tokens.path, block_size=block_size
            ),
            _("it has {n:,} tokens; one block needs {block_size:,} (the last is only a target)").format(
                n=len(tokens), block_size=block_size + 1
            ),
            _("--block_size={n}, or prepare more text").format(n=1 << (largest.bit_length() - 1))
            if largest >= 1
            else _("prepare more text"),
        )
    tokens.check_ids(vocab_size)
    return tokens


def _check_against_meta(tokens: TokenFile, meta: dict[str, Any] | None, split: Split) -> None:
    """A prepare killed between its renames leaves new bins with an old meta.json, which is noticed here."""
    try:
        expected = (meta["splits"] or {}).get(split, {}).get("tokens") if meta and "splits" in meta else None
    except AttributeError:
        expected = None
    if isinstance(expected, int) and expected != len(tokens):
        raise UserError(
            _("{path} does not belong to the meta.json in its folder").format(path=tokens.path),
            _("meta.json counts {expected:,} tokens, the file has {n:,}").format(
                expected=expected, n=len(tokens)
            ),
            _("prepare the data again with --force"),
        )
