"""The constants of onecard/plan/scaling.py, from onecard/plan/references.toml and our own curves.

    python benchmarks/fit_scaling.py            prints constants, residuals and widths
    python benchmarks/fit_scaling.py --check    exit code 1 where scaling.py has other constants

The form is L = floor + (size / N^size_power + data / D^data_power)^joint; the law that is used has
joint = 1.

Three sets of losses are fitted together. llm.c's two runs (FineWeb, GPT-2's tokens) say how high the losses
are. open_lm's runs (C4, another tokenizer) and build-nanogpt's (FineWeb-Edu, GPT-2's tokens) have a floor of
their own each, so that only differences between them count.

open_lm's rows are runs that ended there. The others are runs read on their way, with the learning rate
still high (references.toml says how high): such a loss is higher than that of a run ended there. The fit
gives it `still_high` × (learning rate / its peak) on top and leaves that out of the law. Rows before 1B
tokens are left out: they are from the first twentieth of a schedule made for 10B.

How far the law can be trusted is read off fits that decide otherwise (`ALTERNATIVES`). How wide a range is
and how fast it grows outside the fitted region are round numbers chosen so that all of these fits lie
inside, at every point of a grid of sizes and horizons.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from onecard.plan.references import Reference, all_references
from onecard.plan.scaling import JOINT_LAW, LAW, Law, half_width

RESULTS = Path(__file__).resolve().parent / "results"
FIRST_TOKENS = 1e9
# Counts near one in the arithmetic, so that the fit is well conditioned.
N_UNIT, D_UNIT = 1e8, 3e9
ON_THEIR_WAY = ("llm.c 124M", "llm.c 350M", *(f"build-nanogpt {n}M" for n in (30, 124, 254)))
# open_lm counts embedding and head apart; this is one of the two tables, 50,432 rows.
OPEN_LM_TABLE = {10_600_000: 50_432 * 96, 79_000_000: 50_432 * 512, 154_000_000: 50_432 * 576}

Keep = Callable[[Reference], bool]


@dataclass(frozen=True)
class Fit:
    law: Law
    floors: dict[str, float]  # of every data set, in its own tokens
    still_high: float
    rows: tuple[Reference, ...]
    residuals: tuple[float, ...]  # fit − measured

    @property
    def rms(self) -> float:
        return math.sqrt(sum(r * r for r in self.residuals) / len(self.residuals))


def everything(row: Reference) -> bool:
    return True


def rows_of(keep: Keep = everything, first_tokens: float = FIRST_TOKENS) -> list[Reference]:
    on_their_way = [
        row
        for row in all_references()
        if row.model in ON_THEIR_WAY and (row.tokens or 0) >= first_tokens and keep(row)
    ]
    return [*on_their_way, *(row for row in all_references() if row.data == "C4" and keep(row))]


def fit(
    keep: Keep = everything,
    *,
    joint: bool = False,
    schedule: bool = True,
    tied: bool = False,
    first_tokens: float = FIRST_TOKENS,
) -> Fit:
    """Least squares: a search over the exponents, the rest is linear."""
    rows = rows_of(keep, first_tokens)
    n = np.array([row.parameters - (OPEN_LM_TABLE.get(row.parameters, 0) if tied else 0) for row in rows])
    d = np.array([row.tokens for row in rows], dtype=float)
    loss = np.array([row.loss for row in rows])
    names = sorted({row.data for row in rows}, key=lambda name: name != "FineWeb")
    data = np.array([[float(row.data == name) for name in names] for row in rows])
    rate = np.array([(row.lr or 0.0) * schedule for row in rows])

    def solve(size_power: float, data_power: float, power: float, balance: float) -> tuple[float, np.ndarray]:
        both = (n / N_UNIT) ** -size_power + math.exp(balance) * (d / D_UNIT) ** -data_power
        columns = np.column_stack([data, both**power, *([rate] if schedule else [])])
        constants = np.linalg.lstsq(columns, loss, rcond=None)[0]
        return float(((columns @ constants - loss) ** 2).sum()), constants

    powers = (0.3, 0.45, 0.7, 1.0) if joint else (1.0,)
    steps = np.array([0.1, 0.1, 0.1 if joint else 0.0, 0.25])
    starts = itertools.product((0.15, 0.3, 0.6, 0.9), (0.15, 0.3, 0.6, 0.9), powers, (-1.0, 0.0, 1.0))
    best = min((np.array(start) for start in starts), key=lambda start: solve(*start)[0])
    error = solve(*best)[0]
    while steps.max() > 1e-5:
        better = False
        # Along each exponent, and along two at once: they trade against each other.
        for move in itertools.product((-1, 0, 1), repeat=4):
            candidate = best + steps * move
            if candidate[:3].min() > 0.02 and (e := solve(*candidate)[0]) < error - 1e-13:
                best, error, better = candidate, e, True
        steps = steps if better else steps / 2

    # Exponents are rounded first, so that the other constants belong to the rounded ones.
    size_power, data_power, power = (round(float(x), 3) for x in best[:3])
    constants = solve(size_power, data_power, power, best[3])[1]
    floors = {name: round(float(x), 3) for name, x in zip(names, constants, strict=False)}
    scale = float(constants[len(names)]) ** (1 / power)
    law = Law(
        floor=floors["FineWeb"],
        size=_four_digits(scale * N_UNIT**size_power),
        size_power=size_power,
        data=_four_digits(scale * math.exp(best[3]) * D_UNIT**data_power),
        data_power=data_power,
        joint=power,
    )
    still_high = round(float(constants[-1]), 3) if schedule else 0.0
    residuals = []
    for row, count, weight in zip(rows, n, rate, strict=True):
        at = law.loss(float(count), row.tokens or 0.0) - law.floor + floors[row.data]
        fitted = at + still_high * float(weight)
        residuals.append(fitted - row.loss)
    return Fit(law, floors, still_high, tuple(rows), tuple(residuals))


def _four_digits(x: float) -> float:
    return float(f"{x:.4g}")


def without(millions: float) -> Keep:
    return lambda row: row.parameters != round(millions * 1e6)


# name: (the fit, whether it may speak about the smallest sizes and the shortest runs)
ALTERNATIVES: dict[str, tuple[Callable[[], Fit], bool]] = {
    "joint": (lambda: fit(joint=True), True),
    "no learning-rate term": (lambda: fit(schedule=False), True),
    "rows before 1B tokens too": (lambda: fit(first_tokens=0), True),
    "one table of open_lm's two": (lambda: fit(tied=True), True),
    "without 10.6M": (lambda: fit(without(10.6)), False),
    "without 154M": (lambda: fit(without(154)), True),
    "without FineWeb-Edu": (lambda: fit(lambda row: row.data != "FineWeb-Edu"), True),
}
GRID_SIZES = (1e6, 3e6, 1e7, 2e7, 4e7, 7.9e7, 1.24e8, 3.5e8, 1e9, 3.5e9)
GRID_HORIZONS = (2e7, 5e7, 2e8, 5e8, 1e9, 3e9, 1e10, 3.2e10, 1e11, 3.2e11)


def spreads(base: Fit) -> dict[tuple[float, float], tuple[float, str]]:
    """At every point of the grid, the alternative furthest from the law, and how far."""
    laws = {name: (make().law, small) for name, (make, small) in ALTERNATIVES.items()}
    return {
        (n, d): max(
            (abs(law.loss(n, d) - base.law.loss(n, d)), name)
            for name, (law, small) in laws.items()
            # Without open_lm's smallest model nothing says how losses rise below 79M of C4 and 0.8B tokens.
            if small or (n >= 7.9e7 and d >= 2e8)
        )
        for n in GRID_SIZES
        for d in GRID_HORIZONS
    }


def crossing(curve: Sequence[Sequence[float]], loss: float) -> float:
    """Tokens at which a falling curve first reaches a loss; straight lines over log tokens."""
    for (t0, l0), (t1, l1) in itertools.pairwise(curve):
        if l0 > loss >= l1 and t0 > 0:
            share = (l0 - loss) / (l0 - l1)
            return math.exp(math.log(t0) + share * (math.log(t1) - math.log(t0)))
    raise ValueError(f"the curve never reaches {loss}")


def multipliers() -> dict[str, float]:
    """How many of GPT-2's tokens one token of nanochat was worth, at GPT-2's final loss."""
    contenders = {}
    for name in ("tokens-to-loss", "tight-recipe"):
        for row in json.loads((RESULTS / f"2026-11-16-{name}-h200.json").read_text())["rows"]:
            contenders[row["contender"]] = row
    gpt2 = contenders["gpt2"]
    return {
        name: gpt2["tokens"] / crossing(contenders[name]["val"], gpt2["val_loss"])
        for name in ("2026", "matched", "2025")
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    base, joint = fit(), fit(joint=True)
    print(f"law        {asdict(base.law)}")
    print(f"joint law  {asdict(joint.law)}")
    print(f"floors {base.floors}, learning rate still at its peak costs {base.still_high}")
    print(f"residuals  rms {base.rms:.4f} (joint {joint.rms:.4f}), two of them {2 * base.rms:.3f}\n")
    print("| run | tokens | loss | fit − loss |\n|---|---|---|---|")
    for row, residual in zip(base.rows, base.residuals, strict=True):
        print(f"| {row.model} | {(row.tokens or 0) / 1e9:g}B | {row.loss:.3f} | {residual:+.3f} |")
    print("\nfurthest from the law, of the fits that decide otherwise; in brackets half the range")
    print("tokens  " + "".join(f"{n / 1e6:13g}M" for n in GRID_SIZES))
    apart = spreads(base)
    for d in GRID_HORIZONS:
        cells = (f"  {apart[n, d][0]:.2f} ({half_width(n, d):.2f})".rjust(14) for n in GRID_SIZES)
        print(f"{d / 1e9:6g}B " + "".join(cells))
    print("\ntokens of GPT-2 for one of nanochat")
    for name, worth in multipliers().items():
        print(f"{name:8s} {worth:.2f}")
    if options.check:
        return 0 if (base.law, joint.law) == (LAW, JOINT_LAW) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
