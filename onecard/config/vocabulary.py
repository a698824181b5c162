"""The vocabulary that a config counts on, and how to prepare it: it decides which model the config makes.

Data in other tokens trains as well, but another model than the config's. Who has no data yet gets the command
that makes the right ones, and who has others gets a note.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from onecard.arch import dial
from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, GPT2_VOCABULARY
from onecard.config.dataset import data_dir
from onecard.config.files import COMMAND_LINE, MAX_FILE_BYTES
from onecard.config.run import RunConfig
from onecard.files import read_bounded
from onecard.language import _

_RECIPE = re.compile(r"#.*?\b(onecard prepare\s.+)")
# GPT-2's own 50,257 and what it is padded to. Less than a thousand are bytes or characters.
_GPT2, _LEAST_TRAINED = range(GPT2_VOCABULARY, GPT2_PADDED_VOCABULARY + 129), 1024
_PADDING = 128  # a difference below this is padding, or tokens with a special meaning


@dataclass(frozen=True)
class Wanted:
    """`tokenizer`: the size of one trained on the data, None for another kind. `command` prepares the data,
    as the config's own comment says; empty where none does."""

    tokenizer: int | None
    command: str = ""


def wanted_data(config: RunConfig) -> Wanted:
    """For who has no data yet."""
    command = _recipe(config)
    if command:
        return Wanted(_trained(command), command)
    size = config.vocab_size
    if size is None and config.arch == "nanochat":
        size = dial.GENERATIONS[config.generation].vocab_size
    trained = size is not None and size >= _LEAST_TRAINED and size not in _GPT2
    return Wanted(size if trained else None)


def other_vocabulary(config: RunConfig, there: int | None) -> str | None:
    """A note where the config counts on another vocabulary than the data's (`there`, None: unknown)."""
    command = _recipe(config)
    pinned = config.is_set("vocab_size") and config.vocab_size is not None
    wanted = config.vocab_size if pinned else _trained(command)
    if wanted is None or there is None or abs(wanted - there) < _PADDING:
        return None
    facts = {"folder": data_dir(config.dataset), "there": there, "wanted": wanted}
    if pinned:
        note = _(
            "{folder} has {there:,} tokens in its vocabulary, and vocab_size is {wanted:,}: the rest is "
            "never seen"
        )
    else:
        note = _(
            "{folder} has {there:,} tokens in its vocabulary, {file} counts on {wanted:,}: this is another "
            "model than the one it describes"
        )
    text = note.format(**facts, file=config.origins["dataset"].rpartition(":")[0])
    if not command:
        return text
    return _("{note}; the data it is meant for: {command}").format(note=text, command=command)


def _recipe(config: RunConfig) -> str:
    """The `onecard prepare` in the comments of the file that names the dataset, if it makes that dataset."""
    path, colon, _line = config.origins.get("dataset", "").rpartition(":")
    if not colon or config.origins.get("vocab_size") == COMMAND_LINE:
        return ""
    try:
        lines = read_bounded(Path(path), MAX_FILE_BYTES).decode("utf-8").splitlines()
    except (OSError, ValueError):
        return ""  # of a run that goes on elsewhere
    found = (match[1].strip() for line in lines if (match := _RECIPE.match(line.strip())))
    return next((command for command in found if _makes(command) == config.dataset), "")


def _makes(command: str) -> str:
    """The name of the dataset that it prepares."""
    words = _words(command)
    return _value(words, "--name") or (words[2] if len(words) > 2 and "--edu" not in words else "")


def _trained(command: str) -> int | None:
    size = _value(_words(command), "--train-tokenizer")
    return int(size) if size.isdecimal() else None


def _value(words: list[str], option: str) -> str:
    for word, after in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return ""


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # prose with an apostrophe
        return command.split()
