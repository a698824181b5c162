"""Capture and replaying, with a recorder that a CPU has: the order of events is the same on a card."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import MemoryTokens
from torch import Tensor

from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2Shape
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.data.batches import Sequences
from onecard.data.prefetch import Prefetcher
from onecard.model.gpt2 import GPT2
from onecard.optim.region_buffers import Storage
from onecard.optim.schedule import StepRates
from onecard.plan.bill import Facts, training_bill
from onecard.plan.lines import total
from onecard.train.engine import graphs_of
from onecard.train.replay import CudaCapture, Replay
from onecard.train.step import StepOptions, Stepper

SHAPE = GPT2Shape(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16, bias=False)


class Recorder:
    """Computes on copies it made when it was recorded, as a CUDA graph does."""

    made: list[Recorder] = []  # noqa: RUF012 - cleared by the fixture
    held_bytes = 100

    def __init__(self, compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self._compute, self._inputs = compute, [torch.zeros_like(t) for t in inputs]
        self.plays = 0
        Recorder.made.append(self)

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        for ours, given in zip(self._inputs, inputs, strict=True):
            ours.copy_(given)
        self.plays += 1
        return self._compute(*self._inputs)


@pytest.fixture(autouse=True)
def no_captures() -> None:
    Recorder.made.clear()


def test_the_first_passes_are_plain_and_the_rest_replayed() -> None:
    calls = []

    def twice(x: Tensor) -> Tensor:
        calls.append(x)
        return 2 * x

    replay = Replay(twice, Recorder)
    for number in range(6):
        assert replay(torch.tensor(float(number))).item() == 2 * number
    (capture,) = Recorder.made
    assert capture.plays == 4
    assert replay.held_bytes == 100
    replay.release()
    assert replay.held_bytes == 0
    assert replay(torch.tensor(7.0)).item() == 14.0
    assert len(Recorder.made) == 2, "recorded again at once"


@pytest.mark.parametrize(("share", "recorded"), [(0.9, True), (0.2, False)])
def test_by_itself_only_what_is_launch_bound_is_captured(share: float, recorded: bool) -> None:
    measured = []

    def measure(compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, float]:
        measured.append(inputs[0].shape)
        return compute(*inputs), share

    replay = Replay(lambda x: 2 * x, Recorder, measure)
    for number in range(6):
        assert replay(torch.tensor([float(number)])).item() == 2 * number
    assert len(Recorder.made) == recorded
    assert len(measured) == 1, "once for a shape: it waits for the card"
    replay.release()
    assert replay(torch.tensor([7.0])).item() == 14.0
    assert len(measured) == 1 and len(Recorder.made) == 2 * recorded


def test_another_shape_gets_the_room_while_it_is_plain() -> None:
    held = []

    def total(x: Tensor) -> Tensor:
        held.append(replay.held_bytes)
        return x.sum()

    replay = Replay(total, Recorder)
    long, short = torch.ones(4), torch.ones(3)
    for _ in range(4):
        assert [replay(t).item() for t in (long, long, long, short)] == [4.0, 4.0, 4.0, 3.0]
    # Plain passes: two of each shape; nothing was held during them.
    assert held.count(0) == 4
    assert replay.held_bytes == 200, "in the end both shapes are recorded"


def test_nothing_is_captured_anew_in_every_step() -> None:
    """A smaller last micro-batch is launch-bound, the others do not, and want its capture's room."""

    def measure(compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, float]:
        return compute(*inputs), 0.9 if len(inputs[0]) == 1 else 0.2

    replay = Replay(lambda x: x.sum(), Recorder, measure)
    for _ in range(10):
        assert [replay(torch.ones(n)).item() for n in (4, 4, 1)] == [4.0, 4.0, 1.0]
    assert len(Recorder.made) == 1
    assert replay.held_bytes == 0


