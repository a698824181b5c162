"""`onecard prepare`: text to `data/NAME/train.bin`, `val.bin` and `meta.json`, nanoGPT's layout.

What is to be done is decided here: a new dataset, going on with an interrupted one, more tokens for a
finished one, or nothing because all is there. build.py does the work.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

from onecard.data.meta import SPLITS, read_meta
from onecard.data.prepare.build import Preparation, collect_characters, one_document, write_dataset
from onecard.data.prepare.options import PrepareOptions
from onecard.data.prepare.origin import LocalFiles, Origin
from onecard.data.prepare.outcome import PreparedFacts
from onecard.data.prepare.progress import Progress
from onecard.data.prepare.reading import Place
from onecard.data.prepare.request import Request, request_of
from onecard.data.prepare.sources import Tally, find_sources
from onecard.data.prepare.writer import (
    BY_TAIL,
    LockedFolder,
    Mode,
    cannot_write,
    complete,
    discard,
    is_whole,
    read_journal,
)
from onecard.data.tokenizer import Tokenizer, from_facts, make_tokenizer
from onecard.errors import UserError
from onecard.language import _
from onecard.terminal import say

# Enough validation text to tell 0.01 nats apart (about 250,000 GPT-2 tokens), half a percent of a
# large corpus, and never more than a tenth.
_VAL_TEXT_BYTES = 1_000_000
_LEAST_FRACTION, _MOST_FRACTION = 0.005, 0.1
# For asking whether the disk has room, before the text is known: rather too much than too little.
_TEXT_BYTES_PER_TOKEN = {"byte": 1.0, "char": 1.0}
_TEXT_BYTES_PER_BPE_TOKEN = 3.0


def prepare(
    inputs: list[str], options: PrepareOptions | None = None, *, progress: bool = True
) -> PreparedFacts:
    """Text of files, of `stdlib` or of a named dataset to tokens. Goes on where it stopped."""
    began = time.monotonic()
    request = request_of(inputs, options or PrepareOptions(), progress)
    tally = Tally()
    # Before anything is made: a mistyped name leaves no folder behind.
    origin = _local_files(request, tally)
    with LockedFolder(request.folder):
        try:
            done = _prepare_locked(request, origin, tally)
        except KeyboardInterrupt:
            _say_what_is_kept(request.folder)
            raise
        finally:
            if origin is not None:
                origin.close()
            if read_journal(request.folder) is None:
                discard(request.folder)
    return dataclasses.replace(done, seconds=time.monotonic() - began)


def _prepare_locked(request: Request, local: LocalFiles | None, tally: Tally) -> PreparedFacts:
    state, mode, journal = _look(request, local)
    origin: Origin | None = local
    if local is None and mode == "append" and journal is None and _has_enough(request, state):
        # Without asking the network: the data may well be used where there is none.
        return _already(request, state)
    if local is None:
        origin = _remote_files(request, state)
    assert origin is not None
    try:
        if state:
            origin, differences = _continuing(request, origin, state, journal)
            if differences and not request.force:
                raise _something_else(request, differences, journal is not None)
            if differences:
                discard(request.folder)
                state, mode, journal = {}, "new", None
        if state and state["split"] == BY_TAIL and request.tokens is not None:
            raise one_document()
        if state and mode == "append" and journal is None and _nothing_to_add(request, origin, state):
            return _already(request, state)
        recipe = _recipe(request, origin, state)
        tokenizer = from_facts(state["tokenizer"]) if state else _new_tokenizer(request, origin)
        before = int(state.get("tokens", 0))
        itemsize = 2 if tokenizer.n_vocab <= 2**16 else 4
        if request.show and before:
            goes_on = _("{folder}: continuing after {n:,} tokens")
            say(goes_on.format(folder=request.folder, n=before))
        if request.show and hasattr(origin, "announcement"):
            say(origin.announcement(itemsize, request.keep))
        _check_disk(request, origin, tokenizer.name, itemsize, before)
        work = Preparation(
            request.folder, origin, mode, recipe, tokenizer, request.tokens, request.show, state, tally
        )
        if journal is not None:
            work.lowest, work.highest = journal["digests"]
            work.at_file_end = journal["at_file_end"]
        meta = write_dataset(work)
        origin.finished()
        remark = getattr(tokenizer, "bulk_note", "")
        remarks = ((remark,) if remark else ()) + _not_as_many(request, meta)
        return PreparedFacts(request.folder, meta, False, 0.0, before, remarks)
    finally:
        if origin is not local:
            origin.close()


# ---------------------------------------------------------------- what is there already


def _look(request: Request, local: LocalFiles | None) -> tuple[dict[str, Any], Mode, dict[str, Any] | None]:
    """The meta.json to go on from (empty: from nothing), how, and the journal of an interrupted prepare."""
    folder = request.folder
    journal = read_journal(folder)
    if journal is not None and journal.get("finished"):
        # Killed during its last steps: they are done again, and it is an ordinary dataset.
        try:
            complete(folder, journal)
        except OSError as error:
            raise cannot_write(folder, error) from error
        journal = None
    if journal is not None and (not request.force or not _differences(request, journal["meta"])):
        return journal["meta"], journal["mode"], journal
    discard(folder)
    there = [p for p in (folder / n for n in ("meta.json", "train.bin", "val.bin", "meta.pkl")) if p.exists()]
    if not there or request.force:
        return {}, "new", None
    meta = read_meta(folder)
    if meta is None:
        raise UserError(
            _("{folder} already holds {file}").format(folder=folder, file=there[0].name),
            _("onecard did not write it (no meta.json)"),
            _("choose another --name, or --force to replace {folder}").format(folder=folder),
        )
    if not is_whole(meta):
        raise UserError(
            _("{path} is damaged or of an earlier version").format(path=folder / "meta.json"),
            _("it does not say how far the text was used"),
            _("--force makes {folder} anew").format(folder=folder),
        )
    itemsize = 4 if meta["dtype"] == "uint32" else 2
    for split in SPLITS:
        path = folder / f"{split}.bin"
        if not path.exists() or path.stat().st_size != meta["splits"][split]["tokens"] * itemsize:
            # Damaged since: ours, and worth doing again if it is the same text.
            differences = _differences(request, meta)
            if local is not None and not _are_there(meta["sources"], local):
                differences.append("sources")
            if differences:
                raise _something_else(request, differences, False)
            return {}, "new", None
    return meta, "append", None


def _are_there(listed: list[dict[str, Any]], local: LocalFiles) -> bool:
    given = {(file.name, file.size) for file in local.files}
    return all((entry["name"], entry["bytes"]) in given for entry in listed)


def _differences(request: Request, meta: dict[str, Any]) -> list[str]:
    """What an earlier prepare was asked differently, as far as can be seen without its files."""
    facts = meta.get("tokenizer") or {}
    different = []
    if meta.get("text_column") != request.text_column:
        different.append("text_column")
    if request.val_fraction is not None and request.val_fraction != meta.get("val_fraction"):
        different.append("val_fraction")
    if facts.get("name") != request.tokenizer or (
        request.train_tokenizer is not None and facts.get("n_vocab") != request.train_tokenizer
    ):
        different.append("tokenizer")
    dataset = meta.get("dataset") or {}
    named = request.named
    if (dataset.get("name"), dataset.get("folder")) != (
        (named.name, named.folder) if named and named.repo else (None, None)
    ):
        different.append("dataset")
    return different


def _continuing(
    request: Request, origin: Origin, state: dict[str, Any], journal: dict[str, Any] | None
) -> tuple[Origin, list[str]]:
    """The origin in the order of the earlier prepare, and what is different."""
    differences = _differences(request, state)
    if differences:
        return origin, differences
    listed = state["sources"]
    if isinstance(origin, LocalFiles):
        fingerprints = (journal or {}).get("fingerprints") or {}
        ordered = origin.continuing(listed, fingerprints, request.show)
        if isinstance(ordered, str):
            return origin, [_("sources ({why}; to add files, give the old ones too)").format(why=ordered)]
        origin.close()
        n_before = journal.get("n_sources", len(listed)) if journal is not None else len(listed)
        if state["split"] == BY_TAIL and len(ordered) > n_before:
            ordered.close()
            return origin, [_("sources (one text was split by its tail: more cannot be added)")]
        return ordered, []
    same = all(
        number < len(origin) and (entry["name"], entry["bytes"]) == (origin.name(number), origin.size(number))
        for number, entry in enumerate(listed)
    )
    return origin, [] if same else ["sources"]


def _nothing_to_add(request: Request, origin: Origin, state: dict[str, Any]) -> bool:
    return _has_enough(request, state) or int(state["position"]["source"]) >= len(origin)


def _has_enough(request: Request, state: dict[str, Any]) -> bool:
    if request.tokens is None or _differences(request, state):
        return False
    return int(state["splits"]["train"]["tokens"]) >= request.tokens


def _already(request: Request, state: dict[str, Any]) -> PreparedFacts:
    remarks = _not_as_many(request, state)
    there = int(state["splits"]["train"]["tokens"])
    if request.tokens is not None and there >= 2 * request.tokens:
        more = _("{wanted:,} training tokens were asked for; the {there:,} that are here stay")
        remarks += (more.format(wanted=request.tokens, there=there),)
    return PreparedFacts(request.folder, state, True, 0.0, int(state["tokens"]), remarks)


def _not_as_many(request: Request, meta: dict[str, Any]) -> tuple[str, ...]:
    there = int(meta["splits"]["train"]["tokens"])
    if request.tokens is None or there >= request.tokens:
        return ()
    fewer = _("{wanted:,} training tokens were asked for; {there:,} are all there are")
    return (fewer.format(wanted=request.tokens, there=there),)


def _something_else(request: Request, differences: list[str], unfinished: bool) -> UserError:
    folder = request.folder
    return UserError(
        (
            _("{folder} holds an unfinished prepare of something else")
            if unfinished
            else _("{folder} was prepared from something else")
        ).format(folder=folder),
        _("different: {what}").format(what=", ".join(differences)),
        _("choose another --name, or --force to replace {folder}").format(folder=folder),
    )


# ---------------------------------------------------------------- before the work


def _local_files(request: Request, tally: Tally) -> LocalFiles | None:
    if request.named is None:
        files = find_sources(request.inputs, tally, request.folder)
        bounded = request.tokens is None
        return LocalFiles([dataclasses.replace(file, bounded=bounded) for file in files])
    if request.named.is_text:
        from onecard.data.hub.fetch import fetch_text

        return LocalFiles(find_sources([str(fetch_text(request.named))], tally))
    return None


def _remote_files(request: Request, state: dict[str, Any]) -> Origin:
    from onecard.data.hub.fetch import list_files
    from onecard.data.prepare.remote import RemoteFiles, stored_commit

    assert request.named is not None
    listing = list_files(request.named, stored_commit(state))
    return RemoteFiles(
        request.named, listing, request.folder, request.keep, request.tokens, request.tokenizer
    )


def _recipe(request: Request, origin: Origin, state: dict[str, Any]) -> dict[str, Any]:
    fraction = request.val_fraction or state.get("val_fraction")
    recipe: dict[str, Any] = {
        "name": request.folder.name,
        **({"dataset": origin.dataset} if origin.dataset else {}),
        "text_column": request.text_column,
        "val_fraction": fraction or _default_fraction(request, origin),
    }
    if request.val_fraction is not None:
        # A tail is a matter of one text; a share of documents depends on how many there are.
        recipe["tail_fraction"] = request.val_fraction
    return recipe


def _default_fraction(request: Request, origin: Origin) -> float:
    if request.named is not None and request.named.repo:
        return _LEAST_FRACTION  # large, and the same however many tokens are asked for first
    text = max(1, origin.text_bytes())
    return round(min(_MOST_FRACTION, max(_LEAST_FRACTION, _VAL_TEXT_BYTES / text)), 4)


def _new_tokenizer(request: Request, origin: Origin) -> Tokenizer:
    if request.tokenizer == "char":
        return collect_characters(origin, request.text_column, request.folder, request.show)
    if request.train_tokenizer is None:
        return make_tokenizer(request.tokenizer)
    from onecard.data.train_bpe import MAX_TRAINING_BYTES, train_bpe

    read_at_most = min(MAX_TRAINING_BYTES, origin.text_bytes())
    with Progress(_("learning the tokenizer"), read_at_most, request.show) as progress:
        batches = origin.read(request.text_column, Place(), request.folder)
        texts = (text for batch in batches for text in batch.texts)
        return train_bpe(texts, request.train_tokenizer, lambda read: progress.update(read, 0, 0))


def _check_disk(request: Request, origin: Origin, tokenizer: str, itemsize: int, before: int) -> None:
    bytes_per_token = _TEXT_BYTES_PER_TOKEN.get(tokenizer, _TEXT_BYTES_PER_BPE_TOKEN)
    tokens = int(origin.text_bytes() / bytes_per_token)
    if request.tokens is not None:
        tokens = min(tokens, request.tokens)
    needed = max(0, tokens - before) * itemsize
    if origin.dataset is not None and not request.keep:
        # The file being read and the one after it.
        needed += sum(sorted((origin.size(n) for n in range(len(origin))), reverse=True)[:2])
    free = shutil.disk_usage(request.folder).free
    if needed > free:
        raise UserError(
            _("not enough room for {folder}").format(folder=request.folder),
            _("it needs about {needed:.1f} GB, {free:.1f} GB are free").format(
                needed=needed / 1e9, free=free / 1e9
            ),
            _("make room, ask for fewer --tokens, or put the data elsewhere with --out-root"),
        )


# ---------------------------------------------------------------- after it


def _say_what_is_kept(folder: Path) -> None:
    journal = read_journal(folder)
    kept = int(journal["meta"]["tokens"]) if journal is not None else 0
    how = _("stopped: {n:,} tokens are kept in {folder}; the same command continues")
    say(how.format(n=kept, folder=folder) if kept else _("stopped: nothing is kept"))
