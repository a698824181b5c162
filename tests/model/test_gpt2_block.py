"""A layer's own backward pass: the gradients of autograd, from no more than it says it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.arch.shapes import GPT2Shape
from onecard.model.dropout import DropoutKeys
from onecard.model.gpt2 import GPT2

SHAPE = GPT2Shape(n_layer=3, n_head=2, n_embd=32, vocab_size=61, block_size=16, bias=True)


def batch(shape: GPT2Shape, sequences: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        0, shape.vocab_size, (sequences, shape.block_size + 1), generator=torch.Generator().manual_seed(5)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def our_gradients(
    model: GPT2, sequences: int = 4, dropout: DropoutKeys | None = None
) -> tuple[float, dict[str, Tensor]]:
    wide = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
    accumulators = {n: torch.zeros(p.shape, dtype=wide) for n, p in model.named_parameters()}
    model.use_accumulators(accumulators)
    loss = model.loss_sum(*batch(model.shape, sequences), dropout, scale=torch.tensor(0.5, dtype=wide))
    return loss.item(), accumulators


def autograds(model: GPT2) -> tuple[float, dict[str, Tensor]]:
    """GPT-2 written down once more, as simply as possible, in float64 with torch's own derivatives."""
    shape, (x_BT, y_BT) = model.shape, batch(model.shape)
    p = {n: t.detach().double().requires_grad_() for n, t in model.named_parameters()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (shape.n_embd,), p[f"{name}.weight"], p.get(f"{name}.bias"), 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    x = p["transformer.wte.weight"][x_BT] + p["transformer.wpe.weight"][: x_BT.shape[1]]
    for i in range(shape.n_layer):
        layer = f"transformer.h.{i}"
        q, k, v = (
            t.unflatten(-1, (shape.n_head, -1)).transpose(1, 2)
            for t in linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn").chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{layer}.attn.c_proj")
        h = linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")
        x = x + linear(F.gelu(h, approximate="tanh" if shape.gelu_tanh else "none"), f"{layer}.mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ p["transformer.wte.weight"].T
    loss = F.cross_entropy(logits.flatten(0, 1), y_BT.flatten(), reduction="sum")
    (0.5 * loss).backward()
    return loss.item(), {n: t.grad for n, t in p.items() if t.grad is not None}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(((ours[n].double() - g).norm() / g.norm()).item() for n, g in theirs.items())


@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_gradients_are_autograds(recompute: str, dtype: torch.dtype, bound: float) -> None:
    model = GPT2.initialised(SHAPE, 3).to(dtype)
    model.recompute, model.loss_chunk = recompute, 24
    loss, gradients = our_gradients(model)
    expected_loss, expected = autograds(model)
    assert loss == pytest.approx(expected_loss, rel=bound)
    assert worst(gradients, expected) < bound


@settings(max_examples=25, deadline=None)
@given(
    n_layer=st.integers(1, 3), n_head=st.integers(1, 3), head_dim=st.sampled_from([4, 8, 10]),
    block=st.integers(1, 20), bias=st.booleans(), tanh=st.booleans(),
    recompute=st.sampled_from(["none", "mlp", "block"]),
)  # fmt: skip
def test_every_shape_has_autograds_gradients(
    n_layer: int, n_head: int, head_dim: int, block: int, bias: bool, tanh: bool, recompute: str
) -> None:
    shape = GPT2Shape(n_layer, n_head, n_head * head_dim, 37, block, bias, tanh)
    model = GPT2.initialised(shape, 1).double()
    model.recompute = recompute
    loss, gradients = our_gradients(model)
    expected_loss, expected = autograds(model)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    # A gradient of rounding errors (a single token attends to itself, whatever the key) has no direction.
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-10 * max(gradient.norm().item(), 1.0), name


@pytest.mark.parametrize("kernel", ["cpu", "open"])
def test_attention_in_the_open_is_the_fused_one(kernel: str) -> None:
    model = GPT2.initialised(SHAPE, 3).double()
    model.attention_kernel = kernel
    _, gradients = our_gradients(model)
    assert worst(gradients, autograds(model)[1]) < 1e-12


@pytest.mark.parametrize("recompute", ["mlp", "block"])
def test_recomputing_drops_the_same_values(recompute: str) -> None:
    """Masks are functions of their keys, so computing again needs no generator's state."""
    dropout = DropoutKeys(torch.tensor([3, 1, 4, 1], dtype=torch.int32), 0.3)
    model = GPT2.initialised(SHAPE, 3).double()
    loss, saved = our_gradients(model, dropout=dropout)
    model.recompute = recompute
    again, recomputed = our_gradients(model, dropout=dropout)
    assert again == loss
    assert worst(recomputed, saved) < 1e-12


def saved_bytes(model: GPT2, sequences: int) -> int:
    """What autograd holds between the two passes, each piece of memory once."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        our_gradients(model, sequences)
    return sum(seen.values())


@pytest.mark.parametrize(("recompute", "widths"), [("none", 10), ("mlp", 6), ("block", 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_the_table_says(recompute: str, widths: int, dtype: torch.dtype) -> None:
    """10, 6 or 1 values of width D per token and layer, and the log-sum-exp of attention."""
    sequences, shape = 5, SHAPE
    model = GPT2.initialised(shape, 3).to(dtype)
    model.recompute = recompute
    rows, size = sequences * shape.block_size, dtype.itemsize
    a_layer = rows * shape.n_embd * widths * size
    if recompute != "block":
        a_layer += rows * shape.n_head * 4
    # Besides the layers: the input of the last norm, and the gradient that the loss has ready.
    expected = shape.n_layer * a_layer + 2 * rows * shape.n_embd * size
    assert saved_bytes(model, sequences) == expected


def test_fp16_keeps_its_residual_stream_in_fp32() -> None:
    """Sums over layers outgrow fp16; here one layer alone adds more than its largest number."""
    model = GPT2.initialised(SHAPE, 3).half()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.c_proj.bias"):
            parameter.fill_(60000.0)
    hidden = model.hidden(batch(SHAPE)[0])
    assert hidden.dtype == torch.float16
    assert hidden.isfinite().all()


def test_evaluating_keeps_nothing() -> None:
    model = GPT2.initialised(SHAPE, 3)

    def refuse(tensor: Tensor) -> Any:
        raise AssertionError("something was saved")

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        model.loss_sum(*batch(SHAPE))
        model(batch(SHAPE)[0])