def test_a_recorder_that_fails_is_reported_and_not_tried_again() -> None:
    tried = 0

    def failing(compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Recorder:
        nonlocal tried
        tried += 1
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    replay = Replay(lambda x: x + 1, failing)
    assert [replay(torch.tensor(n)).item() for n in range(6)] == [1, 2, 3, 4, 5, 6]
    assert tried == 1
    assert replay.problem == "operation not permitted"


def test_no_room_to_record_is_no_reason_to_stop() -> None:
    """The plain passes have fitted; a capture needs a little more."""

    def full(compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Recorder:
        raise torch.OutOfMemoryError("CUDA out of memory")

    replay = Replay(lambda x: x + 1, full)
    assert [replay(torch.tensor(n)).item() for n in range(4)] == [1, 2, 3, 4]
    assert replay.problem == "CUDA out of memory"


@pytest.mark.parametrize("storage", [Storage(), Storage("bf16", "int8")])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_steps_are_the_same_replayed(storage: Storage, dropout: float) -> None:
    """Everything that differs between micro-batches goes through the inputs: tokens, masks, noise, scale."""

    def weights(graphs: bool) -> dict[str, Tensor]:
        stepper = Stepper(
            GPT2.initialised(SHAPE, 1),
            device="cpu",
            dtype="float32",
            storage=storage,
            options=StepOptions(dropout=dropout, seed=3),
        )
        if graphs:
            stepper.replay = Replay(stepper._loss_of, Recorder)
        sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
        with Prefetcher(sequences, sequences.start(), step_sequences=11, micro_batch=4) as batches:
            for _ in range(4):
                stepper.run(batches.next_step().micros, StepRates(1e-2))
        return {n: t.clone() for n, t in stepper.optimizer.export_weights().items()}

    plain, replayed = weights(False), weights(True)
    assert sum(r.plays for r in Recorder.made) >= 4
    assert all(torch.equal(plain[n], replayed[n]) for n in plain)


def test_a_capture_is_given_the_room_of_its_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is billed, whatever its size: under a cap it could not get it bit by bit. Else it grows."""
    given: dict[int, int] = {}
    capped = [True]

    def recorder(compute: Callable[..., Tensor], inputs: Sequence[Tensor], room: int = 0) -> Recorder:
        given[len(inputs[0])] = room
        return Recorder(compute, inputs)

    monkeypatch.setattr("onecard.train.step.is_capped", lambda device: capped[0])
    monkeypatch.setattr("onecard.train.step.CudaCapture", recorder)
    stepper = Stepper(
        GPT2.initialised(SHAPE, 1),
        device="cpu",
        dtype="float32",
        options=StepOptions(dropout=0.1, graphs=True),
    )
    stepper.model.recompute, stepper.model.loss_chunk = "mlp", 32
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    with Prefetcher(sequences, sequences.start(), step_sequences=11, micro_batch=4) as batches:
        for _ in range(4):
            stepper.run(batches.next_step().micros, StepRates(1e-2))
        rooms, capped[0] = dict(given), False
        stepper.release()
        stepper.run(batches.next_step().micros, StepRates(1e-2))
    assert set(given) == {4, 3} and set(given.values()) == {0}
    assert stepper.replay is not None and stepper.replay.held_bytes == 200
    for sequences_at_once, room in rooms.items():
        setting = Setting(sequences_at_once, 32, "mlp", compile=False, cuda_graphs=True)
        bill = training_bill(SHAPE, setting, "float32", facts=Facts(dropout=0.1))
        kept = bill.steady - total(bill.resident.card) - bill.workspace.bytes
        assert room == kept


class AllocatorModel:
    """What torch does with a capture's memory, as far as it matters who goes first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        model = self

        class Graph:
            def __init__(self) -> None:
                model.did.append("graph")
                weakref.finalize(self, model.did.append, "graph gone")

            def replay(self) -> None: ...

        @contextmanager
        def capturing(graph: Graph, **named: Any) -> Iterator[None]:
            model.did.append("capture")
            yield

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capturing)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.did.append("emptied"))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *arguments: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *arguments: None)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(device="cpu"))
        workspaces = lambda: self.did.append("workspaces freed")  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", workspaces, raising=False)

    def since(self, what: str) -> list[str]:
        return self.did[len(self.did) - self.did[::-1].index(what) :]


