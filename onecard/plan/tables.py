"""Plan's longer answers for people: memory line by line, other settings, stages, the largest models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from onecard.errors import UserError
from onecard.language import N_, _, figures, number
from onecard.plan.amounts import count, duration, gib, kwh_cell
from onecard.plan.answer import Answer, comparable
from onecard.plan.bill import host_process
from onecard.plan.largest import MOST_PASSES, Candidate, Largest, Size, flags_of
from onecard.plan.lines import GIB, Line
from onecard.plan.machine import Target
from onecard.plan.scaling import BITS
from onecard.plan.search import Choice, kind
from onecard.plan.show import NOTABLE, amount, speed_unknown, text_note
from onecard.plan.verdict import assumed_ram, little_to_spare, plain, shortage
from onecard.terminal import Row, print_rows, terms_together

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_WIDTH = 60  # of the bar
_COLOURS = ("cyan", "blue", "magenta", "yellow", "green", "red", "white", "bright_black")
# Lines that belong together in the bar, by what their names begin with.
_GROUPS = (
    (N_("weights"), ("weights",)),
    (N_("gradients"), ("gradients", "a matrix's gradient")),
    (N_("optimizer"), ("optimizer", "Muon", "buffers streamed", "the update", "zeros")),
    (
        N_("activations"),
        ("kept", "gradient", "a layer", "attention", "last hidden", "tokens", "rotary", "keys", "reading"),
    ),
    (N_("logits"), ("a chunk", "logits")),
    (N_("libraries"), ("matmul", "a buffer", "allocator", "CUDA", "the CUDA")),
)
# Parts of names that search.py makes.
_SETTINGS = (
    N_("exact"), N_("low-bit"), N_("recompute mlp"), N_("recompute block"), N_("nothing computed twice"),
    N_("offload optimizer"), N_("offload gradients"), N_("nothing offloaded"), N_("start"), N_("compile"),
    N_("the rest"),
)  # fmt: skip


# What formulas are made of besides figures; whole ones first.
_IN_FORMULAS = (
    N_("0.75 GiB; an H200 took 0.67 to 0.84"), N_("pieces of each offloaded buffer"),
    N_("as they are stored"), N_("the L2 cache of the largest such card"),
    N_("numbers a row; uncompiled, copies of a matrix"), N_("a matrix, its gradient and its momentum"),
    N_("measured: enough under a cap"), N_("attention weights"), N_("measured"), N_("parameters"),
    N_("tokens"), N_("layers"), N_("rows"), N_("elements"), N_("bytes"),
)  # fmt: skip
_WORDS = re.compile("|".join(rf"(?<!\w){re.escape(words)}(?!\w)" for words in _IN_FORMULAS))


def formula_text(formula: str) -> str:
    """A formula in the reader's language; a bill keeps its formulas in English."""
    return figures(_WORDS.sub(lambda found: str(_(found[0])), formula))


def setting_name(name: str) -> str:
    """The name of a setting or a stage, part by part: "exact, recompute block", "micro-batch 12"."""
    return ", ".join(_part(part) for part in name.split(", "))


def _part(part: str) -> str:
    words, _space, figure = part.rpartition(" ")
    if words == "micro-batch":
        return _("micro-batch {n}").format(n=figure)
    if words == "loss chunk":
        return _("loss chunk {n}").format(n=number(int(figure.replace(",", "")), ","))
    return _(part)


def pace(choice: Choice) -> str:
    return number(choice.tokens_per_s, ",.0f") if choice.step else "-"


def host_cell(choice: Choice) -> str:
    return gib(choice.host_bytes, 1) if choice.bill.host else ""


def show_memory(choice: Choice, console: Console, *, formulas: bool) -> None:
    bill = choice.bill
    rows = [
        Row(
            _(line.name),
            (gib(line.bytes, 3),),
            terms_together(formula_text(line.formula)) if formulas else "",
        )
        for line in bill.all_lines()
        if line.bytes >= (2**20 if formulas else GIB / 1000)
    ]
    rows.append(Row(_("the card must have free"), (gib(bill.process, 3),), style="bold"))
    if bill.host:
        rows += [Row("", ("",)), Row(_("offloaded from the card"), (gib(bill.host, 3),))]
        rows += [
            Row(_(line.name), (gib(line.bytes, 3),), formula_text(line.formula) if formulas else "")
            for line in (bill.building, bill.resuming, host_process())
        ]
        rows.append(Row(_("and of RAM"), (gib(choice.host_bytes, 3),), style="bold"))
    title = _("Predicted peak memory, at its worst moment: {moment}").format(moment=_(bill.worst.name))
    console.print()
    print_rows(console, title, _("what"), ["GiB"], rows, _("formula") if formulas else "")


