"""What a micro-batch holds on the card: kept for the backward pass, and at the two moments that can be worst.

Counted in values of width n_embd per token, as the layers say what they keep (model/gpt2_block.py):

    kept by a layer      x  qkv  y  x_mid  h      recompute none: 1+3+1+1+4 = 10, mlp: 6, block: 1
    in the loss          the last layer's output, its norm, the gradient of it, one chunk of logits
    in a backward pass   the gradient that comes in, what is computed again, and a layer's own temporaries

Temporaries are the compiler's business (Inductor's plan of buffers) or, without it, Python's; both were
counted by walking through what it allocates and frees (docs/memory-bill.md), and tests do so again. The
figures of each architecture are in arch/records.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecard.arch.layout import SIZES, Setting
from onecard.arch.records import RECORDS, ByRecompute
from onecard.arch.shapes import Nanochat2026Shape, Shape
from onecard.language import N_
from onecard.plan.lines import Line

TRYING_OUT = N_("kernels being tried out")
_INPUTS = 4 * 8  # tokens and targets of this micro-batch and of the next, int64


@dataclass(frozen=True)
class Moment:
    """What is on the card besides what is resident."""

    name: str
    lines: tuple[Line, ...]

    @property
    def bytes(self) -> int:
        return sum(line.bytes for line in self.lines)


_ONE_PIECE = 1024  # a row of attention weights up to here is reduced by one kernel
# Of attention in the open without the compiler: bytes of a weight, and of a value of width n_embd less than
# a layer's temporaries have.
_OPEN_BYTES, _OPEN_INSTEAD = 20, 12


def stream_size(dtype: str) -> int:
    """Bytes of a number in the residual stream: fp32 where the layers compute in fp16."""
    return 4 if dtype == "float16" else SIZES[dtype]


def kept_by_layer(shape: Shape, tokens: int, recompute: str, dtype: str, dropout: float = 0.0) -> int:
    """Bytes that one layer keeps for its backward pass."""
    compute, stream = SIZES[dtype], stream_size(dtype)
    width = stream
    if recompute != "block":
        width += 3 * compute + compute + stream
    if recompute == "none":
        width += 4 * compute
    sums = 0 if recompute == "block" or dropout else tokens * shape.n_head * 4  # attention's log-sums
    return tokens * shape.n_embd * width + sums


def training_moments(
    shape: Shape, setting: Setting, dtype: str, *, dropout: float = 0.0, l2_bytes: int = 0
) -> tuple[Moment, ...]:
    """The moments of a micro-batch that can be its worst; compiled, one of the first micro-batch too."""
    tokens = setting.micro_batch * shape.block_size
    compute, stream = SIZES[dtype], stream_size(dtype)
    each = kept_by_layer(shape, tokens, setting.recompute, dtype, dropout)
    kept, kept_of_each_kind = (_kept(shape, each, tokens, n) for n in (shape.n_layer, shape.layer_kinds))
    always = [Line(N_("tokens and targets"), tokens * _INPUTS, f"{_INPUTS} bytes × {tokens:,} tokens")]
    if isinstance(shape, Nanochat2026Shape):
        always.append(_wide(N_("gradient of the first layer's input"), shape, tokens, max(4, compute)))
    if shape.arch != "gpt2":
        angles = 4 * shape.block_size * shape.head_dim
        always.append(Line(N_("rotary angles"), angles, f"4 bytes × {shape.block_size:,} × {shape.head_dim}"))
    ends = _wide(N_("last hidden state and its gradient"), shape, tokens, stream + 2 * compute)
    loss = Moment(N_("loss"), (kept, *always, ends, _logits(shape, setting.loss_chunk, tokens, dtype)))
    incoming = _wide(N_("gradient between layers"), shape, tokens, stream)
    more = _around_layer(shape, setting, tokens, dtype, dropout)
    own = _temporaries(shape, setting, dtype, tokens)
    backward = Moment(N_("backward pass of a layer"), (kept, *always, incoming, own, *more))
    if not setting.compile:
        return loss, backward
    tried = _compiled_temporaries(RECORDS[shape.arch].autotune_temporaries, shape, setting, dtype, tokens)
    cache = buffer_to_clear_with(l2_bytes)
    return loss, backward, Moment(TRYING_OUT, (kept_of_each_kind, *always, incoming, tried, *more, cache))


def buffer_to_clear_with(l2_bytes: int) -> Line:
    """What the compiler clears the cache with between two tries of a kernel."""
    return Line(N_("a buffer to clear the cache with"), l2_bytes, "the L2 cache of the largest such card")


def _kept(shape: Shape, each: int, tokens: int, layers: int) -> Line:
    per_value = each / tokens / shape.n_embd
    formula = f"{layers} layers × {per_value:.2f} bytes × {tokens:,} tokens × {shape.n_embd:,}"
    return Line(N_("kept for the backward pass"), layers * each, formula)


def _wide(name: str, shape: Shape, tokens: int, size: float) -> Line:
    """Values of width n_embd for every token."""
    return Line(
        name, int(tokens * shape.n_embd * size), f"{size:.4g} bytes × {tokens:,} tokens × {shape.n_embd:,}"
    )


def _logits(shape: Shape, chunk: int, tokens: int, dtype: str) -> Line:
    rows, size = min(chunk, tokens), SIZES[dtype]
    formula = f"{size} bytes × {rows:,} rows × {shape.vocab_size:,}"
    return Line(N_("a chunk of logits"), rows * shape.vocab_size * size, formula)


def _temporaries(shape: Shape, setting: Setting, dtype: str, tokens: int) -> Line:
    compute, stream = SIZES[dtype], stream_size(dtype)
    if setting.compile:
        table = RECORDS[shape.arch].compiled_temporaries
        return _compiled_temporaries(table, shape, setting, dtype, tokens)
    again = {"none": 0, "mlp": 4 * compute, "block": 8 * compute + stream}[setting.recompute]
    by_dtype = RECORDS[shape.arch].eager_temporaries
    own = by_dtype[dtype] if dtype in by_dtype else 2 * by_dtype["float32"]  # float64: tests alone
    return _wide(N_("a layer's temporaries"), shape, tokens, own + again)


def _compiled_temporaries(
    table: ByRecompute, shape: Shape, setting: Setting, dtype: str, tokens: int
) -> Line:
    size = table[setting.recompute] * SIZES[dtype]
    if dtype == "float16":
        size += RECORDS[shape.arch].wide_stream
    return _wide(N_("a layer's temporaries"), shape, tokens, size)


def _in_the_open(shape: Shape, setting: Setting, tokens: int, dtype: str) -> Line:
    """T×T weights of every head, beyond the layer's temporaries, which the MLP needs at another moment.

    Without the compiler: counted in the model (tests/plan/test_activations.py). Compiled: measured on an H200
    with blocks of 256, 1024 and 2048; rows longer than 1024 are not reduced in one piece.
    """
    weights, compute = tokens * shape.block_size * shape.n_head, SIZES[dtype]
    size, width = 3 * compute + (4 if shape.block_size > _ONE_PIECE else 0), 4 * compute
    if not setting.compile:
        size, width = _OPEN_BYTES, _OPEN_INSTEAD
    bytes_ = max(0, int(weights * size - tokens * shape.n_embd * width))
    formula = f"{size} bytes × {weights:,} attention weights - {width} bytes × {tokens:,} × {shape.n_embd:,}"
    return Line(N_("attention in the open"), bytes_, formula)


def _around_layer(shape: Shape, setting: Setting, tokens: int, dtype: str, dropout: float) -> list[Line]:
    """What a layer's backward pass takes besides."""
    lines = []
    if dropout:
        lines.append(_in_the_open(shape, setting, tokens, dtype))
    if setting.master_weights == "bf16" and setting.offload != "gradients":
        largest = 4 * shape.n_embd**2
        lines.append(Line(N_("a matrix's gradient before rounding"), 4 * largest, f"4 bytes × {largest:,}"))
    return lines


