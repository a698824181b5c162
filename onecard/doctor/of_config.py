"""An advice's config lines, computed one by one against the config as it was, and its stages as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from onecard.config.knobs import knobs
from onecard.config.run import RunConfig
from onecard.doctor.advised import Advised, Change, Stage
from onecard.doctor.cures import DESKTOP, InTheirs, in_theirs, nanogpt_cures
from onecard.doctor.diagnosis import OK, UNKNOWN, WRONG, Judged
from onecard.errors import UserError
from onecard.language import _, number
from onecard.plan.bill import CONTEXT
from onecard.plan.lines import GIB
from onecard.plan.machine import Target

_NOTICEABLE = 0.03  # GiB, and share of the speed: less is called nothing
_KNOBS = frozenset(field.name for field in knobs(RunConfig))
_MODEL = frozenset(("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "depth"))
# Knobs that no byte of a step depends on.
_NO_MEMORY = frozenset(
    ("gradient_accumulation_steps", "learning_rate", "min_lr", "weight_decay", "grad_clip", "beta1", "beta2",
     "max_iters", "eval_iters", "eval_interval")
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A config in nanoGPT's own trainer on a card."""

    config: RunConfig
    theirs: InTheirs
    allocated: int
    reserved: int
    fits: bool  # alone
    fits_beside: bool  # beside a desktop
    moment: str  # of the peak, or where it runs out
    tokens_per_s: float | None

    @property
    def need(self) -> int:
        return self.reserved + CONTEXT

    @property
    def there(self) -> int:
        return self.theirs.target.allowed

    @property
    def tokens(self) -> int:
        return self.config.tokens_per_step

    @property
    def text(self) -> str:
        text = _("{allocated:.2f} GiB allocated, {reserved:.2f} reserved, {need:.2f} with CUDA")
        values = {"allocated": self.allocated / GIB, "reserved": self.reserved / GIB, "need": self.need / GIB}
        return text.format(**values)

    @property
    def verdict(self) -> str:
        there = number(self.there / GIB, ".2f")
        if not self.fits:
            return _("runs out, {there} are there").format(there=there)
        if self.fits_beside:
            return _("fits, also beside a desktop")
        return _("fits alone, not beside a desktop")


@dataclass(frozen=True)
class ConfigJudged:
    lines: tuple[Judged, ...] = ()
    stages: tuple[Judged, ...] = ()
    was: Run | None = None
    runs: tuple[Run, ...] = ()  # of the stages
    back: str = ""  # what the way back to the old speed is in truth


def run_of(config: RunConfig, target: Target, values: Mapping[str, object] | None = None) -> Run | None:
    """None where the values make no config, or no model that nanoGPT trains."""
    changed = {name: value for name, value in (values or {}).items() if name in _KNOBS}
    try:
        config = dataclasses.replace(config, **changed)  # type: ignore[arg-type]
        theirs = in_theirs(config, target)
        if theirs is None:
            return None
        batch, compiled = config.batch_size, config.compile
        bill = theirs.bill(batch, compiled=compiled)
        confined = bill.within(target.allowed - CONTEXT)
        beside = theirs.runs(batch, compiled=compiled, reserve=DESKTOP)
        moment = confined.ran_out.moment if confined.ran_out else bill.moment
        speed = theirs.speed(batch, compiled=compiled)
    except (UserError, ValueError, ZeroDivisionError):
        return None
    return Run(config, theirs, bill.allocated, bill.reserved, confined.ran_out is None, beside, moment, speed)


def judge_config(
    advised: Advised, config: RunConfig | None, target: Target | None, *, for_memory: bool = True
) -> ConfigJudged:
    """`for_memory`: is memory what is short? Else another model is advised for what it learns, and is no
    cure."""
    if config is None or target is None or not advised.stages:
        return ConfigJudged()
    if not for_memory and all(set(stage.values) <= _MODEL for stage in advised.stages):
        return ConfigJudged()
    was = run_of(config, target)
    if was is None:
        return ConfigJudged()
    lines = [judged for change in advised.lines if (judged := _line(change, was, target)) is not None]
    stages, runs = [], []
    for at, stage in enumerate(advised.stages, 1):
        run = run_of(config, target, stage.values)
        if run is not None:
            runs.append(run)
            stages.append(_stage(at, stage, run, was))
    lines += _tokens(advised, was, runs)
    back = _way_back(was, runs) if len(runs) > 1 else ""
    return ConfigJudged(tuple(lines), tuple(stages), was, tuple(runs), back)


# --- each line alone --------------------------------------------------------------------------------


