"""What nanoGPT's own trainer would need for the same config, so that a user can see why a run dies."""

from __future__ import annotations

import json
from datetime import datetime

from onecard.config import RunConfig
from onecard.errors import UserError
from onecard.language import _, number
from onecard.plan.amounts import duration
from onecard.plan.answer import cost_of_choice, question_of
from onecard.plan.bill import CONTEXT
from onecard.plan.cost import Cost, cost_of
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.nanogpt import NanoGPTBill, nanogpt_bill
from onecard.plan.nanogpt_speed import (
    CHECKPOINT_BYTES_PER_PARAMETER,
    CHECKPOINT_PASSES,
    nanogpt_step_time,
)
from onecard.plan.options import Options
from onecard.plan.search import chosen
from onecard.plan.speed import StepTime
from onecard.plan.tables import Row, print_parts, print_rows, terms_together
from onecard.plan.verdict import DESKTOP, host_remark, vocabulary_remark
from onecard.shapes import GPT2Shape

Priced = tuple[bool, NanoGPTBill, StepTime | None]


def _cost(config: RunConfig, shape: GPT2Shape, target: Target, row: Priced) -> Cost | None:
    """By the formula of our own runs, so that both times can stand beside each other."""
    compiled, _bill, step = row
    if step is None:
        return None
    return cost_of(
        config, step, target.card, CHECKPOINT_BYTES_PER_PARAMETER * shape.parameters, compiled=compiled,
        checkpoint_passes=CHECKPOINT_PASSES,
    )  # fmt: skip


def _verdict(rows: list[Priced], compiled: bool, target: Target) -> list[str]:
    """Why it dies, or when it would."""
    need = {row[0]: (row[1].reserved + CONTEXT) / GIB for row in rows}
    there = target.allowed / GIB
    spare = there - need[compiled]
    if spare < 0:
        texts = [_("It runs out of memory: {need:.2f} GiB are needed, {there:.2f} are there.").format(
            need=need[compiled], there=there)]  # fmt: skip
    else:
        texts = [_("It fits, with {n:.2f} GiB to spare.").format(n=spare)]
        if spare < DESKTOP and not target.here:
            texts.append(_("A desktop on the same card may take that; then it runs out (--vram_reserve=1)."))
    if compiled and spare < 0 and need[False] > need[True]:
        more = need[False] - need[True]
        texts.append(_("compile=False is no remedy: it needs {n:.2f} GiB more.").format(n=more))
    if not compiled and need[False] > need[True]:
        more = need[False] - need[True]
        texts.append(_("With compile=True it would need {n:.2f} GiB less.").format(n=more))
    return texts


