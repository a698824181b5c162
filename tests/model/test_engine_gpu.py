"""The memory engine on a CUDA card: kernels against float64, the same numbers wherever things live."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape
from onecard.data.prefetch import Micro
from onecard.errors import UserError
from onecard.model.attention import (
    GPU_KERNELS,
    WINDOWED_GPU_KERNELS,
    attend,
    attend_backward,
    fastest_kernel,
    windowed_kernel,
)
from onecard.model.gpt2 import GPT2
from onecard.model.loss import IGNORE, LossOptions, chunk_loss_, linear_cross_entropy
from onecard.model.loss_kernel import kernel_chunk_loss_
from onecard.model.nanochat_2026 import Nanochat2026
from onecard.model.precision import torch_dtype
from onecard.optim import regions
from onecard.optim.offload import host_empty
from onecard.optim.region_buffers import Storage
from onecard.optim.schedule import StepRates
from onecard.train.memory import cap_memory
from onecard.train.step import StepOptions, Stepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
SHAPE = GPT2Shape(n_layer=3, n_head=4, n_embd=256, vocab_size=1000, block_size=128, bias=True)


@pytest.fixture(autouse=True)
def full_fp32():  # type: ignore[no-untyped-def]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    torch.compiler.reset()  # every test has shapes of its own; together they would pass the limit
    yield
    torch.set_float32_matmul_precision(before)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("vocab", [61, 1000, 8192, 50304])
@pytest.mark.parametrize("options", [LossOptions(), LossOptions(15.0, 0.0), LossOptions(15.0, 1e-3)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_loss_kernel_is_the_plain_computation(
    vocab: int, options: LossOptions, dtype: torch.dtype, bound: float
) -> None:
    x_ND = torch.randn(301, 64, device="cuda", dtype=dtype)
    head_VD = torch.randn(vocab, 64, device="cuda", dtype=dtype) / 4
    targets_N = torch.randint(0, vocab, (301,), device="cuda")
    targets_N[::5] = IGNORE
    wide = [t.double().detach().requires_grad_() for t in (x_ND, head_VD)]
    logits = wide[0] @ wide[1].T
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    expected = F.cross_entropy(logits, targets_N, ignore_index=IGNORE, reduction="sum")
    expected = expected + options.z_loss * (logits.logsumexp(-1)[targets_N != IGNORE] ** 2).sum()
    (expected * 0.25).backward()
    for chunk in (64, 100, 1000):
        x = x_ND.clone().requires_grad_()
        accumulator = torch.zeros(head_VD.shape, device="cuda")
        loss = linear_cross_entropy(
            x, head_VD, targets_N, chunk=chunk, scale=torch.tensor(0.25, device="cuda"),
            head_accumulator_VD=accumulator, options=options, chunk_loss=kernel_chunk_loss_,
        )  # fmt: skip
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=max(bound / 10, 1e-5))
        assert x.grad is not None and wide[0].grad is not None and wide[1].grad is not None
        assert relative(x.grad, wide[0].grad) < bound
        assert relative(accumulator, wide[1].grad) < bound
        without = linear_cross_entropy(
            x_ND, head_VD, targets_N, chunk=chunk, options=options, chunk_loss=kernel_chunk_loss_
        )
        assert without.item() == pytest.approx(loss.item(), rel=1e-6)


def test_the_loss_kernel_writes_every_row_and_only_zeros_where_nothing_counts() -> None:
    logits_CV = torch.full((9, 5000), float("nan"), device="cuda", dtype=torch.bfloat16)
    logits_CV[4] = torch.randn(5000, device="cuda")
    targets_C = torch.full((9,), IGNORE, device="cuda")
    targets_C[4] = 17
    plain = logits_CV[4:5].clone()
    scale = torch.tensor(2.0, device="cuda")
    loss = kernel_chunk_loss_(logits_CV, targets_C, scale, LossOptions())
    expected = chunk_loss_(plain, targets_C[4:5], scale, LossOptions())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(logits_CV[4], plain[0]) < 1e-2
    assert not logits_CV[[0, 1, 2, 3, 5, 6, 7, 8]].any()


@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_every_attention_kernel_computes_attention(kernel: str, dtype: torch.dtype, head_dim: int) -> None:
    if dtype == torch.float32 and kernel != "efficient":
        pytest.skip("a kernel of half precision")
    packed = torch.randn(2, 96, 3, 4, head_dim, device="cuda").to(dtype)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    dy = torch.randn_like(q)
    wide = [t.double().detach().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*wide, is_causal=True)
    expected.backward(dy.double())
    y, lse = attend(kernel, q, k, v)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert relative(y, expected) < bound
    for gradient, their in zip(attend_backward(kernel, dy, q, k, v, y, lse), wide, strict=True):
        assert their.grad is not None
        assert relative(gradient, their.grad) < bound


def test_a_head_no_kernel_takes_is_computed_in_the_open() -> None:
    kernel, times = fastest_kernel(2, 3, 32, 6, torch.float64, "cuda")
    assert (kernel, times) == ("open", {})
    chosen, times = fastest_kernel(4, 12, 1024, 64, torch.bfloat16, "cuda")
    assert times[chosen] <= 1.05 * min(times.values())


def batch(sequences: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 1000, (sequences, 129), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(device: str, dtype: torch.dtype, recompute: str, compiled: bool) -> dict[str, Tensor]:
    model = GPT2.initialised(SHAPE, 3).to(device, dtype)
    model.recompute, model.loss_chunk = recompute, 200
    if device == "cuda":
        model.attention_kernel, _ = fastest_kernel(4, 4, 128, 64, dtype, device)
    if compiled:
        model.compile_parts()
    wide = torch.promote_types(dtype, torch.float32)
    accumulators = {n: torch.zeros(p.shape, dtype=wide, device=device) for n, p in model.named_parameters()}
    model.use_accumulators(accumulators)
    x_BT, y_BT = (t.to(device) for t in batch())
    model.loss_sum(x_BT, y_BT, scale=torch.tensor(1 / 512, dtype=wide, device=device))
    return {name: accumulator.cpu() for name, accumulator in accumulators.items()}


@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
@pytest.mark.parametrize(
    ("dtype", "compiled", "bound"),
    [(torch.float32, False, 2e-5), (torch.float32, True, 2e-5), (torch.bfloat16, True, 0.03)],
)
def test_gradients_are_the_cpus_in_float64(
    recompute: str, dtype: torch.dtype, compiled: bool, bound: float
) -> None:
    exact = gradients("cpu", torch.float64, "none", compiled=False)
    ours = gradients("cuda", dtype, recompute, compiled)
    assert max(relative(ours[name], exact[name]) for name in exact) < bound


def stepper_of(
    storage: Storage, *, dtype: str = "bfloat16", compiled: bool = True, shape: GPT2Shape = SHAPE
) -> Stepper:
    model = GPT2.initialised(shape, 3)
    model.recompute = "block"
    model.attention_kernel, _ = fastest_kernel(4, 4, 128, 64, torch_dtype(dtype), "cuda")
    if compiled:
        model.compile_parts()
    return Stepper(model, device="cuda", dtype=dtype, storage=storage, options=StepOptions(compiled=compiled))


def requested_bytes() -> int:
    """What tensors asked for: small ones may be given up to a megabyte more."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def losses_of(stepper: Stepper, steps: int) -> list[float]:
    x_BT, y_BT = (t.cuda() for t in batch(8))
    losses = []
    for step in range(steps):
        loss = 0.0
        for half in (slice(0, 4), slice(4, 8)):
            ids = torch.zeros(4, dtype=torch.int64, device="cuda")
            loss += stepper.backward(Micro(x_BT[half], y_BT[half], ids), 1024).item()
        stepper.update(StepRates(1e-3 * min(step + 1, 5) / 5))
        losses.append(loss)
    return losses


