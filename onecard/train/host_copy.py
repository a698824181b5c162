"""The host copy: all of training's state in host memory, for another setting or for as long as a pause lasts.

While there is a host copy nothing is lost, whatever happens on the card: the run can be saved from it.
"""

from __future__ import annotations

import gc
import weakref

import torch

from onecard.arch.layout import Setting
from onecard.errors import UserError, first_line
from onecard.hardware.cpu import available_memory
from onecard.language import _
from onecard.optim.region_buffers import Storage
from onecard.plan.lines import GIB
from onecard.run.checkpoint import TrainingState
from onecard.train.engine import graphs_of, new_stepper, storage_of
from onecard.train.memory import allocator_bytes, forget, is_out_of_memory, ran_out, reserve_of
from onecard.train.replay import give_back
from onecard.train.retries import wait_for_others
from onecard.train.training_run import TrainingRun

# Left to all other programs, so that the kernel has no reason to end one of them.
_HOST_MARGIN = 2**28
# What may stay on the card: numbers of the last steps, the next micro-batches.
_LITTLE = 2**25


def move_to_host(run: TrainingRun) -> TrainingState:
    """All of training's state in host memory; the card is free afterwards.

    The run keeps it from then on, so that whatever fails next can still save it. Where host memory has no
    room for it nothing has changed.
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
            _("RAM has no room for the run's state"),
            first_line(error),
            _("close other programs"),
            exit_code=1,
        ) from None
    stepper.release()
    stepper.replay = None  # it refers back to the stepper
    kept = weakref.ref(stepper.optimizer)
    del here, stepper
    run.host_copy, run.stepper = state, None
    drop_card(run, state)
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
            _("RAM has no room for the run's state"),
            _("it takes {n:.2f} GiB of RAM; {there:.2f} GiB are available").format(
                n=needed / GIB, there=there / GIB
            ),
            _("close other programs"),
            exit_code=1,
        )


def drop_card(run: TrainingRun, state: TrainingState) -> None:
    """Drop the model's own references to the card."""
    run.model.use_weights(state.weights)
    run.model.forget_accumulators()


def move_to_card(run: TrainingRun, state: TrainingState, setting: Setting) -> None:
    """Go on in this setting, from the host copy's weights, whatever was tried before it."""
    drop_card(run, state)
    stepper = new_stepper(
        run.model, run.config, setting, run.device, run.dtype, compiled=run.model.compiled,
        room=run.fit.room_to_capture(free_for_tensors(run)),
    )  # fmt: skip
    stepper.restore(state.optimizer, state.scaler)
    run.host_copy, run.stepper = None, stepper


def put_in_place(run: TrainingRun, step: int, storage: Storage | None = None) -> None:
    """The fit's setting, or the first one after it that there is room for; `storage` is what there is now."""
    while True:
        setting = run.fit.setting
        if run.host_copy is None and storage_of(setting) == storage:
            use_setting(run, setting)
            assert run.stepper is not None
            room, compiled = run.fit.room_to_capture(free_for_tensors(run)), run.model.compiled
            run.stepper.use_graphs(graphs_of(run.config, setting, run.device, compiled=compiled, room=room))
            return
        try:
            use_setting(run, setting)
            move_to_card(run, run.host_copy or move_to_host(run), setting)
            return
        except Exception as error:
            if run.host_copy is not None:
                drop_card(run, run.host_copy)  # what was half built must not stay, nor its rounded weights
            if not ran_out(error) or next_setting(run, step, by_host=isinstance(error, UserError)) is None:
                raise
            forget(error)
            if run.fit.setting == setting:
                wait_for_others()


def next_setting(run: TrainingRun, step: int, *, by_host: bool) -> Setting | None:
    """After the fit's setting could not be put in place, for want of RAM or of the card's."""
    there = free_for_tensors(run)
    if not by_host:
        return run.fit.down(step, there)
    stays = run.stepper.optimizer.storage.offload if run.stepper is not None else None
    return run.fit.refused(step, there, stays)


def use_setting(run: TrainingRun, setting: Setting) -> None:
    run.model.recompute, run.model.loss_chunk = setting.recompute, setting.loss_chunk


def try_to_free_card(run: TrainingRun) -> str | None:
    """Free the card for others. None, or why host memory has no room; then the run is as it was."""
    try:
        move_to_host(run)
        return None
    except Exception as error:
        if not ran_out(error) or run.stepper is None:
            raise
        why = _("RAM has no room for the run's state")
        if isinstance(error, UserError):
            why = _("{what} ({why})").format(what=error.what, why=error.why) if error.why else error.what
        forget(error)
        return why


def free_for_tensors(run: TrainingRun) -> float | None:
    """What tensors may take of the card now; None on a CPU."""
    return allocator_bytes(run.device, run.config.vram_limit, reserve_of(run.config, run.device))
