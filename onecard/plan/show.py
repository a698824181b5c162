"""Plan's answer for people: a verdict, memory against the card, speed, time, money, what else there is."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from onecard.arch.shapes import Shape
from onecard.config.dataset import data_dir
from onecard.language import _, number
from onecard.plan.amounts import count, duration, energy, file_size, kwh_cell, price_text, speed
from onecard.plan.answer import Answer
from onecard.plan.bill import CHECKPOINTS_AT_ONCE, host_process
from onecard.plan.cost import Cost
from onecard.plan.lines import GIB, Line
from onecard.plan.machine import Target
from onecard.plan.rates import Rates
from onecard.plan.scaling import NATS, repetition_note, token_worth
from onecard.plan.search import Choice
from onecard.plan.tables import Row, print_parts, print_rows, terms_together
from onecard.plan.verdict import shortage, verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_WIDTH = 60  # of the bar
_COLOURS = ("cyan", "blue", "magenta", "yellow", "green", "red", "white", "bright_black")
# Lines that belong together in the bar, by what their names begin with.
_GROUPS = (
    ("weights", ("weights",)),
    ("gradients", ("gradients", "a matrix's gradient")),
    ("optimizer", ("optimizer", "Muon", "visitors", "the update", "zeros")),
    (
        "activations",
        ("kept", "gradient", "a layer", "attention", "last hidden", "tokens", "rotary", "keys", "reading"),
    ),
    ("logits", ("a chunk", "logits")),
    ("libraries", ("matmul", "a buffer", "allocator", "CUDA", "the recorded")),
)

# Bits per byte after so many tokens (references.toml): far below what the same model reaches on FineWeb.
_CLIMBMIX = 0.78, 8.52e9
TELLING = 0.03  # of the time: what is less is not worth a line


def names_to_translate() -> list[str]:
    """Names that come from other modules, where they are keys for programs."""
    bill = [
        _("weights (masters)"), _("weights to compute with"), _("gradients"), _("optimizer states"),
        _("visitors from host memory"), _("Muon's room"), _("kept for the backward pass"),
        _("tokens and targets"), _("gradient of the first layer's input"), _("rotary angles"),
        _("last hidden state and its gradient"), _("a chunk of logits"), _("gradient between layers"),
        _("a layer's temporaries"), _("a buffer to clear the cache with"), _("attention in the open"),
        _("a matrix's gradient before rounding"), _("a layer's values"), _("last hidden state"),
        _("keys and values"), _("reading the prompt"), _("logits of the next token"), _("matmul workspaces"),
        _("allocator's slack"), _("CUDA itself"), _("the recorded graph"), _("the model while it is built"),
        _("states while a checkpoint is read"), _("torch and the data on their way"),
        _("the update's temporaries"), _("zeros to try the update out on"),
    ]  # fmt: skip
    moments = [
        _("loss"), _("backward pass of a layer"), _("kernels being tried out"), _("evaluation"),
        _("evaluation's loss"), _("sampling"), _("update"),
    ]  # fmt: skip
    groups = [_("weights"), _("optimizer"), _("activations"), _("logits"), _("libraries")]
    ways = [
        _("exact"), _("low-bit"), _("recompute mlp"), _("recompute block"), _("nothing computed twice"),
        _("offload optimizer"), _("offload gradients"), _("nothing offloaded"), _("start"),
        _("compile"), _("the rest"),
    ]  # fmt: skip
    nanogpt = [
        _("AdamW's two averages"), _("16-bit copies of the weights"), _("residual stream"),
        _("normalised residual stream"), _("layer norms' outputs"), _("queries, keys, values"),
        _("attention's outputs"), _("MLP before GELU"), _("MLP after GELU"), _("dropout masks"),
        _("norms' and attention's statistics"), _("log softmax of the logits"), _("log softmax in float32"),
        _("gradient of the logits"), _("zeros as gradient of the returned logits"),
        _("passing values of forward and backward"), _("gradients of this micro-batch"),
        _("cuBLAS workspaces"), _("rounding to whole blocks"), _("forward"), _("backward of the loss"),
        _("loading the model"),
        _("backward of the layers"), _("end of the backward, at the embedding"), _("optimizer step"),
    ]  # fmt: skip
    return [*bill, *moments, *groups, *ways, *nanogpt]


def way_name(name: str) -> str:
    """The name of a way or a stage, part by part: "exact, recompute block", "micro-batch 12"."""
    return ", ".join(_way_part(part) for part in name.split(", "))


def _way_part(part: str) -> str:
    words, _space, figure = part.rpartition(" ")
    if words == "micro-batch":
        return _("micro-batch {n}").format(n=figure)
    if words == "loss chunk":
        return _("loss chunk {n}").format(n=number(int(figure.replace(",", "")), ","))
    return _(part)


def model_name(shape: Shape) -> str:
    names = {"gpt2": "GPT-2", "nanochat-2025": "nanochat 2025", "nanochat-2026": "nanochat 2026"}
    millions = shape.parameters / 1e6
    size = number(millions, ".1f") + "M" if millions < 1000 else number(millions / 1000, ".2f") + "B"
    block = _("block")
    return f"{names[shape.arch]} {size}, {shape.n_layer} × {shape.n_embd}, {block} {shape.block_size}"


def show(answer: Answer, console: Console) -> None:
    from rich.text import Text

    question, target = answer.question, answer.target
    card = f"{target.card.name}, " + number(target.capacity / GIB, ".1f") + " GiB"
    step = _("{n:,} tokens a step").format(n=answer.config.tokens_per_step)
    name = Text(model_name(question.shape), style="bold")
    print_parts(console, [name, *map(Text, (card, question.dtype, step))], " · ")
    for text in verdict(answer):
        console.print(text, highlight=False)
    shown = answer.choice or answer.nearest
    cost = answer.cost(shown) if answer.choice is not None else None
    if cost is not None:
        console.print()
        console.print(figures(answer, shown, cost))
    elif answer.choice is not None:
        console.print(speed_unknown(answer), highlight=False)
    console.print()
    peak = _("Memory at its peak ({moment})").format(moment=_(shown.bill.worst.name))
    console.print(f"[bold]{peak}[/bold]")
    show_memory(shown, console, formulas=answer.options.formulas)
    strip, legend = bar(shown, target)
    console.print(strip)
    print_parts(console, legend, "")
    if answer.options.compare or answer.choice is None:
        console.print()
        show_comparison(answer, console)
    if answer.options.stages and answer.choice is not None:
        console.print()
        show_stages(answer, console)


def expected(rates: Rates) -> str:
    """How far off a speed may be."""
    if rates.calibrated:
        return _("expect ±15%")
    return _("this card is not calibrated, expect ±25%: `onecard bench` measures yours")


def speed_unknown(answer: Answer) -> str:
    told = _("How fast it would be is not known: there are no figures of {card} in {dtype}.")
    return told.format(card=plain(answer.target.card.name), dtype=answer.question.dtype)


def plain(text: str) -> str:
    """A user's own word: brackets in it are no markup."""
    from rich.markup import escape

    return escape(text)


