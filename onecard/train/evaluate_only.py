"""eval_only: the losses of a model as it is."""

from __future__ import annotations

from onecard.language import _
from onecard.train.evaluate import at_a_time, evaluate_both
from onecard.train.interrupt import StopRequest
from onecard.train.memory import forget, is_out_of_memory, out_of_memory
from onecard.train.progress import Status, open_display
from onecard.train.summary import Summary
from onecard.train.training_run import TrainingRun


def evaluate_only(run: TrainingRun) -> Summary:
    """Nothing is written."""
    status = Status(step=run.position.step)
    summary = Summary(run)
    with open_display(status) as display, StopRequest() as stop:
        for note in run.notes:
            display.say(_("note: {text}").format(text=note), "yellow")
        while True:
            try:
                found = evaluate_both(run, display.inside, stop)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if not run.fit.evaluate_less(run.position.step):
                    raise out_of_memory(run.config, run.device) from error
                forget(error)
                n = run.fit.evaluation_batch
                note = _("out of memory: {answer}").format(answer=at_a_time(n))
                display.say(_("note: {text}").format(text=note), "yellow")
        if stop.asked_to_save():
            note = _("asked by SIGUSR1 to save: an evaluation has nothing to save")
            display.say(_("note: {text}").format(text=note), "yellow")
        if found is not None:
            status.val_loss, status.val_bpb = found.val_loss, found.val_bpb
            summary.evaluated(found)
            display.evaluated(status, found.train_loss)
        return summary.evaluated_only(interrupted=found is None)
