"""Loss on a fixed set of blocks: the same blocks every time, whatever the micro-batch.

In nats per token over all targets, as nanoGPT has it, and in bits per byte of text (target_text.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onecard.data.batches import FixedBlocks
from onecard.language import _, ngettext
from onecard.model.decoder import Decoder
from onecard.train.target_text import TargetText

if TYPE_CHECKING:
    from onecard.train.training_run import TrainingRun


@dataclass(frozen=True)
class SetLoss:
    """Of one set of blocks."""

    nats_per_token: float
    bits_per_byte: float | None  # None where it is not known what the tokens stand for


@torch.no_grad()
def evaluate(
    model: Decoder,
    blocks: FixedBlocks,
    *,
    micro_batch: int,
    device: str,
    text: TargetText | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_batch: Callable[[int], None] = lambda sequences: None,
) -> SetLoss | None:
    """Mean loss, or None if `stop` said so. No dropout."""
    # Summed in float64 on the device: the order and size of batches must not show in the figure.
    total = torch.zeros((), device=device, dtype=torch.float64)
    not_text = torch.zeros_like(total)
    for tokens_BL in blocks.batches(micro_batch):
        if stop():
            return None
        tokens = torch.from_numpy(tokens_BL).to(device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if text is None:
            total += model.loss_sum(inputs, targets)
        else:
            # Found on the CPU, where the tokens come from: the GPU is not waited for.
            apart = torch.from_numpy(text.places_of_no_text(tokens_BL[:, 1:])).to(device)
            both, special = model.loss_sums(inputs, targets, apart)
            total += both
            not_text += special
        on_batch(len(tokens_BL))
    bits_per_byte = text.bits_per_byte(float(total - not_text)) if text is not None else None
    return SetLoss(float(total) / (len(blocks) * blocks.block_size), bits_per_byte)


def at_a_time(sequences: int) -> str:
    return ngettext("{n} sequence at a time", "{n} sequences at a time", sequences).format(n=sequences)


@dataclass(frozen=True)
class Evaluation:
    train_loss: float
    val_loss: float
    seconds: float
    steady_seconds: float  # what another one will take: without the compilation in the first batch
    train_bpb: float | None = None  # bits per byte
    val_bpb: float | None = None


def evaluate_both(
    run: TrainingRun, inside: Callable[[str, int, int], None], stop: Callable[[], bool]
) -> Evaluation | None:
    """Both losses on the run's fixed blocks, or None when interrupted."""
    total = sum(len(blocks) for blocks in run.evaluation.values())
    done = first_batch = 0
    began = first_done = time.perf_counter()

    def on_batch(sequences: int) -> None:
        nonlocal done, first_batch, first_done
        done += sequences
        if not first_batch:
            first_batch, first_done = done, time.perf_counter()
        inside(_("evaluating, block"), done, total)

    losses: dict[str, SetLoss] = {}
    for split, blocks in run.evaluation.items():
        loss = evaluate(
            run.model, blocks, micro_batch=run.fit.evaluation_batch, device=run.device,
            text=run.text.get(split), stop=stop, on_batch=on_batch,
        )  # fmt: skip
        if loss is None:
            return None
        losses[split] = loss
    ended = time.perf_counter()
    rest = total - first_batch
    steady = (ended - first_done) * total / rest if rest else ended - began
    train, val = losses["train"], losses["val"]
    return Evaluation(
        train.nats_per_token,
        val.nats_per_token,
        ended - began,
        steady,
        train.bits_per_byte,
        val.bits_per_byte,
    )
