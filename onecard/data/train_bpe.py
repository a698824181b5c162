"""A byte-pair encoding learnt from the text itself: `prepare --train-tokenizer N`.

rustbpe counts and merges. The same documents give the same merges, in any order and on any number of
cores: counts are whole numbers, and of equally frequent pairs the one with the lower ids comes first.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecard.data.bpe import WHITE_RUN_WITHOUT_NEWLINES, BpeTokenizer, Pretokens, merge_bytes
from onecard.data.texts import well_formed
from onecard.data.tokenizer import EOT_TEXT
from onecard.errors import UserError, missing_package
from onecard.language import _

# GPT-4's cut: contractions in either case, words with at most one sign in front, up to three digits,
# signs with the newlines behind them, white space up to its last newline. Encoders know this very
# spelling: fastokens has a fast and exact path for it, and neither with at most two digits.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The document separator, then marks that only chat tuning uses; they wait at the end of the vocabulary.
SPECIALS = (
    EOT_TEXT,
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
MIN_VOCAB = 512
MAX_VOCAB = 2**17
# More text hardly helps: 32,768 tokens learnt from 50 MB of English cover 4.459 bytes each on held-out
# text, from 100 MB 4.473, from 137 MB 4.478. The rest is for mixed languages; memory grows with the
# number of different words, and rustbpe's counts would overflow at 2^31.
MAX_TRAINING_BYTES = 300_000_000

# What rustbpe gets at a time. It copies a buffer of texts before it counts them, so neither a
# text nor a buffer may be as large as a book.
_PIECE = 2**16
_PIECES_IN_BUFFER = 128
# A "word" of a megabyte (a run of spaces, a base64 blob) overflows the stack of the regular expressions
# or makes every merge scan all of it. Nothing can be learnt from more than this of it in one go.
_WINDOW = 1024
# Of all tokens together. 32,768 tokens of English have 0.2 MB; a doubling at each merge would have no end.
_MAX_TOKEN_BYTES = 2**28
# onecard writes nine of up to 19 characters; more may come with a later version.
_MOST_SPECIALS, _LONGEST_SPECIAL = 256, 128
_UNBROKEN = [re.compile(pattern) for pattern in (r"\s+", r"[^\W_]+", r"(?:[^\w\s]|_)+")]


class TrainedBpe(BpeTokenizer):
    """Ids 0..255 are the bytes, then the merges in the order they were learnt, then the special tokens."""

    name = "bpe"

    def __init__(self, pairs_M2: NDArray[np.int64], specials: tuple[str, ...] = SPECIALS) -> None:
        """pairs_M2: the two ids each merge joins."""
        self._pairs_M2 = pairs_M2
        tokens = _tokens(pairs_M2)
        super().__init__(
            [(tokens[left], tokens[right]) for left, right in pairs_M2.tolist()],
            Pretokens(PATTERN, white=WHITE_RUN_WITHOUT_NEWLINES),
            _hash(_packed(pairs_M2), PATTERN, specials),
            specials,
        )

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "pattern": PATTERN,
            "specials": list(self.specials),
            "merges": _packed(self._pairs_M2),
        }

    @classmethod
    def of_facts(cls, facts: dict[str, Any]) -> TrainedBpe:
        packed, pattern, specials = facts.get("merges"), facts.get("pattern"), facts.get("specials")
        if not isinstance(packed, str) or not isinstance(pattern, str) or not isinstance(specials, list):
            raise _damaged(_("its merges, pattern or special tokens are missing"))
        if not all(isinstance(text, str) for text in specials) or specials[:1] != [EOT_TEXT]:
            raise _damaged(_("its first special token is not {text}").format(text=EOT_TEXT))
        if facts.get("hash") != _hash(packed, pattern, specials):
            raise _damaged(_("its contents do not match its hash"))
        # The hash speaks against accidents. Facts also come with checkpoints of strangers, so nothing
        # that could hang or fill the memory is taken on trust.
        if pattern != PATTERN:
            raise UserError(
                _("the saved tokenizer cuts text in a way this onecard does not know"),
                _("its pattern is {pattern}").format(pattern=pattern[:200]),
                _("use the onecard that wrote it, or prepare the data again"),
            )
        _check_specials(specials)
        if len(packed) > 8 * MAX_VOCAB:
            raise _damaged(_("it has more than {most:,} tokens").format(most=MAX_VOCAB))
        pairs_M2 = _unpacked(packed)
        _check_pairs(pairs_M2, specials)
        tokenizer = cls(pairs_M2, tuple(specials))
        if (facts.get("n_vocab"), facts.get("eot")) != (tokenizer.n_vocab, tokenizer.eot):
            raise _damaged(
                _("it has {ours} tokens, not {n}").format(ours=tokenizer.n_vocab, n=facts.get("n_vocab"))
            )
        return tokenizer


def train_bpe(
    texts: Iterable[str],
    n_vocab: int,
    progress: Callable[[int], None] | None = None,
    max_bytes: int = MAX_TRAINING_BYTES,
) -> TrainedBpe:
    """The best merges for these texts, `n_vocab` tokens in all with the bytes and the special tokens.

    progress: called with how many bytes have been read. Reading stops at max_bytes.
    """
    if not MIN_VOCAB <= n_vocab <= MAX_VOCAB:
        raise UserError(
            _("a vocabulary of {n_vocab:,} tokens cannot be trained").format(n_vocab=n_vocab),
            _("it must have between {least:,} and {most:,}").format(least=MIN_VOCAB, most=MAX_VOCAB),
            _("--train-tokenizer=32768 suits most models"),
        )
    try:
        rustbpe: Any = importlib.import_module("rustbpe")
    except ImportError as error:
        raise missing_package("rustbpe", "train", _("training a tokenizer")) from error
    n_learnt = n_vocab - len(SPECIALS)
    trainer = rustbpe.Tokenizer()
    pieces = _pieces(texts, max_bytes, progress)
    trainer.train_from_iterator(pieces, n_learnt, buffer_size=_PIECES_IN_BUFFER, pattern=PATTERN)
    tokens = {bytes(token): number for token, number in trainer.get_mergeable_ranks()}
    if len(tokens) < n_learnt:
        raise _too_small(n_vocab, len(tokens) + len(SPECIALS))
    return TrainedBpe(_pairs(tokens))


def _pieces(texts: Iterable[str], max_bytes: int, progress: Callable[[int], None] | None) -> Iterator[str]:
    n_bytes = 0
    for text in texts:
        for piece in _cut(well_formed(text)):
            yield piece
            n_bytes += len(piece.encode("utf-8"))
            if n_bytes >= max_bytes:
                break
        if progress is not None:
            progress(n_bytes)
        if n_bytes >= max_bytes:
            return


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most about _PIECE characters, none with an endless word in it.

    Where a cut falls depends on the text alone. A word cut in two every so often changes no merge.
    """
    start = 0
    for at in range(0, len(text) - _WINDOW, _WINDOW):
        end = at + _WINDOW
        if end - start >= _PIECE or any(kind.fullmatch(text, at, end) for kind in _UNBROKEN):
            yield text[start:end]
            start = end
    yield text[start:]


