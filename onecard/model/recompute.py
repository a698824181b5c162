"""Where forward and backward of a layer meet autograd: the one place that decides what is kept.

Autograd strings the layers together (a later architecture may cross-connect them); inside a layer it
sees one operation, whose `save_for_backward` is all that stays in memory until the backward pass.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from onecard.model.compiling import limit_recompiling


class Layer(Protocol):
    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """The output and then what it would keep besides its inputs."""
        ...

    def backward(self, dout: Tensor, kept: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The gradient of x from the first of the kept tensors, what is missing computed again.

        With other inputs, which are the last of the kept tensors: the gradients of all of them.
        Gradients of weights are added to their totals.
        """
        ...


def run_layer(x: Tensor, layer: Layer, fields: int, *others: Tensor) -> Tensor:
    """The layer's output, differentiable in x and the other inputs.

    Of x and what it would keep, the first `fields` are kept, and the other inputs in any case.
    """
    if not torch.is_grad_enabled():
        return layer.forward(x, *others)[0]
    result: Tensor = _Layer.apply(layer, fields, x, *others)  # type: ignore[no-untyped-call]
    return result


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, fields: int, x: Tensor, *others: Tensor) -> Tensor:
        out, *kept = layer.forward(x, *others)
        ctx.save_for_backward(x, *kept[: fields - 1], *others)
        ctx.layer = layer
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Any:
        (dout,) = douts
        limit_recompiling()
        gradients = ctx.layer.backward(dout, ctx.saved_tensors)
        return None, None, *(gradients if isinstance(gradients, tuple) else (gradients,))
