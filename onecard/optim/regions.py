"""Where every parameter lies in the flat buffers that training works on.

Masters, moments, totals and working copies are one buffer each instead of a tensor per parameter: the
norm, the update and the clearing of gradients are a few kernels over long buffers, nothing is
allocated in a step, and a buffer can be cut into equal pieces that travel to the card and back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Size, Tensor

# Parameters begin at multiples of this: blocks of quantised states (optim/lowbit.py) never span two
# parameters, and every view is aligned for vectorised loads.
ALIGN = 256


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
    """Parameters that are stored alike."""

    name: str
    slots: tuple[Slot, ...]
    size: int  # in elements, with the gaps

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.name: slot.view(flat) for slot in self.slots}

    @property
    def is_vectors(self) -> bool:
        """Norms and biases: they do not decay, and are too small to be worth fewer bits or a journey."""
        return self.name == "vectors"


def split_regions(shapes: Mapping[str, Size], layer_matrices: Collection[str]) -> list[Region]:
    """`layers` (the matrices named), `embeddings` (other matrices), `vectors` (all the rest)."""
    names: dict[str, list[str]] = {"layers": [], "embeddings": [], "vectors": []}
    for name, shape in shapes.items():
        kind = "vectors" if len(shape) < 2 else "layers" if name in layer_matrices else "embeddings"
        names[kind].append(name)
    return [_region(kind, {n: shapes[n] for n in members}) for kind, members in names.items() if members]


def _region(kind: str, shapes: Mapping[str, Size]) -> Region:
    slots, first = [], 0
    for name, shape in shapes.items():
        slots.append(Slot(name, shape, first))
        first = slots[-1].last
    return Region(kind, tuple(slots), first)
