"""What a paste shows of the run it is about: its trainer, its config's values, its card.

Values stand in config lines, command lines, printed configs, tensors of Inductor's code and plain
sentences. The log reader knows most of these forms; what it finds is completed from the traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onecard.doctor.frames import Buffer, Frame

_FILES = (
    ("nanochat", ("base_train", "chat_sft", "mid_train", "nanochat/")),
    ("onecard", ("onecard/",)),
    ("litgpt", ("litgpt/",)),
    ("huggingface", ("transformers/trainer.py", "trl/", "accelerate/")),
    ("lightning", ("lightning/",)),
    ("nanogpt", ("nanoGPT", "train.py")),
)
USUAL_VOCABULARIES = frozenset((50257, 50304, 32768, 65536, 32000, 128256, 151936))


@dataclass(frozen=True)
class Pasted:
    """`values` are knobs by nanoGPT's names; `trainer` is None where nothing shows it."""

    trainer: str | None
    values: Mapping[str, int | float | str | bool]
    compiled: bool | None = None


def pasted(
    text: str, frames: list[Frame], buffers: list[Buffer], values: Mapping[str, int | float | str | bool]
) -> Pasted:
    found = Pasted(_trainer(frames, text), dict(values), _compiled(frames, buffers, values))
    return _with_buffers(found, buffers)


def _trainer(frames: list[Frame], text: str) -> str | None:
    files = [frame.file.replace("\\", "/") for frame in frames]
    for name, parts in _FILES:
        if any(part in file for file in files for part in parts):
            return name
    words = text[:200_000].lower()
    for name, parts in (
        ("nanochat", ("nanochat", "base_train")),
        ("onecard", ("onecard train",)),
        ("nanogpt", ("nanogpt", "train.py", "gradient_accumulation_steps", "n_embd")),
        ("huggingface", ("trainingarguments", "per_device_train_batch_size", "from_pretrained")),
    ):
        if any(part in words for part in parts):
            return name
    return None


def _compiled(
    frames: list[Frame], buffers: list[Buffer], values: Mapping[str, int | float | str | bool]
) -> bool | None:
    """What ran when it died: Inductor's code shows it even where the config says otherwise."""
    if buffers or any("inductor" in frame.file or "_dynamo" in frame.file for frame in frames):
        return True
    said = values.get("compile")
    if isinstance(said, bool):
        return said
    inside = any(frame.name in ("model.py", "gpt.py") and frame.function == "forward" for frame in frames)
    return False if inside else None


def _with_buffers(found: Pasted, buffers: list[Buffer]) -> Pasted:
    """Batch, block and vocabulary of a tensor whose last side is a vocabulary."""
    for buffer in buffers:
        shape = buffer.shape
        if shape[-1] not in USUAL_VOCABULARIES or len(shape) not in (2, 3):
            continue
        values = dict(found.values)
        values.setdefault("vocab_size", shape[-1])
        if len(shape) == 3:
            values.setdefault("batch_size", shape[0])
            values.setdefault("block_size", shape[1])
        return replace(found, values=values)
    return found