@pytest.mark.parametrize("offload", ["optimizer", "gradients"])
@pytest.mark.parametrize("low_bit", [False, True])
def test_offloading_changes_nothing(offload: str, low_bit: bool) -> None:
    kind = ("bf16", "int8") if low_bit else ("fp32", "fp32")
    resident = losses_of(stepper_of(Storage(*kind)), 12)
    offloaded = losses_of(stepper_of(Storage(*kind, offload)), 12)
    # Embedding gradients are summed in no fixed order, so not bit for bit.
    assert offloaded == pytest.approx(resident, abs=5e-3)
    assert resident[-1] < resident[0] - 1


@pytest.mark.parametrize(
    ("storage", "compiled"),
    [(Storage("bf16", "int8"), True), (Storage("bf16", "int8"), False), (Storage("bf16"), True),
     (Storage("fp32", "int8"), True)],
    ids=str,
)  # fmt: skip
def test_low_bit_follows_exact(storage: Storage, compiled: bool) -> None:
    exact = losses_of(stepper_of(Storage()), 25)
    ours = losses_of(stepper_of(storage, compiled=compiled), 25)
    assert ours[-1] == pytest.approx(exact[-1], abs=0.1)


def test_the_update_waits_for_accumulators_being_copied_back() -> None:
    """Nothing between the backward pass and the update reads a number, which would wait for everything."""
    shape = GPT2Shape(n_layer=6, n_head=8, n_embd=1024, vocab_size=1000, block_size=256, bias=False)
    tokens = torch.randint(0, 1000, (2, 257), device="cuda")
    ids = torch.zeros(2, dtype=torch.int64, device="cuda")
    micro = Micro(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), ids)
    weights = []
    for offload in ("none", "gradients"):
        model = GPT2.initialised(shape, 3)
        model.attention_kernel = "efficient"
        storage = Storage(offload=offload)
        stepper = Stepper(model, device="cuda", dtype="bfloat16", storage=storage)
        for _ in range(6):
            stepper.backward(micro, 512)
            stepper.update(StepRates(1e-3))
        weights.append({n: t.cpu().clone() for n, t in stepper.optimizer.export_weights().items()})
        del model, stepper
    for name, expected in weights[0].items():
        assert relative(weights[1][name], expected) < 2e-3, name


