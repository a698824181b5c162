"""The facts of a run, gathered from its log, its reader, its config and its folder."""

from __future__ import annotations

import math
import statistics

from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import Card, match_rates
from onecard.language import _
from onecard.report.gathering.datasets import dataset_named, train_tokens_of
from onecard.report.gathering.known import NANOCHAT_2025, NANOCHATS, NANOGPT, ONECARD, Known
from onecard.report.gathering.model import model_of
from onecard.report.gathering.run_folder import RunFolder
from onecard.report.gathering.schedules import schedule_of
from onecard.report.gathering.sources import Sources, Value, number, origin_of, switch, whole, word
from onecard.report.log import Log
from onecard.report.reading.formats import MODDED
from onecard.report.run_facts import RunFacts


def facts_of(log: Log, known: Known, folder: RunFolder | None = None) -> RunFacts:
    """All that is known of the run; what contradicts something else is in the notes."""
    log, config, origin, notes = _with_folder(log, known, folder)
    found = Sources(log, known, config, origin, notes=[*known.notes, *notes])
    batch_size, block_size = found.of("batch_size", whole), found.of("block_size", whole)
    micros = found.of("gradient_accumulation_steps", whole)
    cards = _cards(found)
    dataset = found.first("data", found.in_log("dataset", word), found.own("dataset"))
    model = model_of(found, dataset)
    tokens_per_step = _tokens_per_step(found, (batch_size, block_size, micros), cards)
    last_step = _last_step(found, tokens_per_step)
    schedule, schedule_origin = schedule_of(log, config, last_step, origin == "folder")
    if schedule is not None:
        found.origin["schedule"] = schedule_origin
    return RunFacts(
        log=log,
        config=config,
        shape=model.shape,
        parameters=model.parameters,
        parameters_without_embeddings=model.parameters_without_embeddings,
        vocab_size=model.vocab_size,
        tokenizer=model.tokenizer,
        flops_per_token=model.flops_per_token,
        tokens_per_step=tokens_per_step,
        batch_size=batch_size,
        block_size=block_size or (model.shape.block_size if model.shape else None),
        gradient_accumulation_steps=micros,
        cards=cards,
        data=dataset_named(dataset),
        train_tokens=train_tokens_of(found, dataset),
        eval_tokens=_eval_tokens(found, tokens_per_step, micros),
        eval_every=_eval_every(found),
        last_step=last_step,
        schedule=schedule,
        dropout=found.of("dropout", number),
        weight_decay=found.of("weight_decay", number),
        optimizer=_optimizer(found),
        dtype=_dtype(found),
        compiled=found.of("compile", switch),
        card=_card(found),
        folder=folder.path if folder is not None else "",
        origin=found.origin,
        notes=tuple(found.notes),
    )


def _with_folder(
    log: Log, known: Known, folder: RunFolder | None
) -> tuple[Log, RunConfig | None, str, list[str]]:
    """What a run's folder adds: its starts, its config, and messages on what in it is damaged."""
    if folder is None:
        return log, known.config, "config", []
    log = folder.since_last_start(log)
    if known.config is not None:
        return log, known.config, "config", []
    config, damage = folder.config(), folder.damage()
    log = folder.facts_for(log, config)
    return log, config, "folder", [text for text in (damage, folder.damaged_data(config)) if text]


# --- batch, horizon, evaluations ----------------------------------------------------------------

_FACTORS = ("batch_size", "block_size", "gradient_accumulation_steps")


def _cards(found: Sources) -> int:
    log = found.log
    mine, together = (whole(log.facts.get(name)) for name in ("tokens_of_one_card", "tokens_of_all_cards"))
    by_tokens = max(1, round(together / mine)) if mine and together else None
    # Its logs show all cards of the machine, and it uses them all.
    shown = whole(log.facts.get("cards_shown")) if log.format == MODDED else None
    stated = found.first(
        "cards", ("flag", found.known.cards), ("log", by_tokens), found.in_log("cards", whole), ("log", shown)
    )
    return stated or 1


def _tokens_per_step(found: Sources, factors: tuple[int | None, ...], cards: int) -> int | None:
    log, known = found.log, found.known
    if any(getattr(known, name) is not None for name in _FACTORS):
        missing = [
            f"--{n.replace('_', '-')}" for n, value in zip(_FACTORS, factors, strict=True) if not value
        ]
        if missing:
            raise UserError(
                _("the tokens of an iteration need all three of its factors"),
                "batch_size × gradient_accumulation_steps × block_size",
                _("add {options}").format(options=", ".join(missing)),
            )
        return found.first("tokens_per_step", ("flag", math.prod(value or 1 for value in factors)))
    where, printed = found.in_log("tokens_per_step", whole)
    counted = _by_columns(log)
    by_speed = speed_times_time(log) if log.format in NANOCHATS else None
    if printed and by_speed and printed > 1.5 * by_speed:
        found.notes.append(
            _(
                "the log's tok/sec is too small by {factor:.0f}, its accumulation steps: nanochat counted "
                "one micro-batch until 2025-10-26"
            ).format(factor=printed / by_speed)
        )
    by_config = found.config.tokens_per_step if found.config is not None else None
    printed = printed or counted
    if printed and by_config and printed != by_config and found.config_origin == "config":
        text = _("an iteration has {log:,} tokens by the log and {config:,} by the config: the log counts")
        found.notes.append(text.format(log=printed, config=by_config))
    in_log = [found.in_log(name, whole) for name in _FACTORS]
    together = math.prod(value or 1 for _where, value in in_log) if all(v for _w, v in in_log) else None
    # nanoGPT divides its accumulation among the cards: the product is of all of them.
    order = [(where, printed), (found.config_origin, by_config), (in_log[0][0], together)]
    if together and found.config is not None:
        order.sort(key=lambda source: source[1] is not together)
        order.sort(key=lambda source: source[1] is not printed)
    stated = found.first("tokens_per_step", *order)
    if stated or by_speed is None:
        return stated
    if log.format == NANOCHAT_2025:
        found.notes.append(
            _(
                "tok/sec is taken as printed; before 2025-10-26 nanochat's was too small by the accumulation "
                "steps: --batch-size, --block-size and --gradient-accumulation-steps settle it"
            )
        )
    rounded = max(1, round(by_speed / 1024) * 1024 if by_speed > 32_768 else round(by_speed))
    return found.first("tokens_per_step", ("log", rounded))


