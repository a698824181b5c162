"""How long a step takes: a roofline per operation.

    matmul       2·m·n·k FLOPs over the card's rate, which falls for short and narrow ones; never faster than
                 its bytes over the bandwidth; a few microseconds to begin and end
    attention    4·width·pairs FLOPs forward, 2.5 times that backward, pairs counted behind the causal mask
    the rest     bytes over bandwidth: norms, activations, residuals; the loss; the update
    dropout      attention in the open instead of the above, and masks (plan/dropout.py)
    launches     of kernels by the CPU (plan/host.py): they cost nothing where they are faster than the card
    the bus      what is offloaded, while the card computes

Bytes per value of `the rest` and the efficiencies are fitted to measured runs (plan/rates.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onecard.arch.layout import SIZES, Setting, per_element
from onecard.arch.parameters import Parameter, groups_of, parameters_of
from onecard.arch.records import RECORDS
from onecard.arch.shapes import Nanochat2026Shape, Shape
from onecard.plan import dropout as masks
from onecard.plan.host import is_captured, launch_seconds, micro_batch_operations, update_launches
from onecard.plan.rates import Rates

# Of the bytes that a layer moves, by recompute.
_REST_AGAIN = {"none": 1.0, "mlp": 1.08, "block": 1.30}
# Small kernels on strided inputs do not reach the bandwidth of a long copy.
_UNCOMPILED_SHARE = 1 / 1.85
_LARGE_SHARE = 0.82  # and those on T×T weights come near to it
_ROUNDED = 267.0  # bytes per weight: bf16 accumulators, rounded at random without the compiler
_LOGITS = 8.0  # bytes moved per logit besides the matmuls'
_EMBEDDING = 20.0
_WIDE_RESIDUAL = 1.5  # fp16, compiled: its residual stream is fp32
_CONTENTION = 0.15  # of what goes in one direction holds up what goes in the other
# What a small kernel takes of the time that a matmul takes to begin and end: small ones follow each other
# closely.
_SMALL = 0.35
# Kernels of a CUDA graph begin and end in so much of the time that they take one by one.
_CAPTURED = 0.62
_OPEN_PRODUCTS = 0.5  # of the matmul rate: products as narrow as a head
_ORTHOGONALISING = 0.9  # of the matmul rate: Muon's products
_FORWARD_SHARE = 0.30  # of a micro-batch: what an evaluation costs


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by part. What runs at the same time as another part counts where it is longer."""

    matmuls: float
    attention: float
    rest: float
    loss: float
    waiting: float  # for launches or the bus
    update: float
    micro: float  # one micro-batch, all in all
    tokens: int
    flops_per_token: int
    peak: float | None
    launches: float = 0.0  # seconds of the CPU for them: hidden where the card takes longer
    dropping: float = 0.0  # seconds of the card for dropout, which evaluations do without

    @classmethod
    def of(cls, parts: Sequence[float], update: float, micro: float, *more: Any) -> StepTime:
        """`parts` are the first five."""
        matmuls, attention, rest, loss, waiting = parts
        return cls(matmuls, attention, rest, loss, waiting, update, micro, *more)

    @property
    def seconds(self) -> float:
        return self.matmuls + self.attention + self.rest + self.loss + self.waiting + self.update

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        return None if self.peak is None else self.tokens_per_s * self.flops_per_token / self.peak

    @property
    def evaluated_per_s(self) -> float:
        """Tokens per second of an evaluation: a forward pass alone, without dropout."""
        return self.tokens / (self.seconds - self.dropping) / _FORWARD_SHARE

    def parts(self) -> dict[str, float]:
        names = ("matmuls", "attention", "rest", "loss", "waiting", "update")
        return {name: getattr(self, name) for name in names}


