"""What nanoGPT's own trainer would need for the same config, so that a user can see why a run dies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from onecard import terminal
from onecard.arch.shapes import GPT2Shape
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.language import _, number
from onecard.plan.amounts import duration
from onecard.plan.answer import cost_of_choice, question_of
from onecard.plan.bill import CONTEXT
from onecard.plan.cost import Cost, cost_of
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.options import Options
from onecard.plan.others.nanogpt import Confined, NanoGPTBill, nanogpt_bill
from onecard.plan.others.nanogpt_speed import (
    CHECKPOINT_BYTES_PER_PARAMETER,
    CHECKPOINT_PASSES,
    nanogpt_step_time,
)
from onecard.plan.search import chosen
from onecard.plan.speed import StepTime
from onecard.plan.tables import Row, print_parts, print_rows, terms_together
from onecard.plan.verdict import DESKTOP, host_remark, vocabulary_remark


@dataclass(frozen=True)
class Priced:
    """nanoGPT compiled, or not."""

    compiled: bool
    bill: NanoGPTBill
    confined: Confined  # in what the card leaves to PyTorch
    step: StepTime | None

    @property
    def need(self) -> int:
        """Bytes of the card, with CUDA itself."""
        return self.bill.reserved + CONTEXT

    @property
    def fits(self) -> bool:
        return self.confined.ran_out is None


def _cost(config: RunConfig, shape: GPT2Shape, target: Target, row: Priced) -> Cost | None:
    """By the formula of our own runs, so that both times can stand beside each other."""
    if row.step is None:
        return None
    return cost_of(
        config, row.step, target.card, CHECKPOINT_BYTES_PER_PARAMETER * shape.parameters,
        compiled=row.compiled, checkpoint_passes=CHECKPOINT_PASSES,
    )  # fmt: skip


def _verdict(asked: Priced, other: Priced, target: Target) -> list[str]:
    """Why it dies, or when it would."""
    there, need = target.allowed / GIB, asked.need / GIB
    texts: list[str] = []
    if not asked.fits:
        texts += [_("It runs out of memory: {need:.2f} GiB are needed, {there:.2f} are there.").format(
            need=need, there=there), _where(asked.confined)]  # fmt: skip
    elif need > there:
        texts.append(
            _(
                "It may just run: for {n:.2f} GiB that are missing, PyTorch empties its cache and takes "
                "memory anew. Nothing is left for anything else."
            ).format(n=need - there)
        )
    else:
        texts.append(_("It fits, with {n:.2f} GiB to spare.").format(n=there - need))
        if there - need < DESKTOP and not target.here:
            texts.append(_("A desktop on the same card may take that; then it runs out (--vram_reserve=1)."))
    more = abs(other.need - asked.need) / GIB
    if asked.compiled and not asked.fits and other.need > asked.need:
        texts.append(_("compile=False is no remedy: it needs {n:.2f} GiB more.").format(n=more))
    if not asked.compiled and asked.need > other.need:
        texts.append(_("With compile=True it would need {n:.2f} GiB less.").format(n=more))
    return texts


def _gib_or_mib(size: int) -> str:
    """As PyTorch writes it."""
    return number(size / GIB, ".2f") + " GiB" if size >= GIB else number(size / 2**20, ".2f") + " MiB"


def _where(confined: Confined) -> str:
    """As PyTorch's own error tells it."""
    failed = confined.ran_out
    assert failed is not None
    values = {
        "tried": _gib_or_mib(failed.tried), "moment": _(failed.moment), "allocated": failed.allocated / GIB,
        "reserved": failed.reserved / GIB, "memory": confined.memory / GIB,
    }  # fmt: skip
    text = _(
        "It ends ({moment}) where PyTorch tries to allocate {tried}: of the {memory:.2f} GiB it can "
        "have, {reserved:.2f} are reserved, {allocated:.2f} of them allocated."
    )
    told = text.format(**values)
    return told + " " + _("There would be room, but not in one piece.") if confined.in_pieces else told


