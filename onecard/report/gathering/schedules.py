"""The learning rate's schedule: of a config, of settings, of the rates in a log, or a trainer's default."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onecard.arch import dial
from onecard.config.run import RunConfig
from onecard.report.gathering.known import HUGGINGFACE, NANOCHAT, NANOCHAT_2025, NANOGPT, ONECARD
from onecard.report.gathering.sources import number, origin_of, said, switch, whole, word
from onecard.report.log import Log
from onecard.report.run_facts import Schedule

NANOGPT_DEFAULTS = {"learning_rate": 6e-4, "min_lr": 6e-5, "warmup_iters": 2000, "lr_decay_iters": 600_000}
_MOST_ROWS = 2000  # of a table; what lies between two is straight
_MOST_FITTED = 200  # that a shape is held against: a log has a rate of every step
_SAME = 1e-3  # rates are printed with three digits or more
_FITS = 0.01  # of the highest rate: what a recognised shape may be off
# Rates that fall by less have not begun to show along which curve.
_LEAST_FALL = 0.05


def schedule_of(
    log: Log, config: RunConfig | None, last_step: int | None, from_folder: bool
) -> tuple[Schedule | None, str]:
    """The schedule, and where it is from."""
    if log.planned.has("lr"):
        return _table(_rates(log)), "log"
    if config is not None and (from_folder or _says(config)):
        return of_config(config), "folder" if from_folder else "config"
    stated, origin = _of_settings(log, last_step)
    if stated is not None and not stated.assumed:
        return stated, origin
    if (seen := recognised(_rates(log), last_step)) is not None:
        return seen, "log"
    if stated is not None:
        return stated, origin
    return _usual(log, last_step), "trainer"


def _says(config: RunConfig) -> bool:
    """Is it a run's config, rather than three sizes somebody wrote down?"""
    names = ("learning_rate", "max_iters", "lr_decay_iters", "warmup_iters", "tokens", "depth")
    return any(config.is_set(name) for name in names)


def of_config(config: RunConfig) -> Schedule:
    """As nanoGPT, nanochat and onecard all follow it."""
    if config.arch != "gpt2":
        peak, ratio = config.muon_lr, config.warmdown_ratio
        if not config.decay_lr or not ratio:
            return Schedule("constant", peak, peak, config.warmup_iters)
        down = round(ratio * config.max_iters)
        final = peak * (config.final_lr_frac or 0.0)
        return Schedule(
            "wsd", peak, final, config.warmup_iters, config.max_iters, decay_start=config.max_iters - down
        )
    if not config.decay_lr:
        return Schedule("constant", config.learning_rate, config.learning_rate)
    return Schedule("cosine", config.learning_rate, config.min_lr, config.warmup_iters, config.lr_decay_iters)


# --- what a log's head or its prose says --------------------------------------------------------


def _of_settings(log: Log, last_step: int | None) -> tuple[Schedule | None, str]:
    """By the knobs that the log shows. Of a head that its trainer printed, what is not there is at its
    default; of prose it may be anything."""
    names = ("learning_rate", "min_lr", "warmup_iters", "lr_decay_iters", "decay_lr", "lr_scheduler_type",
             "warmdown_ratio", "final_lr_frac", "matrix_lr", "cooldown_frac", "warmdown_iters")  # fmt: skip
    found = {name: entry for name in names if (entry := said(log, name)) is not None}
    if not found:
        return None, ""
    origins = {origin_of(log, entry[0]) for entry in found.values()}
    origin = next(where for where in ("log", "command", "prose") if where in origins)
    values = {name: entry[1] for name, entry in found.items()}
    if log.format in (NANOCHAT, NANOCHAT_2025):
        return _trapezoid(log.format, values, last_step, assumed=origin == "prose"), origin
    if log.format == HUGGINGFACE or {"lr_scheduler_type", "final_lr_frac"} & values.keys():
        usual = "linear" if log.format == HUGGINGFACE else "cosine"
        return _of_trainer(values, last_step, usual), origin
    if last_step and ({"cooldown_frac", "warmdown_iters"} & values.keys()):
        return _cooled(values, last_step), origin
    complete = log.format in (NANOGPT, ONECARD) and origin != "prose"
    if not complete and "learning_rate" not in values:
        return None, ""
    return _cosine(values, last_step, complete), origin


