"""What a person asks about: a paste, with what is known of its run from the paste, a config and flags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.doctor.advised import NOTHING_ADVISED, Advised, advised_in
from onecard.doctor.frames import Buffer, Frame, buffers_of, frames_of
from onecard.doctor.out_of_memory import OutOfMemory, first
from onecard.doctor.paste import Pasted, pasted
from onecard.errors import UserError
from onecard.hardware.cards import Card, match_card, match_rates
from onecard.report.reading.reader import Reader
from onecard.report.reading.text import blocks

PROSE = 60_000  # characters
MOST = 64_000_000  # bytes of a paste that are read
# Facts that name a model; with none of them a config is a guess.
_OF_MODEL = ("n_embd", "n_layer", "depth", "num_layers")
# Others' names for knobs.
_NAMES = {
    "device_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "max_seq_len": "block_size",
    "sequence_len": "block_size",
    "model_dim": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
}
_CARD = re.compile(
    r"(?<![\w×.])(?<!\d[x×] )(?<!\dx)(?:(?:RTX|GTX)[ -]?(?:PRO )?[0-9]{4}(?: ?Ti)?"
    r"(?: (?:Super|SUPER))?(?: Laptop)?"
    r"|RTX A[0-9]{4}|(?:Tesla )?(?:T4|V100|P100|P40)|A100|H100|H200|A6000|L40S?|L4|A10G?|B200)"
    r"(?: ?\(?\d{1,3} ?GB\)?)?(?!\w)"
)
# nanoGPT's own 124M, whose sizes are its defaults.
_GPT2 = re.compile(r"config/train_gpt2\.py|nanoGPT.{0,40}\b124M\b|\b124M\b.{0,40}nanoGPT", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:\\|/)(?:home|Users|root|mnt/c/Users)[\\/][^\\/\s\"']{1,60}[\\/]")


@dataclass(frozen=True)
class Asked:
    text: str
    pasted: Pasted
    frames: tuple[Frame, ...]
    buffers: tuple[Buffer, ...]
    config: RunConfig | None
    card: Card | None
    reader: Reader
    is_whole: bool = True  # False: the config is completed from the trainer's defaults
    advised: Advised = NOTHING_ADVISED

    @cached_property
    def message(self) -> OutOfMemory | None:
        """Of memory that ran out."""
        return first(self.text)

    @cached_property
    def prose(self) -> str:
        """Of a long text its beginning and its end: what is between is a log, and no sentence."""
        return (
            self.text if len(self.text) <= 3 * PROSE else self.text[: 2 * PROSE] + "\n" + self.text[-PROSE:]
        )


def asked(content: bytes, config: RunConfig | None = None, card: Card | None = None) -> Asked:
    """`config` and `card` are the person's own words, and come before the paste's."""
    reader = Reader()
    # A paste ends where its writer ended it: its last line is whole.
    parts = list(blocks(content[:MOST] + b"\n"))
    for at, part in enumerate(parts):
        # Of a log every row is read, and of anything else its beginning and its end.
        if at < 1 or reader.has_rows or at == len(parts) - 1:
            reader.read(part)
    reader.finish()
    text = "".join(parts)
    frames, buffers = frames_of(text), buffers_of(text)
    known = {n: v for n, v in reader.prose.settings.items() if n in _OF_MODEL}
    if config is not None:
        known = {name: value for name, value in config.values().items() if value is not None}
    advice = advised_in(
        text,
        buffers,
        known,
        is_own=bool(frames) or reader.has_rows or "Traceback" in text,
    )
    values = values_of(reader)
    # Of an advice the reader knows the values that it ends with; it is about those that were.
    values |= advice.was if advice.stages else {}
    _complete(values, reader)
    if not any(name in values for name in _OF_MODEL) and _GPT2.search(text[:200_000]):
        values = {"n_layer": 12, "n_head": 12, "n_embd": 768} | values
    found = pasted(text, frames, buffers, values)
    whole = config is not None or any(name in found.values for name in _OF_MODEL)
    if config is None:
        config = _config(found.values) if whole else None
    return Asked(
        text,
        found,
        tuple(frames),
        tuple(buffers),
        config,
        card or card_of(reader, text),
        reader,
        whole,
        advice,
    )


def values_of(reader: Reader) -> dict[str, Any]:
    """Settings by nanoGPT's names: the last start's, the command's, then the prose's."""
    settings: dict[str, Any] = {**reader.prose.settings, **reader.settings, **reader.commands}
    for runs in reader.runs.values():
        for start in runs.starts:
            settings.update(start.settings)
    return {_NAMES.get(name, name): value for name, value in settings.items()}


def _complete(values: dict[str, Any], reader: Reader) -> None:
    """The batch that follows from a step's tokens, where only these are said."""
    step = {**reader.prose.facts, **reader.facts}.get("tokens_per_step")
    block, micros = values.get("block_size"), values.get("gradient_accumulation_steps")
    if "batch_size" in values or not all(isinstance(n, int) and n > 0 for n in (step, block, micros)):
        return
    if step % (block * micros) == 0:  # type: ignore[operator]
        values["batch_size"] = step // (block * micros)  # type: ignore[operator]


def card_of(reader: Reader, text: str) -> Card | None:
    """The card that is named, with its size where a message prints it: "RTX 4070" of 12 or 16 GB."""
    said = reader.facts.get("gpu") or _card_in_prose(text) or reader.prose.facts.get("gpu")
    capacity = re.search(r"total capac?i?ty of (\d{1,4}\.\d\d) GiB|(\d{1,4}\.\d\d) GiB total capacity", text)
    size = float(capacity[1] or capacity[2]) if capacity else None
    if said is None:
        return None
    return (match_card(str(said), size) if size else None) or match_rates(str(said))


def _card_in_prose(text: str) -> str | None:
    """The one that most is said of, and not "8×H100", which others have used."""
    names = (re.sub(r"[()]", "", " ".join(found[0].split())) for found in _CARD.finditer(text[:200_000]))
    counts = Counter(name for name in names if match_rates(name) is not None)
    return max(counts, key=lambda name: (counts[name], len(name))) if counts else None


def _config(values: Mapping[str, Any]) -> RunConfig | None:
    """As nanoGPT would read these lines; what its knobs do not know, or may not be, is left out."""
    known = {field.name for field in knobs(RunConfig)}
    words = [f"--{name}={_word(value)}" for name, value in values.items() if name in known]
    if "depth" in values:
        words = [word for word in words if not word.startswith(("--n_embd", "--n_layer", "--n_head"))]
    while True:
        try:
            return load_config(RunConfig, words, check=False)
        except UserError as error:
            bad = next((w for w in words if w[2:].partition("=")[0] in f"{error.what} {error.why}"), None)
            if bad is None:
                return None
            words.remove(bad)


def _word(value: Any) -> str:
    return str(value)


def without_names(text: str) -> str:
    """The text without a person's folders: /home/NAME/ becomes ~/."""
    return _PATH.sub("~/", text)
