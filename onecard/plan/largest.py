"""What a card can carry at most: the largest model, the longest block, the best model for a time budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onecard.arch.layout import default_chunk
from onecard.arch.records import RECORDS
from onecard.arch.shapes import PRETRAINED
from onecard.config.files import COMMAND_LINE
from onecard.config.run import RunConfig
from onecard.plan.answer import Answer, comparable, for_vocabulary, training_of
from onecard.plan.cost import evaluation_seconds, evaluations_of, steps_within
from onecard.plan.lines import GIB
from onecard.plan.scaling import TOKENS_PER_PARAMETER, LossRange, best_for_tokens, counted_parameters
from onecard.plan.search import Choice, Question, fastest, settings

_MOST_LAYERS = 64
_LONGEST_BLOCK = 131_072
# Text that is read more often teaches hardly more; a larger model only learns it by heart.
MOST_PASSES = 8


def flags_of(choice: Choice) -> str:
    """What to put behind the words of the same question, so that they mean this model in this setting.

    Widths alone would not do: the heads of the config need not divide another width.
    """
    config, shape, setting = choice.question.config, choice.question.shape, choice.setting
    said = []
    if config.init_from in PRETRAINED:  # of another size it is no longer that model
        said += ["--init_from=scratch", f"--bias={config.bias}", f"--vocab_size={shape.vocab_size}"]
    if config.is_set("depth"):
        said.append(f"--depth={shape.n_layer}")
    if config.is_set("n_layer") or not config.is_set("depth"):
        said.append(f"--n_layer={shape.n_layer}")
    said += [f"--{name}={getattr(shape, name)}" for name in ("n_head", "n_embd", "block_size")]
    said.append(setting.words(config.sequences_per_step))
    if choice.last_micro_batch:
        said.append(f"--batch_size={config.batch_size}")
        said.append(f"--gradient_accumulation_steps={config.sequences_per_step // config.batch_size}")
    if config.is_set("total_batch_size"):
        said.append(f"--total_batch_size={config.sequences_per_step * shape.block_size}")
    if setting.loss_chunk != (config.loss_chunk or default_chunk(shape.vocab_size)):
        said.append(f"--loss_chunk={setting.loss_chunk}")
    return " ".join(filter(None, said))


@dataclass(frozen=True)
class Size:
    """The largest of its kind that fits, and how fast it would be."""

    kind: str  # "exact" or "low-bit"
    choice: Choice

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **_to_json(self.choice, flags_of(self.choice))}


@dataclass(frozen=True)
class Candidate:
    choice: Choice  # of a run as long as the time allows
    tokens: float
    loss: LossRange
    not_distinguishable: bool

    @property
    def evaluation_s(self) -> float:
        """What of the time goes to evaluations."""
        config, step = self.choice.question.config, self.choice.step
        return evaluations_of(config) * evaluation_seconds(config, step) if step else 0.0

    @property
    def flags(self) -> str:
        """The flags with the horizon: in tokens, which the schedule follows, unless steps were asked for."""
        config = self.choice.question.config
        steps = config.origins.get("max_iters") == COMMAND_LINE
        horizon = f"--max_iters={config.max_iters}" if steps else f"--tokens={round(self.tokens)}"
        return f"{flags_of(self.choice)} {horizon}"

    def to_json(self) -> dict[str, Any]:
        return {
            **_to_json(self.choice, self.flags),
            "tokens": round(self.tokens),
            "evaluation_s": round(self.evaluation_s, 1),
            "loss": [round(x, 3) for x in (self.loss.low, self.loss.middle, self.loss.high)],
            "loss_unit": self.loss.unit,
            "basis": self.loss.basis,
            "not_distinguishable": self.not_distinguishable,
        }


def _to_json(choice: Choice, flags: str) -> dict[str, Any]:
    shape = choice.question.shape
    return {
        "parameters": shape.parameters,
        **{name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd", "block_size")},
        "settings": choice.setting.to_json(),
        "flags": flags,
        "total_gib": round(choice.bill.process / GIB, 3),
        "host_gib": round(choice.host_bytes / GIB, 3),
        "tokens_per_s": round(choice.tokens_per_s, 1) if choice.step else None,
    }


@dataclass(frozen=True)
class Largest:
    """What one card can carry at most, and the best of it for a time."""

    largest: list[Size]
    longest: list[Size]
    candidates: list[Candidate]
    seconds: float
    text_limit: int | None  # parameters that the text is enough for, where it and not the card is the limit

    def to_json(self, host: dict[str, Any]) -> dict[str, Any]:
        return {
            "largest": [size.to_json() for size in self.largest],
            "longest": [size.to_json() for size in self.longest],
            "best": {
                "seconds": round(self.seconds),
                "models": [candidate.to_json() for candidate in self.candidates],
            },
            "host": host,
            **({"text_limit": self.text_limit} if self.text_limit is not None else {}),
        }


def find_largest(answer: Answer, seconds: float) -> Largest:
    largest, limit = largest_models(answer), enough_text_for(answer.data_tokens)
    # The next larger depth is what the card would take, and the text is not enough for.
    by_text = bool(largest) and limit is not None and all(_next_parameters(size) > limit for size in largest)
    best = best_for_time(answer, seconds, answer.data_tokens)
    return Largest(largest, longest_blocks(answer), best, seconds, limit if by_text else None)


def enough_text_for(unique_tokens: float | None) -> int | None:
    """Parameters that this much text is enough for, read MOST_PASSES times; None where it is not there."""
    return None if unique_tokens is None else int(MOST_PASSES * unique_tokens / TOKENS_PER_PARAMETER)


def _next_parameters(size: Size) -> int:
    question = size.choice.question
    return counted_parameters(_with(question, of_depth(question.config, question.shape.n_layer + 1)).shape)


def _enough_text(question: Question, depths: range, limit: int | None) -> list[int]:
    """Depths of models that the text is enough for, the smallest in any case."""
    if limit is None:
        return list(depths)
    counted = {d: counted_parameters(_with(question, of_depth(question.config, d)).shape) for d in depths}
    return [depth for depth in depths if counted[depth] <= limit or depth == depths[0]]


def of_depth(config: RunConfig, depth: int) -> RunConfig:
    """The config at another depth: 64 wide per layer, as nanochat's dial has it."""
    # Heads of 64 (GPT-2) or 128 channels; a width that both divide.
    width = max(128, -(-64 * depth // 128) * 128)
    heads = width // (64 if config.arch == "gpt2" else 128)
    return dataclasses.replace(config, depth=None, n_layer=depth, n_embd=width, n_head=heads)


def _with(question: Question, config: RunConfig) -> Question:
    shape = config.shape(question.shape.vocab_size)
    return dataclasses.replace(question, config=config, shape=shape)


def _best(question: Question, *, low_bit: bool) -> Choice | None:
    return fastest(question.answer(s) for s in settings(question.config, question.shape, low_bit=low_bit))


def _last_that_fits(sizes: list[int], make: Callable[[int], Question], *, low_bit: bool) -> Choice | None:
    """The largest that fits, found by halving: memory grows with size."""
    found, low, high = None, 0, len(sizes) - 1
    while low <= high:
        middle = (low + high) // 2
        choice = _best(make(sizes[middle]), low_bit=low_bit)
        if choice is None:
            high = middle - 1
        else:
            found, low = choice, middle + 1
    return found


def largest_models(answer: Answer) -> list[Size]:
    question = answer.question
    depths = _enough_text(question, range(2, _MOST_LAYERS + 1), enough_text_for(answer.data_tokens))
    found = []
    for kind in ("exact", "low-bit"):
        choice = _last_that_fits(
            depths, lambda n: _with(question, of_depth(question.config, n)), low_bit=kind == "low-bit"
        )
        if choice is not None:
            found.append(Size(kind_of(choice), choice))
    return _without_repeats(found)


def kind_of(choice: Choice) -> str:
    """Exact or low-bit by what a choice is, not by what was looked for: bits may be the user's own choice."""
    return "exact" if choice.setting.exact else "low-bit"


def _without_repeats(sizes: list[Size]) -> list[Size]:
    """One size where both searches find the same, because the user has decided about bits."""
    return sizes[:1] if len({size.kind for size in sizes}) == 1 else sizes


def longest_blocks(answer: Answer) -> list[Size]:
    """The longest blocks of the config's own model; tokens per step stay, so sequences get fewer."""
    question, config = answer.question, answer.config
    # Those of which a step is a whole number.
    divisors = [n for n in range(1, _LONGEST_BLOCK + 1) if config.tokens_per_step % n == 0]
    lengths = [n for n in divisors if (n % 8 == 0 and n >= 128) or n == config.block_size > 1]

    def with_block(block: int) -> Question:
        sequences = config.tokens_per_step // block
        changed = dataclasses.replace(
            config, block_size=block, batch_size=1, gradient_accumulation_steps=sequences,
            total_batch_size=None,
        )  # fmt: skip
        return _with(question, changed)

    found = []
    for kind in ("exact", "low-bit"):
        choice = _last_that_fits(lengths, with_block, low_bit=kind == "low-bit") if lengths else None
        if choice is not None:
            found.append(Size(kind_of(choice), choice))
    return _without_repeats(found)


def best_for_time(answer: Answer, seconds: float, unique_tokens: float | None = None) -> list[Candidate]:
    """Models of the config's family, each trained for as long, by the loss they are expected to reach."""
    question = answer.question
    if question.rates is None or not comparable(question.shape.vocab_size):
        return []
    if answer.text is not None and not answer.text.is_web:
        return []
    by_size: dict[int, tuple[Choice, float]] = {}
    for depth in _enough_text(question, range(4, 33, 2), enough_text_for(unique_tokens)):
        choice = _best(_with(question, of_depth(question.config, depth)), low_bit=False)
        choice = choice or _best(_with(question, of_depth(question.config, depth)), low_bit=True)
        if choice is not None and choice.step is not None:
            choice = _as_long_as(choice, seconds, MOST_PASSES * unique_tokens if unique_tokens else math.inf)
            tokens = choice.question.config.max_iters * choice.question.config.tokens_per_step
            by_size[counted_parameters(choice.question.shape)] = (choice, tokens)
    if not by_size:
        return []
    family = RECORDS[question.shape.arch].family
    options = [(parameters, tokens) for parameters, (_, tokens) in by_size.items() if tokens >= 1]
    ranked = best_for_tokens(options, family, unique_tokens=unique_tokens)
    vocabulary = question.shape.vocab_size
    return [
        Candidate(
            by_size[r.parameters][0], r.tokens, for_vocabulary(r.loss, vocabulary), r.not_distinguishable
        )
        for r in ranked[:5]
    ]


def _as_long_as(choice: Choice, seconds: float, most_tokens: float) -> Choice:
    """The choice with as many steps as time is enough for, its evaluations and checkpoints counted, and the
    text."""
    question = choice.question
    most = max(1.0, most_tokens / question.config.tokens_per_step)
    steps = int(min(steps_within(seconds, training_of(choice)), most))
    config = dataclasses.replace(question.config, max_iters=steps)
    return dataclasses.replace(question, config=config).answer(choice.setting)
