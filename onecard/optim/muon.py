"""Muon: momentum whose update is made orthogonal, a few equal matrices at a time.

An update with all singular values near one moves a matrix equally in every direction, while AdamW's is
dominated by a few directions. The orthogonal factor comes from a polynomial in the matrix itself, a few
matmuls in bf16. It is not exact, and need not be.

A few matrices at a time: one by one, the many small kernels are launch-bound on a fast card. All matrices
stacked by shape, the usual method, need two more copies of them during a step. The workspace is allocated
once; a step allocates only a few numbers per row in addition.

Momentum may be fp32, bf16 or int8 in blocks; low-bit storage is rounded stochastically, as in lowbit.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from onecard.arch.layout import BLOCK
from onecard.arch.parameters import matrix_of
from onecard.model.rounding import noise_bits, round_to_bf16
from onecard.optim.lowbit import Int8State, decoded_blocks, encode_first

Momentum = Tensor | Int8State

# Five steps of x -> a x + b (x xᵀ) x + c (x xᵀ)² x. Newton-Schulz: the same odd quintic each time, steep at
# zero, as in Muon's first publication. Polar Express (arXiv 2505.16932): the best quintic for each step.
ITERATIONS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "newton-schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar-express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
# Polar Express diverges above one: a margin for the rounding of the norm.
_CUSHION = {"newton-schulz": 1.0, "polar-express": 1.01}
_SMALLEST = {"newton-schulz": 1e-7, "polar-express": 1e-6}
# Decay of the average of a neuron's update scale (refined rule).
_VARIANCE_BETA = 0.9


class MuonHyper(NamedTuple):
    """What changes from step to step, as 0-dim fp32 tensors on the device of the parameters."""

    grad_scale: Tensor  # the gradient is divided by it
    lr: Tensor
    weight_decay: Tensor
    momentum: Tensor


class Matrix(NamedTuple):
    """One parameter as Muon sees it: `parts` matrices of (rows, columns) one below the other."""

    parts: int
    rows: int
    columns: int

    @classmethod
    def of(cls, name: str, shape: Size) -> Matrix:
        """The matrix of a parameter. Packed queries, keys and values are made orthogonal one by one."""
        return cls(*matrix_of(name, shape))

    @property
    def elements(self) -> int:
        return self.parts * self.rows * self.columns

    @property
    def place(self) -> int:
        """Elements the matrix takes in a flat buffer: whole blocks."""
        return -(-self.elements // BLOCK) * BLOCK

    @property
    def side(self) -> int:
        """The smaller dimension: the side of the matrix's products with itself."""
        return min(self.rows, self.columns)

    def variances(self, count: int = 1) -> Size:
        """Size of the variances, one number per neuron: along the longer side, or the rows of a square."""
        parts = count * self.parts
        return Size((parts, self.rows, 1) if self.rows >= self.columns else (parts, 1, self.columns))

    def stacked(self, flat: Tensor, count: int) -> Tensor:
        """`count` matrices that lie one after the other, as one stack."""
        padded = flat[: count * self.place].view(count, self.place)[:, : self.elements]
        return padded.view(count * self.parts, self.rows, self.columns)


class Piece(NamedTuple):
    """The buffers of one matrix, flat and padded to whole blocks.

    `first`, together with the step's key, chooses the noise of low-bit storage, as in lowbit.adamw_chunk_.
    """

    grad: Tensor
    master: Tensor
    momentum: Momentum
    first: Tensor


