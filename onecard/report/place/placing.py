"""Where a run's loss stands among published ones: ahead of a usual run of its size and length, on the
trend, or behind it, and as how long a usual run it counts.

Losses in nats a token compare only where tokens and text are the same; across tokenizers there are bits per
byte of the same text alone. What nobody says is assumed and named, or the comparison is refused with the
reason.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, GPT2_VOCABULARY, Nanochat2026Shape
from onecard.language import _, joined
from onecard.plan.amounts import count
from onecard.plan.references import Reference, all_references
from onecard.plan.scaling import (
    BYTES_PER_TOKEN,
    NOTHING_LEARNED,
    STILL_HIGH,
    counted_parameters,
    effective_tokens,
    in_bits_per_byte,
    predicted_loss,
)
from onecard.report.curve.phase import share_of_peak
from onecard.report.findings import Place
from onecard.report.place.yardsticks import Expected, ended_runs, expected_loss
from onecard.report.run_facts import RunFacts

# Text of the web, whose losses are near each other: published runs differ by so much between these.
WEB = ("FineWeb", "FineWeb-Edu", "OpenWebText", "C4", "SlimPajama", "ClimbMix", "Pile")
ASSUMED = "FineWeb"
_OTHER_WEB_TEXT = 0.25
_SAME_NAMES = {
    "openwebtext": "OpenWebText", "owt": "OpenWebText", "fineweb": "FineWeb", "fineweb10b": "FineWeb",
    "fineweb-edu": "FineWeb-Edu", "fineweb_edu": "FineWeb-Edu", "edu_fineweb10b": "FineWeb-Edu", "c4": "C4",
    "slimpajama": "SlimPajama", "climbmix": "ClimbMix", "pile": "Pile", "tinystories": "TinyStories",
    "tinyshakespeare": "tinyshakespeare", "shakespeare_char": "tinyshakespeare",
}  # fmt: skip
_OF_NANOCHAT = {"nanochat-32k": "ClimbMix", "nanochat-65k": "FineWeb-Edu"}
_CHARACTERS = ("char", "byte")
_HIGH = 0.2  # of the peak: a rate above it has most of its decay still to come
_A_LITTLE_TEXT = (
    0.15  # error in nats per decade of size, where a text's runs do not say after how many tokens
)


@dataclass(frozen=True)
class _Measured:
    """What is compared."""

    loss: float
    step: int
    tokens: int | None
    unit: str  # nats or bpb
    of_training: bool
    rate: float | None  # over its peak


def place_of(facts: RunFacts) -> Place:
    measured = _measured(facts)
    if measured is None:
        return Place("", cannot=_("the log has no loss that is a number"))
    if facts.parameters is None:
        return Place("", cannot=_("how many parameters the model has is not known: n_layer, n_embd"))
    tokenizer, assumed = _tokenizer(facts)
    if tokenizer is None:
        why = _(
            "nobody says which tokenizer the losses count in, and nats a token compare only where it is "
            "the same"
        )
        return Place("", cannot=why)
    data = _SAME_NAMES.get((facts.data or "").lower(), facts.data)
    if data is None and tokenizer in _OF_NANOCHAT and measured.unit == "bpb":
        data = _OF_NANOCHAT[tokenizer]
        assumed += [_("the text is taken for {data}, nanochat's own").format(data=data)]
    if tokenizer in _CHARACTERS:
        return _of_characters(facts, measured, data)
    if measured.unit == "bpb":
        return _in_bits(facts, measured, data, assumed)
    return _in_nats(facts, measured, tokenizer, data, assumed)


def _measured(facts: RunFacts) -> _Measured | None:
    """The last validation loss, in bits per byte where the log has them; else the last of training."""
    evaluations = facts.log.evaluations
    for name, unit in (("bpb", "bpb"), ("val", "nats")):
        pairs = evaluations.pairs(name)
        if pairs and math.isfinite(pairs[-1][1]) and not (name == "bpb" and _in_gpt2s_nats(facts)):
            step, loss = pairs[-1]
            return _Measured(loss, step, _tokens_at(facts, step), unit, False, share_of_peak(facts, step))
    for pairs in (evaluations.pairs("train"), facts.log.steps.pairs("loss")):
        if pairs and math.isfinite(pairs[-1][1]):
            last = pairs[-max(1, len(pairs) // 50) :]
            loss, step = sum(loss for _step, loss in last) / len(last), pairs[-1][0]
            if math.isfinite(loss):
                return _Measured(
                    loss, step, _tokens_at(facts, step), "nats", True, share_of_peak(facts, step)
                )
    return None


def _in_gpt2s_nats(facts: RunFacts) -> bool:
    """Of these more is published than of bits per byte."""
    return facts.tokenizer == "gpt2" and facts.log.evaluations.has("val")


def _tokens_at(facts: RunFacts, step: int) -> int | None:
    for columns in (facts.log.evaluations, facts.log.steps):
        for at, tokens in reversed(columns.pairs("tokens")):
            if at == step:
                return int(tokens)
    return step * facts.tokens_per_step if facts.tokens_per_step else None


def _tokenizer(facts: RunFacts) -> tuple[str | None, list[str]]:
    """Which, and what is assumed: a vocabulary of GPT-2's size, or a first loss of its logarithm."""
    if facts.tokenizer is not None:
        return facts.tokenizer, []
    if facts.vocab_size is not None:
        if GPT2_VOCABULARY <= facts.vocab_size <= GPT2_PADDED_VOCABULARY:
            text = _("the tokens are taken for GPT-2's, by the vocabulary of {n:,}")
            return "gpt2", [text.format(n=facts.vocab_size)]
        return ("char", []) if facts.vocab_size <= 512 else (None, [])
    first = [
        loss for name in ("val", "train") for step, loss in facts.log.evaluations.pairs(name)[:1] if step == 0
    ] + [loss for step, loss in facts.log.steps.pairs("loss")[:1] if step <= 1]
    if first and 10.6 <= first[0] <= 11.2:
        text = _("the tokens are taken for GPT-2's: the first loss is {loss:.2f}, and ln {n:,} is {ln:.2f}")
        values = {"loss": first[0], "n": GPT2_VOCABULARY, "ln": NOTHING_LEARNED}
        return "gpt2", [text.format(**values)]
    return None, []


