"""Facts shared by the optimizer and the planner: settings, alignment, block and piece sizes. No torch.

The optimizer allocates by these facts and the planner counts by them, so neither needs to know the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY

# In elements. Parameters begin at multiples of it in their buffers: blocks of quantised states never span
# two parameters, and every view is aligned for vectorised loads.
ALIGN = 256


# Elements of a quantised state that share a scale.
BLOCK = 256
# Elements of a streamed piece: enough for the full speed of the bus, and few enough to need little memory.
PIECE = 2**21
# Pieces on the card at a time: one is updated, the next arrives, the previous one leaves.
PIECES_ON_CARD = 3

# Elements of the equal matrices that Muon processes in one batch, products with themselves included. Enough
# to keep a fast card busy; few enough that the workspace is 64 to 82 MiB in bf16 (twice the longest batch and
# twice the largest products, which may belong to another batch).
MUON_TOGETHER = 2**24

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


# Eager arithmetic copies its operands, so it processes this many elements at a time.
EAGER_PIECE = 2**20

# Temporaries of uncompiled updates in bytes per element. Muon's depend on the format of its momentum, and are
# more where weights are rounded. AdamW's are those of the low-bit update.
_MUON_COPIES = {"fp32": 17, "bf16": 27, "int8": 56}
_ROUNDED_COPIES = 31
_ADAMW_COPIES = {"fp32": 36, "bf16": 36, "int8": 65}
# Muon's fp32 vectors that exist at the same time, each as long as a row and a column of the batch.
_VECTORS = 8
# Bytes of compiled low-bit AdamW's temporaries: a few fp32 numbers per block of 256 elements, rounded up.
_FEW = 2**18
# PyTorch's CUDA allocator keeps tensors of up to so many bytes in segments of their own: fp32 copies of a
# quarter as many elements.
SMALL = 2**20
_SMALL_COPY = SMALL // 4
# The warm-up of low-bit AdamW takes so many elements: Inductor chooses kernels for long buffers by its size.
WARM_UP_ELEMENTS = PIECE


RECOMPUTE = ("none", "mlp", "block")
OFFLOAD = ("none", "optimizer", "gradients")


@dataclass(frozen=True)
class Setting:
    """How a step is split, stored and recomputed. Every setting computes the same step (low-bit aside)."""

    micro_batch: int
    loss_chunk: int
    recompute: str = "none"
    offload: str = "none"
    master_weights: str = "fp32"
    optim_states: str = "fp32"
    compile: bool = True
    cuda_graphs: bool | None = False  # None: where micro-batches are launch-bound and memory suffices

    @property
    def may_capture(self) -> bool:
        """Whether a CUDA graph may be captured: unless asked for, of compiled code only."""
        wanted = self.compile if self.cuda_graphs is None else self.cuda_graphs
        return wanted and self.offload != "gradients"  # a graph cannot follow streamed accumulators

    @property
    def exact(self) -> bool:
        """Whether masters and states are fp32, as nanoGPT trains."""
        return self.master_weights == "fp32" and self.optim_states == "fp32"

    def words(self, sequences: int | None = None) -> str:
        """The setting as flags of `onecard train`; `sequences` of a step keep the step the same.

        Flags cannot express a step that is no whole number of micro-batches: the trainer finds its split by
        itself.
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


# bf16 logits take twice as many bytes: 412 MB at GPT-2's vocabulary (docs/lessons.md).
_DEFAULT_CHUNK_LOGITS = 4096 * GPT2_PADDED_VOCABULARY


