"""nanoGPT's `ckpt.pt`, in and out: weights, Adam's moments and where the run stood.

A checkpoint of nanoGPT is a pickle, and a pickle may run any program. It is read here through
PyTorch's restricted unpickler, which knows tensors and plain values only, so a file from a stranger
can be wrong but not harmful. What came off the file is then checked against what `model_args` promise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.arch.shapes import GPT2Shape
from onecard.convert.reading import (
    EMBEDDING,
    HEAD,
    checked_tensors,
    is_mask_buffer,
    load_without_executing,
    named_tensors,
    parameter_shapes,
    plain_name,
    replacing,
    same_values,
    shown,
    sizes_in,
)
from onecard.errors import UserError
from onecard.language import _

# nanoGPT starts from this "best loss" before it has evaluated anything.
_NO_LOSS_YET = 1e9

_SIZES = {name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")}


@dataclass
class NanoGPTCheckpoint:
    """What a nanoGPT run leaves behind. Tensors that were read lie in the file's mapped pages."""

    shape: GPT2Shape
    tensors: dict[str, Tensor]  # by name, without the tied head
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # exp_avg, exp_avg_sq by name
    optimizer_step: int = 0
    step: int = 0
    best_val_loss: float | None = None
    config: dict[str, Any] = field(default_factory=dict)


def read_nanogpt_checkpoint(path: Path) -> NanoGPTCheckpoint:
    saved = load_without_executing(path)
    missing = [key for key in ("model_args", "model") if not isinstance(saved, dict) or key not in saved]
    if missing:
        raise UserError(
            _("{path} is not a checkpoint of nanoGPT").format(path=path),
            _("it lacks: {names}").format(names=", ".join(missing)),
            _("give the ckpt.pt that nanoGPT's train.py wrote into its out_dir"),
        )
    found = {
        plain_name(name): tensor
        for name, tensor in named_tensors(saved["model"], path).items()
        if not is_mask_buffer(name)
    }
    shape = _shape_of(saved["model_args"], n_tensors=len(found), where=path)
    shapes = parameter_shapes(shape)
    head = found.pop(HEAD, None)
    tensors = checked_tensors(found, shapes, path)
    if head is not None and not same_values(head, tensors[EMBEDDING]):
        raise UserError(
            _("{path} has an output head of its own").format(path=path),
            _(
                "'{one}' differs from '{other}'; onecard's GPT-2 uses one tensor for both, as nanoGPT "
                "has since January 2023"
            ).format(one=HEAD, other=EMBEDDING),
        )
    moments, optimizer_step, sorted_layout = _moments_of(saved.get("optimizer"), shapes, path)
    if sorted_layout:  # so it is from before 6 May 2023, when GELU was still computed by tanh
        shape = replace(shape, gelu_tanh=True)
    own_mark = saved.get("onecard")
    if isinstance(own_mark, dict) and isinstance(own_mark.get("gelu_tanh"), bool):
        shape = replace(shape, gelu_tanh=own_mark["gelu_tanh"])
    best = _number(saved.get("best_val_loss"))
    config = saved.get("config")
    return NanoGPTCheckpoint(
        shape=shape,
        tensors=tensors,
        moments=moments,
        optimizer_step=optimizer_step,
        step=int(_number(saved.get("iter_num")) or 0),
        best_val_loss=None if best is None or best >= _NO_LOSS_YET else best,
        config=_plain_values(config) if isinstance(config, dict) else {},
    )


def write_nanogpt_checkpoint(path: Path, checkpoint: NanoGPTCheckpoint) -> None:
    """Write a `ckpt.pt` from which nanoGPT resumes, in one go: an interrupted write leaves the old file.

    The learning rate, betas and weight decay of the saved optimizer come from `checkpoint.config`,
    or are nanoGPT's defaults. nanoGPT always computes GELU exactly: a model with gelu_tanh goes on
    there with slightly other numbers (as OpenAI's weights do), and comes back here unchanged.
    """
    shapes = parameter_shapes(checkpoint.shape)
    assert set(checkpoint.tensors) == set(shapes)
    assert not checkpoint.moments or set(checkpoint.moments) == set(shapes)
    weights = {name: _compact(checkpoint.tensors[name]) for name in shapes}
    shape = checkpoint.shape.to_json()
    gelu_tanh = shape.pop("gelu_tanh")
    saved = {
        "model": {**weights, HEAD: weights[EMBEDDING]},
        "optimizer": _adamw_state_dict(checkpoint, shapes),
        "model_args": {**shape, "dropout": float(checkpoint.config.get("dropout", 0.0))},
        "iter_num": checkpoint.step,
        "best_val_loss": _NO_LOSS_YET if checkpoint.best_val_loss is None else checkpoint.best_val_loss,
        "config": _plain_values(checkpoint.config),
        "onecard": {"gelu_tanh": gelu_tanh},  # nanoGPT reads only the keys it knows
    }
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        torch.save(saved, file)
        file.flush()
        os.fsync(file.fileno())


def _shape_of(model_args: object, n_tensors: int, where: Path) -> GPT2Shape:
    if not isinstance(model_args, dict):
        raise UserError(
            _("{path} is not a checkpoint of nanoGPT").format(path=where),
            _("its 'model_args' are not a dictionary"),
        )
    sizes = sizes_in(model_args, _SIZES, n_tensors, where)
    # The activation is not recorded. nanoGPT computed GELU by tanh until 17 May 2023, and 'bias' is
    # recorded since 27 January of that year.
    return GPT2Shape(**sizes, bias=bool(model_args.get("bias", True)), gelu_tanh="bias" not in model_args)


