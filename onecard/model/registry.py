"""The model class of every shape: the one module that knows all architectures."""

from __future__ import annotations

from typing import Any

from onecard.arch.shapes import SHAPES, GPT2Shape, Nanochat2026Shape, NanochatShape, Shape
from onecard.errors import UserError
from onecard.model.decoder import Decoder
from onecard.model.gpt2 import GPT2
from onecard.model.nanochat import Nanochat
from onecard.model.nanochat_2026 import Nanochat2026

_MODELS: dict[type, type[Decoder]] = {
    GPT2Shape: GPT2,
    NanochatShape: Nanochat,
    Nanochat2026Shape: Nanochat2026,
}


def model_class(shape: Shape) -> type[Decoder]:
    return _MODELS[type(shape)]


def shape_from(arch: str, values: dict[str, Any], where: object) -> Shape:
    """The shape that a checkpoint was saved with."""
    if arch not in SHAPES:
        raise UserError(
            f"{where} holds a model of an architecture this version does not know: {arch!r}",
            f"known are {', '.join(SHAPES)}",
            "use the version of onecard that wrote it, or a newer one",
        )
    shape: Shape = SHAPES[arch](**values)
    return shape
