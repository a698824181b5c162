"""Parameters and FLOPs, against published counts and against the model itself."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from onecard.arch.shapes import GPT2Shape
from onecard.model.gpt2 import GPT2

NANOGPT = GPT2Shape(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, block_size=1024, bias=False)


@st.composite
def shapes(draw: st.DrawFn) -> GPT2Shape:
    n_head = draw(st.integers(1, 6))
    return GPT2Shape(
        n_layer=draw(st.integers(1, 5)),
        n_head=n_head,
        n_embd=n_head * draw(st.integers(1, 16)),
        vocab_size=draw(st.integers(2, 300)),
        block_size=draw(st.integers(1, 64)),
        bias=draw(st.booleans()),
    )


def test_nanogpts_default_model_has_the_known_number_of_parameters() -> None:
    assert NANOGPT.parameters == 124_373_760


def test_the_forty_million_model_has_the_known_number_of_parameters() -> None:
    assert dataclasses.replace(NANOGPT, n_embd=384).parameters == 40_953_216


@pytest.mark.parametrize(
    ("n_layer", "n_head", "n_embd", "parameters"),
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
    ids=["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"],
)
def test_openais_models_have_their_published_number_of_parameters(
    n_layer: int, n_head: int, n_embd: int, parameters: int
) -> None:
    assert GPT2Shape(n_layer, n_head, n_embd, 50257, 1024, bias=True).parameters == parameters


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_the_parts_are_those_of_the_model_that_is_built(shape: GPT2Shape) -> None:
    with torch.device("meta"):
        model = GPT2(shape)
    built = dict.fromkeys(shape.parameters_by_part(), 0)
    for name, parameter in model.named_parameters():
        part = {"wte": "token embedding (tied head)", "wpe": "position embedding"}.get(name.split(".")[1])
        if part is None:
            part = "attention" if ".attn." in name else "mlp" if ".mlp." in name else "layer norms"
        built[part] += parameter.numel()
    assert shape.parameters_by_part() == built
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_flops_per_token_are_those_of_nanogpts_formula() -> None:
    # 6 × 123,587,328 parameters without positions + 12 × 12 layers × 768 × 1024 tokens
    assert NANOGPT.flops_per_token == 741_523_968 + 113_246_208


@settings(max_examples=20, deadline=None)
@given(shapes())
def test_flops_per_token_are_three_times_the_matmuls_of_a_forward_pass(shape: GPT2Shape) -> None:
    shape = dataclasses.replace(shape, bias=False)
    with torch.device("meta"):
        model = GPT2(shape)
        tokens_BT = torch.zeros(2, shape.block_size, dtype=torch.long)
    model.attention_kernel = "open"  # as matmuls, which the counter knows
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens_BT)
    # The formula counts the norms' weights with the matrices; no matmul uses them.
    norms = shape.parameters_by_part()["layer norms"]
    assert 3 * counter.get_total_flops() == 2 * shape.block_size * (shape.flops_per_token - 6 * norms)


def test_a_shape_survives_json() -> None:
    shape = dataclasses.replace(NANOGPT, gelu_tanh=True)
    assert GPT2Shape(**json.loads(json.dumps(shape.to_json()))) == shape
    assert shape.head_dim == 64