def _groups(shapes: Mapping[str, tuple[int, ...]], sorted_layout: bool) -> tuple[list[str], list[str]]:
    """The parameters in AdamW's two groups, decayed and not, in the order of their numbers."""
    if sorted_layout:  # until May 2023: embeddings not decayed, names in alphabetical order
        decayed = sorted(
            n for n, s in shapes.items() if len(s) >= 2 and not n.endswith(("wte.weight", "wpe.weight"))
        )
        return decayed, sorted(set(shapes) - set(decayed))
    return [n for n, s in shapes.items() if len(s) >= 2], [n for n, s in shapes.items() if len(s) < 2]


def _moments_of(
    optimizer: Any, shapes: Mapping[str, tuple[int, ...]], where: Path
) -> tuple[dict[str, tuple[Tensor, Tensor]], int, bool]:
    """Adam's moments by name, its step, and whether the groups are those from before May 2023."""
    if optimizer is None:
        return {}, 0, False

    def not_nanogpts(why: str) -> UserError:
        return UserError(
            _("the optimizer state in {path} is not that of nanoGPT's AdamW").format(path=where),
            why,
            _("to go on with the weights alone, delete the entry 'optimizer' from the checkpoint"),
        )

    try:
        groups, state = optimizer["param_groups"], optimizer["state"]
        lengths = [len(group["params"]) for group in groups]
    except (KeyError, TypeError, ValueError) as error:
        raise not_nanogpts(_("it does not look like the state of a torch.optim optimizer")) from error
    for sorted_layout in (False, True):
        names = _groups(shapes, sorted_layout)
        if lengths == list(map(len, names)):
            break
    else:
        raise not_nanogpts(_("its parameter groups have sizes {value}").format(value=shown(lengths)))
    if not isinstance(state, dict):
        raise not_nanogpts(_("it does not look like the state of a torch.optim optimizer"))
    ids = [list(group["params"]) for group in groups]
    if not state:
        return {}, 0, sorted_layout
    first_moments, second_moments, steps = {}, {}, set()
    for name, number in zip([*names[0], *names[1]], [*ids[0], *ids[1]], strict=True):
        entry = state.get(number) if isinstance(number, int) else None
        if not isinstance(entry, dict) or not {"step", "exp_avg", "exp_avg_sq"} <= set(entry):
            raise not_nanogpts(_("'{name}' has no exp_avg, exp_avg_sq and step").format(name=name))
        first_moments[name], second_moments[name] = entry["exp_avg"], entry["exp_avg_sq"]
        steps.add(_number(entry["step"]))
    inside = f"the optimizer state of {where}"
    first = checked_tensors(named_tensors(first_moments, inside), shapes, inside)
    second = checked_tensors(named_tensors(second_moments, inside), shapes, inside)
    if len(steps) != 1 or None in steps:
        raise not_nanogpts(_("its parameters have not all made the same number of steps"))
    return {name: (first[name], second[name]) for name in shapes}, int(steps.pop() or 0), sorted_layout


def _adamw_state_dict(checkpoint: NanoGPTCheckpoint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    config, (decayed, undecayed) = checkpoint.config, _groups(shapes, sorted_layout=False)
    decay = float(config.get("weight_decay", 0.1))
    # An optimizer that owns no memory, for the fields which this version of PyTorch gives its groups.
    parameters = {name: torch.nn.Parameter(torch.empty(size, device="meta")) for name, size in shapes.items()}
    saved = torch.optim.AdamW(
        [
            {"params": [parameters[n] for n in decayed], "weight_decay": decay},
            {"params": [parameters[n] for n in undecayed], "weight_decay": 0.0},
        ],
        lr=float(config.get("learning_rate", 6e-4)),
        betas=(float(config.get("beta1", 0.9)), float(config.get("beta2", 0.95))),
    ).state_dict()
    if "cuda" in str(config.get("device", "")):
        # Loading a state takes over its groups' switches: without this nanoGPT would go on unfused.
        for group in saved["param_groups"]:
            group["fused"] = True
    if checkpoint.moments:
        # A step tensor each: AdamW counts in place, so a shared one would run ahead.
        saved["state"] = {
            number: {
                "step": torch.tensor(float(checkpoint.optimizer_step)),
                "exp_avg": _compact(checkpoint.moments[name][0]),
                "exp_avg_sq": _compact(checkpoint.moments[name][1]),
            }
            for number, name in enumerate([*decayed, *undecayed])
        }
    return saved


def _compact(tensor: Tensor) -> Tensor:
    """fp32 on the CPU, in a storage of its own: torch.save writes all of a storage, even for a slice."""
    plain = tensor.detach().to("cpu", torch.float32).contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.numel() * plain.itemsize else plain.clone()


def _plain_values(config: Mapping[Any, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    return {key: value for key, value in config.items() if isinstance(key, str) and isinstance(value, plain)}


def _number(value: object) -> float | None:
    """nanoGPT's best loss is a tensor, and AdamW's step a number or a tensor, by version."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    return value if isinstance(value, int | float) and math.isfinite(value) else None
