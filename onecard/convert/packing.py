"""Weights under other names, where some of our matrices are kept in parts: queries, keys and values.

A packing names, for each of our tensors, the tensors of the other program whose rows, one below the other,
are ours: one name for most, three for the packed attention matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Packing = Mapping[str, tuple[str, ...]]


def packing_of(names: Mapping[str, object], their_names: Callable[[str], tuple[str, ...]]) -> Packing:
    return {name: their_names(name) for name in names}


def shapes_there(shapes: Mapping[str, tuple[int, ...]], packing: Packing) -> dict[str, tuple[int, ...]]:
    """What the other program's tensors measure, from what ours do."""
    return {
        part: (shapes[name][0] // len(parts), *shapes[name][1:])
        for name, parts in packing.items()
        for part in parts
    }


def packed(theirs: dict[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    """Our tensors from theirs. `theirs` is emptied on the way, so that no large model is held twice."""
    ours = {}
    for name, parts in packing.items():
        found = [theirs.pop(part) for part in parts]
        ours[name] = torch.cat(found) if len(found) > 1 else found[0]
    return ours


def taken_apart(ours: Mapping[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    """Their tensors from ours; the parts are views."""
    return {
        part: piece
        for name, parts in packing.items()
        for part, piece in zip(parts, ours[name].chunk(len(parts)), strict=True)
    }
