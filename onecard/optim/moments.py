"""Moments in checkpoints: by parameter name, in the format they were stored, readable into any storage.

A run saved with int8 moments continues with fp32 ones and the reverse. Continued with the same storage, it
is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import pad

from onecard.arch.layout import BLOCK
from onecard.errors import UserError
from onecard.language import _
from onecard.optim.lowbit import Int8State, decode, encode_first, encode_second
from onecard.optim.regions import Slot

State = Tensor | Int8State
MOMENTS = ("exp_avg", "exp_avg_sq")


def export_moment(slot: Slot, moment: str, state: State) -> dict[str, Tensor]:
    """One parameter's moment as named tensors."""
    if isinstance(state, Int8State):
        return {
            f"{moment}.{slot.name}": slot.view(state.codes),
            f"{moment}_scale.{slot.name}": _scales(slot, state.scales),
        }
    return {f"{moment}.{slot.name}": slot.view(state)}


def import_moment(slot: Slot, moment: str, into: State, tensors: Mapping[str, Tensor]) -> None:
    """Fill one parameter's moment, converted where the storage has changed."""
    saved = tensors.get(f"{moment}.{slot.name}")
    if saved is None or saved.shape != slot.shape:
        why = _("it is missing, the parameter is {shape}; was it trained by another optimizer?")
        if saved is not None:
            why = _("it is saved as {found}, the parameter is {shape}; was it trained by another optimizer?")
        found = str(tuple(saved.shape)) if saved is not None else ""
        raise UserError(
            _("the saved optimizer state does not fit this model: {moment} of {name}").format(
                moment=moment, name=slot.name
            ),
            why.format(found=found, shape=str(tuple(slot.shape))),
            _("continue with the optimizer it was saved with, or start a new run from its weights:")
            + "\n--init_from=./OLD_FOLDER --out_dir=NEW_FOLDER",
        )
    scale = tensors.get(f"{moment}_scale.{slot.name}")
    if not isinstance(into, Int8State):
        slot.view(into).copy_(read_moment(slot.name, moment, tensors))
        return
    if scale is not None:
        codes = saved
    else:
        encode = encode_second if moment == "exp_avg_sq" else encode_first
        state = encode(_padded(saved.float()), None)
        codes, scale = state.codes[: slot.count].view(slot.shape), state.scales
    slot.view(into.codes).copy_(codes)
    _scales(slot, into.scales).copy_(scale)


def read_moment(name: str, moment: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A saved moment in full precision, from whatever format."""
    saved, scale = tensors[f"{moment}.{name}"], tensors.get(f"{moment}_scale.{name}")
    if scale is None:
        return saved
    return decode(Int8State(_padded(saved), scale))[: saved.numel()].view(saved.shape)


def _scales(slot: Slot, scales: Tensor) -> Tensor:
    return scales[slot.first // BLOCK : -(-(slot.first + slot.count) // BLOCK)]


def _padded(tensor: Tensor) -> Tensor:
    """The tensor, flat and padded with zeros to a whole number of blocks."""
    flat = tensor.reshape(-1)
    return pad(flat, (0, -flat.numel() % BLOCK))
