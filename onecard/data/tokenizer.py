"""Text to token ids and back: GPT-2's BPE, one learnt from the text, bytes, or the text's characters.

A tokenizer describes itself in `facts()`, which is what meta.json and checkpoints keep; from these
facts alone `from_facts` builds the same one again.
"""

from __future__ import annotations

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from onecard.config.dataset import character_table
from onecard.data.meta import read_meta
from onecard.data.texts import well_formed
from onecard.errors import UserError
from onecard.language import _

EOT_TEXT = "<|endoftext|>"
NAMES = ("gpt2", "byte", "char")

_LONGEST_NAME = 40


class Tokenizer(ABC):
    """What every tokenizer can do. `n_vocab` counts ids that mean something, without any padding."""

    name: ClassVar[str]
    n_vocab: int
    eot: int | None
    hash: str

    @abstractmethod
    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """Ids of `text`; strings that look like special tokens are plain text."""

    def encode_batch(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids of all texts in one row, and where each begins: text n's are ids[offsets[n]:offsets[n + 1]].

        The texts are well-formed (texts.py).
        """
        return in_one_row([self.encode_array(text) for text in texts])

    @abstractmethod
    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8 of the ids; one that means nothing (a padded vocabulary's) becomes a replacement mark."""

    @abstractmethod
    def _text_lengths(self) -> list[int]:
        """Bytes of UTF-8 that each id stands for, from 0 on; none for special tokens."""

    def token_bytes(self, n_ids: int) -> NDArray[np.int64]:
        """Bytes of text of each id below `n_ids`: 0 for special tokens and a padded vocabulary's ids."""
        bytes_V = np.zeros(n_ids, np.int64)
        lengths = self._text_lengths()[:n_ids]
        bytes_V[: len(lengths)] = lengths
        return bytes_V

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt, in which `<|endoftext|>` stands for the end-of-text id, where there is one."""
        if self.eot is None:
            return self.encode(text)
        first, *rest = text.split(EOT_TEXT)
        ids = self.encode(first)
        for part in rest:
            ids += [self.eot, *self.encode(part)]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids. Bytes that are no UTF-8 (half a character) show as the replacement mark."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "hash": self.hash, "n_vocab": self.n_vocab, "eot": self.eot}


class StreamDecoder:
    """Text token by token: a character is given out when its last byte has come, never in halves."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """What was still held back: a replacement mark if the last character never became whole."""
        return self._decoder.decode(b"", final=True)


def in_one_row(parts: list[NDArray[np.uint32]]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The parts end to end, and where each begins, with the end of the last."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part_N) for part_N in parts], out=offsets[1:])
    return (np.concatenate(parts) if parts else np.empty(0, np.uint32)), offsets


class ByteTokenizer(Tokenizer):
    """Every byte of the UTF-8 text is a token; 256 ends a text."""

    name = "byte"

    def __init__(self) -> None:
        self.n_vocab = 257
        self.eot = 256
        self.hash = hashlib.sha256(b"bytes 0..255, end of text 256").hexdigest()

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        return np.frombuffer(well_formed(text).encode("utf-8"), np.uint8).astype(np.uint32)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes_of(token) for token in ids)

    def _text_lengths(self) -> list[int]:
        return [1] * 256

    @staticmethod
    def _bytes_of(token: int) -> bytes:
        if token < 256:
            return bytes((token,))
        return (EOT_TEXT if token == 256 else "\ufffd").encode("utf-8")


class CharTokenizer(Tokenizer):
    """One id per character that occurs in the text, as in nanoGPT's shakespeare_char. No end-of-text."""

    name = "char"

    def __init__(self, characters: str) -> None:
        """`characters` in the order of their ids."""
        assert len(set(characters)) == len(characters), "a character twice"
        self.characters = characters
        self.n_vocab = len(characters)
        self.eot = None
        self.hash = hashlib.sha256(_utf32(characters)).hexdigest()
        points_V = np.frombuffer(_utf32(characters), "<u4")
        # A table over code points: encoding is one indexed read per character.
        self._id_of_point = np.full(int(points_V.max(initial=0)) + 1, self.n_vocab, np.uint32)
        self._id_of_point[points_V] = np.arange(self.n_vocab, dtype=np.uint32)
        self._bytes = [character.encode("utf-8", "replace") for character in characters]

    @classmethod
    def of_text(cls, characters: Iterable[str]) -> CharTokenizer:
        """Ids in code point order, as nanoGPT assigns them."""
        return cls("".join(sorted(set(characters))))

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        points_N = np.frombuffer(_utf32(text), "<u4")
        inside_N = points_N < len(self._id_of_point)
        ids_N = self._id_of_point[np.where(inside_N, points_N, 0)]
        unknown_N = ~inside_N | (ids_N == self.n_vocab)
        if unknown_N.any():
            raise self._unknown(text[int(np.argmax(unknown_N))])
        return ids_N

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes[token] if token < self.n_vocab else "\ufffd".encode() for token in ids)

    def _text_lengths(self) -> list[int]:
        return [len(character) for character in self._bytes]

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "characters": self.characters}

    def _unknown(self, character: str) -> UserError:
        sample = "".join(c for c in self.characters if c.isprintable())[:100]
        return UserError(
            _("the character {character!r} (U+{point:04X}) is not in this model's vocabulary").format(
                character=character, point=ord(character)
            ),
            _("it was trained on text with {n_vocab} different characters: {sample}").format(
                n_vocab=self.n_vocab, sample=sample
            ),
            _("use only those, or train with --tokenizer=byte, which can write anything"),
        )


