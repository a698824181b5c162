"""The training loop. Read this first; it is the story of a run from top to bottom.

A run is opened (start.py), then steps follow one another until the horizon: evaluate when due, save
what is worth keeping, take one step over tokens_per_step tokens, write down what happened
(journal.py). Ctrl-C ends it at the last completed step, from which the next start continues.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack

from onecard.config.run import RunConfig
from onecard.data.prefetch import Prefetcher
from onecard.errors import first_line
from onecard.hardware.machine import resolve_device
from onecard.language import _
from onecard.optim.schedule import rates, shown_rate
from onecard.run.checkpoint import SaveError
from onecard.run.pause import PauseRequest
from onecard.train.evaluate import evaluate_both
from onecard.train.evaluate_only import evaluate_only
from onecard.train.failures import DivergedError, diverged, explained, is_beyond_recovery, not_a_number
from onecard.train.interrupt import StopRequest
from onecard.train.journal import Journal
from onecard.train.memory import is_out_of_memory, out_of_memory
from onecard.train.probes import probes
from onecard.train.refit import Refit
from onecard.train.saving import Saver, prepare_folder
from onecard.train.start import open_run
from onecard.train.step import Stepper, StepResult, read
from onecard.train.summary import Summary
from onecard.train.training_run import TrainingRun

# Figures are this old at most, however rare the log lines are.
GLANCE_SECONDS = 1.0


def train(config: RunConfig) -> Summary:
    """Train to the horizon, or until Ctrl-C."""
    try:
        run = open_run(config)
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(config, resolve_device(config.device), opening=error) from error
        raise
    if config.eval_only:
        return evaluate_only(run)
    config = run.config  # with what a continued run had set
    with ExitStack() as claims:
        set_aside = claims.enter_context(run.directory.claimed(fresh=config.fresh))
        pause = PauseRequest(run.directory)  # first: who asks now is answered by this run, not the last
        run.look_again()
        if set_aside is not None:
            run.notes.append(_("the earlier run is kept in {folder}").format(folder=set_aside))
        prepare_folder(run)
        with Journal(run) as journal, StopRequest() as stop:
            return Training(run, journal, stop, pause, Saver(run, journal, stop, claims)).go()


class Training:
    """One run, from where it is to its horizon."""

    def __init__(
        self, run: TrainingRun, journal: Journal, stop: StopRequest, pause: PauseRequest, saver: Saver
    ) -> None:
        assert run.stepper is not None, "opened for evaluation only"
        self.run, self.position = run, run.position
        self.journal, self.stop, self.pause, self.saver = journal, stop, pause, saver
        self.refit = Refit(run, journal)
        self._unproved = probes(run, journal) if run.fit.enabled else []
        self._keep_step = self._sample_step = -1  # what an evaluation has left to do at this step
        self._glanced = time.perf_counter()
        self._in_flight: list[tuple[int, StepResult]] = []  # steps the GPU may still be working on

    def go(self) -> Summary:
        try:
            self.journal.opened()
            finished = False
            while not finished:
                # Opened anew whenever the setting has changed: with it the size of a micro-batch may have.
                with self._prefetcher() as batches:
                    finished = self._until_changed(batches)
            return self._finish()
        except DivergedError:
            raise  # what was computed since the last checkpoint is not worth keeping
        except Exception as error:
            lost = is_beyond_recovery(error)
            if not isinstance(error, SaveError) and (self.run.host_copy is not None or not lost):
                self._rescue(card_lost=lost)
            explanation = explained(error, self.run, self.saver.saved_step)
            if explanation is error:
                raise
            raise explanation from error
        finally:
            self.pause.ended()
            self.run.identity.stop()

    def _until_changed(self, batches: Prefetcher) -> bool:
        """Step after step, to the end (True) or until the setting has changed."""
        while True:
            step, last = self.position.step, self.position.step >= self.config.max_iters
            due, doing = step % self.config.eval_interval == 0 or last, "training"
            try:
                if due and self.position.evaluated_step != step:
                    doing = "evaluation"
                    self._evaluate()
                if self._keep_step == step:
                    doing = "checkpoint"
                    self.saver.keep()
                    self._keep_step = -1
                    self._watch()
                if self._sample_step == step:
                    doing = "sampling"
                    self.journal.sample(step)
                    self._sample_step = -1
                called_off = due and self.position.evaluated_step != step
                if self.stop() or (last and not called_off):
                    return True
                if self.stop.asked_to_save():
                    self.saver.as_asked(self._save_settled)
                if self.pause():
                    doing = "pause"
                    self.refit.pause(self.pause, self.stop, self._save_settled)
                    return self.stop()
                if called_off:
                    continue  # for a pause that is no longer requested
                while self._unproved:
                    doing, probe = self._unproved[0]
                    probe()
                    del self._unproved[0]
                doing = "training"
                # What was called off is done again from its first sequence on: by other batches.
                if not self._step(batches) or self.refit.climb():
                    return False
            except Exception as error:
                again = self.refit.after(error, doing)
                if not again and not self.refit.wait(error, self.pause, self.stop, self._save_settled):
                    raise
                return self.stop()

    def _called_off(self) -> bool:
        """What is being done is not to be finished; the step will be done again, or never."""
        return self.stop() or self.pause()

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def stepper(self) -> Stepper:
        assert self.run.stepper is not None
        return self.run.stepper

    def _prefetcher(self) -> Prefetcher:
        return Prefetcher(
            self.run.sequences,
            self.position.data,
            step_sequences=self.config.sequences_per_step,
            micro_batch=self.run.fit.setting.micro_batch,
            device=self.run.device,
        )

    def _step(self, batches: Prefetcher) -> bool:
        """One optimizer step. False: Ctrl-C or a pause came inside, and the step has not happened."""
        step, status = self.position.step, self.journal.status
        began = time.perf_counter()
        rate = shown_rate(step, self.config)
        micros, next_data = batches.next_step()
        result = self.stepper.run(
            micros,
            rates(step, self.config),
            stop=self._called_off,
            on_micro=lambda done, total: self.journal.display.inside(_("micro-batch"), done, total),
        )
        if result is None:
            return False
        self.position.step, self.position.data = step + 1, next_data
        status.step, status.learning_rate = step + 1, rate
        self._in_flight.append((step, result))
        self.journal.worked(time.perf_counter() - began, steps=1)
        if step % self.config.log_interval == 0 or step + 1 == self.config.max_iters:
            self._settle()
            self.journal.note(self.stepper.notes())
            self.journal.stepped(step, float(result.loss), float(result.grad_norm), rate)
            self._glanced = time.perf_counter()
            self._watch()
        elif time.perf_counter() - self._glanced > GLANCE_SECONDS:
            # A person who watches is shown them; what is slow must not stay unnoticed either way.
            self._settle()
            self.journal.glance(float(result.loss))
            self._glanced = time.perf_counter()
        return True

    def _settle(self) -> None:
        """Wait for the steps in flight, book their time to them, and end a run that has diverged.

        Before every log line, evaluation and checkpoint: their figures must be those of finished
        work, and weights that are no longer numbers must not push good checkpoints out.
        """
        if not self._in_flight:
            return
        began = time.perf_counter()
        figures = read([result for _step, result in self._in_flight])
        self.journal.worked(time.perf_counter() - began)
        for (step, _result), (loss, norm) in zip(self._in_flight, figures, strict=True):
            if what := not_a_number(loss, norm, self.run.dtype):
                self.journal.diverged(step, loss, norm)
                raise self._diverged(_("{what} at step {step:,}").format(what=what, step=step))
        self._in_flight = []
        self.refit.settled()

    def _diverged(self, what: str) -> DivergedError:
        return diverged(what, self.config, self.journal.status.learning_rate, self.saver.saved_step)

    def _evaluate(self) -> None:
        """Losses on the fixed blocks."""
        self._settle()
        step, position = self.position.step, self.position
        self.stepper.release()
        self.run.fit.evaluate_more(step)
        found = evaluate_both(self.run, self.journal.display.inside, self._called_off)
        if found is None:
            return  # the loop sees why
        if not math.isfinite(found.val_loss):
            raise self._diverged(
                _("the validation loss is {value} at step {step:,}").format(
                    value=str(found.val_loss), step=step
                )
            )
        position.evaluated(found)
        self.saver.evaluated = (step, found.val_loss)
        self._sample_step = step
        self._keep_step = step if step > 0 else -1
        self.journal.evaluated(step, found, shown_rate(step, self.config))

    def _save_settled(self) -> None:
        self._settle()
        if not self.saver.is_saved:
            self.saver.write()

    def _watch(self) -> None:
        """Is it the run's own data, and can what is learned still be kept? Asked with every log line
        and checkpoint."""
        self.run.identity.check()
        if why := self.saver.why_lost():
            self.pause.ended()
            self.saver.move(why)
            self.pause = PauseRequest(self.run.directory)

    def _finish(self) -> Summary:
        self.pause.ending()
        interrupted = self.stop()
        if interrupted:
            self.journal.stopping()
        self._settle()
        self.saver.last()
        return self.journal.finished(interrupted=interrupted, saved_step=self.saver.saved_step)

    def _rescue(self, *, card_lost: bool) -> None:
        """Something failed: keep the steps since the last checkpoint if they are whole."""
        stepper = self.run.stepper  # None: it failed between two settings, and there is a host copy
        if self.saver.is_saved or (stepper is not None and stepper.updating):
            return
        say = self.journal.display.say
        try:
            if card_lost:
                # The last losses are gone with it; whether the run had diverged, the weights tell.
                self._in_flight = []
                if self.run.host_copy is not None and not self.run.host_copy.is_finite():
                    raise self._diverged(_("the weights are no longer numbers"))
            self._settle()
            self.saver.write()
            say(_("saved step {step:,} before giving up").format(step=self.position.step), "yellow")
        except Exception as error:  # the first failure is the one to raise; this one is only shown
            text = _("step {step:,} could not be saved: {error}")
            say(text.format(step=self.position.step, error=first_line(error)), "red")
