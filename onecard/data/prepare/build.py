"""The work of prepare: from the texts to the bins, losing nothing on the way.

How texts are split (split.py) is fixed when a dataset is begun: later data move nothing from one side to the
other, the bins only grow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard import __version__
from onecard.data.meta import META_SCHEMA, SPLITS
from onecard.data.prepare.origin import LocalFiles, Origin
from onecard.data.prepare.outcome import notes_of
from onecard.data.prepare.pipeline import Encoded, encode_all
from onecard.data.prepare.progress import Progress
from onecard.data.prepare.reading import DIGEST_SPAN, Batch, Place
from onecard.data.prepare.sources import BadFileError, Tally
from onecard.data.prepare.split import ByHash, ByTail, even_rule
from onecard.data.prepare.writer import BY_HASH, BY_TAIL, DatasetWriter, JournalError, Mode, discard
from onecard.data.tokenizer import CharTokenizer, Tokenizer
from onecard.errors import UserError
from onecard.language import _, english

# What nanoGPT's Shakespeare holds out of its one text.
_TAIL_FRACTION = 0.1
# Where one document in n is held out, none of 50 n is with a chance of e to the -50. Of copies of one text,
# all are held out or none.
_SURELY, _SAME_DOCUMENTS = 50, 100


@dataclass
class Preparation:
    """One prepare: what is read, how it is encoded, and how far it came."""

    folder: Path
    origin: Origin
    mode: Mode
    recipe: dict[str, Any]  # what meta.json says of the request: name, dataset, text_column, val_fraction
    tokenizer: Tokenizer
    tokens: int | None  # training tokens wanted; None for all there are
    show: bool
    meta: dict[str, Any]  # of what is written so far; empty at the beginning
    tally: Tally
    lowest: int = DIGEST_SPAN
    highest: int = -1
    # As it was when the last whole file was done: what is kept when the next one is damaged.
    at_file_end: dict[str, Any] | None = None

    @property
    def dtype(self) -> str:
        return "uint16" if self.tokenizer.n_vocab <= 2**16 else "uint32"

    @property
    def place(self) -> Place:
        position = self.meta.get("position") or {}
        return Place(*(int(position.get(name, 0)) for name in Place._fields))

    @property
    def seen_characters(self) -> int:
        return int((self.meta.get("position") or {}).get("characters", 0))

    def extra(self) -> dict[str, Any]:
        """What only the journal needs to know."""
        return {
            "fingerprints": self.origin.fingerprints(self.place.source + 1),
            "digests": [self.lowest, self.highest],
            "at_file_end": self.at_file_end,
            "n_sources": len(self.origin),
        }


def write_dataset(work: Preparation) -> dict[str, Any]:
    """Fill both splits up to what is wanted; go over the text again where the first cut left one empty."""
    writer = _write_with(work, None)
    if work.meta["split"] == BY_HASH and work.mode == "new" and len(_used(work)) < len(SPLITS):
        writer.close()
        if not _used(work):
            raise _nothing(work)
        # Few documents: the lowest hash goes to validation, or all but the highest if all would.
        threshold = work.highest if "val" in _used(work) else work.lowest + 1
        work.meta = {}
        writer = _write_with(work, ByHash(threshold) if work.lowest < work.highest else _tail_rule(work))
    writer.finish(work.meta)
    return work.meta


def _used(work: Preparation) -> set[str]:
    return {split for split in SPLITS if work.meta["splits"][split]["tokens"]}


def _rule(work: Preparation) -> ByHash | ByTail:
    if work.meta:
        border = int(work.meta["split_at"])
        if work.meta["split"] == BY_TAIL:
            return ByTail(border, work.seen_characters)
        return ByHash(border, int(work.meta.get("split_salt", 0)))
    origin, threshold = work.origin, int(work.recipe["val_fraction"] * DIGEST_SPAN)
    if not isinstance(origin, LocalFiles):
        return ByHash(threshold)  # of the Hub: many documents
    if len(origin) == 1 and origin.files[0].kind == "text":
        return _tail_rule(work)
    try:
        return even_rule(origin.look_over(work.recipe["text_column"], work.folder), threshold)
    except BadFileError:
        if work.tokens is None:
            raise
        return ByHash(threshold)  # it may come after what is wanted


def _tail_rule(work: Preparation) -> ByTail:
    n_characters = 0
    for batch in work.origin.read(work.recipe["text_column"], Place(), work.folder):
        for text, ends in zip(batch.texts, batch.ends, strict=True):
            n_characters += len(text)
            if ends:
                break
        else:
            continue
        break
    if n_characters < 2:
        raise _nothing(work)
    if work.tokens is not None:
        raise one_document()
    fraction = work.recipe.get("tail_fraction") or _TAIL_FRACTION
    # At least one character on each side, whatever the fraction.
    return ByTail(int(n_characters * (1 - max(fraction, 1 / n_characters))))


def one_document() -> UserError:
    return UserError(
        _("--tokens needs more than one document"),
        _("of a single text the tail is held out, which an early end would cut off"),
        _("leave --tokens out: all of it is used"),
    )


def _write_with(work: Preparation, rule: ByHash | ByTail | None) -> DatasetWriter:
    """Writes from where the work is to its end (or to enough tokens), with a commit every few seconds."""
    writer = _open_writer(work)
    # After the writer: it begins anew where what it finds is not what the journal says.
    rule = rule or _rule(work)
    if work.mode == "append":
        # From now on the bins may be longer than meta.json says; the journal says why.
        writer.commit(work.meta, work.extra())
    course = _Course(work, rule, writer)
    batches = work.origin.read(work.recipe["text_column"], work.place, work.folder)
    encoded = encode_all(batches, work.tokenizer, rule, work.dtype, course.show)
    try:
        with course.progress:
            course.run(encoded)
        work.meta = _meta(work, rule, course.reached, reading=False)
    except (KeyboardInterrupt, SystemExit):
        work.meta = _meta(work, rule, course.reached)
        writer.commit(work.meta, work.extra())
        writer.close()
        raise
    except BaseException:
        writer.close()
        raise
    finally:
        encoded.close()
    return writer


class _Course:
    """One way through the texts: what is written of them, and how far everything agrees."""

    def __init__(self, work: Preparation, rule: ByHash | ByTail, writer: DatasetWriter) -> None:
        self._work, self._rule, self._writer = work, rule, writer
        self._tally = Tally.of(work.meta["passed_over"]) if work.meta else dataclasses.replace(work.tally)
        position = dict(work.meta["position"]) if work.meta else Place()._asdict()
        # An interruption in the middle of a batch goes back to this.
        self.reached: dict[str, Any] = {}
        self._reach(position)
        self._unreleased = int(position["source"])
        for number in range(self._unreleased):
            work.origin.release(number)  # a kill may have come between a commit and this
        read = sum(work.origin.size(n) for n in range(self._unreleased))
        began = (read, writer.tokens("train"), writer.documents())
        self._counts = began
        self._enough = _is_enough(work, writer) and not position.get("inside_document")
        self.progress = Progress(_("tokenizing"), work.origin.total_bytes, work.show, work.tokens, began)

    def run(self, encoded: Generator[Encoded, None, None]) -> None:
        while not self._enough:
            try:
                part = next(encoded, None)
            except UserError as error:
                # A damaged file will be replaced: what is kept ends with the last whole one.
                kept = self._work.at_file_end if isinstance(error, BadFileError) else self.reached
                _keep(self._work, self._rule, self._writer, kept, error)
                raise
            if part is None:
                return
            self._take(part)

    def show(self) -> None:
        self.progress.update(*self._counts, self._work.origin.status())

    def _take(self, part: Encoded) -> None:
        work, writer, batch = self._work, self._writer, part.batch
        stop = _append(writer, part, work.tokens)
        _count_passed_over(self._tally, batch, stop)
        position = _position_after(batch, stop, self.reached["position"])
        self._reach(position)
        written = batch.digests[: None if stop is None else stop + 1]
        work.lowest, work.highest = min([work.lowest, *written]), max([work.highest, *written])
        self._enough = stop is not None or _none_will_be_held_out(work, writer)
        if position["item"] == 0:
            work.at_file_end = self.reached
        finished_file = position["source"] > self._unreleased
        if writer.commit_is_due or (finished_file and work.origin.dataset is not None):
            work.meta = _meta(work, self._rule, self.reached)
            writer.commit(work.meta, work.extra())
            for number in range(self._unreleased, position["source"]):
                work.origin.release(number)
            self._unreleased = position["source"]
        self._counts = (batch.read, writer.tokens("train"), writer.documents())
        self.show()

    def _reach(self, position: dict[str, Any]) -> None:
        tally = dataclasses.asdict(self._tally)
        self.reached = {"splits": self._writer.facts(), "passed_over": tally, "position": position}


def _is_enough(work: Preparation, writer: DatasetWriter) -> bool:
    return work.tokens is not None and writer.tokens("train") >= work.tokens and writer.tokens("val") > 0


def _none_will_be_held_out(work: Preparation, writer: DatasetWriter) -> bool:
    """Enough to train on, and nothing to validate on after so many documents: they are the same few."""
    if work.tokens is None or writer.tokens("train") < work.tokens or writer.tokens("val"):
        return False
    certain = _SURELY / work.recipe["val_fraction"] if work.lowest < work.highest else _SAME_DOCUMENTS
    return writer.documents() > certain


def _position_after(batch: Batch, stop: int | None, before: dict[str, Any]) -> dict[str, Any]:
    """Where the next text begins, for meta.json; with what the rules need to know in the middle of one."""
    if stop is not None:
        return batch.after[stop]._asdict()
    position: dict[str, Any] = batch.end._asdict()
    if batch.characters:
        position["characters"] = batch.characters
    if not batch.ends[-1] if batch.ends else before.get("inside_document"):
        position["inside_document"] = True
    return position


def _count_passed_over(tally: Tally, batch: Batch, stop: int | None) -> None:
    tally.empty_documents += batch.n_empty if stop is None else batch.empty[stop]
    tally.bad_bytes += batch.n_bad if stop is None else batch.bad[stop]


def _open_writer(work: Preparation) -> DatasetWriter:
    try:
        so_far = work.meta.get("splits") or {}
        if work.meta.get("split") == BY_TAIL:
            # meta.json counts the document in both splits; it ends in validation.
            so_far = so_far | {"train": so_far["train"] | {"documents": 0}}
        return DatasetWriter(work.folder, work.mode, work.dtype, so_far)
    except JournalError as error:
        if work.mode == "append":
            raise UserError(
                _("{path} was changed since it was prepared").format(path=work.folder / str(error)),
                _("its SHA-256 is not the one in meta.json, so nothing is appended to it"),
                _("--force makes it anew"),
            ) from None
        # What an interrupted prepare left is not what it wrote down: begin again.
        discard(work.folder)
        work.meta = {}
        return DatasetWriter(work.folder, work.mode, work.dtype, {})


def _append(writer: DatasetWriter, part: Encoded, wanted: int | None) -> int | None:
    """Write a batch; the number of the text after which there is enough, or None.

    A text is never cut: enough is reached with the first document that brings it, and there must be
    something to validate on.
    """
    batch, offsets, ids_N = part.batch, part.offsets, part.ids_N
    count, stop = len(batch.sizes), None
    if wanted is not None:
        missing = wanted - writer.tokens("train")
        no_val = writer.tokens("val") == 0
        for number in range(count):
            if part.held_out[number]:
                no_val = False
            else:
                missing -= offsets[number + 1] - offsets[number]
            if missing <= 0 and batch.ends[number] and not no_val:
                count, stop = number + 1, number
                break
    for split in SPLITS:
        chosen = [n for n in range(count) if part.held_out[n] is (split == "val")]
        writer.append(
            split,
            [ids_N[offsets[first] : offsets[last + 1]] for first, last in _stretches(chosen)],
            sum(batch.sizes[n] for n in chosen),
            sum(batch.ends[n] for n in chosen),
        )
    return stop


def _stretches(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of numbers that follow each other."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[first], numbers[at - 1]
            first = at


def _keep(
    work: Preparation,
    rule: ByHash | ByTail,
    writer: DatasetWriter,
    reached: dict[str, Any] | None,
    error: UserError,
) -> None:
    """Write down how far it came before an error goes up, so that the next start continues there."""
    if reached is None:
        discard(work.folder)
        return
    work.meta = _meta(work, rule, reached)
    writer.commit(work.meta, work.extra())
    if work.meta["tokens"]:
        kept = _("{n:,} tokens from before it are kept").format(n=work.meta["tokens"])
        error.why = "\n".join(filter(None, [error.why, kept]))
        again = _("then run the same command again: it continues there")
        error.hint = "\n".join(filter(None, [error.hint, again]))


def _meta(
    work: Preparation, rule: ByHash | ByTail, reached: dict[str, Any], *, reading: bool = True
) -> dict[str, Any]:
    """meta.json of what is written. It depends on nothing but the text and the request.

    While a file is being `reading`, its hash is not there yet.
    """
    position = reached["position"]
    splits = {split: dict(part) for split, part in reached["splits"].items()}
    tokens = sum(part["tokens"] for part in splits.values())
    text_bytes = sum(part["text_bytes"] for part in splits.values())
    documents = sum(part["documents"] for part in splits.values())
    if isinstance(rule, ByTail):
        # Its end is counted in validation; both splits hold a part of it.
        splits["train"]["documents"] = documents
    with english():
        notes = notes_of(splits, Tally.of(reached["passed_over"]))
    return {
        "schema": META_SCHEMA,
        "onecard": __version__,
        **work.recipe,
        "sources": work.origin.facts(position["source"], position["item"] > 0, reading),
        "tokenizer": work.tokenizer.facts(),
        "dtype": work.dtype,
        "eot": work.tokenizer.eot,
        "split": BY_HASH if isinstance(rule, ByHash) else BY_TAIL,
        "split_at": rule.threshold if isinstance(rule, ByHash) else rule.border,
        **({"split_salt": rule.salt} if isinstance(rule, ByHash) else {}),
        "splits": splits,
        "documents": documents,
        "tokens": tokens,
        "text_bytes": text_bytes,
        "bytes_per_token": round(text_bytes / max(1, tokens), 6),
        "position": position,
        "passed_over": reached["passed_over"],
        "notes": notes,
    }


def _nothing(work: Preparation) -> UserError:
    tally = Tally.of(work.meta["passed_over"]) if work.meta else work.tally
    passed = "\n".join(tally.notes()) or _("fewer than two characters of text")
    what = _("no text in {n:,} files: nothing was prepared").format(n=len(work.origin))
    return UserError(what, passed)


def collect_characters(origin: Origin, text_column: str, folder: Path, show: bool) -> CharTokenizer:
    """Every character there is, training and validation alike, as nanoGPT counts them."""
    characters: set[str] = set()
    with Progress(_("collecting characters"), origin.total_bytes, show) as progress:
        for batch in origin.read(text_column, Place(), folder):
            for text in batch.texts:
                characters.update(text)
            progress.update(batch.read, 0, 0)
    return CharTokenizer.of_text(characters)
