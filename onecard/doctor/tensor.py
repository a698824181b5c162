"""Which tensor a message is about: from the bytes PyTorch tried to allocate to the shapes that have them.

PyTorch's message names the segment that it wants from the driver, not the tensor: 2 MiB for any tensor up to
1 MiB, 20 MiB for any below 10 MiB, otherwise the tensor rounded up to whole 2 MiB. Of a config only so many
sizes follow; a tensor whose bytes lie in the range is a candidate, and several are ranked by what the moment
of the error and the trainer make likely. A size that no tensor has is said to be none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from onecard.doctor.out_of_memory import Amount
from onecard.language import N_
from onecard.plan.others.caching_allocator import (
    GRAIN,
    MEDIUM,
    MEDIUM_SEGMENT,
    MIB,
    SEGMENT_GRAIN,
    SMALL,
    SMALL_SEGMENT,
)

# Moments of an error, as moment.py finds them.
LOADING, FORWARD, LOSS, BACKWARD, UPDATE = "loading", "forward", "loss", "backward", "update"
EVALUATION, SAMPLING, RESUMING, COMPILING = "evaluation", "sampling", "resuming", "compiling"
# Of the forward pass: what else runs one.
_FORWARDS = frozenset((FORWARD, LOSS, EVALUATION, SAMPLING, COMPILING))
_BOTH = _FORWARDS | {BACKWARD}
_STATES = frozenset((LOADING, UPDATE, RESUMING, BACKWARD))
MOST = 3
_ALONE = 0.3  # how likely it is that a tensor's own bytes are printed, and not its segment's


@dataclass(frozen=True)
class Dimensions:
    """What the sizes of a trainer's tensors follow from."""

    batch: int
    block: int
    width: int
    layers: int
    heads: int
    vocab: int
    head_dim: int = 0
    kv_heads: int = 0
    ffn: int = 0  # hidden width of the MLP
    gated: bool = False  # a gate beside the MLP's up projection
    fused_qkv: bool = True
    stacked: bool = False  # Muon takes all matrices of a shape together
    positions: bool = True  # learned ones
    half: bool = True  # matrix products in 16 bits
    expandable: bool = False  # expandable_segments: in pieces of 20 MiB

    @property
    def tokens(self) -> int:
        return self.batch * self.block


@dataclass(frozen=True)
class Tensor:
    """A tensor that a step makes. `shape` is as PyTorch shows it; several roles may have one shape."""

    role: str  # N_: English, translated where shown
    shape: tuple[int, ...]
    item: int  # bytes of a value
    moments: frozenset[str]
    weight: float  # how often it is the one that is short, compared with the others

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item


@dataclass(frozen=True)
class Which:
    """`segment` is 2 or 20 where only a class of tensors is known; `bounds` are a tensor's bytes."""

    candidates: tuple[Tensor, ...]
    bounds: tuple[int, int]
    segment: int | None = None


def tensors(d: Dimensions) -> Iterator[Tensor]:
    """All that a step of this model may ask for, but views."""
    yield from _activations(d)
    yield from _weights(d)