def default_chunk(vocab_size: int) -> int:
    """Rows of a loss chunk: enough to keep the matmuls efficient, whatever the vocabulary."""
    return max(128, _DEFAULT_CHUNK_LOGITS // vocab_size // 128 * 128)


@dataclass(frozen=True)
class PerElement:
    """Bytes per element of one group of parameters."""

    accumulator: float
    master: float
    working: float  # 0: the model computes with the master itself
    states: float
    on_host: bool
    accumulators_on_host: bool

    @property
    def offloaded(self) -> float:
        """What an update streams: master and states, and the accumulator where it is offloaded too."""
        return self.master + self.states + (self.accumulator if self.accumulators_on_host else 0)


class StateFormat(Protocol):
    """How masters and states are stored: a Setting, or the Storage of optim/region_buffers.py."""

    @property
    def master_weights(self) -> str: ...
    @property
    def optim_states(self) -> str: ...
    @property
    def offload(self) -> str: ...


def per_element(kind: str, stored: StateFormat, dtype: str, *, by_muon: bool) -> PerElement:
    compute = SIZES[dtype]
    full = max(compute, 4)
    vectors = kind == "vectors"
    bf16 = stored.master_weights == "bf16" and not vectors
    on_host = stored.offload != "none" and not vectors
    accumulators_on_host = stored.offload == "gradients" and kind == "layers"
    master = 2 if bf16 else full
    working = full if vectors else compute
    states = "fp32" if vectors else stored.optim_states
    int8 = 1 + 4 / BLOCK
    if by_muon and kind == "layers":
        state_bytes = {"fp32": full, "bf16": 2, "int8": int8}[states]
    else:
        state_bytes = 2 * (int8 if states == "int8" else full)
    # The master is the working copy where both have the same dtype and live on the card.
    same = not on_host and ("bfloat16" if bf16 else "wide") == (dtype if working < 4 else "wide")
    accumulator = 2 if bf16 and kind == "layers" and not accumulators_on_host else full
    return PerElement(accumulator, master, 0 if same else working, state_bytes, on_host, accumulators_on_host)


def muon_bytes(dtype: str) -> int:
    """Bytes of an element in Muon's iteration: bf16 for bf16, else full precision (fp16 would overflow)."""
    return 2 if dtype == "bfloat16" else max(4, SIZES[dtype])


def muon_batch(parts: int, rows: int, columns: int, count: int, stored: StateFormat) -> int:
    """How many of `count` equal matrices Muon processes in one batch. Streamed ones come one by one."""
    elements = parts * rows * columns
    if stored.offload != "none" or (parts > 1 and elements % ALIGN):
        return 1
    most = max(1, MUON_TOGETHER // (elements + parts * min(rows, columns) ** 2))
    return -(-count // -(-count // most))  # as even as possible


class Temporaries(NamedTuple):
    """The most bytes that temporaries take at the same time."""

    vectors: int = 0  # in small tensors
    copies: int = 0  # in tensors as large as what is copied
    small_copies: int = 0  # the part of these that may be in small tensors: a region's end, one-byte codes

    @property
    def on_cpu(self) -> int:
        return self.vectors + self.copies

    @property
    def on_card(self) -> int:
        """Small copies count twice: the allocator does not reuse memory of small tensors for large ones."""
        return self.on_cpu + self.small_copies


def muon_temporaries(
    parts: int, rows: int, columns: int, together: int, stored: StateFormat, *, compiled: bool,
    iterates_in: int,
) -> Temporaries:  # fmt: skip
    """Temporaries of Muon on a batch of equal matrices. Uncompiled, one matrix is copied at a time.

    `iterates_in`: bytes of an element in the iteration.
    """
    wide, place = max(4, iterates_in), padded(parts, rows, columns)
    vectors = _VECTORS * wide * together * parts * (rows + columns)
    if compiled:
        return Temporaries(vectors)
    each = _MUON_COPIES[stored.optim_states]
    if stored.master_weights == "bf16":
        each = max(each, _ROUNDED_COPIES)
    return Temporaries(vectors, each * place * wide // 4, each * min(place, _SMALL_COPY) * wide // 4)


def adamw_temporaries(elements: int, stored: StateFormat, *, compiled: bool) -> Temporaries:
    """Temporaries of low-bit AdamW on a region of so many elements."""
    if compiled:
        return Temporaries(_FEW)
    each = _ADAMW_COPIES[stored.optim_states]
    piece = EAGER_PIECE if stored.offload == "none" else PIECE  # streamed pieces are not cut further
    return Temporaries(_FEW, each * min(elements, piece), each * min(elements, _SMALL_COPY))


def is_low_bit(stored: StateFormat) -> bool:
    """Whether AdamW updates matrices in few bits. States in bf16 are Muon's alone."""
    return stored.master_weights == "bf16" or stored.optim_states == "int8"


def padded(parts: int, rows: int, columns: int) -> int:
    return -(-parts * rows * columns // ALIGN) * ALIGN