def show_memory(choice: Choice, console: Console, *, formulas: bool) -> None:
    bill = choice.bill
    rows = [
        Row(_(line.name), (number(line.gib, ".3f"),), terms_together(line.formula) if formulas else "")
        for line in bill.all_lines()
        if line.bytes >= (2**20 if formulas else GIB / 1000)
    ]
    rows.append(Row(_("the card must have free"), (number(bill.process / GIB, ".3f"),), style="bold"))
    if bill.host:
        rows += [Row("", ("",)), Row(_("offloaded from the card"), (number(bill.host / GIB, ".3f"),))]
        rows += [
            Row(_(line.name), (number(line.gib, ".3f"),), line.formula if formulas else "")
            for line in (bill.building, bill.resuming, host_process())
        ]
        total = number(choice.host_bytes / GIB, ".3f")
        rows.append(Row(_("and of the PC's own memory"), (total,), style="bold"))
    print_rows(console, "", _("what"), ["GiB"], rows, _("formula") if formulas else "")


def bar(choice: Choice, target: Target) -> tuple[Text, list[Text]]:
    """The card as a strip, coloured by what fills it, and what the colours mean."""
    from rich.text import Text

    text, legend = Text(), []

    def explain(mark: str, style: str, name: str, size: int) -> None:
        legend.append(Text().append(f" {mark} ", style=style).append(name + " " + number(size / GIB, ".2f")))

    capacity = target.capacity
    scale = max(capacity, choice.bill.process)
    used = 0
    for place, (name, members) in enumerate(grouped(choice.bill.all_lines())):
        size = sum(line.bytes for line in members)
        first, used = used, used + size
        cells = round(used / scale * _WIDTH) - round(first / scale * _WIDTH)
        colour = _COLOURS[place % len(_COLOURS)]
        text.append("█" * cells, style=colour)
        explain("■", colour, _(name), size)
    over, others = choice.bill.process > target.allowed, capacity - target.allowed
    if others > GIB / 20:
        used += others
        text.append("▒" * (min(_WIDTH, round(used / scale * _WIDTH)) - len(text)), style="bright_black")
        explain("▒", "bright_black", _("for others"), others)
    if over:
        text.append(" " + _("over"), style="red")
    else:
        text.append("░" * (_WIDTH - len(text)), style="bright_black")
        explain("░", "bright_black", _("free"), capacity - used)
    return text, legend


