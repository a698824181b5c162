"""Mistakes in the model's size and in what a step is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, GPT2_VOCABULARY, GPT2Shape
from onecard.language import _
from onecard.plan.amounts import count
from onecard.plan.scaling import LAW, SIZES, TOKENS_PER_PARAMETER
from onecard.report.curve.detectors import COMMON_VOCABULARIES
from onecard.report.curve.speed import A100_FLOPS, nanogpts_mfu
from onecard.report.findings import Mistake
from onecard.report.mistakes.knob_values import evidence_of, is_default, knob_value, line, names_in, numeric
from onecard.report.run_facts import RunFacts

# "gpt-125m", "1.5B". A size alone may be the data's ("fineweb10B"), unless it is one of GPT-2's or the
# Pythias'.
_SIZE = re.compile(r"(?<![\d.])(\d{1,4}(?:\.\d{1,2})?)\s?(M|B)(?![a-z])(?![-_ ]?tok)", re.IGNORECASE)
_MODEL_SIZE = re.compile(r"(?:gpt\d?|llama|qwen|pythia|model|lm)[-_ ]?" + _SIZE.pattern, re.IGNORECASE)
KNOWN_SIZES = frozenset((117, 124, 125, 345, 350, 355, 760, 762, 774, 1300, 1500, 1558))
_GPT2_NAME = re.compile(r"gpt-?2[-_](small|medium|large|xl)(?![a-z])", re.IGNORECASE)
GPT2_SIZES = {"small": 124, "medium": 350, "large": 774, "xl": 1558}
WIDTHS = {(12, 12): 768, (24, 16): 1024, (36, 20): 1280, (48, 25): 1600}  # of GPT-2's (layers, heads)
OTHER_SIZE = 1.6  # a name's size is rounded, and counts embeddings or not
LEAST_PER_PARAMETER = 4
NANOGPT_MICROS = 40  # 5 × 8: made for eight cards
STEPS_A_PASS = 20
PAD_THEMSELVES = ("modded-nanogpt", "nanochat", "nanochat-2025", "litgpt")  # to a multiple, by their code
UNLEARNED = 0.9  # of ln(vocabulary)
AN_A100 = re.compile(r"\bA100\b")


def size(facts: RunFacts) -> Iterator[Mistake]:
    """Another size was meant than was built."""
    if not facts.parameters:
        return
    built = facts.parameters / 1e6
    names = list(names_in(facts))
    if any(_near(built, millions) for _where, text in names for millions in _sizes_said(text)):
        return  # a name says what it is
    for where, text in names:
        if (meant := _meant(text)) is not None:
            yield _other_size(facts, meant, built, f"{where} = {text}" if where else text, 70.0)
            return
    layers, heads, width = _sizes(facts)
    usual = WIDTHS.get((layers, heads))
    if usual is not None and width and width < 0.8 * usual:
        shape = GPT2Shape(layers, heads, usual, facts.vocab_size or GPT2_PADDED_VOCABULARY, 1024, False)
        yield _other_size(facts, shape.parameters / 1e6, built, "", 30.0)


def _near(built: float, meant: float) -> bool:
    return meant / OTHER_SIZE < built < meant * OTHER_SIZE


def _sizes_said(text: str) -> list[float]:
    """All numbers of millions in a name, of parameters or of anything else."""
    return [_millions(found) for found in _SIZE.finditer(text)]


def _meant(text: str) -> float | None:
    """Millions of parameters that a name says; None where it may be about the data."""
    if found := _GPT2_NAME.search(text):
        return float(GPT2_SIZES[found[1].lower()])
    if found := _MODEL_SIZE.search(text):
        return _millions(found)
    return next((size for size in _sizes_said(text) if size in KNOWN_SIZES), None)


def _millions(found: re.Match[str]) -> float:
    return float(found[1]) * (1000 if found[2].upper() == "B" else 1)


def _sizes(facts: RunFacts) -> tuple[int, int, int]:
    if facts.shape is not None and facts.shape.arch == "gpt2":
        return facts.shape.n_layer, facts.shape.n_head, facts.shape.n_embd
    if facts.shape is not None:
        return 0, 0, 0
    layers, heads, width = (int(numeric(facts, name) or 0) for name in ("n_layer", "n_head", "n_embd"))
    if width and facts.parameters and not layers:
        # The width alone is said: are the parameters those of nanoGPT's twelve layers?
        shape = GPT2Shape(12, 12, width, facts.vocab_size or GPT2_PADDED_VOCABULARY, 1024, False)
        if abs(shape.parameters / facts.parameters - 1) < 0.08:
            return 12, 12, width
    return layers, heads, width


def _other_size(facts: RunFacts, meant: float, built: float, said: str, weight: float) -> Mistake:
    layers, heads, width = _sizes(facts)
    usual = WIDTHS.get((layers, heads))
    values = {
        "built": count(1e6 * built), "meant": count(1e6 * meant), "said": said, "layers": layers,
        "heads": heads, "width": width, "usual": usual or 0,
    }  # fmt: skip
    if said:
        text = _("The model has {built} parameters, and “{said}” speaks of {meant}.").format(**values)
    else:
        text = _(
            "The model has {built} parameters: {layers} layers and {heads} heads are those of GPT-2 "
            "{meant}, but n_embd is {width} instead of {usual}. Was {meant} meant?"
        ).format(**values)
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width} if width else {}
    evidence = evidence_of(facts, **sizes, parameters=facts.parameters)
    change = ""
    if usual is not None and width and width != usual:
        wide = GPT2Shape(layers, heads, usual, facts.vocab_size or GPT2_PADDED_VOCABULARY, 1024, False)
        if _near(wide.parameters / 1e6, meant):
            change = line("n_embd", usual, width)
    return Mistake("size-meant", text, evidence, change, _gain(facts, meant * 1e6), weight)


def _gain(facts: RunFacts, meant: float) -> str:
    """What the meant size would do better on as many tokens, by the scaling law, where that was fitted."""
    tokens, built = _all_tokens(facts), facts.parameters
    low, high = SIZES
    if (
        not tokens
        or not built
        or not low <= min(built, meant)
        or not max(built, meant) <= high
        or tokens < 2e8
    ):
        return ""
    gain = LAW.loss(built, tokens) - LAW.loss(meant, tokens)
    text = _(
        "about {gain:.1f} nats on as many tokens; a step of the {meant} takes some {times:.1f} times as long"
    )
    if gain < 0:
        text = _("the {meant} would be about {gain:.1f} nats worse on as many tokens")
    return text.format(gain=abs(gain), meant=count(meant), times=meant / built)


def _all_tokens(facts: RunFacts) -> int | None:
    """Of the whole run, where its end is known; else those seen."""
    if facts.last_step and facts.tokens_per_step:
        return facts.last_step * facts.tokens_per_step
    return facts.tokens


def tokens_for_size(facts: RunFacts) -> Iterator[Mistake]:
    """A model that is far too large for its tokens. Many tokens for a small one are a choice."""
    tokens = _all_tokens(facts)
    if not tokens or not facts.parameters or not facts.last_step or not _from_scratch(facts):
        return
    ratio = tokens / facts.parameters
    if ratio >= LEAST_PER_PARAMETER:
        return
    smaller = math.sqrt(tokens * facts.parameters / TOKENS_PER_PARAMETER) / 1e6
    text = _(
        "{tokens} tokens are few for {parameters} parameters: {ratio:.1f} each, where {usual} "
        "is what computing is best spent on (Chinchilla). With the same computing, a model of about "
        "{smaller} on more tokens ends lower."
    ).format(
        tokens=count(tokens),
        parameters=count(facts.parameters),
        ratio=ratio,
        usual=TOKENS_PER_PARAMETER,
        smaller=count(1e6 * smaller),
    )
    evidence = evidence_of(facts, parameters=facts.parameters, max_iters=facts.last_step,
                           tokens_per_step=facts.tokens_per_step)  # fmt: skip
    change = ""
    if facts.tokens_per_step and facts.last_step:
        wanted = round(TOKENS_PER_PARAMETER * facts.parameters / facts.tokens_per_step)
        change = line("max_iters", wanted, facts.last_step)
    yield Mistake("tokens-too-few", text, evidence, change, "", 42.0)


def _from_scratch(facts: RunFacts) -> bool:
    """Does the run show that it began with a model that knows nothing?"""
    log = facts.log
    pairs = log.evaluations.pairs("val")[:1] + log.steps.pairs("loss")[:1]
    blind = math.log(facts.vocab_size) if facts.vocab_size else min(math.log(v) for v in COMMON_VOCABULARIES)
    return any(step <= 1 and loss > UNLEARNED * blind for step, loss in pairs)


def vocabulary(facts: RunFacts) -> Iterator[Mistake]:
    """GPT-2's 50,257 where 50,304 computes faster."""
    said = numeric(facts, "vocab_size") or facts.vocab_size
    if said != GPT2_VOCABULARY or str(knob_value(facts, "init_from") or "").startswith("gpt2"):
        return
    if facts.shape is None or facts.shape.arch != "gpt2":
        return
    if facts.log.format in PAD_THEMSELVES:
        return
    text = _(
        "The vocabulary of {said:,} is no multiple of 64: padded to {padded:,}, the largest matmul runs on "
        "tensor cores at full speed, and the loss stays comparable."
    ).format(said=GPT2_VOCABULARY, padded=GPT2_PADDED_VOCABULARY)
    change = line("vocab_size", GPT2_PADDED_VOCABULARY, GPT2_VOCABULARY)
    yield Mistake("vocabulary", text, evidence_of(facts, vocab_size=GPT2_VOCABULARY), change, "", 12.0)


