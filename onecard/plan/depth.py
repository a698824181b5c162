"""`onecard plan --depth N`: both generations of nanochat compared, then what fewer tokens, a smaller depth, a
laptop or a rented node change."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from onecard.arch.dial import GENERATIONS
from onecard.config.files import COMMAND_LINE
from onecard.config.run import RunConfig
from onecard.hardware.cards import match_card
from onecard.language import _, number
from onecard.plan.amounts import count, digits, duration, gib
from onecard.plan.answer import Answer, answer, brief, cost_of_choice
from onecard.plan.cost import Cost
from onecard.plan.machine import Target, find_target
from onecard.plan.options import Options
from onecard.plan.search import kind
from onecard.plan.show import amount, gpt2_bits, predicted, span
from onecard.plan.tables import host_cell, pace, setting_name
from onecard.plan.verdict import assumed_ram, little_to_spare, shortage
from onecard.terminal import Row, print_rows

if TYPE_CHECKING:
    from rich.console import Console

_DEPTHS = (4, 8, 12, 16, 20, 24, 26, 32)  # that people train
_SMALLER = 3  # of them, next to the one asked for
# Shorter runs of the depth asked for: the next two of these steps below 60% of its tokens.
_STEPS, _SHORTER = (1, 1.5, 2, 3, 5, 7), 0.6
_NODE, _NODE_CARDS, _NODE_RAM = "H100 SXM", 8, 1024.0
_FEW_HOURS = 0.1  # less is shown as that


@dataclass(frozen=True)
class Depths:
    """The depth asked for in both generations, and the smaller ones, each on one card or more."""

    asked: list[Answer]  # by generation, on the card of the question
    cards: list[str]
    rows: list[tuple[str, int, int, list[Cost | None]]]  # name, generation, tokens; by card, the node's last


def is_depth_question(config: RunConfig, options: Options) -> bool:
    """Is a depth asked for, and not a run that somebody has described, or a part of its answer?"""
    described = config.is_set("generation") or {*config.origins.values()} != {COMMAND_LINE}
    part = options.memory or options.formulas or options.compare or options.stages
    return config.is_set("depth") and not described and not part


def find_depths(config: RunConfig, options: Options, target: Target, now: datetime) -> Depths:
    assert config.depth is not None
    others = [find_target(config, name, options.host_ram) for name in _pair(target)]
    node = find_target(config, _NODE, _NODE_RAM)
    smaller = [depth for depth in _DEPTHS if depth < config.depth][-_SMALLER:]
    asked, rows = [], []
    for depth in (config.depth, *reversed(smaller)):
        for generation in GENERATIONS:
            run = _at(config, depth, generation)
            found = [answer(run, place, options, now) for place in (target, *others, node)]
            asked += found[:1] if depth == config.depth else []
            shorter = depth == config.depth and found[0].choice is not None
            for tokens in (found[0].tokens, *(_shorter(found[0].tokens) if shorter else ())):
                rows.append((f"d{depth}", generation, tokens, [_cost(each, tokens) for each in found]))
    return Depths(asked, [target.card.name, *(other.card.name for other in others)], rows)


def _pair(target: Target) -> list[str]:
    """The laptop's card of the same name, or the desktop's."""
    name = target.card.name
    other = name.removesuffix(" Laptop") if target.is_laptop else f"{name} Laptop"
    card = match_card(other)
    return [card.name] if card is not None else []


def _at(config: RunConfig, depth: int, generation: int) -> RunConfig:
    origins = {**config.origins, "depth": COMMAND_LINE, "generation": COMMAND_LINE}
    plain = config.without_schedule_notes()
    return dataclasses.replace(plain, depth=depth, generation=generation, origins=origins).resolved()


def _shorter(tokens: int) -> list[int]:
    top = _SHORTER * tokens
    scale = 10 ** math.floor(math.log10(top))
    steps = [step * each for each in (scale, scale / 10) for step in reversed(_STEPS)]
    return [round(step) for step in steps if step <= top][:2]


def _cost(found: Answer, tokens: int) -> Cost | None:
    """The cost of so many tokens; None where it does not fit, or the card's speed is not known."""
    if found.choice is None:
        return None
    question = found.choice.question
    steps = max(1, tokens // question.config.tokens_per_step)
    shorter = dataclasses.replace(question, config=dataclasses.replace(question.config, max_iters=steps))
    return cost_of_choice(shorter.answer(found.choice.setting), found.target, found.options)


def depths_to_json(depths: Depths) -> dict[str, Any]:
    generations = []
    for found in depths.asked:
        shown = found.choice or found.nearest
        generations.append({
            "generation": found.config.generation, "parameters": found.question.shape.parameters,
            "tokens": found.tokens, "loss": found.loss_to_json(),
            **brief(kind(shown.setting), shown, found.cost(shown) if shown.fits else None),
        })  # fmt: skip
    return {"generations": generations}


def _node_hours(cost: Cost | None) -> str:
    if cost is None:
        return "-"
    hours = cost.seconds / 3600 / _NODE_CARDS
    if hours < _FEW_HOURS:
        return "< " + number(_FEW_HOURS, "g")
    return number(round(hours, 1), digits(round(hours, 1)))


# --- for people ---------------------------------------------------------------------------------------


def show_depths(depths: Depths, console: Console) -> None:
    asked, target = depths.asked, depths.asked[0].target
    name = f"nanochat d{asked[0].config.depth}"
    for found in asked:
        text, colour = _("{name} of {year} fits."), "green"
        if found.choice is None:
            text, colour = _("{name} of {year} does not fit: {what}."), "red"
        year, what = str(found.config.generation), shortage(found.nearest)
        console.print(text.format(name=name, year=year, what=what), style=colour, highlight=False)
    console.print(predicted(asked[0], asked[0].choice or asked[0].nearest), highlight=False)
    card = f"{target.card.name}, {gib(target.capacity, 1)} GiB"
    headings = [_("October 2025"), "2026"]
    cells = zip(*map(_cells, asked), strict=True)
    rows = [Row(label, figures) for label, figures in zip(_labels(asked[0]), cells, strict=True)]
    print_rows(console, "", card, headings, rows)
    console.print(_("GPT-2's on the same text: {values}").format(values=gpt2_bits()), highlight=False)
    # One that the card has room for, and a desktop beside it perhaps not.
    tight = [little_to_spare(found, found.choice.bill.process) for found in asked if found.choice is not None]
    if warning := next(filter(None, tight), ""):
        console.print(warning, style="yellow", highlight=False)
    if target.host_assumed:
        console.print(assumed_ram(target), highlight=False)
    text = _("Everything about one of the two: {flags}").format(flags="--generation=2025")
    console.print(text, highlight=False)
    console.print()
    _show_rows(depths, console)
    console.print()
    console.print(_quantised(), highlight=False)


def _labels(found: Answer) -> list[str]:
    return [
        _("parameters"), _("tokens"), _("setting"), _("micro-batch"), _("GiB of the card"), _("RAM GiB"),
        _("tokens/s"), _("effective TFLOPS"), _("time"), "kWh", found.options.currency,
        _("bits per byte, FineWeb"),
    ]  # fmt: skip


def _cells(found: Answer) -> list[str]:
    choice = found.choice or found.nearest
    cost = found.cost(choice) if found.choice is not None else None
    setting = setting_name(kind(choice.setting)) if cost else _("does not fit")
    loss = found.loss
    return [
        count(found.question.shape.parameters), count(found.tokens), setting,
        str(choice.setting.micro_batch), gib(choice.bill.process), host_cell(choice),
        pace(choice) if cost else "-", number(choice.tflops, ".1f") if cost else "-",
        duration(cost.seconds) if cost else "-",
        *_energy_cells(cost), span(loss.low, loss.high, ".2f") if loss else "-",
    ]  # fmt: skip


def _energy_cells(cost: Cost | None) -> tuple[str, str]:
    """kWh and money."""
    if cost is None or cost.pc_kwh is None:
        return "-", "-"
    return number(cost.pc_kwh, digits(cost.pc_kwh)), amount(cost, digits(cost.amount or 0.0))


def _show_rows(depths: Depths, console: Console) -> None:
    """Days, energy and money on each card, and hours of a rented node."""
    currency = depths.asked[0].options.currency
    headings = [_("tokens")]
    for card in depths.cards:
        headings += [_("days {card}").format(card=card), "kWh", currency]
    headings.append(f"h {_NODE_CARDS}×H100")
    rows = []
    for name, generation, tokens, costs in depths.rows:
        cells = [count(tokens)]
        for cost in costs[:-1]:
            cells += ["-", "-", "-"] if cost is None else [
                number(cost.days, digits(cost.days)), *_energy_cells(cost),
            ]  # fmt: skip
        rows.append(Row(f"{name} {generation}", (*cells, _node_hours(costs[-1]))))
    title = _("Fewer tokens and smaller models, predicted")
    print_rows(console, title, "", headings, rows)
    text = _("{n}×H100: rented, {n} times the speed of one; communication is not counted")
    console.print(f"[dim]{text.format(n=_NODE_CARDS)}[/dim]", highlight=False)


def _quantised() -> str:
    return _(
        "Quantised weights (NF4, GPTQ, 2 to 3 bits) do not shorten pretraining: each weight is unpacked to "
        "bf16 before it is multiplied, so a step takes as long or longer. QLoRA and its like keep these "
        "weights as they are and train small additions to a finished model. Low-bit here is another thing: "
        "weights kept in bf16 with stochastic rounding, optimizer states in int8; every weight is trained, "
        "and the matmuls stay bf16."
    )
