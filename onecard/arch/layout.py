"""What the engine is made of: block sizes, alignment, pieces, how a step may be split. No torch.

The optimizer allocates by these facts and the planner counts by them, so that neither has to know the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY

# Parameters begin at multiples of this in their buffers: blocks of quantised states never span two
# parameters, and every view is aligned for vectorised loads.
ALIGN = 256


# Numbers of a quantised state that share a scale.
BLOCK = 256
# As many elements at a time as the bus needs for its full speed, few enough that some are little memory.
PIECE = 2**21
# Pieces on the card at a time: one is worked on, the next arrives, the one before leaves.
PLACES = 3

# Muon's matrices are taken together up to so many elements, products with themselves included: enough that
# a fast card has something to do, few enough that their room is 64 to 82 MiB in bf16 (the longest matrices
# and the largest products, which may be of others, twice each).
MUON_TOGETHER = 2**24

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


# Eager arithmetic makes copies of what it works on: this many elements at a time.
EAGER_PIECE = 2**20

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
# Low-bit AdamW is tried out on so many elements: kernels for long buffers are chosen by them.
REHEARSED = PIECE


RECOMPUTE = ("none", "mlp", "block")
OFFLOAD = ("none", "optimizer", "gradients")


@dataclass(frozen=True)
class Setting:
    """How a step is carried out; every combination computes the same step (low bits aside)."""

    micro_batch: int
    loss_chunk: int
    recompute: str = "none"
    offload: str = "none"
    master_weights: str = "fp32"
    optim_states: str = "fp32"
    compile: bool = True
    cuda_graphs: bool | None = False  # None: where it keeps the host busy, and there is room

    @property
    def may_record(self) -> bool:
        """By itself only what is compiled: what is not has been asked for to look into."""
        wanted = self.compile if self.cuda_graphs is None else self.cuda_graphs
        return wanted and self.offload != "gradients"  # whose totals come and go

    @property
    def exact(self) -> bool:
        """fp32 masters and states, as nanoGPT trains."""
        return self.master_weights == "fp32" and self.optim_states == "fp32"

    def words(self, sequences: int | None = None) -> str:
        """As flags of `onecard train`; with the sequences of a step, such that it stays the same step.

        A step that is no whole number of micro-batches cannot be said in flags: how it is split is then left
        to the trainer, which finds it by itself.
        """
        said = [f"--batch_size={self.micro_batch}"]
        if sequences is not None:
            said.append(f"--gradient_accumulation_steps={sequences // self.micro_batch}")
            if sequences % self.micro_batch:
                said = []
        usual = {"recompute": "none", "offload": "none", "master_weights": "fp32", "optim_states": "fp32"}
        said += [
            f"--{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value
        ]
        if not self.compile:
            said.append("--compile=False")
        return " ".join(said)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


# In bf16 twice as many bytes: 412 MB at GPT-2's vocabulary (docs/lessons.md).
_DEFAULT_CHUNK_LOGITS = 4096 * GPT2_PADDED_VOCABULARY


def default_chunk(vocab_size: int) -> int:
    """Rows of the loss at a time: enough to keep the matmuls efficient, whatever the vocabulary."""
    return max(128, _DEFAULT_CHUNK_LOGITS // vocab_size // 128 * 128)


@dataclass(frozen=True)
class PerElement:
    """Bytes per element of one group of parameters."""

    total: float
    master: float
    working: float  # 0: the master itself is computed with
    states: float
    on_host: bool
    totals_on_host: bool

    @property
    def at_home(self) -> float:
        """Masters and states, and totals that live with them."""
        return self.master + self.states + (self.total if self.totals_on_host else 0)


class Kept(Protocol):
    """How masters and states are kept: a Setting, or optim/held.py's Storage."""

    @property
    def master_weights(self) -> str: ...
    @property
    def optim_states(self) -> str: ...
    @property
    def offload(self) -> str: ...


def per_element(kind: str, kept: Kept, dtype: str, *, by_muon: bool) -> PerElement:
    compute = SIZES[dtype]
    full = max(compute, 4)
    vectors = kind == "vectors"
    bf16 = kept.master_weights == "bf16" and not vectors
    on_host = kept.offload != "none" and not vectors
    totals_on_host = kept.offload == "gradients" and kind == "layers"
    master = 2 if bf16 else full
    working = full if vectors else compute
    states = "fp32" if vectors else kept.optim_states
    int8 = 1 + 4 / BLOCK
    if by_muon and kind == "layers":
        state_bytes = {"fp32": full, "bf16": 2, "int8": int8}[states]
    else:
        state_bytes = 2 * (int8 if states == "int8" else full)
    # The master is computed with where both have the same dtype and live on the card.
    same = not on_host and ("bfloat16" if bf16 else "wide") == (dtype if working < 4 else "wide")
    small_total = bf16 and kind == "layers" and not totals_on_host
    return PerElement(
        2 if small_total else full, master, 0 if same else working, state_bytes, on_host, totals_on_host
    )


def muon_bytes(dtype: str) -> int:
    """Of a number in Muon's iteration: in bf16 for bf16, else in full precision (fp16 would overflow)."""
    return 2 if dtype == "bfloat16" else max(4, SIZES[dtype])


def muon_batch(parts: int, rows: int, columns: int, count: int, kept: Kept) -> int:
    """How many of `count` equal matrices Muon takes together. Visitors from the host come one by one."""
    elements = parts * rows * columns
    if kept.offload != "none" or (parts > 1 and elements % ALIGN):
        return 1
    most = max(1, MUON_TOGETHER // (elements + parts * min(rows, columns) ** 2))
    return -(-count // -(-count // most))  # as even as they go


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
    wide, place = max(4, iterates_in), padded(parts, rows, columns)
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


def padded(parts: int, rows: int, columns: int) -> int:
    return -(-parts * rows * columns // ALIGN) * ALIGN
