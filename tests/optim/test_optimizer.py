"""Muon and AdamW side by side in one optimizer, in every storage."""

from __future__ import annotations

import pytest
import torch
from torch import Size, Tensor

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.model.registry import model_class
from onecard.optim.muon import orthogonalised
from onecard.optim.optimizer import Optimizer
from onecard.optim.recipe import rules_of
from onecard.optim.region_buffers import Storage
from onecard.optim.rules import AdamWRule, MuonRule, Rule
from onecard.optim.schedule import StepRates

SHAPES = {
    "transformer.wte.weight": (31, 16),
    "transformer.h.0.attn.c_attn.weight": (48, 16),
    "transformer.h.0.mlp.c_fc.weight": (24, 16),
    "transformer.h.1.attn.c_attn.weight": (48, 16),
    "transformer.h.1.mlp.c_fc.weight": (24, 16),
    "lm_head.weight": (31, 16),
    "scale": (16,),
}
LAYERS = {name for name in SHAPES if ".h." in name}
EVERY_STORAGE = [
    Storage(master, states, offload)
    for master in ("fp32", "bf16")
    for states in ("fp32", "bf16", "int8")
    for offload in ("none", "optimizer", "gradients")
]


def rules(refined: bool) -> object:
    def rule(name: str, shape: Size) -> Rule:
        if name in LAYERS:
            return MuonRule(0.1, 0.1, refined)
        return AdamWRule((0.8, 0.95), lr=0.1 if name == "lm_head.weight" else 0.2, epsilon=1e-10)

    return rule


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer_of(storage: Storage, refined: bool = False) -> Optimizer:
    return Optimizer(
        parameters(), layer_matrices=LAYERS, rules=rules(refined), device="cpu",  # type: ignore[arg-type]
        compute=torch.float32, storage=storage, seed=5,
    )  # fmt: skip


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def take_steps(optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        grads, hooks = gradients(step), optimizer.layer_accumulators
        for layer in (1, 0):
            if hooks is not None:
                hooks.begin(layer)
            for name in (n for n in SHAPES if f".h.{layer}." in n):
                optimizer.accumulators[name].add_(grads[name])
            if hooks is not None:
                hooks.end(layer)
        for name in SHAPES.keys() - LAYERS:
            optimizer.accumulators[name].add_(grads[name])
        optimizer.update(StepRates(0.5, momentum=0.9), torch.tensor(2.0))
        optimizer.clear()


def test_matrices_follow_muon_and_the_rest_adamw() -> None:
    optimizer = optimizer_of(Storage())
    take_steps(optimizer, 0, 3)
    ours, start = optimizer.export_weights(), parameters()
    for name, groups in (("lm_head.weight", 0.5 * 0.1), ("transformer.wte.weight", 0.5 * 0.2)):
        theirs = start[name].clone().requires_grad_()
        adamw = torch.optim.AdamW([theirs], lr=groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
        for step in range(3):
            theirs.grad = gradients(step)[name] / 2
            adamw.step()
        torch.testing.assert_close(ours[name], theirs.detach(), atol=1e-6, rtol=1e-5)
    name = "transformer.h.1.attn.c_attn.weight"
    weights, average = start[name].view(3, 16, 16).clone(), torch.zeros(3, 16, 16)
    for step in range(3):
        g = gradients(step)[name].view(3, 16, 16) / 2
        average = 0.9 * average + 0.1 * g
        update = orthogonalised(0.1 * g + 0.9 * average, "newton-schulz").float()
        weights = weights * (1 - 0.5 * 0.1 * 0.1) - 0.5 * 0.1 * update
    torch.testing.assert_close(ours[name], weights.view(48, 16), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("refined", [False, True])
@pytest.mark.parametrize("storage", EVERY_STORAGE, ids=str)
def test_it_continues_bit_for_bit(storage: Storage, refined: bool) -> None:
    straight, first, second = (optimizer_of(storage, refined) for _ in range(3))
    take_steps(straight, 0, 5)
    take_steps(first, 0, 3)
    second.load_weights({n: t.clone() for n, t in first.export_weights().items()})
    second.import_state({n: t.clone() for n, t in first.export_state().items()})
    take_steps(second, 3, 5)
    for name, tensor in straight.export_weights().items():
        assert torch.equal(second.export_weights()[name], tensor), name
    for name, tensor in straight.export_state().items():
        assert torch.equal(second.export_state()[name], tensor), name


@pytest.mark.parametrize("after", EVERY_STORAGE, ids=str)
def test_it_continues_in_any_other_storage(after: Storage) -> None:
    exact = optimizer_of(Storage(), refined=True)
    take_steps(exact, 0, 6)
    for before in EVERY_STORAGE:
        first, second = optimizer_of(before, refined=True), optimizer_of(after, refined=True)
        take_steps(first, 0, 3)
        second.load_weights(first.export_weights())
        second.import_state(first.export_state())
        take_steps(second, 3, 6)
        for name, weights in second.export_weights().items():
            moved = (exact.export_weights()[name] - parameters()[name]).norm()
            assert (weights.float() - exact.export_weights()[name]).norm() < 0.5 * moved, (before, name)


@pytest.mark.parametrize("generation", [2025, 2026])
def test_every_parameter_of_nanochat_has_its_rule(generation: int) -> None:
    config = load_config(RunConfig, [f"--generation={generation}", "--depth=12", "--total_batch_size=131072"])
    shape = config.shape(32768)
    with torch.device("meta"):
        model = model_class(shape)(shape)  # type: ignore[call-arg]
    rule = rules_of(config, shape)
    by_name = {name: rule(name, p.shape) for name, p in model.named_parameters()}
    muon = {n for n, r in by_name.items() if isinstance(r, MuonRule)}
    assert muon == {n for n in by_name if n.startswith("transformer.h.")}
    head, matrix = by_name["lm_head.weight"], by_name["transformer.h.3.mlp.c_fc.weight"]
    assert isinstance(head, AdamWRule) and isinstance(matrix, MuonRule)
    if generation == 2025:
        assert (head.lr, head.betas, head.weight_decay) == (0.004, (0.8, 0.95), 0.0)
        assert (matrix.lr, matrix.weight_decay, matrix.refined) == (0.02, 0.0, False)
        return
    # A quarter of the batch it is tuned for: half the rates, and half the decay.
    assert head.lr == pytest.approx(0.5 * 0.008)
    assert matrix == MuonRule(pytest.approx(0.5 * 0.02), pytest.approx(0.5 * 0.28), refined=True)
    assert by_name["smear_gate.weight"] == AdamWRule((0.8, 0.95), 0.0, 0.2, 1e-10)
    assert by_name["resid_lambdas"].weight_decay == 0.05
    assert by_name["value_embeds.1.weight"].lr == pytest.approx(0.5 * 0.5 * 0.3)


def test_firsts_begin_where_compiled_code_does_not_copy_them() -> None:
    """What does not begin at a multiple of 16 bytes is copied at every call."""
    firsts = [
        first for buffers in optimizer_of(Storage())._buffers for b in buffers.batches for first in b.firsts
    ]
    assert [first.item() for first in firsts] == [0, 1280, 768, 2048]
    assert all(first.data_ptr() % 16 == 0 for first in firsts)


def test_on_a_cpu_too_an_update_that_would_run_out_of_memory_fails_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer, asked = optimizer_of(Storage("bf16", "int8")), list[int]()
    plain = torch.empty

    def empty(size: int, **named: object) -> Tensor:
        asked.append(size)
        return plain(size, **named)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", empty)
    optimizer.make_ready()
    assert asked == [optimizer.temporaries.on_cpu]
