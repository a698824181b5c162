"""Writing down what happens: to the run's files, to the screen, to a tracking service.

The loop says what it did; here is decided what of it is shown, logged and counted. So the loop reads
as a story, and a new place to write to is one change here.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from onecard import __version__
from onecard.arch.layout import Setting
from onecard.config.dataset import data_dir
from onecard.errors import UserError
from onecard.generate.sample import sample_text
from onecard.hardware.machine import peak_flops
from onecard.optim.schedule import shown_rate
from onecard.plan.lines import GIB
from onecard.run.metrics import Recorder, bits_per_byte_line, evaluation_line, iteration_line
from onecard.train.evaluate import Evaluation
from onecard.train.memory import free_memory_gib, peak_memory_gib
from onecard.train.pace import Pace
from onecard.train.progress import Display, Status, open_display
from onecard.train.start import Run
from onecard.train.summary import Summary
from onecard.train.tracking import Tracker, open_tracker

_SAMPLE_LINES = 6


class Journal:
    def __init__(self, run: Run) -> None:
        config = run.config
        self.run = run
        rate = shown_rate(run.position.step, config)
        self.status = Status(step=run.position.step, last_step=config.max_iters, learning_rate=rate)
        self.display: Display = open_display(self.status)
        self.recorder = Recorder(run.directory, self.display.say)
        self.tracker: Tracker = open_tracker(config, self.display.say)
        self.pace = Pace(
            tokens_per_step=config.tokens_per_step,
            eval_interval=config.eval_interval,
            last_step=config.max_iters,
        )
        self.summary = Summary(run)
        self._peak = peak_flops(run.device, run.dtype)
        self._unlogged_steps, self._unlogged_seconds = 0, 0.0
        self._evaluation_seconds = 0.0
        self._session_steps, self._session_seconds = 0, 0.0
        self._memory_told: Setting | None = None  # the last setting whose measured peak was told

    def __enter__(self) -> Journal:
        self.display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.__exit__(kind, error, trace)
        self.recorder.close()
        self.tracker.close()

    def opened(self) -> None:
        run, config = self.run, self.run.config
        for note in run.notes:
            self.display.say(f"note: {note}", "yellow")
        self.display.say(
            f"{run.began}\n"
            f"tokens per iteration will be: {config.tokens_per_step:,}; "
            f"{len(run.sequences.tokens):,} training tokens in {data_dir(config.dataset)}; "
            f"{run.device}, {run.dtype}"
        )
        if run.device.startswith("cuda"):
            choice = run.fit.choice
            need, there = choice.bill.process / 2**30, choice.question.allowed / 2**30
            self.display.say(f"memory: {need:.2f} GiB expected of {there:.2f}, with {choice.words}")
        if run.position.is_finished(config):
            self.summary.was_finished = True
        elif run.model.compiled:
            self.display.say("compiling: the first step takes longer, later runs find it done")
        self.recorder.event(
            "resumed" if run.position.step else "started", step=run.position.step, device=run.device,
            dtype=run.dtype, began=run.began, onecard=__version__, torch=torch.__version__, notes=run.notes,
        )  # fmt: skip

    def tell(self, notes: list[str]) -> None:
        for note in notes:
            self.display.say(f"note: {note}", "yellow")
            self.recorder.event("note", step=self.run.position.step, text=note)

    def refitted(self, text: str, **facts: Any) -> None:
        """How steps are carried out has changed."""
        self.display.say(f"note: {text}", "yellow")
        self.recorder.event("refitted", step=self.run.position.step, text=text, **facts)
        self.summary.refits += 1
        self.summary.changes.append((self.run.position.step, text))
        self.pace.changed()

    def shortage(self, where: str, error: str, answer: str, *, aloud: bool = True) -> None:
        """Memory ran out, and steps go on as they were: what was predicted, measured and done."""
        run = self.run
        if aloud:
            self.display.say(f"note: out of memory in {where}: {answer}", "yellow")
        measured, free = peak_memory_gib(run.device), free_memory_gib(run.device)
        self.recorder.event(
            "out of memory", step=run.position.step, where=where, error=error, answer=answer,
            setting=run.fit.setting.to_json(), predicted_gib=round(run.fit.choice.bill.allocated / GIB, 3),
            measured_gib=measured, free_gib=free,
        )  # fmt: skip

    def gained(self, predicted: float | None, measured: float | None) -> None:
        """What a change for speed has brought."""
        shown = [f"{gain:+.1%} {how}" for gain, how in ((predicted, "predicted"), (measured, "measured"))
                 if gain is not None]  # fmt: skip
        if shown:
            text = f"speed: {', '.join(shown)}"
            self.display.say(f"note: {text}", "yellow")
            self.summary.changes.append((self.run.position.step, text))
        self.recorder.event(
            "gained", step=self.run.position.step, predicted_gain=predicted, measured_gain=measured
        )

    def paused(self, left: str) -> None:
        out = self.run.config.out_dir
        self.display.say(
            f"paused at step {self.run.position.step:,}: {left}; "
            f"`onecard train --out_dir={out} --resume-now` goes on", "yellow",
        )  # fmt: skip
        self.display.doing("paused")
        self.recorder.event("paused", step=self.run.position.step, left=left)

    def waits_for_memory(self, why: str) -> None:
        """All is in host memory, because somebody else has the card's."""
        self.display.say(f"waiting for memory: {why}; going on as soon as there is room", "yellow")
        self.display.doing("waiting for memory")
        self.recorder.event("waits for memory", step=self.run.position.step, why=why)

    def going_on(self) -> None:
        self.display.say("going on", "yellow")
        self.display.doing("")
        self.recorder.event("went on", step=self.run.position.step)

    def speed_changed(self, text: str, facts: dict[str, Any]) -> None:
        self.display.say(f"note: {text}", "yellow")
        self.recorder.event("speed changed", step=self.run.position.step, **facts)

    @property
    def session(self) -> tuple[int, float]:
        """Steps taken by this process, and the seconds they took."""
        return self._session_steps, self._session_seconds

    def worked(self, seconds: float, steps: int = 0) -> None:
        """Time spent training, and the steps taken in it."""
        self._unlogged_seconds += seconds
        self._session_seconds += seconds
        self._unlogged_steps += steps
        self._session_steps += steps
        self.run.position.seconds += seconds

    def stepped(self, step: int, loss: float, grad_norm: float, rate: float) -> None:
        """One line for the steps since the last one. Numbered as nanoGPT does: iter 0 is the first."""
        run, status = self.run, self.status
        seconds = self._unlogged_seconds / self._unlogged_steps
        self.pace.steps_took(self._unlogged_seconds, self._unlogged_steps)
        self._unlogged_steps, self._unlogged_seconds = 0, 0.0
        tokens_per_step = run.config.tokens_per_step
        flops = run.model.shape.flops_per_token * tokens_per_step
        mfu = flops / seconds / self._peak if self._peak else None
        status.loss, status.mfu = loss, mfu
        status.tokens_per_second = self.pace.tokens_per_second
        status.memory_gib, status.free_gib = peak_memory_gib(run.device), free_memory_gib(run.device)
        self._measured_memory(step)
        status.seconds_left = self.pace.seconds_left(step + 1)
        self.recorder.log(iteration_line(step, loss, seconds, mfu))
        self.recorder.metrics(
            step=step, loss=loss, grad_norm=grad_norm, lr=rate,
            tokens=run.position.data.sequences * run.config.block_size, step_seconds=round(seconds, 6),
            tokens_per_second=round(tokens_per_step / seconds, 1), mfu=mfu,
            memory_gib=status.memory_gib, seconds=round(run.position.seconds, 3),
        )  # fmt: skip
        self.tracker.log(step, {"train/loss_step": loss, "grad_norm": grad_norm, "lr": rate, "mfu": mfu})
        self.display.logged(status, step, seconds)

    def _measured_memory(self, step: int) -> None:
        """The first time a setting has been through whole steps: what it needs beside what was predicted."""
        run, measured = self.run, self.status.memory_gib
        if measured is None or not run.device.startswith("cuda") or self._memory_told == run.fit.setting:
            return
        self._memory_told = run.fit.setting
        predicted, free = run.fit.choice.bill.allocated / GIB, self.status.free_gib
        self.status.predicted_gib = predicted
        self.display.say(
            f"memory: {predicted:.2f} GiB of tensors predicted, {measured:.2f} measured; {free:.2f} GiB free"
        )
        self.recorder.event(
            "memory", step=step, setting=run.fit.setting.to_json(), predicted_gib=round(predicted, 3),
            measured_gib=round(measured, 3), free_gib=round(free or 0.0, 3),
        )  # fmt: skip

    def glance(self, loss: float) -> None:
        """Between two log lines, for a person who watches; nothing is written."""
        if not self.display.watched:
            return
        self.status.loss = loss
        self.status.tokens_per_second = (
            self.run.config.tokens_per_step * self._unlogged_steps / self._unlogged_seconds
        )
        self.status.seconds_left = self.pace.seconds_left(self.status.step)
        self.display.inside("", 1, 1)

    def evaluated(self, step: int, found: Evaluation, rate: float) -> None:
        self.status.val_loss, self.status.val_bpb = found.val_loss, found.val_bpb
        self.summary.evaluated(found)
        self.display.evaluated(self.status, found.train_loss)
        if risen := self.run.position.risen():
            self.tell([risen])
        self.recorder.log(evaluation_line(step, found.train_loss, found.val_loss))
        if found.val_bpb is not None:
            self.recorder.log(bits_per_byte_line(step, found.val_bpb))
        self.recorder.metrics(
            step=step, train_loss=found.train_loss, val_loss=found.val_loss,
            train_bpb=found.train_bpb, val_bpb=found.val_bpb, eval_seconds=round(found.seconds, 3),
        )  # fmt: skip
        self.tracker.log(
            step,
            {
                "train/loss": found.train_loss, "val/loss": found.val_loss,
                "train/bpb": found.train_bpb, "val/bpb": found.val_bpb, "lr": rate, "mfu": self.status.mfu,
            },
        )  # fmt: skip
        # What the next evaluation will take: no compilation in it.
        self._evaluation_seconds = found.steady_seconds
        self.pace.evaluation_took(found.steady_seconds)

    def sample(self, step: int) -> None:
        """Text to look at; one that the model cannot write costs a note."""
        run, config, began = self.run, self.run.config, time.perf_counter()
        if run.tokenizer is None or not config.sample_tokens or step == 0 or not run.fit.may_sample():
            return
        try:
            text = sample_text(run.model, run.tokenizer, "\n", config.sample_tokens, config.seed)
        except UserError as error:
            self.no_sample(error.what)
            return
        self.recorder.sample(step, text)
        lines = text.strip("\n").splitlines()[:_SAMPLE_LINES]
        self.display.say("\n".join(["    sample:", *("    " + line for line in lines)]), "dim")
        # The next evaluation comes with another one.
        self.pace.evaluation_took(self._evaluation_seconds + time.perf_counter() - began)

    def no_sample(self, why: str) -> None:
        self.display.say(f"note: no sample text: {why}", "yellow")

    def saved(self, step: int, path: Path) -> None:
        self.recorder.event("saved", step=step, path=str(Path(*path.parts[-2:])))

    def moved(self, lost: Path, why: str) -> None:
        """The run goes on in another folder; this is its first entry there."""
        self.recorder.move(self.run.directory)
        self.display.say(
            f"note: the run folder {lost} is lost ({why}); the run goes on in {self.run.directory.path}",
            "red",
        )
        self.recorder.event("moved", step=self.run.position.step, lost=str(lost), why=why)

    def waits_for_room(self, seconds: float) -> None:
        out = self.run.directory.path
        self.display.say(
            f"waiting for room in {out}, and trying again every {seconds:.0f} s; Ctrl-C ends without saving",
            "yellow",
        )
        self.display.doing("waiting for room on the disk")

    def save_failed(self, step: int, error: UserError) -> None:
        self.display.say(str(error), "red")
        self.recorder.event("save failed", step=step, why=error.why)

    def diverged(self, step: int, loss: float, grad_norm: float) -> None:
        self.recorder.metrics(step=step, loss=loss, grad_norm=grad_norm)

    def stopping(self) -> None:
        self.display.say(
            f"stopping after step {self.run.position.step:,}; Ctrl-C again quits at once", "yellow"
        )

    def finished(self, *, interrupted: bool, saved_step: int) -> Summary:
        position = self.run.position
        self.recorder.event("interrupted" if interrupted else "finished", step=position.step)
        tokens = self._session_steps * self.run.config.tokens_per_step
        return self.summary.finished(
            position,
            tokens_per_second=tokens / self._session_seconds if self._session_seconds else None,
            continued=self._session_steps < position.step,
            interrupted=interrupted,
            saved_step=saved_step,
            predicted=self._predicted(),
        )

    def _predicted(self) -> dict[str, float | None]:
        """Of the last setting, beside what was measured; nothing where the speed is a CPU's."""
        if not self.run.device.startswith("cuda"):
            return {}
        choice = self.run.fit.choice
        return {
            "predicted_gib": choice.bill.allocated / GIB, "measured_gib": peak_memory_gib(self.run.device),
            "predicted_tokens_per_second": choice.tokens_per_s or None,
            "measured_tokens_per_second": self.pace.measured,
        }  # fmt: skip
