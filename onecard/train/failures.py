"""When a run cannot go on: what to tell, and how to go on with what there is."""

from __future__ import annotations

import math

from onecard.config.run import RunConfig
from onecard.errors import UserError, first_line
from onecard.model.compiling import too_many_shapes
from onecard.train.memory import is_out_of_memory, out_of_memory
from onecard.train.start import Run

# After these, nothing on the card can be used or read any more by this process, whatever it tries.
_BEYOND_RECOVERY = (
    "illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address",
    "uncorrectable ECC", "uncorrectable NVLink", "the launch timed out", "illegal instruction",
    "invalid program counter", "hardware stack error", "device is lost", "fallen off the bus",
    "unknown error", "unspecified driver error", "driver shutting down",
)  # fmt: skip


# Of those, what a program does to a card that is well.
_FAULTS_OF_PROGRAMS = ("illegal memory access", "device-side assert", "misaligned address")
_TOLD_BY_CUDA = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


class DivergedError(UserError):
    """The loss is no longer a number."""


def not_a_number(loss: float, grad_norm: float, dtype: str) -> str | None:
    """What has gone wrong in a step, or None. The loss is that of the weights before its update: a gradient
    that is no number has made weights of none, before any loss shows it."""
    if not math.isfinite(loss):
        return f"the loss became {loss}"
    # With fp16 such a step is left out, and the loss scaled less.
    return None if dtype == "float16" or math.isfinite(grad_norm) else f"the gradient became {grad_norm}"


def diverged(what: str, config: RunConfig, rate: float, saved_step: int) -> DivergedError:
    """The same command goes on from the checkpoint with the same numbers: worth it once, as a fault of the
    machine does not come again."""
    lower = f"--learning_rate={config.learning_rate / 2:g} --min_lr={config.min_lr / 2:g}"
    if config.by_muon:
        lower = f"--matrix_lr={config.muon_lr / 2:g}"
    train = f"onecard train --out_dir={config.out_dir}"
    if saved_step < 0:
        saved, hint = "nothing had been saved yet", f"begin again with a lower one: {lower}"
    else:
        saved = f"the last checkpoint is of step {saved_step:,}"
        hint = (
            f"go on from step {saved_step:,}, bit for bit: {train}\n"
            f"if it comes again, it is the recipe: {train} --init_from=resume {lower}\n"
            f"or start over with a lower rate: the same command with --fresh {lower}"
        )
    return DivergedError(what, f"the learning rate was {rate:g}; {saved}", hint, exit_code=1)


def is_beyond_recovery(error: BaseException) -> bool:
    """Has the process lost the card? torch tells it as a RuntimeError (since 2.8 as one of its kinds)."""
    text = str(error)
    told_by_cuda = isinstance(error, RuntimeError) and any(word in text for word in _TOLD_BY_CUDA)
    return told_by_cuda and any(word in text for word in _BEYOND_RECOVERY)


def explained(error: Exception, run: Run, saved_step: int) -> Exception:
    """The error as a person can use it; others as they are."""
    if is_beyond_recovery(error):
        return _card_lost(error, run, saved_step)
    half_way = run.stepper is not None and run.stepper.updating
    if half_way and isinstance(error, RuntimeError | MemoryError):
        return _broken_off(error, run, saved_step)
    if half_way:
        kept, again = _what_is_left(run, saved_step)
        error.add_note(f"an update was broken off, which cannot be saved; {kept}\n{again}")
    if isinstance(error, UserError) and run.position.step > max(saved_step, 0):
        error.why = "\n".join(filter(None, (error.why, _what_is_left(run, saved_step)[0])))
    if is_out_of_memory(error):
        return out_of_memory(run.config, run.device, run.fit.choice.words if run.fit.tried else None)
    return too_many_shapes(error) or error


def _broken_off(error: Exception, run: Run, saved_step: int) -> UserError:
    """Not for want of memory, as far as that can be foreseen: it is taken before an update begins."""
    kept, again = _what_is_left(run, saved_step)
    return UserError(
        f"the update of step {run.position.step:,} was broken off: {first_line(error)}",
        f"weights and moments are between two steps, which cannot be saved; {kept}",
        again,
        exit_code=1,
    )


def _what_is_left(run: Run, saved_step: int) -> tuple[str, str]:
    """Which checkpoint there is, and how to go on from it."""
    lost = run.position.step - max(saved_step, 0)
    kept = f"the checkpoint of step {saved_step:,} is kept"
    again = f"go on with: onecard train --out_dir={run.config.out_dir}"
    if saved_step < 0:
        kept, again = "nothing had been saved yet", "start it again with the same command"
    if lost:
        kept += f"; {lost:,} {'step' if lost == 1 else 'steps'} after it {'is' if lost == 1 else 'are'} lost"
    return kept, again


def _card_lost(error: Exception, run: Run, saved_step: int) -> UserError:
    step, (kept, again) = run.position.step, _what_is_left(run, saved_step)
    cause = "`nvidia-smi` and the system's log may tell (heat, power, overclocking)"
    if any(word in str(error) for word in _FAULTS_OF_PROGRAMS):
        cause = (
            "likely a fault in the program, seldom an unstable card;\n"
            "please report it, with what it says when CUDA_LAUNCH_BLOCKING=1 is set"
        )
    return UserError(
        f"the card stopped working at step {step:,}: {first_line(error)}",
        f"this process cannot use it any more; {kept}",
        f"{again}\nif it comes again: {cause}",
        exit_code=1,
    )
