"""What `onecard gpus` prints: this machine, and the cards onecard knows."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onecard import terminal
from onecard.hardware.cards import Card, all_cards, find_card
from onecard.hardware.cpu import LocalCpu, local_cpu
from onecard.hardware.machine import GIB, LocalGpu, survey_gpus
from onecard.language import N_, _, figures, ngettext, number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MIB = 2**20
TABLE_WIDTH = 80
NAMELESS = N_("a process without a readable name")

# What the first word of a note promises about the figures.
SOURCES = {
    "derived": N_("computed from SM count and boost clock; real clocks often run 5-10% higher"),
    "datasheet": N_("the vendor's figures"),
    "unverified": N_("not checked against a document: verify before relying on it"),
}


# What the remarks in gpus.toml are made of.
_REMARKS = (
    N_("derived"), N_("datasheet"), N_("unverified"), N_("no bf16"), N_("unverified in part"),
    N_("power unverified"), N_("L2 unverified"), N_("nvidia-smi says NVIDIA H200"),
    N_("measured bf16 matmul 770-800 and copy 4.3 TB/s"),
    N_("with GDDR6: the later one with GDDR6X has 608 GB/s and 225 W"),
)  # fmt: skip
_DESIGN = re.compile(r"boost (\d+-\d+) and (\d+-\d+) W by design")


def remark(note: str) -> str:
    """A card's remark in the reader's language."""
    parts = []
    for part in note.split("; "):
        text: str = _(part)
        if design := _DESIGN.fullmatch(part):
            text = _("boost clock {mhz} MHz and {watts} W by design")
            text = text.format(mhz=design[1], watts=design[2])
        parts.append(figures(text))
    return "; ".join(parts)


def gpus_command(name: str | None, *, everything: bool, as_json: bool) -> int:
    """Shows this machine; with `everything` all known cards; with a name, all that is known of that card."""
    card = find_card(name) if name is not None else None
    gpus, trouble = survey_gpus()
    cpu = local_cpu()
    if as_json:
        answer = {
            "machine": {
                "gpus": [_gpu_json(gpu) for gpu in gpus],
                "driver_trouble": trouble or None,
                "cpu": asdict(cpu),
            },
            "cards": [_card_json(known) for known in ([card] if card else all_cards())],
        }
        terminal.show_json(json.dumps(answer, indent=2))
        return 0
    console = _console()
    if card is not None:
        _print_card(console, card, gpus)
    else:
        _print_machine(console, gpus, trouble, cpu)
        if everything:
            _print_all(console, {gpu.card for gpu in gpus})
        else:
            console.print(_("the figures of all known cards: onecard gpus --all"), soft_wrap=True)
    return 0


def _console() -> Console:
    # Names come from drivers and command lines: nothing in them may be taken for markup or be coloured.
    console = terminal.console(sys.stdout, markup=False, highlight=False, emoji=False)
    # A narrower window wraps lines, which is bad, but rich would cut names off, which is worse.
    console.width = max(console.width, TABLE_WIDTH)
    return console


def _card_json(card: Card) -> dict[str, Any]:
    return asdict(card) | {"compute_capability": _dotted(card.compute_capability)}


def _gpu_json(gpu: LocalGpu) -> dict[str, Any]:
    return asdict(gpu) | {
        "card": gpu.card.name if gpu.card else None,
        "cuda_driver": _dotted(gpu.cuda_driver),
        "compute_capability": _dotted(gpu.compute_capability),
    }


def _dotted(version: tuple[int, int] | None) -> str | None:
    return f"{version[0]}.{version[1]}" if version is not None else None


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else number(value, "g") + unit


def _size(count: int | None) -> str:
    if count is None:
        return _("not reported")
    return number(count / GIB, ".2f") + " GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _print_machine(console: Console, gpus: list[LocalGpu], trouble: str, cpu: LocalCpu) -> None:
    console.print(_("This machine"), style="bold")
    for gpu in gpus:
        for line in _gpu_lines(gpu):
            console.print(line, soft_wrap=True)
    if not gpus:
        trouble = trouble or _("no NVIDIA card seen")
        console.print(f"  GPU: {trouble}", soft_wrap=True)
    text = ngettext("{name}, {n} core, {size} memory", "{name}, {n} cores, {size} memory", cpu.cores)
    text = text.format(name=cpu.name, n=cpu.cores, size=_size(cpu.memory_bytes))
    console.print(f"  CPU: {text}", soft_wrap=True)
    console.print()


def _gpu_lines(gpu: LocalGpu) -> list[str]:
    known = _("not among the known cards")
    if gpu.card:
        known = _("known as {card}").format(card=gpu.card.name)
    free = _("{total}, {free} free").format(total=_size(gpu.total_bytes), free=_size(gpu.free_bytes))
    driver = gpu.driver or _("not reported")
    if gpu.cuda_driver:
        driver += " " + _("(up to CUDA {version})").format(version=_dotted(gpu.cuda_driver))
    rows = [(_("memory"), free), (_("driver"), driver)]
    details = []
    if gpu.compute_capability:
        text = _("compute capability {version}")
        details.append(text.format(version=_dotted(gpu.compute_capability)))
    if gpu.power_limit_w is not None:
        details.append(_("power limit {n:.0f} W").format(n=gpu.power_limit_w))
    if gpu.display_active:
        details.append(_("drives a display"))
    if details:
        rows.append((_("card"), ", ".join(details)))
    first, *rest = _user_lines(gpu)
    rows += [(_("used by"), first), *(("", user) for user in rest)]
    width = max(9, *(len(label) for label, _text in rows))
    return [f"  GPU {gpu.index}: {gpu.name} ({known})", *(f"    {a:<{width}} {b}" for a, b in rows)]


def _user_lines(gpu: LocalGpu) -> list[str]:
    lines = []
    for process in gpu.processes:
        who = f"{process.name or _(NAMELESS)} (pid {process.pid})"
        share = f", {_size(process.memory_bytes)}" if process.memory_bytes is not None else ""
        lines.append(who + share + (_(" - this process") if process.mine else ""))
    if lines:
        return lines
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return [_("the driver does not report it")]
    # An idle card keeps a few hundred MiB for the driver; more than that is a process.
    used = gpu.total_bytes - gpu.free_bytes
    if used < GIB:
        return [_("no process")]
    return [_("a process the driver does not name, {size}").format(size=_size(used))]


def _print_all(console: Console, mine: set[Card | None]) -> None:
    table = _plain_table()
    table.add_column(_("Known card"), no_wrap=True)
    headings = (_("Memory"), "GB"), (_("Bandwidth"), "GB/s"), ("bf16", "TFLOPS"), (_("Power"), "W")
    for heading in (*map("\n".join, headings), _("Compute\ncap.")):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(_("Source"), no_wrap=True)
    for card in all_cards():
        rate = card.peak_tflops("float16")
        source = card.note.replace(";", " ").split()[:1]
        table.add_row(
            f"{'>' if card in mine else ' '} {card.name}",
            _number(card.memory_gb),
            _number(card.bandwidth_gbps),
            # The space keeps the numbers in line with those that carry a mark.
            number(rate, ".1f") + ("*" if card.bf16 is None else " ") if rate is not None else "- ",
            _number(card.tdp_w),
            _dotted(card.compute_capability) or "-",
            " ".join(source) + (" +" if card.note != "".join(source) else ""),
            style="bold" if card in mine else "",
        )
    console.print(table)
    text = _("TFLOPS are dense, with fp32 accumulation.  * fp16: the card has no bf16")
    console.print(text, soft_wrap=True)
    if mine - {None}:
        console.print(_("> in this machine"), soft_wrap=True)
    console.print(_("+ has a remark:  onecard gpus 'RTX 4070 Laptop'"), soft_wrap=True)


def _plain_table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False, header_style="bold"
    )


def _print_card(console: Console, card: Card, gpus: list[LocalGpu]) -> None:
    console.print(card.name, style="bold")
    facts = [
        (_("memory"), _number(card.memory_gb, " GB")),
        (_("bandwidth"), _number(card.bandwidth_gbps, " GB/s")),
        (_("L2 cache"), _number(card.l2_mb, " MB")),
        (_("power"), _number(card.tdp_w, " W")),
        (_("compute capability"), _dotted(card.compute_capability) or "-"),
        (_("multiprocessors"), _number(card.sm)),
        (_("boost clock"), _number(card.boost_mhz, " MHz")),
    ]
    rates = [
        (_("bf16 or fp16, fp32 accumulation"), card.bf16),
        *([(_("fp16, fp32 accumulation"), card.fp16)] if card.fp16 is not None else []),
        (_("fp16, fp16 accumulation"), card.fp16acc),
        ("tf32", card.tf32),
        ("fp8", card.fp8),
        ("int8 (TOPS)", card.int8),
        (_("fp32, no tensor cores"), card.fp32),
    ]
    for label, value in facts:
        console.print(f"  {label:<32} {value}", soft_wrap=True)
    console.print(_("dense rates in TFLOPS (- where there is none or it is not known)"), soft_wrap=True)
    for label, rate in rates:
        console.print(f"  {label:<32} {_number(rate)}", soft_wrap=True)
    console.print(_("source: {text}").format(text=remark(card.note)), soft_wrap=True)
    for word, meaning in SOURCES.items():
        if word in card.note:
            console.print(f"  {_(word)}: {_(meaning)}", soft_wrap=True)
    for gpu in gpus:
        if gpu.card == card:
            text = _("in this machine as GPU {index}, {free} of {total} free")
            free, total = _size(gpu.free_bytes), _size(gpu.total_bytes)
            console.print(text.format(index=gpu.index, free=free, total=total), soft_wrap=True)