def grouped(lines: tuple[Line, ...]) -> list[tuple[str, list[Line]]]:
    left = list(lines)
    found = []
    for name, beginnings in _GROUPS:
        members = [line for line in left if line.name.startswith(beginnings)]
        left = [line for line in left if line not in members]
        if members:
            found.append((name, members))
    assert not left, f"no group for {left}"
    return found


def figures(answer: Answer, choice: Choice, cost: Cost) -> Table:
    from rich.table import Table

    step = choice.step
    assert step is not None
    table = Table(box=None, pad_edge=False, show_header=False)
    pace = speed(step.tokens_per_s, step.seconds)
    if step.mfu is not None:
        pace += ", " + _("{mfu:.0%} of the card's peak (MFU)").format(mfu=step.mfu)
    table.add_row(_("speed"), pace)
    rates = answer.question.rates
    assert rates is not None
    measured = answer.target.measured
    source = _("the card's figures")
    if measured is not None:
        source = _("onecard bench of {date}").format(date=measured.date)
    source = _("from {source}").format(source=source)
    table.add_row("", f"[dim]{source}; {expected(rates)}[/dim]")
    if step.mfu is not None and step.mfu > 1:
        # As everywhere, or MFUs could not be compared; the time is that of the work that is done.
        told = _("MFU counts all of attention's matrix; the half above the diagonal is not computed")
        table.add_row("", f"[dim]{told}[/dim]")
    finish = cost.finish(answer.now)
    said, done = _("{time} for {steps:,} steps, {tokens} tokens"), answer.options.steps_done
    if done:
        said = _("{time} for the {left:,} steps that are left of {steps:,}, {tokens} tokens")
    steps = answer.config.max_iters
    told = said.format(
        time=duration(cost.seconds), steps=steps, left=max(steps - done, 0),
        tokens=count(max(steps - done, 0) * answer.config.tokens_per_step),
    )  # fmt: skip
    when = ", " + _("done {when} if begun now").format(when=_when(finish)) if finish else ""
    table.add_row(_("time"), told + when)
    beside = []
    if choice.setting.compile:
        beside.append(_("the first step compiles: about {time}").format(time=duration(cost.first_step_s)))
    if cost.evaluation_share > TELLING:
        beside.append(_("evaluations take {time} of it").format(time=duration(cost.evaluation_s)))
    if beside:
        table.add_row("", f"[dim]{'; '.join(beside)}[/dim]")
    for name, text in (*_loss_rows(answer), *_data_rows(answer)):
        table.add_row(name, text)
    if cost.amount is None:
        table.add_row(_("energy"), _("not known without the card's power: --watts W"))
    else:
        assert cost.card_kwh is not None and cost.pc_kwh is not None
        beside_card = answer.options.idle_watts_beside(answer.target.card)
        table.add_row(_("energy"), energy(cost.card_kwh, cost.pc_kwh, beside_card))
        table.add_row(
            _("cost"),
            _("{amount:,.2f} {currency} at {price} {currency} a kWh").format(
                amount=cost.amount, currency=plain(cost.currency), price=price_text(answer.options.price)
            ),
        )
    each = answer.checkpoint(choice)
    on_disk = _("{each} a checkpoint, up to {n} at once: {all}").format(
        each=file_size(each), n=CHECKPOINTS_AT_ONCE, all=file_size(CHECKPOINTS_AT_ONCE * each)
    )
    if answer.data_tokens is None:
        data = _("{data} of tokens, if none comes twice").format(data=file_size(answer.data_bytes))
        on_disk += f"; {data}"
    table.add_row(_("disk"), on_disk)
    return table


