"""What another trainer would need for the same config, so that a user can see why a run dies there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from onecard.arch.shapes import GPT2Shape
from onecard.config.run import RunConfig
from onecard.language import _, number
from onecard.plan.amounts import duration, gib
from onecard.plan.answer import cost_of_choice, question_of
from onecard.plan.bill import CONTEXT
from onecard.plan.cost import Cost, Training, cost_of
from onecard.plan.expected import expected
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.options import Options
from onecard.plan.others.bills import TRAINERS, TheirTrainer, bill_of_trainer
from onecard.plan.others.nanogpt_speed import (
    CHECKPOINT_BYTES_PER_PARAMETER,
    CHECKPOINT_PASSES,
    nanogpt_step_time,
)
from onecard.plan.others.trainer import UNCONFIRMED, Confined, TrainerBill
from onecard.plan.ranges import Spread, spread_of
from onecard.plan.search import Question, chosen
from onecard.plan.show import NOTABLE, model_name
from onecard.plan.speed import StepTime
from onecard.plan.tables import pace
from onecard.plan.verdict import DESKTOP, host_remark, vocabulary_remark
from onecard.terminal import Row, print_parts, print_rows, show_json, terms_together

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Priced:
    """A trainer compiled, or not."""

    compiled: bool
    bill: TrainerBill
    confined: Confined  # in what the card leaves to PyTorch
    step: StepTime | None
    cost: Cost | None  # by the formula of our own runs, so that both times can be compared
    spread: Spread | None  # how far off its speed may be

    @property
    def need(self) -> int:
        """Bytes of the card, with CUDA itself."""
        return self.bill.reserved + CONTEXT

    @property
    def fits(self) -> bool:
        return self.confined.ran_out is None


def _verdict(asked: Priced, other: Priced, target: Target) -> list[str]:
    """Why it dies, or when it would."""
    there, need = target.allowed / GIB, asked.need / GIB
    texts: list[str] = []
    if not asked.fits:
        text = _("It runs out of memory: {need:.2f} GiB predicted, {there:.2f} available.")
        texts += [text.format(need=need, there=there), _where(asked.confined)]
    elif need > there:
        texts.append(
            _(
                "It may just run: for {n:.2f} GiB that are missing, PyTorch empties its cache and takes "
                "memory anew. Nothing is left for anything else."
            ).format(n=need - there)
        )
    else:
        texts.append(_("Predicted to fit, with {n:.2f} GiB to spare.").format(n=there - need))
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
    return f"{gib(size)} GiB" if size >= GIB else number(size / 2**20, ".2f") + " MiB"


def _where(confined: Confined) -> str:
    """As PyTorch's own error has it."""
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
    where = text.format(**values)
    return where + " " + _("There would be room, but not in one piece.") if confined.in_pieces else where


def as_trainer(trainer: str, config: RunConfig, target: Target, options: Options, now: datetime) -> int:
    """Compiled and not, compared with ours."""
    theirs, question = TRAINERS[trainer], question_of(config, target)
    rows = [priced(question, target, options, compiled=one, trainer=trainer) for one in (True, False)]
    asked, other = sorted(rows, key=lambda row: row.compiled != config.compile)
    if options.json:
        content = _to_json(theirs, asked, rows, now)
        if options.stages:
            from onecard.plan.others.stages import stages_of

            content["stages"] = [s.to_json() for s in stages_of(trainer, question, target, options)]
        show_json(json.dumps(content, indent=1))
    else:
        _show(theirs, question, target, options, (asked, other))
    return 0 if asked.fits else 1


def priced(
    question: Question, target: Target, options: Options, *, compiled: bool, trainer: str = "nanogpt"
) -> Priced:
    shape, config = question.shape, question.config
    bill = bill_of_trainer(
        trainer, shape, config.batch_size, dtype=question.dtype, compiled=compiled, dropout=config.dropout,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )  # fmt: skip
    confined = bill.within(target.allowed - CONTEXT)
    # Of nanochat's speed there are too few measurements.
    if question.rates is None or trainer != "nanogpt":
        return Priced(compiled, bill, confined, None, None, None)
    assert isinstance(shape, GPT2Shape)
    step = nanogpt_step_time(
        shape, config.batch_size, config.sequences_per_step, question.rates, compiled=compiled,
        dtype=question.dtype, dropout=config.dropout,
    )  # fmt: skip
    saved = CHECKPOINT_BYTES_PER_PARAMETER * shape.parameters
    run = Training(config, step, saved, CHECKPOINT_PASSES, compiled)
    cost = cost_of(run, target.card, options.prices(target.card))
    calibrated = question.rates.calibrated
    spread = spread_of(step, shape, config.batch_size, calibrated=calibrated, engine="nanogpt")
    return Priced(compiled, bill, confined, step, cost, spread)


