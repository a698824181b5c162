from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.model.rounding import noise_bits, noise_key, round_to_bf16
from onecard.optim.lowbit import (
    BLOCK,
    Hyper,
    Int8State,
    adamw_chunk_,
    decode,
    encode_first,
    encode_second,
)

CPU = torch.device("cpu")
Moment = Tensor | Int8State
# Every value the 16 bits can take that round a weight, and every value those can that round a moment.
ALL_LOW = torch.arange(2**16, dtype=torch.int32)
ALL_HIGH = ALL_LOW << 16


def keyed(key: int) -> Tensor:
    return torch.tensor(key, dtype=torch.int32)


def noise(n: int, key: int = 5, first: int = 0) -> Tensor:
    return noise_bits(n, keyed(key), torch.tensor(first), CPU)


def same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def random(n: int, seed: int, spread: float = 0.0) -> Tensor:
    """Normal values, each times its own scale, lognormal: `spread` 2 covers about six decades."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=rng) * (spread * torch.randn(n, generator=rng)).exp()


def hyper(step: int, dtype: torch.dtype = torch.float32, **changed: float) -> Hyper:
    values = {"grad_scale": 1.0, "lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    values |= changed
    values |= {f"bias_correction{i}": 1 - values[f"beta{i}"] ** step for i in (1, 2)}
    return Hyper(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()})


def take_step(
    step: int, grad: Tensor, master: Tensor, moments: tuple[Moment, Moment], chosen: Hyper | None = None
) -> None:
    key = keyed(noise_key(0, step))
    adamw_chunk_(grad, master, *moments, chosen or hyper(step), key, torch.tensor(0))


def int8_zeros(n: int, code_dtype: torch.dtype) -> Int8State:
    return Int8State(torch.zeros(n, dtype=code_dtype), torch.zeros(n // BLOCK))


def int8_moments(n: int) -> tuple[Int8State, Int8State]:
    return int8_zeros(n, torch.int8), int8_zeros(n, torch.uint8)


def plain_moments(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)


def in_blocks(state: Int8State) -> Int8State:
    return Int8State(state.codes.view(-1, BLOCK), state.scales)


def tensors_of(moments: Iterable[Moment]) -> list[Tensor]:
    return [tensor for m in moments for tensor in (m if isinstance(m, Int8State) else (m,))]


# ---- moments in 8 bits

blocks_of_any_size = st.tuples(
    st.integers(0, 2**31), st.integers(1, 3), st.floats(0, 4), st.integers(-30, 10), st.floats(0, 1)
)


def moment_of(drawn: tuple[int, int, float, int, float]) -> Tensor:
    seed, blocks, spread, exponent, zeros = drawn
    values = random(blocks * BLOCK, seed, spread) * 10.0**exponent
    return torch.where(
        torch.rand(values.shape, generator=torch.Generator().manual_seed(seed)) < zeros, 0.0, values
    )


def peaks(values: Tensor) -> Tensor:
    return values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)


@settings(max_examples=60, deadline=None)
@given(blocks_of_any_size)
def test_the_first_moment_is_at_most_half_a_step_away(drawn: tuple[int, int, float, int, float]) -> None:
    moment = moment_of(drawn)
    state = encode_first(moment)
    back = decode(state)
    assert state.codes.dtype == torch.int8 and state.codes.shape == moment.shape
    assert state.scales.dtype == torch.float32 and state.scales.shape == (moment.numel() // BLOCK,)
    distance = (back.abs().double() ** 0.25 - moment.abs().double() ** 0.25).abs()
    assert (distance <= 0.5001 / 127 * peaks(moment).double() ** 0.25).all()
    assert (back * moment >= 0).all()
    assert (back[moment == 0] == 0).all()
    assert torch.equal(peaks(back), peaks(moment))
    again = encode_first(back)
    assert same(again, state) and torch.equal(decode(again), back)


@settings(max_examples=60, deadline=None)
@given(blocks_of_any_size)
def test_the_second_moment_is_at_most_half_a_step_away_and_positive_where_it_was(
    drawn: tuple[int, int, float, int, float],
) -> None:
    moment = moment_of(drawn).square()
    # The lowest code stands for 1e-17 of the peak, which below this would have lost bits of its own.
    moment = torch.where(peaks(moment) > 1e-20, moment, 0.0)
    state = encode_second(moment)
    back = decode(state)
    assert state.codes.dtype == torch.uint8
    # A value below the lowest code is raised to it, which is all the error it can have.
    lowest = peaks(moment).double() ** 0.125 * 2 / 255
    distance = (back.double() ** 0.125 - torch.maximum(moment.double() ** 0.125, lowest * (moment > 0))).abs()
    assert (distance <= 0.5001 / 255 * peaks(moment).double() ** 0.125).all()
    assert torch.equal(state.codes > 0, moment > 0)
    assert torch.allclose(peaks(back), peaks(moment), rtol=3e-7)
    again = encode_second(back)
    assert same(again, state) and torch.equal(decode(again), back)


def test_moments_are_unbiased_over_all_noise() -> None:
    # Sixteen values over six decades below the peak, each of them rounded with every noise.
    fractions = torch.logspace(-6, -0.01, 16)
    for encode, top, root, resolution in ((encode_first, 127, 1, 2**-8), (encode_second, 255, 2, 2**-16)):
        for fraction in (*fractions.tolist(), 2e-8):
            # The peak of each block has to be there: it is its first element, in the place of one noise.
            values = torch.full((2**16,), 5.0 * fraction)
            values[::BLOCK] = 5.0
            back = decode(encode(values**root, ALL_HIGH)).double() ** (1 / root) / 5.0
            place = int(fraction**0.25 * top)
            below, above = (place / top) ** 4, ((place + 1) / top) ** 4
            others = torch.arange(2**16) % BLOCK != 0
            assert (back[~others] - 1).abs().max() < 1e-6
            assert back[others].min() > below * (1 - 1e-5) - 1e-12 and back[others].max() < above * (1 + 1e-5)
            # Half of the noise's resolution, and the 256 values missing from the 65,536.
            assert abs(back[others].mean().item() - fraction) < (resolution / 2 + 2**-8) * (above - below)


def test_the_two_moments_and_the_weight_round_with_noise_of_their_own() -> None:
    n = 2**16
    bits = noise(n)
    values = torch.full((n,), 0.5)
    values[::BLOCK] = 1.0
    halves = torch.full((n,), 1 + 2.0**-8)
    ups = [
        encode_first(values, bits).codes.float(),
        encode_second(values.square(), bits).codes.float(),
        round_to_bf16(halves, bits).float(),
    ]
    kept = torch.arange(n) % BLOCK != 0
    correlations = torch.corrcoef(torch.stack([up[kept] for up in ups])) - torch.eye(3)
    assert correlations.abs().max() < 5 / math.sqrt(n)


def test_zero_blocks_and_blocks_below_fp32s_normal_numbers_become_zero() -> None:
    rounding = noise(2 * BLOCK)
    values = torch.cat([torch.zeros(BLOCK), torch.full((BLOCK,), 1e-40)])
    for encode in (encode_first, encode_second):
        for chosen in (None, rounding):
            assert torch.equal(
                decode(encode(values.square() if encode is encode_second else values, chosen)), values * 0
            )
    for state in int8_moments(2 * BLOCK):
        assert torch.equal(decode(state), torch.zeros(2 * BLOCK))
        again = (encode_first if state.codes.dtype == torch.int8 else encode_second)(decode(state), rounding)
        assert same(again, state)


def test_a_second_moment_never_leaves_a_surviving_first_moment_without_a_denominator() -> None:
    """A gradient a billionth of its neighbours', with the worst of noise: no update beyond a few lr."""
    n = 64 * BLOCK
    grad = random(n, 3)
    grad[::2] *= 1e-9
    master, moments = torch.zeros(n), int8_moments(n)
    for step in range(1, 60):
        before = master.clone()
        take_step(step, grad, master, moments, hyper(step, weight_decay=0.0, eps=0.0))
        assert (master - before).abs().max() < 5 * 1e-2


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_averages_decay_when_gradients_stop_rather_than_stall(beta2: float) -> None:
    n, steps = 16 * BLOCK, 300
    grad = random(n, 4).abs()
    quiet = torch.arange(n) % 4 == 0
    moments, exact, master = int8_moments(n), plain_moments(n), torch.zeros(n)
    for step in range(1, steps):
        current = torch.where(quiet, 0.0, grad) if step > 20 else grad
        take_step(step, current, master, moments, hyper(step, beta2=beta2))
        take_step(step, current, torch.zeros(n), exact, hyper(step, beta2=beta2))
    assert decode(moments[0])[quiet].abs().max() < 1e-4 * grad.max()
    still, wanted = decode(moments[1])[quiet].sqrt(), exact[1][quiet].sqrt()
    assert still.mean().item() == pytest.approx(wanted.mean().item(), rel=0.03)


