"""Text files to token files: `data/NAME/train.bin`, `val.bin` and `meta.json`, nanoGPT's layout.

Which documents are held out for validation is decided by a hash of each document's text. So equal
documents never end up on both sides, and adding files later moves nothing from training into
validation (the held-out share only shrinks as data grows, and smaller shares lie inside larger).
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from onecard import __version__
from onecard.data.bins import META_SCHEMA, Split, read_meta
from onecard.data.progress import Progress
from onecard.data.sources import (
    STDLIB,
    Piece,
    SourceFile,
    Tally,
    file_sha256,
    find_sources,
    read_documents,
)
from onecard.data.tokenizer import NAMES, CharTokenizer, Tokenizer, make_tokenizer, well_formed
from onecard.data.writer import SPLITS, DatasetWriter
from onecard.errors import UserError

BY_HASH = "by document hash"
BY_TAIL = "tail of the only document"
# What nanoGPT's Shakespeare holds out of its one text.
_TAIL_FRACTION = 0.1
# Enough validation text to tell 0.01 nats apart (about 250,000 GPT-2 tokens), half a percent of a
# large corpus, and never more than a tenth.
_VAL_TEXT_BYTES = 1_000_000
_LEAST_FRACTION, _MOST_FRACTION = 0.005, 0.1
_FEW_VAL_TOKENS = 10_000
_HASH_SPAN = 2**64


@dataclass(frozen=True)
class PreparedFacts:
    """What prepare did: the folder, and everything meta.json says."""

    folder: Path
    meta: dict[str, Any]
    already: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder.as_posix(),
            "already_prepared": self.already,
            "seconds": round(self.seconds, 3),
            **self.meta,
        }


def prepare(
    inputs: list[str],
    *,
    name: str | None = None,
    out_root: Path = Path("data"),
    tokenizer: str = "gpt2",
    text_column: str = "text",
    val_fraction: float | None = None,
    force: bool = False,
    progress: bool = True,
) -> PreparedFacts:
    """Tokenize local files (or `stdlib`) into `out_root/name`. Says so and stops if that is done already."""
    began = time.monotonic()
    folder = out_root / _dataset_name(inputs, name)
    if tokenizer not in NAMES:
        raise UserError(f"there is no tokenizer {tokenizer!r}", hint=f"one of: {', '.join(NAMES)}")
    if val_fraction is not None and not 0 < val_fraction <= 0.5:
        raise UserError(f"val_fraction must be above 0 and at most 0.5, not {val_fraction}")

    found = Tally()
    files = find_sources(inputs, found, folder)
    job = _Job(
        files=files,
        found=found,
        text_column=text_column,
        # A tail is a matter of one text; a share of documents depends on how many there are.
        val_fraction=val_fraction or _default_fraction(files),
        tail_fraction=val_fraction or _TAIL_FRACTION,
        progress=progress,
    )
    recipe = {
        "name": folder.name,
        "sources": _hash_sources(job),
        "text_column": text_column,
        "val_fraction": job.val_fraction,
    }
    previous = _check_folder(folder, recipe, tokenizer, force)
    if previous is not None:
        return PreparedFacts(folder, previous, True, time.monotonic() - began)

    chosen = _characters(job) if tokenizer == "char" else make_tokenizer(tokenizer)
    dtype = "uint16" if chosen.n_vocab <= 2**16 else "uint32"
    _check_disk(folder, files, chosen, dtype)
    with DatasetWriter(folder, dtype, chosen.eot) as writer:
        split_rule, tally = _write(job, chosen, writer)
        splits = writer.finish()
        _check_unchanged(files)
        meta = _meta(recipe, chosen, dtype, split_rule, splits, tally)
        writer.commit(meta)
    return PreparedFacts(folder, meta, False, time.monotonic() - began)


def summary(facts: PreparedFacts) -> str:
    """What a person wants to know about a prepared dataset, in a few lines."""
    meta = facts.meta
    text_mb = meta["text_bytes"] / 1e6
    lines = [
        f"{facts.folder}: already prepared from the same files"
        if facts.already
        else f"{facts.folder}: prepared in {facts.seconds:.1f} s",
        f"  {len(meta['sources']):,} files, {meta['documents']:,} documents, {text_mb:,.1f} MB of text, "
        f"tokenizer {meta['tokenizer']['name']} ({meta['tokenizer']['n_vocab']:,} ids)",
    ]
    for split in SPLITS:
        part = meta["splits"][split]
        lines.append(f"  {split:5} {part['tokens']:>14,} tokens, {part['bytes_per_token']:.2f} bytes each")
    lines.append(f"  validation: {meta['split']}")
    lines += [f"  note: {note}" for note in meta["notes"]]
    return "\n".join(lines)


# ---------------------------------------------------------------- the work


@dataclass(frozen=True)
class _Job:
    files: list[SourceFile]
    found: Tally
    text_column: str
    val_fraction: float
    tail_fraction: float
    progress: bool

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def pieces(self, tally: Tally) -> Iterator[tuple[int, Piece]]:
        """Every piece of every file, each with the number of bytes behind it."""
        before = 0
        for file in self.files:
            for piece in read_documents(file, self.text_column, tally):
                yield before + piece.read, piece
            before += file.size


class _Rule(Protocol):
    """Sends a piece to a split; one that lies across the border comes back in two."""

    def assign(self, piece: Piece) -> list[tuple[Split, str, bool]]: ...


class _ByHash:
    """Documents whose hash lies below a threshold are held out."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self.lowest, self.highest = _HASH_SPAN, -1

    def assign(self, piece: Piece) -> list[tuple[Split, str, bool]]:
        self.lowest = min(self.lowest, piece.digest)
        self.highest = max(self.highest, piece.digest)
        split: Split = "val" if piece.digest < self._threshold else "train"
        return [(split, piece.text, piece.ends_document)]