def _to_json(theirs: TheirTrainer, asked: Priced, rows: list[Priced], now: datetime) -> dict[str, Any]:
    bill, step, failed = asked.bill, asked.step, asked.confined.ran_out
    return {
        "as": theirs.key, "fits": asked.fits, "compile": asked.compiled,
        "memory": {
            "total_gib": round(asked.need / GIB, 4),
            "allocated_gib": round(bill.allocated / GIB, 4),
            "reserved_gib": round(bill.reserved / GIB, 4),
            **({} if bill.confirmed else {"confirmed": False, "off_by_at_most": UNCONFIRMED}),
            "moment": bill.moment, "lines": [line.to_json() for line in bill.lines],
        },
        "runs_out": {
            "tried_gib": round(failed.tried / GIB, 4), "allocated_gib": round(failed.allocated / GIB, 4),
            "reserved_gib": round(failed.reserved / GIB, 4), "moment": failed.moment,
        } if failed else None,
        "speed": {
            "tokens_per_s": round(step.tokens_per_s, 1), "step_s": round(step.seconds, 4),
            **(asked.spread.to_json(step.tokens_per_s) if asked.spread else {}),
            "mfu": round(step.mfu, 4) if step.mfu else None,
        } if step else None,
        "time": asked.cost.to_json(now)["time"] if asked.cost else None,
        "alternatives": [
            {
                "name": "compiled" if row.compiled else "eager", "fits": row.fits,
                "allocated_gib": round(row.bill.allocated / GIB, 4),
                "reserved_gib": round(row.bill.reserved / GIB, 4),
                "tokens_per_s": round(row.step.tokens_per_s, 1) if row.step else None,
                "seconds": round(row.cost.seconds, 1) if row.cost else None,
            }
            for row in rows
        ],
    }  # fmt: skip


def _show(
    theirs: TheirTrainer, question: Question, target: Target, options: Options, rows: tuple[Priced, Priced]
) -> None:
    from rich.text import Text

    from onecard.plan.command import console

    out = console()
    asked, other = rows
    for text in filter(None, (*_verdict(asked, other, target), vocabulary_remark(question))):
        out.print(text, highlight=False)
    title = Text.from_markup(f"[bold]{theirs.name}[/bold], {model_name(question.shape)}")
    print_parts(out, [title, Text(target.card.name), Text(question.dtype)], " · ")
    out.print()
    ours, _exact = chosen(question)
    our_cost = cost_of_choice(ours, target, options) if ours is not None else None
    table = [_row(theirs, row, target) for row in sorted((asked, other), key=lambda row: not row.compiled)]
    if ours is not None:
        figures = (
            gib(ours.bill.allocated), gib(ours.bill.reserved), gib(ours.bill.process), pace(ours),
            duration(our_cost.seconds) if our_cost else "-",
        )  # fmt: skip
        table.append(Row(f"onecard, {ours.described}", figures, _("fits"), "bold"))
    headings = [_("allocated GiB"), _("reserved GiB"), _("GiB with CUDA itself"), _("tokens/s"), _("time")]
    print_rows(out, _("Predicted"), "", headings, table)
    if options.stages:
        from onecard.plan.others.stages import stages_in_words, stages_of

        for text in stages_in_words(stages_of(theirs.key, question, target, options), question):
            out.print(text, highlight=False)
    if not asked.bill.confirmed:
        unsure = _("No card has confirmed this yet: the memory may be {share:.0%} more or less.")
        out.print(unsure.format(share=UNCONFIRMED), style="dim", highlight=False)
    if question.rates is not None and asked.spread is not None:
        said = expected(asked.spread, target, calibrated=question.rates.calibrated)
        out.print(_("speed") + f": {said}", style="dim", highlight=False)
    if ours is not None and (remark := host_remark(target, ours)):
        out.print(remark, highlight=False)
    shares = [cost.evaluation_share for cost in (asked.cost, our_cost) if cost]
    if asked.cost is not None and max(shares) > NOTABLE:
        share = _("evaluations take {time} of {trainer}'s time").format(
            time=duration(asked.cost.evaluation_s), trainer=theirs.name
        )
        if our_cost is not None:
            share += ", " + _("{time} of onecard's").format(time=duration(our_cost.evaluation_s))
        out.print(f"[dim]{share}[/dim]", highlight=False)
    if options.memory or options.formulas:
        _show_memory(theirs, asked, out)


def _row(theirs: TheirTrainer, row: Priced, target: Target) -> Row:
    figures = (
        gib(row.bill.allocated), gib(row.bill.reserved), gib(row.need),
        number(row.step.tokens_per_s, ",.0f") if row.step else "-",
        duration(row.cost.seconds) if row.cost else "-",
    )  # fmt: skip
    short = (row.need - target.allowed) / GIB
    note = _("fits") if row.fits else _("does not fit: {n:.2f} GiB short").format(n=short)
    return Row(f"{theirs.name}, " + (_("compiled") if row.compiled else "compile=False"), figures, note)


def _show_memory(theirs: TheirTrainer, asked: Priced, out: Console) -> None:
    lines = [
        Row(_(line.name), (gib(line.bytes, 3),), terms_together(line.formula), "")
        for line in sorted(asked.bill.lines, key=lambda line: -line.bytes)
        if line.bytes >= GIB / 200
    ]
    lines.append(Row(_("allocated GiB"), (gib(asked.bill.allocated, 3),), style="bold"))
    peak = _("{trainer}'s predicted peak memory ({moment})").format(
        trainer=theirs.name, moment=_(asked.bill.moment)
    )
    out.print()
    print_rows(out, peak, _("what"), ["GiB"], lines, _("formula"))