def step_time(
    shape: Shape, setting: Setting, dtype: str, rates: Rates, sequences: int, *, by_muon: bool = False,
    dropout: float = 0.0,
) -> StepTime:  # fmt: skip
    """One step of `sequences` sequences in micro-batches of the setting's size, the last one smaller."""
    whole, rest = divmod(sequences, setting.micro_batch)

    def micro_batch(
        rates: Rates, sequences: int, dropout: float = dropout
    ) -> tuple[float, float, float, float, float]:
        return _micro_batch(shape, setting, dtype, rates, sequences, dropout)

    micro = micro_batch(rates, setting.micro_batch)
    captured = is_captured(shape, setting, rates.launch, sum(micro), dropout=dropout)
    closely = replace(rates, kernel=_CAPTURED * rates.kernel) if captured else rates
    if captured:
        micro = micro_batch(closely, setting.micro_batch)
    parts = [whole * part for part in micro]
    if rest:
        parts = [a + b for a, b in zip(parts, micro_batch(closely, rest), strict=True)]
    dropping = 0.0
    if dropout:
        plain = micro_batch(closely, setting.micro_batch, 0.0)
        dropping = sequences / setting.micro_batch * (sum(micro) - sum(plain))
    # The CPU runs ahead of the card where it can.
    launches = launch_seconds(shape, setting, rates.launch, captured=captured, dropout=dropout)
    host = launching = (whole + bool(rest)) * launches
    done = max(host, sum(parts))
    if dtype == "float16":
        host = done  # before the update it waits for the gradients: are they finite?
    groups = _update(shape, setting, dtype, rates, by_muon)
    update = sum(groups)
    for group, of_group in zip(groups, update_launches(shape, setting, by_muon=by_muon), strict=True):
        host += of_group.cost * rates.launch
        launching += of_group.cost * rates.launch
        done = max(done + group, host)
    parts[-1] += max(0.0, done - sum(parts) - update)
    tokens = sequences * shape.block_size
    one = max(sum(micro), launches)
    return StepTime.of(parts, update, one, tokens, shape.flops_per_token, rates.peak, launching, dropping)


def _matmul(rates: Rates, m: int, n: int, k: int, size: int) -> float:
    rate = rates.matmul * k / (k + rates.short)
    return max(2 * m * n * k / rate, size * (m * k + k * n + m * n) / rates.bandwidth) + rates.kernel


def _weight_gradient(
    rates: Rates, rows: int, columns: int, tokens: int, size: int, moved_too: float
) -> float:
    """Seconds of a product that is added to an accumulator: `moved_too` bytes of it are read and written."""
    narrow = min(rows, columns)
    rate = rates.matmul * narrow / (narrow + rates.narrow)
    moved = size * tokens * (rows + columns)
    product = max(2 * rows * columns * tokens / rate, moved / rates.bandwidth)
    return product + moved_too * rows * columns / rates.bandwidth + rates.kernel


def _micro_batch(
    shape: Shape, setting: Setting, dtype: str, rates: Rates, sequences: int, dropout: float
) -> tuple[float, float, float, float, float]:
    """Matmuls, attention, the rest, loss, waiting for the bus."""
    moved = _rest_bytes(shape, setting, dtype)
    parts = micro_batch_parts(shape, setting, dtype, rates, sequences, rest_bytes=moved, logit_bytes=_LOGITS)
    if dropout:
        parts = _with_dropout(parts, shape, setting, rates, sequences * shape.block_size)
    on_card = sum(parts)
    return *parts, max(0.0, _bus(shape, setting, rates) - 0.75 * on_card)


def _with_dropout(
    parts: tuple[float, float, float, float], shape: Shape, setting: Setting, rates: Rates, tokens: int
) -> tuple[float, float, float, float]:
    """Attention in the open; the masks are of the rest."""
    matmuls, _fused, rest, loss = parts
    bandwidth = rates.bandwidth * (1.0 if setting.compile else _LARGE_SHARE)
    attention = masks.attention_flops(shape, setting, tokens) / (_OPEN_PRODUCTS * rates.matmul)
    attention += masks.weight_bytes(shape, setting, tokens) / bandwidth
    rest += masks.value_bytes(setting) * tokens * shape.n_embd * shape.n_layer / bandwidth
    small = masks.small_kernels(shape, setting) if setting.compile else masks.operations(shape, setting) / 2
    return matmuls, attention, rest + small * _SMALL * rates.kernel, loss


def _rest_bytes(shape: Shape, setting: Setting, dtype: str) -> float:
    if not setting.compile:
        # As many in fp32, where nothing is cast.
        return RECORDS[shape.arch].eager_bytes_moved[setting.recompute] / _UNCOMPILED_SHARE
    moved = RECORDS[shape.arch].bytes_moved * _REST_AGAIN[setting.recompute] * (SIZES[dtype] / 2)
    return moved * (_WIDE_RESIDUAL if dtype == "float16" else 1.0)


