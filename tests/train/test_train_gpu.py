"""Training on a CUDA card: the same numbers as on the CPU, compiled or not, in every precision."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch
from conftest import MemoryTokens, learnable_tokens

from onecard.arch.shapes import GPT2Shape
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.data.batches import Sequences
from onecard.data.prefetch import Prefetcher
from onecard.errors import UserError
from onecard.hardware.machine import local_gpus, peak_flops, resolve_device
from onecard.model.attention import fastest_kernel
from onecard.model.dropout import keep_mask
from onecard.model.gpt2 import GPT2
from onecard.model.precision import torch_dtype
from onecard.optim.schedule import StepRates
from onecard.run.metrics import read_metrics
from onecard.run.stored import list_checkpoints
from onecard.train.loop import train
from onecard.train.memory import use_expandable_segments
from onecard.train.step import StepOptions, Stepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
SHAPE = GPT2Shape(n_layer=2, n_head=4, n_embd=128, vocab_size=64, block_size=64, bias=True)
use_expandable_segments()  # as the trainer does, before anything is allocated


@pytest.fixture
def full_fp32():  # type: ignore[no-untyped-def]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def losses_of(
    device: str,
    dtype: str,
    *,
    compiled: bool = False,
    dropout: float = 0.0,
    steps: int = 8,
    micro_batch: int = 6,
) -> list[float]:
    model = GPT2.initialised(SHAPE, 3)
    if compiled:
        model.compile_parts()
    model.attention_kernel, _ = fastest_kernel(6, 4, 64, 32, torch_dtype(dtype), device)
    stepper = Stepper(
        model, device=device, dtype=dtype, options=StepOptions(dropout=dropout, compiled=compiled)
    )
    sequences = Sequences(MemoryTokens(20_000), SHAPE.block_size, seed=7)
    losses = []
    with Prefetcher(
        sequences, sequences.start(), step_sequences=16, micro_batch=micro_batch, device=device
    ) as batches:
        for _ in range(steps):
            result = stepper.run(batches.next_step().micros, StepRates(1e-3))
            assert result is not None
            losses.append(result.loss.item())
    return losses


def test_the_card_is_found_and_known() -> None:
    assert resolve_device("auto") == "cuda"
    (first, *_) = local_gpus()
    assert first.total_bytes
    assert first.free_bytes
    with pytest.raises(UserError):
        resolve_device("cuda:63")
    peak = peak_flops("cuda", "bfloat16")
    assert peak is None or peak > 1e13


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fp32_losses_are_the_cpus(full_fp32: None, dropout: float) -> None:
    assert losses_of("cuda", "float32", dropout=dropout) == pytest.approx(
        losses_of("cpu", "float32", dropout=dropout), abs=2e-4
    )


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiling_changes_nothing_but_rounding(full_fp32: None, dropout: float) -> None:
    eager = losses_of("cuda", "float32", dropout=dropout)
    compiled = losses_of("cuda", "float32", dropout=dropout, compiled=True)
    assert compiled == pytest.approx(eager, abs=2e-4)


def test_the_split_into_micro_batches_does_not_show(full_fp32: None) -> None:
    whole = losses_of("cuda", "float32", dropout=0.2, micro_batch=16)
    for micro_batch in (8, 5, 1):
        assert losses_of("cuda", "float32", dropout=0.2, micro_batch=micro_batch) == pytest.approx(
            whole, abs=2e-4
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_half_precision_follows_fp32(dtype: str, compiled: bool) -> None:
    exact = losses_of("cuda", "float32", steps=30)
    half = losses_of("cuda", dtype, steps=30, compiled=compiled)
    # fp16 may skip its first steps while the loss scale settles.
    assert half[0] == pytest.approx(exact[0], abs=0.02)
    assert half[-1] == pytest.approx(exact[-1], abs=0.15)


def test_dropout_masks_are_the_cpus_and_compiled_ones_too() -> None:
    keys = torch.arange(6, dtype=torch.int32) * 345_678_901
    on_cpu = keep_mask(keys, (4, 999), 0.3, 5)
    assert torch.equal(keep_mask(keys.cuda(), (4, 999), 0.3, 5).cpu(), on_cpu)
    compiled = torch.compile(keep_mask, dynamic=False)
    assert torch.equal(compiled(keys.cuda(), (4, 999), 0.3, 5).cpu(), on_cpu)


def test_a_whole_compiled_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "text").mkdir(parents=True)
    for split in ("train", "val"):
        learnable_tokens(20_000, vocab=64).tofile(tmp_path / "data" / "text" / f"{split}.bin")
    common = [
        "--dataset=text", "--vocab_size=64", "--n_layer=2", "--n_head=4", "--n_embd=128", "--block_size=64",
        "--batch_size=6", "--gradient_accumulation_steps=3", "--learning_rate=3e-3", "--min_lr=3e-4",
        "--warmup_iters=3", "--lr_decay_iters=30", "--eval_interval=15", "--eval_iters=5", "--device=cuda",
    ]  # fmt: skip

    def run(*more: str) -> RunConfig:
        return load_config(RunConfig, [*common, *more])

    straight = train(run("--out_dir=straight", "--max_iters=30"))
    train(run("--out_dir=halves", "--max_iters=15"))
    resumed = train(run("--out_dir=halves", "--max_iters=30", "--init_from=resume"))
    assert resumed.values["step"] == 30
    assert resumed.values["val_loss"] == pytest.approx(straight.values["val_loss"], abs=0.02)
    assert straight.values["val_loss"] < straight.values["first_val_loss"] - 1
    lines = [x for x in read_metrics(Path("straight/metrics.jsonl")) if "loss" in x]
    assert all(x["memory_gib"] > 0 for x in lines)
    if peak_flops("cuda", "bfloat16"):
        assert all(0 < x["mfu"] < 1 for x in lines)
    assert [c.step for c in list_checkpoints(Path("halves/checkpoints"))] == [15, 30]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_replayed_micro_batches_are_the_launched_ones(
    compiled: bool, dropout: float, full_fp32: None
) -> None:
    """Ragged micro-batches, a release in between (an evaluation), and memory given back."""

    def losses(graphs: bool) -> list[float]:
        model = GPT2.initialised(SHAPE, 3)
        if compiled:
            model.compile_parts()
        stepper = Stepper(
            model,
            device="cuda",
            dtype="float32",
            options=StepOptions(dropout=dropout, compiled=compiled, graphs=graphs),
        )
        sequences = Sequences(MemoryTokens(20_000), SHAPE.block_size, seed=7)
        found = []
        with Prefetcher(
            sequences, sequences.start(), step_sequences=16, micro_batch=6, device="cuda"
        ) as batches:
            for step in range(8):
                result = stepper.run(batches.next_step().micros, StepRates(1e-3))
                assert result is not None
                found.append(result.loss.item())
                if graphs and step == 5:
                    assert stepper.replay is not None
                    assert stepper.replay.problem is None
                    held = stepper.replay.held_bytes  # of whole micro-batches and of a smaller last one
                    assert 0 < held < 2 * 256 * 2**20
                    reserved = torch.cuda.memory_reserved()
                    stepper.release()
                    assert torch.cuda.memory_reserved() < reserved
        return found

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


def recorded_stepper(room_mib: int) -> tuple[Stepper, Prefetcher]:
    """Steps of a small model under a cap that leaves so much beside what its plain passes take."""
    shape = GPT2Shape(n_layer=4, n_head=4, n_embd=256, vocab_size=8192, block_size=256, bias=False)
    stepper = Stepper(
        GPT2.initialised(shape, 3), device="cuda", dtype="bfloat16", options=StepOptions(graphs=True)
    )
    sequences = Sequences(MemoryTokens(20_000), shape.block_size, seed=7)
    batches = Prefetcher(sequences, sequences.start(), step_sequences=8, micro_batch=8, device="cuda")
    for _ in range(2):
        stepper.run(batches.next_step().micros, StepRates(1e-3))
    torch.cuda.synchronize()
    stepper.release()
    torch.cuda.empty_cache()
    most = torch.cuda.memory_reserved() + (room_mib << 20)
    torch.cuda.set_per_process_memory_fraction(most / torch.cuda.mem_get_info()[1])
    return stepper, batches


@pytest.mark.parametrize("room_mib", [*range(160, 640, 32), 2048])
def test_a_capture_that_runs_out_anywhere_goes_on_without(room_mib: int) -> None:
    """Before its piece, in the middle of it, or not at all; and memory can be given back afterwards."""
    try:
        stepper, batches = recorded_stepper(room_mib)
        with batches:
            for _ in range(4):
                try:
                    result = stepper.run(batches.next_step().micros, StepRates(1e-3))
                except torch.OutOfMemoryError:
                    assert room_mib < 640, "a plain pass does not fit either"
                    return
                assert result is not None and math.isfinite(result.loss.item())
                torch.cuda.empty_cache()
        assert stepper.replay is not None
        assert (stepper.replay.problem is None) == (stepper.replay.held_bytes > 0)
        assert room_mib < 2048 or stepper.replay.problem is None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()


def test_a_capture_may_be_dropped_without_a_word() -> None:
    """By an error, by another setting: its memory, with matmul workspaces amid it, is taken back."""
    try:
        stepper, batches = recorded_stepper(2048)
        standing = torch.cuda.memory_allocated()
        with batches:
            for _ in range(3):
                for _ in range(3):
                    assert stepper.run(batches.next_step().micros, StepRates(1e-3)) is not None
                assert stepper.replay is not None and stepper.replay.held_bytes
                torch.cuda.synchronize()
                stepper.replay = None
                gc.collect()
                torch.cuda.empty_cache()
                stepper.use_graphs(True)
                assert torch.cuda.memory_allocated() < standing + (16 << 20), "workspaces are 128"
                # Some pages of 20 MiB are used in part.
                assert torch.cuda.memory_reserved() < torch.cuda.memory_allocated() + (128 << 20)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_matmul_workspaces_are_taken_at_once() -> None:
    """Those of both threads: a product and its gradients afterwards keep nothing more."""
    from onecard.train.replay import free_workspaces, take_workspaces

    free_workspaces()
    before = torch.cuda.memory_allocated()
    take_workspaces("cuda")
    assert torch.cuda.memory_allocated() > before
    weight = torch.ones((512, 512), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    held = torch.cuda.memory_allocated()
    (weight @ weight).sum().backward()
    weight.grad = None
    assert torch.cuda.memory_allocated() == held


def test_how_busy_the_host_is() -> None:
    """A hundred tiny kernels are launch-bound, a few large ones are not."""
    from onecard.train.replay import launch_share

    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x + 1
        return x

    def large(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x @ x
        return x

    small, big = torch.ones(4, device="cuda"), torch.zeros(8192, 8192, device="cuda")
    for compute, inputs in ((many, small), (large, big)):
        compute(inputs)
    result, busy = launch_share(many, [small])
    assert result[0].item() == 301 and busy > 0.5
    assert launch_share(large, [big])[1] < 0.2


def test_a_capture_that_fails_leaves_the_card_usable() -> None:
    from onecard.train.replay import Replay

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().item())  # a value for the host: not to be recorded

    replay, x = Replay(reads), torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(5):
        assert replay(x).sum().item() == 16.0
    assert replay.problem is not None
    assert torch.cuda.current_stream() == stream
    big = torch.empty(2**28, device="cuda")
    del big
    torch.cuda.empty_cache()
    assert losses_of("cuda", "float32", steps=2)[-1] > 0


def test_a_dropped_capture_gives_all_its_memory_back() -> None:
    """Also what cuBLAS took to work in: a capture made again later must fit where the first one did."""
    from onecard.train.replay import Replay

    weights = [torch.randn(2048, 2048, device="cuda", requires_grad=True) for _ in range(4)]
    totals = [torch.zeros_like(weight) for weight in weights]

    def compute(x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for weight in weights:
            hidden = torch.relu(hidden @ weight)
        loss = hidden.square().mean()
        for total, gradient in zip(totals, torch.autograd.grad(loss, weights), strict=True):
            total += gradient
        return loss.detach()

    def held() -> int:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    x = torch.randn(4096, 2048, device="cuda")
    replay = Replay(compute)
    for _ in range(2):  # plain
        replay(x)
    before = held()
    found, most = [], 0
    try:
        for round_ in range(3):
            if round_ == 1:
                # Everything there was with the first capture, matmul workspaces of plain passes too, and
                # hardly more.
                total = torch.cuda.mem_get_info()[1]
                torch.cuda.set_per_process_memory_fraction((most + 2**22) / total)
            replay._passes.clear()
            for _ in range(4):
                replay(x)
                most = max(most, torch.cuda.memory_reserved())
            assert replay.problem is None, replay.problem
            found.append(replay.held_bytes)
            replay.release()
            assert held() <= before + 2**21
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert max(found) - min(found) <= 2**25