def _line(change: Change, was: Run, target: Target) -> Judged | None:
    """The one line changed, all else as it was."""
    shown = f"{change.name} = {change.value!r}"
    if change.name == "gradient_accumulation_steps":
        return None  # with the batch size: tokens a step
    if change.name in _NO_MEMORY:
        text = _("no byte of a step depends on it")
        return Judged(shown, UNKNOWN, text, 0.2, f"{change.name} 0 GiB", "memory")
    if change.name == "dtype":
        return _dtype(change, was, target)
    run = run_of(was.config, target, {change.name: change.value})
    if run is None:
        return Judged(shown, UNKNOWN, _("it makes no config that can be computed"), 0.2, key="memory")
    more = (run.reserved - was.reserved) / GIB
    share = run.tokens_per_s / was.tokens_per_s if run.tokens_per_s and was.tokens_per_s else None
    text = _("{before} → {after} GiB allocated, {r_before} → {r_after} reserved").format(
        before=_gib(was.allocated), after=_gib(run.allocated), r_before=_gib(was.reserved),
        r_after=_gib(run.reserved),
    )  # fmt: skip
    if share is not None:
        text += ", " + _("{percent:+.0f}% speed").format(percent=100 * (share - 1))
    text += "; " + run.verdict
    helps = more < -_NOTICEABLE
    verdict = OK if helps and run.fits_beside >= was.fits_beside else WRONG
    if change.name in _MODEL:
        verdict = OK if run.fits else WRONG  # another model is not advised for its memory
    is_batch = change.name == "batch_size"
    name = f"batch {change.value}" if is_batch else f"{change.name}={change.value}"
    sign = "✓" if verdict == OK else "✗"
    short = f"{name} {sign} {number(more, '+.1f')} GiB"
    if share is not None and abs(share - 1) > _NOTICEABLE:
        short += f", {100 * (share - 1):+.0f}%"
    return Judged(shown, verdict, text, 3.0 if verdict == WRONG else 1.0, short, "memory")


def _dtype(change: Change, was: Run, target: Target) -> Judged:
    run = run_of(was.config, target, {"dtype": change.value})
    shown = f"dtype = {change.value!r}"
    before = was.config.dtype or was.theirs.question.dtype
    if run is None:
        return Judged(shown, UNKNOWN, _("it makes no config that can be computed"), 0.2, key="memory")
    more = (run.reserved - was.reserved) / GIB
    if abs(more) < _NOTICEABLE:
        text = _(
            "0 GiB: {one} and {other} have 16 bits each ({gib:.2f} GiB allocated with both); float16 needs a "
            "gradient scaler besides"
        ).format(one=before, other=change.value, gib=run.allocated / GIB)
        return Judged(shown, WRONG, text, 2.5, f"{change.value} 0 GiB", "memory")
    text = _("{before} → {after} GiB allocated, {r_before} → {r_after} reserved").format(
        before=_gib(was.allocated), after=_gib(run.allocated), r_before=_gib(was.reserved),
        r_after=_gib(run.reserved),
    )  # fmt: skip
    verdict = OK if more < 0 else WRONG
    sign = "✓" if more < 0 else "✗"
    return Judged(shown, verdict, text, 2.0, f"{change.value} {sign} {number(more, '+.1f')} GiB", "memory")


def _tokens(advised: Advised, was: Run, runs: list[Run]) -> list[Judged]:
    """Tokens of a step, where an advice changes them."""
    if not runs:
        return []
    run = runs[0]
    batch, steps = run.config.batch_size, run.config.gradient_accumulation_steps
    if (batch, steps) == (was.config.batch_size, was.config.gradient_accumulation_steps):
        return []
    words = f"{batch}×{steps}"
    if run.tokens == was.tokens:
        text = _("{words} is {n} tokens a step, as before").format(words=words, n=number(run.tokens, ",d"))
        return [Judged(words, OK, text, 0.5, text, "tokens")]
    text = _("{words} is {n} tokens a step, not {was}").format(
        words=words, n=number(run.tokens, ",d"), was=number(was.tokens, ",d")
    )
    return [Judged(words, WRONG, text, 1.5, text, "tokens")]


# --- as a whole -------------------------------------------------------------------------------------


def _stage(at: int, stage: Stage, run: Run, was: Run) -> Judged:
    words = ", ".join(_shown(stage.values, run))
    text = f"{run.text}: {run.verdict}"
    if run.tokens_per_s and run.fits:
        text += "; " + _("{n} tokens/s").format(n=number(run.tokens_per_s, ",.0f"))
    worse = run.fits_beside < was.fits_beside and not _MODEL & set(stage.values)
    verdict = WRONG if not run.fits or worse else OK
    title = _("stage {n}").format(n=at)
    return Judged(f"{title}: {words}", verdict, text, 5.0 if verdict == WRONG else 1.0, key="stage")


def _shown(values: Mapping[str, object], run: Run) -> list[str]:
    """What it runs in, also where that is as before: a stage takes back what an earlier one changed."""
    config = run.config
    found = [f"{config.batch_size}×{config.gradient_accumulation_steps}", f"compile={config.compile}"]
    found.append(config.dtype or run.theirs.question.dtype)
    told = ("batch_size", "gradient_accumulation_steps", "compile", "dtype", *_NO_MEMORY)
    return [*found, *(f"{name}={value}" for name, value in values.items() if name not in told)]


def _way_back(was: Run, runs: list[Run]) -> str:
    """Is a staged return needed? Not where a compiled setting with the same tokens a step fits from step
    0."""
    if not was.config.compile:
        return ""
    cures = nanogpt_cures(was.theirs, compiled=True, reserve=DESKTOP)
    best = next((cure for cure in cures if cure.is_comfortable), None)
    if best is None or any(line.name == "compile" for line in best.lines):
        return ""
    lines = {line.name: line.value for line in best.lines}
    batch = lines.get("batch_size", was.config.batch_size)
    steps = lines.get("gradient_accumulation_steps", was.config.gradient_accumulation_steps)
    text = _(
        "no staged return is needed: compile stays on from step 0 with {batch}×{steps}, {gib} GiB in all"
    )
    text = text.format(batch=batch, steps=steps, gib=_gib(best.bytes))
    if best.share is not None:
        text += ", " + _("{percent:+.0f}% speed").format(percent=100 * (best.share - 1))
    return text


def _gib(size: int) -> str:
    return number(size / GIB, ".2f")
