"""nanochat's architecture of 2026, against itself written down once more with torch's own derivatives."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.arch.shapes import Nanochat2026Shape
from onecard.data.prefetch import Micro
from onecard.errors import UserError
from onecard.generate.decode import Sampling, generate
from onecard.model.compiling import graphs_compiled
from onecard.model.layers import RMS_EPSILON
from onecard.model.nanochat_2026 import Nanochat2026
from onecard.optim.region_buffers import Storage
from onecard.optim.schedule import StepRates
from onecard.train.step import StepOptions, Stepper

# All four kinds of layers: short and long windows, with and without value embeddings.
SHAPE = Nanochat2026Shape(n_layer=5, n_head=2, n_embd=32, vocab_size=61, block_size=211)
WITHOUT = dataclasses.replace(SHAPE, value_embeddings=False)
LENGTH = 197  # of no use to anybody's tiles; windows are 128


def scattered(shape: Nanochat2026Shape, dtype: torch.dtype = torch.float32) -> Nanochat2026:
    """Random everywhere: fresh weights have zero projections, which hide most mistakes."""
    model = Nanochat2026.uninitialised(shape)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
        if "lambda" in name:  # away from zero, where a layer would vanish
            parameter.data.abs_().add_(0.4)
    return model.to(dtype)


def batch(shape: Nanochat2026Shape, sequences: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, shape.vocab_size, (sequences, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(
    model: Nanochat2026, sequences: int = 2, length: int = LENGTH
) -> tuple[float, dict[str, Tensor]]:
    wide = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
    accumulators = {n: torch.zeros(p.shape, dtype=wide) for n, p in model.named_parameters()}
    model.use_accumulators(accumulators)
    x_BT, y_BT = batch(model.shape, sequences, length)
    loss = model.loss_sum(x_BT, y_BT, scale=torch.tensor(1 / y_BT.numel(), dtype=wide))
    return loss.item() / y_BT.numel(), accumulators


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=RMS_EPSILON)


def plainly(p: dict[str, Tensor], shape: Nanochat2026Shape, tokens_BT: Tensor) -> Tensor:
    """Logits. As simple as possible, one token and head at a time where that is simpler."""
    T, H, Q = tokens_BT.shape[1], shape.n_head, shape.n_embd // shape.n_head
    position, pair = torch.arange(T, dtype=torch.float64), torch.arange(Q // 2, dtype=torch.float64)
    angle = torch.outer(position, 100_000.0 ** (-2 * pair / Q))
    # Angles are stored in fp32 in every precision.
    turn = torch.complex(angle.cos().float().double(), -angle.sin().float().double())

    def at_positions(q: Tensor) -> Tensor:
        turned = torch.complex(q[..., : Q // 2], q[..., Q // 2 :]) * turn
        return 1.2 * norm(torch.cat((turned.real, turned.imag), -1))

    x = norm(p["transformer.wte.weight"][tokens_BT])
    gate = torch.sigmoid(x[..., :24] @ p["smear_gate.weight"].T) * p["smear_lambda"]
    before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
    x = x0 = x + gate * before
    distance = position[:, None] - position[None, :]
    for i in range(shape.n_layer):
        x = p["resid_lambdas"][i] * x + p["x0_lambdas"][i] * x0
        n = norm(x)
        q, k, v = (
            t.unflatten(-1, (H, Q)).transpose(1, 2)
            for t in (n @ p[f"transformer.h.{i}.attn.c_attn.weight"].T).chunk(3, dim=-1)
        )
        if shape.value_embeddings and (shape.n_layer - 1 - i) % 2 == 0:
            opening = 3 * torch.sigmoid(n[..., :12] @ p[f"transformer.h.{i}.attn.ve_gate.weight"].T)
            embedded = p[f"value_embeds.{i}.weight"][tokens_BT].unflatten(-1, (H, Q)).transpose(1, 2)
            v = v + opening.transpose(1, 2)[..., None] * embedded
        is_short = i < shape.n_layer - 1 and shape.window_pattern[i % len(shape.window_pattern)] == "S"
        window = 128 * math.ceil(shape.block_size / 4 / 128) if is_short else math.inf
        scores = at_positions(q) @ at_positions(k).transpose(-2, -1) / math.sqrt(Q)
        seen = (distance >= 0) & (distance <= window)
        y = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        x = x + y.transpose(1, 2).flatten(2) @ p[f"transformer.h.{i}.attn.c_proj.weight"].T
        h = norm(x) @ p[f"transformer.h.{i}.mlp.c_fc.weight"].T
        x = x + h.relu().square() @ p[f"transformer.h.{i}.mlp.c_proj.weight"].T
        if i == shape.n_layer // 2:
            middle = x
    logits = norm(x - p["backout_lambda"] * middle) @ p["lm_head.weight"].T
    return 15 * torch.tanh(logits / 15)


def autograds(
    model: Nanochat2026, sequences: int = 2, length: int = LENGTH
) -> tuple[float, dict[str, Tensor]]:
    p = {n: t.detach().double().requires_grad_() for n, t in model.named_parameters()}
    x_BT, y_BT = batch(model.shape, sequences, length)
    loss = F.cross_entropy(plainly(p, model.shape, x_BT).flatten(0, 1), y_BT.flatten())
    loss.backward()
    return loss.item(), {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in p.items()}


@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
@pytest.mark.parametrize("shape", [SHAPE, WITHOUT], ids=["values", "without"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 0.08)]
)
def test_loss_and_gradients_are_autograds(
    recompute: str, shape: Nanochat2026Shape, dtype: torch.dtype, bound: float
) -> None:
    model = scattered(shape, dtype)
    model.recompute, model.loss_chunk = recompute, 100
    loss, ours = gradients(model)
    expected_loss, expected = autograds(model)
    assert loss == pytest.approx(expected_loss, rel=bound)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        # In bf16 a single number's gradient, a sum of thousands that cancel, has little but rounding.
        if dtype != torch.bfloat16 or "lambda" not in name:
            assert (ours[name] - gradient).norm() < bound * gradient.norm(), name


@settings(max_examples=25, deadline=None)
@given(
    n_layer=st.integers(1, 6), n_head=st.integers(1, 3), head_dim=st.sampled_from([24, 32]),
    length=st.integers(1, 20), pattern=st.sampled_from(["SSSL", "L", "SL", "S"]), values=st.booleans(),
    recompute=st.sampled_from(["none", "mlp", "block"]),
)  # fmt: skip
def test_every_shape_has_autograds_gradients(
    n_layer: int, n_head: int, head_dim: int, length: int, pattern: str, values: bool, recompute: str
) -> None:
    shape = Nanochat2026Shape(n_layer, n_head, n_head * head_dim, 37, 20, pattern, values)
    model = scattered(shape, torch.float64)
    model.recompute = recompute
    loss, ours = gradients(model, length=length)
    expected_loss, expected = autograds(model, length=length)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    # A gradient of rounding errors (one layer's scale, which the norm takes away) has no direction.
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-10 * max(gradient.norm().item(), 1.0), name


@pytest.mark.parametrize("kernel", ["cpu", "open"])
def test_windows_in_the_open_are_those_of_the_fused_kernel(kernel: str) -> None:
    model = scattered(SHAPE, torch.float64)
    model.attention_kernel = kernel
    ours, expected = gradients(model)[1], autograds(model)[1]
    assert max(((ours[n] - g).norm() / g.norm()).item() for n, g in expected.items()) < 1e-10


def saved_bytes(model: Nanochat2026, sequences: int) -> int:
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients(model, sequences)
    return sum(seen.values())


@pytest.mark.parametrize(("recompute", "widths"), [("none", 10), ("mlp", 6), ("block", 1)])
@pytest.mark.parametrize("shape", [SHAPE, WITHOUT], ids=["values", "without"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_what_gpt2_keeps(
    recompute: str, widths: int, shape: Nanochat2026Shape, dtype: torch.dtype
) -> None:
    """x0 is the first layer's input and the middle state the input of a layer: neither is one more."""
    model = scattered(shape, dtype)
    model.recompute = recompute
    rows, size = 3 * LENGTH, dtype.itemsize
    a_layer = rows * shape.n_embd * widths * size + (4 * rows * shape.n_head if recompute != "block" else 0)
    assert saved_bytes(model, 3) == shape.n_layer * a_layer + 2 * rows * shape.n_embd * size


