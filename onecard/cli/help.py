"""The front page, and a page for every verb; in one form, as wide as the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from onecard.cli.parser import Verb
from onecard.config.knobs import Config, flag_of, knobs
from onecard.language import _
from onecard.terminal import columns, hanging

_TEXT, _FRONT = 26, 32  # columns: where what a flag does begins; and what a verb does, on the front page
_LONG = 100  # of a pipe


def front_page(verbs: Mapping[str, Verb]) -> str:
    lines = [_("onecard: pretrain language models on the one graphics card you own"), ""]
    for verb in verbs.values():
        lines.append(f"  {f'onecard {verb.name} {verb.usage}':<{_FRONT - 4}}  {_(verb.summary)}")
    lines += [
        "",
        _("Each verb explains itself: onecard VERB --help"),
        _("To begin with: {command}").format(
            command="onecard prepare stdlib && onecard train config/demo.py"
        ),
    ]
    return _fitted(lines, _FRONT)


def page(verb: Verb, *, everything: bool) -> str:
    """`everything`: all knobs of the config by group, else those that people use."""
    options = " [--OPTION ...]" if knobs(verb.options) else ""
    knobs_shown = " [--KNOB=VALUE ...]" if verb.config is not None else ""
    summary = _(verb.summary)
    lines = [
        f"onecard {verb.name} {verb.usage}{options}{knobs_shown}",
        "",
        f"{summary[:1].upper()}{summary[1:]}.",
    ]
    lines += [_(verb.about)] if verb.about else []
    if verb.words:
        lines += ["", *(_line(name, _(text)) for name, text in verb.words)]
    lines += _groups(verb.options, knobs(verb.options))
    if verb.config is not None:
        fields = knobs(verb.config)
        if everything:
            lines += _groups(verb.config, fields)
        else:
            common = [f for f in fields if f.metadata["common"]]
            lines += ["", _("the knobs that people use most:")]
            lines += [_knob(f) for f in common]
            rest = len(fields) - len(common)
            if rest:
                lines.append("")
                lines.append(_("{n} more: onecard {verb} --help-all").format(n=rest, verb=verb.name))
        lines += ["", _("--name=value, --name value and --switch are understood, - and _ alike.")]
    return _fitted(lines, _TEXT)


def _groups(cls: type[Config], fields: Iterable[dataclasses.Field[Any]]) -> list[str]:
    groups: dict[str, list[str]] = {group: [] for group in cls.groups}
    for field in fields:
        groups.setdefault(field.metadata["group"], []).append(_knob(field))
    lines: list[str] = []
    for group, entries in groups.items():
        if entries:
            lines += ["", f"{_(group)}:", *entries]
    return lines


def _knob(field: dataclasses.Field[Any]) -> str:
    """`--name=VALUE` with its default, and what it does. Switches that are off show no default."""
    name, kind, default = flag_of(field), field.metadata["kind"], field.default
    shown = f"--{name}" if field.metadata["knob"] else f"--{name.replace('_', '-')}"
    text = _(field.metadata["help"])
    if field.metadata["alias"] and field.metadata["knob"]:
        text += " " + _("(also --{name})").format(name=field.metadata["alias"].replace("_", "-"))
    if kind == "bool" and default is False and not field.metadata["knob"]:
        return _line(shown, text)
    if field.metadata["knob"]:
        value = "auto" if default is None else repr(default) if isinstance(default, str) else f"{default}"
        return _line(f"{shown}={value}", text)
    if default not in (None, False):
        text += f" [{default}]"
    return _line(f"{shown} {field.metadata['value'] or kind.upper()}", text)


def _line(what: str, text: str) -> str:
    """A flag too long for its column has what it does on the next line."""
    if len(what) + 4 <= _TEXT:
        return f"  {what:<{_TEXT - 2}}{text}"
    return f"  {what}\n{' ' * _TEXT}{text}"


def _fitted(lines: list[str], indent: int) -> str:
    width = columns(of_a_pipe=_LONG)
    fitted = []
    for line in "\n".join(lines).split("\n"):
        inside = line.startswith("  ")
        fitted += hanging(line, width, indent if inside else 0)
    return "\n".join(fitted).rstrip()
