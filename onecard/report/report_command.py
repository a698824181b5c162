"""`onecard report`: runs in, a verdict out, in the form that was asked for."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onecard.errors import UserError
from onecard.hardware.cards import find_card, match_rates
from onecard.hardware.machine import local_gpus
from onecard.language import _, english
from onecard.report.answer import LEAST_LOSSES, Report, Sample, losses_seen, report_of
from onecard.report.config_file import config_from
from onecard.report.course import Money
from onecard.report.drawing import Segments, signs_for
from onecard.report.inputs import read_input
from onecard.report.known import Known
from onecard.report.source import named
from onecard.terminal import columns, console, say, show, show_json

PIPE = 80  # columns


@dataclass(frozen=True)
class Form:
    """How the answer is wanted."""

    full: bool = False
    log_x: bool = False
    html: str | None = None
    markdown: bool = False
    json: bool = False


def report_command(
    sources: list[str], known: Known, form: Form, *, config_file: str | None = None, gpu: str | None = None,
    money: Money | None = None,
) -> int:  # fmt: skip
    """0: healthy, or as far as can be seen; 1: not healthy, or nothing to judge."""
    with english(form.json):
        if sources.count("-") > 1:
            raise UserError(_("one paste can be read at a time"), hint=_("put the others into files"))
        known = _with_card(_with_config(known, config_file), gpu)
        found = [_report(source, known, money or Money()) for source in sources]
        if len(found) > 1:
            from onecard.report.compare_command import compare_command

            return compare_command(found, form)
        return _one(found[0], form)


def _with_card(known: Known, gpu: str | None) -> Known:
    """The one that is named; else the usual one counts where the log names none, or this machine's."""
    if gpu is not None:
        return replace(known, card=match_rates(gpu) or find_card(gpu))
    if known.usual_card is None:
        return replace(known, usual_card=next((found.card for found in local_gpus()), None))
    return known


def _with_config(known: Known, path: str | None) -> Known:
    if path is None:
        return known
    config, notes = config_from(path)
    return replace(known, config=config, notes=(*known.notes, *notes))


def _report(source: str, known: Known, money: Money) -> Report:
    given = read_input(source)
    report = report_of(given.log, known, given.folder, source=source, name=given.name, money=money)
    if report.sample is None and given.sample:
        report = replace(report, sample=Sample(given.sample))
    seen, rows = losses_seen(report.facts), losses_seen(report.facts, numbers=False)
    if seen and rows >= LEAST_LOSSES:
        return report
    if rows and not seen:
        raise UserError(
            _("no loss in {source} is a number").format(source=named(source)),
            _("they are NaN or infinite from the first line on"),
            _("a lower learning rate, a longer warm-up, or bfloat16 instead of float16"),
            exit_code=1,
        )
    what = _("in {source} are too few losses to judge a run by: {n}")
    raise UserError(
        what.format(source=named(source), n=seen),
        _("it takes {n}, at different steps").format(n=LEAST_LOSSES),
        _("add more lines of the log; `onecard eta` says how fast the run is and when it is done"),
        exit_code=1,
    )


def _one(report: Report, form: Form) -> int:
    if form.html is not None:
        from onecard.report.html import page, write_page

        write_page(Path(form.html), page(report, log_x=form.log_x))
        say(_("written: {path}").format(path=form.html))
    if form.json:
        from onecard.report.programs import to_json

        show_json(json.dumps(to_json(report), indent=1, allow_nan=False))
    elif form.markdown:
        from onecard.report.markdown import markdown

        show(markdown(report))
    else:
        from onecard.report.show import first_screen, whole

        signs = signs_for(getattr(sys.stdout, "encoding", None))
        form_of = whole if form.full else first_screen
        print_lines(form_of(report, columns(of_a_pipe=PIPE), signs, log_x=form.log_x))
    return 1 if report.health == "not-healthy" else 0


def print_lines(lines: list[Segments]) -> None:
    from rich.text import Text

    to: Any = console(sys.stdout, width=max(20, columns(of_a_pipe=PIPE)), soft_wrap=True)
    for line in lines:
        to.print(Text.assemble(*line), highlight=False, soft_wrap=True)
