"""Decoding on a CUDA card: the cache against the training forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from onecard.arch.shapes import GPT2Shape
from onecard.generate.decode import Sampling, generate
from onecard.model.gpt2 import GPT2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

SHAPE = GPT2Shape(n_layer=3, n_head=4, n_embd=128, vocab_size=320, block_size=48, bias=True)
N_VOCAB = 300
PROMPT = [(7 * i * i + 3) % N_VOCAB for i in range(80)]


@pytest.fixture
def model() -> Iterator[GPT2]:
    # TF32 would round the two ways of computing differently enough to part them.
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    model = GPT2.initialised(SHAPE, seed=4).cuda()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "wte" not in name:
            parameter.data.mul_(6.0)  # so that the context matters and the text wanders
    yield model
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("prompt_length", [1, 20, 48, 80])
@pytest.mark.parametrize("samples", [1, 5])
def test_cached_greedy_is_uncached_greedy(model: GPT2, prompt_length: int, samples: int) -> None:
    prompt = PROMPT[:prompt_length]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(70):
            window = torch.tensor([tokens[-SHAPE.block_size :]], device="cuda")
            tokens.append(int(model(window)[0, -1, :N_VOCAB].argmax()))
    steps = generate(
        model,
        prompt,
        samples=samples,
        max_new_tokens=70,
        sampling=Sampling(temperature=0.0, top_k=None, top_p=1.0, seed=0),
        n_vocab=N_VOCAB,
    )
    rows = torch.stack(list(steps), dim=1)
    assert rows.device.type == "cpu"
    assert rows.tolist() == [tokens[prompt_length:]] * samples


def test_cached_logits_agree_in_bf16(model: GPT2) -> None:
    model = model.bfloat16()
    tokens_1T = torch.tensor([PROMPT[:48]], device="cuda")
    with torch.inference_mode():
        expected_TV = model(tokens_1T)[0].float()
        cache = model.new_cache(1, 48)
        cached = [model.next_logits(tokens_1T[:, :8], cache)]
        cached += [model.next_logits(tokens_1T[:, i : i + 1], cache) for i in range(8, 48)]
    cached_TV = torch.cat(cached).float()
    spread = expected_TV[7:].std()
    assert (cached_TV - expected_TV[7:]).abs().max() < 0.15 * spread
    assert (cached_TV - expected_TV[7:]).abs().mean() < 0.03 * spread


def test_samples_do_not_depend_on_the_batch_and_stay_in_the_vocabulary(model: GPT2) -> None:
    model.lm_head.weight.data[N_VOCAB:] *= 50.0  # padding that would win if it were not masked
    model = model.double()

    def rows(samples: int, first_sample: int) -> list[list[int]]:
        steps = generate(
            model,
            PROMPT[:5],
            samples=samples,
            max_new_tokens=60,
            sampling=Sampling(temperature=0.9, top_k=100, top_p=0.95, seed=2),
            n_vocab=N_VOCAB,
            first_sample=first_sample,
        )
        return torch.stack(list(steps), dim=1).tolist()

    together = rows(6, 0)
    assert together == rows(2, 0) + rows(4, 2)
    assert max(max(row) for row in together) < N_VOCAB