@pytest.mark.parametrize("storage", [
    Storage(), Storage("bf16", "int8"), Storage(offload="optimizer"), Storage("bf16", "int8", "gradients"),
], ids=str)  # fmt: skip
def test_the_update_allocates_nothing(storage: Storage) -> None:
    """Beyond scalars: whatever could run out of memory is taken before the first step."""
    stepper = stepper_of(storage)
    losses_of(stepper, 3)
    x_BT, y_BT = (t.cuda() for t in batch(4))
    stepper.backward(Micro(x_BT, y_BT, torch.zeros(4, dtype=torch.int64, device="cuda")), 512)
    optimizer, scale = stepper.optimizer, torch.ones((), device="cuda")
    optimizer.make_ready()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    optimizer.update(StepRates(1e-3), scale)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 64 * 1024
    assert torch.cuda.max_memory_reserved() == reserved


def test_memory_does_not_grow_from_step_to_step() -> None:
    stepper = stepper_of(Storage())
    losses_of(stepper, 3)
    held = torch.cuda.memory_allocated()
    losses_of(stepper, 5)
    assert torch.cuda.memory_allocated() == held


def test_offloaded_masters_are_not_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "PIECE", 2**16)  # small compared with this small model
    shape = replace(SHAPE, n_layer=6)
    parameters, layer = shape.parameters, 12 * shape.n_embd**2
    held = {}
    stepper_of(Storage(), compiled=False)  # trying out kernels may leave cuBLAS a workspace: not in the count
    for storage in (Storage(), Storage(offload="optimizer"), Storage(offload="gradients")):
        gc.collect()  # nothing that is older is to be given back meanwhile
        before = requested_bytes()
        stepper = stepper_of(storage, compiled=False, shape=shape)
        held[storage.offload] = requested_bytes() - before
        del stepper
    assert held["none"] == pytest.approx(18 * parameters, rel=0.02)
    # Three pieces of layers and of embeddings are streamed in addition.
    assert held["optimizer"] == pytest.approx(6 * parameters + 2 * 3 * 12 * 2**16, rel=0.05)
    # Accumulators of three of the six layers are on the card at a time; the update streams pieces of them.
    assert held["gradients"] == pytest.approx(held["optimizer"] - 3 * 4 * layer + 3 * 4 * 2**16, rel=0.02)