# --- nats a token --------------------------------------------------------------------------------------


def _in_nats(
    facts: RunFacts, measured: _Measured, tokenizer: str, data: str | None, assumed: list[str]
) -> Place:
    assert facts.parameters is not None
    # Value embeddings are not what a usual model has its parameters in.
    parameters = counted_parameters(facts.shape) if facts.shape is not None else facts.parameters
    if measured.tokens is None or measured.tokens <= 0:
        if not (data and ended_runs(data, tokenizer)):
            return Place(
                "", cannot=_("how many tokens the run has seen is not known: batch, accumulation, block")
            )
        return _by_size_alone(facts, measured, data, tokenizer)
    tokens = measured.tokens
    if facts.train_tokens and tokens > facts.train_tokens:
        tokens = round(effective_tokens(tokens, facts.train_tokens))
        text = _("{seen} tokens of {there} are counted as {worth} fresh ones")
        assumed = [
            *assumed,
            text.format(seen=count(measured.tokens), there=count(facts.train_tokens), worth=count(tokens)),
        ]
    if tokens < 1e7:
        return Place(
            "", cannot=_("after {n} tokens no published run says what is usual").format(n=count(tokens))
        )
    found = expected_loss(data, tokenizer, parameters, tokens) if data is not None else None
    if found is None and data is not None and ended_runs(data, tokenizer):
        return _by_size_alone(facts, measured, data, tokenizer)
    if found is None:
        if tokenizer != "gpt2" or not (data is None or data in WEB):
            text = _("no published run has {data} in tokens of {tokenizer}")
            return Place("", cannot=text.format(data=data or _("this text"), tokenizer=tokenizer))
        found = expected_loss(ASSUMED, "gpt2", parameters, tokens)
        assert found is not None
        found = dataclasses.replace(found, low=found.low - _OTHER_WEB_TEXT, high=found.high + _OTHER_WEB_TEXT)
        text = _(
            "nobody says which text it is: taken for {assumed}, and the range is wider by {n:.2f} for that"
        )
        if data is not None:
            text = _("no run in these tokens is published for {data}: compared with {assumed}, {n:.2f} wider")
        assumed = [*assumed, text.format(data=data, assumed=ASSUMED, n=_OTHER_WEB_TEXT)]
    allowed, phase = _phase(measured, STILL_HIGH)
    low, high = found.low, found.high + (STILL_HIGH if measured.rate is None else 0.0)
    standing = _standing(measured.loss - allowed, low, high)
    equals = found.tokens_for(measured.loss - allowed, parameters, tokens)
    texts = [
        _compared(parameters, measured, tokens, (found.loss, low, high), standing, allowed),
        *_length(parameters, tokens, equals),
        *phase,
        *assumed,
    ]
    return Place(
        joined([_sentence(text) for text in texts], " "), _shown(found), found.loss, low, high, found.bridges,
        standing=standing, equals_tokens=equals,
    )  # fmt: skip


