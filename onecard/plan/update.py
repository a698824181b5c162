"""What an update takes in passing, beside what stands on the card: temporaries, zeros to try it out on.

In full precision AdamW's update is one kernel and takes nothing. Muon's makes a few numbers a row, and so
does low-bit AdamW's where it is compiled; uncompiled, both make copies of what they work on. An update that
runs out half-way leaves weights between two steps, so the trainer has all of this before it begins one
(optim/optimizer.py), and its kernels are compiled on zeros of their own before the first.

Copies without the compiler are counted by watching them come and go (tests/plan/test_update.py).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from onecard.plan.activations import TRYING_OUT, Moment, buffer_to_clear_with
from onecard.plan.host import EAGER_PIECE
from onecard.plan.lines import Line
from onecard.plan.settings import Setting
from onecard.plan.standing import PIECE, Kept, muon_batch, muon_bytes, per_element
from onecard.plan.tensors import ALIGN, groups_of
from onecard.shapes import Shape

# Uncompiled, bytes an element: of Muon by how it keeps its momentum, and where weights are rounded; of AdamW
# in few bits.
_MUON_COPIES = {"fp32": 17, "bf16": 27, "int8": 56}
_ROUNDED_COPIES = 31
_ADAMW_COPIES = {"fp32": 36, "bf16": 36, "int8": 65}
# Of Muon: fp32 vectors as long as a row and a column of what is taken together, at a time.
_VECTORS = 8
# Of compiled low-bit AdamW: fp32 numbers a block of the moments' 256 elements, and then some.
_FEW = 2**18
# A card's allocator has segments of their own for what is no larger than this: copies of so many elements in
# fp32, of four times as many in a byte each.
SMALL = 2**20
_SMALL_COPY = SMALL // 4
UPDATE = "update"
# Low-bit AdamW is tried out on so many elements: kernels for long buffers are chosen by them.
REHEARSED = PIECE


class Temporaries(NamedTuple):
    """Bytes at the most, at a time."""

    vectors: int = 0  # in small pieces
    copies: int = 0  # in pieces as large as what is copied, or all in one
    small_copies: int = 0  # of these, what may be in small pieces too: the last of a region, or a byte each

    @property
    def on_host(self) -> int:
        return self.vectors + self.copies

    @property
    def on_card(self) -> int:
        """What is kept for small ones serves no large one."""
        return self.on_host + self.small_copies


def muon_temporaries(
    parts: int, rows: int, columns: int, together: int, kept: Kept, *, compiled: bool, iterates_in: int
) -> Temporaries:
    """Of equal matrices taken together. Uncompiled, copies are made of one at a time.

    `iterates_in`: bytes of a number in the iteration.
    """
    wide, place = max(4, iterates_in), _place(parts, rows, columns)
    vectors = _VECTORS * wide * together * parts * (rows + columns)
    if compiled:
        return Temporaries(vectors)
    each = _MUON_COPIES[kept.optim_states]
    if kept.master_weights == "bf16":
        each = max(each, _ROUNDED_COPIES)
    return Temporaries(vectors, each * place * wide // 4, each * min(place, _SMALL_COPY) * wide // 4)


def adamw_temporaries(elements: int, kept: Kept, *, compiled: bool) -> Temporaries:
    """Of low-bit AdamW on a region of so many elements."""
    if compiled:
        return Temporaries(_FEW)
    each = _ADAMW_COPIES[kept.optim_states]
    piece = EAGER_PIECE if kept.offload == "none" else PIECE  # what visits the card is not cut further
    return Temporaries(_FEW, each * min(elements, piece), each * min(elements, _SMALL_COPY))


def is_low_bit(kept: Kept) -> bool:
    """AdamW's update of what is not a vector: bf16 is Muon's alone."""
    return kept.master_weights == "bf16" or kept.optim_states == "int8"


def update_moments(
    shape: Shape, setting: Setting, dtype: str, *, by_muon: bool, l2_bytes: int
) -> tuple[Moment, ...]:
    """The update, and its kernels being tried out, where it takes anything."""
    temporaries, zeros = _taken_and_tried(shape, setting, dtype, by_muon)
    if not temporaries:
        return ()
    passing = Line("the update's temporaries", temporaries, "numbers a row; uncompiled, copies of a matrix")
    scratch = Line("zeros to try the update out on", zeros, "a matrix, its gradient and its momentum")
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
        scratch = each.total + each.master + each.states
        if by_muon and kind == "layers":
            for matrix, count in Counter(p.matrix for p in members).items():
                together = muon_batch(*matrix, count, setting)
                taken = muon_temporaries(
                    *matrix, together, setting, compiled=compiled, iterates_in=iterates_in
                )
                temporaries = max(temporaries, taken.on_card)
                zeros = max(zeros, int(scratch * _place(*matrix)))
        elif kind != "vectors" and is_low_bit(setting):
            taken = adamw_temporaries(size, setting, compiled=compiled)
            temporaries = max(temporaries, taken.on_card)
            piece = REHEARSED if compiled or setting.offload != "none" else EAGER_PIECE
            zeros = max(zeros, int(scratch * min(size, piece)))
    return temporaries, zeros


def _place(parts: int, rows: int, columns: int) -> int:
    return -(-parts * rows * columns // ALIGN) * ALIGN