# ---- AdamW


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_without_low_bits_it_is_torchs_adamw(dtype: torch.dtype, tolerance: float) -> None:
    n = 3 * BLOCK
    start = random(n, 0).to(dtype)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.9, 0.97), eps=1e-6, weight_decay=0.2)
    master, moments = start.clone(), plain_moments(n, dtype)
    for step in range(1, 21):
        grad = random(n, step, spread=1.0).to(dtype)
        parameter.grad = grad.clone()
        reference.step()
        values = hyper(step, dtype, grad_scale=6.0, lr=3e-3, beta2=0.97, eps=1e-6, weight_decay=0.2)
        take_step(step, grad * 6, master, moments, values)
    state = reference.state[parameter]
    assert torch.allclose(master, parameter, rtol=0, atol=tolerance)
    assert torch.allclose(moments[0], state["exp_avg"], rtol=1e3 * tolerance, atol=tolerance)
    assert torch.allclose(moments[1], state["exp_avg_sq"], rtol=1e3 * tolerance, atol=tolerance)
    assert master.dtype == moments[0].dtype == dtype


def stored_after_five_steps(
    master_dtype: torch.dtype, kinds: tuple[bool, bool], cuts: tuple[int, ...] = (), seed: int = 0
) -> list[Tensor]:
    """All that is stored of 4 blocks, in chunks cut before the given ones. kinds: which moments are int8."""
    n = 4 * BLOCK
    master = random(n, 0).to(master_dtype)
    moments = [
        both[int8]
        for both, int8 in zip(zip(plain_moments(n), int8_moments(n), strict=True), kinds, strict=True)
    ]
    for step in range(1, 6):
        grad = random(n, 10 + step, spread=1.0).bfloat16()
        for start, end in itertools.pairwise((0, *cuts, 4)):
            here = slice(start * BLOCK, end * BLOCK)
            m, v = (
                Int8State(x.codes[here], x.scales[start:end]) if isinstance(x, Int8State) else x[here]
                for x in moments
            )
            key, first = keyed(noise_key(seed, step)), torch.tensor(1000 + start * BLOCK)
            adamw_chunk_(grad[here], master[here], m, v, hyper(step), key, first)
    return [master, *tensors_of(moments)]


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", list(itertools.product([False, True], repeat=2)))
def test_every_combination_is_the_same_in_one_chunk_or_several_and_repeats(
    master_dtype: torch.dtype, kinds: tuple[bool, bool]
) -> None:
    whole = stored_after_five_steps(master_dtype, kinds)
    assert same(whole, stored_after_five_steps(master_dtype, kinds))
    assert same(whole, stored_after_five_steps(master_dtype, kinds, cuts=(1, 3)))
    noisy = any(kinds) or master_dtype == torch.bfloat16
    assert same(whole, stored_after_five_steps(master_dtype, kinds, seed=1)) != noisy
    exact = stored_after_five_steps(torch.float32, (False, False))[0]
    # Five updates of at most about lr = 0.01; and bf16's last bit at 4, the largest weight, is 1/32.
    assert (whole[0].float() - exact).abs().max() < (0.05 if master_dtype == torch.bfloat16 else 0.005)


