from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.arch.layout import MUON_TOGETHER, muon_batch
from onecard.optim.lowbit import BLOCK, Int8State
from onecard.optim.muon import ITERATIONS, Matrix, Momentum, Muon, MuonHyper, Piece, orthogonalised
from onecard.optim.region_buffers import Storage


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hyper(lr: float = 0.02, decay: float = 0.0, momentum: float = 0.95, scale: float = 1.0) -> MuonHyper:
    return MuonHyper(*map(torch.tensor, (scale, lr, decay, momentum)))


def padded(flat: Tensor) -> Tensor:
    return torch.nn.functional.pad(flat.reshape(-1), (0, -flat.numel() % BLOCK))


def step(
    master: Tensor,
    grad: Tensor,
    momentum: Momentum,
    number: int,
    chosen: MuonHyper | None = None,
    *,
    parts: int = 1,
    refined: bool = False,
    variance: Tensor | None = None,
) -> None:
    """On (O, I) tensors, as if they lay in a region's flat buffers; momentum is flat and padded already."""
    matrix = Matrix(parts, master.shape[0] // parts, master.shape[1])
    dtype = torch.promote_types(master.dtype, torch.float32)
    muon = Muon([(matrix, 1)], "cpu", dtype, refined=refined, compiled=False)
    flat = padded(master)
    key = torch.tensor(1000 + number, dtype=torch.int32)
    piece = Piece(padded(grad), flat, momentum, torch.tensor(0))
    muon.step(matrix, [piece], variance, chosen or hyper(), key)
    master.copy_(flat[: master.numel()].view(master.shape))


def zeros(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return padded(torch.zeros(count, dtype=dtype))


def int8_zeros(count: int) -> Int8State:
    padded = -(-count // BLOCK) * BLOCK
    return Int8State(torch.zeros(padded, dtype=torch.int8), torch.zeros(padded // BLOCK))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 100),
    size=st.sampled_from([1e-10, 1e-6, 1.0, 1e6]), method=st.sampled_from(list(ITERATIONS)),
)  # fmt: skip
@example(rows=1, columns=1, seed=9, size=1e-10, method="polar-express")  # one number, and that far too small
def test_the_update_is_nearly_orthogonal_whatever_the_size_of_the_gradient(
    rows: int, columns: int, seed: int, size: float, method: str
) -> None:
    g_OI = random(rows, columns, seed=seed, dtype=torch.float64)
    # Singular values between a tenth and one: those near zero would need more steps.
    u, s, vt = torch.linalg.svd(g_OI, full_matrices=False)
    g_OI = u @ torch.diag(s.clamp(min=0.1 * s.max().item())) @ vt
    g_OI *= size / g_OI.norm()
    values = torch.linalg.svdvals(orthogonalised(g_OI[None], method)[0])
    assert values.max() < 1.4
    # Divided by the norm and a millionth: next to nothing becomes less than a whole update, as zero must.
    if size >= 1e-6:
        assert values.min() > 0.6
    # The same left and right directions: the factor of the polar decomposition, up to its spectrum.
    aligned = u.T @ orthogonalised(g_OI[None], method)[0] @ vt.T
    assert (aligned - torch.diag(aligned.diagonal())).norm() < 1e-3 * aligned.norm()


def test_bf16_is_enough() -> None:
    g_OI = random(96, 160)
    exact = orthogonalised(g_OI.double()[None], "newton-schulz")[0]
    assert (orthogonalised(g_OI[None], "newton-schulz")[0].double() - exact).norm() < 0.05 * exact.norm()


def test_a_zero_gradient_moves_nothing() -> None:
    master = random(8, 12)
    before = master.clone()
    step(master, torch.zeros(8, 12), zeros(96), 1)
    assert torch.equal(master, before)


def test_it_is_the_formula() -> None:
    """Momentum, Nesterov, orthogonal factor, decay and the stretch of tall matrices, written out again."""
    master, momentum = random(24, 6, dtype=torch.float64), zeros(144, torch.float64)
    weights, average = master.clone(), torch.zeros(24, 6, dtype=torch.float64)
    for number in range(1, 5):
        grad = random(24, 6, seed=number, dtype=torch.float64)
        step(master, grad.clone(), momentum, number, hyper(lr=0.1, decay=0.3, momentum=0.9, scale=2.0))
        g = grad / 2
        average = 0.9 * average + 0.1 * g
        update = orthogonalised((0.1 * g + 0.9 * average)[None], "newton-schulz")[0]
        weights = weights * (1 - 0.1 * 0.3) - 0.1 * 2.0 * update
    torch.testing.assert_close(master, weights, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(momentum[:144].view(24, 6), average, atol=1e-6, rtol=1e-6)


def test_packed_matrices_are_made_orthogonal_apart() -> None:
    packed, grad = torch.zeros(12, 4, dtype=torch.float64), random(12, 4, seed=3, dtype=torch.float64)
    step(packed, grad, zeros(48, torch.float64), 1, parts=3)
    for part in range(3):
        rows = slice(4 * part, 4 * part + 4)
        alone = torch.zeros(4, 4, dtype=torch.float64)
        step(alone, grad[rows].clone(), zeros(16, torch.float64), 1)
        torch.testing.assert_close(packed[rows], alone)


def regress(master_dtype: torch.dtype, momentum: str, seed: int = 0) -> float:
    """How far from the true matrix 150 steps with decaying rate leave us, relative to the start."""
    truth, master = random(20, 30, seed=1), torch.zeros(20, 30, dtype=master_dtype)
    state: Momentum = (
        int8_zeros(600)
        if momentum == "int8"
        else zeros(600, torch.bfloat16 if momentum == "bf16" else torch.float32)
    )
    for number in range(150):
        x = random(64, 30, seed=10_000 * seed + number + 5)
        grad = (master.float() @ x.T - truth @ x.T) @ x / 64
        step(master, grad, state, number, hyper(lr=0.2 * (1 - number / 150)))
    return ((master.float() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("momentum", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_low_bits_learn_like_fp32(master: torch.dtype, momentum: str) -> None:
    assert regress(torch.float32, "fp32") < 0.03
    assert regress(master, momentum) < 0.05


@pytest.mark.parametrize("momentum", ["bf16", "int8"])
def test_low_bits_are_reproducible_and_new_every_step(momentum: str) -> None:
    results = []
    for number in (1, 1, 2):
        master = random(16, 16, seed=2).bfloat16()
        state: Momentum = int8_zeros(256) if momentum == "int8" else zeros(256, torch.bfloat16)
        step(master, random(16, 16, seed=4), state, number)
        results.append(master)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_the_refined_rule_is_the_formula() -> None:
    """Rows equal, the factor's norm set, neurons evened out, decay where it agrees: written out again."""
    rows, columns, lr, decay, momentum = 24, 6, 0.1, 0.3, 0.9
    master, state = random(rows, columns, dtype=torch.float64), zeros(144, torch.float64)
    variance = torch.zeros(1, rows, 1, dtype=torch.float64)
    weights, average, averaged = master.clone(), torch.zeros_like(master), torch.zeros(rows, 1).double()
    for number in range(1, 5):
        g = random(rows, columns, seed=number, dtype=torch.float64)
        step(master, g.clone(), state, number, hyper(lr, decay, momentum), refined=True, variance=variance)
        average = momentum * average + (1 - momentum) * g
        ahead = (1 - momentum) * g + momentum * average
        ahead = ahead * (ahead.norm() / rows**0.5) / ahead.norm(dim=1, keepdim=True)
        update = orthogonalised(ahead[None], "polar-express")[0]
        update = update * columns**0.5 / update.norm()
        squares = update.square().mean(dim=1, keepdim=True)
        averaged = 0.9 * averaged + 0.1 * squares
        even = update / averaged.sqrt()
        update = even * update.norm() / even.norm()
        agrees = (update * weights >= 0).double()
        stretch = (rows / columns) ** 0.5
        weights = weights - lr * stretch * (update + decay * weights * agrees)
    torch.testing.assert_close(master, weights, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(variance[0], averaged, atol=1e-7, rtol=1e-6)


def test_compiled_is_eager() -> None:
    matrix, results = Matrix(3, 8, 24), []
    for compiled in (False, True):
        muon = Muon([(matrix, 1)], "cpu", torch.float32, refined=True, compiled=compiled)
        master, momentum = padded(random(24, 24)).bfloat16(), int8_zeros(576)
        variance = torch.zeros(matrix.variances())
        for number in range(3):
            grad, key = (
                padded(random(24, 24, seed=number)).bfloat16(),
                torch.tensor(number, dtype=torch.int32),
            )
            piece = Piece(grad, master, momentum, torch.tensor(256))
            muon.step(matrix, [piece], variance, hyper(), key)
        results.append((master.float(), momentum.codes.int()))
    assert (results[0][0] - results[1][0]).norm() < 0.01 * results[0][0].norm()
    assert (results[0][1] - results[1][1]).abs().max() <= 2


def test_queries_keys_and_values_are_three_matrices() -> None:
    name = "transformer.h.3.attn.c_attn.weight"
    assert Matrix.of(name, torch.Size((48, 16))) == (3, 16, 16)
    assert Matrix.of("transformer.h.3.mlp.c_fc.weight", torch.Size((64, 16))) == (1, 64, 16)


@pytest.mark.parametrize("refined", [False, True])
@pytest.mark.parametrize("matrix", [Matrix(3, 16, 16), Matrix(1, 32, 8), Matrix(1, 6, 12), Matrix(1, 8, 40)])
def test_together_is_one_by_one(matrix: Matrix, refined: bool) -> None:
    """Also where matrices do not fill their blocks: what lies between them must not be seen."""
    count, results = 3, []
    for together in (1, count):
        muon = Muon([(matrix, together)], "cpu", torch.float32, refined=refined, compiled=False)
        variance = torch.zeros(matrix.variances(count)) if refined else None
        masters = [padded(random(matrix.elements, 1, seed=i)).bfloat16() for i in range(count)]
        momenta = [int8_zeros(matrix.elements) for _ in range(count)]
        for number in range(3):
            pieces = [
                Piece(
                    padded(random(matrix.elements, 1, seed=10 * number + i)), masters[i], momenta[i],
                    torch.tensor(i * matrix.place),
                )
                for i in range(count)
            ]  # fmt: skip
            for i in range(0, count, together):
                part = slice(i * matrix.parts, (i + together) * matrix.parts)
                own = None if variance is None else variance[part]
                muon.step(
                    matrix, pieces[i : i + together], own, hyper(), torch.tensor(number, dtype=torch.int32)
                )
        results.append(torch.cat([*(m.float() for m in masters), *(m.codes.float() for m in momenta)]))
        if variance is not None:
            results[-1] = torch.cat([results[-1], variance.flatten()])
    # Stacks are multiplied in another order, which a rounding at random now and then shows.
    assert (results[0] - results[1]).norm() < 1e-3 * results[0].norm()


@settings(max_examples=200, deadline=None)
@given(
    parts=st.sampled_from([1, 3]), rows=st.integers(1, 9000), columns=st.integers(1, 9000),
    count=st.integers(1, 100), offload=st.sampled_from(["none", "optimizer", "gradients"]),
)  # fmt: skip
def test_as_many_together_as_there_is_room_for(
    parts: int, rows: int, columns: int, count: int, offload: str
) -> None:
    together = muon_batch(parts, rows, columns, count, Storage(offload=offload))
    each = parts * rows * columns + parts * min(rows, columns) ** 2
    assert 1 <= together <= count
    assert together == 1 or (together * each <= MUON_TOGETHER and offload == "none")
    rounds = -(-count // together)
    assert rounds * together - count < rounds, "no round is much smaller than the others"
    if offload == "none" and not (parts * rows * columns) % BLOCK:
        assert together == count or rounds * MUON_TOGETHER > (count - rounds) * each, "room is used"
