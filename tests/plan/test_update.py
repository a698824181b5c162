"""What an update takes in passing, beside what it is seen to make."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from live_memory import LiveStorages
from questions import config, target
from torch import Size, Tensor

from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, Shape
from onecard.optim.lowbit import Int8State
from onecard.optim.muon import Muon
from onecard.optim.optimizer import _COMPILED_PIECE, Optimizer
from onecard.optim.region_buffers import Storage
from onecard.optim.rules import AdamWRule, MuonRule, Rule
from onecard.optim.schedule import StepRates
from onecard.plan.activations import TRYING_OUT
from onecard.plan.answer import question_of
from onecard.plan.bill import Facts, graph_bytes, training_bill
from onecard.plan.update import UPDATE, update_bytes, update_moments

LAYER = {"attn.c_attn": (768, 256), "mlp.c_fc": (1024, 256), "mlp.c_proj": (256, 1024)}
SHAPES = {
    "transformer.wte.weight": (512, 256),
    **{f"transformer.h.{i}.{name}.weight": shape for i in range(3) for name, shape in LAYER.items()},
}
LAYERS = {name for name in SHAPES if ".h." in name}


def optimizer_of(storage: Storage, *, muon: bool, refined: bool) -> Optimizer:
    def rule(name: str, shape: Size) -> Rule:
        return MuonRule(0.1, 0.1, refined) if muon and name in LAYERS else AdamWRule((0.9, 0.95), lr=0.1)

    generator = torch.Generator().manual_seed(0)
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return Optimizer(
        parameters, layer_matrices=LAYERS, rules=rule, device="cpu", compute=torch.float32, storage=storage
    )


def standing(optimizer: Optimizer) -> list[Tensor]:
    found = [optimizer._count, optimizer._key, optimizer._first, *optimizer._hyper, *optimizer._muon_hyper]
    for buffers in optimizer._buffers:
        states = [t for s in buffers.states.values() for t in (s if isinstance(s, Int8State) else (s,))]
        found += [buffers.accumulators, buffers.master, buffers.working, *states]
        found += [t for b in buffers.batches for t in (*b.firsts, b.variance) if t is not None]
        if buffers.streamer is not None:
            found += [tensor for staging in buffers.streamer._staging for tensor in staging]
    if isinstance(optimizer._muon, Muon):
        muon = optimizer._muon
        found += [muon._x, muon._y, muon._gram, muon._poly, muon._plain_scale]
    return found


@pytest.mark.parametrize("place", ["none", "optimizer"])
@pytest.mark.parametrize("master", ["fp32", "bf16"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("muon", "refined"), [(False, False), (True, False), (True, True)])
def test_uncompiled_copies_are_counted(
    muon: bool, refined: bool, states: str, master: str, place: str
) -> None:
    optimizer = optimizer_of(Storage(master, states, place), muon=muon, refined=refined)
    for accumulator in optimizer.accumulators.values():
        accumulator.add_(1.0)
    scale = torch.tensor(2.0)
    with LiveStorages([*standing(optimizer), scale]) as live:
        optimizer.update(StepRates(0.5, momentum=0.9), scale)
    predicted = optimizer.temporaries.on_cpu
    if not muon and master == "fp32" and states != "int8":
        assert predicted == 0 and live.peak == 0, "AdamW in full precision takes nothing"
    else:
        assert 0.5 * predicted < live.peak <= predicted


SHAPE = {
    "gpt2": GPT2Shape(12, 12, 768, 50304, 1024, bias=False),
    "2025": NanochatShape(12, 6, 768, 65536, 2048),
    "2026": Nanochat2026Shape(12, 6, 768, 32768, 2048),
}


@pytest.mark.parametrize(
    ("shape", "setting", "muon", "moments"),
    [("gpt2", Setting(1, 1024), False, []), ("gpt2", Setting(1, 1024, offload="optimizer"), False, []),
     ("gpt2", Setting(1, 1024, optim_states="int8"), False, [UPDATE, TRYING_OUT]),
     ("gpt2", Setting(1, 1024, optim_states="int8", compile=False), False, [UPDATE]),
     ("2025", Setting(1, 1024), True, [UPDATE, TRYING_OUT]),
     ("2026", Setting(1, 1024, compile=False), True, [UPDATE])],
)  # fmt: skip
def test_the_bill_has_it_where_there_is_any(
    shape: str, setting: Setting, muon: bool, moments: list[str]
) -> None:
    found = update_moments(SHAPE[shape], setting, "bfloat16", by_muon=muon, l2_bytes=60 * 2**20)
    assert [moment.name for moment in found] == moments
    bill = training_bill(SHAPE[shape], setting, facts=Facts(by_muon=muon))
    names = [moment.name for moment in bill.moments]
    assert names.count(UPDATE) == (UPDATE in moments)
    assert names.count(TRYING_OUT) == (1 + (TRYING_OUT in moments) if setting.compile else 0)


@pytest.mark.parametrize("shape", SHAPE.values(), ids=SHAPE)
def test_it_is_never_what_a_usual_micro_batch_runs_out_by(shape: Shape) -> None:
    """So all that was measured before it was counted stands."""
    for setting in (Setting(1, 1024), Setting(1, 1024, "block", "gradients", "bf16", "int8")):
        bill = training_bill(shape, setting, facts=Facts(by_muon=shape.arch != "gpt2"))
        assert not any("update" in line.name for line in bill.tightest.lines)


def test_a_recording_needs_room_for_the_update_beside_it() -> None:
    """Its memory is not given back for that."""
    asked = question_of(config(["--depth=12", "--arch=nanochat"]), target("RTX 4070"))
    choice = asked.answer(Setting(8, 4096))
    taken = update_bytes(asked.shape, choice.setting, asked.dtype, by_muon=True)
    graph = graph_bytes(asked.shape, choice.setting, asked.dtype, last=choice.last_micro_batch)
    assert taken > 0 and choice.capture_bytes == graph + taken
    need = choice.bill.process + graph + taken
    assert dataclasses.replace(asked, allowed=need).answer(choice.setting).has_room_to_capture
    assert not dataclasses.replace(asked, allowed=need - 1).answer(choice.setting).has_room_to_capture


def test_regions_are_cut_where_the_compiler_would_count_in_more_bits() -> None:
    optimizer = optimizer_of(Storage("bf16", "int8"), muon=False, refined=False)
    optimizer._piece = _COMPILED_PIECE
    buffers = SimpleNamespace(streamer=None, low_bit=True, region=SimpleNamespace(size=5 * 2**29))
    spans = optimizer._spans_of(buffers)  # type: ignore[arg-type]
    assert spans == [(0, 2**30), (2**30, 2**30), (2**31, 2**29)]
