"""Plan's answer for people: whether it fits and what to change, then what is predicted; on one screen.

What takes more lines (plan/tables.py) comes after it, where it is asked for.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from onecard.arch.shapes import PRETRAINED, Shape
from onecard.config.dataset import OWN_TOKENS, data_dir, data_facts
from onecard.language import _, number
from onecard.plan.amounts import count, duration, energy, file_size, price_text, speed
from onecard.plan.answer import Answer, comparable
from onecard.plan.bill import CHECKPOINTS_AT_ONCE
from onecard.plan.cost import Cost
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.ranges import Spread, is_launch_bound
from onecard.plan.references import all_references
from onecard.plan.scaling import NATS, LossRange, in_bits_per_byte, repetition_note
from onecard.plan.search import Choice, Question
from onecard.plan.texts import FITTED
from onecard.terminal import print_parts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# What a desktop with a browser takes of the card it is drawn by, in GiB.
DESKTOP = 1.0
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


# --- will it fit, and what to do ----------------------------------------------------------------------


def show_verdict(answer: Answer, console: Console) -> None:
    given, choice, config = answer.given, answer.choice, answer.config
    texts = [_as_given(given)]
    if choice is None:
        nearest = answer.nearest
        text = _("No setting fits. The nearest ({flags}): {what}.")
        texts.append(_red(text.format(flags=nearest.described, what=shortage(nearest))))
        texts.append(_what_else(answer))
    elif choice.setting != given.setting:
        gain = choice.tokens_per_s / given.tokens_per_s - 1 if given.tokens_per_s else 0.0
        text = _("A setting that is {n:.0%} faster, which train takes by itself:").format(n=gain)
        if not given.fits:
            text = _("Fastest setting that fits (others are within 1%), which train takes by itself:")
        if not config.auto_fit:
            text = _("Fastest setting that fits (others are within 1%):")
        if not choice.setting.exact and given.setting.exact:
            text = _("Nothing exact fits. The fastest low-bit setting, which is another training:")
        texts.append(text)
    for text in texts:
        console.print(text, highlight=False)
    if choice is not None and choice.setting != given.setting:
        for line in ("```python", *config_lines(choice, given), "```"):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if not config.auto_fit:
            text = _("With auto_fit=False train changes nothing: put these lines into your config.")
            console.print(text, highlight=False)
    for text in filter(None, _remarks(answer, choice) if choice is not None else []):
        console.print(text, highlight=False)


def config_lines(choice: Choice, given: Choice) -> list[str]:
    """Lines for a config file: only what changes, and what it was. Tokens per step stay."""
    config, before, after = choice.question.config, given.setting, choice.setting
    changed: list[tuple[str, object, object]] = []
    if after.micro_batch != before.micro_batch and not choice.last_micro_batch:
        steps = config.gradient_accumulation_steps, config.sequences_per_step // after.micro_batch
        changed = [("batch_size", before.micro_batch, after.micro_batch)]
        changed.append(("gradient_accumulation_steps", *steps))
    names = ("recompute", "offload", "master_weights", "optim_states", "loss_chunk")
    changed += [(name, getattr(before, name), getattr(after, name)) for name in names]
    was = _("was")
    lines = [
        f"{name} = {json.dumps(new)}   # {was} {json.dumps(old)}" for name, old, new in changed if old != new
    ]
    return [*lines, f"# {choice.split}"] if choice.split else lines


def _as_given(given: Choice) -> str:
    need, there = given.bill.process / GIB, given.question.allowed / GIB
    if given.fits:
        text = _("Fits: {need:.2f} GiB predicted, {there:.2f} available.").format(need=need, there=there)
        return f"[green]{text}[/green]"
    if given.short > 0:
        text = _("Does not fit as given: {need:.2f} GiB predicted, {there:.2f} available.")
        return _red(text.format(need=need, there=there))
    text = _("Does not fit as given: {need:.1f} GiB of RAM predicted, {there:.1f} available.")
    return _red(text.format(need=given.host_bytes / GIB, there=(given.question.host_allowed or 0) / GIB))


def shortage(choice: Choice) -> str:
    """What is missing of what."""
    if choice.short > 0:
        return _("{n:.2f} GiB of the card short").format(n=choice.short / GIB)
    return _("{n:.1f} GiB of RAM short").format(n=choice.host_short / GIB)


def host_remark(target: Target, choice: Choice) -> str:
    """How much RAM a setting takes, and of how much; only where it takes any."""
    if not choice.bill.host:
        return ""
    text = _("{n:.1f} of {there:.0f} GiB of RAM, {kept:.0f} of them for the system")
    if not target.host_kept:
        text = _("{n:.1f} of {there:.0f} GiB of RAM")
    if target.host is None:
        text = _("{n:.1f} GiB of RAM (yours was not checked: --host-ram 32)")
    elif target.host_assumed:
        text = _("{n:.1f} of {there:.0f} GiB of RAM, which are assumed (--host-ram N)")
    there = (target.host or 0) + target.host_kept
    return text.format(n=choice.host_bytes / GIB, there=there / GIB, kept=target.host_kept / GIB)


def assumed_ram(target: Target) -> str:
    """What is planned with where nobody has said how much RAM there is beside a card that is not here."""
    assert target.host is not None
    text = _("{n:.0f} GiB of RAM are assumed, {kept:.0f} of them for the system; --host-ram N says otherwise")
    return text.format(n=(target.host + target.host_kept) / GIB, kept=target.host_kept / GIB)


def vocabulary_remark(question: Question) -> str:
    """Where the data is not there yet: the vocabulary it will have, or the one that is assumed.

    Data of characters has a small one of its own, which the usual one is far from.
    """
    config = question.config
    # A nanochat's config has the vocabulary written into it by then.
    chosen = config.is_set("vocab_size") or config.init_from in PRETRAINED
    data = data_facts(config.dataset)
    if chosen or data.vocabulary is not None:
        return ""
    name, size = plain(config.dataset), question.shape.vocab_size
    if config.dataset in OWN_TOKENS and not data.is_there:
        tokenizer, size = OWN_TOKENS[name]
        text = _("data/{name} is not prepared yet: its vocabulary will be bytes, {n:,} tokens.")
        if tokenizer == "char":
            text = _("data/{name} is not prepared yet: its vocabulary will be {n:,} characters.")
    elif "char" in name:
        text = _("data/{name} is not prepared yet: a vocabulary of {n:,} is assumed (--vocab_size).")
    else:
        return ""
    return text.format(name=name, n=size)


def little_to_spare(answer: Answer, need: int) -> str:
    """Where a desktop may come in the way and nobody has said that there is none."""
    target, config = answer.target, answer.config
    spare = (target.allowed - need) / GIB
    if target.here or config.vram_reserve is not None or config.vram_limit is not None or spare >= DESKTOP:
        return ""
    text = _("Only {n:.2f} GiB to spare: a desktop takes about 1 (--vram_reserve=1 keeps it free)")
    return text.format(n=spare)


def _remarks(answer: Answer, choice: Choice) -> list[str]:
    target, setting = answer.target, choice.setting
    texts = [little_to_spare(answer, choice.bill.process), vocabulary_remark(answer.question)]
    if not setting.exact and not answer.given.setting.exact:
        bits = f"master_weights={setting.master_weights}, optim_states={setting.optim_states}"
        text = _("This is low-bit training ({bits}): not the same as exact training.")
        texts.append(text.format(bits=bits))
    if (longer := _of_dropout(choice)) is not None:
        text = _("Dropout makes a step {n:.0%} longer here: no fused attention takes its masks.")
        texts.append(text.format(n=longer))
    if target.taken > GIB / 10:
        texts.append(_("Other programs hold {n:.2f} GiB of the card now.").format(n=target.taken / GIB))
    return texts


def _of_dropout(choice: Choice) -> float | None:
    """The share of a step's time that dropout adds; None where there is none or no speed is known."""
    config = choice.question.config
    if not config.dropout or choice.step is None:
        return None
    without = dataclasses.replace(choice.question, config=dataclasses.replace(config, dropout=0.0))
    plain = without.answer(choice.setting).step
    assert plain is not None
    return choice.step.seconds / plain.seconds - 1