def _utf32(text: str) -> bytes:
    return text.encode("utf-32-le", "surrogatepass")


def make_tokenizer(name: str) -> Tokenizer:
    """A tokenizer that does not depend on any text."""
    if name == "gpt2":
        from onecard.data.gpt2_bpe import gpt2_tokenizer

        return gpt2_tokenizer()
    if name == "byte":
        return ByteTokenizer()
    raise UserError(
        _("there is no tokenizer {name!r}").format(name=name),
        hint=_("one of: {names}").format(names=", ".join(NAMES)),
    )


def from_facts(facts: dict[str, Any]) -> Tokenizer:
    """The tokenizer that wrote these facts, or an error if it cannot be the same one."""
    name = facts.get("name")
    if name == "char":
        characters = facts.get("characters")
        if not isinstance(characters, str) or not characters or len(set(characters)) != len(characters):
            raise UserError(_("the saved character vocabulary is damaged"))
        tokenizer: Tokenizer = CharTokenizer(characters)
    elif name == "bpe":
        from onecard.data.train_bpe import TrainedBpe

        tokenizer = TrainedBpe.of_facts(facts)
    else:
        tokenizer = make_tokenizer(str(name)[:_LONGEST_NAME])
    if facts.get("hash") != tokenizer.hash:
        raise UserError(
            _("the data was written with another {name} tokenizer than this onecard's").format(name=name),
            _("its hash is {hash}, ours {ours}").format(
                hash=str(facts.get("hash"))[:64], ours=tokenizer.hash
            ),
            _("prepare the data again"),
        )
    return tokenizer


def load_tokenizer(data_dir: Path) -> Tokenizer | None:
    """The tokenizer of a dataset; None where nothing says which (nanoGPT then means GPT-2)."""
    meta = read_meta(data_dir)
    if meta is not None:
        facts = meta.get("tokenizer")
        if not isinstance(facts, dict):
            raise UserError(
                _("{path} names no tokenizer").format(path=data_dir / "meta.json"),
                hint=_("prepare the data again"),
            )
        return from_facts(facts)
    path = data_dir / "meta.pkl"
    return CharTokenizer(character_table(path)) if path.is_file() else None
