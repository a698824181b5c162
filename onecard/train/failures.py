"""When a run cannot go on: what to report, and how to go on with what there is (out of memory: memory.py)."""

from __future__ import annotations

import math

from onecard.config.run import RunConfig
from onecard.errors import UserError, first_line
from onecard.language import _, joined, ngettext
from onecard.model.compiling import too_many_shapes
from onecard.train.fit import in_words
from onecard.train.memory import is_out_of_memory, out_of_memory
from onecard.train.training_run import TrainingRun

# After these, nothing on the card can be used or read any more by this process, whatever it tries.
_BEYOND_RECOVERY = (
    "illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address",
    "uncorrectable ECC", "uncorrectable NVLink", "the launch timed out", "illegal instruction",
    "invalid program counter", "hardware stack error", "device is lost", "fallen off the bus",
    "unknown error", "unspecified driver error", "driver shutting down",
)  # fmt: skip
# Of those, what a program does to a card that is well.
_FAULTS_OF_PROGRAMS = ("illegal memory access", "device-side assert", "misaligned address")
_CUDA_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


class DivergedError(UserError):
    """The loss is no longer a number."""


def not_a_number(loss: float, grad_norm: float, dtype: str) -> str | None:
    """What has gone wrong in a step, or None. The loss is that of the weights before its update: a gradient
    that is no number has made weights of none, before any loss shows it."""
    if not math.isfinite(loss):
        return _("the loss became {value}").format(value=str(loss))
    # With fp16 such a step is left out, and the loss scaled less.
    if dtype == "float16" or math.isfinite(grad_norm):
        return None
    return _("the gradient became {value}").format(value=str(grad_norm))


def diverged(what: str, config: RunConfig, rate: float, saved_step: int) -> DivergedError:
    """The same command goes on from the checkpoint with the same numbers: worth it once, as a fault of the
    machine does not come again."""
    lower = f"--learning_rate={config.learning_rate / 2:g} --min_lr={config.min_lr / 2:g}"
    if config.by_muon:
        lower = f"--matrix_lr={config.muon_lr / 2:g}"
    train = f"onecard train --out_dir={config.out_dir}"
    if saved_step < 0:
        saved = _("nothing had been saved yet")
        hint = _("begin again with a lower one: {flags}").format(flags=lower)
    else:
        saved = _("the last checkpoint is of step {step:,}").format(step=saved_step)
        hints = [
            _("go on from step {step:,}, bit for bit: {command}").format(step=saved_step, command=train),
            _("if it comes again, the recipe is the cause: {command}").format(
                command=f"{train} --init_from=resume {lower}"
            ),
            _("or start over with a lower rate: the same command with {flags}").format(
                flags=f"--fresh {lower}"
            ),
        ]
        hint = joined(hints, "\n")
    why = _("the learning rate was {rate:g}; {saved}").format(rate=rate, saved=saved)
    return DivergedError(what, why, hint, exit_code=1)


def is_beyond_recovery(error: BaseException) -> bool:
    """Has the process lost the card? torch raises a RuntimeError for it (since 2.8 one of its kinds)."""
    text = str(error)
    by_cuda = isinstance(error, RuntimeError) and any(word in text for word in _CUDA_ERRORS)
    return by_cuda and any(word in text for word in _BEYOND_RECOVERY)


def explained(error: Exception, run: TrainingRun, saved_step: int) -> Exception:
    """The error as a person can use it; others as they are."""
    if is_beyond_recovery(error):
        return _card_lost(error, run, saved_step)
    half_way = run.stepper is not None and run.stepper.updating
    if half_way and isinstance(error, RuntimeError | MemoryError):
        return _broken_off(error, run, saved_step)
    if half_way:
        kept, again = _what_is_left(run, saved_step)
        text = _("an update was broken off, which cannot be saved; {kept}").format(kept=kept)
        error.add_note(f"{text}\n{again}")
    if isinstance(error, UserError) and run.position.step > max(saved_step, 0):
        error.why = joined(filter(None, (error.why, _what_is_left(run, saved_step)[0])), "\n")
    if is_out_of_memory(error):
        return out_of_memory(run.config, run.device, in_words(run.fit.choice) if run.fit.tried else None)
    return too_many_shapes(error) or error


def _broken_off(error: Exception, run: TrainingRun, saved_step: int) -> UserError:
    """Not for want of memory, as far as that can be foreseen: it is taken before an update begins."""
    kept, again = _what_is_left(run, saved_step)
    return UserError(
        _("the update of step {step:,} was broken off: {error}").format(
            step=run.position.step, error=first_line(error)
        ),
        _("weights and moments are between two steps, which cannot be saved; {kept}").format(kept=kept),
        again,
        exit_code=1,
    )


def _what_is_left(run: TrainingRun, saved_step: int) -> tuple[str, str]:
    """Which checkpoint there is, and how to go on from it."""
    lost = run.position.step - max(saved_step, 0)
    kept = _("the checkpoint of step {step:,} is kept").format(step=saved_step)
    again = _("go on with: {command}").format(command=f"onecard train --out_dir={run.config.out_dir}")
    if saved_step < 0:
        kept = _("nothing had been saved yet")
        again = _("start it again with the same command")
    if lost:
        after = ngettext("{n:,} step after it is lost", "{n:,} steps after it are lost", lost).format(n=lost)
        kept = joined([kept, after], "; ")
    return kept, again


def _card_lost(error: Exception, run: TrainingRun, saved_step: int) -> UserError:
    step, (kept, again) = run.position.step, _what_is_left(run, saved_step)
    cause = _("`nvidia-smi` and the system's log may show the cause (heat, power, overclocking)")
    if any(word in str(error) for word in _FAULTS_OF_PROGRAMS):
        cause = _(
            "likely a fault in the program, seldom an unstable card;\n"
            "please report it, with its output when CUDA_LAUNCH_BLOCKING=1 is set"
        )
    return UserError(
        _("the card stopped working at step {step:,}: {error}").format(step=step, error=first_line(error)),
        _("this process cannot use it any more; {kept}").format(kept=kept),
        joined([again, _("if it comes again: {cause}").format(cause=cause)], "\n"),
        exit_code=1,
    )
