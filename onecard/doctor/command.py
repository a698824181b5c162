"""`onecard doctor`: a traceback, a log or a chatbot's advice in, a diagnosis out; alone, this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.doctor.answering import Limits, diagnose
from onecard.doctor.apply import apply_cure
from onecard.doctor.asked import MOST, asked, without_names
from onecard.doctor.options import Options
from onecard.doctor.show import WIDTH, lines_of
from onecard.errors import UserError
from onecard.hardware.cards import Card, find_card, match_rates
from onecard.language import _, english
from onecard.report.gathering.source import opened
from onecard.terminal import columns, hanging, say, show, show_json

LEVELS = {"ok": "ok     ", "warning": "warning", "wrong": "wrong  "}


def doctor_command(source: str | None, flags: Options, usual_gpu: str | None = None) -> int:
    """0: all is well, or a cure was found; 1: something is wrong that a person has to mend."""
    with english(flags.json):
        if source is None:
            return _machine(flags)
        found = asked(_content(source), _config(flags.config), _card(flags.gpu))
        if found.card is None and usual_gpu is not None:
            found = replace(found, card=match_rates(usual_gpu))
        diagnosis = diagnose(found, Limits(flags.vram_limit, flags.vram_reserve))
        if flags.json:
            text = json.dumps(diagnosis.to_json(), indent=1, ensure_ascii=False)
            show_json(without_names(text))
        else:
            show("\n".join(lines_of(diagnosis, full=flags.full)))
        if flags.apply and flags.config is not None:
            return (
                0
                if apply_cure(flags.config, diagnosis.cures, yes=flags.yes, tell=say if flags.json else show)
                else 1
            )
        return 0 if diagnosis.is_known else 1


def _card(gpu: str | None) -> Card | None:
    return None if gpu is None else match_rates(gpu) or find_card(gpu)


def _config(path: str | None) -> RunConfig | None:
    if path is None:
        return None
    others = frozenset(field.name for field in knobs(SampleConfig))
    return load_config(RunConfig, [path], also_known=others)


def _content(source: str) -> bytes:
    if source != "-" and Path(source).is_dir() and not (Path(source) / "log.txt").exists():
        raise UserError(
            _("there is no log in {path}").format(path=source),
            hint=_("`onecard {verb} -` reads what you paste").format(verb="doctor"),
        )
    with opened(source, "doctor") as log:
        return log.read(MOST)


def _machine(flags: Options) -> int:
    from onecard.doctor.this_machine import WRONG, checks_of, look

    checks = checks_of(look())
    if flags.json:
        show_json(json.dumps([vars(check) for check in checks], indent=1, ensure_ascii=False))
    else:
        names = {"ok": _("ok"), "warning": _("warning"), "wrong": _("wrong")}
        wide = max(map(len, names.values()))
        lines: list[str] = []
        for check in checks:
            lines += hanging(
                f"{names[check.level]:<{wide}}  {check.text}", columns(of_a_pipe=WIDTH), wide + 2
            )
            if check.mend:
                lines += hanging(" " * (wide + 2) + f"→ {check.mend}", columns(of_a_pipe=WIDTH), wide + 4)
        show("\n".join(lines))
    return 1 if any(check.level == WRONG for check in checks) else 0
