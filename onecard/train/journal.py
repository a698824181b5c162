"""Writing down what happens: to the run's files, to the screen, to a tracking service.

The loop says what it did; here is decided what of it is shown, logged and counted. So the loop reads
as a story, and a new place to write to is one change here.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from onecard import __version__
from onecard.arch.layout import Setting
from onecard.config.dataset import data_dir
from onecard.errors import UserError
from onecard.generate.sample import sample_text
from onecard.hardware.machine import peak_flops
from onecard.language import N_, _, english_of, joined
from onecard.optim.schedule import shown_rate
from onecard.plan.lines import GIB
from onecard.run.metrics import Recorder, bits_per_byte_line, evaluation_line, iteration_line
from onecard.train.evaluate import Evaluation
from onecard.train.fit import in_words
from onecard.train.memory import free_memory_gib, peak_memory_gib
from onecard.train.pace import Pace, duration
from onecard.train.progress import Display, Status, open_display
from onecard.train.summary import Summary
from onecard.train.training_run import TrainingRun
from onecard.train.wandb_log import Tracker, open_tracker

_SAMPLE_LINES = 6
# Where memory runs out, as the loop names what it does.
PLACES = (N_("training"), N_("evaluation"), N_("checkpoint"), N_("sampling"), N_("pause"))


class Journal:
    def __init__(self, run: TrainingRun) -> None:
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
            predicted_seconds=run.fit.predicted_seconds,
        )
        self.summary = Summary(run)
        self._peak = peak_flops(run.device, run.dtype)
        self._unlogged_steps, self._unlogged_seconds = 0, 0.0
        self._evaluation_seconds = 0.0
        self._session_steps, self._session_seconds = 0, 0.0
        self._memory_reported: Setting | None = None  # the last setting whose measured peak was reported

    def __enter__(self) -> Journal:
        self.display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.display.__exit__(*error)
        self.recorder.close()
        self.tracker.close()

    def _event(self, kind: str, **values: Any) -> None:
        """To events.jsonl, which is English."""
        self.recorder.event(kind, **{name: _in_english(value) for name, value in values.items()})

    def _say_note(self, text: str) -> None:
        self.display.say(_("note: {text}").format(text=text), "yellow")

    def opened(self) -> None:
        run, config = self.run, self.run.config
        for note in run.notes:
            self._say_note(note)
        # nanoGPT's line, which programs read (report/reading/formats.py): English in every language.
        self.display.say(
            f"{run.began}\n"
            f"tokens per iteration will be: {config.tokens_per_step:,}; "
            f"{len(run.sequences.tokens):,} training tokens in {data_dir(config.dataset)}; "
            f"{run.device}, {run.dtype}"
        )
        if run.device.startswith("cuda"):
            self._expected()
        if run.position.is_finished(config):
            self.summary.was_finished = True
        elif run.model.compiled:
            self.display.say(_("compiling: the first step takes longer, later runs find it done"))
        self._event(
            "resumed" if run.position.step else "started", step=run.position.step, device=run.device,
            dtype=run.dtype, began=run.began, onecard=__version__, torch=torch.__version__, notes=run.notes,
        )  # fmt: skip

    def _expected(self) -> None:
        """What plan predicts for the run as it begins; the ETA begins with it."""
        choice, steps_left = self.run.fit.choice, self.status.last_step - self.status.step
        text = _("memory: {need:.2f} GiB expected of {there:.2f}, with {setting}")
        self.display.say(
            text.format(
                need=choice.bill.process / GIB, there=choice.question.allowed / GIB, setting=in_words(choice)
            )
        )
        seconds = self.run.fit.predicted_seconds
        if seconds is None or steps_left <= 0:
            return
        text = _("time: {time} expected for {n:,} steps, at {speed:,.0f} tokens/s")
        speed = self.run.config.tokens_per_step / seconds
        self.display.say(text.format(time=duration(steps_left * seconds), n=steps_left, speed=speed))
        self.status.seconds_left = self.pace.seconds_left(self.status.step)
        self.display.doing("")  # the ETA is there from the first second on

    def note(self, notes: list[str]) -> None:
        for note in notes:
            self._say_note(note)
            self._event("note", step=self.run.position.step, text=note)

    def refitted(self, text: str, **facts: Any) -> None:
        """The setting has changed."""
        self._say_note(text)
        self._event("refitted", step=self.run.position.step, text=text, **facts)
        self.summary.refits += 1
        self.summary.changes.append((self.run.position.step, text))
        self.pace.changed(self.run.fit.predicted_seconds)

    def shortage(self, where: str, error: str, answer: str, *, aloud: bool = True) -> None:
        """Memory ran out, and steps go on as they were: what was predicted, measured and done."""
        run = self.run
        if aloud:
            text = _("out of memory in {where}: {answer}").format(where=_(where), answer=answer)
            self._say_note(text)
        measured, free = peak_memory_gib(run.device), free_memory_gib(run.device)
        self._event(
            "out of memory", step=run.position.step, where=where, error=error, answer=answer,
            setting=run.fit.setting.to_json(), predicted_gib=round(run.fit.choice.bill.allocated / GIB, 3),
            measured_gib=measured, free_gib=free,
        )  # fmt: skip

    def gained(self, predicted: float | None, measured: float | None) -> None:
        """What a change for speed has brought."""
        kinds = ((predicted, _("{n:+.1%} predicted")), (measured, _("{n:+.1%} measured")))
        shown = [text.format(n=gain) for gain, text in kinds if gain is not None]
        if shown:
            text = _("speed: {gains}").format(gains=joined(shown))
            self._say_note(text)
            self.summary.changes.append((self.run.position.step, text))
        self._event("gained", step=self.run.position.step, predicted_gain=predicted, measured_gain=measured)

    def paused(self, left: str) -> None:
        out = self.run.config.out_dir
        text = _("paused at step {step:,}: {left}; `{command}` goes on").format(
            step=self.run.position.step, left=left, command=f"onecard train --out_dir={out} --resume-now"
        )
        self.display.say(text, "yellow")
        self.display.doing(_("paused"))
        self._event("paused", step=self.run.position.step, left=left)

    def waits_for_memory(self, why: str) -> None:
        """All is in host memory, because other processes have the card's."""
        text = _("waiting for memory: {why}; going on as soon as there is room").format(why=why)
        self.display.say(text, "yellow")
        self.display.doing(_("waiting for memory"))
        self._event("waits for memory", step=self.run.position.step, why=why)

    def going_on(self) -> None:
        self.display.say(_("going on"), "yellow")
        self.display.doing("")
        self._event("went on", step=self.run.position.step)

    def speed_changed(self, text: str, facts: dict[str, Any]) -> None:
        self._say_note(text)
        self._event("speed changed", step=self.run.position.step, **facts)

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
        """The first time a setting has done whole steps: what it needs, compared with the prediction."""
        run, measured = self.run, self.status.memory_gib
        if measured is None or not run.device.startswith("cuda") or self._memory_reported == run.fit.setting:
            return
        self._memory_reported = run.fit.setting
        predicted, free = run.fit.choice.bill.allocated / GIB, self.status.free_gib
        self.status.predicted_gib = predicted
        text = _(
            "memory: {predicted:.2f} GiB of tensors predicted, {measured:.2f} measured; {free:.2f} GiB free"
        )
        self.display.say(text.format(predicted=predicted, measured=measured, free=free or 0.0))
        self._event(
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
        unlogged = self._unlogged_steps, self._unlogged_seconds
        self.status.seconds_left = self.pace.seconds_left(self.status.step, unlogged)
        self.display.inside("", 1, 1)

    def evaluated(self, step: int, found: Evaluation, rate: float) -> None:
        self.status.val_loss, self.status.val_bpb = found.val_loss, found.val_bpb
        self.summary.evaluated(found)
        self.display.evaluated(self.status, found.train_loss)
        if risen := self.run.position.risen():
            self.note([risen])
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
        """Text to look at; one that the model cannot generate costs a note."""
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
        self.display.say("\n".join(["    " + _("sample:"), *("    " + line for line in lines)]), "dim")
        # The next evaluation comes with another one.
        self.pace.evaluation_took(self._evaluation_seconds + time.perf_counter() - began)

    def no_sample(self, why: str) -> None:
        self._say_note(_("no sample text: {why}").format(why=why))

    def saved(self, step: int, path: Path) -> None:
        self._event("saved", step=step, path=str(Path(*path.parts[-2:])))

    def moved(self, lost: Path, why: str) -> None:
        """The run goes on in another folder; this is its first entry there."""
        self.recorder.move(self.run.directory)
        text = _("the run folder {lost} is lost ({why}); the run goes on in {folder}").format(
            lost=lost, why=why, folder=self.run.directory.path
        )
        self.display.say(_("note: {text}").format(text=text), "red")
        self._event("moved", step=self.run.position.step, lost=str(lost), why=why)

    def waits_for_room(self, seconds: float) -> None:
        out = self.run.directory.path
        text = _("waiting for room in {folder}, and trying again every {n:.0f} s; Ctrl-C ends without saving")
        self.display.say(text.format(folder=out, n=seconds), "yellow")
        self.display.doing(_("waiting for room on the disk"))

    def save_failed(self, step: int, error: UserError) -> None:
        self.display.say(str(error), "red")
        self._event("save failed", step=step, why=error.why)

    def diverged(self, step: int, loss: float, grad_norm: float) -> None:
        self.recorder.metrics(step=step, loss=loss, grad_norm=grad_norm)

    def stopping(self) -> None:
        text = _("stopping after step {step:,}; Ctrl-C again quits at once")
        self.display.say(text.format(step=self.run.position.step), "yellow")

    def finished(self, *, interrupted: bool, saved_step: int) -> Summary:
        position = self.run.position
        self._event("interrupted" if interrupted else "finished", step=position.step)
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
        """Of the last setting, compared with what was measured; nothing where the speed is a CPU's."""
        if not self.run.device.startswith("cuda"):
            return {}
        choice = self.run.fit.choice
        return {
            "predicted_gib": choice.bill.allocated / GIB, "measured_gib": peak_memory_gib(self.run.device),
            "predicted_tokens_per_second": choice.tokens_per_s or None,
            "measured_tokens_per_second": self.pace.measured,
        }  # fmt: skip


def _in_english(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [english_of(each) for each in value]
    return english_of(value)
