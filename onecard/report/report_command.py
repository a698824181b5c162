"""`onecard report`: runs in, a verdict out, in the form that was asked for."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from onecard.errors import UserError
from onecard.hardware.cards import find_card, match_rates
from onecard.hardware.machine import local_gpus
from onecard.language import _, english
from onecard.plan.options import price_range
from onecard.report.answer import LEAST_LOSSES, Report, Sample, losses_seen, report_of
from onecard.report.course import Money
from onecard.report.gathering.config_file import config_from
from onecard.report.gathering.inputs import read_input
from onecard.report.gathering.known import Known
from onecard.report.gathering.source import named
from onecard.report.options import ReportOptions
from onecard.report.pages.drawing import Segments, signs_for
from onecard.terminal import columns, console, say, show, show_json

PIPE = 80  # columns


def report_command(sources: list[str], options: ReportOptions, usual_gpu: str | None = None) -> int:
    """0: healthy, or as far as can be seen; 1: not healthy, or nothing to judge."""
    with english(options.json):
        if sources.count("-") > 1:
            raise UserError(_("one paste can be read at a time"), hint=_("put the others into files"))
        known = _known(options, usual_gpu)
        money = Money(*price_range(options.price), options.currency, options.idle_watts)
        found = [_report(source, known, money) for source in sources]
        if len(found) > 1:
            from onecard.report.pages.compare_command import compare_command

            return compare_command(found, options)
        return _one(found[0], options)


def _known(options: ReportOptions, usual_gpu: str | None) -> Known:
    """What the options say. Where neither they nor the log name a card, the usual one counts, or this
    machine's."""
    config, notes = config_from(options.config) if options.config is not None else (None, ())
    card = match_rates(options.gpu) or find_card(options.gpu) if options.gpu is not None else None
    usual = match_rates(usual_gpu) if usual_gpu is not None else None
    if card is None and usual_gpu is None:
        usual = next((found.card for found in local_gpus()), None)
    return Known(
        max_iters=options.max_iters,
        tokens=options.tokens,
        batch_size=options.batch_size,
        block_size=options.block_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        config=config,
        card=card,
        cards=options.gpus,
        eval_tokens=options.eval_tokens,
        eval_every=options.eval_every,
        usual_card=usual,
        notes=notes,
    )


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


def _one(report: Report, options: ReportOptions) -> int:
    if options.html is not None:
        from onecard.report.pages.html import page, write_page

        write_page(Path(options.html), page(report, log_x=options.log_x))
        say(_("written: {path}").format(path=options.html))
    if options.json:
        from onecard.report.pages.programs import to_json

        show_json(json.dumps(to_json(report), indent=1, allow_nan=False))
    elif options.markdown:
        from onecard.report.pages.markdown import markdown

        show(markdown(report))
    else:
        from onecard.report.pages.show import first_screen, whole

        signs = signs_for(getattr(sys.stdout, "encoding", None))
        shown_by = whole if options.full else first_screen
        print_lines(shown_by(report, columns(of_a_pipe=PIPE), signs, log_x=options.log_x))
    return 1 if report.health == "not-healthy" else 0


def print_lines(lines: list[Segments]) -> None:
    from rich.text import Text

    to: Any = console(sys.stdout, width=max(20, columns(of_a_pipe=PIPE)), soft_wrap=True)
    for line in lines:
        to.print(Text.assemble(*line), highlight=False, soft_wrap=True)
