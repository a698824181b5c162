"""What benchmarks/plan_accuracy.py predicts, how far off that is, and the table of it. No torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from accuracy_grid import Case, case_of
from processes import Row

from onecard.hardware.cards import match_card
from onecard.hardware.measured import Measured
from onecard.plan.activations import TRYING_OUT
from onecard.plan.rates import Rates, rates_of

MIB, GIB = 2**20, 2**30
MEMORY, QUANTITIES = ("allocated", "reserved"), ("allocated", "reserved", "seconds")
MEDIAN = {"allocated": 0.02, "reserved": 0.02, "seconds": 0.08}
WORST = {"allocated": 0.06, "reserved": 0.06, "seconds": 0.20}
WORST_BYTES = 64 * MIB  # of a small model, a percentage is less than the allocator's grain
RATES = ("card", "bench")
COLD = "a process of its own, nothing compiled before"  # where a cap was tried


def rates_for(call: Row, dtype: str, kind: str = "card") -> Rates | None:
    """None where the card is not in the table (a CPU).

    card: its figures, with the bus of this machine; bench: all as `onecard bench` found, the host's launches
    in that minute among them.
    """
    card = match_card(call["card"], call["memory_gib"])
    if card is None:
        return None
    measured = Measured.from_json(call["bench"])
    found = rates_of(card, dtype, measured)
    if kind == "bench" or found is None:
        return found
    plain = rates_of(card, dtype)
    assert plain is not None
    return dataclasses.replace(
        plain, to_card=found.to_card, to_host=found.to_host, source="the card's figures"
    )


def predict(case: Case, call: Row, kind: str = "card") -> Row:
    """Bytes and seconds; for seconds None where the card is not known."""
    capability = call["compute_capability"]
    bill = case.bill(tuple(capability) if capability else None)
    rates = rates_for(call, case.dtype, kind)
    seconds = case.step_time(rates).seconds if rates is not None else None
    return {
        "allocated": bill.allocated, "reserved": bill.reserved, "need": bill.need, "host": bill.host,
        "seconds": seconds, "first_step": bill.tightest.name == TRYING_OUT,
    }  # fmt: skip


def least_seconds(row: Row) -> float:
    """Of all the times that a step was measured: what else a shared host does only adds to it."""
    return min([*row.get("earlier_seconds", []), row["measured"]["seconds"]])


def recompute(results: Row, kind: str = "card") -> list[Row]:
    """Every measured configuration with what the formulas of today say of it, and how far off that is.

    From the card's figures all are predicted for a host that is quiet, and compared with the least time that
    each was measured to take: shared, it changes from minute to minute (docs/speed.md).
    """
    found = []
    for row in results["rows"]:
        if "error" in row:
            continue
        case = case_of(row["config"])
        predicted = predict(case, results["calls"][row["call"]], kind)
        measured = row["measured"] | {"seconds": least_seconds(row)}
        entry: Row = {"name": case.name, "held_out": case.held_out, "family": case.family}
        for quantity in QUANTITIES:
            said, was = predicted[quantity], measured[quantity]
            entry[f"predicted_{quantity}"], entry[f"measured_{quantity}"] = said, was
            known = said is not None and was is not None
            entry[f"error_{quantity}"] = said / was - 1 if known else None
            entry[f"within_{quantity}"] = _within(quantity, said, was) if known else None
        ran = _ran(row, predicted["need"], first_step=predicted["first_step"])
        found.append(entry | {"ran_under_cap": ran})
    return found


def _within(quantity: str, said: float, was: float) -> bool:
    least = WORST_BYTES if quantity in MEMORY else 0.0
    return abs(said - was) <= max(WORST[quantity] * was, least)


def _ran(row: Row, need: int, *, first_step: bool = False) -> bool | None:
    """Did it run in what is predicted today? None where that was not tried.

    Where the first step needs most, in which kernels are tried out: only one that had nothing compiled yet
    has tried that.
    """
    if row.get("ran_under_cap") is None:
        return None
    if row["ran_under_cap"]:
        tried = not first_step or row["cap_in"] == COLD
        return True if tried and need >= row["ran_in_bytes"] else None
    return False if need <= row["cap_bytes"] else None


def summary(rows: Sequence[Row]) -> Row:
    """Median and worst by what was fitted to and what was not, and whether the bars hold."""
    splits = {
        "fitted": [row for row in rows if not row["held_out"]],
        "held_out": [row for row in rows if row["held_out"]],
    }
    return {name: _summary(those) for name, those in splits.items()}


def _summary(rows: Sequence[Row]) -> Row:
    found: Row = {"configurations": len(rows)}
    for quantity in QUANTITIES:
        known = [row for row in rows if row[f"error_{quantity}"] is not None]
        if not known:
            found[quantity] = None  # nothing was measured: no bar holds
            continue
        errors = [abs(row[f"error_{quantity}"]) for row in known]
        median, worst = statistics.median(errors), max(errors)
        beyond = [row["name"] for row in known if not row[f"within_{quantity}"]]
        found[quantity] = {
            "count": len(known), "median": median, "worst": worst,
            "worst_name": known[errors.index(worst)]["name"], "beyond": beyond,
            "holds": median <= MEDIAN[quantity] and not beyond,
        }  # fmt: skip
    for answer, name in ((True, "ran_under_cap"), (False, "ran_out"), (None, "not_tried")):
        found[name] = [row["name"] for row in rows if row["ran_under_cap"] is answer]
    return found


# --- telling


def report(results: Row, worst: int | None, kind: str) -> None:
    """The table on stdout: all rows, or the worst by each quantity."""
    rows = recompute(results, kind)
    for call in results["calls"]:
        if (bench := call["bench"]) is None:
            continue
        print(
            f"{call['card']}, torch {call['torch']}, {call['date']}: matmul {call['matmul_tflops']} TFLOPS, "
            f"launch {bench['launch_us']:.2f} us, to the card {bench['h2d_gbps']:.1f} and back "
            f"{bench['d2h_gbps']:.1f} GB/s"
        )
    print(f"{'':76}{'GiB allocated':>22}{'reserved':>9}{'ms a step':>24}  cap")
    if worst is None:
        for row in rows:
            _show(row)
    else:
        for quantity in QUANTITIES:
            known = [row for row in rows if row[f"error_{quantity}"] is not None]
            print(f"furthest off in {quantity}:")
            for row in sorted(known, key=lambda row: -abs(row[f"error_{quantity}"]))[:worst]:
                _show(row)
    failed = [row for row in results["rows"] if "error" in row]
    for row in failed:
        print(f"not measured: {row['name']}: {row['error']}")
    for name, found in summary(rows).items():
        print(f"{name.replace('_', ' ')}: {found['configurations']} configurations")
        for quantity in QUANTITIES:
            print(f"  {quantity:10}{_told(found[quantity], quantity)}")
        ran, out, untried = (len(found[k]) for k in ("ran_under_cap", "ran_out", "not_tried"))
        print(f"  {'under caps':10} {ran} ran, {out} ran out, {untried} not tried with today's need")
        for name_of_it in found["ran_out"]:
            print(f"    ran out: {name_of_it}")


def _show(row: Row) -> None:
    def percent(quantity: str) -> str:
        error = row[f"error_{quantity}"]
        return "-" if error is None else f"{error:+.1%}" + ("" if row[f"within_{quantity}"] else "!")

    def pair(quantity: str, unit: float, decimals: int) -> str:
        numbers = (row[f"predicted_{quantity}"], row[f"measured_{quantity}"])
        return "/".join("-" if n is None else f"{n / unit:.{decimals}f}" for n in numbers)

    cap = {True: "ran", False: "RAN OUT", None: "-"}[row["ran_under_cap"]]
    mark = "*" if row["held_out"] else " "
    print(
        f"{mark}{row['name']:75}{pair('allocated', GIB, 2):>14}{percent('allocated'):>8}"
        f"{percent('reserved'):>9}{pair('seconds', 1e-3, 1):>16}{percent('seconds'):>8}  {cap}"
    )


def _told(found: Row | None, quantity: str) -> str:
    if found is None:
        return "not measured"
    small = "" if quantity == "seconds" else " (or 64 MiB, of small models)"
    bar = f"bars {MEDIAN[quantity]:.0%} and {WORST[quantity]:.0%}{small}"
    beyond = f"; beyond: {len(found['beyond'])}" if found["beyond"] else ""
    verdict = "holds" if found["holds"] else "DOES NOT HOLD"
    return (
        f"median {found['median']:.2%}, worst {found['worst']:.2%} ({found['worst_name']}); "
        f"{bar}: {verdict}{beyond}"
    )
