"""The parameters of every architecture, tensor by tensor, without building it.

`kind` says how a parameter is stored: layers (matrices inside layers), embeddings (other matrices) or vectors
(all the rest). Parameters of one `group` learn by the same rule and share their buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from onecard.arch.layout import ALIGN
from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, Shape


@dataclass(frozen=True)
class Parameter:
    name: str
    dims: tuple[int, ...]
    kind: str
    group: str

    @property
    def count(self) -> int:
        return math.prod(self.dims)

    @cached_property
    def place(self) -> int:
        """Elements the parameter takes in a buffer, with the gap after it."""
        return -(-self.count // ALIGN) * ALIGN

    @property
    def matrix(self) -> tuple[int, int, int]:
        return matrix_of(self.name, self.dims)


def matrix_of(name: str, dims: Sequence[int]) -> tuple[int, int, int]:
    """Parts, rows and columns as Muon sees them: packed queries, keys and values are three matrices."""
    parts = 3 if name.endswith("attn.c_attn.weight") else 1
    return parts, dims[0] // parts, dims[1]


@lru_cache(maxsize=64)
def parameters_of(shape: Shape) -> tuple[Parameter, ...]:
    """All parameters in the model's own order."""
    if isinstance(shape, GPT2Shape):
        return tuple(_gpt2(shape))
    if isinstance(shape, NanochatShape):
        return tuple(_nanochat(shape))
    assert isinstance(shape, Nanochat2026Shape)
    return tuple(_nanochat_2026(shape))


@lru_cache(maxsize=64)
def groups_of(shape: Shape) -> tuple[tuple[Parameter, ...], ...]:
    """Parameters by group: those of one group are stored in one set of buffers."""
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters_of(shape):
        groups.setdefault(parameter.group, []).append(parameter)
    return tuple(map(tuple, groups.values()))


def _parameter(name: str, *dims: int, group: str = "") -> Parameter:
    kind = "vectors" if len(dims) < 2 else "layers" if name.startswith("transformer.h.") else "embeddings"
    return Parameter(name, dims, kind, group or kind)


def _gpt2(shape: GPT2Shape) -> Iterator[Parameter]:
    width = shape.n_embd
    yield _parameter("transformer.wte.weight", shape.vocab_size, width)
    yield _parameter("transformer.wpe.weight", shape.block_size, width)
    for layer in range(shape.n_layer):
        inside = f"transformer.h.{layer}"
        for name, *dims in (
            ("ln_1", width), ("attn.c_attn", 3 * width, width), ("attn.c_proj", width, width),
            ("ln_2", width), ("mlp.c_fc", 4 * width, width), ("mlp.c_proj", width, 4 * width),
        ):  # fmt: skip
            yield _parameter(f"{inside}.{name}.weight", *dims)
            if shape.bias:
                yield _parameter(f"{inside}.{name}.bias", dims[0])
    yield _parameter("transformer.ln_f.weight", width)
    if shape.bias:
        yield _parameter("transformer.ln_f.bias", width)


def _matrices(layer: int, width: int) -> Iterator[Parameter]:
    for name, rows, columns in (
        ("attn.c_attn", 3 * width, width), ("attn.c_proj", width, width),
        ("mlp.c_fc", 4 * width, width), ("mlp.c_proj", width, 4 * width),
    ):  # fmt: skip
        yield _parameter(f"transformer.h.{layer}.{name}.weight", rows, columns)


def _nanochat(shape: NanochatShape) -> Iterator[Parameter]:
    size = (shape.vocab_size, shape.n_embd)
    yield _parameter("transformer.wte.weight", *size, group="embedding")
    for layer in range(shape.n_layer):
        yield from _matrices(layer, shape.n_embd)
    yield _parameter("lm_head.weight", *size, group="head")


def _nanochat_2026(shape: Nanochat2026Shape) -> Iterator[Parameter]:
    size = (shape.vocab_size, shape.n_embd)
    yield _parameter("resid_lambdas", shape.n_layer, group="residual numbers")
    yield _parameter("x0_lambdas", shape.n_layer, group="first layer's numbers")
    yield _parameter("smear_lambda", 1, group="other numbers")
    yield _parameter("backout_lambda", 1, group="other numbers")
    yield _parameter("transformer.wte.weight", *size, group="embedding")
    gate = (shape.n_head, shape.value_gate_channels)
    for layer in range(shape.n_layer):
        c_attn, c_proj, *mlp = _matrices(layer, shape.n_embd)
        yield from (c_attn, c_proj)
        if layer in shape.layers_with_value_embedding:
            yield _parameter(f"transformer.h.{layer}.attn.ve_gate.weight", *gate)
        yield from mlp
    yield _parameter("lm_head.weight", *size, group="head")
    yield _parameter("smear_gate.weight", 1, shape.smear_gate_channels, group="smear gate")
    for layer in shape.layers_with_value_embedding:
        yield _parameter(f"value_embeds.{layer}.weight", *size, group="value embeddings")
