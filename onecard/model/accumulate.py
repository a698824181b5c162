"""Weight gradients, added to their accumulators by the matmul that computes them.

(The sum of losses over micro-batches is train/step.py's.)

A separate bf16 gradient, added afterwards, would cost a copy of every weight and the digits that bf16
rounds off. Here the matmul adds the product of bf16 rows to an fp32 accumulator. Matmuls sum in fp32
anyway, and no other copy of the gradient exists.

Accumulators in bf16 (half the memory) are rounded stochastically, or small additions would be lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.model.rounding import accumulate_bf16_


def add_outer(
    accumulator_OI: Tensor, rows_NO: Tensor, inputs_NI: Tensor, key: Tensor | None, site: int
) -> None:
    """accumulator += rows.T @ inputs. `key` and `site` choose the noise where the accumulator is bf16."""
    if accumulator_OI.dtype == torch.bfloat16:
        assert key is not None, "a bf16 accumulator rounds stochastically"
        product_OI = outer(rows_NO, inputs_NI)
        accumulate_bf16_(accumulator_OI, product_OI, key, site)
    else:
        add_outer_(accumulator_OI, rows_NO, inputs_NI)


def add_to(accumulator: Tensor, addend: Tensor) -> None:
    """accumulator += addend, for gradients that are not products: norms' weights, biases."""
    accumulator.add_(addend.to(accumulator.dtype))


def add_rows(accumulator_VD: Tensor, index: Tensor, rows: Tensor) -> None:
    """accumulator[index] += rows: the gradient of an embedding. An index may occur several times."""
    rows_ND = rows.reshape(-1, rows.shape[-1]).to(accumulator_VD.dtype)
    torch.ops.onecard.add_rows_(accumulator_VD, index.flatten(), rows_ND)


# Custom operators: the compiler has no lowering for a product in another precision than its inputs', and
# must not fuse or reorder what changes an accumulator in place. Registered by hand: a call of a
# torch.library.custom_op costs 15 µs of CPU time, of these 3, and a micro-batch makes a hundred.
_LIBRARY: Any = torch.library.Library("onecard", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("add_outer_(Tensor(a!) accumulator_OI, Tensor rows_NO, Tensor inputs_NI) -> ()")
_LIBRARY.define("add_rows_(Tensor(a!) accumulator_VD, Tensor index_N, Tensor rows_ND) -> ()")
_LIBRARY.define("outer(Tensor rows_NO, Tensor inputs_NI) -> Tensor")


def _add_outer_(accumulator_OI: Tensor, rows_NO: Tensor, inputs_NI: Tensor) -> None:
    if rows_NO.dtype == accumulator_OI.dtype:
        accumulator_OI.addmm_(rows_NO.T, inputs_NI)
    elif accumulator_OI.is_cuda:
        dtype = accumulator_OI.dtype
        torch.ops.aten.addmm.dtype_out(accumulator_OI, rows_NO.T, inputs_NI, dtype, out=accumulator_OI)
    else:
        accumulator_OI.addmm_(rows_NO.T.to(accumulator_OI.dtype), inputs_NI.to(accumulator_OI.dtype))


def _add_rows_(accumulator_VD: Tensor, index_N: Tensor, rows_ND: Tensor) -> None:
    # Atomic additions on a GPU (see GPT2._begin_backward). Without an operator of its own, the compiler would
    # copy the whole table where it does not see that it may change it in place.
    accumulator_VD.index_add_(0, index_N, rows_ND)


def _outer(rows_NO: Tensor, inputs_NI: Tensor) -> Tensor:
    """rows.T @ inputs in fp32."""
    if rows_NO.dtype == torch.float32:
        return rows_NO.T @ inputs_NI
    if rows_NO.is_cuda:
        return torch.mm(rows_NO.T, inputs_NI, out_dtype=torch.float32)
    return rows_NO.T.float() @ inputs_NI.float()


def _fake_add_outer_(accumulator_OI: Tensor, rows_NO: Tensor, inputs_NI: Tensor) -> None:
    return None


def _fake_add_rows_(accumulator_VD: Tensor, index_N: Tensor, rows_ND: Tensor) -> None:
    return None


def _fake_outer(rows_NO: Tensor, inputs_NI: Tensor) -> Tensor:
    return rows_NO.new_empty(rows_NO.shape[1], inputs_NI.shape[1], dtype=torch.float32)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("add_outer_", _add_outer_, _device)
    _LIBRARY.impl("add_rows_", _add_rows_, _device)
    _LIBRARY.impl("outer", _outer, _device)
torch.library.register_fake("onecard::add_outer_", _fake_add_outer_)
torch.library.register_fake("onecard::add_rows_", _fake_add_rows_)
torch.library.register_fake("onecard::outer", _fake_outer)


def add_outer_(accumulator_OI: Tensor, rows_NO: Tensor, inputs_NI: Tensor) -> None:
    """accumulator += rows.T @ inputs, summed in the accumulator's own precision."""
    torch.ops.onecard.add_outer_(accumulator_OI, rows_NO, inputs_NI)


def outer(rows_NO: Tensor, inputs_NI: Tensor) -> Tensor:
    """rows.T @ inputs, in fp32 whatever the inputs are."""
    product: Tensor = torch.ops.onecard.outer(rows_NO, inputs_NI)
    return product
