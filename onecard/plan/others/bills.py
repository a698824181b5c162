"""The memory bill of anybody's trainer: one door for nanoGPT's, nanochat's and Hugging Face's.

What a card has measured is in benchmarks/results/*peers*: those trainers at several depths and batches on an
H200. Nearer to them than a factor of two in every size, a bill counts as confirmed; others are marked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape, Shape
from onecard.errors import UserError
from onecard.language import _
from onecard.plan.others.huggingface_step import HuggingFaceGPT2, HuggingFaceLlama, LlamaShape
from onecard.plan.others.nanochat_compiled import CompiledNanochat
from onecard.plan.others.nanochat_eager import EagerNanochat
from onecard.plan.others.nanogpt import nanogpt_bill
from onecard.plan.others.trainer import Played, TrainerBill, played

AnyShape = Shape | LlamaShape


@dataclass(frozen=True)
class TheirTrainer:
    """A trainer that bills are made of."""

    key: str
    name: str
    shapes: tuple[type, ...]  # of models it trains
    model: str  # flags of one
    compiles: bool  # whether there are bills of it compiled


TRAINERS = {
    trainer.key: trainer
    for trainer in (
        TheirTrainer("nanogpt", "nanoGPT", (GPT2Shape,), "--arch=gpt2", True),
        TheirTrainer("nanochat", "nanochat", (NanochatShape, Nanochat2026Shape), "--depth=12", True),
        TheirTrainer("huggingface", "Hugging Face", (GPT2Shape, LlamaShape), "--arch=gpt2", False),
    )
}

# What was measured, from and to: layers, width, tokens of a block, tokens of a micro-batch.
_MEASURED = {
    "nanochat": ((4, 20), (256, 1280), (2048, 2048), (4096, 32768)),
    "huggingface": ((12, 24), (768, 2048), (1024, 2048), (4096, 16384)),
}
_NEAR = 2  # times, or a half


def bill_of_trainer(
    trainer: str, shape: AnyShape, batch_size: int, *, dtype: str = "bfloat16", compiled: bool = True,
    dropout: float | None = None, gradient_accumulation_steps: int = 40, checkpointing: bool = False,
) -> TrainerBill:  # fmt: skip
    """The bill for a model in somebody's trainer; with one micro-batch a step forward has no gradients.

    `dropout` None is the trainer's own. Only Hugging Face's has checkpointing, and it is not compiled here.
    """
    theirs = TRAINERS[trainer]
    if not isinstance(shape, theirs.shapes):
        arch = getattr(shape, "arch", "llama")
        raise UserError(
            _("{trainer} does not have {arch}").format(trainer=theirs.name, arch=arch), hint=theirs.model
        )
    if trainer == "nanogpt":
        assert isinstance(shape, GPT2Shape)
        return nanogpt_bill(
            shape, batch_size, dtype=dtype, compiled=compiled, dropout=dropout or 0.0,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )  # fmt: skip
    options: tuple[tuple[str, Any], ...] = (("dtype", dtype),)
    if trainer == "huggingface":
        options += (("dropout", dropout is None or dropout > 0), ("checkpointing", checkpointing))
    is_compiled = compiled and theirs.compiles
    sure = is_confirmed(trainer, shape, batch_size, dtype)
    return _bill(_kind(shape, is_compiled), shape, batch_size, options, gradient_accumulation_steps, sure)


def _kind(shape: AnyShape, compiled: bool) -> Callable[..., Played]:
    if isinstance(shape, LlamaShape):
        return HuggingFaceLlama
    if isinstance(shape, GPT2Shape):
        return HuggingFaceGPT2
    return CompiledNanochat if compiled else EagerNanochat


@lru_cache(maxsize=64)  # a step is played tensor by tensor: what is asked again is not played again
def _bill(
    kind: Callable[..., Played], shape: AnyShape, batch_size: int, options: tuple[tuple[str, Any], ...],
    accumulation: int, confirmed: bool,
) -> TrainerBill:  # fmt: skip
    def step(limit: float) -> Played:
        return kind(shape, batch_size, limit=limit, **dict(options))

    # nanochat evaluates before its first step. Hugging Face's Trainer does not unless asked.
    evaluates = kind in (CompiledNanochat, EagerNanochat)
    return played(step, accumulation, evaluates=evaluates, confirmed=confirmed)


def is_confirmed(trainer: str, shape: AnyShape, batch_size: int, dtype: str) -> bool:
    """Whether a card has run it, or one like it. float16 is bfloat16 as to memory, but was not run."""
    if trainer == "nanogpt":
        return True
    sizes = (shape.n_layer, shape.n_embd, shape.block_size, batch_size * shape.block_size)
    near = (
        low / _NEAR <= size <= high * _NEAR
        for size, (low, high) in zip(sizes, _MEASURED[trainer], strict=True)
    )
    return dtype == "bfloat16" and all(near)
