"""A layer as one autograd operation: the one place that decides which activations are saved.

Autograd connects the layers. A layer is one operation to it, whose `save_for_backward` is all that stays in
memory until the backward pass.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from onecard.model.compiling import limit_recompiling


class Layer(Protocol):
    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """The output, followed by the activations it could save besides its inputs."""
        ...

    def backward(self, dout: Tensor, saved: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The gradient of x. Activations that were not saved are recomputed.

        Other inputs are the last saved tensors; with them, the gradients of all inputs are returned.
        Gradients of weights are added to their accumulators.
        """
        ...


def run_layer(x: Tensor, layer: Layer, fields: int, *others: Tensor) -> Tensor:
    """The layer's output, differentiable in x and the other inputs.

    Of x and the layer's activations the first `fields` are saved. The other inputs always are.
    """
    if not torch.is_grad_enabled():
        return layer.forward(x, *others)[0]
    result: Tensor = _Layer.apply(layer, fields, x, *others)  # type: ignore[no-untyped-call]
    return result


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, fields: int, x: Tensor, *others: Tensor) -> Tensor:
        out, *activations = layer.forward(x, *others)
        ctx.save_for_backward(x, *activations[: fields - 1], *others)
        ctx.layer = layer
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Any:
        (dout,) = douts
        limit_recompiling()
        gradients = ctx.layer.backward(dout, ctx.saved_tensors)
        return None, None, *(gradients if isinstance(gradients, tuple) else (gradients,))
