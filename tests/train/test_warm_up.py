"""Kernels compiled and tried out before the first micro-batch: all of them, and nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import MemoryTokens
from torch import Size, Tensor

from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape
from onecard.data.batches import Sequences
from onecard.data.prefetch import Prefetcher
from onecard.model.compiling import graphs_compiled
from onecard.model.registry import model_class
from onecard.optim import regions as regions_module
from onecard.optim.optimizer import Optimizer
from onecard.optim.region_buffers import Storage
from onecard.optim.rules import AdamWRule, MuonRule, Rule, Rules, adamw_for_all
from onecard.optim.schedule import StepRates
from onecard.train import step as step_module
from onecard.train.replay import Replay
from onecard.train.step import StepOptions, Stepper

SHAPES = {
    "gpt2": GPT2Shape(n_layer=3, n_head=2, n_embd=32, vocab_size=64, block_size=16, bias=True),
    "2025": NanochatShape(n_layer=3, n_head=2, n_embd=32, vocab_size=64, block_size=16),
    # With and without a value embedding.
    "2026": Nanochat2026Shape(6, 2, 32, 64, 16, window_pattern="SSL"),
    # Its middle layer is its last.
    "2026 of two": Nanochat2026Shape(2, 2, 32, 64, 16),
}


def by_muon(refined: bool) -> Rules:
    """Matrices of layers, embeddings apart."""

    def rule(name: str, shape: Size) -> Rule:
        matrix = len(shape) == 2 and ".h." in name
        return MuonRule(0.1, 0.1, refined) if matrix else AdamWRule((0.8, 0.95), lr=0.1)

    return rule


def stepper_of(
    family: str,
    recompute: str = "none",
    dropout: float = 0.0,
    rules: Rules = adamw_for_all((0.9, 0.95), 0.1),  # noqa: B008 - a constant
    compiled: bool = False,
    **storage: Any,
) -> Stepper:
    shape = SHAPES[family]
    model = model_class(shape).initialised(shape, 3)
    model.recompute = recompute
    model.compile_parts(backend="eager")
    return Stepper(
        model,
        device="cpu",
        dtype="float32",
        rules=rules,
        storage=Storage(**storage),
        options=StepOptions(dropout=dropout, seed=5, compiled=compiled),
    )


def weights_after(stepper: Stepper, steps: int = 3, step_sequences: int = 8) -> dict[str, Tensor]:
    sequences = Sequences(MemoryTokens(3000), stepper.model.shape.block_size, seed=7)
    with Prefetcher(sequences, sequences.start(), step_sequences=step_sequences, micro_batch=4) as batches:
        for _ in range(steps):
            assert stepper.run(batches.next_step().micros, StepRates(1e-2)) is not None
    return {name: tensor.clone() for name, tensor in stepper.optimizer.export_weights().items()}


def settings_and_steps() -> Iterator[Any]:
    """Steps whose last micro-batch is one, as the others, the only one. All of the first settings; the others
    with the hardest of them, and the rest in the long tests.
    """
    settings: list[tuple[str, dict[str, Any]]] = [
        ("gpt2", {}), ("2026", {"recompute": "block", "offload": "gradients"}),
        ("gpt2", {"dropout": 0.2, "recompute": "mlp"}), ("gpt2", {"offload": "gradients"}),
        ("gpt2", {"master_weights": "bf16", "optim_states": "int8"}), ("2025", {"recompute": "block"}),
        ("2026", {}), ("2026 of two", {}),
    ]  # fmt: skip
    for number, (family, more) in enumerate(settings):
        for step_sequences in (9, 8, 1):
            marks = [pytest.mark.long] if number > 1 and step_sequences < 9 else []
            yield pytest.param(family, more, step_sequences, marks=marks)


@pytest.mark.parametrize(("family", "more", "step_sequences"), settings_and_steps())
def test_everything_is_compiled_in_it_and_nothing_is_learnt(
    family: str, more: dict[str, Any], step_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    plain, counts = Stepper._warm_up, list[int]()

    def rehearse(stepper: Stepper, *sizes: int) -> None:
        counts.append(graphs_compiled())
        plain(stepper, *sizes)
        counts.append(graphs_compiled())

    monkeypatch.setattr(Stepper, "_warm_up", rehearse)
    found = weights_after(stepper_of(family, **more), step_sequences=step_sequences)
    before, after = counts
    assert after > before
    assert graphs_compiled() == after, "a real micro-batch finds all kernels there"
    monkeypatch.setattr(Stepper, "_warm_up", lambda stepper, *sizes: None)
    without = weights_after(stepper_of(family, **more), step_sequences=step_sequences)
    for name, tensor in without.items():
        assert torch.equal(tensor, found[name]), name


def test_one_layer_of_each_kind() -> None:
    windows = Nanochat2026Shape(8, 2, 32, 64, 1024, window_pattern="SSSL")
    for shape, kinds in ((SHAPES["gpt2"], 1), (SHAPES["2025"], 1), (SHAPES["2026"], 2), (windows, 3)):
        model = model_class(shape).initialised(shape, 3)
        specs = model.layer_specs()
        assert {specs[number] for number in model.one_of_each_kind()} == set(specs)
        assert len(model.one_of_each_kind()) == shape.layer_kinds == kinds


def test_once_for_every_setting_and_not_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    plain = Stepper._loss_of

    def loss_of(stepper: Stepper, *inputs: Tensor, layers: Any = "all") -> Tensor:
        seen.append(layers)
        return plain(stepper, *inputs, layers=None if layers == "all" else layers)

    monkeypatch.setattr(Stepper, "_loss_of", loss_of)
    stepper = stepper_of("gpt2")
    weights_after(stepper)
    assert seen == [[0], *["all"] * 6]
    stepper.release()
    weights_after(stepper, 1)
    assert seen[7:] == ["all"] * 2
    stepper.use_graphs(False)
    weights_after(stepper, 1)
    assert seen[9:] == [[0], "all", "all"]
    stepper.model.compiled = False
    stepper.use_graphs(False)
    weights_after(stepper, 1)
    assert seen[12:] == ["all"] * 2


def test_running_out_in_it_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = stepper_of("2026", offload="gradients")
    expected = weights_after(stepper_of("2026", offload="gradients"), 1)
    plain, failed = stepper.model._begin_backward, list[int]()

    def backward(*arguments: Any) -> None:
        plain(*arguments)
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(stepper.model, "_begin_backward", backward)
    with pytest.raises(torch.OutOfMemoryError):
        weights_after(stepper, 1)
    for name, tensor in weights_after(stepper, 1).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_micro_batch_has_its_room_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a cap: what stays on the card (matmul workspaces) is there before the room is taken, and what the
    warm_up left has gone; once for every setting, and again when all was given back."""
    happened: list[str] = []
    plain_warm_up, plain_loss = Stepper._warm_up, Stepper._loss_of

    def rehearse(stepper: Stepper, sequences: int) -> None:
        happened.append("warm_up")
        plain_warm_up(stepper, sequences)

    def loss_of(stepper: Stepper, *inputs: Tensor, layers: Any = None) -> Tensor:
        if layers is None:
            happened.append("micro-batch")
        return plain_loss(stepper, *inputs, layers=layers)

    def empty(room: int, *, dtype: torch.dtype, device: str) -> None:
        assert dtype == torch.uint8 and room > 0
        happened.append("room")

    monkeypatch.setattr(Stepper, "_warm_up", rehearse)
    monkeypatch.setattr(Stepper, "_loss_of", loss_of)
    monkeypatch.setattr(step_module, "is_capped", lambda device: True)
    monkeypatch.setattr(step_module, "give_back", lambda: happened.append("given back"))
    monkeypatch.setattr(step_module, "take_workspaces", lambda device: happened.append("workspaces"))
    stepper = stepper_of("gpt2")
    with monkeypatch.context() as patched:
        patched.setattr(step_module, "torch", SimpleNamespace(**vars(torch) | {"empty": empty}))
        weights_after(stepper, steps=2)
        assert happened == ["warm_up", "given back", "workspaces", "room", *4 * ["micro-batch"]]
        happened.clear()
        stepper.release()
        weights_after(stepper, steps=1)
        assert happened == ["workspaces", "room", *2 * ["micro-batch"]]


