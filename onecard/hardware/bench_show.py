"""`onecard bench`: decides what to measure, shows how far it is, and prints what came out."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onecard import terminal
from onecard.arch import dial
from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.errors import UserError
from onecard.hardware.bench import Bench, attention_label, computing_on, describe, measure
from onecard.hardware.bench_sizes import CARD_SIZES
from onecard.hardware.cards import Card, match_card
from onecard.hardware.machine import resolve_device
from onecard.hardware.measured import Measured, save_measured
from onecard.hardware.power import PowerSweep, parse_limits, sweep
from onecard.language import _, ngettext, number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

INTERRUPTED = 130
SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 600.0


def bench_command(
    config: str | None, *, seconds: float, device: str, as_json: bool, power_limits: str | None
) -> int:
    """Measure, keep the record, show it; with power limits, walk through these instead."""
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        raise UserError(
            _("--seconds {n:g} is out of range").format(n=seconds),
            why=_("it takes {least:g} to {most:g}; about 20 give steady figures").format(
                least=SHORTEST_SECONDS, most=LONGEST_SECONDS
            ),
        )
    limits = parse_limits(power_limits) if power_limits is not None else None
    if limits is not None and config is not None:
        raise UserError(_("--power-limits compares one load at several limits and takes no config"))
    own = widths_of(config) if config is not None else []
    place = device_to_measure(device)
    if limits is not None:
        return _power_command(limits, place, as_json)
    with Progress(seconds) as progress:
        measured = measure(place, seconds=seconds, own=own, say=progress.say)
    try:
        path: str | None = str(save_measured(measured))
    except OSError as error:
        # The figures are there all the same.
        path = None
        terminal.say(_("note: the record could not be kept: {error}").format(error=error))
    if as_json:
        terminal.show_json(json.dumps(measured.to_json() | {"file": path}, indent=1))
    else:
        show(measured, path)
    return 0


def device_to_measure(requested: str) -> str:
    """The CPU only on purpose: its figures in a card's place would mislead."""
    place = resolve_device(requested)
    if place == "cpu" and requested.strip().lower() != "cpu":
        raise UserError(
            _("there is no graphics card here to measure"),
            why=_("neither torch nor the NVIDIA driver's library sees one"),
            hint=_("if one is built in, install its driver (nvidia-smi must list it)")
            + "\n"
            + _("onecard bench --device cpu   measures the processor, in float32 and small sizes"),
            exit_code=1,
        )
    return place


def widths_of(config: str) -> list[tuple[int, int]]:
    """The width of a config's model, with its vocabulary."""
    also_known = frozenset(field.name for field in knobs(SampleConfig))
    run = load_config(RunConfig, [config], also_known=also_known)
    usual = dial.GENERATIONS[run.generation].vocab_size if run.arch == "nanochat" else CARD_SIZES.vocab
    return [(run.n_embd, run.vocab_size or usual)]


def _power_command(limits: list[float], place: str, as_json: bool) -> int:
    if place == "cpu":
        raise UserError(_("--power-limits is for graphics cards, not for the CPU"))
    sensors = describe(place)[2]
    with computing_on(place):
        bench = Bench(place, CARD_SIZES, sensors)
        result = sweep(limits, sensors, bench.sustained, say=terminal.say)
    if as_json:
        terminal.show_json(json.dumps(sweep_json(result), indent=1))
    else:
        show_sweep(result)
    return {"done": 0, "timed out": 1, "interrupted": INTERRUPTED}[result.ended]


