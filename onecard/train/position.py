"""How far a run has come, and whether what it goes on with is what it began with."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from onecard.config.dataset import data_dir
from onecard.config.run import RunConfig
from onecard.convert.nanogpt import NanoGPTCheckpoint
from onecard.data.batches import DataState, Sequences
from onecard.data.bins import TokenFile
from onecard.data.identity import Mark
from onecard.errors import UserError
from onecard.language import _
from onecard.run.directory import config_of
from onecard.run.state import is_count, is_number_or_none
from onecard.run.stored import Checkpoint
from onecard.train.evaluate import Evaluation

# How far a loss has to be above its best for it to be called risen: in nats, and as a part of it. Spikes and
# re-warmed rates stay below that for long; a run that has broken down is at 2 to 50 times its best.
_RISE, _RISE_SHARE = 0.5, 0.25
_WRITTEN = ("<u2", "<u4", "<i8")  # how the tokens of a mark may have been


@dataclass
class Position:
    """All that a step changes besides weights and moments, and what must stay as it was."""

    step: int
    data: DataState
    best_val_loss: float | None = None
    seconds: float = 0.0  # spent training, over all sessions
    evaluated_step: int = -1
    train_loss: float | None = None  # of the last evaluation
    best_train_loss: float | None = None
    best_train_step: int = -1
    first_val_loss: float | None = None
    first_val_bpb: float | None = None
    eval_batch: int | None = None  # the batch size and token counts the evaluation sets were chosen by
    eval_lengths: dict[str, int] = field(default_factory=dict)
    data_mark: Mark = field(default_factory=dict)  # of the training tokens (data/identity.py)
    val_mark: Mark = field(default_factory=dict)

    def evaluated(self, found: Evaluation) -> None:
        """Book an evaluation of this step."""
        if self.best_val_loss is None or found.val_loss < self.best_val_loss:
            self.best_val_loss = found.val_loss
        if self.first_val_loss is None:
            self.first_val_loss, self.first_val_bpb = found.val_loss, found.val_bpb
        if self.best_train_loss is None or found.train_loss < self.best_train_loss:
            self.best_train_loss, self.best_train_step = found.train_loss, self.step
        self.evaluated_step, self.train_loss = self.step, found.train_loss

    def risen(self) -> str:
        """What to say where the loss on training text is far above its best: no recipe ends like that."""
        best, now = self.best_train_loss, self.train_loss
        if best is None or now is None or now <= best + max(_RISE, _RISE_SHARE * best):
            return ""
        return _("the loss on training text has risen: {best:.3f} at step {step:,}, {now:.3f} now").format(
            best=best, step=self.best_train_step, now=now
        )

    def is_finished(self, config: RunConfig) -> bool:
        """The last step is taken and evaluated."""
        return self.step >= config.max_iters and self.evaluated_step == self.step

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Position:
        names = {field.name: field for field in dataclasses.fields(cls)}
        wrong = [name for name in values if name not in names]
        wrong += [name for name in ("step", "data") if name not in values]
        wrong += [name for name in values if name in names and not _is_possible(name, values[name])]
        if wrong:
            raise UserError(
                _("the saved position is damaged"),
                _("impossible values: {names}").format(names=", ".join(wrong[:4])[:80]),
            )
        return cls(**{**values, "data": DataState.from_json(values["data"])})


def _is_possible(name: str, value: Any) -> bool:
    if name in ("data", "eval_lengths", "data_mark", "val_mark"):
        if not isinstance(value, dict):
            return False
        if name == "eval_lengths":
            return all(map(is_count, value.values()))
        return name == "data" or not value or _is_mark(value)
    if name in ("step", "evaluated_step", "best_train_step"):
        return is_count(value, least=0 if name == "step" else -1)
    if name == "eval_batch":
        return value is None or is_count(value, least=1)
    return is_number_or_none(value) and (name != "seconds" or value is not None)


def _is_mark(mark: dict[str, Any]) -> bool:
    written = mark.get("as", "<i8")
    return is_count(mark.get("tokens")) and isinstance(mark.get("sha256"), str) and written in _WRITTEN


def first_position(sequences: Sequences) -> Position:
    return Position(0, sequences.start())


def position_of_checkpoint(
    checkpoint: Checkpoint, config: RunConfig, sequences: Sequences, tokens: TokenFile, notes: list[str]
) -> Position:
    """Where the checkpoint stands in the data, or at its beginning where the data is now another."""
    position = Position.from_json(checkpoint.state["position"])
    before = config_of(checkpoint)
    if before.dataset != config.dataset:
        there, here = data_dir(before.dataset), data_dir(config.dataset)
        notes.append(
            _("the run was on {there}; it begins {here} from the start").format(there=there, here=here)
        )
        position.data_mark, position.val_mark = {}, {}
        position.eval_batch = None
    else:
        _refuse_shorter_data(position, config, tokens)
        if before.block_size == config.block_size and before.seed == config.seed:
            return position
        notes.append(_("with another block_size or seed the data begins anew, in another order"))
    # What was measured so far was measured on something else.
    position.best_val_loss, position.evaluated_step = None, -1
    position.train_loss, position.best_train_loss, position.best_train_step = None, None, -1
    position.first_val_loss, position.first_val_bpb = None, None
    done = position.data.sequences * before.block_size // config.block_size
    position.data = dataclasses.replace(sequences.start(), sequences=done)
    return position


def _refuse_shorter_data(position: Position, config: RunConfig, tokens: TokenFile) -> None:
    if position.data.epoch_tokens > len(tokens):
        raise UserError(
            _("{data} has become shorter since the run began").format(data=data_dir(config.dataset)),
            _("the run reads {n:,} tokens per epoch, and there are {there:,}").format(
                n=position.data.epoch_tokens, there=len(tokens)
            ),
            _("prepare the same data again, or start over with --fresh"),
        )


def position_of_nanogpt(found: NanoGPTCheckpoint, config: RunConfig, sequences: Sequences) -> Position:
    """nanoGPT takes blocks at random and keeps no place; ours goes on after as many sequences."""
    theirs = [found.config.get(name) for name in ("batch_size", "gradient_accumulation_steps")]
    per_step = math.prod(x if isinstance(x, int) else 0 for x in theirs) or config.sequences_per_step
    position = first_position(sequences)
    position.step, position.best_val_loss = found.step, found.best_val_loss
    position.data = sequences.skip(position.data, found.step * per_step)
    return position
