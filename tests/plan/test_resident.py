"""What stands on the card and the host is counted as optim/region_buffers.py allocates it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from onecard.arch.layout import Setting, per_element
from onecard.arch.parameters import parameters_of
from onecard.arch.shapes import GPT2Shape
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.model.registry import model_class
from onecard.optim import regions
from onecard.optim.lowbit import Int8State
from onecard.optim.optimizer import Optimizer
from onecard.optim.recipe import rules_of
from onecard.optim.region_buffers import Storage
from onecard.plan import resident as counted
from onecard.plan.bill import is_refined
from onecard.plan.lines import total
from onecard.plan.resident import resident

VOCAB = 301
MODELS = {
    "gpt2": ["--n_layer=3", "--n_head=2", "--n_embd=64", "--bias=True"],
    "gpt2-muon": ["--n_layer=3", "--n_head=2", "--n_embd=64", "--optimizer=muon"],
    "2025": ["--arch=nanochat", "--generation=2025", "--depth=2"],
    "2026": ["--arch=nanochat", "--generation=2026", "--depth=4"],
}


def config_of(name: str) -> RunConfig:
    return load_config(RunConfig, [*MODELS[name], "--block_size=32", f"--vocab_size={VOCAB}"])


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_are_the_models(name: str) -> None:
    shape = config_of(name).shape(VOCAB)
    model = model_class(shape).uninitialised(shape)
    ours = parameters_of(shape)
    assert [(p.name, p.dims) for p in ours] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert {p.name for p in ours if p.kind == "layers"} == model.layer_matrices()
    assert sum(p.count for p in ours) == shape.parameters


def storages(*tensors: Any) -> dict[int, int]:
    """Bytes by address, so that what is shared counts once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, Int8State):
            found |= storages(*tensor)
        else:
            assert isinstance(tensor, Tensor)
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def allocated(optimizer: Optimizer) -> tuple[int, int]:
    """On the card and at home."""
    card: dict[int, int] = {}
    home: dict[int, int] = {}
    for buffers in optimizer._buffers:
        (home if buffers.on_host else card).update(storages(buffers.master, *buffers.states.values()))
        card |= storages(buffers.working, *buffers.variances.values())
        (card if buffers.layer_accumulators is None else home).update(storages(buffers.accumulators))
        if buffers.streamer is not None:
            card |= storages(*(t for staging in buffers.streamer._staging for t in staging))
        if buffers.layer_accumulators is not None:
            card |= storages(*buffers.layer_accumulators._staging)
    muon = optimizer._muon
    if muon is not None:
        card |= storages(muon._x, muon._y, muon._gram, muon._poly)
    return sum(card.values()), sum(home.values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_storage_is_counted_as_it_is_allocated(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (regions, counted):
        monkeypatch.setattr(module, "PIECE", 2**13)  # several pieces of so small a model
    config = config_of(name)
    shape = config.shape(VOCAB)
    model = model_class(shape).initialised(shape, 1)
    kinds = itertools.product(("fp32", "bf16"), ("fp32", "bf16", "int8"), ("none", "optimizer", "gradients"))
    for masters, states, offload in kinds:
        optimizer = Optimizer(
            dict(model.named_parameters()), layer_matrices=model.layer_matrices(),
            rules=rules_of(config, shape), device="cpu", compute=getattr(torch, dtype),
            storage=Storage(masters, states, offload),
        )  # fmt: skip
        setting = Setting(1, 128, offload=offload, master_weights=masters, optim_states=states)
        ours = resident(shape, setting, dtype, by_muon=config.by_muon, refined=is_refined(config))
        card, home = total(ours.card), total(ours.host)
        if config.by_muon and dtype == "bfloat16":
            # A CPU iterates in fp32.
            room = {d: next(line for line in resident(shape, setting, d, by_muon=True).card
                            if line.name == "Muon's room").bytes for d in (dtype, "float32")}  # fmt: skip
            card += room["float32"] - room["bfloat16"]
        assert (card, home) == (pytest.approx(allocated(optimizer)[0], abs=8), allocated(optimizer)[1])
        assert home == optimizer.host_bytes


def test_bytes_a_parameter() -> None:
    """Working copy 2, total 4, master 4, moments 8 (one by Muon); what is offloaded is not there."""

    def on_card(kind: str, *, by_muon: bool = False, dtype: str = "bfloat16", **kept: str) -> float:
        each = per_element(kind, Setting(1, 128, **kept), dtype, by_muon=by_muon)  # type: ignore[arg-type]
        return each.working + (0 if each.accumulators_on_host else each.accumulator) + (
            0 if each.on_host else each.master + each.states
        )  # fmt: skip

    low = {"master_weights": "bf16", "optim_states": "int8"}
    assert on_card("layers") == 18
    assert on_card("layers", dtype="float32") == 16
    assert on_card("layers", offload="optimizer") == 6
    assert on_card("layers", offload="gradients") == 2
    assert on_card("layers", **low) == 2 + 2 + 2 * (1 + 4 / 256)
    assert on_card("layers", by_muon=True) == 14
    assert on_card("layers", by_muon=True, **low) == 2 + 2 + 1 + 4 / 256
    assert on_card("embeddings", by_muon=True, **low, offload="gradients") == 6
    assert on_card("vectors", **low, offload="gradients") == 16


def test_a_model_of_any_size_is_counted_at_once() -> None:
    """A search asks hundreds of times; pieces are counted, not listed."""
    huge = GPT2Shape(1024, 96, 12288, 50304, 1024, False)
    began = time.process_time()
    for micro_batch in range(1, 300):
        for offload in ("none", "optimizer", "gradients"):
            resident(huge, Setting(micro_batch, 512, "block", offload), "bfloat16", by_muon=False)
    assert time.process_time() - began < 2.0
