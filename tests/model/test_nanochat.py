"""nanochat's architecture of October 2025, against transformers' own and against what it says it keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.arch.shapes import NanochatShape
from onecard.data.prefetch import Micro
from onecard.model.layers import RMS_EPSILON, rms_norm, rms_norm_backward, rotate
from onecard.model.nanochat import Nanochat
from onecard.optim.region_buffers import Storage
from onecard.optim.schedule import StepRates
from onecard.train.step import Stepper

SHAPE = NanochatShape(n_layer=3, n_head=2, n_embd=32, vocab_size=61, block_size=16)


def scattered(shape: NanochatShape, dtype: torch.dtype = torch.float32) -> Nanochat:
    """Random everywhere: fresh weights have zero projections, which hide most mistakes."""
    model = Nanochat.initialised(shape, 1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model.to(dtype)


def batch(shape: NanochatShape = SHAPE, sequences: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        0, shape.vocab_size, (sequences, shape.block_size + 1), generator=torch.Generator().manual_seed(5)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(model: Nanochat, sequences: int = 4) -> tuple[float, dict[str, Tensor]]:
    wide = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
    accumulators = {n: torch.zeros(p.shape, dtype=wide) for n, p in model.named_parameters()}
    model.use_accumulators(accumulators)
    x_BT, y_BT = batch(model.shape, sequences)
    loss = model.loss_sum(x_BT, y_BT, scale=torch.tensor(1 / y_BT.numel(), dtype=wide))
    return loss.item() / y_BT.numel(), accumulators


def theirs(ours: Nanochat) -> Any:
    """transformers' model with our weights."""
    transformers = pytest.importorskip("transformers")
    shape = ours.shape
    config = transformers.NanoChatConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.n_embd, intermediate_size=4 * shape.n_embd,
        num_hidden_layers=shape.n_layer, num_attention_heads=shape.n_head,
        max_position_embeddings=shape.block_size, attn_implementation="eager", pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    model = transformers.NanoChatForCausalLM(config).to(ours.lm_head.weight.dtype)
    model.load_state_dict(in_their_names({n: p.clone() for n, p in ours.named_parameters()}))
    return model


def in_their_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        if ".c_attn." in name:
            layer = name.split(".")[2]
            for kind, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"model.layers.{layer}.self_attn.{kind}_proj.weight"] = part
            continue
        for ours, other in (
            ("transformer.wte", "model.embed_tokens"), ("transformer.h.", "model.layers."),
            ("attn.c_proj", "self_attn.o_proj"), ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2"),
        ):  # fmt: skip
            name = name.replace(ours, other)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
def test_loss_and_gradients_are_transformers(recompute: str) -> None:
    model = scattered(SHAPE)
    model.recompute, model.loss_chunk = recompute, 24
    loss, ours = gradients(model)
    their_model = theirs(model)
    x_BT, y_BT = batch()
    logits = their_model(x_BT).logits
    torch.testing.assert_close(model(x_BT), logits, atol=1e-4, rtol=0)
    their_loss = F.cross_entropy(logits.flatten(0, 1), y_BT.flatten())
    their_loss.backward()
    assert loss == pytest.approx(their_loss.item(), abs=1e-5)
    their_gradients = dict(their_model.named_parameters())
    for name, gradient in in_their_names(ours).items():
        expected = their_gradients[name].grad
        assert (gradient - expected).norm() < 1e-4 * expected.norm(), name


@settings(max_examples=20, deadline=None)
@given(
    n_layer=st.integers(1, 3), n_head=st.integers(1, 3), head_dim=st.sampled_from([2, 8, 10]),
    block=st.integers(1, 12), recompute=st.sampled_from(["none", "mlp", "block"]),
)  # fmt: skip
def test_gradients_are_those_of_the_loss(
    n_layer: int, n_head: int, head_dim: int, block: int, recompute: str
) -> None:
    """By differences, in float64: along a random direction the loss changes as the gradient says."""
    model = scattered(NanochatShape(n_layer, n_head, n_head * head_dim, 23, block), torch.float64)
    model.recompute = recompute
    _, accumulators = gradients(model)
    generator = torch.Generator().manual_seed(9)
    directions = {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in model.named_parameters()
    }
    expected = sum((accumulators[n] * d).sum().item() for n, d in directions.items())
    losses, step = [], 1e-6
    for sign in (1, -2):
        for name, parameter in model.named_parameters():
            parameter.data.add_(directions[name], alpha=sign * step)
        x_BT, y_BT = batch(model.shape)
        losses.append(model.loss_sum(x_BT, y_BT).item() / y_BT.numel())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_loss_of_some_targets_apart_is_capped_like_all_of_it() -> None:
    model = scattered(NanochatShape(2, 2, 16, 23, 8), torch.float64)
    x_BT, y_BT = batch(model.shape)
    logits_NV = model(x_BT).flatten(0, 1)
    losses_N = torch.nn.functional.cross_entropy(logits_NV, y_BT.flatten(), reduction="none")
    for apart in ([], [3], [0, 5, y_BT.numel() - 1]):
        total, part = model.loss_sums(x_BT, y_BT, torch.tensor(apart, dtype=torch.int64))
        assert total == model.loss_sum(x_BT, y_BT)
        # forward() gives capped logits in float32.
        assert part.item() == pytest.approx(losses_N[apart].sum().item(), rel=1e-6)


