"""What a dataset should be, from its meta.json or by assumption, and where its bins differ from that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecard.arch.shapes import GPT2_VOCABULARY
from onecard.data.check.survey import Survey, TokenRow
from onecard.data.meta import JOURNAL_NAME, SPLITS, Split
from onecard.data.prepare.writer import BY_HASH
from onecard.data.tokenizer import Tokenizer, from_facts, load_tokenizer, make_tokenizer
from onecard.errors import UserError
from onecard.language import _

OK, WRONG, NOT_RECORDED, NOT_COMPARED = "ok", "WRONG", "not recorded", "not compared"
# What bins are taken for when nothing says what they are, as nanoGPT does.
_GPT2_VOCAB, _GPT2_EOT = GPT2_VOCABULARY, GPT2_VOCABULARY - 1
_LARGEST_VOCAB = 2**24


class Book:
    """Expectations about a dataset; `problems` and `notes` fill up as the bins are compared with them."""

    def __init__(self, meta: dict[str, Any] | None, growing: bool) -> None:
        self.meta = meta
        self.growing = growing
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.tokenizer: Tokenizer | None = None
        self.name, self.n_vocab = "gpt2", _GPT2_VOCAB
        self.eot: int | None = _GPT2_EOT
        self.dtype: np.dtype[Any] = np.dtype("<u2")
        self._byte_lengths_V: NDArray[np.int64] | None = None

    @classmethod
    def open(cls, folder: Path, meta: dict[str, Any] | None) -> Book:
        book = cls(meta, (folder / JOURNAL_NAME).exists())
        if meta is None:
            book._assume(folder)
        else:
            book._read(folder / "meta.json", meta)
        if book.tokenizer is not None:
            book.name, book.n_vocab, book.eot = (
                book.tokenizer.name, book.tokenizer.n_vocab, book.tokenizer.eot,
            )  # fmt: skip
        return book

    def _read(self, path: Path, meta: dict[str, Any]) -> None:
        dtype = meta.get("dtype", "uint16")
        if dtype not in ("uint16", "uint32"):
            raise UserError(
                _("{path} says dtype {dtype!r}; known are uint16 and uint32").format(path=path, dtype=dtype)
            )
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if not isinstance(meta.get("split", BY_HASH), str) or not meta.get("split", BY_HASH):
            self.problems.append(_("meta.json does not say how what is held out was chosen"))
        facts = meta.get("tokenizer")
        if not isinstance(facts, dict):
            raise UserError(
                _("{path} names no tokenizer").format(path=path), hint=_("prepare the data again")
            )
        n_vocab, eot = facts.get("n_vocab"), facts.get("eot")
        try:
            self.tokenizer = from_facts(facts)
        except UserError as error:
            self.problems.append(
                _("tokenizer: {what}").format(what=error.what) + (f" ({error.why})" if error.why else "")
            )
            if type(n_vocab) is not int or not 0 < n_vocab <= _LARGEST_VOCAB:
                raise
            self.name, self.n_vocab = str(facts.get("name")), n_vocab
            self.eot = eot if type(eot) is int else None
            return
        ours = self.tokenizer
        if (n_vocab, eot, meta.get("eot")) != (ours.n_vocab, ours.eot, ours.eot):
            self.problems.append(
                _(
                    "meta.json says {n_vocab} ids and end-of-text {eot} (or {also}); "
                    "its {name} tokenizer has {ours} and {our_eot}"
                ).format(
                    n_vocab=str(n_vocab)[:20],
                    eot=str(eot)[:20],
                    also=str(meta.get("eot"))[:20],
                    name=ours.name,
                    ours=ours.n_vocab,
                    our_eot=ours.eot,
                )
            )

    def _assume(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer is not None:
            self.notes.append(_("no meta.json: characters from meta.pkl, uint16 assumed"))
        else:
            self.notes.append(_("no meta.json: taken for GPT-2's tokens in uint16, as nanoGPT writes them"))
            try:
                self.tokenizer = make_tokenizer("gpt2")
            except UserError as error:
                self.notes.append(_("tokens cannot be shown as text: {what}").format(what=error.what))
        self.notes.append(_("nothing says how many tokens there should be, nor their hash: not verified"))

    def expected(self, split: Split, key: str, otherwise: int = -1) -> int:
        """A number meta.json has for a split; `otherwise` where it has none."""
        value = self._split(split).get(key)
        return value if type(value) is int and value >= 0 else otherwise

    def _split(self, split: Split) -> dict[str, Any]:
        splits = self.meta.get("splits") if self.meta is not None else None
        part = splits.get(split) if isinstance(splits, dict) else None
        return part if isinstance(part, dict) else {}

    def compare(self, split: Split, row: TokenRow, found: Survey) -> dict[str, str]:
        """What became of each check of a split; problems are kept as well."""
        shards = _("the {split} shards").format(split=split)
        name = row.parts[0].path.name if len(row.parts) == 1 else shards
        whole, size = self._compare_size(name, row, self.expected(split, "tokens"))
        checks = {"size": size, "SHA-256": NOT_COMPARED, "ids": OK}
        if not found.tokens and size != WRONG:
            self.problems.append(_("{file} is empty: it has no tokens").format(file=name))
        recorded = self._split(split).get("sha256")
        if not isinstance(recorded, str):
            checks["SHA-256"] = self._not_recorded(name, split, "sha256")
        elif whole:
            checks["SHA-256"] = OK if recorded == found.sha256 else WRONG
            if recorded != found.sha256:
                self.problems.append(
                    _(
                        "{name}: these are not the tokens that were prepared "
                        "(SHA-256 {sha256}…, meta.json has {recorded}…)"
                    ).format(name=name, sha256=found.sha256[:16], recorded=recorded[:16])
                )
        if found.first_out_of_range is not None:
            checks["ids"] = WRONG
            position, token = found.first_out_of_range
            self.problems.append(
                _(
                    "{place}: id {token:,} is not in the vocabulary of {n_vocab:,} "
                    "({out_of_range:,} such ids in {split})"
                ).format(
                    place=row.place(position),
                    token=token,
                    n_vocab=self.n_vocab,
                    out_of_range=found.out_of_range,
                    split=split,
                )
            )
        by_tail = self.meta is not None and self.meta.get("split") != BY_HASH
        # A text cut into two splits ends in the second one only.
        if self.eot is not None and not (by_tail and split == "train"):
            ends = found.documents.ends if found.documents else 0
            checks["documents"] = self._compare_count(name, split, "documents", ends, whole)
        if found.documents is None and found.tokens:
            why = (
                _("this vocabulary has no end-of-text")
                if self.eot is None
                else _("there is no end-of-text in it")
            )
            self.notes.append(
                _("{split} is one long text: {why}, so documents are not counted").format(
                    split=split, why=why
                )
            )
        if (text_bytes := self.text_bytes(found)) is not None:
            checks["text bytes"] = self._compare_count(name, split, "text_bytes", text_bytes, whole)
        return checks

    def _compare_size(self, name: str, row: TokenRow, expected: int) -> tuple[bool, str]:
        """Whether all that meta.json counts is there, and how to call it."""
        size = row.parts[0].dtype.itemsize
        if expected < 0:
            if self.meta is not None:
                self.problems.append(_("meta.json does not say how many tokens {name} has").format(name=name))
            self.problems += row.damage
            return True, WRONG if row.damage else NOT_RECORDED
        if len(row) < expected:
            self.problems.append(
                _(
                    "{name} is cut short: meta.json counts {expected:,} tokens ({bytes:,} bytes), "
                    "{n:,} are there ({on_disk:,} bytes)"
                ).format(
                    name=name,
                    expected=expected,
                    bytes=expected * size,
                    n=len(row),
                    on_disk=row.bytes_on_disk,
                )
            )
            return False, WRONG
        more = row.bytes_on_disk - expected * size
        if len(row) == expected and not row.damage:
            return True, OK
        if self.growing:
            self.notes.append(
                _("{name}: more is being prepared; checked are the first {expected:,} tokens").format(
                    name=name, expected=expected
                )
            )
            return True, OK
        self.problems.append(
            _(
                "{name} is too long: meta.json counts {expected:,} tokens ({bytes:,} bytes), "
                "behind them are {more:,} more bytes, which were not checked"
            ).format(name=name, expected=expected, bytes=expected * size, more=more)
        )
        return True, WRONG

    def _compare_count(self, name: str, split: Split, key: str, found: int, whole: bool) -> str:
        expected = self.expected(split, key)
        if expected < 0:
            return self._not_recorded(name, split, key)
        if not whole:
            return NOT_COMPARED
        if expected != found:
            what = key.replace("_", " ")
            self.problems.append(
                _("{name}: {found:,} {what} counted, meta.json says {expected:,}").format(
                    name=name, found=found, what=what, expected=expected
                )
            )
        return OK if expected == found else WRONG

    def _not_recorded(self, name: str, split: Split, key: str) -> str:
        """A record that cannot be true is none, and a problem besides."""
        if key not in self._split(split):
            return NOT_RECORDED
        self.problems.append(
            _("meta.json does not say in a way that can be read what {key} {name} has").format(
                key=key, name=name
            )
        )
        return WRONG

    def compare_totals(self) -> None:
        """The sums in meta.json against its own parts."""
        for key in ("tokens", "text_bytes"):
            total = self.meta.get(key) if self.meta is not None else None
            parts = sum(self.expected(split, key, 0) for split in SPLITS)
            if total is not None and total != parts:
                says = _("meta.json says {total} {key} in all, its splits add up to {parts}")
                self.problems.append(says.format(total=str(total)[:20], key=key, parts=parts))

    def text_bytes(self, found: Survey) -> int | None:
        """Bytes of text behind the tokens that were counted; end-of-text stands for none."""
        if self.tokenizer is None:
            return None
        if self._byte_lengths_V is None:
            self._byte_lengths_V = np.array(
                [
                    0 if token == self.eot else len(self.tokenizer.decode_bytes([token]))
                    for token in range(self.n_vocab)
                ],
                np.int64,
            )
        return int(self._byte_lengths_V @ found.counts_V)

    def decode(self, row: TokenRow, start: int, stop: int, characters: int) -> str | None:
        """The first characters of some tokens. A token has a byte at least, a character four at most."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(row.read(start, min(stop, start + 4 * characters)))[:characters]
