"""`onecard report A B`: the comparison of several runs in the form that was asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from onecard.language import N_, _, joined, number
from onecard.plan.amounts import count, duration
from onecard.report.answer import Report
from onecard.report.compare import AXES, Comparison, Side, comparisons_of, differences, sides_of, why_not
from onecard.report.options import ReportOptions
from onecard.report.pages.plotting import Curves, Scale
from onecard.report.pages.programs import strictly
from onecard.terminal import columns, say, show, show_json

_NAMED = {"tokens": N_("tokens"), "hours": N_("hours"), "flops": N_("FLOPs"), "kwh": N_("kWh")}


def verdict(sides: Sequence[Side], found: Sequence[Comparison]) -> tuple[str, str]:
    if reason := why_not(sides):
        return _("These runs cannot be compared by their losses."), reason
    if not found:
        text = _("The logs do not say what a step takes, so that these runs cannot be compared.")
        return text, _("Add --config, or --batch-size, --block-size and --gradient-accumulation-steps.")
    first = found[0]
    at = amount_text(first)
    said = _("At {amount} {name} is {lead} lower, which is beyond the noise of ±{error}.")
    if not first.beyond_noise:
        said = _("At {amount} they are equal: {name} is {lead} lower, within the noise of ±{error}.")
    lead, error = number(first.lead, ".3f"), number(first.error, ".3f")
    text = said.format(amount=at, name=sides[first.best].name, lead=lead, error=error)
    other = next((each for each in found[1:] if each.best != first.best and each.beyond_noise), None)
    if other is not None:
        more = _("At {amount} it is the other way round: {name} is {lead} lower.")
        lead = number(other.lead, ".3f")
        return text, more.format(amount=amount_text(other), name=sides[other.best].name, lead=lead)
    if len(found) > 1:
        return text, _("It is ahead by {others} as well.").format(
            others=joined(_(_NAMED[c.axis]) for c in found[1:])
        )
    return text, ""


def amount_text(found: Comparison) -> str:
    if found.axis == "tokens":
        return _("{n} tokens").format(n=count(found.amount))
    if found.axis == "hours":
        return duration(3600 * found.amount)
    if found.axis == "flops":
        return _("{n} FLOPs").format(n=number(found.amount, ".2g").replace("e+", "e"))
    return _("{n:,.1f} kWh").format(n=found.amount)


def compare_command(reports: Sequence[Report], options: ReportOptions) -> int:
    """0, whoever is ahead: more than one run is no question that no answers."""
    sides = sides_of(reports)
    found = [] if why_not(sides) else comparisons_of(sides)
    if options.html is not None:
        from onecard.report.pages.html import write_page

        write_page(Path(options.html), _page(sides, found, options.log_x))
        say(_("written: {path}").format(path=options.html))
    if options.json:
        show_json(json.dumps(strictly(_to_json(sides, found)), indent=1, allow_nan=False))
    elif options.markdown:
        show("\n".join(_markdown(sides, found)))
    else:
        from onecard.report.pages.show import paragraph, table_lines
        from onecard.report.report_command import PIPE, print_lines

        width = columns(of_a_pipe=PIPE)
        lines = [line for text in verdict(sides, found) for line in paragraph(text, width, style="bold")]
        for headings, rows in _tables(sides, found):
            lines += [[], *table_lines(headings, rows, width)]
        print_lines(lines)
    return 0


def _tables(
    sides: Sequence[Side], found: Sequence[Comparison]
) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Losses with a row for each run, then settings with a column for each."""
    headings = (_("loss after"), *map(amount_text, found), _("its own end"))
    ends = [side.curve[-1][1] if side.curve else math.nan for side in sides]
    rows = [
        (side.name, *(_cell(each.losses[n]) for each in found), _cell(ends[n]))
        for n, side in enumerate(sides)
    ]
    if found:
        rows.append((_("lead"), *(number(each.lead, ".3f") for each in found), ""))
        rows.append((_("noise"), *(f"±{number(each.error, '.3f')}" for each in found), ""))
    tables = [(headings, rows)]
    if differing := differences(sides):
        tables.append(((_("what differs"), *(side.name for side in sides)), differing))
    return tables


def _cell(loss: float) -> str:
    return number(loss, ".3f") if math.isfinite(loss) else "–"


def _markdown(sides: Sequence[Side], found: Sequence[Comparison]) -> list[str]:
    from onecard.report.pages.markdown import plain, table

    first, second = verdict(sides, found)
    lines = [f"**{plain(first)}** {plain(second)}"]
    for headings, rows in _tables(sides, found):
        lines += ["", *table(headings, rows)]
    return lines


def _page(sides: Sequence[Side], found: Sequence[Comparison], log_x: bool) -> str:
    from onecard.report.pages.figure import Words, overlay
    from onecard.report.pages.html import document, figure_of, table

    first, second = verdict(sides, found)
    every = [pair for side in sides for pair in side.curve]
    steps, losses = _scales(sides, log_x)
    words = Words("loss", _("Loss by step, of {n} runs").format(n=len(sides)), f"{first} {second}")
    keys = [(f"run{at % 6}", side.name) for at, side in enumerate(sides)]
    plot = overlay([(side.name, side.curve) for side in sides], (steps, losses), words) if every else ""
    body = [f'<h1>{escape(first)}</h1><p class="lead">{escape(second)}</p>']
    body.append(figure_of(_("Loss by step"), keys, plot))
    body += [
        f"<section>{table(headings, rows, headings[0])}</section>" for headings, rows in _tables(sides, found)
    ]
    return document(joined((side.name for side in sides), " · "), body)


def _scales(sides: Sequence[Side], log_x: bool) -> tuple[Scale, Scale]:
    every = [Curves((), side.curve) for side in sides if side.curve] or [Curves((), ((0.0, 0.0), (1.0, 1.0)))]
    steps, losses = [each.steps(log_x) for each in every], [each.losses(log_x) for each in every]
    return (
        Scale(min(s.low for s in steps), max(s.high for s in steps), log_x),
        Scale(min(s.low for s in losses), max(s.high for s in losses)),
    )


def _to_json(sides: Sequence[Side], found: Sequence[Comparison]) -> dict[str, Any]:
    names = [side.name for side in sides]
    return {
        "verdict": " ".join(filter(None, verdict(sides, found))),
        "comparable": not why_not(sides),
        "runs": [
            {"name": side.name, "loss": side.curve[-1][1] if side.curve else None,
             **{axis: side.used(axis) for axis in AXES}}
            for side in sides if side.curve
        ],
        "by": [
            {"axis": each.axis, "at": each.amount, "losses": dict(zip(names, each.losses, strict=True)),
             "best": names[each.best], "lead": each.lead, "noise": each.error,
             "beyond_noise": each.beyond_noise}
            for each in found
        ],
        "differences": [
            {"name": name, **dict(zip(names, values, strict=True))} for name, *values in differences(sides)
        ],
    }  # fmt: skip
