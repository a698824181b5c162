"""Sizes of the tensors that real models allocate in a training step, recorded operation by operation.

The models run on fake CPU tensors: no number is computed, but every allocation has the size it would have.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onecard.doctor.tensor import Dimensions


class Recorder(TorchDispatchMode):
    """Counts what every operation allocates: (shape, bytes of a value), by moment."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = "forward"
        self.seen: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self._known: set[int] = set()
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs or {})) if torch.is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not torch.is_tensor(tensor) or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            if id(storage) in given or id(storage) in self._known:
                continue
            self._known.add(id(storage))
            self._alive.append(tensor)  # an id is not given again while its tensor lives
            item = tensor.element_size()
            if storage.nbytes() == tensor.numel() * item:
                self.seen[(self.moment, tuple(tensor.shape), item)] += 1
        return out


def step_of(model_of: Any, batch: int, block: int, vocab: int) -> Counter:
    """One training step's allocations under autocast, AdamW's states among them."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = model_of()
        x = torch.zeros((batch, block), dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        recorder = stack.enter_context(Recorder())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        recorder.moment = "backward"
        loss.backward()
        recorder.moment = "update"
        optimizer.step()
    return recorder.seen


def gpt2(dims: Dimensions, attention: str) -> Counter:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=dims.vocab, n_positions=dims.block, n_embd=dims.width, n_layer=dims.layers,
        n_head=dims.heads, attn_implementation=attention, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip
    return step_of(lambda: GPT2LMHeadModel(config), dims.batch, dims.block, dims.vocab)


def llama(dims: Dimensions, attention: str) -> Counter:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=dims.vocab, max_position_embeddings=dims.block, hidden_size=dims.width,
        intermediate_size=dims.ffn, num_hidden_layers=dims.layers, num_attention_heads=dims.heads,
        num_key_value_heads=dims.kv_heads or dims.heads, attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    return step_of(lambda: LlamaForCausalLM(config), dims.batch, dims.block, dims.vocab)
