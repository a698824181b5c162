from __future__ import annotations

import pytest
import torch

from onecard.model.attention import (
    attend,
    attend_backward,
    attend_in_the_open,
    attend_in_the_open_backward,
    fastest_kernel,
    usual_kernel,
    windowed_kernel,
)


@pytest.mark.parametrize("layout", ["packed", "dense", "channels apart"])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 8])
def test_any_layout_and_head_size_is_attention(layout: str, head_dim: int) -> None:
    """The kernels are called where nobody checks strides any more."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 9, 3, 4, head_dim, generator=generator, dtype=torch.float64)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    if layout != "packed":
        q, k, v = (t.contiguous() for t in (q, k, v))
    if layout == "channels apart":
        q, k, v = (t.to(memory_format=torch.channels_last).transpose(1, 3) for t in (q, k, v))
        q, k, v = (t.contiguous(memory_format=torch.channels_last).transpose(1, 3) for t in (q, k, v))
    dy = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    y, lse = attend("cpu", q, k, v)
    torch.testing.assert_close(y, attend_in_the_open(q, k, v))
    ours = attend_backward("cpu", dy, q, k, v, y, lse)
    for gradient, expected in zip(ours, attend_in_the_open_backward(dy, q, k, v), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_on_a_cpu_there_is_nothing_to_measure() -> None:
    assert fastest_kernel(2, 4, 16, 8, torch.float32, "cpu") == ("cpu", {})


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "kernel"),
    [
        ("cpu", torch.float64, 3, "cpu"),
        ("cuda", torch.bfloat16, 64, "efficient"),
        ("cuda", torch.float32, 4, "efficient"),
        ("cuda", torch.bfloat16, 6, "open"),
        ("cuda", torch.float64, 64, "open"),
        ("meta", torch.float32, 64, "open"),
    ],
)
def test_who_does_not_measure_gets_a_kernel_that_works(
    device: str, dtype: torch.dtype, head_dim: int, kernel: str
) -> None:
    assert usual_kernel(head_dim, dtype, torch.device(device)) == kernel


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "window"), [(9, 0), (9, 3), (9, 8), (9, 100), (700, 20), (700, 511)])
def test_a_query_sees_itself_and_its_window(dtype: torch.dtype, length: int, window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = torch.randn(4, 2, 2, length, 8, generator=generator, dtype=torch.float64).to(dtype)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (distance >= 0) & (distance <= window)
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen)
    expected.backward(dy.double())
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for kernel in ("cpu", "open"):
        y, lse = attend(kernel, q, k, v, window)
        assert (y - expected).norm() < bound * expected.norm()
        for gradient, exact in zip(attend_backward(kernel, dy, q, k, v, y, lse, window), wide, strict=True):
            assert exact.grad is not None
            assert (gradient - exact.grad).norm() <= bound * max(exact.grad.norm().item(), 1.0)


def test_windows_never_get_a_kernel_without() -> None:
    cpu = torch.device("cpu")
    assert windowed_kernel("cpu", 8, torch.float32, cpu) == "cpu"
    assert windowed_kernel("open", 8, torch.float32, cpu) == "open"
    assert windowed_kernel("cudnn", 8, torch.float32, cpu) == "open"  # no other runs here
    q = torch.zeros(1, 1, 9, 8)
    with pytest.raises(AssertionError, match="no windows"):
        attend("cudnn", q, q, q, window=3)
