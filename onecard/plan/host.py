"""What the host hands out in a step, in launches: what a small kernel costs it, as `onecard bench` measures.

An operation costs the host more than the launch of its kernel: Python, autograd, the dispatcher; a compiled
layer costs the calls around it. Where the card is done sooner, it waits. A recorded graph is handed out at
once.

Operations are counted, views among them (tests/plan/test_host.py counts them in the models themselves). What
one of them costs, or a compiled layer, is fitted to an H200's machine in its quiet hours, and rough: hosts
differ, and shared ones from minute to minute.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from onecard.arch.layout import EAGER_PIECE, PIECE, Setting, muon_batch
from onecard.arch.parameters import Parameter, groups_of
from onecard.arch.records import RECORDS
from onecard.arch.shapes import Nanochat2026Shape, Shape

_ROUNDED_MATRIX = 35  # a gradient added to a bf16 total
_TRAVELLING_LAYER = 9  # gradient totals, to the card and back
# Of the update: for every group of parameters, every piece of AdamW in few bits, every piece from the host.
_GROUP = 26
_PIECE = {"fp32": 72, "bf16": 72, "int8": 165}
_VISITOR = 11
# Muon's: for every matrix, and for all that are taken together.
_MATRIX = {"fp32": 30, "bf16": 65, "int8": 100}
_REFINED_MATRIX, _ROUNDED_MASTER = 6, 35
_ROUND, _REFINED_ROUND = 33, 54

# From this share of a micro-batch's time on, what the host needs to hand kernels out is worth recording it.
# Where the host is the faster one a graph's kernels still follow each other more closely (plan/speed.py): at
# half of the time that was 2.3% (GPT-2 124M by 16×1024 on an H200), at a quarter it is about 1%.
HOST_BOUND = 0.25

# In launches. A layer's products and its attention cost the host more than other operations.
_PER_OPERATION, _PER_LAYER = 1.82, 57
# Of the update: of the products for all that is taken together and of what 2026 does around them, of what is
# done matrix by matrix, of moving numbers here from the host and back (streams wait for each other), of
# everything else; and a compiled call.
_PER_PRODUCT, _PER_REFINED, _PER_MATRIX, _PER_VISITOR, _PER_OTHER = 2.4, 2.3, 0.85, 3.0, 1.4
_COMPILED_CALL = 4.3
_COMPILED_MATRIX = 8  # operations around the two calls of each
_REPLAY = 85


def is_recorded(shape: Shape, setting: Setting, launch: float, on_card: float) -> bool:
    """A micro-batch that the card computes in `on_card` if it is not."""
    if setting.cuda_graphs is not None or not setting.may_capture:
        return setting.may_capture
    return micro_batch_launches(shape, setting) * launch >= HOST_BOUND * on_card


def handing_out(shape: Shape, setting: Setting, launch: float, *, recorded: bool) -> float:
    """Seconds of the host for a micro-batch."""
    return launch * (_REPLAY if recorded else micro_batch_launches(shape, setting))


def micro_batch_launches(shape: Shape, setting: Setting) -> float:
    """For one micro-batch, whatever its size, if it is not recorded."""
    record = RECORDS[shape.arch]
    if not setting.compile:
        return _PER_OPERATION * micro_batch_operations(shape, setting) + _PER_LAYER * shape.n_layer
    travelling = _TRAVELLING_LAYER * shape.n_layer if setting.offload == "gradients" else 0
    layers = record.compiled_launches[setting.recompute] * shape.n_layer
    return layers + _PER_OPERATION * (record.other_operations + travelling)


def micro_batch_operations(shape: Shape, setting: Setting) -> float:
    """Without the compiler."""
    record = RECORDS[shape.arch]
    found = record.other_operations + record.operations[setting.recompute] * shape.n_layer
    if setting.offload == "gradients":
        found += _TRAVELLING_LAYER * shape.n_layer
    elif setting.master_weights == "bf16":
        found += sum(_ROUNDED_MATRIX * len(m) for m in groups_of(shape) if m[0].kind == "layers")
    return found


@dataclass(frozen=True)
class Handed:
    """What the update of one group of parameters hands out: operations by what they cost, compiled calls."""

    others: int
    products: int = 0
    refined: int = 0
    by_matrix: int = 0
    visitors: int = 0
    calls: int = 0

    @property
    def operations(self) -> int:
        return self.others + self.products + self.refined + self.by_matrix + self.visitors

    @property
    def launches(self) -> float:
        return (
            _PER_OTHER * self.others + _PER_PRODUCT * self.products + _PER_REFINED * self.refined
            + _PER_MATRIX * self.by_matrix + _PER_VISITOR * self.visitors + _COMPILED_CALL * self.calls
        )  # fmt: skip


def update_by_group(shape: Shape, setting: Setting, *, by_muon: bool) -> tuple[Handed, ...]:
    """In the order of `groups_of`, which is the update's."""
    # Most settings that are compared differ in what an update does not see.
    alike = Setting(
        1, 1, "none", setting.offload, setting.master_weights, setting.optim_states, setting.compile
    )
    return _update_by_group(shape, alike, by_muon)


@lru_cache(maxsize=256)
def _update_by_group(shape: Shape, setting: Setting, by_muon: bool) -> tuple[Handed, ...]:
    found = []
    for members in groups_of(shape):
        kind, size = members[0].kind, sum(p.place for p in members)
        if by_muon and kind == "layers":
            found.append(_muon(members, setting, isinstance(shape, Nanochat2026Shape)))
        else:
            found.append(_adamw(size, setting) if kind != "vectors" else Handed(_GROUP))
    return tuple(found)


def _adamw(size: int, setting: Setting) -> Handed:
    """In full precision one kernel does it, wherever the numbers come from."""
    visits = -(-size // PIECE) if setting.offload != "none" else 0
    low_bit = setting.master_weights == "bf16" or setting.optim_states == "int8"
    if not low_bit:
        return Handed(_GROUP, visitors=_VISITOR * visits)
    if setting.compile:
        return Handed(_GROUP, visitors=_VISITOR * visits, calls=max(1, visits))
    pieces = visits or -(-size // EAGER_PIECE)
    return Handed(_GROUP + _PIECE[setting.optim_states] * pieces, visitors=_VISITOR * visits)


def _muon(members: tuple[Parameter, ...], setting: Setting, refined: bool) -> Handed:
    alike = Counter(parameter.matrix for parameter in members)
    rounds = sum(-(-n // muon_batch(*matrix, n, setting)) for matrix, n in alike.items())
    products = {"refined": rounds * _REFINED_ROUND} if refined else {"products": rounds * _ROUND}
    visitors = len(members) * (_VISITOR if setting.offload != "none" else 0)
    each, calls = _COMPILED_MATRIX, 2 * len(members)
    if not setting.compile:
        each, calls = _MATRIX[setting.optim_states] + (_REFINED_MATRIX if refined else 0), 0
        each += _ROUNDED_MASTER if setting.master_weights == "bf16" else 0
    return Handed(_GROUP, by_matrix=each * len(members), visitors=visitors, calls=calls, **products)