def test_evaluating_keeps_nothing_and_gives_the_same_loss() -> None:
    model = scattered(SHAPE)
    loss, _ = gradients(model)

    def refuse(tensor: Tensor) -> Any:
        raise AssertionError("something was saved")

    x_BT, y_BT = batch(SHAPE)
    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        evaluated = model.loss_sum(x_BT, y_BT).item() / y_BT.numel()
    assert evaluated == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("prompt", [1, 2, 120, 150])
@pytest.mark.parametrize("shape", [SHAPE, WITHOUT], ids=["values", "without"])
def test_cached_decoding_is_the_whole_computation(prompt: int, shape: Nanochat2026Shape) -> None:
    """From before the window's end to behind it, and from a prompt that is longer than the window."""
    model = scattered(shape, torch.float64)
    tokens_BT = batch(shape)[0]
    expected_BTV = model(tokens_BT)
    cache = model.new_cache(2, LENGTH)
    rows = [model.next_logits(tokens_BT[:, :prompt], cache)]
    rows += [model.next_logits(tokens_BT[:, i : i + 1], cache) for i in range(prompt, LENGTH)]
    torch.testing.assert_close(torch.stack(rows, 1), expected_BTV[:, prompt - 1 :], atol=1e-9, rtol=0)
    assert expected_BTV.abs().max() <= 15