class Muon:
    """Steps on batches of equal matrices, with a workspace for the largest batch of `together`.

    `dtype` is what the iteration computes in. bf16 is enough for it.
    """

    def __init__(
        self,
        together: Iterable[tuple[Matrix, int]],
        device: str,
        dtype: torch.dtype,
        *,
        refined: bool,
        compiled: bool,
    ) -> None:
        together = list(together)
        self.dtype = dtype
        self.refined, self.method = refined, "polar-express" if refined else "newton-schulz"
        longest = max(count * m.place for m, count in together)
        largest = max(count * m.parts * m.side**2 for m, count in together)
        self._plain_scale = torch.ones(
            (1, 1, 1), dtype=torch.promote_types(dtype, torch.float32), device=device
        )
        self._x, self._y = (torch.zeros(longest, dtype=dtype, device=device) for _ in range(2))
        self._gram, self._poly = (torch.zeros(largest, dtype=dtype, device=device) for _ in range(2))
        self._ahead: Callable[..., Any] = ahead_
        self._apply: Callable[..., Any] = apply_
        if compiled:
            self._ahead, self._apply = (
                torch.compile(f, dynamic=False, fullgraph=True) for f in (ahead_, apply_)
            )

    def take_workspace(self) -> None:
        """Have cuBLAS allocate its workspace, which it does at a product where it has none."""
        torch.bmm(self._plain_scale, self._plain_scale)

    def step(
        self, matrix: Matrix, pieces: Sequence[Piece], variance: Tensor | None, hyper: MuonHyper, key: Tensor
    ) -> None:
        """One step of each matrix, in place. `variance` has those of all matrices, one after the other."""
        for number, piece in enumerate(pieces):
            x = self._x[number * matrix.place : (number + 1) * matrix.place]
            self._ahead(
                _in_blocks(piece.grad), _blocks_of(piece.momentum), _in_blocks(x), hyper, key, piece.first
            )
        x_PRC, y_PRC = (matrix.stacked(flat, len(pieces)) for flat in (self._x, self._y))
        side = (len(x_PRC), matrix.side, matrix.side)
        gram, poly = (flat[: math.prod(side)].view(side) for flat in (self._gram, self._poly))
        if self.refined:
            equalise_rows_(x_PRC)
        x_PRC, spare_PRC = orthogonalise_(x_PRC, y_PRC, gram, poly, self.method)
        scale = self._plain_scale
        if self.refined:
            assert variance is not None
            scale = neuron_scale_(x_PRC, variance, spare_PRC)
        # A tall matrix moves further, by the root of rows over columns.
        stretch = max(1.0, matrix.rows / matrix.columns) ** 0.5
        for number, piece in enumerate(pieces):
            here = slice(number * matrix.parts, (number + 1) * matrix.parts)
            master_PRC = matrix.stacked(piece.master, 1)
            own = scale[here] if self.refined else scale
            self._apply(
                master_PRC, x_PRC[here], own, hyper, key, piece.first, stretch=stretch, cautious=self.refined
            )


def ahead_(grad: Tensor, momentum: Momentum, x: Tensor, hyper: MuonHyper, key: Tensor, first: Tensor) -> None:
    """Move the average towards the gradient, and write Nesterov's momentum to x.

    All tensors are in blocks, (n / BLOCK, BLOCK): the compiler then makes one kernel of it.
    """
    compute = torch.promote_types(grad.dtype, torch.float32)
    gradient = grad.to(compute) / hyper.grad_scale
    before = decoded_blocks(momentum, compute)
    average = before + (gradient - before) * (1 - hyper.momentum)
    x.copy_(gradient + (average - gradient) * hyper.momentum)
    if isinstance(momentum, Int8State):
        noise = noise_bits(grad.numel(), key, first, grad.device)
        state = encode_first(average, noise)
        momentum.codes.copy_(state.codes.view_as(momentum.codes))
        momentum.scales.copy_(state.scales)
    elif momentum.dtype == torch.bfloat16:
        # The upper half of the noise: the lower half rounds the weight.
        noise = noise_bits(grad.numel(), key, first, grad.device).view_as(average) >> 16
        momentum.copy_(round_to_bf16(average, noise))
    else:
        momentum.copy_(average)


def apply_(
    master_PRC: Tensor, x_PRC: Tensor, scale: Tensor, hyper: MuonHyper, key: Tensor, first: Tensor,
    *, stretch: float, cautious: bool,
) -> None:  # fmt: skip
    """master -= lr × (stretch × scale × x + decay × master).

    Cautious: only weights that the update makes smaller decay, and their decay is stretched as well.
    """
    compute = torch.promote_types(master_PRC.dtype, torch.float32)
    before, update = master_PRC.to(compute), x_PRC.to(compute) * (scale * stretch)
    decayed = before * hyper.weight_decay
    if cautious:
        decayed = torch.where(update * before >= 0, decayed * stretch, 0.0)
    weights = before - hyper.lr * (update + decayed)
    if master_PRC.dtype == torch.bfloat16:
        noise = noise_bits(master_PRC.numel(), key, first, master_PRC.device)
        weights = round_to_bf16(weights, noise.view(master_PRC.shape))
    master_PRC.copy_(weights)


