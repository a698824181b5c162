"""One optimizer step: micro-batches in, one update out. Tokens weigh the same however it is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecard.data.prefetch import Micro, StepMicros
from onecard.model.dropout import DropoutKeys
from onecard.model.gpt2 import GPT2
from onecard.model.precision import autocast
from onecard.optim.adamw import export_state, import_state
from onecard.run.checkpoint import TrainingState


@dataclass(frozen=True)
class StepResult:
    """Tensors stay on the device until a number is asked for: reading one waits for the GPU."""

    loss: Tensor
    grad_norm: Tensor


class Stepper:
    """Owns the optimizer side of training: gradients, loss scaling, clipping, the update."""

    def __init__(
        self,
        model: GPT2,
        optimizer: torch.optim.Optimizer,
        *,
        device: str,
        dtype: str,
        dropout: float,
        grad_clip: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device, self.dtype = device, dtype
        self.dropout, self.grad_clip = dropout, grad_clip
        # Only fp16 can underflow; enabled=False makes every call below a pass-through.
        self.scaler = torch.amp.GradScaler(device.split(":")[0], enabled=dtype == "float16")
        self.updating = False  # weights and moments are between two steps, not to be saved

    def run(
        self,
        micros: StepMicros,
        learning_rate: float,
        *,
        stop: Callable[[], bool] = lambda: False,
        on_micro: Callable[[int, int], None] = lambda done, total: None,
    ) -> StepResult | None:
        """One step, or None if `stop` said so between micro-batches; then nothing has changed."""
        step_tokens = sum(micros.sizes) * self.model.shape.block_size
        loss = torch.zeros((), device=self.device)
        for done, micro in enumerate(micros):
            if stop():
                self.optimizer.zero_grad(set_to_none=True)
                return None
            loss += self.backward(micro, step_tokens)
            on_micro(done + 1, len(micros))
        return StepResult(loss, self.update(learning_rate))

    def backward(self, micro: Micro, step_tokens: int) -> Tensor:
        """Add this micro-batch's share of the step's gradient; return its share of the loss."""
        dropout = DropoutKeys(dropout_keys(micro.ids), self.dropout) if self.dropout else None
        with autocast(self.device, self.dtype):
            share = self.model.loss_sum(micro.x, micro.y, dropout) / step_tokens
        self.scaler.scale(share).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return share.detach()

    def update(self, learning_rate: float) -> Tensor:
        """Clip, step, clear. Returns the gradient norm before clipping."""
        self.updating = True
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.unscale_(self.optimizer)
        if self.grad_clip:
            grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        else:
            # Still measured: it is the first thing to look at in a run that goes wrong.
            grad_norm = torch.nn.utils.get_total_norm(
                p.grad for p in self.model.parameters() if p.grad is not None
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.updating = False
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def export(self) -> TrainingState:
        """All that a checkpoint keeps of weights and optimizer."""
        return TrainingState(
            weights={name: p.data for name, p in self.model.named_parameters()},
            optimizer=export_state(self.model, self.optimizer),
            scaler=self.scaler.state_dict(),
        )

    def restore(self, optimizer: Mapping[str, Tensor], scaler: Mapping[str, Any]) -> None:
        """Go on with saved moments; the weights are in the model already."""
        import_state(self.model, self.optimizer, optimizer)
        if scaler:  # empty when the run computed without loss scaling so far
            self.scaler.load_state_dict(dict(scaler))


def dropout_keys(id_B: Tensor) -> Tensor:
    """64-bit sequence ids folded to the 32-bit keys dropout hashes."""
    return (id_B ^ (id_B >> 32)).to(torch.int32)