@pytest.mark.parametrize("samples", [1, 3])
def test_greedy_samples_are_those_without_a_cache(samples: int) -> None:
    """Token for token, across the window's end and then the end of the block, where positions move."""
    model = scattered(SHAPE)
    context = batch(SHAPE)[0][0, :110].tolist()
    sampling = Sampling(temperature=0, top_k=None, top_p=1.0, seed=0)
    steps = generate(model, context, samples=samples, max_new_tokens=110, sampling=sampling, n_vocab=61)
    for step, next_B in enumerate(steps):
        logits_V = model(torch.tensor([context[-SHAPE.block_size :]]))[0, -1]
        assert next_B.tolist() == [logits_V.argmax().item()] * samples, step
        context.append(next_B[0].item())
    assert len(context) > SHAPE.block_size
    assert len(set(context[110:])) > 10  # no monotony that would hide a mistake


def test_the_parts_are_those_of_the_model_that_is_built() -> None:
    for shape in (SHAPE, WITHOUT, Nanochat2026Shape.of_depth(4, 128, 2048)):
        with torch.device("meta"):
            model = Nanochat2026(shape)
        built = dict.fromkeys(shape.parameters_by_part(), 0)
        for name, parameter in model.named_parameters():
            part = {"wte": "token embedding", "lm_head": "head", "value_embeds": "value embeddings"}.get(
                name.split(".")[1 if name.startswith("transformer") else 0]
            )
            if part is None:
                kinds = (("_gate", "gates"), (".attn.", "attention"), (".mlp.", "mlp"), ("lambda", "scalars"))
                part = next(kind for fragment, kind in kinds if fragment in name)
            built[part] += parameter.numel()
        assert shape.parameters_by_part() == built
        assert shape.parameters == sum(p.numel() for p in model.parameters())
        assert type(shape)(**json.loads(json.dumps(shape.to_json()))) == shape


def test_the_dial_gives_nanochats_models() -> None:
    d12 = Nanochat2026Shape.of_depth(12, 32768, 2048)
    assert (d12.n_embd, d12.n_head, d12.head_dim) == (768, 6, 128)
    assert d12.windows == (512, 512, 512, 2048) * 3
    assert d12.layers_with_value_embedding == (1, 3, 5, 7, 9, 11)
    assert d12.parameters == 286_261_730
    assert d12.flops_per_token == 759_696_048
    assert Nanochat2026Shape.of_depth(20, 32768, 2048).parameters == 896_533_746
    assert Nanochat2026Shape.of_depth(5, 64, 1000).windows == (256, 256, 256, 1000, 1000)
    assert Nanochat2026Shape.of_depth(3, 64, 100).windows == (100, 100, 100)
    assert Nanochat2026Shape.of_depth(3, 64, 100).n_embd == 256


@pytest.mark.parametrize(
    "wrong", [{"window_pattern": "SXL"}, {"window_pattern": ""}, {"n_embd": 16}], ids=str
)
def test_an_impossible_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        dataclasses.replace(SHAPE, **wrong)


