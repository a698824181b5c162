"""Where a run begins: data, model, optimizer and position, from nothing or from what is on disk."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from onecard.arch.shapes import GPT2_VOCABULARY, GPT2Shape, Shape
from onecard.config.dataset import data_dir, data_facts
from onecard.config.files import CHECKPOINT
from onecard.config.resolve import vocabulary_of, with_vocabulary
from onecard.config.run import RunConfig
from onecard.config.vocabulary import DataRecipe, data_recipe, other_vocabulary
from onecard.data.batches import FixedBlocks, Sequences, fixed_blocks
from onecard.data.bins import TokenFile, open_split
from onecard.data.identity import Identity
from onecard.data.meta import read_meta
from onecard.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from onecard.errors import UserError
from onecard.hardware.machine import resolve_device
from onecard.language import _
from onecard.model.decoder import Decoder
from onecard.model.precision import choose_dtype
from onecard.model.registry import model_class
from onecard.optim.moments import MOMENTS, read_moment
from onecard.plan.scaling import repetition_note
from onecard.run.directory import RunDirectory
from onecard.train.engine import build_stepper, choose_kernel, make_room
from onecard.train.extension import extended
from onecard.train.fit import Fit, in_words
from onecard.train.memory import forget, is_out_of_memory, use_expandable_segments
from onecard.train.position import Position, first_position, position_of_checkpoint, position_of_nanogpt
from onecard.train.source import OF_THE_SHAPE, Source, find_source, refuse_folders
from onecard.train.step import Stepper
from onecard.train.target_text import TargetText
from onecard.train.training_run import TrainingRun, newest_step


@dataclass(frozen=True)
class _Data:
    """The tokens of a run, and what they stand for."""

    folder: Path
    train: TokenFile
    val: TokenFile
    sequences: Sequences

    @classmethod
    def open(cls, config: RunConfig, shape: Shape, recipe: DataRecipe) -> _Data:
        folder = data_dir(config.dataset)
        train = open_split(folder, "train", shape.block_size, shape.vocab_size, recipe)
        val = open_split(folder, "val", shape.block_size, shape.vocab_size, recipe)
        return cls(folder, train, val, Sequences(train, shape.block_size, config.seed))


def open_run(config: RunConfig) -> TrainingRun:
    _refuse_several_cards()
    use_expandable_segments()
    directory, notes = RunDirectory(config.out_dir), list[str]()
    device, dtype = _device_and_dtype(config, notes)
    newest_there = newest_step(directory)  # before one of them is chosen
    source = find_source(config, directory, notes)
    if not config.eval_only:
        refuse_folders(config, directory)
    asked = config
    config, shape = _config_and_shape(config, source, notes)
    config, trained = extended(config, source, directory, notes)
    kernel = choose_kernel(shape, config, device, dtype)
    fit = make_room(shape, config, device, dtype, notes)
    if source is not None and source.checkpoint is not None:
        fit.first_step = source.checkpoint.step

    data = _Data.open(config, shape, data_recipe(asked))
    model, stepper = _built(source, shape, _Machine(config, fit, kernel, device, dtype), notes)
    position = first_position(data.sequences)
    if source is not None and source.continues:
        position = _position(source, data.sequences, data.train, config, notes)
    # Opened again: the run's own file is refreshed by the reading thread when an epoch ends.
    tokens = {
        "train": open_split(data.folder, "train", shape.block_size, shape.vocab_size),
        "val": data.val,
    }
    identity = Identity(str(data.folder), tokens, {"train": position.data_mark, "val": position.val_mark})
    evaluation = _evaluation_sets(config, position, tokens, notes)
    text: dict[str, TargetText] = {}
    tokenizer = load_tokenizer(data.folder)
    if tokenizer is not None:
        if source is None and (other := other_vocabulary(asked, tokenizer.n_vocab)) is not None:
            notes.append(other)
        # Never of an assumed one: a sample in the wrong tokenizer is seen to be nonsense, bits per byte not.
        text = {name: TargetText(tokenizer, blocks, shape.vocab_size) for name, blocks in evaluation.items()}
    tokenizer = tokenizer or _assumed_tokenizer(data.folder, shape, config, notes)
    passes = repetition_note(max(1, config.max_iters) * config.tokens_per_step, len(data.train))
    if passes is not None and not config.eval_only:
        notes.append(passes)
    return TrainingRun(
        config, directory, device, dtype, model, fit, stepper, data.sequences, identity, evaluation, text,
        tokenizer, position, _began(source, shape), _saved_step(source),
        source.damaged if source is not None else [], notes, newest_there=newest_there, trained=trained,
    )  # fmt: skip


def _device_and_dtype(config: RunConfig, notes: list[str]) -> tuple[str, str]:
    device = resolve_device(config.device)
    dtype, dtype_note = choose_dtype(config.dtype, device)
    torch.set_float32_matmul_precision("high")  # fp32 runs use tf32 on CUDA, as nanoGPT's do
    if dtype_note:
        notes.append(dtype_note)
    if torch.device(device).index is not None:
        # "cuda" alone is the current card already, and set_device refuses it.
        torch.cuda.set_device(device)
    return device, dtype


def _config_and_shape(config: RunConfig, source: Source | None, notes: list[str]) -> tuple[RunConfig, Shape]:
    """The config as this run has it, and its model's shape; a checkpoint decides both."""
    if source is None:
        config = with_vocabulary(config, vocabulary_of(config, data_facts(config.dataset)))
        notes[:0] = config.notes
        return config, _shape(config, source, notes)
    config = _of_its_architecture(config, source.weights.shape, notes)
    notes[:0] = config.notes
    if not config.is_set("block_size"):
        longest = min(config.block_size, source.weights.shape.block_size)
        config = dataclasses.replace(config, block_size=longest).resolved()
    shape = _shape(config, source, notes)
    return _as_it_is(config, shape), shape


