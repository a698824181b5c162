"""What an update takes in passing, besides what is resident: temporaries, zeros to try it out on.

In full precision AdamW's update is one kernel and takes nothing. Muon's makes a few numbers a row, and so
does low-bit AdamW's where it is compiled; uncompiled, both make copies of what they work on. An update that
runs out half-way leaves weights between two steps, so the trainer has all of this before it begins one
(optim/optimizer.py), and its kernels are compiled on zeros of their own before the first.

Copies without the compiler are counted by watching them come and go (tests/plan/test_update.py).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from onecard.arch.layout import (
    EAGER_PIECE,
    WARM_UP_ELEMENTS,
    Setting,
    adamw_temporaries,
    is_low_bit,
    muon_batch,
    muon_bytes,
    muon_temporaries,
    padded,
    per_element,
)  # fmt: skip
from onecard.arch.parameters import groups_of
from onecard.arch.shapes import Shape
from onecard.language import N_
from onecard.plan.activations import TRYING_OUT, Moment, buffer_to_clear_with
from onecard.plan.lines import Line

UPDATE = N_("update")


def update_moments(
    shape: Shape, setting: Setting, dtype: str, *, by_muon: bool, l2_bytes: int
) -> tuple[Moment, ...]:
    """The update, and its kernels being tried out, where it takes anything."""
    temporaries, zeros = _taken_and_tried(shape, setting, dtype, by_muon)
    if not temporaries:
        return ()
    passing = Line(
        N_("the update's temporaries"), temporaries, "numbers a row; uncompiled, copies of a matrix"
    )
    scratch = Line(N_("zeros to try the update out on"), zeros, "a matrix, its gradient and its momentum")
    if not setting.compile:
        return (Moment(UPDATE, (scratch, passing)),)
    return Moment(UPDATE, (passing,)), Moment(TRYING_OUT, (scratch, passing, buffer_to_clear_with(l2_bytes)))


def update_bytes(shape: Shape, setting: Setting, dtype: str, *, by_muon: bool) -> int:
    """What an update takes in passing."""
    return _taken_and_tried(shape, setting, dtype, by_muon)[0]


def _taken_and_tried(shape: Shape, setting: Setting, dtype: str, by_muon: bool) -> tuple[int, int]:
    # A search asks for hundreds of settings, and most of them differ in what an update does not see.
    alike = Setting(
        1, 1, "none", setting.offload, setting.master_weights, setting.optim_states, setting.compile
    )
    return _update_bytes(shape, alike, dtype, by_muon)


@lru_cache(maxsize=256)
def _update_bytes(shape: Shape, setting: Setting, dtype: str, by_muon: bool) -> tuple[int, int]:
    temporaries = zeros = 0
    compiled, iterates_in = setting.compile, muon_bytes(dtype)
    for members in groups_of(shape):
        kind, size = members[0].kind, sum(p.place for p in members)
        each = per_element(kind, setting, dtype, by_muon=by_muon)
        scratch = each.accumulator + each.master + each.states
        if by_muon and kind == "layers":
            for matrix, count in Counter(p.matrix for p in members).items():
                together = muon_batch(*matrix, count, setting)
                taken = muon_temporaries(
                    *matrix, together, setting, compiled=compiled, iterates_in=iterates_in
                )
                temporaries = max(temporaries, taken.on_card)
                zeros = max(zeros, int(scratch * padded(*matrix)))
        elif kind != "vectors" and is_low_bit(setting):
            taken = adamw_temporaries(size, setting, compiled=compiled)
            temporaries = max(temporaries, taken.on_card)
            piece = WARM_UP_ELEMENTS if compiled or setting.offload != "none" else EAGER_PIECE
            zeros = max(zeros, int(scratch * min(size, piece)))
    return temporaries, zeros