def as_nanogpt(config: RunConfig, target: Target, options: Options, now: datetime) -> int:
    """Compiled and not, beside ours."""
    question = question_of(config, target)
    shape, config = question.shape, question.config
    if not isinstance(shape, GPT2Shape):
        raise UserError(_("nanoGPT does not have {arch}").format(arch=shape.arch), hint="--arch=gpt2")
    rows: list[Priced] = []
    for compiled in (True, False):
        bill = nanogpt_bill(
            shape, config.batch_size, dtype=question.dtype, compiled=compiled, dropout=config.dropout,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )  # fmt: skip
        step = None
        if question.rates is not None:
            step = nanogpt_step_time(
                shape, config.batch_size, config.sequences_per_step, question.rates, compiled=compiled,
                dtype=question.dtype,
            )  # fmt: skip
        rows.append((compiled, bill, step))
    asked = next(row for row in rows if row[0] == config.compile)
    ours, _exact = chosen(question)
    fits = asked[1].reserved + CONTEXT <= target.allowed
    if options.json:
        _compiled, bill, step = asked
        cost = _cost(config, shape, target, asked)
        told = {
            "as": "nanogpt", "fits": fits, "compile": config.compile,
            "memory": {
                "total_gib": round((bill.reserved + CONTEXT) / GIB, 4),
                "allocated_gib": round(bill.allocated / GIB, 4),
                "reserved_gib": round(bill.reserved / GIB, 4),
                "moment": bill.moment, "lines": [line.to_json() for line in bill.lines],
            },
            "speed": {
                "tokens_per_s": round(step.tokens_per_s, 1), "step_s": round(step.seconds, 4),
                "mfu": round(step.mfu, 4) if step.mfu else None,
            } if step else None,
            "time": cost.to_json(now)["time"] if cost else None,
            "alternatives": [
                {
                    "name": "compiled" if compiled else "eager",
                    "fits": other.reserved + CONTEXT <= target.allowed,
                    "allocated_gib": round(other.allocated / GIB, 4),
                    "reserved_gib": round(other.reserved / GIB, 4),
                    "tokens_per_s": round(speed.tokens_per_s, 1) if speed else None,
                    "seconds": round(each.seconds, 1) if each else None,
                }
                for compiled, other, speed in rows
                for each in (_cost(config, shape, target, (compiled, other, speed)),)
            ],
        }  # fmt: skip
        print(json.dumps(told, indent=1))
        return 0 if fits else 1
    from rich.text import Text

    from onecard.plan.command import console
    from onecard.plan.show import TELLING, model_name

    out = console()
    name = Text.from_markup(f"[bold]nanoGPT[/bold], {model_name(shape)}")
    print_parts(out, [name, Text(target.card.name), Text(question.dtype)], " · ")
    for text in (*_verdict(rows, config.compile, target), vocabulary_remark(question)):
        if text:
            out.print(text, highlight=False)
    out.print()
    costs = {row[0]: _cost(config, shape, target, row) for row in rows}
    our_cost = cost_of_choice(ours, target, options) if ours is not None else None
    table = []
    for compiled, bill, step in rows:
        cost = costs[compiled]
        whole = bill.reserved + CONTEXT
        short = whole - target.allowed
        figures = (
            number(bill.allocated / GIB, ".2f"), number(bill.reserved / GIB, ".2f"),
            number(whole / GIB, ".2f"), number(step.tokens_per_s, ",.0f") if step else "-",
            duration(cost.seconds) if cost else "-",
        )  # fmt: skip
        told_fit = _("fits") if short <= 0 else _("does not fit: {n:.2f} GiB short").format(n=short / GIB)
        table.append(Row("nanoGPT, " + (_("compiled") if compiled else "compile=False"), figures, told_fit))
    if ours is not None:
        figures = (
            number(ours.bill.allocated / GIB, ".2f"), number(ours.bill.reserved / GIB, ".2f"),
            number(ours.bill.process / GIB, ".2f"), number(ours.tokens_per_s, ",.0f") if ours.step else "-",
            duration(our_cost.seconds) if our_cost else "-",
        )  # fmt: skip
        table.append(Row(f"onecard, {ours.words}", figures, _("fits"), "bold"))
    headings = [_("allocated GiB"), _("reserved GiB"), _("GiB with CUDA itself"), _("tokens/s"), _("time")]
    print_rows(out, "", "", headings, table)
    if ours is not None and (told_of_host := host_remark(target, ours)):
        out.print(told_of_host, highlight=False)
    theirs = costs[config.compile]
    if (
        theirs is not None
        and max(theirs.evaluation_share, our_cost.evaluation_share if our_cost else 0) > TELLING
    ):
        share = _("evaluations take {time} of nanoGPT's time").format(time=duration(theirs.evaluation_s))
        if our_cost is not None:
            share += ", " + _("{time} of onecard's").format(time=duration(our_cost.evaluation_s))
        out.print(f"[dim]{share}[/dim]", highlight=False)
    out.print()
    lines = [
        Row(_(line.name), (number(line.gib, ".3f"),), terms_together(line.formula), "")
        for line in sorted(asked[1].lines, key=lambda line: -line.bytes)
        if line.bytes >= GIB / 200
    ]
    lines.append(Row(_("allocated GiB"), (number(asked[1].allocated / GIB, ".3f"),), style="bold"))
    peak = _("nanoGPT's peak ({moment})").format(moment=_(asked[1].moment))
    print_rows(out, peak, _("what"), ["GiB"], lines, _("formula"))
    return 0 if fits else 1
