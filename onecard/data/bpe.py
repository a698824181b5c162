"""Byte-level byte-pair encoding: given the merges, text to ids and back.

Two libraries do the work. tiktoken is the reference: it loads fast and encodes single texts.
fastokens encodes many texts an order of magnitude faster; before it is trusted it has to agree with
tiktoken on a set of awkward strings, and if it ever does not, tiktoken does everything.
"""

from __future__ import annotations

import heapq
import importlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecard.data.texts import well_formed
from onecard.data.tokenizer import EOT_TEXT, Tokenizer, in_one_row
from onecard.errors import missing_package
from onecard.language import _

# Unicode White_Space, which is what \s means to both libraries (Python's own \s has four more).
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
WHITE_RUN = f"[{_WHITE}]"
WHITE_RUN_WITHOUT_NEWLINES = f"(?![\\r\\n])[{_WHITE}]"
# tiktoken's regular expressions overflow their stack somewhere above 256,000 white characters in a
# row. Longer runs than this are taken apart here.
_LONG_RUN = 100_000

# In files of merges a byte is a printable character: itself where it is one, else one from U+0100 on.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
GPT2_BYTE_ORDER = (*_PRINTABLE, *_OTHERS)
_WRITTEN = {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
_READ = {ord(character): byte for byte, character in _WRITTEN.items()}

# Where encoders have been seen to differ, or could: contractions and what folds to their letters,
# joiners, marks, controls, white space of every kind, letters of the newest Unicode versions,
# special tokens as plain text, and pieces long enough for another merging algorithm.
_PROBES = (
    "",
    " ",
    "it's IT'S we'll WE'LL I've you'Re they'd 'sbc ''s -'s x'ſ y'ſt k'\u212a's9'd\u00b2'd",
    "tabs\tand  two   three \n\n newlines\r\n\r\n  \n x\n\n\n  y \u3000\u3000z\xa0\xa0w\u2028 \u2029v  ",
    "signs!!!\n\n\n ...\r\n?!\n ==\t== a_b __c__ (d) «e» \u2019s \u201cf\u201d --\n\n\tg",
    "1 12 123 1234 12345678 ١٢٣٤ Ⅷ ½ ²³ x1y22z333 3.14159 1,000,000 0x1F 𝟘𝟙𝟚𝟛",
    "naïve cafe\u0301 ÅÄÖ ǅ ß İi̇ 你好，世界。 ひらがなカタカナ 한국어 ภาษาไทย हिन्दी עִבְרִית العربية",
    "🙂🏳️‍🌈👩‍👩‍👧‍👦🇪🇺 \u200b\u200c\u200d\u2060\ufeff\ufffd \x00\x01\x1c\x1d\x1e\x1f\x7f\x80\x85\x9f",
    "\ua7cb\ua7da\u1c89 \U00010d4a\U00016ea0 \u0378'd \U0001ccf0 \U000105c0 \U000e0001 \U0010ffff 1\u0cf3",
    "<|endoftext|> <|user_start|>x<|assistant_end|> <|endoftext|><|endoftext|>",
    "    def f(x):\n        return x ** 2  # 'quoted' \"text\"\n\n\n    \n",
    "ab" * 300 + " " * 300 + "\n" * 300 + "=" * 300 + "7" * 300 + " the of and" * 30 + "é" * 100,
)


@dataclass(frozen=True)
class Pretokens:
    """How text is cut before merging. The ids depend on it to the letter."""

    pattern: str
    # One character of the runs of white space in front of which the pattern always cuts, and of which
    # it gives the last character to what follows. Runs that newlines follow are not cut apart.
    white: str
    # GPT-2's cut has a name of its own in tokenizer.json, and encoders have a fast path for it.
    is_gpt2: bool = False


class BpeTokenizer(Tokenizer):
    """256 bytes, one token per merge, then the special tokens; `<|endoftext|>` is the first of those."""

    # Why fastokens is installed but not used; empty where all is well.
    bulk_note: str = ""

    def __init__(
        self,
        merges: Iterable[tuple[bytes, bytes]],
        pretokens: Pretokens,
        hash: str,
        specials: Sequence[str] = (EOT_TEXT,),
        byte_order: Iterable[int] = range(256),
    ) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise missing_package(
                "tiktoken", "train", _("the tokenizer {name}").format(name=self.name)
            ) from error
        assert specials[0] == EOT_TEXT
        self._merges = list(merges)
        self._pretokens = pretokens
        self._rank = {bytes((byte,)): number for number, byte in enumerate(byte_order)}
        for left, right in self._merges:
            self._rank[left + right] = len(self._rank)
        self.eot: int = len(self._rank)
        self.specials = {text: self.eot + n for n, text in enumerate(specials)}
        self.n_vocab = self.eot + len(specials)
        self.hash = hash
        self._bytes = [*self._rank, *(text.encode() for text in specials)]
        self._encoding: Any = tiktoken.Encoding(
            self.name,
            pat_str=pretokens.pattern,
            mergeable_ranks=self._rank,
            special_tokens=self.specials,
        )
        self._fast: Any = None
        self._fast_was_tried = False
        # prepare encodes in several threads; the second must wait for the first's load, not go without.
        self._loading = threading.Lock()

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        text = well_formed(text)
        parts: list[NDArray[np.uint32]] = []
        done = 0
        for start, stop in _long_runs(text, self._pretokens.white):
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

    def encode_batch(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Without Python's lock for most of the time: calls in several threads run side by side."""
        fast = self._fast_encoder()
        return super().encode_batch(texts) if fast is None else _flat(fast, texts)

    def _fast_encoder(self) -> Any:
        """fastokens with these merges; None where it is missing or cannot be trusted."""
        with self._loading:
            if not self._fast_was_tried:
                self._fast = self._load_fast()
                self._fast_was_tried = True
        return self._fast

    def _load_fast(self) -> Any:
        # Its own threads wait for each other at the end of a call; whole calls side by side (prepare) do not.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        try:
            fastokens = importlib.import_module("fastokens")
        except ImportError:
            self.bulk_note = _("fastokens is not installed: tiktoken encodes, about ten times slower")
            return None
        try:
            fast = fastokens.Tokenizer.from_json_str(self.tokenizer_json())
            ids_N, offsets = _flat(fast, list(_PROBES))
        # Whatever a future version may do: tiktoken can still encode.
        except Exception as error:
            failed = _("fastokens failed ({error}); tiktoken encodes instead, more slowly")
            self.bulk_note = failed.format(error=error)
            return None
        right_N, right_offsets = in_one_row([self.encode_array(text) for text in _PROBES])
        if not (np.array_equal(ids_N, right_N) and np.array_equal(offsets, right_offsets)):
            self.bulk_note = _("fastokens gave wrong tokens in a check; tiktoken encodes, more slowly")
            return None
        return fast

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes[token] if token < self.n_vocab else "\ufffd".encode() for token in ids)

    def _text_lengths(self) -> list[int]:
        return [len(token) for token in self._rank]

    def tokenizer_json(self) -> str:
        """This tokenizer as Hugging Face's tokenizer.json."""
        is_gpt2 = self._pretokens.is_gpt2
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        split = {
            "type": "Split",
            "pattern": {"Regex": self._pretokens.pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        cut: dict[str, Any] = {**byte_level, "use_regex": is_gpt2}
        how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": number, "content": text, **how} for text, number in self.specials.items()
            ],
            "normalizer": None,
            "pre_tokenizer": cut if is_gpt2 else {"type": "Sequence", "pretokenizers": [split, cut]},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {written(token): number for token, number in self._rank.items()} | self.specials,
                # Each as one string: half the size of a list of pairs, and read by every version.
                "merges": [f"{written(left)} {written(right)}" for left, right in self._merges],
            },
        }
        return json.dumps(content, ensure_ascii=False)


