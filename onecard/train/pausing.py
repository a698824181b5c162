"""A pause: the card is free, the run's state waits in host memory, and training goes on when there is room.

After a pause there is no hurry: if another program has the memory by then, the run waits until there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from onecard.errors import UserError, first_line
from onecard.language import _, english_of
from onecard.plan.lines import GIB
from onecard.run.pause import PauseRequest
from onecard.train import host_copy
from onecard.train.journal import Journal
from onecard.train.memory import cap_again, forget, peak_memory_gib, process_bytes_on, ran_out, reserve_of
from onecard.train.training_run import TrainingRun

_LOOK_EVERY = 0.05  # seconds, for the end of a pause
# After a pause: seconds between two tries, and how many are for the setting of before it alone. Whoever has
# the memory may be about to free it, and what would be taken instead is slower.
_TRY_EVERY, _TRIES_AS_BEFORE = 3.0, 3
_REPORT_EVERY = 600.0


def left_on_card(device: str) -> str:
    """What a paused run still holds (run/pause.py's left_in_words); measured, where the driver reports it."""
    if not device.startswith("cuda"):
        return "cpu"
    held = process_bytes_on(device)
    return "cuda" if held is None else f"{held / GIB:.2f}"


def needed_by(run: TrainingRun, *, measured: bool) -> float:
    """Bytes of tensors that the present setting needs: as predicted, or as `measured` where that is less.
    (Not before a step has been done since peaks are measured: they are of what stands on the card alone.)"""
    predicted, peak = float(run.fit.choice.bill.need), peak_memory_gib(run.device)
    return min(predicted, peak * GIB) if measured and peak is not None else predicted


def rest_until_taken_back(
    run: TrainingRun,
    journal: Journal,
    wanted: PauseRequest,
    stop: Callable[[], bool],
    left: str,
    needs: float,
) -> bool:
    """True: the pause request was taken back, and the card is ours again. False: the run is to end, its state
    still in host memory.

    `left`: on the card (left_on_card); `needs`: bytes of the setting of before the pause.
    """
    tries, reported = 0, float("-inf")
    while not stop():
        if wanted.requested():
            wanted.granted(left)  # again, if it came back while the run waited for memory
            tries = 0
            time.sleep(_LOOK_EVERY)
            continue
        wanted.going_on()
        if wanted.requested():
            continue
        short = take_card(run, needs, smaller_too=tries >= _TRIES_AS_BEFORE)
        if short is None:
            return True
        tries += 1
        wanted.says("resuming", str(english_of(short)))
        if time.monotonic() - reported >= _REPORT_EVERY:
            reported = time.monotonic()
            journal.waits_for_memory(short)
        again_at = time.monotonic() + _TRY_EVERY
        while time.monotonic() < again_at and not stop() and not wanted.requested():
            time.sleep(_LOOK_EVERY)
    return False


def take_card(run: TrainingRun, needs: float, *, smaller_too: bool) -> str | None:
    """Go on in the setting of before, or else in a smaller one, if there is room. None, or why not: all is
    still in host memory then."""
    fit, step, short = run.fit, run.position.step, None
    bring_back = fit.remembered()
    while True:
        setting = fit.setting
        problem, by_host = _problem_with(run, needs)
        if problem is None:
            return None
        short = short or problem
        if not smaller_too or host_copy.next_setting(run, step, by_host=by_host) in (None, setting):
            bring_back()
            return short
        needs = fit.choice.bill.need


def _problem_with(run: TrainingRun, needs: float) -> tuple[str | None, bool]:
    """Why the fit's setting cannot be used now, and whether host memory is short; None: it is in place.

    Asked for beforehand: a run that takes what it can get fails at its first step instead, or makes the other
    program fail, and where the driver moves memory to RAM nothing fails and all is slow.
    """
    cap_again(run.device, run.config.vram_limit, reserve_of(run.config, run.device))
    free, setting, state = host_copy.free_for_tensors(run), run.fit.setting, run.host_copy
    assert state is not None
    if free is not None and free < needs:
        return _("{n:.2f} GiB are needed, {free:.2f} GiB are free").format(
            n=needs / GIB, free=max(free, 0) / GIB
        ), False
    try:
        host_copy.use_setting(run, setting)
        host_copy.move_to_card(run, state, setting)
        return None, False
    except Exception as error:
        if not ran_out(error):
            raise
        by_host = isinstance(error, UserError)
        problem = error.why or error.what if isinstance(error, UserError) else first_line(error)
        host_copy.drop_card(run, state)
        forget(error)
        return problem, by_host
