"""Decoding: cached equals uncached, samples are reproducible, filters keep the right tokens."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.arch.shapes import GPT2Shape
from onecard.errors import UserError
from onecard.generate.decode import Sampling, chosen, generate, stream_seed, token_weights
from onecard.model.gpt2 import GPT2

GREEDY = Sampling(temperature=0.0, top_k=None, top_p=1.0, seed=0)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only make threads wait for each other, long where other tests run beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(
    seed: int = 0,
    *,
    block_size: int = 8,
    vocab_size: int = 40,
    n_layer: int = 2,
    n_head: int = 2,
    width: int = 16,
) -> GPT2:
    model = GPT2.initialised(
        GPT2Shape(n_layer, n_head, width, vocab_size, block_size, bias=seed % 2 == 0), seed
    )
    # Fresh weights hardly look at the context and, the head being tied, repeat the last token; with
    # larger matrices every token of the window matters and the text wanders.
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(12.0 if "wte" in name else 5.0 if "wpe" in name else 40.0)
    return model


def prompt_of(length: int, vocab_size: int = 40, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def decode_uncached_greedy(model: GPT2, prompt: list[int], new_tokens: int, n_vocab: int) -> list[int]:
    """The definition: the whole window through the training forward pass for every token."""
    device = model.lm_head.weight.device
    tokens = list(prompt)
    for _ in range(new_tokens):
        window = torch.tensor([tokens[-model.shape.block_size :]], device=device)
        tokens.append(int(model(window)[0, -1, :n_vocab].argmax()))
    return tokens[len(prompt) :]


def drawn(
    model: GPT2,
    prompt: list[int],
    new_tokens: int,
    sampling: Sampling = GREEDY,
    samples: int = 1,
    **more: int,
) -> list[list[int]]:
    arguments = {"n_vocab": model.shape.vocab_size, **more}
    steps = list(
        generate(model, prompt, samples=samples, max_new_tokens=new_tokens, sampling=sampling, **arguments)
    )
    assert all(s.shape == (samples,) and s.dtype == torch.int64 and s.device.type == "cpu" for s in steps)
    return torch.stack(steps, dim=1).tolist()


# --- the cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prompt_length", [1, 5, 7, 8, 9, 20])
@pytest.mark.parametrize("samples", [1, 3])
def test_cached_greedy_is_uncached_greedy(dtype: torch.dtype, prompt_length: int, samples: int) -> None:
    model = tiny_model().to(dtype)
    prompt = prompt_of(prompt_length)
    expected = decode_uncached_greedy(model, prompt, 24, 40)
    assert len(set(expected)) > 2, "the model should not be stuck on one token"
    assert drawn(model, prompt, 24, samples=samples) == [expected] * samples


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.integers(1, 12),
    n_layer=st.integers(1, 3),
    n_head=st.sampled_from([1, 2, 4]),
    prompt_length=st.integers(1, 15),
    new_tokens=st.integers(1, 16),
)
def test_cached_greedy_is_uncached_greedy_for_any_shape(
    seed: int, block_size: int, n_layer: int, n_head: int, prompt_length: int, new_tokens: int
) -> None:
    model = tiny_model(seed, block_size=block_size, n_layer=n_layer, n_head=n_head).double()
    prompt = prompt_of(prompt_length, seed=seed)
    assert drawn(model, prompt, new_tokens) == [decode_uncached_greedy(model, prompt, new_tokens, 40)]


def test_a_batch_of_different_samples_slides_its_windows_row_by_row() -> None:
    model = tiny_model().double()
    sampling = Sampling(temperature=1.0, top_k=None, top_p=1.0, seed=3)
    rows = drawn(model, [1, 2, 3], 30, sampling, samples=4)
    assert len({tuple(row) for row in rows}) == 4
    for number, row in enumerate(rows):
        # The last token by definition: same window, same uniform, uncached logits.
        generator = torch.Generator().manual_seed(stream_seed(3, number))
        uniforms = torch.rand(30, generator=generator, dtype=torch.float64)
        tokens = [1, 2, 3]
        for step in range(30):
            with torch.no_grad():
                logits_1V = model(torch.tensor([tokens[-8:]]))[:, -1]
            tokens.append(int(chosen(token_weights(logits_1V, sampling), uniforms[step : step + 1])))
        assert tokens[3:] == row


def test_the_cache_takes_no_more_room_than_the_context_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(block_size=64)
    asked = []
    new_cache = model.new_cache
    monkeypatch.setattr(model, "new_cache", lambda *args: asked.append(args[:2]) or new_cache(*args))
    drawn(model, [1, 2, 3], 5, samples=2)
    assert asked == [(1, 3), (2, 7)]


def test_nothing_asked_nothing_drawn() -> None:
    steps = generate(tiny_model(), [1], samples=2, max_new_tokens=0, sampling=GREEDY, n_vocab=40)
    assert list(steps) == []


# --- precision --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
def test_half_precision_weights(dtype_name: str) -> None:
    model = tiny_model().to(getattr(torch, dtype_name))
    assert len(drawn(model, [1, 2], 12, samples=2)[0]) == 12


def test_training_goes_on_undisturbed() -> None:
    model = tiny_model().train()
    steps = generate(model, [1, 2], samples=1, max_new_tokens=5, sampling=GREEDY, n_vocab=40)
    next(steps)
    assert not model.training
    assert not torch.is_inference_mode_enabled(), "the caller's own work must not become inference"
    del steps  # left half-way, as after Ctrl-C
    gc.collect()
    assert model.training
    drawn(model, [1, 2], 12)
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    model.use_accumulators(totals)
    tokens_BT = torch.tensor([prompt_of(8)])
    model.loss_sum(tokens_BT, tokens_BT, scale=torch.tensor(1.0))
    assert all(total.any() for total in totals.values())


# --- chance -----------------------------------------------------------------------------------------


def test_a_sample_depends_on_seed_and_number_only() -> None:
    model = tiny_model().double()
    sampling = Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=11)
    together = drawn(model, [1, 2, 3], 20, sampling, samples=7)
    in_parts = drawn(model, [1, 2, 3], 20, sampling, samples=3)
    in_parts += drawn(model, [1, 2, 3], 20, sampling, samples=4, first_sample=3)
    alone = [drawn(model, [1, 2, 3], 20, sampling, first_sample=k)[0] for k in range(7)]
    assert together == in_parts == alone
    assert len({tuple(row) for row in together}) == 7


def test_other_seed_other_samples_and_torchs_own_generator_untouched() -> None:
    model = tiny_model()
    state = torch.get_rng_state()
    first = drawn(model, [1], 20, Sampling(1.0, None, 1.0, seed=1))
    assert first != drawn(model, [1], 20, Sampling(1.0, None, 1.0, seed=2))
    torch.manual_seed(99)
    assert first == drawn(model, [1], 20, Sampling(1.0, None, 1.0, seed=1))
    torch.set_rng_state(state)


def test_a_longer_sample_begins_like_the_shorter_one() -> None:
    model = tiny_model().double()
    sampling = Sampling(1.0, None, 1.0, seed=1)
    assert drawn(model, [1], 300, sampling)[0][:20] == drawn(model, [1], 20, sampling)[0]


def test_no_two_samples_share_a_stream() -> None:
    assert len({stream_seed(1337, k) for k in range(100_000)}) == 100_000
    assert len({stream_seed(seed, 0) for seed in range(100_000)}) == 100_000
    # The low bits of neighbouring seeds are all that torch's generator sees: they must look random.
    ones = np.array([bin(stream_seed(1, k) ^ stream_seed(1, k + 1)).count("1") for k in range(2000)])
    assert 15 < ones.mean() < 17


def test_frequencies_follow_the_softmax() -> None:
    logits_1V = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])
    for temperature in (0.5, 1.0, 2.0):
        weights_1V = token_weights(logits_1V, Sampling(temperature, None, 1.0, 0))
        uniform_B = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        tokens_B = chosen(weights_1V.expand(200_000, -1), uniform_B)
        frequency_V = torch.bincount(tokens_B, minlength=5) / 200_000
        torch.testing.assert_close(
            frequency_V, (logits_1V[0] / temperature).softmax(-1), atol=0.005, rtol=0.0
        )


def test_first_tokens_of_many_samples_follow_the_models_distribution() -> None:
    """Through generate itself: streams of different samples are independent."""
    model = tiny_model(vocab_size=6)
    model.lm_head.weight.data.mul_(0.2)
    steps = generate(
        model, [1], samples=20_000, max_new_tokens=1, sampling=Sampling(1.0, None, 1.0, 5), n_vocab=6
    )
    frequency_V = torch.bincount(next(steps), minlength=6) / 20_000
    with torch.no_grad():
        expected_V = model(torch.tensor([[1]]))[0, -1].softmax(-1)
    torch.testing.assert_close(frequency_V, expected_V, atol=0.015, rtol=0.0)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=12),
    temperature=st.sampled_from([1e-300, 0.1, 0.8, 1.0, 3.0, 100.0]),
    top_k=st.one_of(st.none(), st.integers(0, 14)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
    uniform=st.one_of(st.sampled_from([0.0, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
)
def test_filters_keep_exactly_the_right_tokens(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, uniform: float
) -> None:
    kept = set(range(len(logits)))
    if top_k and top_k < len(logits):
        least = sorted(logits, reverse=True)[top_k - 1]
        kept = {i for i in kept if logits[i] >= least}
    relative = (np.array(logits, np.float64) - max(logits)) / temperature
    weight = np.array([np.exp(relative[i]) if i in kept else 0.0 for i in range(len(logits))])
    probability = weight / weight.sum()
    if top_p < 1:
        by_likelihood = sorted(kept, key=lambda i: (-probability[i], i))
        reached = np.cumsum(probability[by_likelihood])
        if np.abs(reached - top_p).min() < 1e-12:
            return  # which side of the edge rounding falls on is nobody's business
        kept = set(by_likelihood[: int((reached < top_p).sum()) + 1])
    weights_1V = token_weights(torch.tensor([logits]), Sampling(temperature, top_k, top_p, 0))
    allowed = set(weights_1V[0].nonzero()[:, 0].tolist())
    assert {i for i in kept if probability[i] > 1e-14} <= allowed <= kept
    renormalised = np.array([probability[i] if i in kept else 0.0 for i in range(len(logits))])
    np.testing.assert_allclose(
        weights_1V[0].double() / weights_1V.sum(), renormalised / renormalised.sum(), atol=1e-9
    )
    token = int(chosen(weights_1V, torch.tensor([uniform], dtype=torch.float64)))
    assert token in allowed


def test_top_p_zero_is_greedy_and_top_k_one_too() -> None:
    model = tiny_model().double()
    greedy = drawn(model, [1, 2], 15)
    assert drawn(model, [1, 2], 15, Sampling(1.0, 1, 1.0, 0)) == greedy
    assert drawn(model, [1, 2], 15, Sampling(1.0, None, 0.0, 0)) == greedy
    assert drawn(model, [1, 2], 15, Sampling(1e-300, None, 1.0, 0)) == greedy


def test_the_ends_of_the_unit_interval() -> None:
    weights_BV = torch.tensor([[0, 0, 5, 0, 3, 0, 0]]).expand(3, -1)
    uniform_B = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert chosen(weights_BV, uniform_B).tolist() == [2, 2, 4]
    # The largest total a vocabulary of 2**24 can have: every weight rounded up.
    huge_BV = torch.tensor([[2**47, 2**47 + 2**24, 0]])
    assert chosen(huge_BV, uniform_B[2:]).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_padded_ids_are_never_drawn(temperature: float) -> None:
    model = tiny_model(vocab_size=64)
    # Padding that shouts: without the mask it would always win.
    model.lm_head.weight.data[40:] *= 50.0
    rows = drawn(model, [1, 2], 50, Sampling(temperature, None, 1.0, 0), samples=8, n_vocab=40)
    assert max(max(row) for row in rows) < 40


def test_padding_may_be_nan() -> None:
    model = tiny_model(vocab_size=64)
    model.lm_head.weight.data[40:] = float("nan")
    assert len(drawn(model, [1, 2], 5, n_vocab=40)[0]) == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_diverged_model_is_told(bad: float, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    next_logits = model.next_logits
    calls = 0

    def poisoned(tokens_BT: Tensor, cache: list) -> Tensor:
        nonlocal calls
        calls += 1
        logits_BV = next_logits(tokens_BT, cache)
        if calls == 4:
            logits_BV[1, 7] = bad
        return logits_BV

    monkeypatch.setattr(model, "next_logits", poisoned)
    steps = generate(
        model, [1, 2], samples=2, max_new_tokens=9, sampling=Sampling(temperature, 5, 0.9, 0), n_vocab=40
    )
    assert len([next(steps) for _ in range(3)]) == 3
    with pytest.raises(UserError, match="not numbers") as raised:
        next(steps)
    assert "3 new tokens" in raised.value.why
    assert "--step" in raised.value.hint