class _ByTail:
    """There is only one document: its last part is held out. Copies of it are cut at the same place."""

    def __init__(self, n_characters: int, fraction: float) -> None:
        self._border = int(n_characters * (1 - fraction))
        self._at = 0

    def assign(self, piece: Piece) -> list[tuple[Split, str, bool]]:
        cut = min(max(0, self._border - self._at), len(piece.text))
        self._at = 0 if piece.ends_document else self._at + len(piece.text)
        head, tail = piece.text[:cut], piece.text[cut:]
        # The document goes on in the other split, so only the tail is followed by end-of-text.
        parts: list[tuple[Split, str, bool]] = [("train", head, False)] if head else []
        return [*parts, ("val", tail, piece.ends_document)] if tail else parts


def _write(job: _Job, tokenizer: Tokenizer, writer: DatasetWriter) -> tuple[str, Tally]:
    """Fill both splits; go over the text again where the first cut left one of them empty."""
    if len(job.files) == 1 and job.files[0].kind == "text":
        return BY_TAIL, _write_tail(job, tokenizer, writer)
    rule = _ByHash(int(job.val_fraction * _HASH_SPAN))
    tally, used = _write_once(job, tokenizer, writer, rule)
    if not used:
        raise _nothing(job, tally)
    if rule.lowest == rule.highest:
        writer.restart()
        return BY_TAIL, _write_tail(job, tokenizer, writer)
    if len(used) < len(SPLITS):
        # Few documents: the lowest hash goes to validation, or all but the highest if all would.
        threshold = rule.highest if "val" in used else rule.lowest + 1
        writer.restart()
        tally, _ = _write_once(job, tokenizer, writer, _ByHash(threshold))
    return BY_HASH, tally


def _write_tail(job: _Job, tokenizer: Tokenizer, writer: DatasetWriter) -> Tally:
    n_characters = 0
    for _, piece in job.pieces(Tally()):
        n_characters += len(piece.text)
        if piece.ends_document:
            break
    if n_characters < 2:
        raise _nothing(job, Tally())
    # At least one character on each side, whatever the fraction.
    fraction = max(job.tail_fraction, 1 / n_characters)
    tally, _ = _write_once(job, tokenizer, writer, _ByTail(n_characters, fraction))
    return tally


def _write_once(
    job: _Job, tokenizer: Tokenizer, writer: DatasetWriter, rule: _Rule
) -> tuple[Tally, set[Split]]:
    tally = dataclasses.replace(job.found)
    used: set[Split] = set()
    documents = 0
    with Progress("tokenizing", job.total_bytes, job.progress) as progress:
        for read, piece in job.pieces(tally):
            for split, text, ends_document in rule.assign(piece):
                writer.append(split, tokenizer.encode_array(text), _utf8_length(text), ends_document)
                used.add(split)
            documents += piece.ends_document
            progress.update(read, writer.tokens(), documents)
    return tally, used


def _characters(job: _Job) -> CharTokenizer:
    """Every character there is, training and validation alike, as nanoGPT counts them."""
    characters: set[str] = set()
    with Progress("collecting characters", job.total_bytes, job.progress) as progress:
        for read, piece in job.pieces(Tally()):
            characters.update(piece.text)
            progress.update(read, 0, 0)
    return CharTokenizer.of_text(characters)


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(well_formed(text).encode("utf-8"))


