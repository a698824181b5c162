"""What a prepare did, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard.data.meta import SPLITS
from onecard.data.prepare.writer import BY_TAIL


@dataclass(frozen=True)
class PreparedFacts:
    """What prepare did: the folder, and everything meta.json says."""

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
            **self.meta,
        }


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _kinds(sources: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """How many files of each ending: whoever did not mean to train on the csv sees it here."""
    counts: dict[str, int] = {}
    for source in sources:
        name = str(source["name"]).rpartition("/")[2]
        kind = "." + name.partition(".")[2] if "." in name[1:] else "without ending"
        kind = kind if len(kind) <= 16 else "." + name.rpartition(".")[2]
        counts[kind] = counts.get(kind, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:12]


def summary(facts: PreparedFacts) -> str:
    """What a person wants to know about a prepared dataset, in a few lines."""
    meta = facts.meta
    text_mb = meta["text_bytes"] / 1e6
    if facts.already:
        first = f"{facts.folder}: already prepared from the same files"
    else:
        added = f", {meta['tokens'] - facts.tokens_before:,} tokens added" if facts.tokens_before else ""
        first = f"{facts.folder}: prepared in {facts.seconds:.1f} s{added}"
    lines = [
        first,
        f"  {_count(len(meta['sources']), 'file')}, {_count(meta['documents'], 'document')}, "
        f"{text_mb:,.1f} MB of text, "
        f"tokenizer {meta['tokenizer']['name']} ({meta['tokenizer']['n_vocab']:,} ids)",
    ]
    if len(kinds := _kinds(meta["sources"])) > 1:
        lines.append("  read: " + ", ".join(f"{count:,} {kind}" for kind, count in kinds))
    for split in SPLITS:
        part = meta["splits"][split]
        lines.append(f"  {split:5} {part['tokens']:>14,} tokens, {part['bytes_per_token']:.2f} bytes each")
    if meta["split"] == BY_TAIL:
        lines.append(f"  validation: {meta['split']}")
    else:
        held_out = f"{meta['splits']['val']['documents']:,} of {_count(meta['documents'], 'document')}"
        lines.append(f"  validation: {held_out} ({meta['val_fraction']:.1%} wanted), chosen by hash")
    lines += [f"  note: {note}" for note in [*meta["notes"], *facts.remarks]]
    return "\n".join(lines)
