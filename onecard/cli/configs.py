"""Words that make a config: files, a run's folder, a prompt, and flags."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from onecard.cli.parser import has_space
from onecard.config.knobs import knobs, load_config, takes_value
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.errors import UserError
from onecard.language import _

_ALSO_KNOWN = frozenset(f.name for f in knobs(SampleConfig))


def config_to_plan(words: Sequence[str]) -> tuple[RunConfig, int, str]:
    """The config as train would read it from these words; the steps that are done of a run that would go on;
    and, where that run is finished, what to say of it. A run's folder stands for its --out_dir."""
    from onecard.run.directory import RunDirectory, load_run_config

    folders = [word for word in words if not word.startswith("-") and _is_run(word)]
    if len(folders) > 1:
        raise UserError(
            _("one run can be planned at a time"),
            _("these are {n}: {names}").format(n=len(folders), names=", ".join(folders)),
        )
    words = [f"--out_dir={word}" if word in folders else word for word in words]
    config = load_run_config(words, _ALSO_KNOWN)
    brought = set(config.origins) - set(load_config(RunConfig, words, _ALSO_KNOWN).origins)
    if brought and not any(word.startswith("--out_dir") for word in words):
        note = _("the run in {folder} goes on, with values it was begun with (--fresh plans a new one)")
        config = dataclasses.replace(config, notes=(*config.notes, note.format(folder=config.out_dir)))
    if not brought or config.fresh or config.init_from not in ("auto", "resume"):
        return config, 0, ""
    from onecard.train.finished import finished_text

    directory = RunDirectory(config.out_dir)
    return config, directory.newest_step(), finished_text(directory, config)


def config_of_sample(words: Sequence[str]) -> list[str]:
    """`sample RUN "TEXT"`: the run's folder and the prompt as flags; nanoGPT's config files stay files."""
    # What follows a flag without = is its value.
    after = {
        i + 1 for i, word in enumerate(words) if _is_flag(word) and "=" not in word and _takes_value(word)
    }
    plain = [i for i, word in enumerate(words) if not (_is_flag(word) or i in after or _is_config_file(word))]
    given = {_name(word) for word in words if _is_flag(word)}
    names = ["start"] if "out_dir" in given or _is_prompt_alone(words, plain) else ["out_dir", "start"]
    if len(plain) > len(names):
        raise UserError(
            _("sample takes a run and a text"),
            _("these are {n}: {names}").format(n=len(plain), names=", ".join(words[i][:40] for i in plain)),
            'onecard sample RUN "Once upon a time"',
        )
    flags = dict(zip(plain, names, strict=False))
    if "start" in flags.values() and "start" in given:
        raise UserError(
            _("the beginning of the text is given twice"), hint=_("leave out --start, or the text")
        )
    if len(plain) == 2 and not _exists(words[plain[0]]) and _is_run(words[plain[1]]):
        raise UserError(
            _("the run comes first, then the text"),
            hint=f"onecard sample {shlex.quote(words[plain[1]])} {shlex.quote(words[plain[0]])}",
        )
    return [f"--{flags[i]}={word}" if i in flags else word for i, word in enumerate(words)]


def _is_prompt_alone(words: Sequence[str], plain: Sequence[int]) -> bool:
    """Is the one plain word a text, by its spaces? Then the run is the usual one."""
    return len(plain) == 1 and len(words[plain[0]].split()) > 1 and not _exists(words[plain[0]])


def _is_flag(word: str) -> bool:
    """A text may begin with - too; no name of a flag has spaces."""
    return word.startswith("-") and not has_space(_name(word))


def _is_config_file(word: str) -> bool:
    return word.endswith(".py") and not has_space(word)


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _takes_value(word: str) -> bool:
    return takes_value(SampleConfig, _name(word)) or takes_value(RunConfig, _name(word))


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except (OSError, ValueError):
        return False


def _is_run(word: str) -> bool:
    from onecard.run.directory import RunDirectory

    try:
        return RunDirectory(word).config_path.is_file() and Path(word).is_dir()
    except (OSError, ValueError, UserError):  # a name too long, empty, or with a NUL in it
        return False