def test_large_host_buffers_are_pinned_exactly_and_given_back() -> None:
    for _ in range(3):  # the same addresses again and again
        buffers = [host_empty(20_000_001, torch.float32, "cuda") for _ in range(2)]
        assert all(buffer.is_pinned() for buffer in buffers)
        on_card = torch.arange(20_000_001, device="cuda", dtype=torch.float32)
        buffers[0].copy_(on_card, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffers[0], on_card.cpu())
        del buffers
    assert host_empty(100, torch.float32, "cuda").is_pinned()


def test_a_run_is_saved_and_goes_on_in_another_storage() -> None:
    exact, low_bit = stepper_of(Storage()), stepper_of(Storage("bf16", "int8", "optimizer"))
    losses_of(exact, 10)
    saved = exact.export()
    low_bit.optimizer.load_weights({n: t.cpu() for n, t in saved.weights.items()})
    low_bit.restore({n: t.cpu() for n, t in saved.optimizer.items()}, saved.scaler)
    assert losses_of(low_bit, 5)[-1] == pytest.approx(losses_of(exact, 5)[-1], abs=0.1)


def test_the_cap_holds() -> None:
    total = torch.cuda.mem_get_info()[1]
    try:
        allocator, (note,) = cap_memory("cuda", 2.0, None)
        assert allocator is not None
        assert 0 < allocator < 2 * 2**30
        assert "GiB of the card" in note
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")
        torch.empty(2**28, dtype=torch.uint8, device="cuda")
        with pytest.raises(UserError, match="leave nothing"):
            cap_memory("cuda", None, total / 2**30)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# --- nanochat's architecture of 2026
