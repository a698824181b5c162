"""What a micro-batch really allocates, for tests of the formulas.

Eager by watching storages come and go under fake tensors (nothing is computed, nothing is large), compiled by
reading the code that Inductor writes.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onecard.arch.shapes import Shape
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.model.dropout import DropoutKeys
from onecard.model.registry import model_class
from onecard.optim.recipe import rules_of
from onecard.train.step import Stepper

ARCHS = {
    "gpt2": ["--n_head=4", "--bias=False"],
    "nanochat-2025": ["--arch=nanochat", "--generation=2025", "--n_head=2"],
    "nanochat-2026": ["--arch=nanochat", "--generation=2026", "--n_head=2"],
}


def config_of(arch: str, *words: str) -> RunConfig:
    return load_config(RunConfig, [*ARCHS[arch], *words])


def model_of(config: RunConfig, shape: Shape, dtype: str, *, fake: bool = False) -> Any:
    """A model in a stepper: its weights and totals are those of a run."""
    model = model_class(shape)(shape) if fake else model_class(shape).initialised(shape, 1)
    rules = rules_of(config, shape)
    Stepper(model, device="cpu", dtype=dtype, rules=rules)
    return model


class LiveStorages(TorchDispatchMode):
    """Bytes of all storages made since, now and at most; what was there before does not count."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        # Held, so that no storage made later is taken for one of these.
        self._before = [tensor.untyped_storage() for tensor in before]
        self._known = {storage._cdata: 0 for storage in self._before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                # The allocator's blocks are multiples of 512 bytes.
                self._known[storage._cdata] = size = -(-storage.nbytes() // 512) * 512
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata)
        return out

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


def _free_loss(logits_CV: Tensor, *_: Any) -> Tensor:
    """Allocates nothing, as the GPU's kernel does not; the plain one makes copies in fp32."""
    return logits_CV.new_zeros((), dtype=torch.float32)


def eager_peak(
    arch: str, words: list[str], *, micro_batch: int, recompute: str, dtype: str, loss_chunk: int,
    dropout: float = 0.0,
) -> tuple[int, Shape]:  # fmt: skip
    """Bytes that a micro-batch adds to what stands there at its worst moment, tokens and targets left out."""
    config = config_of(arch, *words)
    shape = config.shape(config.vocab_size or 0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        model = model_of(config, shape, dtype, fake=True)
        model.attention_kernel, model.recompute, model.loss_chunk = "cpu", recompute, loss_chunk
        model._parts = model._parts._replace(chunk_loss=_free_loss)
        tokens_BT = torch.zeros(micro_batch, shape.block_size, dtype=torch.int64)
        scale = torch.ones(())
        keys_B = torch.zeros(micro_batch, dtype=torch.int32)
        standing = [*model.parameters(), *model.buffers(), *model._accumulators.values()]
        with LiveStorages([*standing, tokens_BT, scale, keys_B]) as live:
            masks = DropoutKeys(keys_B, dropout) if dropout else None
            model.loss_sum(tokens_BT, tokens_BT, masks, scale=scale)
    return live.peak, shape


# --- compiled -----------------------------------------------------------------------------------

_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "bool": 1}
_MADE = re.compile(r"(buf\d+) = empty_strided_\w+\(\(([^)]*)\), \([^)]*\), torch\.(\w+)\)")
_RENAMED = re.compile(r"(buf\d+) = .*\b(buf\d+)\b.*; del (buf\d+)")
_TAKEN = re.compile(r"(buf\d+) = (buf\d+)\[(\d+)\]")
_CALLED = re.compile(r"(buf\d+) = torch\.ops\.(\S+?)\(")


class InductorCode:
    """The buffers of one compiled function, line after line."""

    def __init__(self, code: str, width_bytes: int) -> None:
        """`width_bytes`: of one value of width n_embd per token, which is what attention returns."""
        self._width = width_bytes
        self._size: dict[str, int] = {}
        self._results: dict[str, list[int]] = {}
        self._now = self.peak = 0
        for line in code.splitlines():
            self._read(line.strip())

    def _made(self, name: str, size: int) -> None:
        self._size[name] = size
        self._now += size
        self.peak = max(self.peak, self._now)

    def _read(self, line: str) -> None:
        if found := _MADE.match(line):
            count = 1
            for part in filter(None, map(str.strip, found[2].split(","))):
                count *= int(part)
            self._made(found[1], count * _SIZES[found[3]])
        elif found := _CALLED.match(line):
            name = found[2]
            if "attention" in name or "attend" in name:
                self._results[found[1]] = [self._width] * (3 if "backward" in name else 1)
        elif found := _TAKEN.match(line):
            sizes, at = self._results.get(found[2], []), int(found[3])
            if at < len(sizes):
                self._made(found[1], sizes[at])
        elif (found := _RENAMED.match(line)) and found[2] == found[3]:
            self._size[found[1]] = self._size.pop(found[3], 0)
        else:
            for names in re.findall(r"\bdel ((?:\w+(?:, )?)+)", line):
                for name in names.split(","):
                    self._now -= self._size.pop(name.strip(), 0)


def compiled_peak(arch: str, recompute: str, dtype: str) -> float:
    """The most that a layer's compiled backward pass has in buffers of its own, in values of width n_embd."""
    import torch._inductor.config as inductor
    from torch._inductor.utils import run_and_get_code

    config = config_of(arch, "--n_layer=2", "--n_embd=256", "--block_size=128", "--vocab_size=512")
    shape = config.shape(512)
    torch.compiler.reset()
    model = model_of(config, shape, dtype)
    model.recompute = recompute
    model.compile_parts()
    tokens_BT = torch.randint(0, 512, (4, shape.block_size))
    width = 4 * shape.block_size * shape.n_embd * _SIZES[dtype]
    with inductor.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(lambda: model.loss_sum(tokens_BT, tokens_BT, scale=torch.ones(())))
    torch.compiler.reset()
    # A forward pass has larger buffers, but what it leaves is among the kept.
    backward = [code for code in codes if re.search(r"atten\w*_backward", code)]
    assert backward, "no compiled function calls attention's backward pass"
    return max(InductorCode(code, width).peak for code in backward) / width
