"""The work of prepare: from where a dataset is to where it shall be, losing nothing on the way.

Which documents are held out for validation is decided by a hash of each document, with a threshold
that is fixed when a dataset is begun. So equal documents never end up on both sides, and adding data
later moves nothing from one side to the other: the bins only grow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard import __version__
from onecard.data.meta import META_SCHEMA, SPLITS
from onecard.data.prepare.origin import LocalFiles, Origin
from onecard.data.prepare.pipeline import ByHash, ByTail, Encoded, encode_all
from onecard.data.prepare.progress import Progress
from onecard.data.prepare.reading import DIGEST_SPAN, Batch, Place
from onecard.data.prepare.sources import BadFileError, Tally
from onecard.data.prepare.writer import BY_HASH, BY_TAIL, DatasetWriter, JournalError, Mode, discard
from onecard.data.tokenizer import CharTokenizer, Tokenizer
from onecard.errors import UserError

# What nanoGPT's Shakespeare holds out of its one text.
_TAIL_FRACTION = 0.1
_FEW_VAL_TOKENS = 10_000
# Where one document in n is held out, none of 50 n is with a chance of e to the -50. Of copies of one text,
# all are held out or none.
_SURELY, _SAME_DOCUMENTS = 50, 100


@dataclass
class Job:
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


def write_dataset(job: Job) -> dict[str, Any]:
    """Fill both splits up to what is wanted; go over the text again where the first cut left one empty."""
    writer = _write_with(job, None)
    if job.meta["split"] == BY_HASH and job.mode == "new" and len(_used(job)) < len(SPLITS):
        writer.close()
        if not _used(job):
            raise _nothing(job)
        # Few documents: the lowest hash goes to validation, or all but the highest if all would.
        threshold = job.highest if "val" in _used(job) else job.lowest + 1
        job.meta = {}
        writer = _write_with(job, ByHash(threshold) if job.lowest < job.highest else _tail_rule(job))
    writer.finish(job.meta)
    return job.meta


def _used(job: Job) -> set[str]:
    return {split for split in SPLITS if job.meta["splits"][split]["tokens"]}


def _rule(job: Job) -> ByHash | ByTail:
    if job.meta:
        border = int(job.meta["split_at"])
        return ByTail(border, job.seen_characters) if job.meta["split"] == BY_TAIL else ByHash(border)
    origin = job.origin
    if isinstance(origin, LocalFiles) and len(origin) == 1 and origin.files[0].kind == "text":
        return _tail_rule(job)
    return ByHash(int(job.recipe["val_fraction"] * DIGEST_SPAN))


def _tail_rule(job: Job) -> ByTail:
    n_characters = 0
    for batch in job.origin.read(job.recipe["text_column"], Place(), job.folder):
        for text, ends in zip(batch.texts, batch.ends, strict=True):
            n_characters += len(text)
            if ends:
                break
        else:
            continue
        break
    if n_characters < 2:
        raise _nothing(job)
    if job.tokens is not None:
        raise UserError(
            "--tokens needs more than one document",
            "a single text is held out by its tail, which an early end would cut off",
            "leave --tokens out: all of it is used",
        )
    fraction = job.recipe.get("tail_fraction") or _TAIL_FRACTION
    # At least one character on each side, whatever the fraction.
    return ByTail(int(n_characters * (1 - max(fraction, 1 / n_characters))))


def _write_with(job: Job, rule: ByHash | ByTail | None) -> DatasetWriter:
    """From where the job is to its end (or to enough tokens), with a commit every few seconds."""
    writer = _open_writer(job)
    # After the writer: it begins anew where what it finds is not what the journal says.
    rule = rule or _rule(job)
    if job.mode == "append":
        # From now on the bins may be longer than meta.json says; the journal tells readers why.
        writer.commit(job.meta, job.extra())
    tally = Tally.of(job.meta["passed_over"]) if job.meta else dataclasses.replace(job.tally)
    position = dict(job.meta["position"]) if job.meta else Place()._asdict()
    # How far everything agrees: an interruption in the middle of a batch goes back to it.
    reached = {"splits": writer.facts(), "passed_over": dataclasses.asdict(tally), "position": position}
    unreleased = position["source"]
    for number in range(unreleased):
        job.origin.release(number)  # a kill may have come between a commit and this
    began = (sum(job.origin.size(n) for n in range(unreleased)), writer.tokens("train"), writer.documents())
    enough = _is_enough(job, writer) and not position.get("inside_document")
    batches = job.origin.read(job.recipe["text_column"], job.place, job.folder)
    progress = Progress("tokenizing", job.origin.total_bytes, job.show, job.tokens, began)
    counts = began
    encoded = encode_all(
        batches, job.tokenizer, rule, job.dtype, lambda: progress.update(*counts, job.origin.status())
    )
    try:
        with progress:
            while not enough:
                try:
                    part = next(encoded, None)
                except UserError as error:
                    # A damaged file will be replaced: what is kept ends with the last whole one.
                    kept = job.at_file_end if isinstance(error, BadFileError) else reached
                    _keep(job, rule, writer, kept, error)
                    raise
                if part is None:
                    break
                stop = _append(writer, part, job.tokens)
                position = _position_after(part.batch, stop, position)
                _count_passed_over(tally, part.batch, stop)
                reached = {
                    "splits": writer.facts(), "passed_over": dataclasses.asdict(tally), "position": position,
                }  # fmt: skip
                written = part.batch.digests[: None if stop is None else stop + 1]
                job.lowest, job.highest = min([job.lowest, *written]), max([job.highest, *written])
                enough = stop is not None or _none_will_be_held_out(job, writer)
                if position["item"] == 0:
                    job.at_file_end = reached
                finished_file = position["source"] > unreleased
                if writer.commit_is_due or (finished_file and job.origin.dataset is not None):
                    job.meta = _meta(job, rule, reached)
                    writer.commit(job.meta, job.extra())
                    for number in range(unreleased, position["source"]):
                        job.origin.release(number)
                    unreleased = position["source"]
                counts = (part.batch.read, writer.tokens("train"), writer.documents())
                progress.update(*counts, job.origin.status())
        job.meta = _meta(job, rule, reached, reading=False)
    except (KeyboardInterrupt, SystemExit):
        job.meta = _meta(job, rule, reached)
        writer.commit(job.meta, job.extra())
        writer.close()
        raise
    except BaseException:
        writer.close()
        raise
    finally:
        encoded.close()
    return writer


def _is_enough(job: Job, writer: DatasetWriter) -> bool:
    return job.tokens is not None and writer.tokens("train") >= job.tokens and writer.tokens("val") > 0


def _none_will_be_held_out(job: Job, writer: DatasetWriter) -> bool:
    """Enough to train on, and nothing to validate on after so many documents: they are the same few."""
    if job.tokens is None or writer.tokens("train") < job.tokens or writer.tokens("val"):
        return False
    certain = _SURELY / job.recipe["val_fraction"] if job.lowest < job.highest else _SAME_DOCUMENTS
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


def _open_writer(job: Job) -> DatasetWriter:
    try:
        so_far = job.meta.get("splits") or {}
        if job.meta.get("split") == BY_TAIL:
            # meta.json counts the document in both splits; it ends in validation.
            so_far = so_far | {"train": so_far["train"] | {"documents": 0}}
        return DatasetWriter(job.folder, job.mode, job.dtype, so_far)
    except JournalError as error:
        if job.mode == "append":
            raise UserError(
                f"{job.folder / str(error)} was changed since it was prepared",
                "its SHA-256 is not the one in meta.json, so nothing is appended to it",
                "--force makes it anew",
            ) from None
        # What an interrupted prepare left is not what it wrote down: begin again.
        discard(job.folder)
        job.meta = {}
        return DatasetWriter(job.folder, job.mode, job.dtype, {})


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
    job: Job, rule: ByHash | ByTail, writer: DatasetWriter, reached: dict[str, Any] | None, error: UserError
) -> None:
    """Write down how far it came before an error goes up, so that the next start continues there."""
    if reached is None:
        discard(job.folder)
        return
    job.meta = _meta(job, rule, reached)
    writer.commit(job.meta, job.extra())
    if job.meta["tokens"]:
        kept = f"{job.meta['tokens']:,} tokens from before it are kept"
        error.why = "\n".join(filter(None, [error.why, kept]))
        again = "then run the same command again: it continues there"
        error.hint = "\n".join(filter(None, [error.hint, again]))


def _meta(
    job: Job, rule: ByHash | ByTail, reached: dict[str, Any], *, reading: bool = True
) -> dict[str, Any]:
    """meta.json of what is written. It depends on nothing but the text and the request.

    While a file is being `reading`, its hash is not there yet.
    """
    position, tally = reached["position"], Tally.of(reached["passed_over"])
    splits = {split: dict(part) for split, part in reached["splits"].items()}
    tokens = sum(part["tokens"] for part in splits.values())
    text_bytes = sum(part["text_bytes"] for part in splits.values())
    documents = sum(part["documents"] for part in splits.values())
    if isinstance(rule, ByTail):
        # Its end is counted in validation; both splits hold a part of it.
        splits["train"]["documents"] = documents
    notes = tally.notes()
    if splits["val"]["tokens"] < _FEW_VAL_TOKENS:
        few = splits["val"]["tokens"]
        notes.append(f"validation has only {few:,} tokens: its loss will be rough; add more text")
    if splits["val"]["tokens"] > splits["train"]["tokens"] > 0:
        notes.append("validation is larger than training: a few large documents; cut them into smaller ones")
    return {
        "schema": META_SCHEMA,
        "onecard": __version__,
        **job.recipe,
        "sources": job.origin.facts(position["source"], position["item"] > 0, reading),
        "tokenizer": job.tokenizer.facts(),
        "dtype": job.dtype,
        "eot": job.tokenizer.eot,
        "split": BY_HASH if isinstance(rule, ByHash) else BY_TAIL,
        "split_at": rule.threshold if isinstance(rule, ByHash) else rule.border,
        "splits": splits,
        "documents": documents,
        "tokens": tokens,
        "text_bytes": text_bytes,
        "bytes_per_token": round(text_bytes / max(1, tokens), 6),
        "position": position,
        "passed_over": reached["passed_over"],
        "notes": notes,
    }


def _nothing(job: Job) -> UserError:
    tally = Tally.of(job.meta["passed_over"]) if job.meta else job.tally
    passed = "\n".join(tally.notes()) or "fewer than two characters of text"
    return UserError(f"no text in {len(job.origin):,} files: nothing was prepared", passed)


def collect_characters(origin: Origin, text_column: str, folder: Path, show: bool) -> CharTokenizer:
    """Every character there is, training and validation alike, as nanoGPT counts them."""
    characters: set[str] = set()
    with Progress("collecting characters", origin.total_bytes, show) as progress:
        for batch in origin.read(text_column, Place(), folder):
            for text in batch.texts:
                characters.update(text)
            progress.update(batch.read, 0, 0)
    return CharTokenizer.of_text(characters)
