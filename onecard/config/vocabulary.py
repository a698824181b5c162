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
from onecard.config.dataset import OWN_TOKENS, data_dir
from onecard.config.files import COMMAND_LINE, MAX_FILE_BYTES
from onecard.config.run import RunConfig
from onecard.files import read_bounded
from onecard.language import _

_RECIPE = re.compile(r"#.*?\b(onecard prepare\s.+)")
# GPT-2's own 50,257 and what it is padded to. Less than a thousand are bytes or characters.
_GPT2, _LEAST_TRAINED = range(GPT2_VOCABULARY, GPT2_PADDED_VOCABULARY + 129), 1024
_BYTES = 256  # less are characters
_PADDING = 128  # a difference below this is padding, or tokens with a special meaning


@dataclass(frozen=True)
class DataRecipe:
    """How to prepare the data that a config needs: the whole `command`, as the config's own comment says, or
    the `flags` that make tokens of the right kind. Both may be empty; without flags they are GPT-2's."""

    flags: str = ""
    command: str = ""


def data_recipe(config: RunConfig) -> DataRecipe:
    """For who has no data yet."""
    if command := _recipe(config):
        return DataRecipe(_kind_of_tokens(command), command)
    if config.vocab_size is not None:
        return DataRecipe(_flags_for(config.vocab_size))
    # Of a file whose data somebody replaces by his own, the kind of tokens stays.
    files = {path for path, colon, _line in (o.rpartition(":") for o in config.origins.values()) if colon}
    for command in (command for path in sorted(files) for command in _recipes_in(Path(path))):
        return DataRecipe(_kind_of_tokens(command))
    usual = config.arch == "nanochat"
    return DataRecipe(_flags_for(dial.GENERATIONS[config.generation].vocab_size) if usual else "")


def _flags_for(size: int) -> str:
    if size in _GPT2:
        return ""
    if size >= _LEAST_TRAINED:
        return f"--train-tokenizer {size}"
    return "--tokenizer byte" if size >= _BYTES else "--tokenizer char"


def _kind_of_tokens(command: str) -> str:
    trained, words = _trained(command), _words(command)
    if trained is not None:
        return f"--train-tokenizer {trained}"
    tokenizer = value_in(command, "--tokenizer") or OWN_TOKENS.get(_name_in(words), ("",))[0]
    return f"--tokenizer {tokenizer}" if tokenizer and tokenizer != "gpt2" else ""


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
    found = _recipes_in(Path(path))
    return next((command for command in found if _makes(command) == config.dataset), "")


def _recipes_in(path: Path) -> list[str]:
    try:
        lines = read_bounded(path, MAX_FILE_BYTES).decode("utf-8").splitlines()
    except (OSError, ValueError):
        return []  # of a run that goes on elsewhere
    return [match[1].strip() for line in lines if (match := _RECIPE.match(line.strip()))]


def _makes(command: str) -> str:
    """The name of the dataset that it prepares."""
    words = _words(command)
    return value_in(command, "--name") or ("" if "--edu" in words else _name_in(words))


def _name_in(words: list[str]) -> str:
    return words[2] if len(words) > 2 else ""


def _trained(command: str) -> int | None:
    size = value_in(command, "--train-tokenizer")
    return int(size) if size.isdecimal() else None


def value_in(command: str, option: str) -> str:
    """Of an option of this command; empty where it is not given."""
    for word, after in pairwise([*_words(command), ""]):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return ""


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # prose with an apostrophe
        return command.split()
