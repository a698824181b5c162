"""Datasets under the names that published figures have them by (plan/references.toml), and their length."""

from __future__ import annotations

from pathlib import Path

from onecard.config.dataset import DataFacts, data_facts
from onecard.errors import UserError
from onecard.plan.texts import known_text
from onecard.report.gathering.sources import Sources, whole

# Where references.toml writes a name otherwise.
_THERE = {"tiny Shakespeare": "tinyshakespeare"}

NO_DATA = DataFacts(Path(), is_there=False)


def dataset_named(dataset: str | None) -> str | None:
    """As others write about it; a name of its own stays as it is."""
    if not dataset:
        return None
    text = known_text(dataset)
    return _THERE.get(text.name, text.name) if text is not None else dataset


def data_here(dataset: str | None) -> DataFacts | None:
    """What is known of data of this name on this machine."""
    if not dataset:
        return None
    try:
        return data_facts(dataset)
    except (UserError, OSError, ValueError):
        return None


def train_tokens_of(sources: Sources, dataset: str | None) -> int | None:
    """Of the training data. A pasted log's may be other data of the same name: only what goes with a config
    or a folder here is looked at."""
    here = data_here(dataset) if sources.config is not None else None
    return sources.first(
        "train_tokens", sources.in_log("train_tokens", whole), ("data", here.train_tokens if here else None)
    )
