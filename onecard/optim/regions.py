"""Where every parameter lies in the flat buffers of training.

Masters, states, accumulators and working copies are one buffer each instead of a tensor per parameter. The
norm, the update and the clearing of gradients are then a few kernels over long buffers, nothing is allocated
in a step, and an offloaded buffer can be streamed in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Size, Tensor

from onecard.arch.layout import ALIGN, PIECE
from onecard.optim.rules import MuonRule, Rule, Rules


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its region."""

    name: str
    shape: Size
    first: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def last(self) -> int:
        """Where the next parameter may begin."""
        return self.first + -(-self.count // ALIGN) * ALIGN

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.first : self.first + self.count].view(self.shape)


@dataclass(frozen=True)
class Region:
    """Parameters that are stored alike and learn by the same rule.

    `kind` is layers (matrices inside layers), embeddings (other matrices) or vectors (all the rest).
    """

    kind: str
    rule: Rule
    slots: tuple[Slot, ...]
    size: int  # in elements, with gaps

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.name: slot.view(flat) for slot in self.slots}

    @property
    def is_vectors(self) -> bool:
        """Whether these are norms and biases: too small to store in few bits or to offload."""
        return self.kind == "vectors"

    @property
    def by_muon(self) -> bool:
        return isinstance(self.rule, MuonRule)

    def spans(self) -> list[tuple[int, int]]:
        """(first, count) of the pieces an update streams: whole matrices where the rule needs them."""
        if isinstance(self.rule, MuonRule):
            return [(slot.first, slot.last - slot.first) for slot in self.slots]
        return [(first, min(PIECE, self.size - first)) for first in range(0, self.size, PIECE)]


def split_regions(shapes: Mapping[str, Size], layer_matrices: Collection[str], rules: Rules) -> list[Region]:
    """Regions of layers, embeddings and vectors, each split by rule."""
    members: dict[tuple[str, Rule], dict[str, Size]] = {}
    for name, shape in shapes.items():
        kind = "vectors" if len(shape) < 2 else "layers" if name in layer_matrices else "embeddings"
        members.setdefault((kind, rules(name, shape)), {})[name] = shape
    order = ("layers", "embeddings", "vectors")
    keys = sorted(members, key=lambda key: order.index(key[0]))  # stable: rules in order of appearance
    return [_region(*key, members[key]) for key in keys]


def _region(kind: str, rule: Rule, shapes: Mapping[str, Size]) -> Region:
    slots, first = [], 0
    for name, shape in shapes.items():
        slots.append(Slot(name, shape, first))
        first = slots[-1].last
    return Region(kind, rule, tuple(slots), first)
