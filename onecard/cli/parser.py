"""One parser for every verb: its own options, the knobs of a config where it takes them, and plain words.

Options are declared like knobs (config/knobs.py) and read by the same code, so that types, ranges, spellings
and "did you mean" are the same everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onecard.config.knobs import Config, flag_of, knobs, load_config, takes_value
from onecard.errors import UserError
from onecard.language import _


@dataclass(frozen=True)
class Verb:
    """`run` takes the options and the other words: plain ones, or those that make a config."""

    name: str
    summary: str  # a line of the front page
    usage: str  # what follows the name there
    options: type[Config]
    run: Callable[[Any, list[str]], int]
    words: tuple[tuple[str, str], ...] = ()  # plain words, and what they are
    least: int = 0  # plain words
    most: int | None = 0  # None: any number
    config: type[Config] | None = None  # whose knobs it takes besides; then all other words are the config's
    about: str = ""  # more, under the usage of its own page


def parse(verb: Verb, words: Sequence[str]) -> tuple[Any, list[str]]:
    """The verb's options, and all words that are not its own, in their order."""
    own, rest = _split(verb, list(words))
    if verb.config is None:
        _count(verb, rest)
    try:
        return load_config(verb.options, own), rest
    except UserError as error:
        error.hint = error.hint or f"onecard {verb.name} --help"
        raise


def _split(verb: Verb, queue: list[str]) -> tuple[list[str], list[str]]:
    mine = _names(verb.options)
    own: list[str] = []
    rest: list[str] = []
    while queue:
        word = queue.pop(0)
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if not word.startswith("-") or word == "-" or has_space(name):  # such as a prompt
            rest.append(word)
        elif name in mine:
            own.append(word)
            if "=" not in word and takes_value(verb.options, name):
                if not queue or queue[0].startswith("--"):
                    raise UserError(
                        _("--{name} needs a value").format(name=name.replace("_", "-")),
                        hint=f"onecard {verb.name} --help",
                    )
                own.append(queue.pop(0))
        else:
            _refuse_a_slip(verb, name, word)
            rest.append(word)
    return own, rest


def has_space(text: str) -> bool:
    return any(sign.isspace() for sign in text)


def _names(cls: type[Config]) -> set[str]:
    """All that may stand behind --, in any spelling."""
    fields = knobs(cls)
    names = {flag_of(f) for f in fields} | {f.metadata["alias"] for f in fields if f.metadata["alias"]}
    return names | {f"no_{flag_of(f)}" for f in fields if f.metadata["kind"] == "bool"}


def _refuse_a_slip(verb: Verb, name: str, word: str) -> None:
    """`--compair` is one of the verb's own, misspelt. What a config does not know, the config says."""
    known = _names(verb.config) | set(verb.config.foreign) if verb.config is not None else set()
    if name in known:
        return
    mine = _names(verb.options)
    near = difflib.get_close_matches(name, sorted(mine | known), n=1, cutoff=0.7)
    if near and near[0] in mine:
        hint = _("did you mean --{near}?").format(near=near[0].replace("_", "-"))
    elif verb.config is not None:
        return
    else:
        hint = f"onecard {verb.name} --help"
    shown = word.partition("=")[0][:60]
    raise UserError(_("there is no {name}").format(name=shown) if name else _no_option(word), hint=hint)


def _no_option(word: str) -> str:
    return _("'{word}' is not an option").format(word=word[:60])


def _count(verb: Verb, words: list[str]) -> None:
    hint = f"onecard {verb.name} --help"
    if len(words) < verb.least:
        needs = _("onecard {verb} needs {what}").format(
            verb=verb.name, what=verb.usage.replace("|", _(" or "))
        )
        raise UserError(needs, hint=hint)
    if verb.most is not None and len(words) > verb.most:
        raise UserError(
            _("onecard {verb} has no use for '{word}'").format(verb=verb.name, word=words[verb.most][:60]),
            hint=hint,
        )
