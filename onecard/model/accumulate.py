"""Weight gradients, added to their totals by the matmul that computes them.

A bf16 gradient that is rounded, stored and then added costs a copy of every weight and loses what the
next micro-batches would have added below its last bit. Here the product of bf16 rows is added to an
fp32 total inside the matmul, whose own accumulator is fp32 anyway: no gradient exists beside its total.

Totals in bf16 (half the memory) are rounded stochastically, or small additions would be lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.model.rounding import accumulate_bf16_


def add_outer(total_OI: Tensor, rows_NO: Tensor, inputs_NI: Tensor, key: Tensor | None, site: int) -> None:
    """total += rows.T @ inputs. `key` and `site` choose the noise where the total is bf16."""
    if total_OI.dtype == torch.bfloat16:
        assert key is not None, "a bf16 total rounds stochastically"
        product_OI = outer(rows_NO, inputs_NI)
        accumulate_bf16_(total_OI, product_OI, key, site)
    else:
        add_outer_(total_OI, rows_NO, inputs_NI)


def add_to(total: Tensor, addend: Tensor) -> None:
    """total += addend, for gradients that are no product: norms' weights, biases."""
    total.add_(addend.to(total.dtype))


def add_rows(total_VD: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index] += rows: the gradient of an embedding, each of its rows as often as it was looked up."""
    rows_ND = rows.reshape(-1, rows.shape[-1]).to(total_VD.dtype)
    torch.ops.onecard.add_rows_(total_VD, index.flatten(), rows_ND)


# Operators of our own: the compiler has no lowering for a product in another precision than its
# inputs', and must not try to fuse or reorder what changes a total in place. Registered by hand: a call
# of a torch.library.custom_op costs 15 µs on the host, of these 3, and a micro-batch makes a hundred.
_LIBRARY: Any = torch.library.Library("onecard", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("add_outer_(Tensor(a!) total_OI, Tensor rows_NO, Tensor inputs_NI) -> ()")
_LIBRARY.define("add_rows_(Tensor(a!) total_VD, Tensor index_N, Tensor rows_ND) -> ()")
_LIBRARY.define("outer(Tensor rows_NO, Tensor inputs_NI) -> Tensor")


def _add_outer_(total_OI: Tensor, rows_NO: Tensor, inputs_NI: Tensor) -> None:
    if rows_NO.dtype == total_OI.dtype:
        total_OI.addmm_(rows_NO.T, inputs_NI)
    elif total_OI.is_cuda:
        torch.ops.aten.addmm.dtype_out(total_OI, rows_NO.T, inputs_NI, total_OI.dtype, out=total_OI)
    else:
        total_OI.addmm_(rows_NO.T.to(total_OI.dtype), inputs_NI.to(total_OI.dtype))


def _add_rows_(total_VD: Tensor, index_N: Tensor, rows_ND: Tensor) -> None:
    # Atomic additions on a GPU (see GPT2._begin_backward). Compiled as it stands, the whole table would be
    # copied where the compiler does not see that it can change it in place.
    total_VD.index_add_(0, index_N, rows_ND)


def _outer(rows_NO: Tensor, inputs_NI: Tensor) -> Tensor:
    """rows.T @ inputs in fp32."""
    if rows_NO.dtype == torch.float32:
        return rows_NO.T @ inputs_NI
    if rows_NO.is_cuda:
        return torch.mm(rows_NO.T, inputs_NI, out_dtype=torch.float32)
    return rows_NO.T.float() @ inputs_NI.float()


def _fake_add_outer_(total_OI: Tensor, rows_NO: Tensor, inputs_NI: Tensor) -> None:
    return None


def _fake_add_rows_(total_VD: Tensor, index_N: Tensor, rows_ND: Tensor) -> None:
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


def add_outer_(total_OI: Tensor, rows_NO: Tensor, inputs_NI: Tensor) -> None:
    """total += rows.T @ inputs, summed in the total's own precision."""
    torch.ops.onecard.add_outer_(total_OI, rows_NO, inputs_NI)


def outer(rows_NO: Tensor, inputs_NI: Tensor) -> Tensor:
    """rows.T @ inputs, in fp32 whatever the inputs are."""
    product: Tensor = torch.ops.onecard.outer(rows_NO, inputs_NI)
    return product
