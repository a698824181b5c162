"""The model class of every shape: the one module that knows all architectures."""

from __future__ import annotations

from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, Shape
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