def bar(choice: Choice, target: Target) -> tuple[Text, list[Text]]:
    """The card as a strip, coloured by what fills it, and what the colours mean."""
    from rich.text import Text

    text, legend = Text(), []

    def explain(mark: str, style: str, name: str, size: int) -> None:
        legend.append(Text().append(f" {mark} ", style=style).append(f"{name} {gib(size)}"))

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
        text.append(" " + _("{n:.2f} GiB free").format(n=(capacity - used) / GIB))
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


def show_comparison(answer: Answer, console: Console) -> None:
    rows = []
    for name, choice in answer.alternatives():
        cost = answer.cost(choice) if choice.fits else None
        note = "" if choice.fits else _("does not fit: {what}").format(what=shortage(choice))
        if choice.fits and answer.choice is not None and choice.setting == answer.choice.setting:
            note = _("chosen")
        figures = (
            str(choice.setting.micro_batch), pace(choice) if cost else "-",
            duration(cost.seconds) if cost else "-", gib(choice.bill.process), host_cell(choice),
            kwh_cell(cost.pc_kwh) if cost and cost.pc_kwh is not None else "-",
            amount(cost) if cost and cost.amount is not None else "-",
        )  # fmt: skip
        rows.append(Row(setting_name(name), figures, note, "" if choice.fits else "dim"))
    headings = [_("micro-batch"), _("tokens/s"), _("time"), "GiB", _("RAM GiB"), "kWh",
                answer.options.currency]  # fmt: skip
    console.print()
    print_rows(console, _("Settings, predicted"), _("setting"), headings, rows, _("notes"))
    uses_ram = any(choice.bill.host for _name, choice in answer.alternatives())
    if answer.target.host is None and uses_ram:
        text = _("RAM GiB: your RAM was not checked: give it with --host-ram 32")
        console.print(f"[dim]{text}[/dim]", highlight=False)
    elif answer.target.host_assumed and uses_ram:
        console.print(f"[dim]{assumed_ram(answer.target)}[/dim]", highlight=False)
    if len({choice.setting.exact for _name, choice in answer.alternatives()}) > 1:
        text = _(
            "exact: weights and optimizer states in fp32, as nanoGPT trains; low-bit: weights in bf16 and "
            "states in int8, which takes less memory and is another training"
        )
        console.print(f"[dim]{text}[/dim]", highlight=False)


def show_stages(answer: Answer, console: Console) -> None:
    rows = []
    before: Choice | None = None
    for name, choice in answer.stages():
        gain = choice.tokens_per_s / before.tokens_per_s - 1 if before and before.tokens_per_s else None
        figures = (gib(choice.bill.process), pace(choice), "" if gain is None else number(gain, "+.0%"))
        rows.append(Row(setting_name(name), figures, choice.described))
        before = choice
    title = _("Back to speed, one step after the other (predicted)")
    console.print()
    headings = ["GiB", _("tokens/s"), _("gain")]
    print_rows(console, title, _("turn on"), headings, rows, _("flags"), pasted=True)


# --- other models -------------------------------------------------------------------------------------


def show_largest(answer: Answer, found: Largest, console: Console) -> None:
    target = answer.target
    if not found.largest:
        raise UserError(
            _("not even the smallest model fits into {n:.2f} GiB").format(n=target.allowed / GIB), exit_code=1
        )
    host = _("your RAM was not checked: give it with --host-ram 32")
    if target.host_assumed:
        host = assumed_ram(target)
    elif target.host is not None:
        host = _("{n:.0f} GiB of RAM").format(n=target.host / GIB)
        if target.host_kept:
            host += ", " + _("besides {n:.0f} that are left to the system").format(n=target.host_kept / GIB)
    console.print(
        f"[bold]{plain(target.card.name)}[/bold], {gib(target.allowed)} GiB; {host}", highlight=False
    )
    tightest = max(size.choice.bill.process for size in (*found.largest, *found.longest))
    for text in filter(None, (little_to_spare(answer, tightest), _text_limit(answer, found))):
        console.print(text, highlight=False)
    console.print()
    _show_sizes(console, _("The largest model"), found.largest)
    if found.longest:
        grows = answer.question.shape.arch == "gpt2"
        note = _("The position embeddings grow with the block, and so do the parameters.") if grows else ""
        _show_sizes(console, _("The longest block of this model"), found.longest, note)
    _show_best(answer, found, console)


