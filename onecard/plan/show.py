"""Plan's answer for people: the verdict (plan/verdict.py), then what is predicted; on one screen.

What takes more lines (plan/tables.py) comes after it, where it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onecard.arch.shapes import Shape
from onecard.config.dataset import data_dir
from onecard.language import _, number
from onecard.plan.amounts import count, duration, energy, file_size, price_text, speed
from onecard.plan.answer import Answer, comparable
from onecard.plan.bill import CHECKPOINTS_AT_ONCE
from onecard.plan.cost import Cost
from onecard.plan.expected import expected
from onecard.plan.lines import GIB
from onecard.plan.references import all_references
from onecard.plan.scaling import NATS, LossRange, in_bits_per_byte, repetition_note
from onecard.plan.search import Choice
from onecard.plan.texts import FITTED
from onecard.plan.verdict import host_remark, plain, show_verdict
from onecard.terminal import print_parts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOTABLE = 0.03  # of the time: what is less is not worth a line


def show(answer: Answer, console: Console) -> None:
    from rich.text import Text

    from onecard.plan.tables import bar, show_comparison, show_memory, show_stages

    question, options = answer.question, answer.options
    show_verdict(answer, console)
    card = f"{answer.target.card.name}, " + number(answer.target.capacity / GIB, ".1f") + " GiB"
    step = _("{n:,} tokens a step").format(n=answer.config.tokens_per_step)
    name, shown = Text(model_name(question.shape), style="bold"), answer.choice or answer.nearest
    # What falls short of host memory was said first, and is the config's own setting.
    short_of_ram = answer.given.short <= 0 < answer.given.host_short
    ram = host_remark(answer.target, answer.given if short_of_ram else shown)
    print_parts(console, [name, *map(Text, filter(None, (card, question.dtype, step, ram)))], " · ")
    cost = answer.cost(shown) if answer.choice is not None else None
    if cost is not None:
        console.print(predicted(answer, shown), highlight=False)
        console.print(figures(answer, shown, cost))
    elif answer.choice is not None:
        console.print(speed_unknown(answer), highlight=False)
    strip, legend = bar(shown, answer.target)
    console.print(strip)
    if options.memory or options.formulas:
        print_parts(console, legend, "")
        show_memory(shown, console, formulas=options.formulas)
    if options.compare or answer.choice is None:
        show_comparison(answer, console)
    if options.stages and answer.choice is not None:
        show_stages(answer, console)


def model_name(shape: Shape) -> str:
    names = {"gpt2": "GPT-2", "nanochat-2025": "nanochat 2025", "nanochat-2026": "nanochat 2026"}
    millions = shape.parameters / 1e6
    size = number(millions, ".1f") + "M" if millions < 1000 else number(millions / 1000, ".2f") + "B"
    block = _("block")
    return f"{names[shape.arch]} {size}, {shape.n_layer} × {shape.n_embd}, {block} {shape.block_size}"


def predicted(answer: Answer, choice: Choice) -> str:
    """The heading of the figures: where the speed comes from, and how far off it may be."""
    measured = answer.target.measured
    source = _("the card's figures")
    if measured is not None:
        source = _("onecard bench of {date}").format(date=measured.date)
    text = _("Predicted from {source}; speed and time: {expected}")
    spread = choice.spread
    assert spread is not None
    calibrated = answer.question.rates is not None and answer.question.rates.calibrated
    return text.format(source=source, expected=expected(spread, answer.target, calibrated=calibrated))


def speed_unknown(answer: Answer) -> str:
    text = _("How fast it would be is not known: there are no figures of {card} in {dtype}.")
    return text.format(card=plain(answer.target.card.name), dtype=answer.question.dtype)


def figures(answer: Answer, choice: Choice, cost: Cost) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    rows = [*_speed_rows(choice), *_time_rows(answer, choice, cost), *_loss_rows(answer)]
    for name, text in [*rows, *_data_rows(answer), *_cost_rows(answer, cost), _disk_row(answer, choice)]:
        table.add_row(name, text)
    return table


def _speed_rows(choice: Choice) -> list[tuple[str, str]]:
    step = choice.step
    assert step is not None
    pace = speed(step.tokens_per_s, step.seconds)
    pace += ", " + _("{n:.1f} effective TFLOPS").format(n=choice.tflops)
    if step.mfu is not None:
        pace += ", " + _("MFU {mfu:.0%}").format(mfu=step.mfu)
    rows = [(_("speed"), pace)]
    if step.mfu is not None and step.mfu > 1:
        # As everywhere, or MFUs could not be compared; the time is that of the work that is done.
        text = _("MFU counts all of attention's matrix; the half above the diagonal is not computed")
        rows.append(("", f"[dim]{text}[/dim]"))
    return rows


def _time_rows(answer: Answer, choice: Choice, cost: Cost) -> list[tuple[str, str]]:
    done, steps = answer.options.steps_done, answer.config.max_iters
    left = max(steps - done, 0)
    if not left:
        return [(_("time"), _("none: all {n:,} steps are done").format(n=steps))]
    text = _("{time} for {steps:,} steps, {tokens} tokens")
    if done:
        text = _("{time} for the {left:,} steps that are left of {steps:,}, {tokens} tokens")
    text = text.format(
        time=duration(cost.seconds),
        steps=steps,
        left=left,
        tokens=count(left * answer.config.tokens_per_step),
    )
    if finish := cost.finish(answer.now):
        form = "%Y-%m-%d %H:%M" if cost.days < 2 else "%Y-%m-%d"
        text += ", " + _("done {when} if begun now").format(when=finish.strftime(form))
    parts = []
    if choice.setting.compile and cost.first_step_s > NOTABLE * cost.seconds:
        parts.append(_("the first step compiles: about {time}").format(time=duration(cost.first_step_s)))
    if cost.evaluation_share > NOTABLE:
        parts.append(_("evaluations take {time} of it").format(time=duration(cost.evaluation_s)))
    rows = [(_("time"), text)]
    return [*rows, ("", f"[dim]{'; '.join(parts)}[/dim]")] if parts else rows


def _loss_rows(answer: Answer) -> list[tuple[str, str]]:
    """The expected loss; in bits per byte also GPT-2's of the same text: nanochat's published ones are of
    easier text."""
    loss, text = answer.loss, answer.text
    if loss is None:
        if text is None or text.is_web or not comparable(answer.question.shape.vocab_size):
            return []
        return [(_("loss"), _("not known for {text}, which is no web text").format(text=text.name))]
    values = {"low": loss.low, "high": loss.high, "text": _other_text(answer)}
    in_nats = loss.unit == NATS
    if values["text"]:
        said = _("{low:.2f} to {high:.2f} nats a token on FineWeb; {text} has losses of its own")
        if not in_nats:
            said = _("{low:.2f} to {high:.2f} bits per byte on FineWeb; {text} has losses of its own")
    else:
        said = _("{low:.2f} to {high:.2f} nats a token on FineWeb, at the end of the run")
        if not in_nats:
            said = _("{low:.2f} to {high:.2f} bits per byte on FineWeb, at the end of the run")
    rows = [(_("loss"), said.format(**values))]
    if in_nats:
        return rows
    others = _("GPT-2's there: {values}").format(values=gpt2_bits())
    return [*rows, ("", f"[dim]{others}[/dim]")]


def _other_text(answer: Answer) -> str:
    """What the run reads, where that is said and is not what losses are predicted for."""
    if not answer.config.is_set("dataset"):
        return ""
    name = answer.text.name if answer.text else answer.config.dataset
    return "" if name == FITTED else plain(name)


def text_note(answer: Answer) -> str:
    """Below a table of losses, where the run reads another text than they are of."""
    name = _other_text(answer)
    return _("These losses are of FineWeb; {text} has losses of its own.").format(text=name) if name else ""


def gpt2_bits() -> str:
    """OpenAI's smallest and largest GPT-2 as they were measured on FineWeb, in bits per byte."""
    rows = [r for r in all_references() if r.model.startswith("OpenAI GPT-2") and r.data == "FineWeb"]
    parts = []
    for row in (rows[0], rows[-1]):
        loss = in_bits_per_byte(LossRange(row.loss, row.loss, row.loss, "", False))
        parts.append(f"{span(loss.low, loss.high, '.2f')} ({count(row.parameters)})")
    return ", ".join(parts)


