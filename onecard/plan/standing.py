"""What training holds from its first step to its last: weights, accumulators, states; where, and how much.

The same decisions as optim/region_buffers.py makes, counted instead of allocated; a test builds the one and
compares it with the other. On the card or, offloaded, in host memory with a few pieces visiting the card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from onecard.arch.layout import ALIGN, PIECE, PIECES_ON_CARD, Setting, muon_batch, muon_bytes, per_element
from onecard.arch.parameters import Parameter, groups_of, parameters_of
from onecard.arch.shapes import Shape
from onecard.plan.lines import Line


@dataclass(frozen=True)
class Standing:
    """The lines of it, on the card and on the host."""

    card: tuple[Line, ...]
    host: tuple[Line, ...]


def standing(shape: Shape, setting: Setting, dtype: str, *, by_muon: bool, refined: bool = False) -> Standing:
    """`refined` is nanochat's Muon of 2026."""
    # A search asks for hundreds of settings, and most of them differ in what does not stand.
    alike = Setting(1, 1, "none", setting.offload, setting.master_weights, setting.optim_states)
    return _standing(shape, alike, dtype, by_muon, refined, PIECE)


@lru_cache(maxsize=256)
def _standing(
    shape: Shape, setting: Setting, dtype: str, by_muon: bool, refined: bool, piece: int
) -> Standing:
    sums = dict.fromkeys(("masters", "working", "totals", "states", "visitors"), 0.0)
    home = dict.fromkeys(("masters", "totals", "states"), 0.0)
    for members in groups_of(shape):
        kind, size = members[0].kind, sum(p.place for p in members)
        each = per_element(kind, setting, dtype, by_muon=by_muon)
        sums["working"] += size * each.working
        place = home if each.on_host else sums
        place["masters"] += size * each.master
        place["states"] += size * each.states
        (home if each.accumulators_on_host else sums)["totals"] += size * each.accumulator
        if each.on_host:
            muon = by_muon and kind == "layers"
            pieces = len(members) if muon else -(-size // piece)
            longest = max(p.place for p in members) if muon else min(piece, size)
            sums["visitors"] += min(PIECES_ON_CARD, pieces) * longest * each.offloaded
        if each.accumulators_on_host:
            layer = _largest_layer(members)
            sums["visitors"] += min(PIECES_ON_CARD, shape.n_layer) * layer * each.accumulator
    count = f"{shape.parameters:,} parameters"
    card = [
        Line("weights (masters)", int(sums["masters"]), f"{_per(sums['masters'], shape)} × {count}"),
        Line("weights to compute with", int(sums["working"]), f"{_per(sums['working'], shape)} × {count}"),
        Line("gradients", int(sums["totals"]), f"{_per(sums['totals'], shape)} × {count}"),
        Line("optimizer states", int(sums["states"]), f"{_per(sums['states'], shape)} × {count}"),
        Line(
            "visitors from host memory",
            int(sums["visitors"]),
            f"{PIECES_ON_CARD} pieces of each offloaded buffer",
        ),
    ]
    if by_muon:
        card.append(_muon_room(shape, setting, dtype, refined))
    names = {"masters": "weights (masters)", "totals": "gradients", "states": "optimizer states"}
    host = [
        Line(names[key], int(value), f"{_per(value, shape)} × {count}")
        for key, value in home.items()
        if value
    ]
    return Standing(tuple(line for line in card if line.bytes), tuple(host))


def _largest_layer(members: Sequence[Parameter]) -> int:
    layers: dict[str, int] = {}
    for parameter in members:
        number = parameter.name.split(".")[2]
        layers[number] = layers.get(number, 0) + parameter.place
    return max(layers.values())


def _muon_room(shape: Shape, setting: Setting, dtype: str, refined: bool) -> Line:
    """Two copies of what is taken together, two products of each with itself, and a variance per neuron."""
    each = muon_bytes(dtype)
    alike = Counter(p.matrix for p in parameters_of(shape) if p.kind == "layers")
    longest = products = variances = 0
    for (parts, rows, columns), count in alike.items():
        together = muon_batch(parts, rows, columns, count, setting)
        longest = max(longest, together * (-(-parts * rows * columns // ALIGN) * ALIGN))
        products = max(products, together * parts * min(rows, columns) ** 2)
        variances += count * parts * max(rows, columns) * 4 if refined else 0
    bytes_ = each * 2 * (longest + products) + variances
    return Line("Muon's room", bytes_, f"{each} × 2 × ({longest:,} + {products:,} elements)")


def _per(value: float, shape: Shape) -> str:
    return f"{value / shape.parameters:.3g} bytes"