def speed_times_time(log: Log) -> float | None:
    """Tokens of a step, by those that its line shows: nanochat prints tokens a second of this very step."""
    steps = log.last.steps
    products = [
        speed * ms / 1000 for speed, ms in zip(steps.tokens_per_s, steps.ms, strict=True) if speed * ms > 0
    ]
    return statistics.median(products) if products else None


def _by_columns(log: Log) -> int | None:
    """Where tokens stand beside the steps."""
    for columns in (log.steps, log.evaluations, log.planned):
        seen = columns.pairs("tokens")
        if len(seen) < 2:
            continue
        (first, few), (last, many) = seen[0], seen[-1]
        if last > first and many > few and math.isfinite(many - few):
            return max(1, round((many - few) / (last - first)))
    return None


def _last_step(found: Sources, tokens_per_step: int | None) -> int | None:
    log, known = found.log, found.known
    by_tokens = None
    if known.tokens is not None:
        if tokens_per_step is None:
            raise UserError(
                _("a horizon in tokens needs the tokens of an iteration"),
                _("the log does not have them"),
                _("add --batch-size, --block-size and --gradient-accumulation-steps, or use --max-iters"),
            )
        by_tokens = -(-known.tokens // tokens_per_step)
    planned = int(log.planned.step[-1]) if len(log.planned) else None
    by_log = whole(log.facts.get("last_step"))
    stated = found.in_log("max_iters", whole)
    theirs = found.in_config("max_iters")
    if known.max_iters is None and found.config_origin == "config" and theirs[1]:
        found.compare("max_iters", by_log or stated[1], theirs[1])
    share = number(log.facts.get("progress"))
    by_share = _by_share(log, share) if share else None
    return found.first(
        "last_step", ("flag", known.max_iters), ("flag", by_tokens), ("log", by_log), stated,
        ("log", planned), ("log", by_share), theirs,
    )  # fmt: skip


def _by_share(log: Log, share: float) -> int | None:
    """nanochat's SFT prints how much of the run is done, not how long it is."""
    seen = log.last.steps
    if not len(seen) or not 0 < share <= 1 or not seen.step[-1]:
        return None
    return max(int(seen.step[-1]), round(seen.step[-1] / share))


def _eval_every(found: Sources) -> int | None:
    def read(value: Value) -> int | None:
        every = number(value)
        return None if every is None else max(0, int(every))  # -1 is nanochat's never

    return found.first(
        "eval_every", ("flag", found.known.eval_every), found.in_log("eval_interval", read),
        found.in_config("eval_interval"),
    )  # fmt: skip


def _eval_tokens(found: Sources, tokens_per_step: int | None, micros: int | None) -> int | None:
    """nanoGPT reads eval_iters micro-batches of each split, nanochat says tokens."""
    where, blocks = found.in_log("eval_iters", whole)
    if blocks is None:
        where, blocks = found.in_config("eval_iters")
    counted = round(blocks * tokens_per_step / micros) if blocks and tokens_per_step and micros else None
    return found.first(
        "eval_tokens", ("flag", found.known.eval_tokens), found.in_log("eval_tokens", whole), (where, counted)
    )


# --- how it computes ----------------------------------------------------------------------------


def _optimizer(found: Sources) -> str | None:
    by_config = None
    if found.config is not None:
        by_config = "muon" if found.config.by_muon else "adamw"
    by_format = "adamw" if found.log.format == NANOGPT else "muon" if found.log.format in NANOCHATS else None
    return found.first(
        "optimizer", found.in_log("optimizer", word), (found.config_origin, by_config), ("log", by_format)
    )


def _dtype(found: Sources) -> str | None:
    def read(value: Value) -> str | None:
        names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
        text = (word(value) or "").removeprefix("torch.")
        text = names.get(text, text)
        return text if text in ("bfloat16", "float16", "float32") else None

    return found.of("dtype", read)


def is_of_cpu(log: Log) -> bool:
    """As far as its head says."""
    return str(log.facts.get("device") or log.settings.get("device", "")).lower() == "cpu"


def card_of(log: Log, usual: Card | None) -> Card | None:
    """The card the log names, else the usual one."""
    if is_of_cpu(log):
        return None
    if "gpu" in log.facts or "gpu" in log.settings:
        return match_rates(str(log.facts.get("gpu") or log.settings.get("gpu")))
    if log.format == ONECARD and len(log.steps) and not log.steps.has("mfu"):
        return None  # it ran on a CPU, or on a card nobody knows
    return usual


def _card(found: Sources) -> Card | None:
    given = found.known.card
    by_log = card_of(found.log, None)
    return found.first(
        "card", ("flag", given), (origin_of(found.log, "gpu"), by_log),
        ("usual", card_of(found.log, found.known.usual_card) if given is None else None),
    )  # fmt: skip