@pytest.mark.parametrize("how", ["released", "forgotten", "fails half-way"])
def test_workspaces_are_freed_before_a_capture_goes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie amid its memory. Emptying the cache while they do, and the capture is gone, cannot be
    recovered from."""
    model, passes = AllocatorModel(monkeypatch), list[int]()

    def compute(x: Tensor) -> Tensor:
        passes.append(1)
        if how == "fails half-way" and len(passes) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + 1

    replay: Replay | None = Replay(compute, CudaCapture)
    assert replay is not None
    for _ in range(3):
        replay(torch.ones(2))
    assert (replay.problem is not None) == (how == "fails half-way")
    if how == "fails half-way":
        assert replay.ran_out
        # A second one ends what the first left behind, and takes nothing.
        assert model.did.count("graph") == 2
    elif how == "released":
        replay.release()
    else:
        holder = SimpleNamespace(replay=replay)
        holder.itself = holder  # as a stepper and what it has its captures compute
        del holder
        replay = None
        gc.collect()
        torch.cuda.empty_cache()
    after = model.did[model.did.index("capture") :]
    assert after.count("graph gone") == model.did.count("graph")
    gone = max(i for i, did in enumerate(after) if did == "graph gone")
    assert "workspaces freed" in after[:gone]
    assert "emptied" not in after[: after.index("workspaces freed")]
    assert "emptied" in after[gone:]


def test_under_a_cap_a_micro_batch_takes_its_room_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and again after something else has had the card, a capture among that."""
    asked: list[int] = []
    capped = [False]
    monkeypatch.setattr("onecard.train.step.is_capped", lambda device: capped[0])
    monkeypatch.setattr(
        "onecard.train.step.CudaCapture", lambda compute, inputs, room=0: Recorder(compute, inputs)
    )
    plain = torch.empty

    def empty(*sizes: Any, **named: Any) -> Tensor:
        if named.get("dtype") is torch.uint8:
            asked.append(sizes[0])
            if len(asked) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*sizes, **named)

    monkeypatch.setattr(torch, "empty", empty)
    stepper = Stepper(GPT2.initialised(SHAPE, 1), device="cpu", dtype="float32")
    sequences = Sequences(MemoryTokens(6000), SHAPE.block_size, seed=7)
    with Prefetcher(sequences, sequences.start(), step_sequences=11, micro_batch=4) as batches:

        def steps(count: int) -> int:
            for _ in range(count):
                assert stepper.run(batches.next_step().micros, StepRates(1e-2)) is not None
            return len(asked)

        assert steps(2) == 0, "nobody has limited it"
        capped[0] = True
        assert steps(3) == 1
        stepper.release()
        assert steps(2) == 2, "it ran out, which does no harm and is not tried again and again"
        stepper.use_graphs(True)
        assert steps(1) == 3
        # All that was free was given back when four sequences were recorded; three come plain once more.
        assert steps(4) == 4 and stepper.replay is not None and stepper.replay.held_bytes
        assert steps(2) == 4, "captures have room of their own"

    def room(sequences: int) -> int:
        bill = training_bill(SHAPE, Setting(sequences, stepper.model.loss_chunk, compile=False), "float32")
        slack = bill.reserved - bill.allocated
        return bill.steady - total(bill.resident.card) - bill.workspace.bytes + slack

    assert asked == [room(4), room(4), room(4), room(3)]


def test_a_stepper_reports_the_problem_once_and_goes_on() -> None:
    def failing(compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Recorder:
        raise RuntimeError("no")

    stepper = Stepper(GPT2.initialised(SHAPE, 1), device="cpu", dtype="float32", options=StepOptions(seed=3))
    stepper.replay = Replay(stepper._loss_of, failing)
    assert stepper.notes() == []
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    with Prefetcher(sequences, sequences.start(), step_sequences=12, micro_batch=4) as batches:
        result = stepper.run(batches.next_step().micros, StepRates(1e-2))
        assert result is not None
        (reported,) = stepper.notes()
        assert reported.endswith("CUDA graphs: no")
        assert stepper.notes() == []
        assert stepper.run(batches.next_step().micros, StepRates(1e-2)) is not None


@pytest.mark.parametrize(
    ("problem", "again"), [("no", False), ("CUDA out of memory", True), ("CUBLAS_STATUS_ALLOC_FAILED", True)]
)
def test_another_setting_is_captured_from_nothing(problem: str, again: bool) -> None:
    """Its kernels are not those of the plain passes so far, though micro-batches look the same."""

    def failing(compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Recorder:
        raise RuntimeError(problem)

    stepper = Stepper(GPT2.initialised(SHAPE, 1), device="cpu", dtype="float32", options=StepOptions(seed=3))
    stepper.use_graphs(True)
    first = stepper.replay
    assert first is not None
    stepper.use_graphs(True)
    assert stepper.replay is not None and stepper.replay is not first
    stepper.use_graphs(False)
    assert stepper.replay is None
    stepper.replay = Replay(stepper._loss_of, failing)
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    with Prefetcher(sequences, sequences.start(), step_sequences=12, micro_batch=4) as batches:
        assert stepper.run(batches.next_step().micros, StepRates(1e-2)) is not None
    assert len(stepper.notes()) == 1
    stepper.use_graphs(True)
    assert (stepper.replay is not None) is again, "what does not work here is reported once"


@pytest.mark.parametrize(
    ("words", "offload", "device", "room", "expected"),
    [
        ([], "none", "cuda", True, None),
        ([], "none", "cuda", False, False),
        (["--cuda_graphs=True"], "none", "cuda", False, True),
        (["--cuda_graphs=True"], "gradients", "cuda", True, False),
        (["--cuda_graphs=True"], "none", "cpu", True, False),
    ],
)
def test_which_settings_are_recorded(
    words: list[str], offload: str, device: str, room: bool, expected: bool | None
) -> None:
    setting = Setting(4, 128, "block", offload)
    config = load_config(RunConfig, words)
    assert graphs_of(config, setting, device, compiled=True, room=room) is expected
