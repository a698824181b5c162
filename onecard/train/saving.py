"""Where a run's checkpoints go, and what happens when they cannot be written.

A full disk is waited for, a folder that is gone is noticed: nobody should train for days and have nothing
of it. With --fallback_dir a run goes on in another folder.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from onecard import __version__
from onecard.errors import UserError
from onecard.language import _, joined
from onecard.plan.bill import checkpoint_bytes
from onecard.run.checkpoint import SaveError, check_room, save_checkpoint
from onecard.run.directory import RunDirectory
from onecard.run.metrics import rewind
from onecard.run.stored import quarantine, sweep
from onecard.train.failures import DivergedError
from onecard.train.first_setting import plan_of
from onecard.train.interrupt import StopRequest
from onecard.train.journal import Journal
from onecard.train.retries import patiently
from onecard.train.training_run import TrainingRun

# Of a write: the disk is there and full. Of anything else it is gone, or nobody may write to it any more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, None)
_MOVED = "--fallback_dir"  # where the run's out_dir comes from then
_TRY_EVERY, _REPORT_EVERY = 10.0, 600.0  # seconds, while a run waits for room


class Saver:
    """Writes a run's checkpoints into its folder, or into another one when that is lost."""

    def __init__(self, run: TrainingRun, journal: Journal, stop: StopRequest, claims: ExitStack) -> None:
        """`claims` holds the locks of the run's folders until the run ends."""
        self.run, self.journal, self._stop, self._claims = run, journal, stop, claims
        self.saved_step = run.saved_step
        self.evaluated: tuple[int, float] | None = None  # the step of the last evaluation, and its loss
        self._disk_error: SaveError | None = None  # of the last checkpoint

    @property
    def is_saved(self) -> bool:
        return self.run.position.step <= max(self.saved_step, 0)

    def write(self) -> None:
        """A checkpoint of now. What led to it is on the disk before it is."""
        run, step, config = self.run, self.run.position.step, self.run.config
        run.identity.check(wait=True)  # what was learned from other data takes no checkpoint's place
        marks = run.identity.marks()
        run.position.data_mark, run.position.val_mark = marks["train"], marks["val"]
        if why := run.directory.why_lost():  # what has its name now may be another run's
            what = _("the checkpoint of step {step:,} could not be written to {folder}").format(
                step=step, folder=run.directory.checkpoints
            )
            raise SaveError(what, why, "", errno.ENOENT)
        evaluated = self.evaluated
        state = {
            "position": run.position.to_json(),
            "val_loss": evaluated[1] if evaluated is not None and evaluated[0] == step else None,
            "arch": run.model.shape.arch,
            "shape": run.model.shape.to_json(),
            "dataset": config.dataset,
            "tokenizer": run.tokenizer.facts() if run.tokenizer else None,
            "config": config.values(),
            "set_by_user": dict(config.origins),
            "versions": {"onecard": __version__, "torch": torch.__version__},
        }
        self.journal.recorder.flush()
        assert run.host_copy is not None or run.stepper is not None
        training = run.host_copy or run.stepper.export()  # type: ignore[union-attr]
        path = save_checkpoint(run.directory.checkpoints, step, training, state)
        self.saved_step = step
        self.journal.saved(step, path)
        self.journal.recorder.flush()

    def keep(self) -> None:
        """Save at an evaluation. A full disk, or host memory that is short, must not end a run that is still
        learning: a message says so, and the next evaluation saves again."""
        self._disk_error = None
        try:
            patiently(self.write, self.run, self.journal)
        except UserError as error:
            if isinstance(error, SaveError) and error.errno not in _FULL:
                self._disk_error = error
            self.journal.save_failed(self.run.position.step, error)

    def as_asked(self, save: Callable[[], None]) -> None:
        """Save because somebody asked, by SIGUSR1. Whoever asks gets an answer in any case: that it is there,
        that it was there, or why it could not be written, which ends no run that is still learning."""
        step, say = self.run.position.step, self.journal.display.say
        if self.is_saved:
            there = _("there is no step to save yet, asked by SIGUSR1")
            if step:
                there = _("step {step:,} is saved already, asked by SIGUSR1").format(step=step)
            say(there, "yellow")
            return
        try:
            patiently(save, self.run, self.journal)
            say(_("saved step {step:,}, as asked by SIGUSR1").format(step=step), "yellow")
        except DivergedError:
            raise  # which is one
        except UserError as error:
            self.journal.save_failed(step, error)

    def last(self) -> None:
        """The save at the end. Room is worth waiting for: a signal ends that, and what is not saved is lost.
        A folder that is gone does not come back."""
        reported, waited, known = -_REPORT_EVERY, 0.0, self._stop.count
        while not self.is_saved:
            try:
                patiently(self.write, self.run, self.journal)
            except SaveError as error:
                why = self.run.directory.why_lost()
                if not why and (error.errno not in _FULL or self.run.config.fallback_dir is not None):
                    why = error.why.partition(";")[0]
                if why:
                    self.move(why)
                    continue
                if waited - reported >= _REPORT_EVERY:
                    reported = waited
                    self.journal.save_failed(self.run.position.step, error)
                    self.journal.waits_for_room(_TRY_EVERY)
                if self._stop.wait(_TRY_EVERY, since=known):
                    raise
                waited += _TRY_EVERY

    def why_lost(self) -> str:
        """Why nothing can be saved in the run's folder any more; empty where it can. It costs a look at the
        disk, and is asked with every log line."""
        if why := self.run.directory.why_lost():
            return why
        error = self._disk_error or self.journal.recorder.disk_error
        return "" if error is None else str(error.why if isinstance(error, UserError) else error)

    def move(self, why: str) -> None:
        """Go on in the other folder, with all that can still be read of this one; UserError without one."""
        run, config, lost = self.run, self.run.config, self.run.directory
        if config.fallback_dir is None:
            renamed = lost.renamed_to()
            hint = _("a run with a second folder goes on there: --fallback_dir=FOLDER, best on another disk")
            if renamed is not None:  # what was learned since the last checkpoint is saved there
                run.directory = renamed
                command = f"onecard train --out_dir={renamed.path}"
                hint = joined([_("go on there: {command}").format(command=command), hint], "\n")
            what = _("the run folder {folder} is lost: {why}").format(folder=lost.path, why=why)
            raise UserError(what, "", hint, exit_code=1)
        try:
            new = RunDirectory(config.fallback_dir)
            self._claims.enter_context(new.claimed(fresh=False))
        except UserError as error:
            why = joined([why, f"--fallback_dir: {error.what}"], "; ")
            what = _("the run folder {folder} is lost").format(folder=lost.path)
            raise UserError(what, why, error.hint, exit_code=1) from None
        origins = {name: origin for name, origin in config.origins.items() if name != "fallback_dir"}
        run.config = replace(
            config, out_dir=config.fallback_dir, fallback_dir=None, origins={**origins, "out_dir": _MOVED}
        )
        run.directory, self._disk_error = new, None
        new.write_config(run.config)
        new.write_plan(plan_of(run.fit, on_card=run.device.startswith("cuda")))
        self.journal.moved(lost.path, why)
        patiently(self.write, run, self.journal)


def prepare_folder(run: TrainingRun) -> None:
    """Once the folder is this run's alone: what a kill left is cleared away, lines of steps that will be done
    again are dropped, and there is room for what will be saved."""
    directory, position, config = run.directory, run.position, run.config
    sweep(directory.checkpoints)
    for damaged in run.damaged:
        run.notes.append(_("a damaged checkpoint is quarantined: {path}").format(path=quarantine(damaged)))
    if run.stays_as_it_is():
        return
    every, last = config.eval_interval, config.max_iters
    saves = last // every - position.step // every + (1 if last % every and last > position.step else 0)
    each = checkpoint_bytes(run.model.shape, run.fit.setting, config.by_muon)
    check_room(directory.checkpoints, each, max(0, saves))
    directory.write_config(config)
    directory.write_plan(plan_of(run.fit, on_card=run.device.startswith("cuda")))
    rewind(directory, position.step, evaluated=position.evaluated_step == position.step)