def _data_rows(answer: Answer) -> list[tuple[str, str]]:
    """How often the run reads its data, where that is there; else how much there has to be."""
    if answer.data_tokens is None or answer.passes is None:
        text = _("{size} of training data ({tokens} tokens, each read once)")
        return [(_("data"), text.format(size=file_size(answer.data_bytes), tokens=count(answer.tokens)))]
    text = _("{tokens} tokens in {folder}, read {n} times").format(
        tokens=count(answer.data_tokens),
        folder=plain(str(data_dir(answer.config.dataset))),
        n=number(answer.passes, ".1f"),
    )
    rows = [(_("data"), text)]
    if (note := repetition_note(answer.tokens, answer.data_tokens)) is not None:
        rows.append(("", f"[dim]{note}[/dim]"))
    return rows


def _cost_rows(answer: Answer, cost: Cost) -> list[tuple[str, str]]:
    prices = answer.options.prices(answer.target.card)
    if cost.amount is None:
        return [(_("energy"), _("not known without the card's power: --watts W"))]
    assert cost.card_kwh is not None and cost.pc_kwh is not None
    text = _("{amount} {currency} at {price} {currency} a kWh").format(
        amount=amount(cost), currency=plain(cost.currency),
        price=" – ".join(sorted({price_text(prices.low), price_text(prices.high)})),
    )  # fmt: skip
    return [(_("energy"), energy(cost.card_kwh, cost.pc_kwh, prices.idle_watts)), (_("cost"), text)]


def amount(cost: Cost, form: str = ",.2f") -> str:
    """Money; a range where the price is one."""
    assert cost.amount is not None and cost.amount_high is not None
    return span(cost.amount, cost.amount_high, form)


def span(low: float, high: float, form: str) -> str:
    texts = number(low, form), number(high, form)
    return texts[0] if texts[0] == texts[1] else " – ".join(texts)


def _disk_row(answer: Answer, choice: Choice) -> tuple[str, str]:
    each = answer.checkpoint(choice)
    text = _("{each} a checkpoint, up to {n} at once: {all}")
    whole = file_size(CHECKPOINTS_AT_ONCE * each)
    return _("disk"), text.format(each=file_size(each), n=CHECKPOINTS_AT_ONCE, all=whole)
