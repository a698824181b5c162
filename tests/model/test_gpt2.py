from __future__ import annotations

import math

import pytest
import torch

from onecard.arch.shapes import GPT2Shape
from onecard.model.dropout import DropoutKeys
from onecard.model.gpt2 import GPT2
from onecard.model.loss import IGNORE

SHAPE = GPT2Shape(n_layer=2, n_head=2, n_embd=32, vocab_size=61, block_size=16, bias=True)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_parameter_names_are_nanogpts() -> None:
    names = {name for name, _ in GPT2(SHAPE).named_parameters()}
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    layer = {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    expected = {f"transformer.h.{i}.{n}" for i in range(2) for n in layer}
    expected |= {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    }
    assert names == expected


def test_fresh_weights_depend_on_seed_and_name_only() -> None:
    a, b, other = (GPT2.initialised(SHAPE, seed) for seed in (1, 1, 2))
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.dim() < 2 or not torch.equal(p, r), name
    deeper = GPT2.initialised(GPT2Shape(**{**SHAPE.to_json(), "n_layer": 3}), 1)
    # Only the residual projections are scaled by depth; all else is untouched by the extra layer.
    assert torch.equal(a.transformer.wte.weight, deeper.transformer.wte.weight)
    first = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(a.get_parameter(first), deeper.get_parameter(first))


def test_fresh_weights_have_gpt2s_spread() -> None:
    model = GPT2.initialised(GPT2Shape(4, 4, 128, 512, 64, False), 0)
    block = model.transformer.h[0]
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.03)
    assert torch.equal(block.ln_1.weight, torch.ones(128))
    x = torch.randint(0, 512, (2, 65))
    assert model.loss_sum(x[:, :-1], x[:, 1:]).item() / 128 == pytest.approx(math.log(512), abs=0.1)


def test_the_head_stays_tied_to_the_embedding() -> None:
    for model in (GPT2(SHAPE), GPT2.initialised(SHAPE, 0), GPT2.initialised(SHAPE, 0).double()):
        assert model.lm_head.weight is model.transformer.wte.weight


def test_no_position_sees_the_future() -> None:
    model = GPT2.initialised(SHAPE, 0).double()
    x = tokens(2, 16)
    changed = x.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % SHAPE.vocab_size
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_attention_with_dropout_is_causal_too_and_near_the_fused_one_when_little_is_dropped() -> None:
    model = GPT2.initialised(SHAPE, 0).double()
    x = tokens(2, 16)
    changed = x.clone()
    changed[:, 9:] = 3
    dropout = DropoutKeys(torch.tensor([5, 6], dtype=torch.int32), 0.4)
    assert torch.equal(model.hidden(x, dropout)[:, :9], model.hidden(changed, dropout)[:, :9])
    nothing = DropoutKeys(torch.tensor([5, 6], dtype=torch.int32), 0.0)
    assert torch.allclose(model.hidden(x, nothing), model.hidden(x), atol=1e-12)


def test_loss_sum_is_the_plain_cross_entropy_and_skips_ignored_targets() -> None:
    model = GPT2.initialised(SHAPE, 0).double()
    x = tokens(3, 17)
    targets = x[:, 1:].clone()
    targets[0, :5] = IGNORE
    logits = model(x[:, :-1])
    kept = targets != IGNORE
    expected = -logits.log_softmax(-1)[kept].gather(1, targets[kept][:, None]).sum()
    assert model.loss_sum(x[:, :-1], targets).item() == pytest.approx(expected.item(), rel=1e-12)


def test_cropping_the_block_keeps_what_short_sequences_compute() -> None:
    model = GPT2.initialised(SHAPE, 0).double()
    x = tokens(2, 8)
    before = model(x)
    model.use_block_size(8)
    assert model.shape.block_size == 8
    assert sum(p.numel() for p in model.parameters()) == model.shape.parameters
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("probability", [None, 0.2])
def test_all_layers_share_one_compilation(probability: float | None) -> None:
    """Counted in graphs, so a cheap backend will do. Twelve layers would hit the recompile limit of eight."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = GPT2.initialised(GPT2Shape(**{**SHAPE.to_json(), "n_layer": 12}), 0)
    model.compile_parts(backend="aot_eager")
    keys = torch.tensor([1, 2], dtype=torch.int32)
    dropout = None if probability is None else DropoutKeys(keys, probability)
    x = tokens(2, 17)
    model.use_accumulators({name: torch.zeros_like(p) for name, p in model.named_parameters()})
    model.loss_sum(x[:, :-1], x[:, 1:], dropout, scale=torch.tensor(1.0))
    # Forward and backward of a layer and of the last norm, and the loss of a chunk.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 5
    torch.compiler.reset()
