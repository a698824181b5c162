"""Retries where host memory is short: no other setting frees any, and other programs may free some soon."""

from __future__ import annotations

import time
from collections.abc import Callable

from onecard.errors import UserError, first_line
from onecard.language import _
from onecard.train.journal import Journal
from onecard.train.memory import forget, is_out_of_memory
from onecard.train.training_run import TrainingRun

_WAIT = 1.0  # seconds between two retries
_SAVES = 6  # tries at a checkpoint, so many seconds apart


def wait_for_others() -> None:
    """Other programs may free memory soon: one that is being closed."""
    time.sleep(_WAIT)


def as_user_error(error: Exception, step: int) -> UserError:
    if isinstance(error, UserError):
        return error
    what = _("the checkpoint of step {step:,} could not be written").format(step=step)
    hint = ""
    if is_out_of_memory(error):
        what = _("the checkpoint of step {step:,} could not be written: out of memory").format(step=step)
        hint = _("close other programs: a checkpoint needs RAM")
    return UserError(what, first_line(error), hint, exit_code=1)


def patiently(save: Callable[[], None], run: TrainingRun, journal: Journal) -> None:
    """A checkpoint takes next to nothing of the card. What is short is host memory, and no other setting
    frees any: what training no longer uses may be enough, or other programs may be done soon."""
    for tries in range(_SAVES):
        try:
            save()
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if tries + 1 == _SAVES:
                raise as_user_error(error, run.position.step) from error
            text = first_line(error)
            if run.stepper is not None:
                run.stepper.release()
            forget(error)
            answer = _("one more try, with all idle memory freed")
            journal.shortage("checkpoint", text, answer, aloud=not tries)
            if tries:
                wait_for_others()


def once_more(run: TrainingRun, journal: Journal, error: BaseException, where: str, *, aloud: bool) -> None:
    """After host memory ran out amid training: no setting frees any, other programs may in a moment."""
    text = first_line(error)
    if run.stepper is not None:
        run.stepper.release()
    forget(error)
    journal.shortage(where, text, _("one more try in a moment"), aloud=aloud)
    wait_for_others()
