"""Whether the tokens are those that a run began with: a hash over all of them, computed while it trains.

A run keeps a mark of each split: how many tokens, and their SHA-256. Tokens that were appended since do not
change the mark of those before them. Little data is hashed before training begins; of 20 GB that takes half
a minute or so, in which training goes on and nothing is saved over what was saved before.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onecard.data.bins import TokenFile
from onecard.errors import UserError
from onecard.language import _

Mark = dict[str, Any]

_PIECE = 4 * 2**20  # tokens at a time
_AT_ONCE = 512 * 2**20  # bytes that are hashed before training begins
_OLD_MARKS = "<i8"  # how marks that do not say it had their tokens written


@dataclass
class _Split:
    """The tokens of one split, how far they are hashed, and the mark they have to match."""

    tokens: TokenFile
    known: Mark
    mark: Mark


class Identity:
    """Hashes what a run reads, in a thread of its own; `check` raises where it is not what it was."""

    def __init__(self, name: str, tokens: Mapping[str, TokenFile], known: Mapping[str, Mark]) -> None:
        """`known`: the marks of an earlier start, by split; empty where there is none yet."""
        self._name = name
        self._splits = {
            split: _Split(file, known.get(split, {}), dict(known.get(split, {})))
            for split, file in tokens.items()
        }
        self._problem: UserError | None = None
        self._stopped = threading.Event()
        self._verified = threading.Event()
        self._thread = threading.Thread(target=self._run, name="data identity", daemon=True)
        self._thread.start()
        if sum(len(file) * file.itemsize for file in tokens.values()) <= _AT_ONCE:
            self._thread.join()
        self.check()

    @property
    def is_verified(self) -> bool:
        """Is all that was known before compared?"""
        return self._verified.is_set()

    def check(self, *, wait: bool = False) -> None:
        """UserError where the data is not that of the marks, as far as that is known; `wait` until it is."""
        if wait:
            self._verified.wait()
        if self._problem is not None:
            raise self._problem

    def marks(self) -> dict[str, Mark]:
        """Marks of what is hashed by now, and of what is not verified yet the mark that there was."""
        return {name: dict(split.mark) for name, split in self._splits.items()}

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            begun = {name: self._verified_so_far(name, split) for name, split in self._splits.items()}
            self._verified.set()
            for name, split in self._splits.items():
                self._extend(split, *begun[name])
        except UserError as error:  # also a file that became shorter
            self._problem = error
        except _StoppedError:
            pass
        finally:
            self._verified.set()

    def _verified_so_far(self, name: str, split: _Split) -> tuple[Any, int]:
        """Compares with the known mark. Returns a digest to go on with, and of how many tokens it is."""
        if not split.known:
            return hashlib.sha256(), 0
        count, written = int(split.known["tokens"]), str(split.known.get("as", _OLD_MARKS))
        if count > len(split.tokens):
            raise self._other(
                name,
                _("there were {before:,} tokens, and there are {n:,}").format(
                    before=count, n=len(split.tokens)
                ),
            )
        digest = hashlib.sha256()
        same = self._hash(split.tokens, 0, count, written, digest)
        if not same or digest.hexdigest() != split.known["sha256"]:
            raise self._other(name, _("the first {n:,} tokens are not those it began with").format(n=count))
        return (digest, count) if written == split.tokens.stored_as else (hashlib.sha256(), 0)

    def _extend(self, split: _Split, digest: Any, begin: int) -> None:
        """The mark of all there is, a piece at a time: a checkpoint in between has the mark of a part."""
        written, covered = split.tokens.stored_as, int(split.known.get("tokens", 0))
        for start in range(begin, len(split.tokens), _PIECE):
            stop = min(start + _PIECE, len(split.tokens))
            self._hash(split.tokens, start, stop, written, digest)
            if stop >= covered:
                split.mark = {"tokens": stop, "sha256": digest.hexdigest(), "as": written}

    def _hash(self, tokens: TokenFile, start: int, stop: int, written: str, digest: Any) -> bool:
        """False where a token cannot be written that way, and so was not."""
        for at in range(start, stop, _PIECE):
            for piece_N in tokens.stored(at, min(at + _PIECE, stop)):
                if self._stopped.is_set():
                    raise _StoppedError
                as_written_N = piece_N.astype(written, copy=False)
                if as_written_N.dtype.itemsize < piece_N.dtype.itemsize and np.any(as_written_N != piece_N):
                    return False
                digest.update(as_written_N.data)
        return True

    def _other(self, split: str, why: str) -> UserError:
        kind = _("training: {why}") if split == "train" else _("validation: {why}")
        return UserError(
            _("{name} is not the data this run began with").format(name=self._name),
            kind.format(why=why)
            + ";\n"
            + _("the model would go on with other text, or with ids that mean something else"),
            _("prepare the same data again, start over with --fresh, or go on with this as other data:")
            + "\n"
            + _("rename its folder, and --init_from=resume --dataset=ITS-NEW-NAME"),
        )


class _StoppedError(Exception):
    pass