def _flat(fast: Any, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    ids, offsets = fast.encode_batch_flat(texts, split_special_tokens=True)
    return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64)


def written(token: bytes) -> str:
    """A token as merges files spell it."""
    return token.decode("latin-1").translate(_WRITTEN)


def read_merges(text: str) -> list[tuple[bytes, bytes]]:
    """The pairs of a merges file, in its order."""
    pairs = [line.partition(" ") for line in text.splitlines() if not line.startswith("#version")]
    return [(_bytes_of(left), _bytes_of(right)) for left, space, right in pairs if space]


def _bytes_of(spelled: str) -> bytes:
    return spelled.translate(_READ).encode("latin-1")


def _long_runs(text: str, white: str) -> Iterator[tuple[int, int]]:
    """Start and end of each run of at least _LONG_RUN white characters that tiktoken cannot take.

    Such a run covers some window of half its length that begins at a multiple of that length, so
    only one look per window is needed: in ordinary text it ends at the first letter.
    """
    window = _LONG_RUN // 2
    if len(text) < window:
        return
    not_white = re.compile(f"(?!{white})[\\s\\S]")
    any_white = re.compile(WHITE_RUN)
    position = 0
    while position + window <= len(text):
        if not_white.search(text, position, position + window):
            position += window
            continue
        start = position
        while start and not not_white.match(text, start - 1):
            start -= 1
        ends = not_white.search(text, position)
        stop = ends.start() if ends else len(text)
        if stop - start >= _LONG_RUN and not any_white.match(text, stop):
            yield start, stop
        position = -(-stop // window) * window


def merge_bytes(piece: bytes, rank: dict[bytes, int], below: int | None = None) -> list[int]:
    """Byte-pair merging of one piece in n log n: the lowest rank first, of equal ones the leftmost.

    below: use only the merges of lower rank than this.
    """
    size = len(piece)
    limit = len(rank) if below is None else below
    part = [piece[at : at + 1] for at in range(size)]  # b"" once merged into the one on its left
    following = list(range(1, size + 1))
    preceding = list(range(-1, size - 1))

    def rank_at(at: int) -> int | None:
        after = following[at]
        found = rank.get(part[at] + part[after]) if after < size else None
        return found if found is not None and found < limit else None

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