@pytest.mark.parametrize(("recompute", "widths"), [("none", 10), ("mlp", 6), ("block", 1)])
def test_it_keeps_what_gpt2_keeps(recompute: str, widths: int) -> None:
    model = scattered(SHAPE)
    model.recompute = recompute
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients(model, sequences=5)
    rows = 5 * SHAPE.block_size
    a_layer = 4 * rows * (SHAPE.n_embd * widths + (SHAPE.n_head if recompute != "block" else 0))
    assert sum(seen.values()) == SHAPE.n_layer * a_layer + 2 * 4 * rows * SHAPE.n_embd


def test_cached_decoding_is_the_whole_computation() -> None:
    model = scattered(SHAPE, torch.float64)
    tokens_1T = batch()[0][:1]
    expected_TV = model(tokens_1T)[0]
    cache = model.new_cache(1, 16)
    rows = [model.next_logits(tokens_1T[:, :6], cache)]
    rows += [model.next_logits(tokens_1T[:, i : i + 1], cache) for i in range(6, 16)]
    torch.testing.assert_close(torch.cat(rows), expected_TV[5:], atol=1e-6, rtol=0)
    assert expected_TV.abs().max() <= 15


def test_angles_that_a_sample_was_the_first_to_need_are_fit_for_training() -> None:
    """The trainer tries a sample before its first step; tensors of inference mode are not for autograd."""
    model = Nanochat.initialised(SHAPE, 0)
    with torch.inference_mode():
        model.next_logits(torch.zeros(1, 1, dtype=torch.int64), model.new_cache(1, 4))
    assert model._angles is not None
    assert not any(tensor.is_inference() for tensor in model._angles)


def test_the_dial_gives_nanochats_models() -> None:
    d32 = NanochatShape.of_depth(32, 65536, 2048)
    assert (d32.n_embd, d32.n_head, d32.head_dim) == (2048, 16, 128)
    assert d32.parameters == 1_879_048_192
    assert NanochatShape.of_depth(20, 65536, 2048).parameters == 560_988_160
    with torch.device("meta"):
        model = Nanochat(SHAPE)
    assert sum(p.numel() for p in model.parameters()) == SHAPE.parameters


def test_fresh_weights_predict_nothing_and_begin_as_nanochats() -> None:
    shape = NanochatShape(2, 2, 128, 512, 32)
    model = Nanochat.initialised(shape, 0)
    x_BT, y_BT = batch(shape)
    assert model.loss_sum(x_BT, y_BT).item() / y_BT.numel() == pytest.approx(math.log(512), abs=0.01)
    parameters = dict(model.named_parameters())
    assert parameters["transformer.wte.weight"].std().item() == pytest.approx(1.0, rel=0.02)
    assert parameters["transformer.h.0.mlp.c_fc.weight"].std().item() == pytest.approx(128**-0.5, rel=0.02)
    assert not parameters["transformer.h.1.attn.c_proj.weight"].any()


@pytest.mark.parametrize(
    "storage", [Storage(), Storage("bf16", "int8"), Storage(offload="gradients")], ids=str
)
def test_the_engine_trains_it(storage: Storage) -> None:
    stepper = Stepper(Nanochat.initialised(SHAPE, 3), device="cpu", dtype="float32", storage=storage)
    x_BT, y_BT = batch(sequences=8)
    losses = []
    for _ in range(25):
        loss = stepper.backward(Micro(x_BT, y_BT, torch.zeros(8, dtype=torch.int64)), y_BT.numel())
        losses.append(loss.item())
        stepper.update(StepRates(1e-2))
    assert losses[-1] < losses[0] - 0.5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), half=st.integers(1, 9))
def test_rotating_and_norming_have_the_derivatives_of_autograd(seed: int, half: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, dout = (torch.randn(3, 2 * half, generator=generator, dtype=torch.float64) for _ in range(2))
    angle = torch.randn(3, half, generator=generator, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    torch.testing.assert_close(rotate(rotate(x, cos, sin), cos, -sin), x)
    wide = x.clone().requires_grad_()
    (F.rms_norm(wide, (2 * half,), eps=RMS_EPSILON) * dout).sum().backward()
    n, factor = rms_norm(x)
    assert wide.grad is not None
    torch.testing.assert_close(rms_norm_backward(dout, n, factor), wide.grad, atol=1e-6, rtol=1e-6)
