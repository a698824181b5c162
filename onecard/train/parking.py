"""All of training's state in host memory: for another setting, or for as long as a pause lasts.

While it is parked nothing is lost, whatever happens on the card: the run can be saved from there. So after a
pause there is no hurry: if somebody else has the memory by then, the run waits until there is room.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import torch

from onecard.arch.layout import Setting
from onecard.errors import UserError, first_line
from onecard.hardware.cpu import available_memory
from onecard.optim.region_buffers import Storage
from onecard.plan.lines import GIB
from onecard.run.checkpoint import TrainingState
from onecard.run.pause import PauseRequest
from onecard.train.engine import graphs_of, new_stepper, storage_of
from onecard.train.journal import Journal
from onecard.train.memory import (
    allocator_bytes,
    cap_again,
    forget,
    is_out_of_memory,
    peak_memory_gib,
    process_bytes_on,
    ran_out,
    reserve_of,
)
from onecard.train.replay import give_back
from onecard.train.start import Run

_WAIT = 1.0  # seconds before the smallest setting is tried once more
_SAVES = 6  # tries at a checkpoint, so many seconds apart
_LOOK_EVERY = 0.05  # seconds, for the end of a pause
# After a pause: seconds between two tries, and how many are for the setting of before it alone. Whoever has
# the memory may be about to give it back, and what it then runs with is slower.
_TRY_EVERY, _TRIES_AS_BEFORE = 3.0, 3
_TELL_EVERY = 600.0
# Left to everybody else on the host, so that the kernel has no reason to end somebody.
_HOST_MARGIN = 2**28
# What may stay on the card: numbers of the last steps, the next micro-batches.
_LITTLE = 2**25


def wait_for_others() -> None:
    """To give memory back, which they may do soon: a program that is being closed."""
    time.sleep(_WAIT)


def park(run: Run) -> TrainingState:
    """All of training's state in host memory; the card is free afterwards.

    It is the run's from then on, so that whatever fails next can still save it. Where the host has no room
    nothing has changed.
    """
    stepper = run.stepper
    assert stepper is not None and not stepper.updating
    here = stepper.export()
    _check_host(here)
    try:
        state = TrainingState(
            weights={name: tensor.to("cpu", copy=True) for name, tensor in here.weights.items()},
            optimizer={name: tensor.to("cpu", copy=True) for name, tensor in here.optimizer.items()},
            scaler=here.scaler,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            "the host has no room for the run's state", first_line(error), "close other programs", exit_code=1
        ) from None
    stepper.release()
    stepper.replay = None  # it refers back to the stepper
    kept = weakref.ref(stepper.optimizer)
    del here, stepper
    run.parked, run.stepper = state, None
    _let_go(run, state)
    give_back()
    # It takes as long as copying some hundred MB: only where somebody still refers to what is to go.
    on_card = torch.cuda.memory_allocated(run.device) if run.device.startswith("cuda") else 0
    if kept() is not None or on_card > _LITTLE:
        gc.collect()
        give_back()
    return state


def _check_host(state: TrainingState) -> None:
    needed = sum(t.nbytes for tensors in (state.weights, state.optimizer) for t in tensors.values())
    there = available_memory()
    if there is not None and needed + _HOST_MARGIN > there:
        raise UserError(
            "the host has no room for the run's state",
            f"it takes {needed / GIB:.2f} GiB of host memory; {there / GIB:.2f} GiB are available",
            "close other programs",
            exit_code=1,
        )


def _let_go(run: Run, state: TrainingState) -> None:
    """The model's own references to the card."""
    run.model.use_weights(state.weights)
    run.model.forget_accumulators()


def unpark(run: Run, state: TrainingState, setting: Setting) -> None:
    """Go on where `park` left off, in this setting: from the parked weights, whatever was tried before it."""
    _let_go(run, state)
    stepper = new_stepper(
        run.model, run.config, setting, run.device, run.dtype, compiled=run.model.compiled,
        room=run.fit.room_to_record(free_for_tensors(run)),
    )  # fmt: skip
    stepper.restore(state.optimizer, state.scaler)
    run.parked, run.stepper = None, stepper


def put_in_place(run: Run, step: int, storage: Storage | None = None) -> None:
    """The fit's setting, or the first one after it that there is room for; `storage` is what there is now."""
    while True:
        setting = run.fit.setting
        if run.parked is None and storage_of(setting) == storage:
            _carry_out(run, setting)
            assert run.stepper is not None
            room, compiled = run.fit.room_to_record(free_for_tensors(run)), run.model.compiled
            run.stepper.record(graphs_of(run.config, setting, run.device, compiled=compiled, room=room))
            return
        try:
            _carry_out(run, setting)
            unpark(run, run.parked or park(run), setting)
            return
        except Exception as error:
            if run.parked is not None:
                _let_go(run, run.parked)  # what was half built must not stay, nor its rounded weights
            if not ran_out(error) or _next_setting(run, step, by_host=isinstance(error, UserError)) is None:
                raise
            forget(error)
            if run.fit.setting == setting:
                wait_for_others()


def _next_setting(run: Run, step: int, *, by_host: bool) -> Setting | None:
    """After the fit's setting could not be put in place, for want of the host's memory or of the card's."""
    there = free_for_tensors(run)
    if not by_host:
        return run.fit.down(step, there)
    stays = run.stepper.optimizer.storage.offload if run.stepper is not None else None
    return run.fit.refused(step, there, stays)


