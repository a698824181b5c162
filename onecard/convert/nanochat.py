"""nanochat's own checkpoints: a file of weights, `model_021400.pt`, with its settings in `meta_021400.json`.

Optimizer states lie in files of their own and are not read. Rotary tables are not saved. Embeddings are
stored in bf16, everything else in fp32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onecard.arch.shapes import Nanochat2026Shape, NanochatShape
from onecard.convert.packing import packed, packing_of, shapes_there
from onecard.convert.reading import (
    EMBEDDING,
    HEAD,
    checked_tensors,
    load_without_executing,
    named_tensors,
    parameter_shapes,
    plain_name,
    read_settings,
    shown,
    sizes_in,
)
from onecard.errors import UserError
from onecard.language import _

_MODEL_FILE = re.compile(r"model_(\d+)\.pt")
_SIZES = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "vocab_size": "vocab_size",
    "block_size": "sequence_len",
}
# Since December 2025 embedding and head have rows up to a multiple of this; their logits are cut off.
_PADDED_TO = 64
_LONGEST_PATTERN = 1000


@dataclass
class NanochatCheckpoint:
    path: Path
    step: int
    shape: NanochatShape | Nanochat2026Shape
    tensors: dict[str, Tensor]


def nanochat_steps(folder: Path) -> dict[int, Path]:
    """The files of weights that nanochat left in a folder, by step, oldest first."""
    found = ((_MODEL_FILE.fullmatch(path.name), path) for path in folder.glob("model_*.pt"))
    steps = {int(match[1]): path for match, path in found if match and path.is_file()}
    return dict(sorted(steps.items()))


def is_nanochat_file(path: Path) -> bool:
    return path.is_file() and _MODEL_FILE.fullmatch(path.name) is not None


def read_nanochat_checkpoint(path: Path, step: int | None = None) -> NanochatCheckpoint:
    """path: one file of weights, or a folder of them, from which `step` or the newest is read."""
    if path.is_dir():
        path = _chosen(path, step)
    match = _MODEL_FILE.fullmatch(path.name)
    assert match is not None
    config = _model_config(path)
    found = named_tensors(load_without_executing(path), path)
    found = {plain_name(name): tensor for name, tensor in found.items()}
    shape = _shape_of(config, found, path)
    shapes = parameter_shapes(shape)
    packing = packing_of(shapes, _their_names)
    theirs = checked_tensors(_without_padding(found, shape.vocab_size), shapes_there(shapes, packing), path)
    return NanochatCheckpoint(path, int(match[1]), shape, packed(theirs, packing))


def _chosen(folder: Path, step: int | None) -> Path:
    steps = nanochat_steps(folder)
    if not steps:
        raise UserError(
            _("there is no checkpoint of nanochat in {folder}").format(folder=folder),
            _("it has no file model_NNNNNN.pt"),
        )
    if step is None:
        return steps[max(steps)]
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise UserError(
            _("there is no checkpoint of step {step} in {path}").format(step=step, path=folder),
            _("there are: {there}").format(there=there),
        )
    return steps[step]


def _meta_file(model: Path) -> Path:
    return model.with_name(model.name.replace("model_", "meta_")).with_suffix(".json")


def _model_config(model: Path) -> dict[str, Any]:
    meta = _meta_file(model)
    hint = _("it holds the model's sizes: copy it from where {name} was written").format(name=model.name)
    config = read_settings(meta, hint).get("model_config")
    if not isinstance(config, dict):
        raise UserError(
            _("{path} does not describe a model of nanochat").format(path=meta),
            _("it has no 'model_config' with the model's sizes"),
        )
    return config


def _shape_of(
    config: dict[str, Any], found: dict[str, Tensor], where: Path
) -> NanochatShape | Nanochat2026Shape:
    """Of October 2025, or with the weighted residuals and windows that came in 2026."""
    meta = _meta_file(where)
    sizes = sizes_in(config, _SIZES, len(found), meta)
    shape: NanochatShape | Nanochat2026Shape = NanochatShape(**sizes)
    kv_heads = config.get("n_kv_head", shape.n_head)
    if kv_heads != shape.n_head:
        raise UserError(
            _("{where} shares keys and values between heads, which onecard cannot compute").format(
                where=where
            ),
            _("it has {n_head} heads for queries and {value} for keys and values (n_kv_head)").format(
                n_head=shape.n_head, value=shown(kv_heads)
            ),
        )
    if shape.head_dim % 2:
        raise UserError(
            _("the model settings in {where} are incomplete or wrong").format(where=meta),
            _("heads of {head_dim} channels cannot be rotated: the number must be even").format(
                head_dim=shape.head_dim
            ),
        )
    if "resid_lambdas" in found or "window_pattern" in config:
        pattern = config.get("window_pattern", "L")
        if not isinstance(pattern, str) or len(pattern) > _LONGEST_PATTERN:
            raise UserError(
                _("the model settings in {where} are incomplete or wrong").format(where=meta),
                _("window_pattern is {value}").format(value=shown(pattern)),
            )
        pattern = pattern.upper()
        with_values = any(name.startswith("value_embeds.") for name in found)
        shape = Nanochat2026Shape(**sizes, window_pattern=pattern, value_embeddings=with_values)
    return shape


def _without_padding(found: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Padded rows took no part in nanochat's loss; kept, they would in ours."""
    padded = -(-vocab_size // _PADDED_TO) * _PADDED_TO
    values = [name for name in found if name.startswith("value_embeds.")]
    for name in (EMBEDDING, HEAD, *values):
        if name in found and found[name].dim() == 2 and len(found[name]) == padded:
            found = {**found, name: found[name][:vocab_size]}
    return found


def _their_names(name: str) -> tuple[str, ...]:
    if ".c_attn." not in name:
        return (name,)
    return tuple(name.replace("c_attn", part) for part in ("c_q", "c_k", "c_v"))
