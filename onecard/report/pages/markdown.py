"""A report as markdown, to be pasted where people discuss runs: the verdict, what speaks for it, and tables.

A log is somebody else's text: what would be markup is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from onecard.report.answer import Report
from onecard.report.pages.rows import rows_of, run_line
from onecard.report.pages.tables import Section, sections
from onecard.report.verdict import verdict_of

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~!@])")
_SIGNS = {True: "✅", False: "⚠️", None: "•"}
_KEPT = ("mistakes", "next", "forecast", "losses")


def markdown(report: Report) -> str:
    first, second = verdict_of(report)
    lines = [f"**{plain(first)}** {plain(second)}", "", plain(run_line(report)), ""]
    lines += [f"- {_SIGNS[each.good]} {plain(each.text)}" for each in report.reasons]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {plain(row.name)} | {plain(row.text)} |" for row in rows_of(report)]
    for section in sections(report):
        if section.key in _KEPT:
            lines += ["", f"**{plain(section.title)}**", "", *_section(section)]
    return "\n".join(lines)


def _section(section: Section) -> Iterator[str]:
    if section.rows:
        yield from table(section.headings, section.rows)
    for item in section.items:
        yield f"- {plain(item.text)}"
        if item.code:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", item.code)), default=0))
            yield from (f"  {line}" for line in (fence, *item.code.splitlines(), fence))
        yield from (f"  {plain(text)}" for text in item.details)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(map(plain, headings)) + " |"
    yield "|---" + "|---:" * (len(headings) - 1) + "|"
    yield from ("| " + " | ".join(map(plain, row)) + " |" for row in rows)


def plain(text: str) -> str:
    """One line in which nothing is markup, a mention or a link."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split())).replace("://", ":/​/")
