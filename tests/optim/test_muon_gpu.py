"""Muon on a CUDA card: the CPU's steps, compiled or not, wherever masters and accumulators live."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Size, Tensor

from onecard.model.compiling import graphs_compiled
from onecard.optim.lowbit import BLOCK, Int8State
from onecard.optim.muon import Matrix, Momentum, Muon, MuonHyper, Piece
from onecard.optim.optimizer import Optimizer
from onecard.optim.region_buffers import Storage
from onecard.optim.rules import AdamWRule, MuonRule, Rule, adamw_for_all
from onecard.optim.schedule import StepRates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
SHAPES = {
    "transformer.wte.weight": (260, 128),  # not a whole number of any pieces: the last one is small
    **{
        f"transformer.h.{layer}.{name}.weight": shape
        for layer in range(5)
        for name, shape in {
            "attn.c_attn": (384, 128),
            "mlp.c_fc": (512, 128),
            "mlp.c_proj": (128, 512),
        }.items()
    },
    "scale": (128,),
}
LAYERS = {name for name in SHAPES if ".h." in name}


@pytest.fixture(autouse=True)
def compile_afresh() -> Iterator[None]:
    torch.compiler.reset()  # more settings here than one run ever has
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # a run before in this process may have asked for less
    yield
    torch.set_float32_matmul_precision(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rules(name: str, shape: Size) -> Rule:
    return MuonRule(0.05, 0.1, refined=True) if name in LAYERS else AdamWRule((0.8, 0.95), lr=0.05)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("momentum", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("refined", [False, True])
def test_a_step_is_the_cpus(compiled: bool, momentum: str, refined: bool) -> None:
    matrix = Matrix(3, 64, 192)
    results = []
    for device, work in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        muon = Muon([(matrix, 1)], device, work, refined=refined, compiled=compiled and device == "cuda")
        master = random(matrix.elements).to(device)
        state: Momentum = torch.zeros(matrix.elements, device=device)
        if momentum == "bf16":
            state = state.bfloat16()
        elif momentum == "int8":
            blocks = matrix.elements // BLOCK
            state = Int8State(state.to(torch.int8), torch.zeros(blocks, device=device))
        variance = torch.zeros(matrix.variances(), device=device)
        hyper = MuonHyper(*(torch.tensor(v, device=device) for v in (1.0, 0.1, 0.05, 0.9)))
        for step in range(3):
            grad = random(matrix.elements, seed=step + 1).to(device)
            key = torch.tensor(step, dtype=torch.int32, device=device)
            piece = Piece(grad, master, state, torch.tensor(0, device=device))
            muon.step(matrix, [piece], variance if refined else None, hyper, key)
        results.append(master.cpu() - random(matrix.elements))
    # What bf16 alone costs, seen on the CPU: 0.7% with Newton-Schulz; 3.0% refined, whose first polynomial
    # is steeper and whose rows are scaled afterwards.
    assert (results[1] - results[0]).norm() < (0.05 if refined else 0.015) * results[0].norm()


def updated(storage: Storage, device: str, compiled: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after four steps of two micro-batches, and the most that an update allocated."""
    parameters = {name: random(*shape, seed=len(name)) for name, shape in SHAPES.items()}
    optimizer = Optimizer(
        parameters, layer_matrices=LAYERS, rules=rules, device=device, compute=torch.float32, storage=storage,
        seed=5, compiled=compiled,
    )  # fmt: skip
    hooks, most = optimizer.layer_accumulators, 0
    for step in range(4):
        for micro in range(2):
            for layer in reversed(range(5)):
                if hooks is not None:
                    hooks.begin(layer)
                for name in (n for n in SHAPES if f".h.{layer}." in n):
                    grad = random(*SHAPES[name], seed=100 * step + 10 * micro + layer)
                    optimizer.accumulators[name].add_(grad.to(device))
                if hooks is not None:
                    hooks.end(layer)
        optimizer.accumulators["scale"].add_(1.0)
        if device == "cuda" and step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        optimizer.update(StepRates(1.0, momentum=0.9), torch.tensor(2.0, device=device))
        if device == "cuda" and step == 3:
            torch.cuda.synchronize()
            most = torch.cuda.max_memory_allocated() - before
        optimizer.clear()
    return {n: t.float().cpu().clone() for n, t in optimizer.export_weights().items()}, most


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("offload", ["none", "optimizer", "gradients"])
def test_offloading_changes_nothing_of_muon(offload: str, compiled: bool) -> None:
    on_cpu, _ = updated(Storage(), "cpu", compiled=False)
    on_card, allocated = updated(Storage(offload=offload), "cuda", compiled)
    for name, weights in on_cpu.items():
        moved = (weights - random(*SHAPES[name], seed=len(name))).norm()
        assert (on_card[name] - weights).norm() <= 2e-3 * moved + 1e-6, name
    if compiled:
        # A few numbers per row: no matrix.
        assert allocated < 4 * 128 * 512, allocated


@pytest.mark.parametrize("offload", ["none", "gradients"])
def test_low_bits_follow(offload: str) -> None:
    exact, _ = updated(Storage(), "cpu", compiled=False)
    low, _ = updated(Storage("bf16", "int8", offload), "cuda", compiled=True)
    for name in LAYERS:
        moved = (exact[name] - random(*SHAPES[name], seed=len(name))).norm()
        assert (low[name] - exact[name]).norm() < 0.3 * moved, name


WIDE = {name: tuple(8 * side for side in shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize(
    "storage",
    [Storage(), Storage("fp32", "int8"), Storage("bf16", "int8"), Storage("bf16", "int8", "optimizer"),
     Storage(offload="gradients")],
    ids=str,
)  # fmt: skip
def test_the_first_update_asks_the_driver_for_nothing(storage: Storage, muon: bool, compiled: bool) -> None:
    """All kernels are there, and the memory it takes in passing: from the first one on it cannot run out."""
    parameters = {name: random(*shape, seed=len(name)) for name, shape in WIDE.items()}
    optimizer = Optimizer(
        parameters, layer_matrices=LAYERS, rules=rules if muon else adamw_for_all((0.9, 0.95), 0.1),
        device="cuda", compute=torch.bfloat16, storage=storage, seed=5, compiled=compiled,
    )  # fmt: skip
    optimizer.warm_up()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    hooks = optimizer.layer_accumulators
    for layer in reversed(range(5)):
        if hooks is not None:
            hooks.begin(layer)
        for name in (n for n in WIDE if f".h.{layer}." in n):
            optimizer.accumulators[name].add_(1e-3)
        if hooks is not None:
            hooks.end(layer)
    scale = torch.tensor(2.0, device="cuda")
    optimizer.make_ready()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    graphs = graphs_compiled()
    optimizer.update(StepRates(1.0, momentum=0.9), scale)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    taken = after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"]
    assert graphs_compiled() == graphs
    assert after["reserved_bytes.all.peak"] == before["reserved_bytes.all.current"]
    assert taken <= optimizer.temporaries.on_card
