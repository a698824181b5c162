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
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The output and then what it would keep besides x."""
        ...

    def backward(self, dout: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """The gradient of x from the first of the kept tensors, what is missing computed again.

        Gradients of weights are added to their totals.
        """
        ...


def run_layer(x: Tensor, layer: Layer, fields: int) -> Tensor:
    """The layer's output, differentiable in x. Of x and what it would keep, the first `fields` are kept."""
    if not torch.is_grad_enabled():
        return layer.forward(x)[0]
    result: Tensor = _Layer.apply(x, layer, fields)  # type: ignore[no-untyped-call]
    return result


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, fields: int) -> Tensor:
        out, *kept = layer.forward(x)
        ctx.save_for_backward(x, *kept[: fields - 1])
        ctx.layer = layer
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Any:
        (dout,) = douts
        limit_recompiling()
        return ctx.layer.backward(dout, ctx.saved_tensors), None, None
