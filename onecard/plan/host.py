"""Kernel launches of a step, in launches of a small kernel, whose time `onecard bench` measures.

An operation costs the CPU more than the launch of its kernel: Python, autograd, the dispatcher; a compiled
layer costs the calls around it. Where the card is done sooner, the run is launch-bound. A CUDA graph is
replayed with one launch.

Operations are counted, views among them (tests/plan/test_host.py counts them in the models themselves). What
one of them costs, or a compiled layer, is fitted to an H200's machine with nothing else on it, and rough:
CPUs differ, and shared ones from minute to minute.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from onecard.arch.layout import EAGER_PIECE, PIECE, Setting, muon_batch
from onecard.arch.parameters import Parameter, groups_of
from onecard.arch.records import RECORDS
from onecard.arch.shapes import Nanochat2026Shape, Shape
from onecard.plan import dropout as masks

_ROUNDED_MATRIX = 35  # a gradient added to a bf16 accumulator
_STREAMED_LAYER = 9  # gradient accumulators, to the card and back
# Of the update: for every group of parameters, piece of AdamW in few bits, and piece that is streamed.
_GROUP = 26
_PIECE = {"fp32": 72, "bf16": 72, "int8": 165}
_STREAMED_PIECE = 11
# Muon's: for every matrix, and for all that are taken together.
_MATRIX = {"fp32": 30, "bf16": 65, "int8": 100}
_REFINED_MATRIX, _ROUNDED_MASTER = 6, 35
_ROUND, _REFINED_ROUND = 33, 54

# A micro-batch is captured as a CUDA graph where launches take at least this share of its time. Even where
# they are the faster ones, kernels of a graph follow each other more closely (plan/speed.py): at half of the
# time that was 2.3% (GPT-2 124M by 16×1024 on an H200), at a quarter it is about 1%.
LAUNCH_BOUND = 0.25

# In launches. A layer's products and its attention cost the CPU more than other operations.
_PER_OPERATION, _PER_LAYER = 1.82, 57
# Of the update: of the products for all that is taken together and of what 2026 does around them, of what is
# done matrix by matrix, of streaming from host memory and back (CUDA streams wait for each other), of
# everything else; and a compiled call.
_PER_PRODUCT, _PER_REFINED, _PER_MATRIX, _PER_STREAMED, _PER_OTHER = 2.4, 2.3, 0.85, 3.0, 1.4
_COMPILED_CALL = 4.3
_COMPILED_MATRIX = 8  # operations around the two calls of each
_REPLAY = 85


def is_captured(
    shape: Shape, setting: Setting, launch: float, on_card: float, *, dropout: float = 0.0
) -> bool:
    """Captured as a CUDA graph? `on_card` are the seconds of the card for the micro-batch without one."""
    if setting.cuda_graphs is not None or not setting.may_capture:
        return setting.may_capture
    return micro_batch_launches(shape, setting, dropout) * launch >= LAUNCH_BOUND * on_card


def launch_seconds(
    shape: Shape, setting: Setting, launch: float, *, captured: bool, dropout: float = 0.0
) -> float:
    """Seconds of the CPU for the launches of a micro-batch."""
    return launch * (_REPLAY if captured else micro_batch_launches(shape, setting, dropout))


def micro_batch_launches(shape: Shape, setting: Setting, dropout: float = 0.0) -> float:
    """Launches of one micro-batch, whatever its size, without a CUDA graph."""
    record = RECORDS[shape.arch]
    if not setting.compile:
        return _PER_OPERATION * micro_batch_operations(shape, setting, dropout) + _PER_LAYER * shape.n_layer
    streamed = _STREAMED_LAYER * shape.n_layer if setting.offload == "gradients" else 0
    layers = record.compiled_launches[setting.recompute] * shape.n_layer
    more = masks.launches(shape, setting) if dropout else 0
    return layers + more + _PER_OPERATION * (record.other_operations + streamed)


def micro_batch_operations(shape: Shape, setting: Setting, dropout: float = 0.0) -> float:
    """Operations of one micro-batch without the compiler."""
    record = RECORDS[shape.arch]
    found = record.other_operations + record.operations[setting.recompute] * shape.n_layer
    found += masks.operations(shape, setting) if dropout else 0
    if setting.offload == "gradients":
        found += _STREAMED_LAYER * shape.n_layer
    elif setting.master_weights == "bf16":
        found += sum(_ROUNDED_MATRIX * len(m) for m in groups_of(shape) if m[0].kind == "layers")
    return found


@dataclass(frozen=True)
class Launches:
    """The update of one group of parameters: operations by what they cost, and compiled calls."""

    others: int
    products: int = 0
    refined: int = 0
    by_matrix: int = 0
    streamed: int = 0
    calls: int = 0

    @property
    def operations(self) -> int:
        return self.others + self.products + self.refined + self.by_matrix + self.streamed

    @property
    def cost(self) -> float:
        return (
            _PER_OTHER * self.others + _PER_PRODUCT * self.products + _PER_REFINED * self.refined
            + _PER_MATRIX * self.by_matrix + _PER_STREAMED * self.streamed + _COMPILED_CALL * self.calls
        )  # fmt: skip


def update_launches(shape: Shape, setting: Setting, *, by_muon: bool) -> tuple[Launches, ...]:
    """Launches by group, in the order of `groups_of`, which is the update's."""
    # Most settings that are compared differ in what an update does not see.
    alike = Setting(
        1, 1, "none", setting.offload, setting.master_weights, setting.optim_states, setting.compile
    )
    return _update_launches(shape, alike, by_muon)


@lru_cache(maxsize=256)
def _update_launches(shape: Shape, setting: Setting, by_muon: bool) -> tuple[Launches, ...]:
    found = []
    for members in groups_of(shape):
        kind, size = members[0].kind, sum(p.place for p in members)
        if by_muon and kind == "layers":
            found.append(_muon(members, setting, isinstance(shape, Nanochat2026Shape)))
        else:
            found.append(_adamw(size, setting) if kind != "vectors" else Launches(_GROUP))
    return tuple(found)


def _adamw(size: int, setting: Setting) -> Launches:
    """One kernel in full precision, wherever the numbers come from."""
    visits = -(-size // PIECE) if setting.offload != "none" else 0
    low_bit = setting.master_weights == "bf16" or setting.optim_states == "int8"
    if not low_bit:
        return Launches(_GROUP, streamed=_STREAMED_PIECE * visits)
    if setting.compile:
        return Launches(_GROUP, streamed=_STREAMED_PIECE * visits, calls=max(1, visits))
    pieces = visits or -(-size // EAGER_PIECE)
    return Launches(_GROUP + _PIECE[setting.optim_states] * pieces, streamed=_STREAMED_PIECE * visits)


def _muon(members: tuple[Parameter, ...], setting: Setting, refined: bool) -> Launches:
    alike = Counter(parameter.matrix for parameter in members)
    rounds = sum(-(-n // muon_batch(*matrix, n, setting)) for matrix, n in alike.items())
    products = {"refined": rounds * _REFINED_ROUND} if refined else {"products": rounds * _ROUND}
    streamed = len(members) * (_STREAMED_PIECE if setting.offload != "none" else 0)
    each, calls = _COMPILED_MATRIX, 2 * len(members)
    if not setting.compile:
        each, calls = _MATRIX[setting.optim_states] + (_REFINED_MATRIX if refined else 0), 0
        each += _ROUNDED_MASTER if setting.master_weights == "bf16" else 0
    return Launches(_GROUP, by_matrix=each * len(members), streamed=streamed, calls=calls, **products)