def test_everything_may_be_given_in_blocks_as_the_compiler_likes_it() -> None:
    n = 4 * BLOCK
    grad, flat, blocks = random(n, 1), random(n, 0).bfloat16(), random(n, 0).bfloat16().view(-1, BLOCK)
    flat_moments, (m, v) = int8_moments(n), int8_moments(n)
    take_step(1, grad, flat, flat_moments)
    take_step(1, grad.view(-1, BLOCK), blocks, (in_blocks(m), in_blocks(v)))
    assert same([flat, *tensors_of(flat_moments)], [blocks.view(-1), *tensors_of((m, v))])


def test_zero_gradients_change_nothing_but_the_decay() -> None:
    n = 2 * BLOCK
    for moments in (int8_moments(n), plain_moments(n)):
        master = random(n, 0)
        expected = master * (1 - 1e-2 * 0.1) ** 3
        for step in range(1, 4):
            take_step(step, torch.zeros(n), master, moments, hyper(step, eps=1e-8))
        assert torch.allclose(master, expected, rtol=1e-6, atol=0)
        assert all((tensor == 0).all() for tensor in tensors_of(moments))


def regress(master_dtype: torch.dtype, *, int8: bool, stochastic: bool = True) -> float:
    """Distance to the solution, as a fraction of the start's, of a regression with features of unlike sizes.

    Updates are at most 0.001, while half of bf16's last bit at these weights (1 to 2) is 0.004.
    """
    outputs, batch, steps = 4, 64, 800
    solution = 1 + torch.rand(outputs, BLOCK, generator=torch.Generator().manual_seed(0))
    sizes = random(BLOCK, 1, spread=1.0).abs() + 1e-3
    master = (solution + 0.1 * random(outputs * BLOCK, 2).sign().view_as(solution)).view(-1).to(master_dtype)
    start = (master.float().view_as(solution) - solution).norm()
    moments = int8_moments(master.numel()) if int8 else plain_moments(master.numel())
    for step in range(1, steps + 1):
        features = random(batch * BLOCK, 100 + step).view(batch, BLOCK) * sizes
        targets = features @ solution.T + 0.1 * random(batch * outputs, step).view(batch, outputs)
        errors = features @ master.float().view_as(solution).T - targets
        chosen = hyper(step, lr=1e-3 * min(1.0, 2 * (1 - step / steps)), weight_decay=0.0)
        gradient = (errors.T @ features / batch).view(-1)
        if stochastic:
            take_step(step, gradient, master, moments, chosen)
        else:
            wide = master.float()
            take_step(step, gradient, wide, moments, chosen)
            master.copy_(wide)
    return ((master.float().view_as(solution) - solution).norm() / start).item()


