from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onecard.errors import UserError
from onecard.optim import offload, regions
from onecard.optim.moments import read_moment
from onecard.optim.optimizer import Optimizer
from onecard.optim.region_buffers import Storage
from onecard.optim.regions import ALIGN, split_regions
from onecard.optim.rules import adamw_for_all
from onecard.optim.schedule import StepRates

SHAPES = {
    "wte.weight": (31, 16),
    "h.0.a.weight": (48, 16),
    "h.0.a.bias": (48,),
    "h.0.b.weight": (16, 48),
    "h.1.a.weight": (48, 16),
    "h.1.a.bias": (48,),
    "h.1.b.weight": (16, 48),
    "ln.weight": (16,),
}
LAYERS = {name for name in SHAPES if name.startswith("h.") and name.endswith("weight")}
EVERY_STORAGE = [
    Storage(master, states, place)
    for master in ("fp32", "bf16")
    for states in ("fp32", "int8")
    for place in ("none", "optimizer", "gradients")
]
RULES = adamw_for_all((0.9, 0.95), 0.1)
EXACT = [s for s in EVERY_STORAGE if not s.low_bit]


def parameters(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer_of(storage: Storage, compute: torch.dtype = torch.float32) -> Optimizer:
    return Optimizer(
        parameters(), layer_matrices=LAYERS, device="cpu", compute=compute, storage=storage,
        rules=RULES, seed=5,
    )  # fmt: skip


def add_gradients(optimizer: Optimizer, step: int, micro: int = 0) -> dict[str, Tensor]:
    """One micro-batch's, put where the backward pass would put them, layer after layer from the last."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    grads = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    hooks = optimizer.layer_accumulators
    for layer in (1, 0):
        if hooks is not None:
            hooks.begin(layer)
        for name in SHAPES:
            if name.startswith(f"h.{layer}."):
                optimizer.accumulators[name].add_(grads[name])
        if hooks is not None:
            hooks.end(layer)
    for name in ("wte.weight", "ln.weight"):
        optimizer.accumulators[name].add_(grads[name])
    return grads


def take_steps(optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for micro in range(2):
            add_gradients(optimizer, step, micro)
        optimizer.update(StepRates(1e-2), torch.tensor(2.0))
        optimizer.clear()


def torchs_weights(steps: int) -> dict[str, Tensor]:
    theirs = {name: p.clone().requires_grad_() for name, p in parameters().items()}
    groups = [
        {"params": [p for p in theirs.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(steps):
        for name, p in theirs.items():
            p.grad = torch.zeros_like(p)
            for micro in range(2):
                generator = torch.Generator().manual_seed(1000 * step + micro)
                grads = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
                p.grad += grads[name] / 2
        adamw.step()
    return {name: p.detach() for name, p in theirs.items()}


def test_every_parameter_has_a_place_of_its_own() -> None:
    found = split_regions(
        {n: torch.Size(s) for n, s in SHAPES.items()}, LAYERS, adamw_for_all((0.9, 0.95), 0.1)
    )
    assert {r.kind: {s.name for s in r.slots} for r in found} == {
        "layers": LAYERS,
        "embeddings": {"wte.weight"},
        "vectors": {"h.0.a.bias", "h.1.a.bias", "ln.weight"},
    }
    for region in found:
        flat = torch.zeros(region.size)
        for number, view in enumerate(region.views(flat).values(), 1):
            assert not view.any()
            view.fill_(number)
        assert all(slot.first % ALIGN == 0 for slot in region.slots)
        assert int((flat != 0).sum()) == sum(slot.count for slot in region.slots)


@pytest.mark.parametrize("storage", EXACT, ids=str)
def test_exact_storages_are_torchs_adamw(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "PIECE", 512)  # several pieces, a ragged last one
    optimizer = optimizer_of(storage)
    take_steps(optimizer, 0, 5)
    for name, expected in torchs_weights(5).items():
        torch.testing.assert_close(optimizer.export_weights()[name], expected, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(optimizer.working[name], expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("storage", [s for s in EVERY_STORAGE if s.low_bit], ids=str)
def test_low_bit_storages_stay_near_it(storage: Storage) -> None:
    optimizer = optimizer_of(storage)
    take_steps(optimizer, 0, 5)
    expected, before = torchs_weights(5), parameters()
    for name, weights in optimizer.export_weights().items():
        moved = (expected[name] - before[name]).norm()
        assert (weights.float() - expected[name]).norm() < 0.5 * moved, name
        if expected[name].dim() < 2:  # norms and biases are never low-bit
            torch.testing.assert_close(weights, expected[name], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_where_it_lives_changes_nothing(master: str, states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "PIECE", 512)
    exported = []
    for place in ("none", "optimizer", "gradients"):
        optimizer = optimizer_of(Storage(master, states, place))
        take_steps(optimizer, 0, 4)
        exported.append({**optimizer.export_weights(), **optimizer.export_state()})
    if master == "bf16":
        # Offloaded accumulators are fp32, those on the card bf16.
        offloaded = exported.pop()
        assert all(torch.allclose(offloaded[n].float(), t.float(), atol=0.05) for n, t in exported[0].items()
                   if t.dtype == torch.bfloat16)  # fmt: skip
    for other in exported[1:]:
        assert other.keys() == exported[0].keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in exported[0].items())


@pytest.mark.parametrize("storage", EVERY_STORAGE, ids=str)
def test_continued_with_the_same_storage_it_goes_on_bit_for_bit(storage: Storage) -> None:
    straight, first, second = (optimizer_of(storage) for _ in range(3))
    take_steps(straight, 0, 6)
    take_steps(first, 0, 3)
    second.load_weights({n: t.clone() for n, t in first.export_weights().items()})
    second.import_state({n: t.clone() for n, t in first.export_state().items()})
    take_steps(second, 3, 6)
    for name, tensor in straight.export_weights().items():
        assert torch.equal(second.export_weights()[name], tensor), name
    for name, tensor in straight.export_state().items():
        assert torch.equal(second.export_state()[name], tensor), name


@pytest.mark.parametrize("after", EVERY_STORAGE, ids=str)
@pytest.mark.parametrize("before", [Storage(), Storage("bf16", "int8")], ids=str)
def test_any_storage_continues_any_other(before: Storage, after: Storage) -> None:
    saved, other = optimizer_of(before), optimizer_of(after)
    take_steps(saved, 0, 4)
    other.load_weights(saved.export_weights())
    other.import_state(saved.export_state())
    assert other.steps == 4
    for name in SHAPES:
        for moment in ("exp_avg", "exp_avg_sq"):
            ours = read_moment(name, moment, other.export_state())
            theirs = read_moment(name, moment, saved.export_state())
            assert (ours - theirs).norm() <= 0.05 * theirs.norm(), (name, moment)
    take_steps(other, 4, 6)
    assert all(t.isfinite().all() for t in other.export_weights().values())


def test_nothing_is_saved_before_the_first_step_and_nothing_restored() -> None:
    optimizer = optimizer_of(Storage())
    assert optimizer.export_state() == {}
    optimizer.import_state({})
    assert optimizer.steps == 0


def test_importing_copies_so_that_the_file_and_the_optimizer_do_not_share_memory() -> None:
    saved, other = optimizer_of(Storage()), optimizer_of(Storage())
    take_steps(saved, 0, 2)
    state = {n: t.clone() for n, t in saved.export_state().items()}
    before = {n: t.clone() for n, t in state.items()}
    other.import_state(state)
    take_steps(other, 2, 3)
    assert all(torch.equal(state[n], before[n]) for n in state)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 3), None])
def test_moments_of_another_model_are_refused_by_name(wrong: Tensor | None) -> None:
    saved = optimizer_of(Storage())
    take_steps(saved, 0, 1)
    state = saved.export_state()
    if wrong is None:
        del state["exp_avg.wte.weight"]
    else:
        state["exp_avg.wte.weight"] = wrong
    with pytest.raises(UserError, match=r"exp_avg of wte\.weight"):
        optimizer_of(Storage()).import_state(state)


@pytest.mark.parametrize("storage", EVERY_STORAGE, ids=str)
def test_the_norm_is_that_of_all_gradients(storage: Storage) -> None:
    optimizer = optimizer_of(storage)
    grads = add_gradients(optimizer, 0)
    expected = torch.stack([g.norm() for g in grads.values()]).norm().item()
    assert optimizer.norm().item() == pytest.approx(expected, rel=2e-3 if storage.low_bit else 1e-6)
    optimizer.clear()
    assert optimizer.norm().item() == 0


def test_cleared_accumulators_begin_at_zero_wherever_they_are() -> None:
    for place in ("none", "gradients"):
        optimizer = optimizer_of(Storage(offload=place))
        add_gradients(optimizer, 0)
        optimizer.clear()
        grads = add_gradients(optimizer, 1)
        assert optimizer.norm().item() == pytest.approx(
            torch.stack([g.norm() for g in grads.values()]).norm().item(), rel=1e-6
        )


def test_host_memory_is_counted_and_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = optimizer_of(Storage(offload="gradients"))
    matrices = sum(r.size for r in split_regions({n: torch.Size(s) for n, s in SHAPES.items()}, LAYERS, RULES)
                   if not r.is_vectors)  # fmt: skip
    layers = 4 * 48 * 16
    assert optimizer.host_bytes == 12 * matrices + 4 * layers
    monkeypatch.setattr(offload, "available_memory", lambda: 10_000)
    with pytest.raises(UserError, match="do not fit into this machine's memory") as refused:
        optimizer_of(Storage(offload="optimizer"))
    assert "--offload=none" in str(refused.value)
    optimizer_of(Storage())  # nothing is in host memory


@pytest.mark.parametrize("place", ["none", "optimizer"])
def test_working_copies_follow_their_masters(place: str) -> None:
    optimizer = optimizer_of(Storage(offload=place), torch.bfloat16)
    take_steps(optimizer, 0, 3)
    for name, master in optimizer.export_weights().items():
        working = optimizer.working[name]
        assert master.dtype == torch.float32
        assert working.dtype == (torch.bfloat16 if master.dim() == 2 else torch.float32)
        assert torch.equal(working, master.to(working.dtype))


def test_the_norm_of_many_gradients_loses_no_digits_on_a_cpu() -> None:
    """Added one after the other in fp32, twenty million equal squares come out a thousandth too small."""
    optimizer = Optimizer(
        {"wte.weight": torch.zeros(20_000, 1000)}, layer_matrices=(), device="cpu", compute=torch.float32,
        storage=Storage(), rules=adamw_for_all((0.9, 0.95), 0.0),
    )  # fmt: skip
    optimizer.accumulators["wte.weight"].fill_(1e-3)
    assert optimizer.norm().item() == pytest.approx(1e-3 * 20e6**0.5, rel=1e-5)
