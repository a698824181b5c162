"""Norms and rotations: one result, whether the compiler fuses them or they are written to move few bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onecard.model.layers import RMS_EPSILON, heads, rms_norm, rms_norm_backward, rotate

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tolerance(dtype: torch.dtype) -> float:
    """The result is wide, whatever comes in."""
    return 1e-12 if dtype == torch.float64 else 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_the_norm_is_its_formula(dtype: torch.dtype, size: float) -> None:
    x = (size * random(3, 5, 64)).to(dtype)
    n, factor = rms_norm(x)
    wide = x.double()
    expected = (wide.square().mean(-1, keepdim=True) + RMS_EPSILON).rsqrt()
    assert n.dtype == factor.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(factor.double(), expected, rtol=tolerance(dtype), atol=0)
    torch.testing.assert_close(n.double(), wide * expected, rtol=tolerance(dtype), atol=1e-30)


def test_the_norm_of_nothing_is_nothing() -> None:
    for dtype in DTYPES:
        n, factor = rms_norm(torch.zeros(2, 8, dtype=dtype))
        assert not n.any() and factor.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_backward_pass_is_autograds(dtype: torch.dtype) -> None:
    x, dn = random(4, 64).to(dtype), random(4, 64, seed=1).to(dtype)
    leaf = x.double().requires_grad_()
    (leaf * (leaf.square().mean(-1, keepdim=True) + RMS_EPSILON).rsqrt()).backward(dn.double())
    n, factor = rms_norm(x)
    kept, before = n.clone(), dn.clone()
    dx = rms_norm_backward(dn, n, factor)
    # The epsilon is left out of it: a part in a million of what has any size.
    torch.testing.assert_close(dx.double(), leaf.grad, rtol=1e-4, atol=2e-5)
    assert torch.equal(n, kept) and torch.equal(dn, before), "what it is given is not its own to change"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True], ids=["contiguous", "a view of a packed projection"])
def test_rotations_are_the_same_written_in_place(dtype: torch.dtype, packed: bool) -> None:
    B, T, H, Q = 2, 6, 3, 16
    x = random(B, H, T, Q).to(dtype)
    if packed:
        x = heads(random(B, T, 3 * H * Q).to(dtype), H)[1]
    wide = torch.promote_types(dtype, torch.float32)
    angles = random(T, Q // 2, seed=2).to(wide)
    cos, sin = angles.cos(), angles.sin()
    kept = x.clone()
    with torch.enable_grad():
        plain = rotate(x, cos, sin)
    with torch.no_grad():
        placed = rotate(x, cos, sin)
        back = rotate(placed, cos, -sin)
    assert plain.dtype == placed.dtype == torch.result_type(x, cos)
    torch.testing.assert_close(placed, plain, rtol=0, atol=1e-12 if dtype == torch.float64 else 5e-7)
    torch.testing.assert_close(back, x.to(back.dtype), rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)
    assert torch.equal(x, kept)


def test_compiled_layers_have_the_same_norm() -> None:
    x, dn = random(4, 32).bfloat16(), random(4, 32, seed=1).bfloat16()

    def both(x: Tensor, dn: Tensor) -> tuple[Tensor, Tensor]:
        n, factor = rms_norm(x)
        return n, rms_norm_backward(dn, n, factor)

    with torch.no_grad():
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(x, dn)
        for one, other in zip(compiled, both(x, dn), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
