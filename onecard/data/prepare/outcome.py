"""What a prepare did, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard.config.dataset import DATA
from onecard.data.meta import SPLITS
from onecard.data.prepare.sources import Tally
from onecard.data.prepare.writer import BY_TAIL
from onecard.language import _, ngettext

_FEW_VAL_TOKENS = 10_000
_TEXT_BYTES_PER_TOKEN = 4  # of GPT-2's: text in bytes or characters is no larger for it
# The config for so many of these tokens or fewer; the smaller two read them several times. What more text can
# teach depends on the card, which plan knows.
_CONFIGS = (
    (3e6, "config/demo.py"),
    (200e6, "config/train_shakespeare_char.py"),
    (1.5e9, "config/train_fineweb.py"),
)
_LARGEST = "config/train_fineweb_124m.py"
_OWN_CONFIGS = {"stdlib": "config/demo.py", "shakespeare_char": "config/train_shakespeare_char.py"}


@dataclass(frozen=True)
class PreparedFacts:
    """The folder, and everything meta.json says."""

    folder: Path
    meta: dict[str, Any]
    already: bool
    seconds: float
    tokens_before: int = 0  # what was there when this command began
    remarks: tuple[str, ...] = ()  # about this run on this machine, not about the data

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder.as_posix(),
            "already_prepared": self.already,
            "seconds": round(self.seconds, 3),
            "tokens_before": self.tokens_before,
            "remarks": list(self.remarks),
            "next": next_command(self),
            **self.meta,
        }


def notes_of(splits: Mapping[str, Mapping[str, Any]], tally: Tally) -> list[str]:
    """What is odd about a dataset; meta.json has it in English."""
    notes = tally.notes()
    train, val = splits["train"]["tokens"], splits["val"]["tokens"]
    if val < _FEW_VAL_TOKENS:
        few = _("validation has only {n:,} tokens: its loss will be rough; add more text")
        notes.append(few.format(n=val))
    if val > train > 0:
        notes.append(
            _("validation is larger than training: a few large documents; cut them into smaller ones")
        )
    return notes


def next_command(facts: PreparedFacts) -> str:
    """What to do with the data now: a model of a size that the text can teach."""
    folder = facts.folder
    tokens = facts.meta["text_bytes"] / _TEXT_BYTES_PER_TOKEN
    by_size = next((config for most, config in _CONFIGS if tokens <= most), _LARGEST)
    config = _OWN_CONFIGS.get(folder.name, by_size)
    dataset = folder.name if folder.parent == DATA else folder.as_posix()
    if folder.parent != DATA and not folder.is_absolute():
        dataset = f"./{dataset}"
    quoted = (
        dataset if dataset.isprintable() and not set(dataset) & set(" '\"$&();<>|*?`\\") else repr(dataset)
    )
    return f"onecard plan {config} --dataset={quoted} --out_dir=out-{folder.name}"


def _kinds(sources: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """How many files of each ending: whoever did not mean to train on the csv sees it here."""
    counts: dict[str, int] = {}
    for source in sources:
        name = str(source["name"]).rpartition("/")[2]
        kind = "." + name.partition(".")[2] if "." in name[1:] else _("without ending")
        kind = kind if len(kind) <= 16 else "." + name.rpartition(".")[2]
        counts[kind] = counts.get(kind, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:12]


def _documents(count: int) -> str:
    return ngettext("{n:,} document", "{n:,} documents", count).format(n=count)


def summary(facts: PreparedFacts) -> str:
    """What a person wants to know about a prepared dataset, in a few lines."""
    meta, folder = facts.meta, facts.folder
    if facts.already:
        first = _("{folder}: already prepared from the same files").format(folder=folder)
    else:
        first = _("{folder}: prepared in {n:.1f} s").format(folder=folder, n=facts.seconds)
        if facts.tokens_before:
            first += _(", {n:,} tokens added").format(n=meta["tokens"] - facts.tokens_before)
    files = ngettext("{n:,} file", "{n:,} files", len(meta["sources"])).format(n=len(meta["sources"]))
    tokenizer = meta["tokenizer"]
    of_what = _("{mb:,.1f} MB of text, tokenizer {name} ({ids:,} ids)")
    lines = [
        first,
        f"  {files}, {_documents(meta['documents'])}, "
        + of_what.format(mb=meta["text_bytes"] / 1e6, name=tokenizer["name"], ids=tokenizer["n_vocab"]),
    ]
    if len(kinds := _kinds(meta["sources"])) > 1:
        lines.append("  " + _("read: {kinds}").format(kinds=", ".join(f"{n} {kind}" for kind, n in kinds)))
    for split in SPLITS:
        part = meta["splits"][split]
        size = _("{n:>14,} tokens, {bytes:.2f} bytes each")
        lines.append(f"  {split:5} " + size.format(n=part["tokens"], bytes=part["bytes_per_token"]))
    lines.append("  " + _("validation: {how}").format(how=_how_it_was_split(meta)))
    notes = [*notes_of(meta["splits"], Tally.of(meta["passed_over"])), *facts.remarks]
    lines += ["  " + _("note: {text}").format(text=note) for note in notes]
    lines.append(_("next: {command}").format(command=next_command(facts)))
    return "\n".join(lines)


def _how_it_was_split(meta: dict[str, Any]) -> str:
    if meta["split"] == BY_TAIL:
        return _("tail of the only document")
    val = meta["splits"]["val"]
    how = _("{n:,} of {documents}, {share:.1%} of the tokens (the aim was {wanted:.1%}), chosen by hash")
    return how.format(
        n=val["documents"],
        documents=_documents(meta["documents"]),
        share=val["tokens"] / max(1, meta["tokens"]),
        wanted=meta["val_fraction"],
    )
