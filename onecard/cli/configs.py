"""Words that make a config: files, a run's folder, a prompt, and flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.errors import UserError
from onecard.language import _

_ALSO_KNOWN = frozenset(f.name for f in knobs(SampleConfig))


def config_to_plan(words: Sequence[str]) -> tuple[RunConfig, int]:
    """As train would read these words, and the steps that are done of a run that would go on. A run's folder
    stands for its --out_dir."""
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
    goes_on = brought and not config.fresh and config.init_from in ("auto", "resume")
    return config, RunDirectory(config.out_dir).newest_step() if goes_on else 0


def config_of_sample(words: Sequence[str]) -> list[str]:
    """`sample RUN "TEXT"`: the run's folder and the prompt as flags; nanoGPT's config files stay files."""
    plain = [word for word in words if not word.startswith("-") and not word.endswith(".py")]
    # What follows a flag without = is its value.
    values = {after for word, after in pairwise(words) if word.startswith("--") and "=" not in word}
    plain = [word for word in plain if word not in values]
    if len(plain) > 2:
        raise UserError(
            _("sample takes a run and a text"),
            _("these are {n}: {names}").format(n=len(plain), names=", ".join(word[:40] for word in plain)),
            'onecard sample RUN "Once upon a time"',
        )
    flags = dict(zip(plain, ("--out_dir", "--start"), strict=False))
    return [f"{flags[word]}={word}" if word in flags else word for word in words]


def _is_run(word: str) -> bool:
    from onecard.run.directory import RunDirectory

    try:
        return RunDirectory(word).config_path.is_file() and Path(word).is_dir()
    except (OSError, ValueError):  # a name too long, or with a NUL in it: whoever reads configs says so
        return False
