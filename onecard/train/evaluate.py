"""Loss on a fixed set of blocks: the same blocks every time, whatever the micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onecard.data.batches import FixedBlocks
from onecard.model.decoder import Decoder

if TYPE_CHECKING:
    from onecard.train.start import Run


@torch.no_grad()
def evaluate(
    model: Decoder,
    blocks: FixedBlocks,
    *,
    micro_batch: int,
    device: str,
    stop: Callable[[], bool] = lambda: False,
    on_batch: Callable[[int], None] = lambda sequences: None,
) -> float | None:
    """Mean loss per token in nats, or None if `stop` said so. No dropout."""
    # Summed in float64 on the device: the order and size of batches must not show in the figure.
    total = torch.zeros((), device=device, dtype=torch.float64)
    for tokens_BL in blocks.batches(micro_batch):
        if stop():
            return None
        tokens = torch.from_numpy(tokens_BL).to(device)
        total += model.loss_sum(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        on_batch(len(tokens_BL))
    return float(total) / (len(blocks) * blocks.block_size)


@dataclass(frozen=True)
class Evaluation:
    train_loss: float
    val_loss: float
    seconds: float
    steady_seconds: float  # what another one will take: without the compilation in the first batch


def evaluate_both(
    run: Run, inside: Callable[[str, int, int], None], stop: Callable[[], bool]
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
        inside("evaluating, block", done, total)

    losses: dict[str, float] = {}
    for split, blocks in run.evaluation.items():
        loss = evaluate(
            run.model, blocks, micro_batch=run.config.batch_size, device=run.device,
            stop=stop, on_batch=on_batch,
        )  # fmt: skip
        if loss is None:
            return None
        losses[split] = loss
    ended = time.perf_counter()
    rest = total - first_batch
    steady = (ended - first_done) * total / rest if rest else ended - began
    return Evaluation(losses["train"], losses["val"], ended - began, steady)