def _compared(
    parameters: int, measured: _Measured, tokens: int, usual: tuple[float, float, float], standing: str,
    allowed: float,
) -> str:  # fmt: skip
    text = {
        "ahead": _("{what} {loss:.3f} after {tokens} tokens is ahead of the trend: a usual {size} ends at "
                   "{usual:.2f} there ({low:.2f} to {high:.2f}), {by:.2f} more"),
        "on": _("{what} {loss:.3f} after {tokens} tokens is on the trend: a usual {size} ends at {usual:.2f} "
                "there ({low:.2f} to {high:.2f})"),
        "behind": _("{what} {loss:.3f} after {tokens} tokens is behind the trend: a usual {size} ends at "
                    "{usual:.2f} there ({low:.2f} to {high:.2f}), {by:.2f} less"),
    }[standing]  # fmt: skip
    return text.format(
        what=_("training loss") if measured.of_training else _("val loss"), loss=measured.loss,
        tokens=count(tokens), size=count(parameters), usual=usual[0], low=usual[1], high=usual[2],
        by=abs(measured.loss - allowed - usual[0]),
    )  # fmt: skip


def _length(parameters: int, tokens: int, equals: float | None) -> list[str]:
    """How long a usual run it counts as, where that is another length."""
    if equals is None or tokens / 1.15 < equals < tokens * 1.15:
        return []
    text = _("that is where a usual {size} ends after {tokens} tokens")
    return [text.format(size=count(parameters), tokens=count(equals))]


def _phase(measured: _Measured, still_high: float) -> tuple[float, list[str]]:
    """What a rate that is still high adds to the loss, and a sentence about it."""
    if measured.rate is None:
        text = _(
            "nobody says how high the learning rate was: up to {n:.2f} of the loss may go with its decay"
        )
        return 0.0, [text.format(n=still_high)]
    added = still_high * measured.rate
    if measured.rate < _HIGH:
        return added, []
    text = _(
        "its learning rate is still at {share:.0%} of its peak: a run that ends here has come down, and is "
        "some "
        "{n:.2f} lower, which is allowed for"
    )
    return added, [text.format(share=measured.rate, n=added)]


def _standing(loss: float, low: float, high: float) -> str:
    if loss < low:
        return "ahead"
    return "behind" if loss > high else "on"


def _shown(found: Expected) -> tuple[tuple[str, float, float | None, float, str], ...]:
    return tuple(_row(row) for row in found.rows)


def _row(row: Reference) -> tuple[str, float, float | None, float, str]:
    tokens = row.tokens / 1e9 if row.tokens is not None else None
    return f"{row.model}, {row.data}", row.parameters / 1e6, tokens, row.loss, row.source


def _sentence(text: str) -> str:
    return joined([text[:1].upper(), text[1:], "" if text.endswith(".") else "."], "")


# --- where a length is not said, or does not matter --------------------------------------------------------


def _by_size_alone(facts: RunFacts, measured: _Measured, data: str, tokenizer: str) -> Place:
    """Compared with runs that ended after a number of tokens nobody says."""
    assert facts.parameters is not None
    rows = sorted(ended_runs(data, tokenizer), key=lambda row: row.parameters)
    x, points = math.log10(facts.parameters), [(math.log10(row.parameters), row.loss) for row in rows]
    after = min(max(sum(size < x for size, _loss in points), 1), len(points) - 1)
    (x0, loss0), (x1, loss1) = points[max(after - 1, 0)], points[after]
    share = min(max((x - x0) / (x1 - x0), 0.0), 1.0) if x1 > x0 else 0.0
    usual, away = loss0 + share * (loss1 - loss0), min(abs(x - size) for size, _loss in points)
    error = 0.05 + _A_LITTLE_TEXT * away
    if away > 0.7:
        text = _("published runs on {data} have {sizes} parameters, this one {size}: too far away")
        sizes = joined([count(row.parameters) for row in rows])
        return Place("", cannot=text.format(data=data, sizes=sizes, size=count(facts.parameters)))
    standing = _standing(measured.loss, usual - error, usual + error)
    text = _(
        "val loss {loss:.3f}, compared with {usual:.2f} ± {error:.2f}, where published runs on {data} of "
        "about {size} "
        "ended; after how many tokens their sources do not say"
    )
    if tokenizer in _CHARACTERS:
        text = _(
            "val loss {loss:.3f} per character, compared with {usual:.2f} ± {error:.2f}, where nanoGPT's "
            "own run on {data} "
            "ends; losses per character compare with no losses per token"
        )
    said = text.format(loss=measured.loss, usual=usual, error=error, data=data, size=count(facts.parameters))
    return Place(
        _sentence(said), tuple(map(_row, rows)), usual, usual - error, usual + error, standing=standing
    )


