"""Will it fit, and what to do: the first sentences of plan's answer."""

from __future__ import annotations

from onecard.arch.shapes import PRETRAINED
from onecard.config.dataset import OWN_TOKENS, data_facts
from onecard.language import _
from onecard.plan.answer import Answer
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.search import Choice, Question

# What a desktop with a browser takes of the card it is drawn by, in GiB.
DESKTOP = 1.0
_KNOWN_DEPTHS = (20, 32)  # nanochat's of October 2025, that people ask for by name


def verdict(answer: Answer) -> list[str]:
    given, choice, config = answer.given, answer.choice, answer.config
    texts = [_as_it_stands(given)]
    if choice is None:
        nearest = answer.nearest
        texts.append(_red(_("No setting fits. The nearest ({words}): {what}.").format(
            words=nearest.told, what=shortage(nearest)
        )))  # fmt: skip
        texts += _what_else(answer)
    elif choice.setting != given.setting:
        faster = choice.tokens_per_s / given.tokens_per_s - 1 if given.tokens_per_s else 0.0
        told = _("Faster by {n:.0%}").format(n=faster)
        if not given.fits:
            told = _("Fits, and is as fast as anything that does, within 1%")
        texts.append(f"{told}: [bold]{choice.told}[/bold]")
        if given.fits:
            texts.append(_("What follows is about that."))
        if not config.auto_fit:
            texts.append(_("With auto_fit=False these flags have to be given; train would refuse."))
    if choice is not None:
        texts += _remarks(answer, choice)
    # What falls short of the PC's own memory was told first, and is the config's own setting.
    shown = given if given.short <= 0 < given.host_short else choice or answer.nearest
    told = host_remark(answer.target, shown)
    return [*texts, told] if told else texts


def host_remark(target: Target, choice: Choice) -> str:
    """Where it uses the PC's own memory: what of it is left to the system, or that nobody has looked."""
    if not choice.bill.host:
        return ""
    if target.host is None:
        return _(
            "It takes {n:.1f} GiB of the PC's own memory; whether there is as much was not looked at "
            "(--host-ram GIB)."
        ).format(n=choice.host_bytes / GIB)
    if not target.host_kept:
        return ""
    return _("Of the PC's {n:.0f} GiB of memory {kept:.0f} are left to the system.").format(
        n=(target.host + target.host_kept) / GIB, kept=target.host_kept / GIB
    )


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
    from rich.markup import escape  # brackets in a name are no markup

    name, size = escape(config.dataset), question.shape.vocab_size
    if config.dataset in OWN_TOKENS and not data.is_there:
        tokenizer, count = OWN_TOKENS[name]
        told = _("data/{name} is not prepared yet: its vocabulary will be bytes, {n:,} tokens.")
        if tokenizer == "char":
            told = _("data/{name} is not prepared yet: its vocabulary will be {n:,} characters.")
        return told.format(name=name, n=count)
    if "char" not in name:
        return ""
    told = _("data/{name} is not prepared yet: a vocabulary of {n:,} is assumed (--vocab_size).")
    return told.format(name=name, n=size)


def _as_it_stands(given: Choice) -> str:
    need, there = given.bill.process / GIB, given.question.allowed / GIB
    if given.fits:
        told = _("It fits as it stands: {need:.2f} of {there:.2f} GiB.").format(need=need, there=there)
        return f"[green]{told}[/green]"
    if given.short > 0:
        told = _("As it stands it does not fit: {need:.2f} GiB are needed, {there:.2f} are there.")
        return _red(told.format(need=need, there=there))
    told = _("As it stands it does not fit: {need:.1f} GiB of host memory are needed, {there:.1f} are there.")
    return _red(told.format(need=given.host_bytes / GIB, there=(given.question.host_allowed or 0) / GIB))


def little_to_spare(answer: Answer, need: int) -> str | None:
    """Where a desktop may come in the way and nobody has said that there is none."""
    target, config = answer.target, answer.config
    spare = (target.allowed - need) / GIB
    if target.here or config.vram_reserve is not None or config.vram_limit is not None or spare >= DESKTOP:
        return None
    told = _("Only {n:.2f} GiB to spare: a desktop on the same card may take that (--vram_reserve=1).")
    return told.format(n=spare)


def _remarks(answer: Answer, choice: Choice) -> list[str]:
    target, config = answer.target, answer.config
    texts = [told] if (told := little_to_spare(answer, choice.bill.process)) else []
    if not choice.setting.exact:
        bits = f"master_weights={choice.setting.master_weights}, optim_states={choice.setting.optim_states}"
        texts.append(
            _("This is low-bit training ({bits}): not the same as exact training.").format(bits=bits)
        )
    if config.dropout:
        texts.append(_("The time that dropout takes is not counted."))
    if told := vocabulary_remark(answer.question):
        texts.append(told)
    if target.taken > GIB / 10:
        texts.append(_("Other programs hold {n:.2f} GiB of the card now.").format(n=target.taken / GIB))
    return texts


def _what_else(answer: Answer) -> list[str]:
    config = answer.config
    texts = []
    if config.depth in _KNOWN_DEPTHS and config.generation == 2026 and not config.is_set("generation"):
        texts.append(
            _("The d{depth} of October 2025 is a smaller model: --generation=2025").format(depth=config.depth)
        )
    if config.is_set("depth"):
        texts.append(_("hint: a smaller --depth, a shorter block_size, or `--largest` for what fits"))
    else:
        texts.append(
            _("hint: a smaller n_layer or n_embd, a shorter block_size, or `--largest` for what fits")
        )
    return texts


def shortage(choice: Choice) -> str:
    """What is missing of what."""
    if choice.short > 0:
        return _("{n:.2f} GiB of the card short").format(n=choice.short / GIB)
    return _("{n:.1f} GiB of host memory short").format(n=choice.host_short / GIB)


def _red(text: str) -> str:
    return f"[red]{text}[/red]"
