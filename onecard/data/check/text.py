"""The report of `onecard prepare --check` as a person reads it: plain text, in a terminal or a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from onecard.data.tokenizer import EOT_TEXT, Tokenizer
from onecard.language import _, ngettext, number
from onecard.terminal import columns, visible

_LABEL = 28
_COLUMN = 22
_CELL, _LEAST_CELL = 36, 16  # of a split, in what is drawn
_SHARE = 8  # of it, for a percentage
_WIDTH = 100

Part = dict[str, Any]


def token_text(tokenizer: Tokenizer | None, token: int, eot: int | None) -> str | None:
    """A token in quotes; as bytes where it is only a part of a character."""
    if token == eot:
        return EOT_TEXT
    if tokenizer is None:
        return None
    data = tokenizer.decode_bytes([token])
    try:
        return repr(data.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(data)


def as_text(report: Part) -> str:
    splits: dict[str, Part] = report["splits"]
    tokenizer = report["tokenizer"]
    lines = [
        _("{folder}: tokenizer {name} ({n_vocab:,} ids), {dtype}, meta.json {meta}").format(
            folder=report["folder"],
            name=tokenizer["name"],
            n_vocab=tokenizer["n_vocab"],
            dtype=report["dtype"],
            meta=_by_whom(report["meta"]),
        ),
        "",
        _row("", list(splits)),
        *_checks(splits),
        "",
        *_figures(splits),
        *_validation(report),
        *_histogram(splits),
        *_most_frequent(splits),
        *_repeated(report),
    ]
    for split, part in splits.items():
        lines += _samples(split, part)
    lines += [""] + [
        line for note in report["notes"] for line in _wrapped(_("note: {text}").format(text=""), note)
    ]
    lines += [
        line
        for problem in report["problems"]
        for line in _wrapped(_("PROBLEM: {text}").format(text=""), problem)
    ]
    lines.append(_verdict(report))
    return "\n".join(lines)


def _by_whom(meta: str) -> str:
    version = meta.removeprefix("written by onecard ")
    return _("none") if meta == "none" else _("written by onecard {version}").format(version=version)


def _row(label: str, cells: list[str]) -> str:
    return (f"{label:<{_LABEL}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)).rstrip()


def _heading(label: str, splits: list[str], width: int) -> str:
    return (f"{label:<{_LABEL}}" + "".join(f"  {split:<{width}}" for split in splits)).rstrip()


def _cell(splits: int) -> int:
    """A cell as wide as the terminal allows."""
    full = _LABEL + splits * (_CELL + 2)
    return max(_LEAST_CELL, min(_CELL, (columns(of_a_pipe=full) - _LABEL) // splits - 2))


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        columns(of_a_pipe=_WIDTH),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
    )


def _checks(splits: dict[str, Part]) -> list[str]:
    names = dict.fromkeys(name for part in splits.values() for name in part["checks"])
    labels = {
        "size": _("size as in meta.json"), "SHA-256": _("SHA-256 as in meta.json"),
        "ids": _("ids in the vocabulary"), "documents": _("documents as in meta.json"),
        "text bytes": _("text bytes as in meta.json"),
    }  # fmt: skip
    results = {
        "ok": _("ok"), "WRONG": _("WRONG"), "not recorded": _("not recorded"),
        "not compared": _("not compared"),
    }  # fmt: skip
    return [
        _row(labels[name], [results[part["checks"].get(name, "not compared")] for part in splits.values()])
        for name in names
    ]


def _figures(splits: dict[str, Part]) -> list[str]:
    def share_and_count(count: int, share: float) -> str:
        return _("{n:,} ({share:.2%})").format(n=count, share=share)

    def length(key: str, form: str) -> Callable[[Part], str | None]:
        return lambda part: None if part["lengths"] is None else number(part["lengths"][key], form)

    of_lengths = _("document length") + ": "
    below = " " * len(of_lengths)
    rows: list[tuple[str, Callable[[Part], str | None]]] = [
        (_("tokens"), lambda part: number(part["tokens"], ",")),
        (_("text bytes"), lambda part: _number(part["text_bytes"], ",")),
        (_("bytes per token"), lambda part: _number(part["bytes_per_token"], ".3f")),
        (_("unigram entropy, nats"), lambda part: number(part["entropy_nats"], ".3f")),
        (_("ids used"), lambda part: number(part["ids_used"], ",")),
        (_("ids never seen"), lambda part: number(part["never_seen_share"], ".1%")),
        (_("documents"), lambda part: _number(part["documents"], ",")),
        (
            _("exact duplicates"),
            lambda part: (
                part["duplicates"]
                and share_and_count(part["duplicates"]["documents"], part["duplicates"]["share"])
            ),
        ),
        (_("empty documents"), lambda part: _number(part["empty_documents"], ",")),
        (of_lengths + _("min"), length("min", ",")),
        (below + _("median"), length("median", ",.0f")),
        (below + _("mean"), length("mean", ",.1f")),
        (below + "95%", length("p95", ",.0f")),
        (below + _("longest"), length("max", ",")),
    ]
    table = [(label, [cell(part) for part in splits.values()]) for label, cell in rows]
    # A row nobody has a figure for is left out: one long text has no documents.
    return [
        _row(label, [cell or "-" for cell in cells])
        for label, cells in table
        if any(cell is not None for cell in cells)
    ]


def _validation(report: Part) -> list[str]:
    found = report["validation"]
    if found is None:
        return []
    text = ngettext(
        "±{n:.3f} nats a token ({blocks:,} block of {size:,})",
        "±{n:.3f} nats a token ({blocks:,} blocks of {size:,})",
        found["blocks"],
    ).format(n=found["standard_error"], blocks=found["blocks"], size=found["block_size"])
    label = _("error of a validation loss")
    return [f"{label:<{_LABEL}}  {text}"]


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else number(value, form)


def _histogram(splits: dict[str, Part]) -> list[str]:
    """Side by side, each split against its own fullest row."""
    shown = {split: part for split, part in splits.items() if part["histogram"]}
    if not shown:
        return []
    counts = {
        split: {(row["from"], row["to"]): row["documents"] for row in part["histogram"]}
        for split, part in shown.items()
    }
    bins = sorted({bounds for rows in counts.values() for bounds in rows})
    cell = _cell(len(shown))
    wide = cell - _SHARE
    lines = ["", _heading(_("tokens in a document"), list(shown), cell)]
    for low, high in bins:
        bounds = _("{low:,} to {high:,}").format(low=low, high=high) if high > low else number(low, ",")
        line = f"{bounds:>{_LABEL}}"
        for split, part in shown.items():
            count = counts[split].get((low, high), 0)
            # What is there shows, however little it is.
            bar = "#" * -(-count * wide // max(counts[split].values()))
            line += f"  {bar:<{wide}} {number(count / part['documents'], '.1%'):>6} "
        lines.append(line.rstrip())
    return lines


def _most_frequent(splits: dict[str, Part]) -> list[str]:
    cell = _cell(len(splits))
    wide = min(26, cell - _SHARE)
    found = [
        [f"{_short(row['text'] or 'id ' + str(row['id']), wide):<{wide}} {number(row['share'], '.2%'):>6}"
         for row in part["most_frequent"]]
        for part in splits.values()
    ]  # fmt: skip
    depth = max((len(column) for column in found), default=0)
    lines = ["", _heading(_("most frequent tokens"), list(splits), cell)]
    for rank in range(depth):
        texts = [column[rank] if rank < len(column) else "" for column in found]
        lines.append((f"{rank + 1:>{_LABEL}}" + "".join(f"  {text:<{cell}}" for text in texts)).rstrip())
    return lines if depth else []


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _repeated(report: Part) -> list[str]:
    lines = []
    for split, part in report["splits"].items():
        again = part["duplicates"]
        if again and again["documents"]:
            more = _("{split}: {n:,} texts occur more than once, one of them {times:,} times")
            line = more.format(split=split, n=again["texts"], times=again["most_times"])
            lines.append(line + _quoted(again["most_text"]))
    both = report["in_both"]
    if both and both["in_val"]:
        lines.append(_("in train and val, for example") + _quoted(both["example"]))
    return ["", *lines] if lines else []


def _quoted(text: str | None) -> str:
    return "" if text is None else f": {text!r}"


def _samples(split: str, part: Part) -> list[str]:
    lines = []
    for sample in part["samples"]:
        title = (
            _("{split}, from token {position:,}")
            if sample["document"] is None
            else _(
                "{split}, document {document:,} of {documents:,} "
                "({tokens:,} tokens, from token {position:,})"
            )
        ).format(
            split=split, position=sample["position"], document=sample["document"], tokens=sample["tokens"],
            documents=part["documents"],
        )  # fmt: skip
        # Only real line breaks: visible() has escaped whatever else might break a line.
        lines += ["", title]
        for line in visible(sample["text"], exactly=True).split("\n"):
            lines += ["  | " + part for part in _folded(line)]
    return [line.rstrip() for line in lines]


def _folded(line: str) -> list[str]:
    """A line in as many as the terminal has room for; nothing of it is left out."""
    width = columns(of_a_pipe=10**6) - 4
    return textwrap.wrap(line, max(20, width), drop_whitespace=False) or [line]


def _verdict(report: Part) -> str:
    problems = len(report["problems"])
    if problems:
        return ngettext(
            "NOT ok: {n} problem; prepare it again with --force",
            "NOT ok: {n} problems; prepare it again with --force",
            problems,
        ).format(n=problems)
    if report["meta"] == "none":
        return _("ok: nothing wrong is to be seen, but nothing says what it should be")
    return _("ok: everything meta.json says is so")
