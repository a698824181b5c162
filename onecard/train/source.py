"""What a run begins with: nothing, its own newest checkpoint, or somebody else's weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.language import _, joined
from onecard.run.changes import differences
from onecard.run.directory import RunDirectory
from onecard.run.foreign import refuse_foreign_folder
from onecard.run.load import Weights, no_checkpoint, weights_from, weights_of_checkpoint, weights_of_nanogpt
from onecard.run.stored import Checkpoint, list_checkpoints, newest_intact, passed_over

# Knobs that a checkpoint decides.
OF_THE_SHAPE = ("n_layer", "n_head", "n_embd", "vocab_size", "bias", "window_pattern", "value_embeddings")


@dataclass(frozen=True)
class Source:
    """Weights to begin with; a checkpoint of this run or of nanoGPT's also brings moments and position."""

    weights: Weights
    checkpoint: Checkpoint | None = None
    continues: bool = False
    damaged: list[Checkpoint] = field(default_factory=list)  # newer ones that cannot be used


def find_source(config: RunConfig, directory: RunDirectory, notes: list[str]) -> Source | None:
    """init_from's meaning, given what is in out_dir. None: from scratch."""
    # With --fresh what is there will be set aside: as if the folder were empty.
    checkpoints = [] if config.fresh else list_checkpoints(directory.checkpoints)
    used = bool(checkpoints) or (directory.nanogpt_checkpoint.is_file() and not config.fresh)
    if not used and not config.fresh and not config.eval_only:
        directory.refuse_lost_checkpoints()
    if config.init_from == "auto" and not used:
        return None
    if config.init_from in ("auto", "resume"):
        if not used:
            raise no_checkpoint(directory)
        before = directory.read_config()
        notes += directory.config_notes
        if config.init_from == "auto" and checkpoints and not config.eval_only:
            _refuse_other_experiment(directory, before, config)
        if not checkpoints:
            return Source(weights_of_nanogpt(directory.nanogpt_checkpoint), continues=True)
        checkpoint, damaged = newest_intact(checkpoints)
        notes += passed_over(checkpoint, damaged)
        return Source(
            weights_of_checkpoint(checkpoint), checkpoint, continues=True, damaged=[bad for bad, _ in damaged]
        )
    if used and not config.eval_only:
        raise UserError(
            _("{folder} already holds a run").format(folder=directory.path),
            _("{knob} would begin another one in its place").format(knob=f"init_from='{config.init_from}'"),
            _(
                "continue it with --init_from=resume, start over with --fresh (the old run is kept aside),\n"
                "or choose another folder with --out_dir=FOLDER"
            ),
        )
    if config.init_from == "scratch":
        return None
    weights = weights_from(config.init_from)
    notes += weights.notes
    return Source(weights)


def _refuse_other_experiment(directory: RunDirectory, before: RunConfig | None, config: RunConfig) -> None:
    changed = differences(before, config) if before is not None else []
    if changed:
        # What makes the model what it is cannot change any more: resume would train the old one.
        may_continue = not {name for name, _, _ in changed} & {*OF_THE_SHAPE, "arch", "depth", "generation"}
        what, hints = _("{folder} holds a run with a different model"), list[str]()
        if may_continue:
            what = _("{folder} holds a run with a different config")
            hints = [_("continue it with the new values: {flag}").format(flag="--init_from=resume")]
        hints += [
            _("start over (the old run is kept aside): {flag}").format(flag="--fresh"),
            _("or leave it alone: {flag}").format(flag="--out_dir=ANOTHER_FOLDER"),
        ]
        text = _("{name}: {old} there, {new} now")
        different = [text.format(name=name, old=repr(old), new=repr(new)) for name, old, new in changed]
        raise UserError(
            what.format(folder=directory.path),
            joined(different, "\n"),
            joined(hints, "\n"),
        )


def refuse_folders(config: RunConfig, directory: RunDirectory) -> None:
    """Where the run would write among other people's files, or could not go on when it has to."""
    refuse_foreign_folder(directory.path)
    if config.fallback_dir is None:
        return
    fallback, out = RunDirectory(config.fallback_dir), directory.path.resolve()
    refuse_foreign_folder(fallback.path)
    if fallback.holds_run():
        raise UserError(
            _("fallback_dir {folder} holds a run").format(folder=fallback.path),
            _("a run that lost its folder may have gone on there"),
            _("go on with that one: {command}\nor name an empty folder").format(
                command=f"onecard train --out_dir={fallback.path}"
            ),
        )
    if fallback.path.resolve() == out or out in fallback.path.resolve().parents:
        raise UserError(
            _("fallback_dir {folder} is in the run's own folder").format(folder=fallback.path),
            _("it would be lost together with it"),
        )