def _carry_out(run: Run, setting: Setting) -> None:
    run.model.recompute, run.model.loss_chunk = setting.recompute, setting.loss_chunk


# --- a pause
def try_to_park(run: Run) -> str | None:
    """None, or why the host has no room; then the run is as it was."""
    try:
        park(run)
        return None
    except Exception as error:
        if not ran_out(error) or run.stepper is None:
            raise
        why = error.what if isinstance(error, UserError) else "the host has no room for the run's state"
        if isinstance(error, UserError) and error.why:
            why += f" ({error.why})"
        forget(error)
        return why


def left_on_card(device: str) -> str:
    """What a paused run still holds, for whoever wants the card: measured, where the driver tells."""
    if not device.startswith("cuda"):
        return "nothing is computed"
    held = process_bytes_on(device)
    kept = "0.5 to 1" if held is None else f"{held / GIB:.2f}"
    return f"the card is free, but for {kept} GiB that CUDA itself keeps"


def as_user_error(error: Exception, step: int) -> UserError:
    if isinstance(error, UserError):
        return error
    what, hint = f"the checkpoint of step {step} could not be written", ""
    if is_out_of_memory(error):
        what += ": out of memory"
        hint = "close other programs: what a checkpoint takes is the host's memory"
    return UserError(what, first_line(error), hint, exit_code=1)


def patiently(save: Callable[[], None], run: Run, journal: Journal) -> None:
    """A checkpoint takes next to nothing of the card. What is short is the host's memory, and no other
    setting gives that back: what training has left lying about may be enough, or others may be done soon."""
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
            journal.shortage(
                "checkpoint", text, "once more, with all that is idle given back", aloud=not tries
            )
            if tries:
                wait_for_others()


def once_more(run: Run, journal: Journal, error: BaseException, where: str, *, aloud: bool) -> None:
    """After the host ran out amid training: no setting gives it anything back, others may in a moment."""
    text = first_line(error)
    if run.stepper is not None:
        run.stepper.release()
    forget(error)
    journal.shortage(where, text, "once more, in a moment", aloud=aloud)
    wait_for_others()


def needed_by(run: Run, *, measured: bool) -> float:
    """Bytes of tensors that the present setting needs: as predicted, or as `measured` where that is less.
    (Not before a step has been done since peaks are measured: they are of what stands on the card alone.)"""
    predicted, peak = float(run.fit.choice.bill.need), peak_memory_gib(run.device)
    return min(predicted, peak * GIB) if measured and peak is not None else predicted


def rest_until_taken_back(
    run: Run, journal: Journal, wanted: PauseRequest, stop: Callable[[], bool], left: str, needs: float
) -> bool:
    """True: the wish was taken back, and the card is ours again. False: the run is to end, still parked.

    `left`: on the card, in words; `needs`: bytes of the setting of before the pause.
    """
    tries, told = 0, float("-inf")
    while not stop():
        if wanted.requested():
            wanted.granted(left)  # again, if the wish has come back while the run was waiting for memory
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
        wanted.says("resuming", short)
        if time.monotonic() - told >= _TELL_EVERY:
            told = time.monotonic()
            journal.waits_for_memory(short)
        again_at = time.monotonic() + _TRY_EVERY
        while time.monotonic() < again_at and not stop() and not wanted.requested():
            time.sleep(_LOOK_EVERY)
    return False


def take_card(run: Run, needs: float, *, smaller_too: bool) -> str | None:
    """Go on in the setting of before, or else in a smaller one, if there is room. None, or why not: all is
    still parked then."""
    fit, step, short = run.fit, run.position.step, None
    bring_back = fit.remembered()
    while True:
        setting = fit.setting
        problem, by_host = _problem_with(run, needs)
        if problem is None:
            return None
        short = short or problem
        if not smaller_too or _next_setting(run, step, by_host=by_host) in (None, setting):
            bring_back()
            return short
        needs = fit.choice.bill.need


def _problem_with(run: Run, needs: float) -> tuple[str | None, bool]:
    """Why the fit's setting cannot be put in place now, and whether it is for the host; None: it is in place.

    Asked for beforehand: a run that takes what it can get fails at its first step instead, or makes the other
    program fail, and where the driver moves memory to the host nothing fails and all is slow.
    """
    cap_again(run.device, run.config.vram_limit, reserve_of(run.config, run.device))
    free, setting, state = free_for_tensors(run), run.fit.setting, run.parked
    assert state is not None
    if free is not None and free < needs:
        return f"{needs / GIB:.2f} GiB are needed, {max(free, 0) / GIB:.2f} GiB are free", False
    try:
        _carry_out(run, setting)
        unpark(run, state, setting)
        return None, False
    except Exception as error:
        if not ran_out(error):
            raise
        by_host = isinstance(error, UserError)
        problem = error.why or error.what if isinstance(error, UserError) else first_line(error)
        _let_go(run, state)
        forget(error)
        return problem, by_host


def free_for_tensors(run: Run) -> float | None:
    """What tensors may take of the card now; None on a CPU."""
    return allocator_bytes(run.device, run.config.vram_limit, reserve_of(run.config, run.device))