def micro_batch_parts(
    shape: Shape, setting: Setting, dtype: str, rates: Rates, sequences: int, *, rest_bytes: float,
    logit_bytes: float,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Seconds of matmuls, attention, the rest and the loss on the card."""
    size, width, tokens = SIZES[dtype], shape.n_embd, sequences * shape.block_size
    # bf16 accumulators: the product in fp32 is written, read, and rounded into them.
    low = setting.master_weights == "bf16" and setting.offload != "gradients"
    total_bytes = 8.0
    if low:
        total_bytes = 40.0 if setting.compile else _ROUNDED / _UNCOMPILED_SHARE
    layer = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    forward = [_matmul(rates, tokens, out, into, size) for out, into in layer]
    per_layer = sum(forward)
    per_layer += sum(_matmul(rates, tokens, into, out, size) for out, into in layer)
    per_layer += sum(_weight_gradient(rates, out, into, tokens, size, total_bytes) for out, into in layer)
    per_layer += {"none": 0.0, "mlp": forward[2], "block": sum(forward[:3])}[setting.recompute]
    passes = 1 + 2.5 + (1 if setting.recompute == "block" else 0)
    attention = sum(4 * width * tokens * _pairs(shape, window) for window in _windows(shape))
    attention *= passes / rates.attention
    elements = tokens * width * shape.n_layer
    rest = (rest_bytes * elements + _EMBEDDING * tokens * width) / rates.bandwidth
    rest += _small_kernels(shape, setting) * _SMALL * rates.kernel
    # The head's accumulator is read and written once for every chunk of rows.
    chunks, last = divmod(tokens, setting.loss_chunk)
    loss = chunks * _chunk(rates, shape, setting.loss_chunk, size)
    loss += _chunk(rates, shape, last, size) if last else 0.0
    loss += logit_bytes * (size / 2) * tokens * shape.vocab_size / rates.bandwidth
    return per_layer * shape.n_layer, attention, rest, loss


def _chunk(rates: Rates, shape: Shape, rows: int, size: int) -> float:
    """Logits of some rows, and from their gradient those of the rows and of the head."""
    width, vocabulary = shape.n_embd, shape.vocab_size
    there, back = _matmul(rates, rows, vocabulary, width, size), _matmul(rates, rows, width, vocabulary, size)
    return there + back + _weight_gradient(rates, vocabulary, width, rows, size, 8.0)


def _windows(shape: Shape) -> tuple[int, ...]:
    return shape.windows if isinstance(shape, Nanochat2026Shape) else (shape.block_size,) * shape.n_layer


def _pairs(shape: Shape, window: int) -> float:
    """Keys that a query sees on average, behind the causal mask."""
    block = shape.block_size
    return block / 2 if window >= block else window - window * window / (2 * block)


def _bus(shape: Shape, setting: Setting, rates: Rates) -> float:
    """Seconds of the bus: gradient accumulators are streamed with every micro-batch, both ways at once."""
    if setting.offload != "gradients":
        return 0.0
    layers = sum(p.place for p in parameters_of(shape) if p.kind == "layers")
    return _travel(4 * layers, 4 * layers, rates)


def _travel(to_card: float, to_host: float, rates: Rates) -> float:
    """Seconds of so many bytes, both ways at once."""
    there, back = to_card / rates.to_card, to_host / rates.to_host
    return max(there, back) + _CONTENTION * min(there, back)


def _small_kernels(shape: Shape, setting: Setting) -> float:
    """Of a micro-batch: everything but matmuls. Without the compiler, half of the operations are views."""
    if setting.compile:
        return RECORDS[shape.arch].small_kernels[setting.recompute] * shape.n_layer
    return micro_batch_operations(shape, setting) / 2


def _update(shape: Shape, setting: Setting, dtype: str, rates: Rates, by_muon: bool) -> list[float]:
    """Seconds of the card for each group of parameters: computing, or waiting for the bus."""
    found = []
    launches = update_launches(shape, setting, by_muon=by_muon)
    for members, what in zip(groups_of(shape), launches, strict=True):
        kind, size = members[0].kind, sum(p.place for p in members)
        each = per_element(kind, setting, dtype, by_muon=by_muon)
        # Accumulators are read for the norm, scaled, read and cleared; the rest is read and written.
        moved = size * (5 * each.accumulator + 2 * (each.master + each.states) + each.working)
        seconds = moved / rates.bandwidth + what.operations * _SMALL * rates.kernel
        if by_muon and kind == "layers":
            seconds += sum(map(_orthogonalising, members)) / (_ORTHOGONALISING * rates.matmul)
        if each.on_host:
            travel = _travel(size * each.offloaded, size * (each.master + each.states), rates)
            seconds = max(seconds, travel)
        found.append(seconds)
    return found


def _orthogonalising(matrix: Parameter) -> int:
    """FLOPs of Muon's five iterations: two products with the longer side, one of the shorter with itself."""
    short, long = sorted(matrix.dims)
    parts = 3 if long == 3 * short else 1  # queries, keys and values apart
    long //= parts
    return parts * 5 * (4 * short * short * long + 2 * short**3)
