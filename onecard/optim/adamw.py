"""AdamW with nanoGPT's two groups: matrices and embeddings decay, norms and biases do not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from onecard.errors import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    # Fused: one kernel over all tensors on CUDA, one vectorised pass on the CPU.
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def export_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments by parameter name and the update count: a file that outlives parameter order."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if state:
            tensors |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS}
            tensors[f"step.{name}"] = torch.as_tensor(state["step"])
    return tensors


def import_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of export_state. A parameter without saved moments starts from zero, as in step 1."""
    for name, parameter in model.named_parameters():
        if f"step.{name}" not in tensors:
            continue
        moments = {m: tensors[f"{m}.{name}"] for m in _MOMENTS}
        for moment, tensor in moments.items():
            if tensor.shape != parameter.shape:
                raise UserError(
                    f"the saved optimizer state does not fit this model: {moment} of {name}",
                    f"saved {tuple(tensor.shape)}, the parameter is {tuple(parameter.shape)}",
                )
        optimizer.state[parameter] = {
            # fused AdamW keeps the count beside the parameter, on its device
            "step": tensors[f"step.{name}"].to(parameter.device, torch.float32, copy=True),
            **{m: t.to(parameter.device, parameter.dtype, copy=True) for m, t in moments.items()},
        }
