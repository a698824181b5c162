"""A law of the loss with what published runs say about its parameters.

loss(t) = floor + height × (progress(t) / progress(now)) ** -alpha - gain × cooled(t) + a slow drift

The drift is a Gaussian process over log steps: no law is exact to the thousandth, and points that are far
back say less about the end. For a given alpha all is linear and normal, so floor, height and gain are
integrated out exactly; alphas are a grid, weighted by how well each explains the curve and by how usual it
is. Constants are from leave-family-out cross validation (benchmarks/forecast.py); what differs between runs
is in learnt.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.report.forecast.rates import Rates, Shape
from onecard.report.forecast.seen import Seen

ALPHAS = tuple(0.3 * (1.6 / 0.3) ** (i / 15) for i in range(16))
# The first is the one that a run's features are counted by.
SHAPES = (Shape(0.4, 0.3, 20.0), Shape(0.2, 0.3, 20.0), Shape(0.4, 1.0, 150.0))
PARTICLES = tuple((shape, alpha) for shape in SHAPES for alpha in ALPHAS)
USUAL_ALPHA = (-0.4, 0.11)  # of its logarithm: mean, standard deviation
GAIN_WIDTH = 0.5  # of the gain around what is usual
EARLY_STEPS = 50.0  # progress that a run has made before its first step, as it were
DRIFT_OF_SLOPE, LEAST_DRIFT, DRIFT_LENGTH, DRIFT_GROWS = 0.05, 0.001, 1.5, 0.3
EARLY_DRIFT = 1300.0  # steps until which the drift is more than twice as large
NOISE_SCALE = 2.0
Vector = list[float]


@dataclass(frozen=True)
class Evidence:
    """What the seen points say, before anything is assumed: sums that a posterior needs, by particle."""

    matrices: list[list[Vector]]  # 3 × 3 each
    vectors: list[Vector]
    square: float
    carried: list[Vector]  # how the drift at the end follows from the points
    carried_loss: float
    drift: float  # variance of the drift at the end, given the points
    at_end: list[Vector]  # floor's, height's and gain's part in the loss at the end
    at_now: Vector  # gain's part in the law's loss at the last point
    level: float  # the last loss: all losses count from it
    slope: float  # a first estimate of -d loss / d log progress
    progress: float
    progress_end: float
    cooled: float
    cooled_end: float
    noise: float
    points: int


@dataclass(frozen=True)
class Posterior:
    loss: float
    width: float  # standard deviation
    slope: float
    alpha: float
    gain: float
    gain_width: float
    level: float  # the law's loss at the last point


def evidence_of(seen: Seen, rates: Rates, later: Rates, end: float) -> Evidence:
    """Of points under `rates`, for the loss at `end` under `later`: the same, or those of another run."""
    n = len(seen.steps)
    progress = {shape: _progress(seen, rates, later, end, shape) for shape in SHAPES}
    cooled = {
        shape: [*(rates.cooled(step, shape) for step in seen.steps), later.cooled(end, shape)]
        for shape in SHAPES
    }
    when = [math.log(step) for step in (*seen.steps, end)]
    reached = progress[SHAPES[0]]
    slope = _slope([math.log(p / reached[n - 1]) for p in reached[:n]], seen.losses)
    drift = _drift(when, n, DRIFT_OF_SLOPE * slope + LEAST_DRIFT)
    noise = [(NOISE_SCALE * seen.noise) ** 2 / count + 1e-9 for count in seen.counts]
    factor = cholesky([[drift[i][j] + (noise[i] if i == j else 0.0) for j in range(i + 1)] for i in range(n)])
    level = seen.losses[-1]
    loss = _forward(factor, [y - level for y in seen.losses])
    one = _forward(factor, [1.0] * n)
    to_end = _forward(factor, drift[n][:n])
    gains = {shape: _forward(factor, [-c for c in cooled[shape][:n]]) for shape in SHAPES}
    matrices, vectors, carried, at_end = [], [], [], []
    for shape, alpha in PARTICLES:
        powers = [(p / progress[shape][n - 1]) ** -alpha for p in progress[shape]]
        columns = (one, _forward(factor, powers[:n]), gains[shape])
        matrices.append([[_dot(a, b) for b in columns] for a in columns])
        vectors.append([_dot(a, loss) for a in columns])
        carried.append([_dot(a, to_end) for a in columns])
        at_end.append([1.0, powers[n], -cooled[shape][n]])
    usual = cooled[SHAPES[0]]
    return Evidence(
        matrices, vectors, _dot(loss, loss), carried, _dot(loss, to_end), drift[n][n] - _dot(to_end, to_end),
        at_end, [-cooled[shape][n - 1] for shape, _ in PARTICLES], level, slope, reached[n - 1], reached[n],
        usual[n - 1], usual[n], seen.noise, n,
    )  # fmt: skip


def _progress(seen: Seen, rates: Rates, later: Rates, end: float, shape: Shape) -> Vector:
    seen_progress = [rates.progress(step, shape.power) + EARLY_STEPS for step in seen.steps]
    return [*seen_progress, later.progress(end, shape.power) + EARLY_STEPS]


def posterior(evidence: Evidence, log_gain: float, gain_width: float = GAIN_WIDTH) -> Posterior:
    """The loss at the end where the gain of a cool-down is usually exp(log_gain)."""
    usual = math.exp(log_gain)
    precision = (1e-8, 1e-6, 1 / (gain_width * usual) ** 2)
    weights, rows = [], []
    for i, (_, alpha) in enumerate(PARTICLES):
        matrix = [
            [evidence.matrices[i][a][b] + (precision[a] if a == b else 0.0) for b in range(3)]
            for a in range(3)
        ]
        vector = [*evidence.vectors[i][:2], evidence.vectors[i][2] + precision[2] * usual]
        inverse, determinant = _inverse(matrix)
        found = [_dot(row, vector) for row in inverse]
        off = evidence.square + precision[2] * usual**2 - _dot(vector, found)
        unusual = (math.log(alpha) - USUAL_ALPHA[0]) / USUAL_ALPHA[1]
        weights.append(-0.5 * (off + math.log(determinant) + unusual**2) - (20 if found[1] <= 0 else 0))
        free = [a - b for a, b in zip(evidence.at_end[i], evidence.carried[i], strict=True)]
        mean = _dot(free, found) + evidence.carried_loss
        variance = _dot(free, [_dot(row, free) for row in inverse]) + evidence.drift
        level = found[0] + found[1] + evidence.at_now[i] * found[2]
        rows.append((mean, variance, found, inverse[2][2], alpha, level))
    top = max(weights)
    weights = [math.exp(w - top) for w in weights]
    total = math.fsum(weights)
    weights = [w / total for w in weights]

    def expected(values: Sequence[float]) -> float:
        return math.fsum(w * v for w, v in zip(weights, values, strict=True))

    loss, gain = expected([r[0] for r in rows]), expected([r[2][2] for r in rows])
    return Posterior(
        loss=loss + evidence.level,
        width=math.sqrt(expected([r[1] + (r[0] - loss) ** 2 for r in rows])),
        slope=expected([r[2][1] * r[4] for r in rows]),
        alpha=expected([r[4] for r in rows]),
        gain=gain,
        gain_width=math.sqrt(expected([r[3] + (r[2][2] - gain) ** 2 for r in rows])),
        level=evidence.level + expected([r[5] for r in rows]),
    )


def _slope(far: Vector, losses: Vector) -> float:
    """-d loss / d log progress over the last part, by least squares; 0.01 at least."""
    pairs = list(zip(far, losses, strict=True))
    late = [pair for pair in pairs if pair[0] >= math.log(0.4)]
    pairs = late if len(late) >= 4 else pairs
    mean_x = math.fsum(x for x, _ in pairs) / len(pairs)
    mean_y = math.fsum(y for _, y in pairs) / len(pairs)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    return (
        max(-math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread, 0.01) if spread > 0 else 0.01
    )


def _drift(when: Vector, n: int, size: float) -> list[Vector]:
    """Covariance of the drift between all points and the end."""
    sizes = [
        size * (1 + EARLY_DRIFT / math.exp(w)) * math.exp(DRIFT_GROWS * max(when[n - 1] - w, 0.0))
        for w in when
    ]
    return [
        [sizes[i] * sizes[j] * math.exp(-abs(when[i] - when[j]) / DRIFT_LENGTH) for j in range(n + 1)]
        for i in range(n + 1)
    ]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(float.__mul__, a, b))


def cholesky(lower: list[Vector]) -> list[Vector]:
    """The factor of a positive definite matrix given by its lower rows, row by row."""
    factor: list[Vector] = []
    for i, row in enumerate(lower):
        new: Vector = []
        for j in range(i):
            new.append((row[j] - _dot(new, factor[j][:j])) / factor[j][j])
        new.append(math.sqrt(max(row[i] - _dot(new, new), 1e-18)))
        factor.append(new)
    return factor


def _forward(factor: list[Vector], vector: Vector) -> Vector:
    """The solution x of factor @ x = vector."""
    solved: Vector = []
    for row, value in zip(factor, vector, strict=True):
        solved.append((value - _dot(row[:-1], solved)) / row[-1])
    return solved


def _inverse(m: list[Vector]) -> tuple[list[Vector], float]:
    """Inverse and determinant of a symmetric 3 × 3 matrix."""
    a, b, c, d, e, f = m[0][0], m[0][1], m[0][2], m[1][1], m[1][2], m[2][2]
    i0, i1, i2 = d * f - e * e, c * e - b * f, b * e - c * d
    determinant = a * i0 + b * i1 + c * i2
    i3, i4, i5 = a * f - c * c, b * c - a * e, a * d - b * b
    rows = [[i0, i1, i2], [i1, i3, i4], [i2, i4, i5]]
    return [[x / determinant for x in row] for row in rows], max(determinant, 1e-300)
