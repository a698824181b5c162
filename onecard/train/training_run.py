"""TrainingRun: everything the loop works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from onecard.config.run import RunConfig
from onecard.data.batches import FixedBlocks, Sequences
from onecard.data.identity import Identity
from onecard.data.tokenizer import Tokenizer
from onecard.errors import UserError
from onecard.language import _
from onecard.model.decoder import Decoder
from onecard.run.checkpoint import TrainingState
from onecard.run.directory import RunDirectory
from onecard.run.stored import Checkpoint, list_checkpoints
from onecard.train.fit import Fit
from onecard.train.position import Position
from onecard.train.step import Stepper
from onecard.train.target_text import TargetText


@dataclass
class TrainingRun:
    """Everything the loop works with, ready to train."""

    config: RunConfig
    directory: RunDirectory
    device: str
    dtype: str
    model: Decoder
    fit: Fit  # the present setting, and those that could come next
    stepper: Stepper | None  # None where the model is only evaluated, and while there is a host copy
    sequences: Sequences
    identity: Identity  # of the tokens there are with those the run began with
    evaluation: dict[str, FixedBlocks]
    text: dict[str, TargetText]  # by split; empty where nothing says which tokenizer wrote the data
    tokenizer: Tokenizer | None
    position: Position
    began: str  # from what: for the person, and the record
    saved_step: int  # the checkpoint of this run that is on disk, -1 for none
    damaged: list[Checkpoint]  # to be quarantined once the folder is ours
    notes: list[str] = field(default_factory=list)
    host_copy: TrainingState | None = None  # of all that is trained, while it is not on the card
    newest_there: int = -1  # the newest checkpoint in the folder when the run was opened
    trained: RunConfig | None = None  # what the steps so far were taken with; None where there are none

    def look_again(self) -> None:
        """Now that the folder is ours: a job at work when this one was opened may have saved since."""
        newest = newest_step(self.directory)
        if newest > self.newest_there:
            raise UserError(
                _("another job has saved step {step:,} in {folder} since this one was started").format(
                    step=newest, folder=self.directory.path
                ),
                _("it has just ended; this one would begin from before that"),
                _("start it again: it goes on from there"),
                exit_code=1,
            )

    def stays_as_it_is(self) -> bool:
        """Is there nothing to train? What it was trained with still describes it: written down now, a smaller
        max_iters would make the command it was begun with another experiment."""
        past_its_end = self.position.step >= self.config.max_iters
        # Where its losses count no more, it goes over to other data or blocks, and its checkpoint with it.
        same_terms = self.position.evaluated_step >= 0
        return past_its_end and same_terms and self.saved_step >= 0 and self.directory.config_path.is_file()


def newest_step(directory: RunDirectory) -> int:
    return max((checkpoint.step for checkpoint in list_checkpoints(directory.checkpoints)), default=-1)
