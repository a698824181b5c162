"""`onecard prepare NAME --check`: is a dataset what its meta.json says, and what is in it?

Everything meta.json claims is counted again from the bins; what nobody wrote down (nanoGPT's bins,
llm.c's shards) is only described. Reads, and changes nothing.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onecard.config.vocabulary import DataRecipe
from onecard.data.check.claims import Book
from onecard.data.check.survey import Documents, Survey, TokenRow, entropy, histogram, repeats, shared, survey
from onecard.data.check.text import as_text, token_text
from onecard.data.check.validation import validation_of
from onecard.data.meta import SPLITS, Split, read_meta, split_files
from onecard.data.missing import missing_data
from onecard.data.prepare.progress import Progress
from onecard.data.prepare.writer import BY_HASH
from onecard.errors import UserError
from onecard.language import _

SAMPLE_CHARACTERS = 300
_EXAMPLE_CHARACTERS = 80
_MOST_FREQUENT = 10


@dataclass
class SplitReport:
    """One split, in plain numbers and words. None stands for what cannot be known."""

    files: list[str]
    checks: dict[str, str]
    tokens: int
    sha256: str
    ids_used: int
    never_seen_share: float
    entropy_nats: float
    text_bytes: int | None
    bytes_per_token: float | None
    most_frequent: list[dict[str, Any]]
    documents: int | None = None
    empty_documents: int | None = None
    lengths: dict[str, float] | None = None
    histogram: list[dict[str, int]] = field(default_factory=list)
    duplicates: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class CheckReport:
    """What was found. `problems` is empty when the dataset is what it says."""

    folder: Path
    meta: str
    tokenizer: dict[str, Any]
    dtype: str
    growing: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    splits: dict[str, SplitReport] = field(default_factory=dict)
    in_both: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self), "folder": self.folder.as_posix()}

    def text(self) -> str:
        return as_text(self.to_json())


def check(folder: Path, *, samples: int = 3, seed: int = 0, progress: bool = True) -> CheckReport:
    """Go over a prepared dataset once, compare it with its meta.json and describe it."""
    folder = Path(folder)
    files = _bins(folder)
    meta = read_meta(folder)
    book = Book.open(folder, meta)
    rows = {split: TokenRow(paths, book.dtype) for split, paths in files.items() if paths}
    stops = {split: min(len(row), book.expected(split, "tokens", len(row))) for split, row in rows.items()}
    surveys: dict[Split, Survey] = {}
    tokens_before = documents_before = 0
    with Progress(_("checking"), sum(stops.values()) * book.dtype.itemsize, progress) as bar:

        def count(tokens: int, documents: int) -> None:
            all_tokens = tokens_before + tokens
            bar.update(all_tokens * book.dtype.itemsize, all_tokens, documents_before + documents)

        for split, row in rows.items():
            surveys[split] = found = survey(row, stops[split], book.n_vocab, book.eot, count)
            tokens_before += found.tokens
            documents_before += found.documents.ends if found.documents else 0

    for split in SPLITS:
        if split not in rows:
            missing = _("{file} is missing").format(file=f"{split}.bin")
            (book.problems if meta is not None else book.notes).append(missing)
    checks = {split: book.compare(split, rows[split], found) for split, found in surveys.items()}
    book.compare_totals()
    report = CheckReport(
        folder,
        meta=f"written by onecard {meta.get('onecard', '?')}" if meta is not None else "none",
        tokenizer={"name": book.name, "n_vocab": book.n_vocab, "eot": book.eot},
        dtype=book.dtype.name,
        growing=book.growing,
        problems=book.problems,
        notes=book.notes,
    )
    # Samples and examples first: the lengths lose their order when they are sorted for their statistics.
    _compare_splits(report, book, rows, surveys)
    for number, (split, found) in enumerate(surveys.items()):
        part = _describe(found, book, rows[split], checks[split])
        part.samples = _samples(found, book, rows[split], samples, random.Random(f"{seed} {number}"))
        _describe_lengths(part, found)
        report.splits[split] = part
    _judge_validation(report, book)
    return report


def _judge_validation(report: CheckReport, book: Book) -> None:
    """A set that says nothing is a problem where there is text for a larger one, else a note."""
    train, val = (report.splits[split].tokens if split in report.splits else 0 for split in SPLITS)
    found = validation_of(val, book.n_vocab)
    if found is None:
        return
    report.validation = found.to_json()
    if not found.enough:
        said, can_be_mended = found.verdict(train, prepared=book.meta is not None)
        (report.problems if can_be_mended else report.notes).append(said)


def _bins(folder: Path) -> dict[Split, list[Path]]:
    try:
        files = {split: split_files(folder, split) if folder.is_dir() else [] for split in SPLITS}
    except OSError as error:
        raise UserError(_("cannot read {path}").format(path=folder), str(error.strerror or error)) from error
    if not any(files.values()):
        raise missing_data(folder, "train", DataRecipe())
    return files


# ---------------------------------------------------------------- what is in it


def _compare_splits(
    report: CheckReport, book: Book, rows: dict[Split, TokenRow], surveys: dict[Split, Survey]
) -> None:
    """Validation text that was trained on makes the validation loss a lie."""
    train, val = (surveys[split].documents if split in surveys else None for split in SPLITS)
    if train is None or val is None:
        return
    both = shared(train.sorted_hashes(), val.sorted_hashes())
    share = both.in_val / max(1, int(np.count_nonzero(val.lengths_D)))
    example = _example(val, both.example, book, rows["val"]) if both.in_val else None
    report.in_both = {
        "in_train": both.in_train, "in_val": both.in_val, "share_of_val": share, "example": example,
    }  # fmt: skip
    if not both.in_val:
        return
    by_hash = book.meta is not None and book.meta.get("split") == BY_HASH
    found = (
        _(
            "{n:,} documents of val ({share:.2%}) are in train too, word for word; split by document hash, "
            "that cannot be: the bins do not belong together"
        )
        if by_hash
        else _(
            "{n:,} documents of val ({share:.2%}) are in train too, word for word: "
            "the validation loss will look better than it is"
        )
    ).format(n=both.in_val, share=share)
    (report.problems if by_hash else report.notes).append(found)


def _example(documents: Documents, hash_: int, book: Book, row: TokenRow) -> str | None:
    number = int(np.flatnonzero(documents.hashes_D == np.uint64(hash_))[0])
    start = documents.start(number)
    return book.decode(row, start, start + int(documents.lengths_D[number]), _EXAMPLE_CHARACTERS)


def _describe(found: Survey, book: Book, row: TokenRow, checks: dict[str, str]) -> SplitReport:
    counts_V = found.counts_V
    used = int(np.count_nonzero(counts_V))
    text_bytes = book.text_bytes(found)
    report = SplitReport(
        files=[part.path.name for part in row.parts],
        checks=checks,
        tokens=found.tokens,
        sha256=found.sha256,
        ids_used=used,
        never_seen_share=1 - used / book.n_vocab,
        entropy_nats=entropy(counts_V),
        text_bytes=text_bytes,
        bytes_per_token=None if text_bytes is None else text_bytes / max(1, found.tokens),
        most_frequent=[
            {
                "id": token,
                "text": token_text(book.tokenizer, token, book.eot),
                "count": int(counts_V[token]),
                "share": int(counts_V[token]) / found.tokens,
            }
            for token in np.argsort(-counts_V, kind="stable")[:_MOST_FREQUENT].tolist()
            if counts_V[token]
        ],
    )
    documents = found.documents
    if documents is not None:
        report.documents = len(documents)
        report.empty_documents = int(np.count_nonzero(documents.lengths_D == 0))
        again = repeats(documents.sorted_hashes())
        report.duplicates = {
            "documents": again.copies,
            "share": again.copies / max(1, report.documents - report.empty_documents),
            "texts": again.texts,
            "most_times": again.most_times,
            "most_text": _example(documents, again.most_hash, book, row) if again.copies else None,
        }
    return report


def _samples(
    found: Survey, book: Book, row: TokenRow, wanted: int, draw: random.Random
) -> list[dict[str, Any]]:
    """Beginnings of documents; of one long text, its beginning and places inside it."""
    documents = found.documents
    if book.tokenizer is None or not found.tokens:
        return []
    places: list[tuple[int | None, int, int]]
    if documents is None or len(documents) < 2:
        count = min(max(0, wanted - 1), found.tokens - 1)
        inside = sorted(draw.sample(range(1, found.tokens), count))
        places = [(None, start, found.tokens - start) for start in [0, *inside][:wanted]]
    else:
        numbers = sorted(draw.sample(range(len(documents)), min(wanted, len(documents))))
        places = [(n + 1, documents.start(n), int(documents.lengths_D[n])) for n in numbers]
    return [
        {
            "document": number,
            "position": start,
            "tokens": length,
            "text": book.decode(row, start, start + length, SAMPLE_CHARACTERS),
        }
        for number, start, length in places
    ]


def _describe_lengths(report: SplitReport, found: Survey) -> None:
    if found.documents is None:
        return
    lengths_D = found.documents.lengths_D
    lengths_D.sort()
    report.histogram = [
        {"from": low, "to": high, "documents": count} for low, high, count in histogram(lengths_D)
    ]
    shortest, longest, mean = int(lengths_D[0]), int(lengths_D[-1]), float(lengths_D.mean())
    median, p95 = np.percentile(lengths_D, (50, 95), overwrite_input=True).tolist()
    report.lengths = {"min": shortest, "median": median, "mean": mean, "p95": p95, "max": longest}
