"""Mistakes with text: too little to validate on, the same for both, read too often, and dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onecard.language import _
from onecard.plan.amounts import count
from onecard.plan.scaling import MANY_EPOCHS
from onecard.report.curve.detectors import Memorising
from onecard.report.curve.noise import NANOGPT_BLOCKS, evaluation_error
from onecard.report.findings import Mistake
from onecard.report.mistakes.knob_values import evidence_of, line
from onecard.report.run_facts import RunFacts

COARSE = 0.05  # nats: the error of an evaluation that can tell hardly anything
FEWEST_EQUAL = 4  # evaluations
LARGE_SETS = ("FineWeb", "FineWeb-Edu", "OpenWebText", "C4", "Pile", "ClimbMix", "SlimPajama", "DCLM")
SMALLEST_LARGE_SET = 9e9  # tokens: OpenWebText
# Dropout in nanoGPT, of its speed without (measured on an H200, benchmarks/results).
DROPOUT_SPEED = 0.68
MEMORISED_GAP, MEMORISED_SHARE = 0.5, 0.3


def validation_too_small(facts: RunFacts) -> Iterator[Mistake]:
    """Evaluations on so little text that runs cannot be compared."""
    error = evaluation_error(facts)
    if error is None or error.assumed or error.level <= COARSE:
        return
    text = _(
        "An evaluation reads {sequences:,} sequences only: its loss is exact to ± {error:.2f} nats, and "
        "smaller differences between runs are chance."
    ).format(sequences=error.sequences, error=error.level)
    evidence = evidence_of(facts, eval_tokens=facts.eval_tokens, block_size=error.block_size)
    change = line("eval_iters", NANOGPT_BLOCKS) if facts.batch_size else ""
    yield Mistake("validation-small", text, evidence, change, "", 38.0)


def validation_is_training(facts: RunFacts) -> Iterator[Mistake]:
    """The same losses on both splits."""
    log = facts.log.evaluations
    rows = [
        (step, train, val)
        for step, train, val in zip(log.step, log.train, log.val, strict=True)
        if step > 0 and math.isfinite(train) and math.isfinite(val)
    ]
    # Two digits are equal by chance now and then; of four or more rows in a row never.
    if len(rows) < FEWEST_EQUAL or any(train != val for _step, train, val in rows):
        return
    coarse = all(abs(val - round(val, 2)) < 1e-9 for _step, _train, val in rows)
    if coarse and len(rows) < 2 * FEWEST_EQUAL:
        return
    text = _(
        "Validation and training loss are equal to the last digit in all {count} evaluations: validation "
        "reads the training text, and the loss says nothing about new text."
    ).format(count=len(rows))
    shown = ", ".join(f"{int(step)}: {train:g}/{val:g}" for step, train, val in rows[-3:])
    yield Mistake("validation-is-training", text, shown, "", "", 65.0)


def repeated(facts: RunFacts) -> Iterator[Mistake]:
    """The same text again and again."""
    tokens = facts.tokens
    if facts.last_step and facts.tokens_per_step:
        tokens = max(tokens or 0, facts.last_step * facts.tokens_per_step)
    if not tokens or not facts.train_tokens or tokens <= MANY_EPOCHS * facts.train_tokens:
        return
    passes = tokens / facts.train_tokens
    text = _(
        "The text is read {passes:.0f} times: after some {many} passes the gain of reading it again falls "
        "fast (arXiv 2305.16264). More text does more than more steps."
    ).format(passes=passes, many=MANY_EPOCHS)
    evidence = _("{tokens} tokens in all, {data} tokens of text").format(
        tokens=count(tokens), data=count(facts.train_tokens)
    )
    change = ""
    if facts.tokens_per_step and facts.last_step:
        enough = max(1, round(MANY_EPOCHS * facts.train_tokens / facts.tokens_per_step))
        change = line("max_iters", enough, facts.last_step)
    yield Mistake("data-repeated", text, evidence, change, "", 44.0)


def dropout(facts: RunFacts) -> Iterator[Mistake]:
    """Dropout where every text is new."""
    if not facts.dropout or not 0 < facts.dropout < 1:
        return
    tokens = facts.tokens
    if facts.last_step and facts.tokens_per_step:
        tokens = max(tokens or 0, facts.last_step * facts.tokens_per_step)
    data = facts.train_tokens
    if data is None and facts.data in LARGE_SETS:
        data = int(SMALLEST_LARGE_SET)
    if not tokens or not data or tokens > 1.05 * data:
        return
    text = _(
        "Dropout {dropout:g} in a run that reads every text once: there is nothing to memorise, so that it "
        "only slows the learning."
    ).format(dropout=facts.dropout)
    costs = _("nanoGPT trains at {speed} of its speed with it (measured on an H200)").format(
        speed=DROPOUT_SPEED
    )
    evidence = evidence_of(facts, dropout=facts.dropout)
    yield Mistake("dropout", text, evidence, line("dropout", 0.0, facts.dropout), costs, 40.0)


def memorised(facts: RunFacts) -> Iterator[Mistake]:
    """A training loss that is taken for progress, where the model memorises."""
    log = facts.log.evaluations
    rows = [
        (int(step), train, val)
        for step, train, val in zip(log.step, log.train, log.val, strict=True)
        if math.isfinite(train) and math.isfinite(val)
    ]
    if not rows:
        return
    detector, alarm = Memorising(), None
    for row in rows:
        alarm = detector.add(*row) or alarm
    last, train, val = rows[-1]
    gap = val - train
    if alarm is None and not (gap > MEMORISED_GAP and gap > MEMORISED_SHARE * train):
        return
    if gap < 0.1 or (alarm is not None and val <= alarm.before):
        return
    values = {"train": train, "val": val, "step": last, "gap": gap}
    text = _(
        "The training loss of {train:.2f} is no progress: on text that the model has not seen it has "
        "{val:.2f}, {gap:.2f} more. It knows its text by heart, and samples that look good repeat it."
    ).format(**values)
    change = ""
    if alarm is not None:
        change = line("max_iters", alarm.began, facts.last_step)
    evidence = _("step {step:,}: train {train:.3f}, val {val:.3f}").format(**values)
    if alarm is not None:
        evidence = _(
            "step {step:,}: train {train:.3f}, val {val:.3f}; the best val was {best:.3f} at step {began:,}"
        ).format(best=alarm.before, began=alarm.began, **values)
    yield Mistake("memorised", text, evidence, change, "", 78.0)