def _cosine(values: Mapping[str, Any], last_step: int | None, complete: bool) -> Schedule:
    """nanoGPT's. `complete`: what is not said is at its default, for certain."""
    peak = number(values.get("learning_rate"))
    if peak is None:
        peak = NANOGPT_DEFAULTS["learning_rate"]
    if switch(values.get("decay_lr")) is False:
        return Schedule("constant", peak, peak)
    final = number(values.get("min_lr"))
    if final is None:
        final = NANOGPT_DEFAULTS["min_lr"] if complete else peak / 10
    warmup, horizon = whole(values.get("warmup_iters")), whole(values.get("lr_decay_iters"))
    unsaid = warmup is None or horizon is None
    if horizon is None and not complete and last_step is None and "learning_rate" in values:
        return Schedule("unknown", peak, number(values.get("min_lr")), warmup or 0, None, assumed=True)
    if horizon is None:
        horizon = int(NANOGPT_DEFAULTS["lr_decay_iters"])
        if not complete and last_step:
            horizon = last_step
    if warmup is None:
        warmup = int(NANOGPT_DEFAULTS["warmup_iters"])
        if number(values.get("warmup_iters")) == 0:
            warmup = 0
        elif not complete:
            warmup = min(warmup, horizon // 20)
    return Schedule("cosine", peak, final, warmup, horizon, assumed=unsaid and not complete)


def _of_trainer(values: Mapping[str, Any], last_step: int | None, usual: str) -> Schedule | None:
    """As the Hugging Face Trainer and llm.c name them; `usual` where they do not."""
    said_kind = word(values.get("lr_scheduler_type"))
    kind = next(
        (name for name in ("cosine", "linear", "constant") if name in (said_kind or usual).lower()), ""
    )
    peak, warmup = number(values.get("learning_rate")), whole(values.get("warmup_iters")) or 0
    if kind == "constant":
        return Schedule(kind, peak, peak, warmup)
    if not kind or last_step is None:
        return None
    final = (peak or 0.0) * (number(values.get("final_lr_frac")) or 0.0)
    return Schedule(kind, peak, final, warmup, last_step, assumed=said_kind is None)


def _trapezoid(
    format_: str, values: Mapping[str, Any], last_step: int | None, *, assumed: bool
) -> Schedule | None:
    """nanochat's: a share of the run in which the rate falls in a straight line. Rates are its multiplier."""
    if last_step is None:
        return None
    usual = dial.GENERATIONS[2025 if format_ == NANOCHAT_2025 else 2026]
    ratio, final = number(values.get("warmdown_ratio")), number(values.get("final_lr_frac"))
    warmup = whole(values.get("warmup_iters"))
    ratio = usual.warmdown_ratio if ratio is None else ratio
    final = usual.final_lr_frac if final is None else final
    return Schedule(
        "wsd", 1.0, final, usual.warmup_iters if warmup is None else warmup, last_step,
        decay_start=last_step - round(ratio * last_step), assumed=assumed,
    )  # fmt: skip


def _cooled(values: Mapping[str, Any], last_step: int) -> Schedule:
    """modded-nanogpt's: constant, and down to nothing in the last steps. Rates are its multiplier."""
    steps = whole(values.get("warmdown_iters"))
    if steps is None:
        steps = round((number(values.get("cooldown_frac")) or 0.0) * last_step)
    return Schedule("wsd", 1.0, 0.0, 0, last_step, decay_start=max(0, last_step - steps))


def _usual(log: Log, last_step: int | None) -> Schedule | None:
    """The trainer's default, where nobody says anything."""
    if log.format == NANOGPT:
        return _cosine({}, last_step, complete=False)
    if log.format in (NANOCHAT, NANOCHAT_2025):
        return _trapezoid(log.format, {}, last_step, assumed=True)
    if log.format == HUGGINGFACE:
        return _of_trainer({}, last_step, "linear")
    return None


# --- the rates a log shows ----------------------------------------------------------------------


def _rates(log: Log) -> list[tuple[int, float]]:
    """(step, rate), in order, those to come among them."""
    found: dict[int, float] = {}
    for columns in (log.evaluations, log.steps, log.planned):
        found.update((step, rate) for step, rate in columns.pairs("lr") if math.isfinite(rate) and rate >= 0)
    return sorted(found.items())


def _table(rows: Sequence[tuple[int, float]]) -> Schedule:
    every = -(-len(rows) // _MOST_ROWS)
    kept = [*rows[::every], rows[-1]] if (len(rows) - 1) % every else list(rows[::every])
    peak = max(rate for _step, rate in rows)
    return Schedule(
        "table", peak, rows[-1][1], _warmup(rows, peak), rows[-1][0], table=tuple(kept)
    )  # fmt: skip


def _warmup(rows: Sequence[tuple[int, float]], peak: float) -> int:
    """The first step at the highest rate, where the log shows the way up to it."""
    step, first = next(((s, rate) for s, rate in rows if rate >= (1 - _SAME) * peak), rows[0])
    return step if rows[0][1] < (1 - 10 * _SAME) * first else 0


def recognised(rows: Sequence[tuple[int, float]], last_step: int | None) -> Schedule | None:
    """The schedule that rates of the past show; `unknown` with their table where it may go on in several
    ways, None where there are hardly any."""
    if len(rows) < 3 or not (peak := max(rate for _step, rate in rows)):
        return None
    warmup = _warmup(rows, peak)
    after = [(step, rate) for step, rate in rows if step >= warmup and rate >= 0]
    table = _table(rows).table
    if last_step is not None and after[-1][0] >= last_step - 1:
        return Schedule("table", peak, after[-1][1], warmup, after[-1][0], table=table)
    if after[-1][1] > (1 - _LEAST_FALL) * peak:
        flat = len(after) >= 3 and all(abs(rate / peak - 1) <= _SAME for _step, rate in after)
        return Schedule("unknown", peak, None, warmup, None, table=table, assumed=not flat)
    if (best := _best_fall(after, peak, warmup, last_step)) is not None:
        kind, final, horizon = best
        return Schedule(kind, peak, final, warmup, horizon)
    # Where it stays at its peak first and falls later, the fall begins at the last highest rate.
    start = max(step for step, rate in after if rate >= (1 - _SAME) * peak)
    falling = [(step, rate) for step, rate in after if step >= start]
    if start == warmup or (best := _best_fall(falling, peak, start, last_step)) is None:
        return Schedule("unknown", peak, None, warmup, None, table=table)
    kind, final, horizon = best
    return Schedule("wsd", peak, final, warmup, horizon, decay_start=start, decay_shape=kind)


def _best_fall(
    rows: Sequence[tuple[int, float]], peak: float, start: int, last_step: int | None
) -> tuple[str, float, int] | None:
    """(cosine or linear, its last rate, where it ends) that the falling rates lie on."""
    now = rows[-1][0]
    shown, rows = rows, _some(rows)
    # Where every tenth step is shown, the fall begins up to ten before the first one at the highest rate.
    every = shown[1][0] - shown[0][0] if len(shown) > 1 else 0
    starts = (start, start - every / 2, start - every) if start else (start,)
    if last_step is not None and last_step > now:
        fits = [found for begin in starts if (found := _fall_to(rows, peak, begin, last_step)) is not None]
        if fits:
            return min(fits)[1:]
    # With the end unknown as well, only the rates that people usually end at can be found.
    ends = (round(start + (now - start) * 1.02**growth) for growth in range(180))
    fits = [
        found
        for end in ends
        if end > start
        and (found := _fall_to(rows, peak, start, end)) is not None
        and any(abs(found[2] / peak - usual) < _FITS for usual in (0.0, 0.05, 0.1))
        # A straight line fits wherever it is cut; that it ends there, nothing but a rate of zero says.
        and (end > now or found[1] == "cosine" or found[2] < _SAME * peak)
    ]
    return min(fits)[1:] if fits else None


def _some(rows: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Enough of them to know a shape by: the first, the last, and those at equal distances between."""
    every = -(-len(rows) // _MOST_FITTED)
    return rows if every == 1 else [*rows[:-1:every], rows[-1]]


def _fall_to(
    rows: Sequence[tuple[int, float]], peak: float, start: float, end: int
) -> tuple[float, str, float, int] | None:
    """How far off at most, and what _best_fall gives."""
    best: tuple[float, str, float] | None = None
    for kind in ("cosine", "linear"):
        shape = [_left(kind, (step - start) / (end - start)) for step, _rate in rows]
        final = _least_squares(shape, [rate for _step, rate in rows], peak)
        if final is None or final >= peak:
            continue
        final = max(final, 0.0)
        off = max(
            abs(final + (peak - final) * part - rate) for part, (_step, rate) in zip(shape, rows, strict=True)
        )
        if off <= _FITS * peak and (best is None or off < best[0]):
            best = off, kind, final
    return (*best, end) if best else None


def _left(kind: str, progress: float) -> float:
    progress = min(max(progress, 0.0), 1.0)
    return 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress


def _least_squares(shape: Sequence[float], rates: Sequence[float], peak: float) -> float | None:
    """The last rate f for which f + (peak - f) × shape is nearest to the rates."""
    above = sum((1 - part) ** 2 for part in shape)
    if not above:
        return None
    pairs = zip(shape, rates, strict=True)
    return sum((1 - part) * (rate - peak * part) for part, rate in pairs) / above
