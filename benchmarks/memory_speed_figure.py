"""Figures of what benchmarks/memory_speed.py measured: speed over memory beside the reference, and growth.

Growth stands beside what `onecard plan` says of the same runs today.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from processes import Row

from onecard.arch.layout import Setting, default_chunk
from onecard.arch.shapes import GPT2Shape
from onecard.hardware.cards import match_card
from onecard.plan.bill import training_bill
from onecard.plan.lines import GIB
from onecard.plan.rates import Rates, rates_of
from onecard.plan.speed import step_time

AXES = {"micro-batch": "batch", "block": "block", "depth": "n_layer", "width": "n_embd"}
_STYLES = {"none": ("C0", "o"), "block": ("C1", "s")}


def draw(results: Row, file: Path) -> None:
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise SystemExit("error: --draw needs matplotlib\nhint: pip install matplotlib") from None
    beside = [e for e in results["summary"] if "speed_ratio" in e and e.get("peak_allocated_gib")]
    grown = [r for r in results["rows"] if r["case"].get("axes") and "peak_allocated_gib" in r]
    rows = ([["points"] * 4] if beside else []) + (
        [[f"{axis} {what}" for axis in AXES] for what in ("GiB", "tokens/s")] if grown else []
    )
    if not rows:
        raise SystemExit("error: nothing in it to draw")
    figure = Figure(figsize=(12, 3.4 * len(rows)), layout="constrained")
    panels = figure.subplot_mosaic(rows)
    figure.suptitle(f"{results['card']}, torch {results['torch']}, {results['date']}", fontsize=10)
    if beside:
        _points(panels["points"], beside)
    if grown:
        _growth(panels, results, grown)
    figure.savefig(file, dpi=100)


def _points(panel: Any, entries: list[Row]) -> None:
    for entry in entries:
        at, wide = (entry["peak_allocated_gib"], entry["speed_ratio"]), entry["suite"] == "table"
        panel.plot(*at, "o" if wide else "s", color="C3" if "onecard" in entry["label"] else "C7")
        text = entry["label"] + ("" if wide else f" ({entry['suite']})")
        panel.annotate(text, at, xytext=(6, 4), textcoords="offset points", fontsize=8)
        panel.set(ylabel=f"tokens/s over {entry['against']}'s")
    panel.set(xlabel="peak GiB allocated")
    panel.margins(0.2)


def _growth(panels: Any, results: Row, rows: list[Row]) -> None:
    card = match_card(results["card"])
    rates = rates_of(card, "bfloat16") if card is not None else None
    for axis, name in AXES.items():
        for recompute, (colour, mark) in _STYLES.items():
            line = sorted(
                (row["case"][name], row["peak_allocated_gib"], row["tokens_per_s"], *predicted(row, rates))
                for row in rows
                if axis in row["case"]["axes"] and row["case"]["settings"]["recompute"] == recompute
            )
            if not line:
                continue
            xs, gib, speed, said_gib, said_speed = zip(*line, strict=True)
            for what, measured, said in (("GiB", gib, said_gib), ("tokens/s", speed, said_speed)):
                panel = panels[f"{axis} {what}"]
                panel.plot(xs, measured, mark, color=colour, label=f"recompute {recompute}: measured")
                if said[0] is not None:
                    panel.plot(xs, said, "-", color=colour, lw=1, label="predicted")
                panel.set(
                    xlabel=axis,
                    ylabel=f"peak {what}" if what == "GiB" else what,
                    ylim=(0, 1.08 * panel.dataLim.ymax),
                )
                panel.set_xscale("log", base=2)
        for what in ("GiB", "tokens/s"):
            ticks = sorted({row["case"][name] for row in rows if axis in row["case"]["axes"]})
            panels[f"{axis} {what}"].set_xticks(ticks, labels=map(str, ticks))
            panels[f"{axis} {what}"].minorticks_off()
    panels["micro-batch GiB"].legend(fontsize=7)


def predicted(row: Row, rates: Rates | None) -> tuple[float, float | None]:
    """GiB of a steady step, and tokens per second where the card is known."""
    case = row["case"]
    knobs = case["settings"]
    shape = GPT2Shape(case["n_layer"], case["n_head"], case["n_embd"], case["vocab"], case["block"], False)
    setting = Setting(
        case["batch"], knobs.get("loss_chunk") or default_chunk(case["vocab"]), knobs["recompute"],
        knobs["offload"], knobs["master_weights"], knobs["optim_states"], case["compile"],
        bool(knobs.get("graphs")),
    )  # fmt: skip
    gib = training_bill(shape, setting).steady / GIB
    if rates is None:
        return gib, None
    sequences = case["batch"] * case["accumulation"]
    return gib, step_time(shape, setting, "bfloat16", rates, sequences).tokens_per_s