def orthogonalise_(
    x_PRC: Tensor, y_PRC: Tensor, gram: Tensor, poly: Tensor, method: str = "polar-express"
) -> tuple[Tensor, Tensor]:
    """The approximate orthogonal factor of each matrix in x, and a spare tensor: x and y, in either order."""
    tall = x_PRC.shape[-2] > x_PRC.shape[-1]
    norm = torch.linalg.vector_norm(x_PRC, dim=(-2, -1), keepdim=True, dtype=_wide(x_PRC))
    x_PRC.div_(norm * _CUSHION[method] + _SMALLEST[method])
    for a, b, c in ITERATIONS[method]:
        # Products have the smaller side; each line is one matmul, with its sum and factors.
        torch.bmm(*((x_PRC.mT, x_PRC) if tall else (x_PRC, x_PRC.mT)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        torch.baddbmm(x_PRC, *((x_PRC, poly) if tall else (poly, x_PRC)), beta=a, out=y_PRC)
        x_PRC, y_PRC = y_PRC, x_PRC
    return x_PRC, y_PRC


def orthogonalised(g_PRC: Tensor, method: str = "polar-express") -> Tensor:
    """orthogonalise_ without a given workspace, on a copy of its argument."""
    x_PRC = g_PRC.clone() if g_PRC.dtype == torch.float64 else g_PRC.bfloat16()
    side = min(x_PRC.shape[-2:])
    gram, poly = (x_PRC.new_empty(len(x_PRC), side, side) for _ in range(2))
    return orthogonalise_(x_PRC, torch.empty_like(x_PRC), gram, poly, method)[0]


def equalise_rows_(x_PRC: Tensor) -> None:
    """Give all rows the same norm, their mean square unchanged (MuonEq, arXiv 2603.28254)."""
    rows = row_norms(x_PRC)
    whole = torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
    x_PRC.mul_(whole / x_PRC.shape[-2] ** 0.5 / rows.clamp_min(1e-6))


def neuron_scale_(x_PRC: Tensor, variance: Tensor, spare_PRC: Tensor) -> Tensor:
    """Factors that equalise the neurons' updates (NorMuon, arXiv 2510.05491) but keep the matrix's norm.

    They also bring the norm to that of an exactly orthogonal matrix (Muon+, arXiv 2602.21545). `spare_PRC` is
    overwritten.
    """
    along = -1 if variance.shape[-1] == 1 else -2
    norms = row_norms(x_PRC) if along == -1 else column_norms(x_PRC, spare_PRC)
    whole = torch.linalg.vector_norm(norms, dim=(-2, -1), keepdim=True).clamp_min(1e-6)
    snap = min(x_PRC.shape[-2:]) ** 0.5 / whole
    norms = norms * snap
    mean_square = norms.square() / x_PRC.shape[along]
    variance.lerp_(mean_square.to(variance.dtype), 1 - _VARIANCE_BETA)
    step = variance.clamp_min(1e-10).rsqrt()
    after = torch.linalg.vector_norm(norms * step, dim=(-2, -1), keepdim=True)
    before = torch.linalg.vector_norm(norms, dim=(-2, -1), keepdim=True)
    return snap * step * (before / after.clamp_min(1e-10))


def row_norms(x_PRC: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_PRC, dim=-1, keepdim=True, dtype=_wide(x_PRC))


def column_norms(x_PRC: Tensor, spare_PRC: Tensor) -> Tensor:
    """Norms of the columns, as rows of the transposed matrix. Across rows, torch's kernel would take a
    workspace larger than the matrix, by card (two fp32 copies of 3 × 1024 × 4096 on an H200)."""
    parts, rows, columns = x_PRC.shape
    turned_PCR = spare_PRC.view(parts, columns, rows)
    turned_PCR.copy_(x_PRC.mT)
    return row_norms(turned_PCR).mT


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _in_blocks(flat: Tensor) -> Tensor:
    return flat.view(-1, BLOCK)


def _blocks_of(momentum: Momentum) -> Momentum:
    if isinstance(momentum, Int8State):
        return Int8State(_in_blocks(momentum.codes), momentum.scales)
    return _in_blocks(momentum)