@pytest.mark.parametrize("kernel", WINDOWED_GPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("length", "window"), [(300, 0), (300, 1), (300, 31), (300, 64), (300, 128), (300, 298), (1024, 256)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_windows_of_every_kernel_are_those_in_the_open(
    kernel: str, dtype: torch.dtype, head_dim: int, length: int, window: int, compiled: bool
) -> None:
    if dtype == torch.float32 and kernel != "efficient":
        pytest.skip("a kernel of half precision")
    if compiled and (length, window) != (300, 128):
        pytest.skip("once is enough")
    forward, backward = (
        torch.compile(f, dynamic=False, fullgraph=True) if compiled else f for f in (attend, attend_backward)
    )
    packed = torch.randn(2, length, 3, 4, head_dim, device="cuda").to(dtype)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    dy = torch.randn_like(q)
    wide = [t.double() for t in (q, k, v)]
    expected, nothing = attend("open", *wide, window)
    expected_gradients = attend_backward("open", dy.double(), *wide, expected, nothing, window)
    y, lse = forward(kernel, q, k, v, window)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert relative(y, expected) < bound
    ours = backward(kernel, dy, q, k, v, y, lse, window)
    if window == 0:  # a single key takes all: queries and keys have no gradient but of rounding
        ours, expected_gradients = ours[2:], expected_gradients[2:]
    for gradient, exact in zip(ours, expected_gradients, strict=True):
        assert relative(gradient, exact) < bound


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_windows_have_a_kernel_whatever_is_fastest_without(dtype: torch.dtype, kernel: str) -> None:
    chosen = windowed_kernel("cudnn", 128, dtype, torch.device("cuda"))
    assert chosen == kernel or torch.cuda.get_device_capability() < (8, 0)
    assert windowed_kernel("cudnn", 6, torch.float64, torch.device("cuda")) == "open"
    assert windowed_kernel("open", 128, dtype, torch.device("cuda")) == "open"


WINDOWED = Nanochat2026Shape(n_layer=5, n_head=2, n_embd=256, vocab_size=1024, block_size=311)


def gradients_of_2026(
    device: str, dtype: torch.dtype, recompute: str, compiled: bool, kernel: str | None = None
) -> dict[str, Tensor]:
    """Weights are rounded to bf16 everywhere, so that what differs is the computation."""
    model = Nanochat2026.initialised(WINDOWED, 3)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():  # fresh ones have zeros, which hide most mistakes
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        if "lambda" in name:
            parameter.data.abs_().add_(0.5)
        parameter.data.copy_(parameter.bfloat16())
    wide = torch.promote_types(dtype, torch.float32)
    model.use_weights({n: p.to(device, dtype if p.dim() >= 2 else wide) for n, p in model.named_parameters()})
    model.recompute, model.loss_chunk = recompute, 500
    if device == "cuda":
        model.attention_kernel = kernel or fastest_kernel(4, 2, 311, 128, dtype, device)[0]
    if compiled:
        model.compile_parts()
    accumulators = {n: torch.zeros(p.shape, dtype=wide, device=device) for n, p in model.named_parameters()}
    model.use_accumulators(accumulators)
    tokens = torch.randint(0, 1024, (4, 312), generator=torch.Generator().manual_seed(3)).to(device)
    x_BT, y_BT = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for _ in range(2):  # accumulators go on from what they were
        model.loss_sum(x_BT, y_BT, scale=torch.tensor(1 / 2488, dtype=wide, device=device))
    return {name: accumulator.cpu() for name, accumulator in accumulators.items()}


@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
@pytest.mark.parametrize(
    ("dtype", "compiled", "kernel", "bound"),
    [(torch.float32, False, None, 5e-5), (torch.float32, True, "efficient", 5e-5),
     (torch.bfloat16, False, None, 0.05), (torch.bfloat16, True, None, 0.05),
     (torch.bfloat16, True, "cudnn", 0.05)],
)  # fmt: skip
def test_gradients_of_2026_are_the_cpus_in_float64(
    recompute: str, dtype: torch.dtype, compiled: bool, kernel: str | None, bound: float
) -> None:
    exact = gradients_of_2026("cpu", torch.float64, "none", compiled=False)
    ours = gradients_of_2026("cuda", dtype, recompute, compiled, kernel)
    for name, gradient in exact.items():
        # Single numbers' gradients are sums of thousands that cancel, and in bf16 little but rounding.
        if dtype == torch.float32 or "lambda" not in name:
            assert relative(ours[name], gradient) < bound, name


def test_2026_trains_compiled_with_offloaded_accumulators_as_without() -> None:
    losses = {}
    tokens = torch.randint(0, 1024, (4, 312), generator=torch.Generator().manual_seed(3)).cuda()
    micro = Micro(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.zeros(4, dtype=torch.int64).cuda()
    )
    for storage in (Storage(), Storage(offload="gradients"), Storage("bf16", "int8")):
        torch.compiler.reset()
        model = Nanochat2026.initialised(WINDOWED, 3)
        model.attention_kernel, _ = fastest_kernel(4, 2, 311, 128, torch.bfloat16, "cuda")
        model.recompute = "block"
        model.compile_parts()
        stepper = Stepper(
            model, device="cuda", dtype="bfloat16", storage=storage, options=StepOptions(compiled=True)
        )
        taken = []
        for _ in range(15):
            taken.append(stepper.backward(micro, 1244).item())
            stepper.update(StepRates(2e-3))
        losses[str(storage)] = taken
    resident, offloaded, low_bit = losses.values()
    assert offloaded == pytest.approx(resident, abs=2e-2)
    assert low_bit[-1] == pytest.approx(resident[-1], abs=0.2)
    assert resident[-1] < resident[0] - 0.5
