"""Plan's verdict for people: whether it fits, what to change where it does not, and what to know besides."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from onecard.arch.shapes import PRETRAINED
from onecard.config.dataset import OWN_TOKENS, data_facts
from onecard.language import _
from onecard.plan.answer import Answer
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.search import Choice, Question

if TYPE_CHECKING:
    from rich.console import Console

# What a desktop with a browser takes of the card it is drawn by, in GiB.
DESKTOP = 1.0


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
    """Remark where the data is not there yet: the vocabulary it will have, or the one that is assumed.

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
    """Warning where a desktop may come in the way and nobody has said that there is none."""
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
