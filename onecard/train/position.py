"""How far a run has come, and whether what it goes on with is what it began with."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from onecard.config import RunConfig
from onecard.convert.nanogpt import NanoGPTCheckpoint
from onecard.data.batches import DataState, Sequences
from onecard.data.bins import TokenFile
from onecard.errors import UserError
from onecard.run.checkpoint import Checkpoint

# Enough to tell two texts apart, little enough to read at every start.
_MARK_TOKENS = 1_000_000


@dataclass
class Position:
    """All that a step changes besides weights and moments, and what must stay as it was."""

    step: int
    data: DataState
    best_val_loss: float | None = None
    seconds: float = 0.0  # spent training, over all sessions
    evaluated_step: int = -1
    first_val_loss: float | None = None
    first_val_bpb: float | None = None
    eval_batch: int | None = None  # the batch size and token counts the evaluation sets were chosen by
    eval_lengths: dict[str, int] = field(default_factory=dict)
    data_mark: dict[str, Any] = field(default_factory=dict)  # the beginning of the training tokens

    def is_finished(self, config: RunConfig) -> bool:
        """The last step is taken and evaluated."""
        return self.step >= config.max_iters and self.evaluated_step == self.step

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Position:
        return cls(**{**values, "data": DataState.from_json(values["data"])})


def first_position(sequences: Sequences, tokens: TokenFile) -> Position:
    return Position(0, sequences.start(), data_mark=mark_of(tokens, min(len(tokens), _MARK_TOKENS)))


def mark_of(tokens: TokenFile, count: int) -> dict[str, Any]:
    """A hash of the first tokens. Data that grows keeps it; other data under the same name does not."""
    return {"tokens": count, "sha256": hashlib.sha256(tokens.read(0, count).tobytes()).hexdigest()}


def position_of_checkpoint(
    checkpoint: Checkpoint, config: RunConfig, sequences: Sequences, tokens: TokenFile, notes: list[str]
) -> Position:
    """Where the checkpoint stands in the data, or at its beginning where the data is now another."""
    position = Position.from_json(checkpoint.state["position"])
    before = checkpoint.state["config"]
    if before["dataset"] != config.dataset:
        notes.append(
            f"the run was on data/{before['dataset']}; it begins data/{config.dataset} from the start"
        )
        position.data_mark = first_position(sequences, tokens).data_mark
        position.eval_batch = None
    else:
        _refuse_other_data(position, config, tokens)
        if before["block_size"] == config.block_size and before["seed"] == config.seed:
            return position
        notes.append("with another block_size or seed the data begins anew, in another order")
    # What was measured so far was measured on something else.
    position.best_val_loss, position.evaluated_step = None, -1
    position.first_val_loss, position.first_val_bpb = None, None
    done = position.data.sequences * before["block_size"] // config.block_size
    position.data = dataclasses.replace(sequences.start(), sequences=done)
    return position


def _refuse_other_data(position: Position, config: RunConfig, tokens: TokenFile) -> None:
    name = f"data/{config.dataset}"
    hint = "prepare the same data again, or start over with --fresh"
    if position.data.epoch_tokens > len(tokens):
        raise UserError(
            f"{name} has become shorter since the run began",
            f"the run reads {position.data.epoch_tokens:,} tokens an epoch, there are {len(tokens):,}",
            hint,
        )
    mark = position.data_mark
    if mark and mark_of(tokens, min(mark["tokens"], len(tokens))) != mark:
        raise UserError(
            f"{name} is not the data this run began with",
            "its first tokens are others: the model would go on with ids that mean something else",
            hint,
        )


def position_of_nanogpt(
    found: NanoGPTCheckpoint, config: RunConfig, sequences: Sequences, tokens: TokenFile
) -> Position:
    """nanoGPT draws blocks at random and keeps no place; ours goes on after as many sequences."""
    theirs = [found.config.get(name) for name in ("batch_size", "gradient_accumulation_steps")]
    per_step = math.prod(x if isinstance(x, int) else 0 for x in theirs) or config.sequences_per_step
    position = first_position(sequences, tokens)
    position.step, position.best_val_loss = found.step, found.best_val_loss
    position.data = sequences.skip(position.data, found.step * per_step)
    return position