def _meta(
    recipe: dict[str, Any],
    tokenizer: Tokenizer,
    dtype: str,
    split_rule: str,
    splits: dict[str, dict[str, Any]],
    tally: Tally,
) -> dict[str, Any]:
    tokens = sum(part["tokens"] for part in splits.values())
    text_bytes = sum(part["text_bytes"] for part in splits.values())
    documents = sum(part["documents"] for part in splits.values())
    if split_rule == BY_TAIL:
        # Its end is counted in validation; both splits hold a part of it.
        splits["train"]["documents"] = documents
    notes = tally.notes()
    if splits["val"]["tokens"] < _FEW_VAL_TOKENS:
        notes.append(
            f"validation has only {splits['val']['tokens']:,} tokens: its loss will be rough; add more text"
        )
    return {
        "schema": META_SCHEMA,
        "onecard": __version__,
        **recipe,
        "tokenizer": tokenizer.facts(),
        "dtype": dtype,
        "eot": tokenizer.eot,
        "split": split_rule,
        "splits": splits,
        "documents": documents,
        "tokens": tokens,
        "text_bytes": text_bytes,
        "bytes_per_token": round(text_bytes / max(1, tokens), 6),
        "notes": notes,
    }


# ---------------------------------------------------------------- before the work


def _dataset_name(inputs: list[str], name: str | None) -> str:
    if not inputs:
        raise UserError(
            "nothing to prepare", hint="onecard prepare FILES-OR-FOLDERS, or: onecard prepare stdlib"
        )
    if name is None:
        if len(inputs) > 1:
            raise UserError(
                "several inputs need a name", hint=f"onecard prepare {' '.join(inputs)} --name NAME"
            )
        path = Path(inputs[0])
        name = path.resolve().name if inputs[0] != STDLIB and path.is_dir() else path.stem
    if not name or name.startswith(".") or any(sign in name for sign in '/\\:*?"<>|\0'):
        raise UserError(f"{name!r} cannot be the name of a dataset", "it becomes a folder under data/")
    return name


def _text_estimate(file: SourceFile) -> int:
    """Bytes of text in a file; parquet is usually compressed to less than half."""
    return file.size * 5 // 2 if file.kind == "parquet" else file.size


def _default_fraction(files: list[SourceFile]) -> float:
    text = max(1, sum(_text_estimate(file) for file in files))
    return round(min(_MOST_FRACTION, max(_LEAST_FRACTION, _VAL_TEXT_BYTES / text)), 4)


def _hash_sources(job: _Job) -> list[dict[str, Any]]:
    sources = []
    read = 0
    with Progress("reading", job.total_bytes, job.progress) as progress:
        for file in job.files:
            sources.append({"name": file.name, "bytes": file.size, "sha256": file_sha256(file.path)})
            read += file.size
            progress.update(read, 0, 0)
    return sources


def _check_folder(folder: Path, recipe: dict[str, Any], tokenizer: str, force: bool) -> dict[str, Any] | None:
    """The meta.json that is there if it is of the very same making; an error if something else is."""
    ours = [folder / name for name in ("meta.json", "train.bin", "val.bin", "meta.pkl")]
    there = [path for path in ours if path.exists()]
    if not there or force:
        return None
    other_name = f"choose another --name, or --force to replace {folder}"
    meta = read_meta(folder)
    if meta is None:
        raise UserError(
            f"{folder} already holds {there[0].name}", "onecard did not write it (no meta.json)", other_name
        )
    differences = [key for key, value in recipe.items() if meta.get(key) != value]
    if (meta.get("tokenizer") or {}).get("name") != tokenizer:
        differences.append("tokenizer")
    if differences:
        raise UserError(
            f"{folder} was prepared from something else", f"different: {', '.join(differences)}", other_name
        )
    itemsize = 4 if meta.get("dtype") == "uint32" else 2
    for split in SPLITS:
        path = folder / f"{split}.bin"
        counted = (meta.get("splits") or {}).get(split, {}).get("tokens", -1)
        if not path.exists() or path.stat().st_size != counted * itemsize:
            # Killed between two renames, or damaged since: ours, and worth doing again.
            return None
    return meta


def _check_disk(folder: Path, files: list[SourceFile], tokenizer: Tokenizer, dtype: str) -> None:
    text = sum(_text_estimate(file) for file in files)
    tokens = text / 2 if tokenizer.name == "gpt2" else text
    needed = int(tokens * (2 if dtype == "uint16" else 4))
    where = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(where).free
    if needed > free:
        raise UserError(
            f"not enough room for {folder}",
            f"it needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            "make room, or put the data elsewhere with --out-root",
        )


def _check_unchanged(files: list[SourceFile]) -> None:
    for file in files:
        if not file.path.exists() or file.path.stat().st_size != file.size:
            raise UserError(f"{file.path} changed while it was being read", hint="run the same command again")


def _nothing(job: _Job, tally: Tally) -> UserError:
    passed = "\n".join(tally.notes()) or "fewer than two characters of text"
    return UserError(f"no text in {len(job.files):,} files: nothing was prepared", passed)