def test_fresh_weights_predict_nothing_and_begin_as_nanochats() -> None:
    shape = Nanochat2026Shape(4, 2, 128, 512, 32)
    model = Nanochat2026.initialised(shape, 0)
    x_BT, y_BT = batch(shape, 4, 32)
    assert model.loss_sum(x_BT, y_BT).item() / y_BT.numel() == pytest.approx(math.log(512), abs=0.01)
    p = dict(model.named_parameters())
    std = 128**-0.5
    assert p["transformer.wte.weight"].std().item() == pytest.approx(0.8, rel=0.02)
    assert p["lm_head.weight"].std().item() == pytest.approx(0.001, rel=0.02)
    assert p["transformer.h.0.mlp.c_fc.weight"].std().item() == pytest.approx(0.4 * std, rel=0.02)
    assert p["transformer.h.0.attn.c_attn.weight"].std().item() == pytest.approx(std, rel=0.02)
    assert p["value_embeds.1.weight"].std().item() == pytest.approx(std, rel=0.02)
    assert p["value_embeds.1.weight"].abs().max() <= math.sqrt(3) * std
    assert 0 <= p["transformer.h.1.attn.ve_gate.weight"].min() <= p["smear_gate.weight"].max() <= 0.02
    assert not p["transformer.h.1.attn.c_proj.weight"].any() and not p["smear_lambda"].any()
    torch.testing.assert_close(p["resid_lambdas"].data, torch.linspace(1.15, 1.05, 4))
    torch.testing.assert_close(p["x0_lambdas"].data, torch.linspace(0.2, 0.05, 4))
    assert p["backout_lambda"].item() == pytest.approx(0.2)


@pytest.mark.parametrize(
    "storage", [Storage(), Storage("bf16", "int8"), Storage(offload="gradients")], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_trains_it(storage: Storage, dtype: str) -> None:
    shape = dataclasses.replace(SHAPE, block_size=40)
    stepper = Stepper(Nanochat2026.initialised(shape, 3), device="cpu", dtype=dtype, storage=storage)
    x_BT, y_BT = batch(shape, 4, 40)
    losses = []
    for _ in range(25):
        loss = stepper.backward(Micro(x_BT, y_BT, torch.zeros(4, dtype=torch.int64)), y_BT.numel())
        losses.append(loss.item())
        stepper.update(StepRates(1e-2))
    assert losses[-1] < losses[0] - 0.5
    assert all(bool(t.isfinite().all()) for t in stepper.optimizer.export_weights().values())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_layers_of_a_kind_are_compiled_once(recompute: str) -> None:
    """In the flat buffers of the engine, where all accumulators are parts of a few tensors."""
    shape = dataclasses.replace(SHAPE, n_layer=9)
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        model = scattered(shape)
        model.recompute = recompute
        stepper = Stepper(model, device="cpu", dtype="float32", options=StepOptions(grad_clip=0.0))
        if compiled:
            model.compile_parts(backend="aot_eager")
        counted = graphs_compiled()
        x_BT, y_BT = batch(shape)
        for _ in range(2):
            stepper.backward(Micro(x_BT, y_BT, torch.zeros(2, dtype=torch.int64)), y_BT.numel())
        results.append({n: t.clone() for n, t in stepper.optimizer.accumulators.items()})
    # Two passes of four kinds of layers, of the norm and of the embedding; the loss.
    assert len(set(model.layer_specs())) == 4
    assert graphs_compiled() - counted == 4 * 2 + 2 + 2 + 1
    for name, accumulator in results[0].items():
        assert (results[1][name] - accumulator).norm() < 1e-5 * accumulator.norm(), name
    torch.compiler.reset()


def test_another_block_size_keeps_the_windows_the_weights_know() -> None:
    shape = Nanochat2026Shape(4, 2, 64, 128, 1024)
    assert shape.windows == (256, 256, 256, 1024)
    assert shape.with_block_size(2048).windows == (256, 256, 256, 2048)
    assert shape.with_block_size(512).with_block_size(128).windows == (128, 128, 128, 128)
    assert Nanochat2026Shape(**shape.with_block_size(512).to_json()) == shape.with_block_size(512)