def accumulation(facts: RunFacts) -> Iterator[Mistake]:
    """nanoGPT's 40 micro-batches, left where the text is small."""
    micros, batch = facts.gradient_accumulation_steps, facts.batch_size
    if micros != NANOGPT_MICROS or not batch or not facts.tokens_per_step or not facts.train_tokens:
        return
    if not is_default(facts, "gradient_accumulation_steps") and facts.config is not None:
        return
    a_pass = facts.train_tokens / facts.tokens_per_step
    if a_pass >= STEPS_A_PASS:
        return
    text = _(
        "gradient_accumulation_steps {micros} is nanoGPT's default for GPT-2 on eight cards: a step has "
        "{tokens:,} tokens, and {steps:.1f} steps read all of the text."
    ).format(micros=micros, tokens=facts.tokens_per_step, steps=a_pass)
    evidence = evidence_of(
        facts, batch_size=batch, block_size=facts.block_size, gradient_accumulation_steps=micros,
        train_tokens=facts.train_tokens,
    )  # fmt: skip
    yield Mistake("accumulation", text, evidence, line("gradient_accumulation_steps", 1, micros), "", 45.0)


def others_mfu(facts: RunFacts) -> Iterator[Mistake]:
    """nanoGPT's MFU, which is of an A100 on every card."""
    shown = nanogpts_mfu(facts)
    if shown is None or facts.card is None or AN_A100.search(facts.card.name):
        return
    peak = facts.card.peak_tflops(facts.dtype if facts.dtype in ("float16", "float32") else "bfloat16")
    if not peak:
        return
    share = shown * A100_FLOPS / (peak * 1e12)
    if not 0.01 < share <= 1.05:
        return
    text = _(
        "The MFU of {shown:.1%} is that of an A100: nanoGPT divides by 312 TFLOPS on every card. Of one "
        "{card}'s own {peak:.1f} TFLOPS it is {share:.0%}."
    ).format(shown=shown, card=facts.card.name, peak=peak, share=share)
    evidence = _("mfu {shown:.2%} in the log; 312 × {shown:.4f} / {peak:.1f} = {share:.2f}").format(
        shown=shown, peak=peak, share=share
    )
    yield Mistake("mfu-of-an-a100", text, evidence, "", "", 25.0)