def test_low_bits_learn_a_regression_like_fp32_where_bf16_alone_learns_nothing() -> None:
    exact = regress(torch.float32, int8=False)
    assert exact < 0.2
    assert regress(torch.bfloat16, int8=False, stochastic=False) > 0.95
    assert abs(regress(torch.float32, int8=True) - exact) < 0.01
    # The weights jump between values 0.004 to 0.008 apart, which shows compared with a start 0.1 away.
    assert regress(torch.bfloat16, int8=False) < exact + 0.1
    assert regress(torch.bfloat16, int8=True) < exact + 0.1


def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        take_step(1, torch.zeros(300), torch.zeros(300), plain_moments(300))


@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"
)
def test_compiled_is_eager() -> None:
    n = 8 * BLOCK
    compiled = torch.compile(adamw_chunk_, fullgraph=True, dynamic=False)
    masters = [random(n, 0).bfloat16().view(-1, BLOCK) for _ in range(2)]
    moments = [tuple(in_blocks(state) for state in int8_moments(n)) for _ in range(2)]
    for step in range(1, 6):
        grad, key, first = (
            random(n, step, 1.0).view(-1, BLOCK),
            keyed(noise_key(0, step)),
            torch.tensor(2**33 + 7),
        )
        for update, master, (m, v) in zip((adamw_chunk_, compiled), masters, moments, strict=True):
            update(grad, master, m, v, hyper(step), key, first)
    # The compiler divides by multiplying with the reciprocal: where noise falls on the edge of a rounding,
    # which is one time in thousands, the neighbouring value is stored.
    assert (masters[0] != masters[1]).float().mean() < 0.01
    for eager, other in zip(*moments, strict=True):
        apart = (eager.codes.int() - other.codes.int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01
        assert torch.allclose(eager.scales, other.scales, rtol=1e-4)
