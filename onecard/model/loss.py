"""Head and loss together, in chunks of rows: the B×T×V logits never exist.

For each chunk: logits, their loss, then their gradient, which overwrites the logits, and from it the
gradients of the hidden rows and of the head. One chunk of logits in the compute dtype is all the memory
the vocabulary costs, and the backward pass has nothing left to do. This needs the gradient's scale before
the loss is known: the tokens of the whole step, and in fp16 the loss scale.

The result is the sum, not the mean: micro-batches of different sizes then add up to the loss of the whole
step, and every token has the same weight.

Shapes: N rows (tokens), C rows of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onecard.model.accumulate import add_outer_

IGNORE = -1  # targets with this id carry no loss, as in nanoGPT


class LossOptions(NamedTuple):
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0: unchanged
    z_loss: float = 0.0  # adds z_loss * log(sum of exp)**2 to each token's loss


def chunk_loss_(logits_CV: Tensor, targets_C: Tensor, scale: Tensor | None, options: LossOptions) -> Tensor:
    """Summed loss of these logits; with a scale, logits are overwritten by scale × their gradient.

    Besides the logits there is one copy of them in fp32 at a time (two with a soft cap).
    """
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32), copy=True)
    if options.softcap:
        bent_CV = wide_CV.div_(options.softcap).tanh_()
        wide_CV = bent_CV * options.softcap
    counts_C = targets_C != IGNORE
    right_C1 = targets_C.clamp(min=0)[:, None]
    peak_C1 = wide_CV.amax(-1, keepdim=True)
    right_C = wide_CV.gather(1, right_C1)[:, 0] - peak_C1[:, 0]
    exp_CV = wide_CV.sub_(peak_C1).exp_()
    sum_C1 = exp_CV.sum(-1, keepdim=True)
    loss_C = sum_C1[:, 0].log() - right_C
    logsum_C1 = sum_C1.log() + peak_C1
    if options.z_loss:
        loss_C = loss_C + options.z_loss * logsum_C1[:, 0] ** 2
    loss = torch.where(counts_C, loss_C, 0.0).sum()
    if scale is not None:
        weight_C1 = torch.where(counts_C, scale, 0.0)[:, None]
        more_C1 = 1 + 2 * options.z_loss * logsum_C1 if options.z_loss else 1.0
        grad_CV = exp_CV.mul_(weight_C1 * more_C1 / sum_C1)
        grad_CV.scatter_add_(1, right_C1, -weight_C1.to(grad_CV.dtype))
        if options.softcap:
            grad_CV.mul_(bent_CV.square_().neg_().add_(1))
        logits_CV.copy_(grad_CV)
    return loss


ChunkLoss = Callable[[Tensor, Tensor, Tensor | None, LossOptions], Tensor]


def linear_cross_entropy(
    x_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk: int,
    scale: Tensor | None = None,
    head_accumulator_VD: Tensor | None = None,
    options: LossOptions = LossOptions(),  # noqa: B008 - immutable
    chunk_loss: ChunkLoss = chunk_loss_,
) -> Tensor:
    """Sum over tokens of -log softmax(x @ head.T)[target], in fp32 (or the input's own, if wider).

    With a `scale` (0-dim) gradients of scale × sum are taken. The head's is added to `head_accumulator_VD` at
    once; that of x is what `backward()` of the returned sum passes on. Call `backward()` on this sum itself,
    not on anything computed from it.
    """
    if scale is None:
        with torch.no_grad():
            return _in_chunks(x_ND, head_VD, targets_N, chunk, None, None, options, chunk_loss)[0]
    assert head_accumulator_VD is not None
    result: Tensor = _LinearCrossEntropy.apply(
        x_ND, head_VD, targets_N, chunk, scale, head_accumulator_VD, options, chunk_loss
    )  # type: ignore[no-untyped-call]
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, *arguments: Any) -> Tensor:
        loss, dx_ND = _in_chunks(x_ND, *arguments)
        ctx.save_for_backward(dx_ND)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:  # upstream is 1: see linear_cross_entropy
        return *ctx.saved_tensors, None, None, None, None, None, None, None


def _in_chunks(
    x_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    chunk: int,
    scale: Tensor | None,
    head_accumulator_VD: Tensor | None,
    options: LossOptions,
    chunk_loss: ChunkLoss,
) -> tuple[Tensor, Tensor | None]:
    rows = x_ND.shape[0]
    logits_CV = x_ND.new_empty(min(chunk, rows), head_VD.shape[0])
    dx_ND = torch.empty_like(x_ND) if scale is not None else None
    loss = torch.zeros((), device=x_ND.device, dtype=torch.promote_types(x_ND.dtype, torch.float32))
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        x_CD = x_ND[part]
        logits_cV = torch.mm(x_CD, head_VD.T, out=logits_CV[: len(x_CD)])
        loss += chunk_loss(logits_cV, targets_N[part], scale, options)
        if dx_ND is not None and head_accumulator_VD is not None:
            torch.mm(logits_cV, head_VD, out=dx_ND[part])
            add_outer_(head_accumulator_VD, logits_cV, x_CD)
    return loss, dx_ND