def _text_limit(answer: Answer, found: Largest) -> str:
    """Remark where the text, not the card, is what limits the model."""
    if found.text_limit is None or answer.data_tokens is None:
        return ""
    text = _(
        "The text is the limit, not the card: its {tokens} tokens, read {n} times, are enough for "
        "{parameters} parameters. Larger models only learn it by heart; prepare more text."
    )
    return text.format(tokens=count(answer.data_tokens), n=MOST_PASSES, parameters=count(found.text_limit))


def _show_best(answer: Answer, found: Largest, console: Console) -> None:
    """The best models of a time, or why there are none."""
    time, question = duration(found.seconds), answer.question
    if not found.candidates:
        if question.rates is None:
            text = speed_unknown(answer)
        elif not comparable(question.shape.vocab_size):
            text = _("Which model is best is not known: there are no losses with a vocabulary of {n:,}.")
            text = text.format(n=question.shape.vocab_size)
        elif answer.text is not None and not answer.text.is_web:
            text = _("Which model is best is not known: losses are predicted for web text, not for {text}.")
            text = text.format(text=answer.text.name)
        else:
            text = _("Not one step of any model is done within {time}.").format(time=time)
        return console.print(text, highlight=False)
    first = found.candidates[0]
    title = _("The best model for {time}, by expected loss (nats a token, FineWeb)")
    if first.loss.unit == BITS:
        title = _("The best model for {time}, by expected loss (bits per byte, FineWeb)")
    headings = [_("parameters"), _("layers × width"), _("tokens"), _("tokens/s"), _("loss"), "GiB",
                _("RAM GiB")]  # fmt: skip
    rows = [_row_of(candidate) for candidate in found.candidates]
    print_rows(console, title.format(time=time), _("setting"), headings, rows, _("flags"), pasted=True)
    if first.evaluation_s > NOTABLE * found.seconds:
        share = _("evaluations take {time} of it").format(time=duration(first.evaluation_s))
        console.print(f"[dim]{share}[/dim]", highlight=False)
    console.print(f"[dim]{first.loss.basis}[/dim]")
    if note := text_note(answer):
        console.print(f"[dim]{note}[/dim]", highlight=False)
    if first.not_distinguishable:
        console.print(_("The first rows cannot be distinguished: the smaller one is cheaper to use."))
    return None


def _row_of(candidate: Candidate) -> Row:
    choice, loss = candidate.choice, candidate.loss
    shape = choice.question.shape
    figures = (
        count(shape.parameters), f"{shape.n_layer} × {shape.n_embd}", count(candidate.tokens), pace(choice),
        number(loss.low, ".2f") + " – " + number(loss.high, ".2f"), gib(choice.bill.process),
        host_cell(choice),
    )  # fmt: skip
    return Row(setting_name(kind(choice.setting)), figures, candidate.flags)


def _show_sizes(console: Console, title: str, sizes: list[Size], note: str = "") -> None:
    headings = [_("parameters"), _("layers × width"), _("block"), "GiB", _("RAM GiB"), _("tokens/s")]
    rows = []
    for size in sizes:
        choice = size.choice
        shape = choice.question.shape
        figures = (
            count(shape.parameters), f"{shape.n_layer} × {shape.n_embd}", number(shape.block_size, ","),
            gib(choice.bill.process), host_cell(choice), pace(choice),
        )  # fmt: skip
        rows.append(Row(_(size.kind), figures, flags_of(choice)))
    print_rows(console, title, "", headings, rows, _("flags"), pasted=True)
    if note:
        console.print(f"[dim]{note}[/dim]", highlight=False)
    console.print()
