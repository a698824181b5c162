"""The report of `onecard prepare --check` as a person reads it: plain text, in a terminal or a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from onecard.data.tokenizer import EOT_TEXT, Tokenizer
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
        f"{report['folder']}: tokenizer {tokenizer['name']} ({tokenizer['n_vocab']:,} ids), "
        f"{report['dtype']}, meta.json {report['meta']}",
        "",
        _row("", list(splits)),
        *_checks(splits),
        "",
        *_figures(splits),
        *_histogram(splits),
        *_most_frequent(splits),
        *_repeated(report),
    ]
    for split, part in splits.items():
        lines += _samples(split, part)
    lines += [""] + [line for note in report["notes"] for line in _wrapped("note: ", note)]
    lines += [line for problem in report["problems"] for line in _wrapped("PROBLEM: ", problem)]
    lines.append(_verdict(report))
    return "\n".join(lines)


def _row(label: str, cells: list[str]) -> str:
    return (f"{label:<{_LABEL}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)).rstrip()


def _heading(label: str, splits: list[str], width: int) -> str:
    return (f"{label:<{_LABEL}}" + "".join(f"  {split:<{width}}" for split in splits)).rstrip()


def _cell(splits: int) -> int:
    """As wide as the terminal allows."""
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
    return [
        _row(name + (" as in meta.json" if name != "ids" else " in the vocabulary"),
             [part["checks"].get(name, "not compared") for part in splits.values()])
        for name in names
    ]  # fmt: skip


def _figures(splits: dict[str, Part]) -> list[str]:
    def share_and_count(count: int, share: float) -> str:
        return f"{count:,} ({share:.2%})"

    def length(key: str, form: str) -> Callable[[Part], str | None]:
        return lambda part: None if part["lengths"] is None else format(part["lengths"][key], form)

    rows: list[tuple[str, Callable[[Part], str | None]]] = [
        ("tokens", lambda part: f"{part['tokens']:,}"),
        ("text bytes", lambda part: _number(part["text_bytes"], ",")),
        ("bytes per token", lambda part: _number(part["bytes_per_token"], ".3f")),
        ("unigram entropy, nats", lambda part: f"{part['entropy_nats']:.3f}"),
        ("ids used", lambda part: f"{part['ids_used']:,}"),
        ("ids never seen", lambda part: f"{part['never_seen_share']:.1%}"),
        ("documents", lambda part: _number(part["documents"], ",")),
        (
            "exact duplicates",
            lambda part: (
                part["duplicates"]
                and share_and_count(part["duplicates"]["documents"], part["duplicates"]["share"])
            ),
        ),
        ("empty documents", lambda part: _number(part["empty_documents"], ",")),
        ("document length: min", length("min", ",")),
        ("                 median", length("median", ",.0f")),
        ("                 mean", length("mean", ",.1f")),
        ("                 95%", length("p95", ",.0f")),
        ("                 longest", length("max", ",")),
    ]
    table = [(label, [cell(part) for part in splits.values()]) for label, cell in rows]
    # A row nobody has a figure for is left out: one long text has no documents.
    return [
        _row(label, [cell or "-" for cell in cells])
        for label, cells in table
        if any(cell is not None for cell in cells)
    ]


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


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
    lines = ["", _heading("tokens in a document", list(shown), cell)]
    for low, high in bins:
        line = f"{f'{low:,} to {high:,}' if high > low else f'{low:,}':>{_LABEL}}"
        for split, part in shown.items():
            count = counts[split].get((low, high), 0)
            # What is there shows, however little it is.
            bar = "#" * -(-count * wide // max(counts[split].values()))
            line += f"  {bar:<{wide}} {count / part['documents']:>6.1%} "
        lines.append(line.rstrip())
    return lines


def _most_frequent(splits: dict[str, Part]) -> list[str]:
    cell = _cell(len(splits))
    wide = min(26, cell - _SHARE)
    found = [
        [f"{_short(row['text'] or 'id ' + str(row['id']), wide):<{wide}} {row['share']:>6.2%}"
         for row in part["most_frequent"]]
        for part in splits.values()
    ]  # fmt: skip
    depth = max((len(column) for column in found), default=0)
    lines = ["", _heading("most frequent tokens", list(splits), cell)]
    for number in range(depth):
        texts = [column[number] if number < len(column) else "" for column in found]
        lines.append((f"{number + 1:>{_LABEL}}" + "".join(f"  {text:<{cell}}" for text in texts)).rstrip())
    return lines if depth else []


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _repeated(report: Part) -> list[str]:
    lines = []
    for split, part in report["splits"].items():
        again = part["duplicates"]
        if again and again["documents"]:
            lines.append(
                f"{split}: {again['texts']:,} texts occur more than once, one of them "
                f"{again['most_times']:,} times{_quoted(again['most_text'])}"
            )
    both = report["in_both"]
    if both and both["in_val"]:
        lines.append(f"in train and val, for example{_quoted(both['example'])}")
    return ["", *lines] if lines else []


def _quoted(text: str | None) -> str:
    return "" if text is None else f": {text!r}"


def _samples(split: str, part: Part) -> list[str]:
    lines = []
    for sample in part["samples"]:
        tokens = f"{sample['tokens']:,} tokens"
        title = (
            f"{split}, from token {sample['position']:,}"
            if sample["document"] is None
            else f"{split}, document {sample['document']:,} of {part['documents']:,} ({tokens}, "
            f"from token {sample['position']:,})"
        )
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
        return (
            f"NOT ok: {problems} problem" + ("s" if problems > 1 else "") + "; prepare it again with --force"
        )
    if report["meta"] == "none":
        return "ok: nothing wrong is to be seen, but nothing says what it should be"
    return "ok: everything meta.json says is so"