def _what_else(answer: Answer) -> str:
    knobs = "--depth" if answer.config.is_set("depth") else "--n_layer, --n_embd"
    text = _("hint: a smaller model ({knobs}), a shorter --block_size, or `--largest` for what fits")
    return text.format(knobs=knobs)


def _red(text: str) -> str:
    return f"[red]{text}[/red]"


def plain(text: str) -> str:
    """A user's own word: brackets in it are no markup."""
    from rich.markup import escape

    return escape(text)


# --- what is predicted --------------------------------------------------------------------------------


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


def expected(spread: Spread, target: Target, *, calibrated: bool) -> str:
    """How far off a speed may be. A laptop's card is as slow as its power limit makes it, at worst."""
    whole = within_power(spread, target)
    values = {"low": whole.slower, "high": whole.faster}
    if whole != spread:
        text = _("expect -{low:.0%} to +{high:.0%}, held to {watts:.0f} of {rated:.0f} W")
        return text.format(**values, watts=target.card.tdp_w, rated=target.rated_w)
    text = _("expect ±{n:.0%}").format(n=spread.faster)
    if is_launch_bound(spread):
        text = _("expect -{low:.0%} to +{high:.0%}: the CPU's launches decide").format(**values)
    if target.is_laptop and target.measured is None:
        text += ", " + _("less at a lower power limit (--watts)")
    return text if calibrated else text + "; " + _("`onecard bench` measures your card")


def within_power(spread: Spread, target: Target) -> Spread:
    """With what a laptop's lower power limit may take besides."""
    watts, rated = target.card.tdp_w, target.rated_w
    if target.is_laptop and target.measured is None and watts and rated and watts < rated:
        return dataclasses.replace(spread, slower=1 - (1 - spread.slower) * watts / rated)
    return spread


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
    """Of bits per byte also GPT-2's, of the same text: nanochat's published ones are of easier text."""
    loss = answer.loss
    if loss is None:
        if (note := text_note(answer)) and comparable(answer.question.shape.vocab_size):
            return [(_("loss"), note)]
        return []
    text = _("{low:.2f} to {high:.2f} nats a token on FineWeb, at the end of the run")
    remarks = []
    if loss.unit != NATS:
        text = _("{low:.2f} to {high:.2f} bits per byte on FineWeb, at the end of the run")
        remarks.append(_("GPT-2's there: {values}").format(values=gpt2_bits()))
    remarks += filter(None, [text_note(answer)])
    return [
        (_("loss"), text.format(low=loss.low, high=loss.high)),
        *(("", f"[dim]{remark}[/dim]") for remark in remarks),
    ]


def text_note(answer: Answer) -> str:
    """What a loss on FineWeb says of the run's own text; empty where that is FineWeb."""
    text = answer.text
    if text is None:
        dataset = plain(answer.config.dataset)
        return _("what text {dataset} is, is not known: its losses may be others").format(dataset=dataset)
    if not text.is_web:
        return _("not known for {text}, which is no web text").format(text=text.name)
    if text.name == FITTED:
        return ""
    return _("{text} is web text too, with losses of its own: do not compare them").format(text=text.name)


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
