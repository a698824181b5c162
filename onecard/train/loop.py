"""The training loop. Read this first; it is the story of a run from top to bottom.

A run is opened (start.py), then steps follow one another until the horizon: evaluate when due, save
what is worth keeping, take one step over tokens_per_step tokens, write down what happened. Ctrl-C
ends it at the last completed step, from which the next start continues.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from onecard import __version__
from onecard.config import RunConfig
from onecard.data.prefetch import Prefetcher
from onecard.errors import UserError
from onecard.generate.sample import sample_text
from onecard.hardware.machine import peak_flops
from onecard.optim.adamw import export_state
from onecard.optim.schedule import learning_rate
from onecard.run.checkpoint import save_checkpoint
from onecard.run.load import model_tensors
from onecard.run.metrics import Recorder, evaluation_line, iteration_line
from onecard.train.evaluate import evaluate_both
from onecard.train.interrupt import StopRequest
from onecard.train.memory import peak_memory_gib
from onecard.train.pace import Pace
from onecard.train.progress import Display, Status, open_display
from onecard.train.start import Run, open_run
from onecard.train.step import StepResult
from onecard.train.summary import Summary
from onecard.train.tracking import Tracker, open_tracker

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


def train(config: RunConfig) -> Summary:
    """Train to the horizon, or until Ctrl-C."""
    run = open_run(config)
    if config.eval_only:
        return _evaluate_only(run)
    run.directory.create()
    run.directory.write_config(config)
    status = Status(step=run.position.step, last_step=config.max_iters)
    with Recorder(run.directory) as recorder, open_display(status) as display, StopRequest() as stop:
        return Training(run, status, recorder, display, stop).go()


class Training:
    """The loop and what it needs at hand: the run, the files, the screen, the pace."""

    def __init__(
        self, run: Run, status: Status, recorder: Recorder, display: Display, stop: StopRequest
    ) -> None:
        self.run, self.config, self.position = run, run.config, run.position
        self.status, self.recorder, self.display, self.stop = status, recorder, display, stop
        self.tracker: Tracker = open_tracker(run.config, display.say)
        self.peak = peak_flops(run.device, run.dtype)
        self.pace = Pace(
            tokens_per_step=run.config.tokens_per_step,
            eval_interval=run.config.eval_interval,
            last_step=run.config.max_iters,
        )
        self.saved_step = run.saved_step
        self.val_loss_of_step: tuple[int, float] | None = None
        self.summary = Summary(run)
        self._waiting: list[StepResult] = []  # steps taken since the last log line
        self._waiting_seconds = 0.0

    def go(self) -> Summary:
        self._announce()
        with self._prefetcher() as batches:
            while True:
                step = self.position.step
                last = step >= self.config.max_iters
                if (step % self.config.eval_interval == 0 or last) and self.position.evaluated_step != step:
                    self._evaluate(final=last)
                if last or self.stop():
                    break
                self._step(batches)
        return self._finish()

    def _prefetcher(self) -> Prefetcher:
        return Prefetcher(
            self.run.sequences,
            self.position.data,
            step_sequences=self.config.sequences_per_step,
            micro_batch=self.config.batch_size,
            device=self.run.device,
        )

    def _step(self, batches: Prefetcher) -> None:
        """One optimizer step; if Ctrl-C comes inside, the step has not happened."""
        step = self.position.step
        began = time.perf_counter()
        rate = learning_rate(step, self.config)
        micros, next_data = batches.next_step()
        result = self.run.stepper.run(
            micros,
            rate,
            stop=self.stop,
            on_micro=lambda done, total: self.display.inside("micro-batch", done, total),
        )
        if result is None:
            return
        self.position.step, self.position.data = step + 1, next_data
        self._waiting.append(result)
        self.status.step, self.status.learning_rate = step + 1, rate
        due = step % self.config.log_interval == 0 or step + 1 == self.config.max_iters
        if due:
            loss = float(result.loss)  # waits for the GPU, so the time below is that of finished work
        seconds = time.perf_counter() - began
        self._waiting_seconds += seconds
        self.position.seconds += seconds
        if due:
            self._log(step, loss, float(result.grad_norm), rate)

    def _log(self, step: int, loss: float, grad_norm: float, rate: float) -> None:
        """Write down the steps since the last line. Numbered as nanoGPT does: iter 0 is the first."""
        seconds = self._waiting_seconds / len(self._waiting)
        self.pace.steps_took(self._waiting_seconds, len(self._waiting))
        self._waiting, self._waiting_seconds = [], 0.0
        flops = self.run.model.shape.flops_per_token * self.config.tokens_per_step
        mfu = flops / seconds / self.peak if self.peak else None
        self.status.loss, self.status.mfu = loss, mfu
        self.status.tokens_per_second = self.pace.tokens_per_second
        self.status.memory_gib = peak_memory_gib(self.run.device)
        self.status.seconds_left = self.pace.seconds_left(step + 1)
        self.recorder.log(iteration_line(step, loss, seconds, mfu))
        tokens = self.position.data.sequences * self.config.block_size
        self.recorder.metrics(
            step=step, loss=loss, grad_norm=grad_norm, lr=rate, tokens=tokens, step_seconds=round(seconds, 6),
            tokens_per_second=round(self.config.tokens_per_step / seconds, 1), mfu=mfu,
            memory_gib=self.status.memory_gib, seconds=round(self.position.seconds, 3),
        )  # fmt: skip
        self.tracker.log(step, {"train/loss_step": loss, "grad_norm": grad_norm, "lr": rate, "mfu": mfu})
        self.display.logged(self.status, step, seconds)
        if not math.isfinite(loss):
            last = f"from step {self.saved_step}" if self.saved_step >= 0 else "not written yet"
            raise UserError(
                f"the loss became {loss} at step {step}",
                f"gradient norm {grad_norm:g}, learning rate {rate:g}; the last checkpoint is {last}",
                f"try a lower learning rate: --learning_rate={self.config.learning_rate / 2:g}",
                exit_code=1,
            )

    def _evaluate(self, *, final: bool) -> None:
        """Losses on the fixed blocks, a sample, and a checkpoint if it is worth one."""
        began = time.perf_counter()
        step, position = self.position.step, self.position
        losses = evaluate_both(self.run, self.display.inside, self.stop)
        if losses is None:
            return  # interrupted; the loop sees it too
        train_loss, val_loss = losses
        improved = position.best_val_loss is None or val_loss < position.best_val_loss
        position.evaluated_step = step
        position.best_val_loss = val_loss if improved else position.best_val_loss
        position.first_val_loss = val_loss if position.first_val_loss is None else position.first_val_loss
        self.val_loss_of_step = (step, val_loss)
        self.summary.evaluated(train_loss, val_loss)
        self.status.val_loss = val_loss
        self.display.evaluated(self.status, train_loss)
        self.recorder.log(evaluation_line(step, train_loss, val_loss))
        self._show_sample()
        if step > 0 and (improved or self.config.always_save_checkpoint or final):
            try:
                self._save()
            except UserError as error:
                # A full disk must not end a run that is still learning; the last save is not forgiven.
                if final:
                    raise
                self.display.say(str(error), "red")
                self.recorder.event("save failed", step=step, why=error.why)
        seconds = time.perf_counter() - began
        self.pace.evaluation_took(seconds)
        self.recorder.metrics(
            step=step, train_loss=train_loss, val_loss=val_loss, eval_seconds=round(seconds, 3)
        )
        rate = learning_rate(step, self.config)
        self.tracker.log(
            step, {"train/loss": train_loss, "val/loss": val_loss, "lr": rate, "mfu": self.status.mfu}
        )

    def _show_sample(self) -> None:
        run, config = self.run, self.config
        if run.tokenizer is None or not config.sample_tokens or self.position.step == 0:
            return
        try:
            text = sample_text(
                run.model,
                run.tokenizer,
                "",
                config.sample_tokens,
                config.seed,
                device=run.device,
                dtype=run.dtype,
            )
        except UserError as error:
            self.display.say(f"note: no sample text: {error.what}", "yellow")
            return
        self.recorder.sample(self.position.step, text)
        shown = "\n".join("    " + line for line in text.strip("\n").splitlines()[:6])
        self.display.say(shown, "dim")

    def _save(self) -> None:
        step, position = self.position.step, self.position
        evaluated = self.val_loss_of_step
        state = {
            "position": position.to_json(),
            "val_loss": evaluated[1] if evaluated is not None and evaluated[0] == step else None,
            "arch": self.config.arch,
            "shape": self.run.model.shape.to_json(),
            "scaler": self.run.stepper.scaler.state_dict(),
            "dataset": self.config.dataset,
            "tokenizer": self.run.tokenizer.facts() if self.run.tokenizer else None,
            "config": self.config.values(),
            "versions": {"onecard": __version__, "torch": torch.__version__},
        }
        model, optimizer = self.run.model, self.run.stepper.optimizer
        path = save_checkpoint(
            self.run.directory.checkpoints, step, model_tensors(model), export_state(model, optimizer), state
        )
        self.saved_step = step
        self.recorder.event("saved", step=step, path=str(Path(*path.parts[-2:])))

    def _announce(self) -> None:
        config, run = self.config, self.run
        for note in run.notes:
            self.display.say(f"note: {note}", "yellow")
        self.display.say(
            f"{run.model.shape.parameters / 1e6:.2f}M parameters, {run.began}\n"
            f"tokens per iteration will be: {config.tokens_per_step:,}; "
            f"{len(run.sequences.tokens):,} training tokens in data/{config.dataset}; "
            f"{run.device}, {run.dtype}"
        )
        self.recorder.event(
            "resumed" if self.position.step else "started", step=self.position.step, device=run.device,
            dtype=run.dtype, began=run.began, onecard=__version__, torch=torch.__version__, notes=run.notes,
        )  # fmt: skip

    def _finish(self) -> Summary:
        interrupted = self.stop()
        if interrupted:
            self.display.say(
                f"stopping after step {self.position.step:,}; Ctrl-C again quits at once", "yellow"
            )
        if self.position.step > max(self.saved_step, 0):
            self._save()
        self.tracker.close()
        self.recorder.event("interrupted" if interrupted else "finished", step=self.position.step)
        return self.summary.finished(
            self.position, self.pace, interrupted=interrupted, saved_step=self.saved_step
        )


def _evaluate_only(run: Run) -> Summary:
    """eval_only: the losses of the model as it is; nothing is written."""
    status = Status(step=run.position.step)
    summary = Summary(run)
    with open_display(status) as display, StopRequest() as stop:
        for note in run.notes:
            display.say(f"note: {note}", "yellow")
        losses = evaluate_both(run, display.inside, stop)
        if losses is not None:
            status.val_loss = losses[1]
            summary.evaluated(*losses)
            display.evaluated(status, losses[0])
        return summary.evaluated_only(interrupted=losses is None)
