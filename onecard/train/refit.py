"""Changing a run's setting while it runs: let go of the card, take the next one, go on with the same step.

Where masters and states change place, all that training has learned waits in host memory meanwhile, so that
nothing is lost if the next setting does not fit either.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

import torch

from onecard.errors import UserError, first_line
from onecard.optim.held import Storage
from onecard.plan.lines import GIB
from onecard.plan.settings import Setting
from onecard.run.checkpoint import TrainingState
from onecard.run.pause import PauseRequest
from onecard.train.engine import new_stepper, storage_of
from onecard.train.fit import Fit
from onecard.train.journal import Journal
from onecard.train.memory import (
    allocator_bytes,
    allocator_retries,
    forget,
    is_out_of_memory,
    peak_memory_gib,
)
from onecard.train.start import Run

_PAUSED_LOOK = 0.1  # seconds
_CLIMB_EVERY = 32  # steps between looks at how much memory there is now
# It just fits, but the allocator starts over again and again: as good as not fitting, and found out so often.
_THRASHING_EVERY, _THRASHING = 8, 4
_WAIT = 1.0  # seconds before the smallest setting is tried once more


class Refit:
    """What the loop asks when memory runs out, and now and then when it may have come back."""

    def __init__(self, run: Run, journal: Journal) -> None:
        self.run, self.journal = run, journal
        self._retries = 0  # of the allocator, when last looked at

    @property
    def fit(self) -> Fit:
        return self.run.fit

    def after(self, error: BaseException, where: str) -> bool:
        """Ran out in `where`: is there another setting to try again with? It is in place then."""
        run, step = self.run, self.run.position.step
        if not is_out_of_memory(error) or run.stepper is None or run.stepper.updating:
            return False
        if where == "evaluation" and self.fit.enabled and self.fit.evaluation_batch > 1:
            self.fit.evaluation_batch //= 2
            forget(error)
            self.journal.tell(
                [f"out of memory in evaluation: {self.fit.evaluation_batch} sequences at a time"]
            )
            return True
        before = self.fit.choice
        if self.fit.down(step) is None:
            return False
        peak, text = peak_memory_gib(run.device), first_line(error)
        forget(error)
        change_setting(run, step)
        after = self.fit.choice
        going_on = "going on"
        if after.setting == before.setting:
            # Nothing is smaller: all that helps is that others give memory back, and that takes a while.
            going_on = "trying again"
            time.sleep(_WAIT if run.device.startswith("cuda") else 0)
        self.journal.refitted(
            f"out of memory in {where}: {going_on} with {after.setting.words()}", where=where, error=text,
            before=before.setting.to_json(), after=after.setting.to_json(), measured_gib=peak,
            predicted_gib=round(before.bill.allocated / GIB, 3), now_gib=round(after.bill.allocated / GIB, 3),
        )  # fmt: skip
        return True

    def pause(self, wanted: PauseRequest, stop: Callable[[], bool]) -> None:
        """The card is free until the wish is taken back, or the run is to end."""
        run, step = self.run, self.run.position.step
        park(run)
        wanted.granted()
        self.journal.paused()
        while wanted() and not stop():
            time.sleep(_PAUSED_LOOK)
        if not stop():
            put_in_place(run, step)
            self.journal.going_on()
        wanted.over()

    def _thrashing(self) -> bool:
        if self.run.position.step % _THRASHING_EVERY:
            return False
        before, self._retries = self._retries, allocator_retries(self.run.device)
        return self.fit.enabled and self._retries - before >= _THRASHING

    def climb(self) -> bool:
        """Has the setting changed after this step? For a faster one, if memory has come back, or for a
        smaller one, if it fits too tightly. Looked at rarely: it costs a question to the driver."""
        run, step = self.run, self.run.position.step
        self.fit.progressed()
        if self._thrashing():
            told = f"the allocator started over {_THRASHING} times or more in {_THRASHING_EVERY} steps"
            return self.after(torch.OutOfMemoryError(told), "training")
        if self.fit.as_given or step % _CLIMB_EVERY:
            return False
        there = allocator_bytes(run.device, run.config.vram_limit, run.config.vram_reserve)
        before = self.fit.choice
        if self.fit.up(step, math.inf if there is None else there) is None:
            return False
        change_setting(run, step)
        after = self.fit.choice
        self.journal.refitted(
            f"there is memory again: going on with {after.setting.words()}", where="climb",
            before=before.setting.to_json(), after=after.setting.to_json(),
            now_gib=round(after.bill.allocated / GIB, 3),
            predicted_gain=round(after.tokens_per_s / before.tokens_per_s - 1, 3) if before.step else None,
        )  # fmt: skip
        return True


def change_setting(run: Run, step: int) -> None:
    """Put the fit's setting in place; the next one, and so on, where building it runs out itself."""
    assert run.stepper is not None
    run.stepper.release()
    put_in_place(run, step, run.stepper.optimizer.storage)


def put_in_place(run: Run, step: int, storage: Storage | None = None) -> None:
    """The fit's setting, or the first one after it that there is room for; `storage` is what there is now."""
    while True:
        setting = run.fit.setting
        run.model.recompute, run.model.loss_chunk = setting.recompute, setting.loss_chunk
        if run.parked is None and storage_of(setting) == storage:
            return
        try:
            unpark(run, run.parked or park(run), setting)
            return
        except Exception as error:
            # A UserError is the host's memory: it has no room for what was to move there.
            ran_out = is_out_of_memory(error) or isinstance(error, UserError)
            if not ran_out or run.fit.down(step) is None:
                raise
            if run.parked is not None:
                _let_go(run, run.parked)
            forget(error)


def park(run: Run) -> TrainingState:
    """All of training's state in host memory; the card is free afterwards.

    It is the run's from then on, so that whatever fails next can still save it.
    """
    stepper = run.stepper
    assert stepper is not None and not stepper.updating
    here = stepper.export()
    state = TrainingState(
        weights={name: tensor.to("cpu", copy=True) for name, tensor in here.weights.items()},
        optimizer={name: tensor.to("cpu", copy=True) for name, tensor in here.optimizer.items()},
        scaler=here.scaler,
    )
    del here, stepper
    run.parked, run.stepper = state, None
    _let_go(run, state)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return state


def _let_go(run: Run, state: TrainingState) -> None:
    """The model's own references to the card."""
    run.model.use_weights(state.weights)
    run.model.forget_totals()


def unpark(run: Run, state: TrainingState, setting: Setting) -> None:
    """Go on where `park` left off, in this setting. The model's weights are the parked ones."""
    stepper = new_stepper(run.model, run.config, setting, run.device, run.dtype, compiled=run.model.compiled)
    stepper.restore(state.optimizer, state.scaler)
    run.parked, run.stepper = None, stepper