def _loss_rows(answer: Answer) -> list[tuple[str, str]]:
    """Of bits per byte also where they come from: nanochat's published ones are of other text."""
    loss = answer.loss
    if loss is None:
        return []
    if loss.unit == NATS:
        told = _("{low:.2f} to {high:.2f} nats a token expected on web text, at the end of the run")
        return [(_("loss"), told.format(low=loss.low, high=loss.high))]
    told = _("{low:.2f} to {high:.2f} bits per byte expected on FineWeb, at the end of the run")
    source = [_("from published runs of GPT-2 on FineWeb")]
    if answer.question.shape.arch != "gpt2":
        low, high = token_worth(answer.config.max_iters * answer.config.tokens_per_step)
        worth = _("a token of nanochat counted as {low:.1f} to {high:.1f} of GPT-2's")
        source.append(worth.format(low=low, high=high))
        easier = _("on ClimbMix, an easier text, nanochat's d12 had {n:.2f} after {tokens} tokens")
        source.append(easier.format(n=_CLIMBMIX[0], tokens=count(_CLIMBMIX[1])))
    return [(_("loss"), told.format(low=loss.low, high=loss.high)), ("", f"[dim]{'; '.join(source)}[/dim]")]


def _data_rows(answer: Answer) -> list[tuple[str, str]]:
    """Where it is there: how often the run reads it."""
    if answer.data_tokens is None or answer.passes is None:
        return []
    told = _("{tokens} tokens in {folder}, read {n} times").format(
        tokens=count(answer.data_tokens),
        folder=plain(str(data_dir(answer.config.dataset))),
        n=number(answer.passes, ".1f"),
    )
    rows = [(_("data"), told)]
    if (note := repetition_note(answer.tokens, answer.data_tokens)) is not None:
        rows.append(("", f"[dim]{note}[/dim]"))
    return rows


def _when(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")


def show_comparison(answer: Answer, console: Console) -> None:
    rows = []
    for name, choice in answer.alternatives():
        cost = answer.cost(choice) if choice.fits else None
        note = "" if choice.fits else _("does not fit: {what}").format(what=shortage(choice))
        if choice.fits and answer.choice is not None and choice.setting == answer.choice.setting:
            note = _("chosen")
        figures = (
            str(choice.setting.micro_batch), number(choice.tokens_per_s, ",.0f") if cost else "-",
            duration(cost.seconds) if cost else "-", number(choice.bill.process / GIB, ".2f"),
            number(choice.host_bytes / GIB, ".1f") if choice.bill.host else "",
            kwh_cell(cost.pc_kwh) if cost and cost.pc_kwh is not None else "-",
            number(cost.amount, ",.2f") if cost and cost.amount is not None else "-",
        )  # fmt: skip
        rows.append(Row(way_name(name), figures, note, "" if choice.fits else "dim"))
    headings = [
        _("micro-batch"),
        _("tokens/s"),
        _("time"),
        "GiB",
        _("host GiB"),
        "kWh",
        answer.options.currency,
    ]
    print_rows(console, _("Ways to run it"), _("way"), headings, rows, _("notes"))
    if answer.target.host is None and any(choice.bill.host for _name, choice in answer.alternatives()):
        told = _("host GiB: whether the PC has as much was not looked at (--host-ram GIB)")
        console.print(f"[dim]{told}[/dim]", highlight=False)


def show_stages(answer: Answer, console: Console) -> None:
    rows = []
    before: Choice | None = None
    for name, choice in answer.stages():
        gain = choice.tokens_per_s / before.tokens_per_s - 1 if before and before.tokens_per_s else None
        figures = (
            number(choice.bill.process / GIB, ".2f"),
            number(choice.tokens_per_s, ",.0f") if choice.step else "-",
            "" if gain is None else number(gain, "+.0%"),
        )  # fmt: skip
        rows.append(Row(way_name(name), figures, choice.told))
        before = choice
    title = _("Back to speed, one step after the other")
    print_rows(console, title, _("turn on"), ["GiB", _("tokens/s"), _("gain")], rows, _("flags"))