def _activations(d: Dimensions) -> Iterator[Tensor]:
    B, T, D, V = d.batch, d.block, d.width, d.vocab
    Dh = d.head_dim or D // d.heads
    kv = (d.kv_heads or d.heads) * Dh
    F = d.ffn or 4 * D
    items = ((2, 1.0), (4, 0.9)) if d.half else ((4, 1.0),)
    for item, likely in items:
        of_loss = _BOTH - {SAMPLING}
        yield Tensor(N_("logits, or a copy or gradient of them"), (B, T, V), item, of_loss, 10 * likely)
        yield Tensor(N_("logits of all but the last token"), (B, T - 1, V), item, of_loss, 4 * likely)
        yield Tensor(N_("MLP's hidden values, or their gradient"), (B, T, F), item, _BOTH, 6 * likely)
        if d.gated:
            yield Tensor(N_("MLP's gate and hidden values together"), (B, T, 2 * F), item, _BOTH, 3 * likely)
        if d.fused_qkv and not (d.half and item == 4):  # autocast gives 16 bits
            whole = d.heads * Dh + 2 * kv
            yield Tensor(N_("queries, keys and values together"), (B, T, whole), item, _BOTH, 5 * likely)
        yield Tensor(
            N_("residual stream, a norm's or projection's output, or a gradient of one"),
            (B, T, D), item, _BOTH, 5 * likely,
        )  # fmt: skip
        if kv != D:
            yield Tensor(N_("keys or values"), (B, T, kv), item, _BOTH, 3 * likely)
        if d.heads * Dh != D:
            yield Tensor(N_("queries, or attention's output"), (B, T, d.heads * Dh), item, _BOTH, 3 * likely)
        yield Tensor(
            N_("attention scores of all heads: attention without flash kernels"),
            (B, d.heads, T, T), item, _BOTH, 4 * likely,
        )  # fmt: skip
    yield Tensor(
        N_("queries' gradient in fp32"), (B, T, d.heads, -(-Dh // 32) * 32), 4, frozenset((BACKWARD,)), 1
    )
    yield Tensor(N_("dropout mask, or a mask of values"), (B, T, D), 1, _BOTH, 1)
    yield Tensor(N_("attention mask or its dropout mask"), (B, d.heads, T, T), 1, _BOTH, 1)
    yield Tensor(N_("causal masks, fp32"), (T, T), 4, frozenset((LOADING, FORWARD)), 1)
    for item in (1, 4):
        yield Tensor(N_("causal mask of every sequence"), (B, 1, T, T), item, _FORWARDS, 0.5)


def _weights(d: Dimensions) -> Iterator[Tensor]:
    D, V, T = d.width, d.vocab, d.block
    Dh = d.head_dim or D // d.heads
    kv = (d.kv_heads or d.heads) * Dh
    F = d.ffn or 4 * D
    embedding = N_("embedding or head: weights, gradient or an average of AdamW")
    qkv = d.heads * Dh + 2 * kv
    matrices: dict[tuple[int, int], str] = {
        (F, D): N_("MLP's matrix: weights, gradient or an optimizer state"),
        (D, d.heads * Dh): N_("attention's matrix: weights, gradient or an optimizer state"),
    }
    if d.fused_qkv:
        matrices[(qkv, D)] = N_("matrix of queries, keys and values: weights, gradient or a state")
    if kv != D:
        matrices[(kv, D)] = N_("matrix of keys or values: weights, gradient or a state")
    for item, likely in ((4, 1.0), (2, 0.8)):
        yield Tensor(embedding, (V, D), item, _STATES | _FORWARDS, 4 * likely)
        if d.positions:
            yield Tensor(
                N_("position embeddings, or a gradient or state of them"), (T, D), item, _STATES, likely
            )
        for shape, role in matrices.items():
            yield Tensor(role, shape, item, _STATES | _FORWARDS, 3 * likely)
            if d.stacked:
                count = _equal_matrices(d, shape)
                yield Tensor(
                    N_("all matrices of a shape together, as Muon takes them"),
                    (count, *shape), item, frozenset((UPDATE, RESUMING)), 6 * likely,
                )  # fmt: skip


def _equal_matrices(d: Dimensions, shape: tuple[int, int]) -> int:
    """How many matrices of all layers have this shape: with Muon's stack as large as they are together."""
    D = d.width
    kv = (d.kv_heads or d.heads) * (d.head_dim or D // d.heads)
    square = shape[0] == shape[1]
    if not square:
        return d.layers
    of_layer = 2 + (2 if kv == D else 0) if not d.fused_qkv else 1
    return d.layers * of_layer


def segment_of(size: int) -> int:
    """What PyTorch takes from the driver for a tensor of so many bytes, and what its message says."""
    size = max(GRAIN, -(-size // GRAIN) * GRAIN)
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MEDIUM:
        return MEDIUM_SEGMENT
    return -(-size // SEGMENT_GRAIN) * SEGMENT_GRAIN


def which(tried: Amount, known: Dimensions | None, moment: str | None = None) -> Which:
    """The tensors of this model whose segment a message may have printed so, best first."""
    for segment, most in ((SMALL_SEGMENT, SMALL), (MEDIUM_SEGMENT, MEDIUM)):
        if tried.low <= segment <= tried.high and (tried.is_exact or tried.high - tried.low < MIB):
            least = 1 if segment == SMALL_SEGMENT else SMALL + 1
            exact = _matching(tried, known, moment) if segment == MEDIUM_SEGMENT and known else ()
            large = tuple(t for t in exact if t.bytes > MEDIUM)
            return Which(large, (least, most), segment // MIB)
    bounds = (max(1, tried.low - SEGMENT_GRAIN + 1), tried.high)
    return Which(_matching(tried, known, moment) if known else (), bounds)


def _matching(tried: Amount, known: Dimensions, moment: str | None) -> tuple[Tensor, ...]:
    seen: dict[tuple[tuple[int, ...], int], Tensor] = {}
    for tensor in tensors(known):
        printed = segment_of(tensor.bytes)
        # Very old versions round to 128 KiB only, and on expandable segments the tensor itself is printed.
        alone = -(-tensor.bytes // (128 * 1024)) * (128 * 1024)
        if not (tried.low <= printed <= tried.high or tried.low <= alone <= tried.high):
            continue
        if not tried.low <= printed <= tried.high:
            tensor = replace(tensor, weight=_ALONE * tensor.weight)
        key = (tensor.shape, tensor.item)
        if key not in seen or _weight(tensor, moment) > _weight(seen[key], moment):
            seen[key] = tensor
    best = sorted(seen.values(), key=lambda t: (-_weight(t, moment), -t.bytes))
    return tuple(best[:MOST])


def _weight(tensor: Tensor, moment: str | None) -> float:
    return tensor.weight * (1.0 if moment is None or moment in tensor.moments else 0.1)


# --- without a config -----------------------------------------------------------------------------

_VOCABULARIES = (50304, 50257, 32768, 65536, 32000, 128256, 151936)
_BLOCKS = (1024, 2048, 512, 256, 4096)
_BATCHES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)


def usual_logits(tried: Amount, batch_size: object = None, block_size: object = None) -> tuple[Tensor, ...]:
    """Logits of usual vocabularies and batches that would be printed so: a guess, said to be one."""
    found = [
        Tensor(N_("logits, or a copy or gradient of them"), (batch, block, vocab), item, _BOTH,
               1 / (1 + 3 * v + 2 * t + b / 4 + i))
        for v, vocab in enumerate(_VOCABULARIES)
        for t, block in enumerate(_BLOCKS)
        for b, batch in enumerate(_BATCHES)
        for i, item in enumerate((2, 4))
        if tried.low <= segment_of(batch * block * vocab * item) <= tried.high
    ]  # fmt: skip

    def known(tensor: Tensor) -> int:
        """How many of its sides are those that the paste says."""
        return (tensor.shape[0] == batch_size) + (tensor.shape[1] == block_size)

    return tuple(sorted(found, key=lambda t: (-known(t), -t.weight))[:MOST])
