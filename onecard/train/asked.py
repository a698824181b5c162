"""A checkpoint because somebody asked for one, with SIGUSR1; training goes on."""

from __future__ import annotations

from collections.abc import Callable

from onecard.errors import UserError
from onecard.train.failures import DivergedError
from onecard.train.journal import Journal
from onecard.train.parking import patiently
from onecard.train.start import Run


def save_as_asked(save: Callable[[], None], saved_step: int, run: Run, journal: Journal) -> None:
    """Save this step, if `saved_step` is another one, and answer.

    Whoever asks is told in any case: that it is there, that it was there, or why it could not be written,
    which is no reason to end a run that is still learning.
    """
    step, say = run.position.step, journal.display.say
    if step <= max(saved_step, 0):
        there = f"step {step:,} is saved already" if saved_step >= 0 else "there is no step to save yet"
        say(f"{there}, asked by SIGUSR1", "yellow")
        return
    try:
        patiently(save, run, journal)
        say(f"saved step {step:,}, as asked by SIGUSR1", "yellow")
    except DivergedError:
        raise  # which is one
    except UserError as error:
        journal.save_failed(step, error)
