"""The config of a run that somebody else's trainer has: read for what it says, and not held against it.

A knob that is misspelt, or one that contradicts another, is a note here; it stops only where an answer about
the run would rest on it.
"""

from __future__ import annotations

import difflib

from onecard.config.files import read_config_file
from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.errors import UserError
from onecard.language import _

# What the speed, the model and the length of a run follow from.
_NEEDED = frozenset(
    ("batch_size", "block_size", "gradient_accumulation_steps", "total_batch_size", "n_layer", "n_head",
     "n_embd", "vocab_size", "max_iters", "tokens", "depth", "arch", "eval_interval", "eval_iters", "dtype")
)  # fmt: skip


def config_from(path: str) -> tuple[RunConfig, tuple[str, ...]]:
    """The config in a file, and notes on what of it was passed over."""
    ours = {field.name: field.default for field in knobs(RunConfig)}
    aliases = {field.metadata["alias"] for field in knobs(RunConfig) if field.metadata["alias"]}
    others = {field.name for field in knobs(SampleConfig)} | set(RunConfig.foreign)
    known = ours.keys() | aliases | others
    unknown, notes = set(), []
    for assignment in read_config_file(path, dict.fromkeys(known) | ours).assignments:
        if assignment.name in known:
            continue
        near = difflib.get_close_matches(assignment.name, ours, n=1, cutoff=0.8)
        if near and near[0] in _NEEDED:
            continue  # the one that is meant is needed: load_config says what is wrong
        unknown.add(assignment.name)
        text = _("{where}: there is no knob called '{name}'; it is passed over")
        notes.append(text.format(where=assignment.origin, name=assignment.name))
    config = load_config(RunConfig, [path], also_known=frozenset(others | unknown), check=False)
    try:
        config.check()
    except UserError as error:
        notes.append(f"{path}: {error.what}")
    return config, tuple(notes)