class Progress:
    """A bar with the time that is left, in a terminal; nothing elsewhere: it is over in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}", markup=False),
                console=terminal.console(sys.stderr),
                transient=True,
                auto_refresh=False,  # a thread that draws would disturb what is timed
            )
            self._task = self._bar.add_task(_("starting"), total=self._seconds)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        if self._bar is not None:
            # The time is what is planned, so it shows best how far this is.
            done = min(time.monotonic() - self._began, 0.99 * self._seconds)
            self._bar.update(self._task, completed=done, description=text, refresh=True)


# --- what came out ------------------------------------------------------------------------------


def show(measured: Measured, path: str | None) -> None:
    console = _console()
    card = match_card(measured.card, measured.memory_gib)
    memory = f", {number(measured.memory_gib, '.1f')} GiB" if measured.memory_gib is not None else ""
    driver = _("driver {version}").format(version=measured.driver) if measured.driver else ""
    versions = ", ".join(filter(None, [driver, f"torch {measured.torch}"]))
    console.print(f"{measured.card}{memory} ({versions}), {measured.dtype}", style="bold", soft_wrap=True)
    table = _table("", _("measured"), _("nominal"), _("reached"))
    for label, figure, unit, nominal in _rows(measured, card):
        share = f"{figure / nominal:.0%}" if nominal else ""
        known = f"{number(nominal, 'g')} {unit}" if nominal else ""
        table.add_row(label, f"{number(figure, '.4g')} {unit}", known, share)
    console.print(table)
    load = measured.load
    parts = [
        f"{value:.0f} {unit}"
        for value, unit in ((load.clock_mhz, "MHz"), (load.power_w, "W"), (load.temperature_c, "°C"))
        if value is not None
    ]
    if parts:
        if load.power_limit_w is not None:
            parts.append(_("power limit {n:.0f} W").format(n=load.power_limit_w))
        console.print(_("under load: {figures}").format(figures=", ".join(parts)), soft_wrap=True)
    if measured.skipped:
        first, *more = measured.skipped
        text = _("left out: {first}, and {n} more") if more else _("left out: {first}")
        console.print(text.format(first=first, n=len(more)), soft_wrap=True)
    if path is not None:
        text = _("{n:.0f} s; kept in {path}").format(n=measured.seconds, path=path)
        console.print(text, soft_wrap=True)


def _rows(measured: Measured, card: Card | None) -> list[tuple[str, float, str, float | None]]:
    """(label, figure, unit, the card's nominal figure): the ceilings, and every width at its fullest."""
    peak = card.peak_tflops(measured.dtype) if card else None
    bandwidth = card.bandwidth_gbps if card else None
    size = measured.ceiling_size
    rows = [(_("matmul {size}³, sustained").format(size=size), measured.ceiling_tflops, "TFLOPS", peak)]
    tokens = max(rate.tokens for rate in measured.matmuls)
    for width in sorted({rate.k for rate in measured.matmuls if rate.tokens == tokens}):
        # A layer of nanoGPT: queries, keys and values, the projection back, up and down.
        flops = {n: 2 if n == 4 else 1 for n in (3, 1, 4)}
        work = sum(n * times for n, times in flops.items())
        time_taken = sum(
            n * times / measured.matmul_tflops(tokens, n * width, width) for n, times in flops.items()
        )
        label = _("layers {width} wide, {n} tokens").format(width=width, n=tokens)
        rows.append((label, work / time_taken, "TFLOPS", peak))
    for rate in measured.attention:
        rows.append((attention_label(rate.head_dim, rate.block), rate.tflops, "TFLOPS", None))
    how = "" if measured.pinned else _(", not pinned")
    rows += [
        (_("memory, copy"), measured.copy_gbps, "GB/s", bandwidth),
        (_("memory, sum"), measured.reduce_gbps, "GB/s", bandwidth),
        (_("host to card") + how, measured.h2d_gbps, "GB/s", None),
        (_("card to host") + how, measured.d2h_gbps, "GB/s", None),
        (_("launch of a kernel"), measured.launch_us, "µs", None),
    ]
    return rows


def show_sweep(result: PowerSweep) -> None:
    console = _console()
    if result.points:
        table = _table(_("limit W"), "TFLOPS", _("of the fastest"), "W", "TFLOPS/W", "MHz", "°C")
        fastest = max(point.tflops for point in result.points)
        for point in result.points:
            table.add_row(
                number(point.limit_w, "g"),
                number(point.tflops, ".4g"),
                f"{point.tflops / fastest:.0%}",
                f"{point.power_w:.0f}",
                number(point.tflops_per_watt, ".4f"),
                f"{point.clock_mhz:.0f}" if point.clock_mhz is not None else "-",
                f"{point.temperature_c:.0f}" if point.temperature_c is not None else "-",
            )
        console.print(table)
    if result.best is not None:
        text = _("most work for a joule: at {n:g} W").format(n=result.best.limit_w)
        console.print(text, soft_wrap=True)
    if result.ended != "done":
        count = len(result.points)
        how = _("interrupted") if result.ended == "interrupted" else _("timed out")
        text = ngettext("{ended} after {n} limit", "{ended} after {n} limits", count)
        console.print(text.format(ended=how, n=count), soft_wrap=True)
    if result.to_restore:
        text = _("back to the limit of before:   {command}").format(command=result.restore_command)
        console.print(text, soft_wrap=True)


def sweep_json(result: PowerSweep) -> dict[str, Any]:
    points = [asdict(point) | {"tflops_per_watt": point.tflops_per_watt} for point in result.points]
    return {
        "points": points,
        "best_limit_w": result.best.limit_w if result.best else None,
        "original_limit_w": result.original_w,
        "restore_command": result.restore_command if result.to_restore else None,
        "ended": result.ended,
    }


def _console() -> Console:
    console = terminal.console(sys.stdout, markup=False, highlight=False, emoji=False)
    console.width = max(console.width, 78)
    return console


def _table(first: str, *headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    return table