def evaluation_moment(shape: Shape, sequences: int, loss_chunk: int, dtype: str) -> Moment:
    """A forward pass alone: one layer's values at a time, then the loss."""
    tokens = sequences * shape.block_size
    compute, stream = SIZES[dtype], stream_size(dtype)
    inside = _wide(N_("a layer's values"), shape, tokens, 14 * compute + stream)
    hidden = _wide(N_("last hidden state"), shape, tokens, stream + compute)
    logits = _logits(shape, loss_chunk, tokens, dtype)
    if hidden.bytes + logits.bytes > inside.bytes:
        return Moment(N_("evaluation's loss"), (hidden, logits))
    return Moment(N_("evaluation"), (inside,))


def sampling_moment(shape: Shape, sequences: int, tokens: int, dtype: str) -> Moment:
    """Keys and values of everything said so far, and the logits of the next token."""
    compute = SIZES[dtype]
    seen = sequences * min(tokens, shape.block_size)
    logits = sequences * shape.vocab_size * (compute + 12)
    return Moment(
        N_("sampling"),
        (
            _wide(N_("keys and values"), shape, seen, 2 * shape.n_layer * compute),
            _wide(N_("reading the prompt"), shape, seen, 14 * compute),
            Line(
                N_("logits of the next token"),
                logits,
                f"{compute + 12} bytes × {sequences} × {shape.vocab_size:,}",
            ),
        ),
    )
