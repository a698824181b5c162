"""Known facts of a run, from its log and from the log's reader: tokens of a step, work per token, peak rate.

What the log prints comes first, for it is the run's own word; then the config and the options.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, GPT2Shape
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import Card
from onecard.language import _
from onecard.report.logs import NANOCHAT, NANOCHAT_2025, NANOGPT, Log
from onecard.report.steps import Steps


@dataclass(frozen=True)
class Known:
    """What the reader of the log adds to it; None is "see the log"."""

    max_iters: int | None = None
    tokens: int | None = None
    batch_size: int | None = None
    block_size: int | None = None
    gradient_accumulation_steps: int | None = None
    config: RunConfig | None = None
    card: Card | None = None


def setting_of(log: Log, known: Known, name: str) -> int | None:
    """A whole number from the log's head, else from the config; None where neither says it."""
    value = log.settings.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**15:
        return value
    return getattr(known.config, name) if known.config is not None else None


def tokens_per_step_of(log: Log, known: Known, steady: Steps, notes: list[str]) -> int | None:
    names = ("batch_size", "block_size", "gradient_accumulation_steps")
    given = [getattr(known, name) for name in names]
    if any(value is not None for value in given):
        filled = [
            value if value is not None else setting_of(log, known, name)
            for name, value in zip(names, given, strict=True)
        ]
        missing = [
            f"--{name.replace('_', '-')}" for name, value in zip(names, filled, strict=True) if not value
        ]
        if missing:
            raise UserError(
                _("the tokens of an iteration need all three of its factors"),
                "batch_size × gradient_accumulation_steps × block_size",
                _("add {options}").format(options=", ".join(missing)),
            )
        return math.prod(value for value in filled if value)
    speeds = [speed * ms / 1000 for speed, ms in zip(steady.speeds, steady.ms, strict=True) if speed]
    # onecard's figure is a moving average, compared with a step's own time: near, not exact.
    by_speed = statistics.median(speeds) if speeds and log.format in (NANOCHAT, NANOCHAT_2025) else None
    printed = log.tokens_per_step
    if printed and by_speed and printed > 1.5 * by_speed:
        notes.append(
            _(
                "the log's tok/sec is too small by {factor:.0f}, its accumulation steps: nanochat counted "
                "one micro-batch until 2025-10-26"
            ).format(factor=printed / by_speed)
        )
    if printed:
        return printed
    if known.config is not None:
        return known.config.tokens_per_step
    if all(name in log.settings for name in names):
        factors = [setting_of(log, known, name) for name in names]
        return math.prod(f for f in factors if f) if all(factors) else None
    if by_speed is None:
        return None
    if log.format == NANOCHAT_2025:
        notes.append(
            _(
                "tok/sec is taken as printed; before 2025-10-26 nanochat's was too small by the accumulation "
                "steps: --batch-size, --block-size and --gradient-accumulation-steps settle it"
            )
        )
    return max(1, round(by_speed / 1024) * 1024 if by_speed > 32_768 else round(by_speed))


def flops_per_token_of(log: Log, known: Known, notes: list[str]) -> float | None:
    if printed := log.facts.get("flops_per_token"):
        return float(printed)
    printed_count = log.facts.get("parameters")
    if known.config is not None:
        vocab = known.config.vocab_size or log.facts.get("vocab_size") or GPT2_PADDED_VOCABULARY
        shape = known.config.shape(vocab)
        count = shape.parameters - (shape.block_size * shape.n_embd if shape.arch == "gpt2" else 0)
        if not printed_count or abs(count / printed_count - 1) <= 0.02:
            return float(shape.flops_per_token)
        notes.append(
            _(
                "the config's model has {config:.2f}M parameters, the log's {log:.2f}M: it is another run's, "
                "its shape is not used, but its steps and evaluations are"
            ).format(config=count / 1e6, log=printed_count / 1e6)
        )
    shape = _printed_shape(log)
    if shape is None:
        return None
    count = shape.parameters - shape.block_size * shape.n_embd
    if printed_count and abs(count / printed_count - 1) > 0.02:
        return None  # the log does not print all of it: its own MFU has to do
    return float(shape.flops_per_token)


def _printed_shape(log: Log) -> GPT2Shape | None:
    """nanoGPT's model, where its head is in the log: what is not printed there is at its default."""
    if log.format != NANOGPT or not ("parameters" in log.facts or "n_embd" in log.settings):
        return None
    usual = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}
    sizes = {name: setting_of(log, Known(), name) or default for name, default in usual.items()}
    vocab = setting_of(log, Known(), "vocab_size") or log.facts.get("vocab_size") or GPT2_PADDED_VOCABULARY
    bias = log.settings.get("bias", False) is True
    if any(size > 2**24 for size in (*sizes.values(), vocab)):
        return None
    return GPT2Shape(
        sizes["n_layer"], sizes["n_head"], sizes["n_embd"], vocab, sizes["block_size"], bias
    )  # fmt: skip


def peak_of(log: Log, known: Known) -> float | None:
    if known.card is None:
        return None
    dtype = log.facts.get("dtype") or log.settings.get("dtype") or getattr(known.config, "dtype", None)
    tflops = known.card.peak_tflops(dtype if dtype in ("float16", "float32") else "bfloat16")
    return tflops * 1e12 if tflops else None
