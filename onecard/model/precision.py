"""The number format that a run computes in."""

from __future__ import annotations

import torch

_TORCH_DTYPE = {
    "float64": torch.float64,  # for tests only
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    return _TORCH_DTYPE[name]


def choose_dtype(requested: str | None, device: str) -> tuple[str, str]:
    """(dtype, a note for the user or ''). Auto: bfloat16 where the card supports it, float32 on a CPU."""
    if not device.startswith("cuda"):
        if requested == "float16":
            # nanoGPT ignores dtype on a CPU; half precision without a GPU is neither fast nor safe.
            return "float32", "float16 needs a GPU: computing in float32 on the CPU"
        return requested or "float32", ""
    has_bf16 = card_has_bf16(device)
    if requested == "bfloat16" and not has_bf16:
        return "float16", "this card has no bfloat16: computing in float16 with loss scaling"
    return requested or ("bfloat16" if has_bf16 else "float16"), ""


def card_has_bf16(device: str) -> bool:
    """Whether this card computes in bfloat16. (torch answers for the current device.)"""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)
