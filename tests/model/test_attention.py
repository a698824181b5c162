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