def as_nanogpt(config: RunConfig, target: Target, options: Options, now: datetime) -> int:
    """Compiled and not, beside ours."""
    question = question_of(config, target)
    shape, config = question.shape, question.config
    if not isinstance(shape, GPT2Shape):
        raise UserError(_("nanoGPT does not have {arch}").format(arch=shape.arch), hint="--arch=gpt2")
    rows: list[Priced] = []
    for compiled in (True, False):
        step = None
        if question.rates is not None:
            step = nanogpt_step_time(
                shape, config.batch_size, config.sequences_per_step, question.rates, compiled=compiled,
                dtype=question.dtype,
            )  # fmt: skip
        bill = nanogpt_bill(
            shape, config.batch_size, dtype=question.dtype, compiled=compiled, dropout=config.dropout,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )  # fmt: skip
        rows.append(Priced(compiled, bill, bill.within(target.allowed - CONTEXT), step))
    asked, other = sorted(rows, key=lambda row: row.compiled != config.compile)
    ours, _exact = chosen(question)
    if options.json:
        bill, step, failed = asked.bill, asked.step, asked.confined.ran_out
        cost = _cost(config, shape, target, asked)
        told = {
            "as": "nanogpt", "fits": asked.fits, "compile": config.compile,
            "memory": {
                "total_gib": round(asked.need / GIB, 4),
                "allocated_gib": round(bill.allocated / GIB, 4),
                "reserved_gib": round(bill.reserved / GIB, 4),
                "moment": bill.moment, "lines": [line.to_json() for line in bill.lines],
            },
            "runs_out": {
                "tried_gib": round(failed.tried / GIB, 4), "allocated_gib": round(failed.allocated / GIB, 4),
                "reserved_gib": round(failed.reserved / GIB, 4), "moment": failed.moment,
            } if failed else None,
            "speed": {
                "tokens_per_s": round(step.tokens_per_s, 1), "step_s": round(step.seconds, 4),
                "mfu": round(step.mfu, 4) if step.mfu else None,
            } if step else None,
            "time": cost.to_json(now)["time"] if cost else None,
            "alternatives": [
                {
                    "name": "compiled" if row.compiled else "eager", "fits": row.fits,
                    "allocated_gib": round(row.bill.allocated / GIB, 4),
                    "reserved_gib": round(row.bill.reserved / GIB, 4),
                    "tokens_per_s": round(row.step.tokens_per_s, 1) if row.step else None,
                    "seconds": round(each.seconds, 1) if each else None,
                }
                for row in rows
                for each in (_cost(config, shape, target, row),)
            ],
        }  # fmt: skip
        terminal.show_json(json.dumps(told, indent=1))
        return 0 if asked.fits else 1
    from rich.text import Text

    from onecard.plan.command import console
    from onecard.plan.show import TELLING, expected, model_name

    out = console()
    title = Text.from_markup(f"[bold]nanoGPT[/bold], {model_name(shape)}")
    print_parts(out, [title, Text(target.card.name), Text(question.dtype)], " · ")
    for text in (*_verdict(asked, other, target), vocabulary_remark(question)):
        if text:
            out.print(text, highlight=False)
    out.print()
    costs = {row.compiled: _cost(config, shape, target, row) for row in rows}
    our_cost = cost_of_choice(ours, target, options) if ours is not None else None
    table = []
    for row in rows:
        bill, cost = row.bill, costs[row.compiled]
        figures = (
            number(bill.allocated / GIB, ".2f"), number(bill.reserved / GIB, ".2f"),
            number(row.need / GIB, ".2f"), number(row.step.tokens_per_s, ",.0f") if row.step else "-",
            duration(cost.seconds) if cost else "-",
        )  # fmt: skip
        short = (row.need - target.allowed) / GIB
        told_fit = _("fits") if row.fits else _("does not fit: {n:.2f} GiB short").format(n=short)
        name = "nanoGPT, " + (_("compiled") if row.compiled else "compile=False")
        table.append(Row(name, figures, told_fit))
    if ours is not None:
        figures = (
            number(ours.bill.allocated / GIB, ".2f"), number(ours.bill.reserved / GIB, ".2f"),
            number(ours.bill.process / GIB, ".2f"), number(ours.tokens_per_s, ",.0f") if ours.step else "-",
            duration(our_cost.seconds) if our_cost else "-",
        )  # fmt: skip
        table.append(Row(f"onecard, {ours.told}", figures, _("fits"), "bold"))
    headings = [_("allocated GiB"), _("reserved GiB"), _("GiB with CUDA itself"), _("tokens/s"), _("time")]
    print_rows(out, "", "", headings, table)
    if question.rates is not None:
        named = _("speed")
        out.print(f"[dim]{named}: {expected(question.rates)}[/dim]", highlight=False)
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
        for line in sorted(asked.bill.lines, key=lambda line: -line.bytes)
        if line.bytes >= GIB / 200
    ]
    lines.append(Row(_("allocated GiB"), (number(asked.bill.allocated / GIB, ".3f"),), style="bold"))
    peak = _("nanoGPT's peak ({moment})").format(moment=_(asked.bill.moment))
    print_rows(out, peak, _("what"), ["GiB"], lines, _("formula"))
    return 0 if asked.fits else 1
