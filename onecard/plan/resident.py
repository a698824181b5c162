"""What is resident from the first step to the last: weights, gradient accumulators, states; where, how much.

The same decisions as optim/region_buffers.py makes, counted instead of allocated; a test compares the two. On
the card or, offloaded, in host memory with a few pieces streamed to the card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from onecard.arch.layout import ALIGN, PIECE, PIECES_ON_CARD, Setting, muon_batch, muon_bytes, per_element
from onecard.arch.parameters import Parameter, groups_of, parameters_of
from onecard.arch.shapes import Shape
from onecard.language import N_
from onecard.plan.lines import Line


@dataclass(frozen=True)
class Resident:
    """Lines of the bill, on the card and in host memory."""

    card: tuple[Line, ...]
    host: tuple[Line, ...]


def resident(shape: Shape, setting: Setting, dtype: str, *, by_muon: bool, refined: bool = False) -> Resident:
    """`refined` is nanochat's Muon of 2026."""
    # A search asks for hundreds of settings, and most of them differ in what is not resident.
    alike = Setting(1, 1, "none", setting.offload, setting.master_weights, setting.optim_states)
    return _resident(shape, alike, dtype, by_muon, refined, PIECE)


@lru_cache(maxsize=256)
def _resident(
    shape: Shape, setting: Setting, dtype: str, by_muon: bool, refined: bool, piece: int
) -> Resident:
    sums = dict.fromkeys(("masters", "working", "accumulators", "states", "streamed"), 0.0)
    host = dict.fromkeys(("masters", "accumulators", "states"), 0.0)
    for members in groups_of(shape):
        kind, size = members[0].kind, sum(p.place for p in members)
        each = per_element(kind, setting, dtype, by_muon=by_muon)
        sums["working"] += size * each.working
        place = host if each.on_host else sums
        place["masters"] += size * each.master
        place["states"] += size * each.states
        (host if each.accumulators_on_host else sums)["accumulators"] += size * each.accumulator
        if each.on_host:
            muon = by_muon and kind == "layers"
            pieces = len(members) if muon else -(-size // piece)
            longest = max(p.place for p in members) if muon else min(piece, size)
            sums["streamed"] += min(PIECES_ON_CARD, pieces) * longest * each.offloaded
        if each.accumulators_on_host:
            layer = _largest_layer(members)
            sums["streamed"] += min(PIECES_ON_CARD, shape.n_layer) * layer * each.accumulator
    count = f"{shape.parameters:,} parameters"
    card = [
        Line(N_("weights (masters)"), int(sums["masters"]), f"{_per(sums['masters'], shape)} × {count}"),
        Line(
            N_("weights to compute with"), int(sums["working"]), f"{_per(sums['working'], shape)} × {count}"
        ),
        Line(N_("gradients"), int(sums["accumulators"]), f"{_per(sums['accumulators'], shape)} × {count}"),
        Line(N_("optimizer states"), int(sums["states"]), f"{_per(sums['states'], shape)} × {count}"),
        Line(
            N_("buffers streamed from RAM"),
            int(sums["streamed"]),
            f"{PIECES_ON_CARD} pieces of each offloaded buffer",
        ),
    ]
    if by_muon:
        card.append(_muon_room(shape, setting, dtype, refined))
    names = {"masters": "weights (masters)", "accumulators": "gradients", "states": "optimizer states"}
    host_lines = [
        Line(names[key], int(value), f"{_per(value, shape)} × {count}")
        for key, value in host.items()
        if value
    ]
    return Resident(tuple(line for line in card if line.bytes), tuple(host_lines))


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
    return Line(N_("Muon's room"), bytes_, f"{each} × 2 × ({longest:,} + {products:,} elements)")


def _per(value: float, shape: Shape) -> str:
    return f"{value / shape.parameters:.3g} bytes"
