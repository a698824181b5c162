"""What the host hands out in a step, in launches: what a small kernel costs it, as `onecard bench` measures.

An operation costs the host more than the launch of its kernel: Python, autograd, the dispatcher; a compiled
layer costs the calls around it. Where the card is done sooner, it waits. A recorded graph is handed out at
once.

Operations are counted, views among them (tests/plan/test_host.py counts them in the models themselves). What
one of them costs, or a compiled layer, is fitted to an H200's machine and rough: hosts differ, and shared
ones from minute to minute.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from onecard.plan.settings import Setting
from onecard.plan.standing import PIECE, muon_batch
from onecard.plan.tensors import Parameter, groups_of
from onecard.shapes import Nanochat2026Shape, Shape

# Eager arithmetic makes copies of what it works on: this many elements at a time.
EAGER_PIECE = 2**20

# Operations of a layer's two passes without the compiler, and of all else in a micro-batch.
_LAYER = {
    "gpt2": {"none": 86, "mlp": 93, "block": 111},
    "nanochat-2025": {"none": 220, "mlp": 231, "block": 282},
    "nanochat-2026": {"none": 290, "mlp": 301, "block": 370},
}
_BESIDE = {"gpt2": 69, "nanochat-2025": 100, "nanochat-2026": 175}
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

# From this share of the time on, what the host needs to hand kernels out shows: they overlap, not perfectly.
HOST_BOUND = 0.5

# In launches. An operation of a model runs through Python and autograd, one of the update does not.
_PER_OPERATION = 2.4
_PER_UPDATE_OPERATION = 1.3
_COMPILED_LAYER = {
    "gpt2": {"none": 160, "mlp": 165, "block": 172},
    "nanochat-2025": {"none": 175, "mlp": 180, "block": 230},
    "nanochat-2026": {"none": 190, "mlp": 190, "block": 270},
}
_COMPILED_CALL = 10
_COMPILED_MATRIX = 8  # operations around the two calls of each
_REPLAY = 60


def handing_out(shape: Shape, setting: Setting, launch: float, on_card: float) -> float:
    """Seconds of the host for a micro-batch that the card computes in `on_card`."""
    if not setting.may_record:
        return micro_batch_launches(shape, setting) * launch
    replayed, plain = _REPLAY * launch, micro_batch_launches(shape, setting) * launch
    if setting.cuda_graphs is None and plain < HOST_BOUND * on_card:
        return plain
    return replayed


def micro_batch_launches(shape: Shape, setting: Setting) -> float:
    """For one micro-batch, whatever its size, if it is not recorded."""
    if not setting.compile:
        return _PER_OPERATION * micro_batch_operations(shape, setting)
    travelling = _TRAVELLING_LAYER * shape.n_layer if setting.offload == "gradients" else 0
    layers = _COMPILED_LAYER[shape.arch][setting.recompute] * shape.n_layer
    return layers + _PER_OPERATION * (_BESIDE[shape.arch] + travelling)


def micro_batch_operations(shape: Shape, setting: Setting) -> int:
    """Without the compiler."""
    found = _BESIDE[shape.arch] + _LAYER[shape.arch][setting.recompute] * shape.n_layer
    if setting.offload == "gradients":
        found += _TRAVELLING_LAYER * shape.n_layer
    elif setting.master_weights == "bf16":
        found += sum(_ROUNDED_MATRIX * len(m) for m in groups_of(shape) if m[0].kind == "layers")
    return found


def update_launches(shape: Shape, setting: Setting, *, by_muon: bool) -> float:
    operations, calls = update_operations(shape, setting, by_muon=by_muon)
    return _PER_UPDATE_OPERATION * operations + _COMPILED_CALL * calls


def update_operations(shape: Shape, setting: Setting, *, by_muon: bool) -> tuple[int, int]:
    """And how often compiled code is called."""
    # Most settings that are compared differ in what an update does not see.
    alike = Setting(
        1, 1, "none", setting.offload, setting.master_weights, setting.optim_states, setting.compile
    )
    return _update_operations(shape, alike, by_muon)


@lru_cache(maxsize=256)
def _update_operations(shape: Shape, setting: Setting, by_muon: bool) -> tuple[int, int]:
    operations = calls = 0
    for members in groups_of(shape):
        kind, size = members[0].kind, sum(p.place for p in members)
        operations += _GROUP
        if by_muon and kind == "layers":
            refined = isinstance(shape, Nanochat2026Shape)
            more, compiled = _muon(members, setting, refined)
        else:
            more, compiled = _adamw(size, setting) if kind != "vectors" else (0, 0)
        operations, calls = operations + more, calls + compiled
    return operations, calls


def _adamw(size: int, setting: Setting) -> tuple[int, int]:
    """Beside what every group takes: in full precision one kernel does it, wherever the numbers come from."""
    visits = -(-size // PIECE) if setting.offload != "none" else 0
    low_bit = setting.master_weights == "bf16" or setting.optim_states == "int8"
    if not low_bit:
        return _VISITOR * visits, 0
    if setting.compile:
        return _VISITOR * visits, max(1, visits)
    pieces = visits or -(-size // EAGER_PIECE)
    return _VISITOR * visits + _PIECE[setting.optim_states] * pieces, 0


def _muon(members: tuple[Parameter, ...], setting: Setting, refined: bool) -> tuple[int, int]:
    alike = Counter(parameter.matrix for parameter in members)
    rounds = sum(-(-n // muon_batch(*matrix, n, setting)) for matrix, n in alike.items())
    operations = rounds * (_REFINED_ROUND if refined else _ROUND)
    operations += len(members) * (_VISITOR if setting.offload != "none" else 0)
    if setting.compile:
        return operations + _COMPILED_MATRIX * len(members), 2 * len(members)
    each = _MATRIX[setting.optim_states] + (_REFINED_MATRIX if refined else 0)
    each += _ROUNDED_MASTER if setting.master_weights == "bf16" else 0
    return operations + each * len(members), 0