def _of_characters(facts: RunFacts, measured: _Measured, data: str | None) -> Place:
    if data is not None and ended_runs(data, "char") and facts.tokenizer != "byte":
        return _by_size_alone(facts, measured, data, "char")
    cannot = _(
        "the losses are per character or byte, published ones per token: they cannot be compared. nanoGPT's "
        "Shakespeare ends at {loss:.2f} per character, on that text alone"
    )
    (row,) = ended_runs("tinyshakespeare", "char")
    return Place("", cannot=cannot.format(loss=row.loss))


# --- bits per byte -----------------------------------------------------------------------------------------


def _counted(row: Reference) -> int:
    """A nanochat of this depth as the law counts it: without value embeddings."""
    depth = re.search(r"nanochat d(\d+)", row.model)
    assert depth is not None, row.model
    return counted_parameters(Nanochat2026Shape.of_depth(int(depth[1]), 32768, 2048))


def _in_bits(facts: RunFacts, measured: _Measured, data: str | None, assumed: list[str]) -> Place:
    """Across tokenizers. nanochat's law is GPT-2's with tokens that are worth more (plan/scaling.py)."""
    if measured.tokens is None or measured.tokens < 1e7:
        return Place(
            "", cannot=_("how many tokens the run has seen is not known: batch, accumulation, block")
        )
    assert facts.parameters is not None
    parameters = counted_parameters(facts.shape) if facts.shape is not None else facts.parameters
    family = "gpt2" if facts.shape is not None and facts.shape.arch == "gpt2" else "nanochat"
    usual = in_bits_per_byte(predicted_loss(parameters, measured.tokens, family=family))
    rows = [row for row in all_references() if row.unit == "bpb" and row.data == data and row.tokens]
    middle, low, high = usual.middle, usual.low, usual.high
    if rows:
        # What the text is easier or harder by than FineWeb, at the published run nearest in length.
        tokens = measured.tokens
        row = min(rows, key=lambda row: abs(math.log((row.tokens or 1.0) / tokens)))
        there = in_bits_per_byte(predicted_loss(_counted(row), row.tokens or 1.0, family="nanochat"))
        easier = row.loss - there.middle
        middle, low, high = middle + easier, low + easier, high + easier
        text = _(
            "bridge: {model} has {loss:.3f} on {data}, {n:+.3f} from what the law for FineWeb says of it"
        )
        bridges = (text.format(model=row.model, loss=row.loss, data=data, n=easier),)
    elif data in (None, "FineWeb"):
        bridges = (_("bridge: {basis}").format(basis=usual.basis),)
    else:
        return Place("", cannot=_("no published run has bits per byte of {data}").format(data=data))
    allowed, phase = _phase(measured, STILL_HIGH / (math.log(2) * sum(BYTES_PER_TOKEN) / 2))
    standing = _standing(measured.loss - allowed, low, high)
    text = {
        "ahead": _("{loss:.3f} bits per byte after {tokens} tokens is ahead of the trend: {low:.2f} to "
                   "{high:.2f} is usual for {size} parameters on {data}"),
        "on": _("{loss:.3f} bits per byte after {tokens} tokens is on the trend: {low:.2f} to {high:.2f} is "
                "usual for {size} parameters on {data}"),
        "behind": _("{loss:.3f} bits per byte after {tokens} tokens is behind the trend: {low:.2f} to "
                    "{high:.2f} is usual for {size} parameters on {data}"),
    }[standing].format(
        loss=measured.loss, tokens=count(measured.tokens), low=low, high=high, size=count(parameters),
        data=data or ASSUMED,
    )  # fmt: skip
    texts = [text, *phase, *assumed]
    shown = tuple(map(_row, rows))
    return Place(
        joined([_sentence(text) for text in texts], " "), shown, middle, low, high, bridges,
        standing=standing, unit="bpb",
    )  # fmt: skip