UPDATES: dict[str, tuple[str, Rules, dict[str, Any]]] = {
    "muon": ("2025", by_muon(refined=False), {}),
    "refined": ("2026", by_muon(refined=True), {}),
    "muon from the host": ("2026", by_muon(refined=True), {"offload": "optimizer"}),
    "muon in few bits": ("2025", by_muon(refined=False), {"master_weights": "bf16", "optim_states": "int8"}),
    "adamw in few bits": ("gpt2", adamw_for_all((0.9, 0.95), 0.1), {"optim_states": "int8"}),
    "and from the host": (
        "gpt2", adamw_for_all((0.9, 0.95), 0.1),
        {"master_weights": "bf16", "optim_states": "int8", "offload": "gradients"},
    ),
}  # fmt: skip


_FEW = ("refined", "muon from the host", "and from the host")  # together all that the others have


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in _FEW else [pytest.mark.long]) for kind in UPDATES]
)
def test_so_are_the_kernels_of_the_update(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled before the first one begins, on zeros of their own: weights and moments are the same bits."""
    family, rules, storage = UPDATES[kind]
    plain_compile, plain_update = torch.compile, Optimizer.update
    monkeypatch.setattr(torch, "compile", partial(plain_compile, backend="eager"))
    monkeypatch.setattr(regions_module, "PIECE", 2048)
    compiled: list[int] = []

    def update(optimizer: Optimizer, *arguments: Any) -> None:
        before = graphs_compiled()
        plain_update(optimizer, *arguments)
        compiled.append(graphs_compiled() - before)

    monkeypatch.setattr(Optimizer, "update", update)

    def run() -> dict[str, Tensor]:
        torch._dynamo.reset()
        compiled.clear()
        stepper = stepper_of(family, rules=rules, compiled=True, **storage)
        weights = weights_after(stepper)
        return weights | {f"state {n}": t.clone() for n, t in stepper.optimizer.export_state().items()}

    found = run()
    assert compiled == [0, 0, 0]
    monkeypatch.setattr(Optimizer, "warm_up", lambda optimizer: None)
    without = run()
    assert compiled[0] > 0, "there was something to compile"
    assert found.keys() == without.keys()
    for name, tensor in without.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("kind", ["refined", "and from the host"])
def test_an_update_that_would_run_out_does_so_before_it_begins(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, rules, storage = UPDATES[kind]
    plain, failed = Optimizer.make_ready, list[int]()

    def make_ready(optimizer: Optimizer) -> None:
        if optimizer.steps == 1 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(optimizer)

    expected = weights_after(stepper_of(family, rules=rules, **storage), steps=2)
    monkeypatch.setattr(Optimizer, "make_ready", make_ready)
    stepper = stepper_of(family, rules=rules, **storage)
    sequences = Sequences(MemoryTokens(3000), stepper.model.shape.block_size, seed=7)
    position = sequences.start()
    for _ in range(3):
        with Prefetcher(sequences, position, step_sequences=8, micro_batch=4) as batches:
            micros, after = batches.next_step()
            try:
                stepper.run(micros, StepRates(1e-2))
                position = after
            except torch.OutOfMemoryError:
                assert not stepper.updating, "the same step can be done again"
    assert failed
    for name, tensor in stepper.optimizer.export_weights().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_step_done_again_counts_once_for_the_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16's scale doubles after 2,000 good steps: one that ran out at its update's entry is not one yet."""
    stepper = stepper_of("2025", rules=by_muon(refined=False))
    stepper.loss_scale.enabled, stepper.loss_scale.value, stepper.loss_scale._good_steps = True, 4.0, 1999
    plain, failed = Optimizer.make_ready, list[int]()

    def make_ready(optimizer: Optimizer) -> None:
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(optimizer)

    monkeypatch.setattr(Optimizer, "make_ready", make_ready)
    with pytest.raises(torch.OutOfMemoryError):
        weights_after(stepper, 1)
    assert (stepper.loss_scale.value, stepper.loss_scale._good_steps) == (4.0, 1999)
    weights_after(stepper, 1)
    assert (stepper.loss_scale.value, stepper.loss_scale._good_steps) == (8.0, 0)


def test_a_capture_gives_way_to_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its memory while an update needs some: where both do not fit, nothing is recorded any more."""
    stepper = stepper_of("2025", rules=by_muon(refined=False))
    expected = weights_after(stepper_of("2025", rules=by_muon(refined=False)), 3)

    class Recorded:
        held_bytes = 2**30

        def replay(self, inputs: Any) -> Tensor:
            return stepper._loss_of(*inputs)

    plain = Optimizer.make_ready

    def make_ready(optimizer: Optimizer) -> None:
        if stepper.replay is not None and stepper.replay.held_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB")
        plain(optimizer)

    monkeypatch.setattr(Optimizer, "make_ready", make_ready)
    stepper.replay = Replay(stepper._loss_of, lambda *_: Recorded())
    found = weights_after(stepper, 3)
    assert stepper.replay is not None and stepper.replay.held_bytes == 0 and stepper.replay.ran_out
    assert "96.00 MiB" in stepper.notes()[0]
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_one_block_at_the_end_is_compiled_before_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the compiler one is not any number."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    wide = torch.randn(9, 256)
    monkeypatch.setattr(regions_module, "PIECE", 2048)
    optimizer = Optimizer(
        {"transformer.h.0.a.weight": wide}, layer_matrices={"transformer.h.0.a.weight"},
        rules=adamw_for_all((0.9, 0.95), 0.1), device="cpu", compute=torch.float32,
        storage=Storage("fp32", "int8", "optimizer"), compiled=True,
    )  # fmt: skip
    assert [count for _, count in optimizer._spans_of(optimizer._buffers[0])] == [2048, 256]
    optimizer.warm_up()
    before = graphs_compiled()
    optimizer.update(StepRates(1e-2), torch.ones(()))
    assert graphs_compiled() == before


def test_a_model_that_could_not_be_put_on_the_card_still_has_its_own_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever tries a smaller setting makes masters of them: of working copies they would be rounded."""
    model = model_class(SHAPES["gpt2"]).initialised(SHAPES["gpt2"], 3)
    before = dict(model.named_parameters())
    plain = torch.zeros

    def zeros(*sizes: Any, **named: Any) -> Tensor:
        if named.get("dtype") == torch.int32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*sizes, **named)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", zeros)
        with pytest.raises(torch.OutOfMemoryError):
            Stepper(model, device="cpu", dtype="bfloat16")
    assert all(tensor is before[name] for name, tensor in model.named_parameters())
