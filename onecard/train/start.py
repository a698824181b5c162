"""Where a run begins: data, model, optimizer and position, from nothing or from what is on disk."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from onecard.arch.shapes import GPT2_VOCABULARY, GPT2Shape, Shape
from onecard.config.dataset import data_dir, data_facts
from onecard.config.files import CHECKPOINT
from onecard.config.resolve import vocabulary_of, with_vocabulary
from onecard.config.run import RunConfig
from onecard.config.vocabulary import other_vocabulary, wanted_data
from onecard.data.batches import FixedBlocks, Sequences, fixed_blocks
from onecard.data.bins import TokenFile, open_split
from onecard.data.identity import Identity
from onecard.data.meta import read_meta
from onecard.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from onecard.errors import UserError
from onecard.hardware.machine import resolve_device
from onecard.language import english
from onecard.model.decoder import Decoder
from onecard.model.family import model_class
from onecard.model.precision import choose_dtype
from onecard.optim.saved import MOMENTS, read_moment
from onecard.plan.scaling import repetition_note
from onecard.run.checkpoint import TrainingState
from onecard.run.directory import RunDirectory
from onecard.run.stored import Checkpoint, list_checkpoints
from onecard.train.engine import build_stepper, choose_kernel, make_room
from onecard.train.extension import extended
from onecard.train.fit import Fit
from onecard.train.memory import forget, is_out_of_memory, use_expandable_segments
from onecard.train.position import Position, first_position, position_of_checkpoint, position_of_nanogpt
from onecard.train.source import OF_THE_SHAPE, Source, find_source, refuse_folders
from onecard.train.step import Stepper
from onecard.train.target_text import TargetText


@dataclass
class Run:
    """Everything the loop works with, ready to train."""

    config: RunConfig
    directory: RunDirectory
    device: str
    dtype: str
    model: Decoder
    fit: Fit  # how a step is carried out, and how else it could be
    stepper: Stepper | None  # None where the model is only evaluated, and while its state is parked
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
    parked: TrainingState | None = None  # all of it in host memory, while the card is not ours
    newest_there: int = -1  # the newest checkpoint in the folder when the run was opened
    trained: RunConfig | None = None  # what the steps so far were taken with; None where there are none

    def look_again(self) -> None:
        """Now that the folder is ours: a job at work when this one was opened may have saved since."""
        newest = _newest_step(self.directory)
        if newest > self.newest_there:
            raise UserError(
                f"another job has saved step {newest:,} in {self.directory.path} since this one was started",
                "it has just ended; this one would begin from before that",
                "start it again: it goes on from there",
                exit_code=1,
            )

    def stays_as_it_is(self) -> bool:
        """Is it past its end, with nothing to train? What it was trained with still describes it: written
        down now, a smaller max_iters would make the command it was begun with another experiment."""
        past_its_end = self.position.step >= self.config.max_iters
        # Where its losses count no more, it goes over to other data or blocks, and its checkpoint with it.
        same_terms = self.position.evaluated_step >= 0
        return past_its_end and same_terms and self.saved_step >= 0 and self.directory.config_path.is_file()


def _newest_step(directory: RunDirectory) -> int:
    return max((checkpoint.step for checkpoint in list_checkpoints(directory.checkpoints)), default=-1)


def open_run(config: RunConfig) -> Run:
    _refuse_several_cards()
    use_expandable_segments()
    directory = RunDirectory(config.out_dir)
    device = resolve_device(config.device)
    dtype, dtype_note = choose_dtype(config.dtype, device)
    torch.set_float32_matmul_precision("high")  # fp32 runs use tf32 on CUDA, as nanoGPT's do
    notes = [dtype_note] if dtype_note else []
    if torch.device(device).index is not None:
        # "cuda" alone is the current card already, and set_device refuses it.
        torch.cuda.set_device(device)

    newest_there = _newest_step(directory)  # before one of them is chosen
    source = find_source(config, directory, notes)
    if not config.eval_only:
        refuse_folders(config, directory)
    asked, wanted = config, wanted_data(config)
    if source is not None:
        config = _of_its_architecture(config, source.weights.shape, notes)
    else:
        config = with_vocabulary(config, vocabulary_of(config, data_facts(config.dataset)))
    notes[:0] = config.notes
    if source is not None and not config.is_set("block_size"):
        longest = min(config.block_size, source.weights.shape.block_size)
        config = dataclasses.replace(config, block_size=longest).resolved()
    shape = _shape(config, source, notes)
    if source is not None:
        config = _as_it_is(config, shape)
    config, trained = extended(config, source, directory, notes)
    kernel = choose_kernel(shape, config, device, dtype)
    fit = make_room(shape, config, device, dtype, notes)
    if source is not None and source.checkpoint is not None:
        fit.first_step = source.checkpoint.step

    folder = data_dir(config.dataset)
    train_tokens = open_split(folder, "train", shape.block_size, shape.vocab_size, wanted)
    val_tokens = open_split(folder, "val", shape.block_size, shape.vocab_size, wanted)
    sequences = Sequences(train_tokens, shape.block_size, config.seed)

    model, stepper = _built(source, shape, config, fit, kernel, device, dtype, notes)
    position = first_position(sequences)
    began = f"{shape.parameters / 1e6:.2f}M parameters, a new model from scratch"
    if source is not None:
        began = f"from {source.weights.description}"
        if source.continues:
            position = _position(source, sequences, train_tokens, config, notes)
    saved_step = source.checkpoint.step if source is not None and source.checkpoint is not None else -1
    # Opened again: the run's own file is refreshed by the reading thread when an epoch ends.
    train_again = open_split(folder, "train", shape.block_size, shape.vocab_size)
    identity = Identity(
        str(folder),
        {"train": train_again, "val": val_tokens},
        {"train": position.data_mark, "val": position.val_mark},
    )
    evaluation = _evaluation_sets(config, position, {"train": train_again, "val": val_tokens}, notes)
    text: dict[str, TargetText] = {}
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None:
        if source is None and (other := other_vocabulary(asked, tokenizer.n_vocab)) is not None:
            notes.append(other)
        # Never of an assumed one: a sample in the wrong tokenizer is seen to be nonsense, bits per byte not.
        text = {name: TargetText(tokenizer, blocks, shape.vocab_size) for name, blocks in evaluation.items()}
    tokenizer = tokenizer or _assumed_tokenizer(folder, shape, config, notes)
    with english(True):  # as all that train says
        passes = repetition_note(max(1, config.max_iters) * config.tokens_per_step, len(train_tokens))
    if passes is not None and not config.eval_only:
        notes.append(passes)
    return Run(
        config, directory, device, dtype, model, fit, stepper, sequences, identity, evaluation, text,
        tokenizer, position, began, saved_step, source.damaged if source is not None else [], notes,
        newest_there=newest_there, trained=trained,
    )  # fmt: skip


def _of_its_architecture(config: RunConfig, shape: Shape, notes: list[str]) -> RunConfig:
    """The checkpoint decides the architecture, and with it whose learning rates and schedule hold.

    What it decides counts as set: the run is continued by its folder alone.
    """
    arch, _, generation = shape.arch.partition("-")
    number = int(generation) if generation else config.generation
    named = [n for n in ("arch", "depth", "generation") if config.is_set(n)]
    if (arch, number) != (config.arch, config.generation) and named:
        raise UserError(
            f"init_from holds a model of architecture {shape.arch}",
            f"the config asks for arch='{config.arch}'"
            + (f", generation {config.generation}" if config.arch == "nanochat" else ""),
            "leave out arch, depth and generation, or start from scratch",
        )
    if arch == "gpt2":
        if config.arch == arch:
            return config
        return dataclasses.replace(config.without_schedule_notes(), arch=arch).resolved()
    if config.is_set("depth") and config.depth != shape.n_layer:
        notes.append(f"depth is {shape.n_layer} in the checkpoint; {config.depth} is not used")
    decided = {"arch": arch, "generation": number, "depth": shape.n_layer, **shape.to_json()}
    knobs_of_it = {f.name for f in dataclasses.fields(config)} - {"n_layer"}
    decided = {
        n: v for n, v in decided.items() if n in knobs_of_it and (not config.is_set(n) or n == "depth")
    }
    origins = {**config.origins, **{n: config.origins.get(n, CHECKPOINT) for n in decided}}
    return dataclasses.replace(config.without_schedule_notes(), **decided, origins=origins).resolved()


def _shape(config: RunConfig, source: Source | None, notes: list[str]) -> Shape:
    if source is None:
        made: Shape = config.shape(vocabulary_of(config, data_facts(config.dataset)))
        return made
    shape = source.weights.shape
    # As in nanoGPT, the checkpoint decides the architecture; what the user asked for instead is told.
    for name in OF_THE_SHAPE:
        there = getattr(shape, name, False)  # not every architecture has biases to choose
        if config.is_set(name) and getattr(config, name) not in (None, there):
            notes.append(f"{name} is {there} in the checkpoint; {getattr(config, name)} is not used")
    if config.block_size > shape.block_size and isinstance(shape, GPT2Shape):
        raise UserError(
            f"block_size {config.block_size} is longer than the checkpoint's {shape.block_size}",
            "it has no position embeddings beyond that",
            f"--block_size={shape.block_size}",
        )
    return shape.with_block_size(config.block_size)


def _as_it_is(config: RunConfig, shape: Shape) -> RunConfig:
    """What was asked for and not used must not be written down as what this run is."""
    actual = {n: getattr(shape, n) for n in OF_THE_SHAPE if config.is_set(n) and hasattr(shape, n)}
    return dataclasses.replace(config, **actual)


def _fresh_model(shape: Shape, config: RunConfig) -> Decoder:
    """A large one that learns in bf16 is not first held in fp32."""
    matrices = torch.bfloat16 if config.master_weights == "bf16" else torch.float32
    return model_class(shape).initialised(shape, config.seed, matrices)


def _model_from(source: Source, shape: Shape) -> Decoder:
    model = source.weights.build()
    if shape.block_size != model.shape.block_size:
        model.use_block_size(shape.block_size)
    return model


def _built(
    source: Source | None, shape: Shape, config: RunConfig, fit: Fit, kernel: str, device: str, dtype: str,
    notes: list[str],
) -> tuple[Decoder, Stepper | None]:  # fmt: skip
    """The model on its device and what trains it, moments of an earlier start included. What runs out is
    built again from the beginning, for the next setting: nothing half restored is gone on with."""
    while True:
        known = len(notes)
        model = _fresh_model(shape, config) if source is None else _model_from(source, shape)
        model.attention_kernel = kernel
        stepper = build_stepper(model, config, fit, device, dtype, notes)
        try:
            if source is not None and source.continues and stepper is not None:
                _restore(source, stepper, config)
            return model, stepper
        except Exception as error:
            if not is_out_of_memory(error) or fit.down(fit.first_step) is None:
                raise
            del model, stepper, notes[known:]
            forget(error)
            notes.append(f"out of memory while moments were read: running with {fit.choice.words}")


def _restore(source: Source, stepper: Stepper, config: RunConfig) -> None:
    """Moments and loss scale as they were saved."""
    if source.checkpoint is not None:
        moments = _cropped(source.checkpoint.optimizer_tensors(), config.block_size)
        stepper.restore(moments, source.checkpoint.state["scaler"])
        return
    found = source.weights.nanogpt
    assert found is not None
    tensors: dict[str, torch.Tensor] = {}
    for name, (exp_avg, exp_avg_sq) in found.moments.items():
        tensors |= {f"exp_avg.{name}": exp_avg, f"exp_avg_sq.{name}": exp_avg_sq}
    if tensors:
        tensors["steps"] = torch.tensor(int(found.optimizer_step))
    stepper.restore(_cropped(tensors, config.block_size), {})


def _position(
    source: Source, sequences: Sequences, tokens: TokenFile, config: RunConfig, notes: list[str]
) -> Position:
    """Where the earlier start was."""
    if source.checkpoint is not None:
        return position_of_checkpoint(source.checkpoint, config, sequences, tokens, notes)
    assert source.weights.nanogpt is not None
    return position_of_nanogpt(source.weights.nanogpt, config, sequences)


def _cropped(tensors: dict[str, torch.Tensor], block_size: int) -> dict[str, torch.Tensor]:
    """Moments of position embeddings follow them when a shorter block_size drops the later ones."""
    name = "transformer.wpe.weight"
    for moment in MOMENTS:
        if len(tensors.get(f"{moment}.{name}", ())) > block_size:
            tensors[f"{moment}.{name}"] = read_moment(name, moment, tensors)[:block_size]
            tensors.pop(f"{moment}_scale.{name}", None)
    return tensors


def _evaluation_sets(
    config: RunConfig, position: Position, tokens: dict[str, TokenFile], notes: list[str]
) -> dict[str, FixedBlocks]:
    """eval_iters × batch_size blocks of each split.

    The run remembers batch size and lengths it began with: splitting its steps otherwise, or adding
    data, must not change what its losses are measured on.
    """
    if position.eval_batch is None:
        position.eval_batch = config.batch_size
        position.eval_lengths = {name: len(file) for name, file in tokens.items()}
    wanted = config.eval_iters * position.eval_batch
    sets = {
        name: fixed_blocks(file, config.block_size, wanted, config.seed, position.eval_lengths[name])
        for name, file in tokens.items()
    }
    for name, blocks in sets.items():
        if len(blocks) < wanted:
            notes.append(
                f"evaluation uses all {len(blocks):,} blocks of {name}; "
                f"eval_iters × batch_size asks for {wanted:,}"
            )
    return sets


def _assumed_tokenizer(folder: Path, shape: Shape, config: RunConfig, notes: list[str]) -> Tokenizer | None:
    """For samples: a bin that names no tokenizer is GPT-2's, as nanoGPT assumes."""
    if config.sample_tokens and read_meta(folder) is None and shape.vocab_size >= GPT2_VOCABULARY:
        try:
            return make_tokenizer("gpt2")
        except UserError as error:
            notes.append(f"no sample text at evaluations: {error.what}")
    return None


def _refuse_several_cards() -> None:
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise UserError(
            "onecard trains on one card",
            f"torchrun asked for {os.environ['WORLD_SIZE']} processes",
            "start it without torchrun: onecard train CONFIG",
        )