def _began(source: Source | None, shape: Shape) -> str:
    if source is not None:
        return _("from {what}").format(what=source.weights.description)
    return _("{n:.2f}M parameters, a new model from scratch").format(n=shape.parameters / 1e6)


def _saved_step(source: Source | None) -> int:
    return source.checkpoint.step if source is not None and source.checkpoint is not None else -1


def _of_its_architecture(config: RunConfig, shape: Shape, notes: list[str]) -> RunConfig:
    """The checkpoint decides the architecture, and with it whose learning rates and schedule hold.

    What it decides counts as set: the run is continued by its folder alone.
    """
    arch, _dash, generation = shape.arch.partition("-")
    number = int(generation) if generation else config.generation
    named = [n for n in ("arch", "depth", "generation") if config.is_set(n)]
    if (arch, number) != (config.arch, config.generation) and named:
        raise UserError(
            _("init_from holds a model of architecture {arch}").format(arch=shape.arch),
            _("the config asks for {arch}").format(
                arch=f"arch='{config.arch}'"
                + (f", generation={config.generation}" if config.arch == "nanochat" else "")
            ),
            _("leave out arch, depth and generation, or start from scratch"),
        )
    if arch == "gpt2":
        if config.arch == arch:
            return config
        return dataclasses.replace(config.without_schedule_notes(), arch=arch).resolved()
    if config.is_set("depth") and config.depth != shape.n_layer:
        notes.append(_of_the_checkpoint("depth", shape.n_layer, config.depth))
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
    # As in nanoGPT, the checkpoint decides the architecture; a note says what the user asked for instead.
    for name in OF_THE_SHAPE:
        there = getattr(shape, name, False)  # not every architecture has biases to choose
        if config.is_set(name) and getattr(config, name) not in (None, there):
            notes.append(_of_the_checkpoint(name, there, getattr(config, name)))
    if config.block_size > shape.block_size and isinstance(shape, GPT2Shape):
        raise UserError(
            _("block_size {n} is longer than the checkpoint's {most}").format(
                n=config.block_size, most=shape.block_size
            ),
            _("it has no position embeddings beyond that"),
            f"--block_size={shape.block_size}",
        )
    return shape.with_block_size(config.block_size)


def _of_the_checkpoint(name: str, there: object, asked: object) -> str:
    return _("{name} is {there} in the checkpoint; {asked} is not used").format(
        name=name, there=str(there), asked=str(asked)
    )


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


@dataclass(frozen=True)
class _Machine:
    """What a model is built for."""

    config: RunConfig
    fit: Fit
    kernel: str  # of attention
    device: str
    dtype: str


def _built(
    source: Source | None, shape: Shape, machine: _Machine, notes: list[str]
) -> tuple[Decoder, Stepper | None]:
    """The model on its device and what trains it, moments of an earlier start included. What runs out is
    built again from the beginning, for the next setting: nothing half restored is gone on with."""
    config, fit = machine.config, machine.fit
    while True:
        known = len(notes)
        model = _fresh_model(shape, config) if source is None else _model_from(source, shape)
        model.attention_kernel = machine.kernel
        stepper = build_stepper(model, config, fit, machine.device, machine.dtype, notes)
        try:
            if source is not None and source.continues and stepper is not None:
                _restore(source, stepper, config)
            return model, stepper
        except Exception as error:
            if not is_out_of_memory(error) or fit.down(fit.first_step) is None:
                raise
            del model, stepper, notes[known:]
            forget(error)
            notes.append(
                _("out of memory while moments were read: running with {setting}").format(
                    setting=in_words(fit.choice)
                )
            )


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
                _(
                    "evaluation uses all {n:,} blocks of {split}; eval_iters × batch_size asks for {wanted:,}"
                ).format(n=len(blocks), split=name, wanted=wanted)
            )
    return sets


def _assumed_tokenizer(folder: Path, shape: Shape, config: RunConfig, notes: list[str]) -> Tokenizer | None:
    """For samples: a bin that names no tokenizer is GPT-2's, as nanoGPT assumes."""
    if config.sample_tokens and read_meta(folder) is None and shape.vocab_size >= GPT2_VOCABULARY:
        try:
            return make_tokenizer("gpt2")
        except UserError as error:
            notes.append(_("no sample text at evaluations: {why}").format(why=error.what))
    return None


def _refuse_several_cards() -> None:
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise UserError(
            _("onecard trains on one card"),
            _("torchrun asked for {n} processes").format(n=os.environ["WORLD_SIZE"]),
            _("start it without torchrun: {command}").format(command="onecard train CONFIG"),
        )
