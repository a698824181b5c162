"""The operations and bytes that the planner counts are those of the models, counted here one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onecard.arch.layout import Setting
from onecard.arch.parameters import groups_of
from onecard.arch.records import RECORDS
from onecard.arch.shapes import Shape
from onecard.config.knobs import load_config
from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.data.prefetch import Micro
from onecard.model.registry import model_class
from onecard.optim.schedule import rates
from onecard.plan.dropout import value_bytes, weight_bytes
from onecard.plan.host import (
    LAUNCH_BOUND,
    is_captured,
    launch_seconds,
    micro_batch_operations,
    update_launches,
)
from onecard.train.engine import new_stepper

FAMILIES = {
    "gpt2": ["--n_embd=128", "--n_head=2"],
    "nanochat-2025": ["--arch=nanochat", "--generation=2025", "--n_embd=256", "--n_head=2"],
    "nanochat-2026": ["--arch=nanochat", "--generation=2026", "--n_embd=256", "--n_head=2"],
}
# They neither compute nor move anything; the compiler's own questions are no operations at all.
VIEWS = {
    "view", "_unsafe_view", "transpose", "t", "select", "slice", "as_strided", "expand", "unsqueeze",
    "squeeze", "permute", "detach", "unbind", "split", "reshape", "alias", "empty", "empty_like", "new_empty",
    "empty_strided", "split_with_sizes", "unfold", "chunk", "promote_types",
}  # fmt: skip
MATMULS = {
    "mm", "bmm", "baddbmm", "addmm", "add_outer_", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.operations += name != "promote_types"
        if name not in VIEWS | MATMULS:
            both = tree_leaves((args, kwargs or {}, result))
            self.bytes += sum(_bytes(t) for t in both if isinstance(t, Tensor))
        return result


def _bytes(tensor: Tensor) -> int:
    """An expanded dimension is read once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    count = 1
    for size in sizes:
        count *= size
    return count * tensor.element_size()


def counted(
    family: str, layers: int, *words: str, block: int = 64, batch: int = 1
) -> tuple[Counted, Counted, RunConfig]:
    """One micro-batch and one update, after others that have prepared what there is to prepare."""
    config = load_config(RunConfig, [
        *FAMILIES[family], f"--n_layer={layers}", f"--block_size={block}", f"--batch_size={batch}",
        "--vocab_size=512", "--gradient_accumulation_steps=1", "--dtype=bfloat16", "--device=cpu",
        "--no-compile", *words,
    ]).resolved()  # fmt: skip
    config.check()
    shape = config.shape(512)
    model = model_class(shape).uninitialised(shape)
    for name, parameter in model.named_parameters():
        model._initialise(name, parameter.data, 0)
        if parameter.dim() >= 2 and config.master_weights == "bf16":
            parameter.data = parameter.data.bfloat16()
    model.recompute = config.recompute or "none"
    stepper = new_stepper(model, config, setting_of(config, shape), "cpu", "bfloat16", compiled=False)
    x, ids = torch.randint(0, 512, (batch, block)), torch.zeros(batch, dtype=torch.int64)
    found = []
    for _ in range(2):  # the first finds nothing prepared
        with Counted() as micro:
            stepper.backward(Micro(x, x, ids), x.numel())
        with Counted() as update:
            stepper.update(rates(1, config))
        found.append((micro, update))
    return *found[-1], config


def by_depth(family: str, *words: str) -> Iterator[tuple[Counted, Counted, Shape, Setting, bool]]:
    for layers in (4,) if words else (2, 6):  # what a layer takes, and what is there once
        micro, update, config = counted(family, layers, *words)
        shape = config.shape(512)
        yield micro, update, shape, setting_of(config, shape), config.by_muon


WORDS = [
    [], ["--recompute=mlp"], ["--recompute=block"], ["--master_weights=bf16", "--optim_states=int8"],
    ["--optim_states=int8"], ["--master_weights=bf16"], ["--offload=optimizer"], ["--offload=gradients"],
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_operations_are_those_of_the_model(family: str, words: list[str]) -> None:
    for micro, update, shape, setting, by_muon in by_depth(family, *words):
        assert micro_batch_operations(shape, setting) == pytest.approx(micro.operations, rel=0.05)
        groups = update_launches(shape, setting, by_muon=by_muon)
        assert len(groups) == len(groups_of(shape)) and not any(group.calls for group in groups)
        assert sum(group.operations for group in groups) == pytest.approx(update.operations, rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
def test_bytes_of_uncompiled_layers_are_those_of_the_model(family: str, recompute: str) -> None:
    (few, _, config), (many, _, _) = (
        counted(family, layers, f"--recompute={recompute}", block=256, batch=4) for layers in (2, 4)
    )
    each = (many.bytes - few.bytes) / 2 / (1024 * config.n_embd)
    assert RECORDS[family].eager_bytes_moved[recompute] == pytest.approx(each, rel=0.04)


@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
def test_operations_and_bytes_of_dropout_are_those_of_the_model(recompute: str) -> None:
    """Each operation of the hash reads and writes whole tensors, of T×T weights and of values of width D."""
    words = ["--dropout=0.1", f"--recompute={recompute}"]
    for block, batch in ((128, 8), (512, 2)):
        sizes = {"block": block, "batch": batch}
        plain, masked = (
            [counted("gpt2", layers, *some, **sizes)[0] for layers in (2, 4)] for some in ([words[1]], words)
        )
        config = counted("gpt2", 4, *words, **sizes)[2]
        shape, setting = config.shape(512), setting_of(config, config.shape(512))
        assert micro_batch_operations(shape, setting, dropout=0.1) == pytest.approx(
            masked[1].operations, rel=0.03
        )
        # Of two layers more: the embedding's masks are left out.
        found = (masked[1].bytes - masked[0].bytes) - (plain[1].bytes - plain[0].bytes)
        tokens = batch * block
        said = weight_bytes(shape, setting, tokens) / 2
        said += value_bytes(setting) * tokens * shape.n_embd * shape.n_layer / 2
        assert said == pytest.approx(found, rel=0.01)


def test_graphs_take_the_host_out_of_it() -> None:
    _, _, config = counted("gpt2", 2)
    shape = config.shape(512)

    def host(on_card: float = 1.0, **values: Any) -> float:
        setting = Setting(1, 64, **values)
        captured = is_captured(shape, setting, 1e-5, on_card)
        return launch_seconds(shape, setting, 1e-5, captured=captured)

    plain = host()
    assert host(cuda_graphs=True) < 0.2 * plain
    travelling = host(offload="gradients", cuda_graphs=True)  # cannot be recorded
    assert travelling == host(offload="gradients") > plain
    # By itself where the host's part is worth it, as the trainer finds out by measuring.
    assert host(cuda_graphs=None, on_card=1.1 * plain / LAUNCH_BOUND) == plain
    assert host(cuda_graphs=None, on_card=0.9 * plain / LAUNCH_BOUND) == host(cuda_graphs=True)
    assert host(cuda_graphs=None, on_card=0.0, recompute="block") == host(cuda_graphs=True)
    for values in ({"compile": False}, {"offload": "gradients"}):
        assert host(cuda_graphs=None, on_card=0.0, **values) == host(**values)


def test_matrices_taken_together_spare_the_host() -> None:
    _, _, config = counted("nanochat-2026", 4)
    shape = config.shape(512)

    def launches(by_muon: bool = True, **values: Any) -> float:
        return sum(g.cost for g in update_launches(shape, Setting(1, 64, **values), by_muon=by_muon))

    assert launches(by_muon=False) < launches() < launches(offload="optimizer")
