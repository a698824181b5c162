"""How far forecasts are off on published runs: `python benchmarks/forecast.py DIR --out FILE.json`.

DIR has `index.jsonl` and a CSV for each run (step, tokens, loss_train, loss_val, lr). A forecast is given the
first 30, 50 or 70% of a run and its learning-rate schedule; the target is its smoothed last 2%. Two ways:
what is learnt leaves out the run alone (other runs of its family are known), or its whole family. Errors are
in nats; the mean over families of their means counts. `--fit` also writes what the product ships,
onecard/report/forecast/learnt.json.

Constants in onecard/report/forecast and forecast_fit.py are the same for all runs. They were chosen by
leave-family-out cross validation; nothing is set for a run or a file.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from forecast_fit import (
    SHARES,
    Extension,
    Fit,
    Outcome,
    extensions,
    fitted_horizons,
    fitted_width,
    half_of,
    left_out,
    plain_forecasts,
    runs_in,
)

import onecard.report.forecast

LEARNT = Path(onecard.report.forecast.__file__).parent / "learnt.json"
# The requirements: mean error by share of the run.
REQUIRED = {"run left out": (0.035, 0.020, 0.012), "family left out": (0.045, 0.030, 0.018)}
LARGE, NOISES = 0.12, 3.0
HALF = 0.04
COVERED = (0.7, 0.9)
EXTENSION = 0.03
Numbers = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--fit", action="store_true", help=f"write {LEARNT.name}")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    runs = runs_in(given.folder)
    fit = Fit(runs)
    ways = {
        "run left out": left_out(fit, lambda run: run.name),
        "family left out": left_out(fit, lambda run: run.family),
    }
    if given.fit:
        write_learnt(fit, [o for outcomes in ways.values() for o in outcomes])
    result = judged(fit, ways)
    if given.out:
        about = {
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "command": f"python benchmarks/forecast.py DIR --out {given.out}",
            "runs": len(runs),
        }
        given.out.write_text(json.dumps(about | result, indent=1) + "\n", encoding="utf-8")
    show(result)
    return 0 if all(row["met"] for row in result["requirements"]) else 1


def write_learnt(fit: Fit, outcomes: Sequence[Outcome]) -> None:
    known, _ = fit.without(lambda run: True)
    width = fitted_width(outcomes)
    sources = sorted({(run.source, run.licence) for run in fit.runs})
    stored = {
        "about": "Fitted by benchmarks/forecast.py --fit. learnt.py says what the numbers are.",
        "sources": [f"{repo} ({licence})" for repo, licence in sources],
        "gain": short(known.gain),
        "width": short(width),
        "horizons": round(fitted_horizons(extensions(fit), width), 3),
    }
    rows = [json.dumps(short([w, *row])) for w, row in zip(known.weights, known.rows, strict=True)]
    head = json.dumps(stored, indent=1)[:-2]
    text = head + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    LEARNT.write_text(text, encoding="utf-8")


def short(numbers: Sequence[float]) -> list[float]:
    return [float(f"{number:.4g}") for number in numbers]


# --- judging --------------------------------------------------------------------------------------------


def judged(fit: Fit, ways: dict[str, list[Outcome]]) -> Numbers:
    rows = []
    both = [o for outcomes in ways.values() for o in outcomes]
    # Each range is by a width fitted to the other families.
    widths = {f: fitted_width([o for o in both if o.family != f]) for f in {o.family for o in both}}
    for way, outcomes in ways.items():
        for share in SHARES:
            chosen = [(o, half_of(o, widths[o.family])) for o in outcomes if o.moment.share == share]
            rows.append({"way": way, "seen": share} | measured(chosen))
    longer = extended(extensions(fit), widths)
    return {
        "requirements": requirements(rows, longer),
        "rows": rows,
        "beside": plain_rows(fit),
        "longer": longer,
    }


def plain_rows(fit: Fit) -> list[Numbers]:
    rows = []
    for share in SHARES:
        forecasts = [(run, plain_forecasts(run, share)) for run in fit.runs]
        for name in ("power law", "last value"):
            off = [(run.family, abs(found[name] - run.target)) for run, found in forecasts]
            rows.append(
                {"forecast": name, "seen": share, "error": over_families(off), "error over runs": over(off)}
            )
    return rows


def measured(chosen: Sequence[tuple[Outcome, float]]) -> Numbers:
    off = [(o.family, abs(o.off)) for o, _ in chosen]
    law = [(o.family, abs(o.found.loss - o.moment.run.target)) for o, _ in chosen]
    last = [(o.family, abs(o.loss - o.moment.run.plain_target)) for o, _ in chosen]
    held = [(o.family, float(abs(o.off) <= half)) for o, half in chosen]
    worst = sorted(chosen, key=lambda pair: -abs(pair[0].off))
    large = [(o, half) for o, half in worst if abs(o.off) > max(LARGE, NOISES * o.moment.run.noise)]
    halves = sorted(half for _, half in chosen)
    return {
        "error": over_families(off),
        "error over runs": over(off),
        "error of the law alone": over_families(law),
        "error to the plain mean of the last 2%": over_families(last),
        "by family": by_family(off),
        "covered": over_families(held),
        "covered over runs": over(held),
        "covered by family": by_family(held),
        "half": round(halves[len(halves) // 2], 4),
        "worst": [named(o, half) for o, half in worst[:5]],
        "large": [named(o, half) for o, half in large],
        "large and outside the range": [named(o, half) for o, half in large if abs(o.off) > half],
    }


def named(o: Outcome, half: float) -> Numbers:
    return {"run": o.moment.run.name, "error": round(o.off, 4), "half": round(half, 4)}


def extended(pairs: Sequence[Extension], widths: dict[str, tuple[float, ...]]) -> Numbers:
    """A finished run's forecast of one 2 to 3 times as long, of the same model and recipe."""
    wider = {
        f: fitted_horizons([pair for pair in pairs if pair.family != f], widths[f])
        for f in {pair.family for pair in pairs}
    }
    halves = [half_of(p.outcome, widths[p.family]) * wider[p.family] for p in pairs]
    off = [(p.family, abs(p.off)) for p in pairs]
    power = [(p.family, abs(p.power_law - p.long.target)) for p in pairs]
    held = [(f, float(error <= half)) for (f, error), half in zip(off, halves, strict=True)]
    worst = sorted(pairs, key=lambda p: -abs(p.off))[:5]
    return {
        "n": len(pairs),
        "error": over_families(off),
        "error over runs": over(off),
        "by family": by_family(off),
        "power law": over_families(power),
        "power law over runs": over(power),
        "covered": over_families(held),
        "half": round(sorted(halves)[len(halves) // 2], 4),
        "worst": [f"{p.outcome.moment.run.name} to {p.long.name}: {p.off:+.3f}" for p in worst],
    }


def requirements(rows: Sequence[Numbers], longer: Numbers) -> list[Numbers]:
    found: list[Numbers] = []

    def add(what: str, value: float, low: float, high: float) -> None:
        met = low <= value <= high
        found.append({"what": what, "value": round(value, 4), "least": low, "most": high, "met": met})

    for row in rows:
        name = f"{row['way']}, {row['seen']:.0%} seen"
        add(f"{name}: error", row["error"], 0.0, REQUIRED[row["way"]][SHARES.index(row["seen"])])
        add(f"{name}: share covered", row["covered"], *COVERED)
        if row["seen"] == 0.5:
            add(f"{name}: median half-width", row["half"], 0.0, HALF)
            add(f"{name}: large errors outside the range", len(row["large and outside the range"]), 0, 0)
    name = f"finished runs to ones 2 to 3 times as long, n = {longer['n']}"
    add(f"{name}: error", longer["error"], 0.0, EXTENSION)
    return found


Pairs = Sequence[tuple[str, float]]


def by_family(pairs: Pairs) -> dict[str, float]:
    families = sorted({family for family, _ in pairs})
    return {f: over([(f, value) for family, value in pairs if family == f]) for f in families}


def over_families(pairs: Pairs) -> float:
    return over(list(by_family(pairs).items()))


def over(pairs: Pairs) -> float:
    return round(math.fsum(value for _, value in pairs) / len(pairs), 4)


def show(result: Numbers) -> None:
    print(f"{'':20}seen   error  over runs  law alone  covered   half  worst")
    for row in result["rows"]:
        worst = row["worst"][0]
        print(
            f"{row['way']:20}{row['seen']:4.0%}  {row['error']:.4f}     {row['error over runs']:.4f}"
            f"     {row['error of the law alone']:.4f}     {row['covered']:4.0%}  {row['half']:.3f}"
            f"  {worst['error']:+.3f} ± {worst['half']:.3f} {worst['run']}"
        )
    for row in result["beside"]:
        print(f"{row['forecast']:20}{row['seen']:4.0%}  {row['error']:.4f}     {row['error over runs']:.4f}")
    longer = result["longer"]
    print(f"to 2 to 3 times the length: {json.dumps({**longer, 'worst': longer['worst'][0]})}")
    for row in result["requirements"]:
        bounds = f"{row['least']:g} to {row['most']:g}"
        print(f"{'met    ' if row['met'] else 'NOT MET'} {row['what']}: {row['value']} ({bounds})")


if __name__ == "__main__":
    sys.exit(main())
