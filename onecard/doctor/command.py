"""`onecard doctor`: a traceback, a log or a chatbot's advice in, a diagnosis out; alone, this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.doctor.asked import Asked, asked, without_names
from onecard.doctor.diagnosis import Diagnosis
from onecard.doctor.frames import moment_of
from onecard.doctor.memory import Case
from onecard.doctor.memory import diagnose as of_memory
from onecard.doctor.out_of_memory import first
from onecard.errors import UserError
from onecard.hardware.cards import Card, find_card, match_rates
from onecard.language import _, english
from onecard.plan.machine import Figures, Target, find_target
from onecard.report.source import content_of
from onecard.terminal import columns, hanging, show, show_json

WIDTH = 100
LEVELS = {"ok": "ok     ", "warning": "warning", "wrong": "wrong  "}


@dataclass(frozen=True)
class Flags:
    config: str | None = None
    gpu: str | None = None
    usual_gpu: str | None = None
    vram_limit: float | None = None
    vram_reserve: float | None = None
    json: bool = False
    full: bool = False
    apply: bool = False
    yes: bool = False


def doctor_command(source: str | None, flags: Flags) -> int:
    """0: all is well, or a cure was found; 1: something is wrong that a person has to mend."""
    with english(flags.json):
        if source is None:
            return _machine(flags)
        found = asked(_content(source), _config(flags.config), _card(flags.gpu))
        if found.card is None and flags.usual_gpu is not None:
            found = replace(found, card=match_rates(flags.usual_gpu))
        diagnosis = diagnose(found, flags)
        if flags.json:
            text = json.dumps(diagnosis.to_json(), indent=1, ensure_ascii=False)
            show_json(without_names(text))
        else:
            show("\n".join(lines_of(diagnosis)))
        return 0 if diagnosis.is_known else 1


def diagnose(found: Asked, flags: Flags) -> Diagnosis:
    message = first(found.text)
    if message is not None:
        config = found.config
        return of_memory(
            Case(
                message, moment_of(list(found.frames), found.text), found.buffers, found.pasted, config,
                _target(found, flags),
            )
        )  # fmt: skip
    return Diagnosis(
        "unknown", _("No error that is known here was found in the paste."),
        unknown=(_("paste the whole traceback, from its first line to its last"),),
    )  # fmt: skip


def _target(found: Asked, flags: Flags) -> Target | None:
    if found.card is None:
        return None
    config = found.config or RunConfig()
    if flags.vram_limit is not None or flags.vram_reserve is not None:
        config = replace(
            config, vram_limit=flags.vram_limit or config.vram_limit,
            vram_reserve=flags.vram_reserve if flags.vram_reserve is not None else config.vram_reserve,
        )  # fmt: skip
    return find_target(config, found.card.name, None, Figures())


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
            hint=_("`onecard doctor -` reads what you paste"),
        )
    return content_of(source)


# --- for people -------------------------------------------------------------------------------------


def lines_of(found: Diagnosis) -> list[str]:
    """Ten to fifteen lines: what happened, what shows it, what to do, what does not help."""
    wide = min(WIDTH, columns(of_a_pipe=WIDTH))
    lines = hanging(found.what, wide, 0)
    for evidence in found.evidence:
        lines += hanging("  " + evidence.text, wide, 4)
    for cure in found.cures:
        what = [
            _("in nanoGPT")
            if cure.trainer == "nanogpt"
            else _("here: {command}").format(command=cure.command)
        ]
        figures = [f"{cure.bytes / 2**30:.2f} GiB", _("{n:.2f} to spare").format(n=cure.spare / 2**30)]
        if cure.tokens_per_s:
            figures.append(_("{n:,.0f} tokens/s").format(n=cure.tokens_per_s))
        lines.append(f"{_('cure')}  {what[0]}: " + ", ".join(figures))
        lines += [f"    {line}" for line in cure.lines]
    lines += [line for text in found.advice for line in hanging(f"{_('cure')}  {text}", wide, 6)]
    lines += [line for f in found.folklore for line in hanging(f"✗ {f.text}", wide, 4)]
    lines += [line for text in found.unknown for line in hanging("? " + text, wide, 4)]
    if found.next:
        lines += hanging(_("next: {command}").format(command=found.next), wide, 6)
    return lines


def _machine(flags: Flags) -> int:
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
