"""The chunked head and loss against the plain computation by autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.arch.layout import default_chunk
from onecard.model.loss import IGNORE, LossOptions, chunk_loss_, linear_cross_entropy


def problem(rows: int, vocab: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(rows, 12, generator=generator, dtype=torch.float64)
    head_VD = torch.randn(vocab, 12, generator=generator, dtype=torch.float64)
    targets_N = torch.randint(0, vocab, (rows,), generator=generator)
    targets_N[torch.rand(rows, generator=generator) < 0.2] = IGNORE
    return x_ND.to(dtype), head_VD.to(dtype), targets_N


def plain(
    x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, scale: float, options: LossOptions
) -> tuple[float, Tensor, Tensor]:
    """Loss, dx and dhead as autograd gives them in float64, all logits at once."""
    x_ND, head_VD = (t.detach().double().requires_grad_() for t in (x_ND, head_VD))
    logits_NV = x_ND @ head_VD.T
    if options.softcap:
        logits_NV = options.softcap * torch.tanh(logits_NV / options.softcap)
    loss = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")
    if options.z_loss:
        loss = loss + options.z_loss * (logits_NV.logsumexp(-1)[targets_N != IGNORE] ** 2).sum()
    (loss * scale).backward()
    assert x_ND.grad is not None and head_VD.grad is not None
    return loss.item(), x_ND.grad, head_VD.grad


def chunked(
    x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, scale: float, options: LossOptions, chunk: int
) -> tuple[float, Tensor, Tensor]:
    x_ND = x_ND.detach().requires_grad_()
    accumulator_VD = torch.zeros(head_VD.shape, dtype=torch.promote_types(head_VD.dtype, torch.float32))
    before = 1.0 if accumulator_VD.dtype == torch.float64 else 0.0  # in fp32 a 1 would hide the last digits
    accumulator_VD += before
    loss = linear_cross_entropy(
        x_ND, head_VD, targets_N, chunk=chunk, scale=torch.tensor(scale, dtype=accumulator_VD.dtype),
        head_accumulator_VD=accumulator_VD, options=options,
    )  # fmt: skip
    loss.backward()
    assert x_ND.grad is not None
    return loss.item(), x_ND.grad, accumulator_VD - before


def assert_same(
    ours: tuple[float, Tensor, Tensor], theirs: tuple[float, Tensor, Tensor], bound: float
) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=bound, abs=bound)
    for gradient, expected in zip(ours[1:], theirs[1:], strict=True):
        # Where the model is sure, probability - 1 cancels: such a gradient has no digits of its own.
        error = (gradient.double() - expected).norm()
        assert error.item() <= bound * max(expected.norm().item(), 0.2)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    chunk=st.integers(1, 80),
    vocab=st.integers(2, 90),
    softcap=st.sampled_from([0.0, 4.0, 15.0]),
    z_loss=st.sampled_from([0.0, 1e-3]),
    seed=st.integers(0, 1000),
)
def test_any_chunk_gives_the_plain_loss_and_gradients(
    rows: int, chunk: int, vocab: int, softcap: float, z_loss: float, seed: int
) -> None:
    options = LossOptions(softcap, z_loss)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        tensors = problem(rows, vocab, seed, dtype)
        assert_same(chunked(*tensors, 0.25, options, chunk), plain(*tensors, 0.25, options), bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_fp32(dtype: torch.dtype) -> None:
    x_ND, head_VD, targets_N = problem(300, 61, 0, dtype)
    loss, dx_ND, dhead_VD = chunked(x_ND, head_VD, targets_N, 0.5, LossOptions(), 64)
    expected = plain(x_ND, head_VD, targets_N, 0.5, LossOptions())
    assert dx_ND.dtype == dtype
    assert dhead_VD.dtype == torch.float32
    assert_same((loss, dx_ND, dhead_VD), expected, 2e-2)
    # The loss itself is no worse than the logits it is made of: summed in half precision it would be.
    logits_NV = (x_ND @ (head_VD).T).double()
    exact = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")
    assert loss == pytest.approx(exact.item(), rel=1e-5)


def test_without_a_scale_nothing_is_kept_and_the_loss_is_the_same() -> None:
    x_ND, head_VD, targets_N = problem(50, 40, 3, torch.float64)
    x_ND.requires_grad_()
    loss = linear_cross_entropy(x_ND, head_VD, targets_N, chunk=16)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(plain(x_ND, head_VD, targets_N, 1.0, LossOptions())[0], rel=1e-12)


def test_targets_that_are_all_ignored_cost_nothing() -> None:
    x_ND, head_VD, targets_N = problem(20, 30, 3, torch.float32)
    loss, dx_ND, dhead_VD = chunked(x_ND, head_VD, torch.full_like(targets_N, IGNORE), 1.0, LossOptions(), 7)
    assert loss == 0
    assert not dx_ND.any()
    assert not dhead_VD.any()


def test_large_logits_do_not_overflow() -> None:
    logits_CV = torch.tensor([[300.0, 0.0, -300.0], [-300.0, 200.0, 200.0]])
    loss = chunk_loss_(logits_CV, torch.tensor([0, 1]), torch.tensor(1.0), LossOptions())
    assert loss.item() == pytest.approx(0.6931, abs=1e-4)
    assert logits_CV.tolist() == [
        [0.0, 0.0, 0.0],
        [0.0, pytest.approx(-0.5, abs=1e-5), pytest.approx(0.5, abs=1e-5)],
    ]


def test_no_more_than_a_chunk_of_logits_exists() -> None:
    """Counted: the largest tensor that any operation makes has chunk × vocabulary elements."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    self.seen = max(self.seen, tensor.numel())
            return out

    x_ND, head_VD, targets_N = problem(1000, 500, 0, torch.float32)
    with Largest() as largest:
        chunked(x_ND, head_VD, targets_N, 1.0, LossOptions(), 50)
    assert largest.seen == 50 * 500


@pytest.mark.parametrize(("vocab", "rows"), [(50304, 4096), (65536, 3072), (256, 804864), (2**24, 128)])
def test_the_default_chunk_follows_the_vocabulary(vocab: int, rows: int) -> None:
    assert default_chunk(vocab) == rows