def _pairs(tokens: dict[bytes, int]) -> NDArray[np.int64]:
    """Which two tokens each merge joined: merging a token by the merges before it leaves those two."""
    pairs = []
    for token, number in tokens.items():
        if number < 256:
            continue
        parts = merge_bytes(token, tokens, below=number)
        assert len(parts) == 2, f"merge {number} joins {len(parts)} tokens"
        pairs.append(parts)
    return np.array(pairs, np.int64).reshape(-1, 2)


def _tokens(pairs_M2: NDArray[np.int64]) -> list[bytes]:
    tokens = [bytes((byte,)) for byte in range(256)]
    for left, right in pairs_M2.tolist():
        tokens.append(tokens[left] + tokens[right])
    return tokens


def _check_specials(specials: list[str]) -> None:
    """Encoders look for all of them at once, in an expression made of their texts."""
    if len(specials) > _MOST_SPECIALS:
        raise _damaged(
            _("it has {n:,} special tokens, more than {most:,}").format(n=len(specials), most=_MOST_SPECIALS)
        )
    if len(set(specials)) < len(specials):
        raise _damaged(_("a special token is there twice"))
    for text in specials:
        if not 0 < len(text) <= _LONGEST_SPECIAL:
            raise _damaged(
                _("a special token has {n:,} characters, not 1 to {most}").format(
                    n=len(text), most=_LONGEST_SPECIAL
                )
            )
        if well_formed(text) != text:
            raise _damaged(_("a special token is no text that UTF-8 can write"))


def _check_pairs(pairs_M2: NDArray[np.int64], specials: list[str]) -> None:
    """Each merge joins two earlier tokens into a new one, and all of them together are of bearable size."""
    if (pairs_M2.max(axis=1, initial=0) >= 256 + np.arange(len(pairs_M2))).any():
        raise _damaged(_("a merge joins tokens that come after it"))
    lengths = [1] * 256
    total = 0
    for left, right in pairs_M2.tolist():
        lengths.append(lengths[left] + lengths[right])
        total += lengths[-1]
        if total > _MAX_TOKEN_BYTES:
            raise _damaged(
                _("its tokens have more than {MAX_TOKEN_BYTES:,} bytes").format(
                    MAX_TOKEN_BYTES=_MAX_TOKEN_BYTES
                )
            )
    tokens = set(_tokens(pairs_M2))
    if len(tokens) < len(lengths):
        raise _damaged(_("two merges give the same token"))
    if any(text.encode() in tokens for text in specials):
        raise _damaged(_("a special token is an ordinary one too"))


def _packed(pairs_M2: NDArray[np.int64]) -> str:
    """Eight characters a merge: each id in three bytes, lowest first, as base64."""
    three_bytes = pairs_M2.astype("<u4").reshape(-1, 1).view(np.uint8)[:, :3]
    return base64.b64encode(three_bytes.tobytes()).decode("ascii")


def _unpacked(packed: str) -> NDArray[np.int64]:
    try:
        content = base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _damaged(_("its merges: {error}").format(error=error)) from error
    if len(content) % 6:
        raise _damaged(_("its merges are cut off"))
    three_bytes = np.frombuffer(content, np.uint8).reshape(-1, 3).astype(np.int64)
    return (three_bytes @ np.array([1, 2**8, 2**16])).reshape(-1, 2)


def _hash(packed: str, pattern: str, specials: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps([packed, pattern, *specials]).encode()).hexdigest()


def _damaged(why: str) -> UserError:
    return UserError(_("the saved tokenizer is damaged"), why, _("prepare the data again"))


def _too_small(n_vocab: int, possible: int) -> UserError:
    return UserError(
        _("the text is too small to learn a vocabulary of {n_vocab:,} tokens").format(n_vocab=n_vocab),
        _("it has enough for {possible:,}").format(possible=possible),
        _("--train-tokenizer={possible} at most, or more text").format(possible=possible)
        if possible >= MIN_VOCAB
        else _("more text, or --tokenizer=byte"),
    )
