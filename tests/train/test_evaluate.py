from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import learnable_tokens

from onecard.arch.shapes import GPT2Shape
from onecard.data.batches import FixedBlocks, fixed_blocks
from onecard.data.bins import TokenFile
from onecard.model.gpt2 import GPT2
from onecard.train.evaluate import evaluate

SHAPE = GPT2Shape(n_layer=1, n_head=2, n_embd=16, vocab_size=61, block_size=16, bias=False)


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    learnable_tokens(1_000).tofile(tmp_path / "val.bin")
    return TokenFile.open(tmp_path / "val.bin")


def nats(model: GPT2, blocks: FixedBlocks, micro_batch: int) -> float:
    found = evaluate(model, blocks, micro_batch=micro_batch, device="cpu")
    assert found is not None
    assert found.bits_per_byte is None  # nothing said what the tokens stand for
    return found.nats_per_token


def test_the_figure_does_not_depend_on_the_micro_batch(tokens: TokenFile) -> None:
    model = GPT2.initialised(SHAPE, 0)
    blocks = fixed_blocks(tokens, 16, 30, seed=1)
    figures = [nats(model, blocks, micro_batch=m) for m in (1, 3, 7, 30, 64)]
    assert figures == pytest.approx([figures[0]] * 5, rel=1e-6)


def test_it_is_the_mean_over_all_tokens_of_the_set(tokens: TokenFile) -> None:
    model = GPT2.initialised(SHAPE, 0).double()
    blocks = fixed_blocks(tokens, 16, 10, seed=1)
    x = torch.from_numpy(blocks.gather(0, 10))
    losses = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert nats(model, blocks, micro_batch=4) == pytest.approx(losses.item(), rel=1e-9)


def test_a_larger_set_contains_the_smaller_one_and_ends_at_the_data(tokens: TokenFile) -> None:
    small, large = fixed_blocks(tokens, 16, 5, seed=1), fixed_blocks(tokens, 16, 10_000, seed=1)
    assert np.array_equal(large.gather(0, 5), small.gather(0, 5))
    assert len(large) == (1_000 - 1) // 16


def test_it_leaves_no_gradients_and_can_be_stopped(tokens: TokenFile) -> None:
    model = GPT2.initialised(SHAPE, 0)
    blocks = fixed_blocks(tokens, 16, 10, seed=1)
    asked = iter([False, False, True])
    assert evaluate(model, blocks, micro_batch=2, device="cpu", stop=lambda: next(asked)) is None
