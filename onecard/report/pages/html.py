"""A report as one page: a file of its own, light and dark, narrow and wide, that asks nothing of any network.

A log is somebody else's text: whatever of it stands on the page is escaped, no script runs there, and a
policy in its head forbids the browser to load anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from onecard import __version__
from onecard.errors import UserError
from onecard.files import write_text
from onecard.language import _, number, wanted_language
from onecard.plan.amounts import duration
from onecard.plan.show import span
from onecard.report.answer import Report, loss_text, perplexity, range_texts
from onecard.report.pages.figure import Words, loss_figure, strip
from onecard.report.pages.plotting import Curves, Scale, curves_of, rates_of, speeds_of
from onecard.report.pages.rows import four_digits, kwh, run_line
from onecard.report.pages.tables import Section, sections
from onecard.report.verdict import verdict_of

MARK = '<meta name="generator" content="onecard report'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_HEAD_BYTES = 4096
_MOST_OF_A_SAMPLE = 3000  # characters on the page
_FOLDED = ("losses", "facts", "notes")  # sections that are opened by who wants them
_FIGURES = re.compile(r"[\d(±–-].*|")


def page(report: Report, *, log_x: bool = False) -> str:
    first, second = verdict_of(report)
    body = [
        f'<p class="run">{escape(run_line(report))}</p>',
        f'<h1 class="{report.health}">{escape(first)}</h1><p class="lead">{escape(second)}</p>',
        tiles_of(_tiles(report)),
        _figures(report, log_x),
        _reasons(report),
        *(_section(each) for each in sections(report) if each.key not in _FOLDED),
        _sample(report),
        *(_section(each) for each in sections(report) if each.key in _FOLDED),
    ]
    return document(report.name or _("run"), body)


def document(title: str, body: Iterable[str]) -> str:
    """A whole page around its parts."""
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    footer = _("Written by onecard {version}. Losses are in nats a token unless said otherwise.")
    return (
        f'<!DOCTYPE html>\n<html lang="{wanted_language()}"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'{MARK} {__version__}"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(f"onecard report: {title}")}</title>'
        f"<style>{style}</style></head>\n<body><main>{''.join(body)}\n"
        f"<footer>{escape(footer.format(version=__version__))}</footer></main></body></html>\n"
    )


def write_page(path: Path, content: str) -> None:
    """Over a report that is there, but over nothing else."""
    if path.is_dir() or not path.parent.is_dir():
        why = (
            _("it is a folder")
            if path.is_dir()
            else _("there is no folder {folder}").format(folder=path.parent)
        )
        raise UserError(
            _("the report cannot be written to {path}").format(path=path), why, "--html report.html"
        )
    if path.exists() and not _is_report(path):
        raise UserError(
            _("{path} is there, and is not a report of onecard's").format(path=path),
            _("nothing was written"),
            _("name another file: --html report.html"),
        )
    write_text(path, content)


def _is_report(path: Path) -> bool:
    try:
        if path.stat().st_size == 0:
            return True
        with path.open("rb") as file:
            return MARK.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


# --- figures of the run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    name: str
    value: str
    more: str = ""


def _tiles(report: Report) -> list[Tile]:
    loss, end, course, found = report.loss, report.end, report.course, []
    if loss is not None:
        surprise = perplexity(loss)
        more = _("perplexity {n}").format(n=number(surprise, ",.0f")) if surprise is not None else ""
        found.append(Tile(loss.name, loss.text, more))
    if end is not None:
        at = _("at step {n:,}").format(n=end.step)
        name = _("expected end") if loss is None or loss.unit == "nats" else _("expected training loss")
        found.append(Tile(name, "–".join(range_texts(end.low, end.high)), at))
    pace = course.pace
    if pace.tokens_per_s is not None:
        more = _("true MFU {share:.0%}").format(share=pace.mfu) if pace.mfu is not None else ""
        found.append(Tile(_("tokens a second"), number(four_digits(pace.tokens_per_s), ",d"), more))
    for name, amount, form in (
        (_("time"), course.seconds, duration), (_("energy"), course.pc_kwh, kwh),
    ):  # fmt: skip
        if amount.so_far is not None:
            more = _("{left} to the end").format(left=form(amount.left)) if amount.left else ""
            found.append(Tile(name, form(amount.so_far), more))
    if course.cost.so_far is not None and course.cost_high.so_far is not None:
        text = f"{span(course.cost.so_far, course.cost_high.so_far, ',.2f')} {course.currency}"
        more = ""
        if course.cost.left and course.cost_high.left:
            left = span(course.cost.left, course.cost_high.left, ",.2f")
            more = _("{left} to the end").format(left=f"{left} {course.currency}")
        found.append(Tile(_("cost"), text, more))
    return found


def tiles_of(tiles: Sequence[Tile]) -> str:
    if not tiles:
        return ""
    shown = (
        f"<div><dt>{escape(tile.name)}</dt><dd><b>{escape(tile.value)}</b>"
        + (f"<small>{escape(tile.more)}</small>" if tile.more else "")
        + "</dd></div>"
        for tile in tiles
    )
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def _figures(report: Report, log_x: bool) -> str:
    curves = curves_of(report.facts, report.alarms, report.forecast)
    if len(curves.main) < 2:
        return ""
    unit = _("bits per byte") if curves.unit == "bpb" else _("nats a token")
    described = _describe(report, curves)
    words = Words("loss", _("Loss by step"), described)
    shown = figure_of(
        _("Loss in {unit}, by step").format(unit=unit), _keys(curves), loss_figure(curves, words, log_x=log_x)
    )
    steps = curves.steps(log_x)
    for pairs, name, kind in (
        (rates_of(report.facts), _("Learning rate"), "rate"),
        (speeds_of(report.facts), _("Tokens a second"), "speed"),
    ):
        if len(pairs) > 1 and max(value for _step, value in pairs) > 0:
            shown += figure_of(
                name, (), strip(pairs, steps, Words(kind, name, _range(pairs, steps)), kind), low=True
            )
    return shown


def figure_of(caption: str, keys: Iterable[tuple[str, str]], plot: str, *, low: bool = False) -> str:
    """`keys`: kinds of lines and what they are."""
    legend = "".join(f'<span><i class="k-{kind}"></i>{escape(name)}</span>' for kind, name in keys)
    kind = ' class="strip"' if low else ""
    return f"<figure{kind}><figcaption><span>{escape(caption)}</span>{legend}</figcaption>{plot}</figure>"


def _keys(curves: Curves) -> list[tuple[str, str]]:
    beside = curves.main is not curves.train
    found = [("val", _("validation loss") if beside else _("training loss"))]
    if beside and curves.train:
        found.append(("train", _("training loss")))
    if curves.points:
        found.append(("fan", _("expected, four times in five")))
    if curves.starts:
        found.append(("start", _("a new start")))
    if curves.marks:
        found.append(("alarm", _("where the trouble began")))
    return found


def _describe(report: Report, curves: Curves) -> str:
    (begin, first), (end, last) = curves.main[0], curves.main[-1]
    text = _("From {first} at step {begin:,} to {last} at step {end:,}.")
    said = text.format(first=loss_text(first), begin=round(begin), last=loss_text(last), end=round(end))
    return f"{said} {verdict_of(report)[1]}"


def _range(pairs: Sequence[tuple[float, float]], steps: Scale) -> str:
    values = [value for _step, value in pairs]
    text = _("Between {low} and {high}, from step {begin:,} to {end:,}.")
    form = ".3g" if max(values) < 1 else ",.0f"
    low, high = number(min(values), form), number(max(values), form)
    return text.format(low=low, high=high, begin=round(steps.low), end=round(steps.high))


# --- words ----------------------------------------------------------------------------------------------


def _reasons(report: Report) -> str:
    kinds = {True: ' class="good"', False: ' class="bad"', None: ""}
    items = "".join(f"<li{kinds[each.good]}>{escape(each.text)}</li>" for each in report.reasons)
    title = escape(_("What the log shows"))
    return f'<section><h2>{title}</h2><ul class="reasons">{items}</ul></section>' if items else ""


def _section(section: Section) -> str:
    body = "".join(f"<p>{escape(text)}</p>" for text in section.texts)
    body += table(section.headings, section.rows, section.title) if section.rows else ""
    for item in section.items:
        code = f"<pre>{escape(item.code)}</pre>" if item.code else ""
        more = "".join(f'<p class="more">{escape(text)}</p>' for text in item.details)
        body += f'<div class="item"><p>{escape(item.text)}</p>{code}{more}</div>'
    title = escape(section.title)
    if section.key in _FOLDED:
        return f"<details><summary>{title}</summary>{body}</details>"
    return f'<section class="{section.key}"><h2>{title}</h2>{body}</section>'


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """Figures to the right; wider than the screen, it is moved by itself and not the page with it."""
    figures = [all(_FIGURES.fullmatch(row[n]) for row in rows) for n in range(len(headings))]
    kinds = [' class="n"' if right and n else "" for n, right in enumerate(figures)]
    head = "".join(
        f'<th scope="col"{kind}>{escape(cell)}</th>' for cell, kind in zip(headings, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _sample(report: Report) -> str:
    if report.sample is None:
        return ""
    title = _("What it writes")
    if report.sample.step is not None:
        title = _("What it writes at step {n:,}").format(n=report.sample.step)
    text = report.sample.text[:_MOST_OF_A_SAMPLE]
    return f"<section><h2>{escape(title)}</h2><blockquote>{escape(text)}</blockquote></section>"
