"""Trained models found by a path and put on a device: a run's, nanoGPT's, nanochat's or Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.arch.shapes import (
    GPT2_PADDED_VOCABULARY,
    GPT2_VOCABULARY,
    PRETRAINED,
    GPT2Shape,
    Shape,
    shape_from,
)
from onecard.config.dataset import data_dir
from onecard.config.sample import SampleConfig
from onecard.convert.huggingface import pretrained_folder, read_huggingface_folder
from onecard.convert.nanochat import is_nanochat_file, nanochat_steps, read_nanochat_checkpoint
from onecard.convert.nanogpt import NanoGPTCheckpoint, read_nanogpt_checkpoint
from onecard.data.tokenizer import Tokenizer, from_facts, load_tokenizer, make_tokenizer
from onecard.errors import UserError
from onecard.hardware.machine import resolve_device
from onecard.language import _
from onecard.model.decoder import Decoder
from onecard.model.precision import choose_dtype, torch_dtype
from onecard.model.registry import model_class
from onecard.run.directory import RunDirectory
from onecard.run.state import NEEDED
from onecard.run.stored import (
    Checkpoint,
    best_checkpoint,
    damage,
    list_checkpoints,
    newest_intact,
    passed_over,
)

# GPT-2's tokens, plain and padded to a multiple of 64.
_GPT2_VOCABULARIES = (GPT2_VOCABULARY, GPT2_PADDED_VOCABULARY)


@dataclass(frozen=True)
class Weights:
    """A model that is not on any device yet, with what is known of where it came from."""

    shape: Shape
    tensors: dict[str, Tensor]
    description: str
    dataset: str | None = None
    tokenizer_facts: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()  # on what was found damaged, and what is used instead
    nanogpt: NanoGPTCheckpoint | None = None
    # Whether a vocabulary of GPT-2's size may be taken for GPT-2's, where nothing else is known of it.
    guess_gpt2_tokens: bool = True

    def build(self) -> Decoder:
        """The model with these very tensors, on the CPU: a large one is not held twice."""
        model = model_class(self.shape).uninitialised(self.shape)
        check_weights(model, self.tensors)
        model.use_weights(self.tensors)
        return model


@dataclass(frozen=True)
class LoadedModel:
    model: Decoder
    tokenizer: Tokenizer
    description: str
    device: str
    notes: tuple[str, ...] = ()


def load_weights(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model by name."""
    check_weights(model, tensors)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[name])


def check_weights(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """A missing, surplus or misshapen tensor is a UserError."""
    own = dict(model.named_parameters())
    if own.keys() != tensors.keys():
        missing, surplus = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        raise UserError(
            _("these weights do not belong to this architecture"),
            _("missing: {missing}; unknown: {unknown}").format(
                missing=", ".join(missing[:4]) or "-", unknown=", ".join(surplus[:4]) or "-"
            ),
        )
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                _("the tensor {name} does not fit the model").format(name=name),
                _("the file has {found}, the model {wanted}").format(
                    found=tuple(tensors[name].shape), wanted=tuple(parameter.shape)
                ),
            )


def weights_of_run(out_dir: str, step: int | None) -> Weights:
    """The model `sample` should use: onecard's checkpoint, or nanoGPT's or nanochat's where there is none."""
    directory = RunDirectory(out_dir)
    if not list_checkpoints(directory.checkpoints):
        if directory.nanogpt_checkpoint.is_file():
            return weights_of_nanogpt(directory.nanogpt_checkpoint)
        if nanochat_steps(directory.path):
            return weights_of_nanochat(directory.path, step)
    checkpoint, notes = checkpoint_of_run(directory, step)
    return replace(weights_of_checkpoint(checkpoint), notes=tuple(notes))


def checkpoint_of_run(
    directory: RunDirectory, step: int | None, *, weights_only: bool = True
) -> tuple[Checkpoint, list[str]]:
    """The step asked for; else the newest, or the best where the run wants that. What is read of it has been
    verified. With it come notes: which ones are damaged, and what is used instead."""
    checkpoints = list_checkpoints(directory.checkpoints)
    if not checkpoints:
        raise no_checkpoint(directory)
    if step is not None:
        for checkpoint in checkpoints:
            if checkpoint.step == step:
                problem = damage(checkpoint, weights_only=weights_only)
                if problem:
                    raise UserError(_("{path} is damaged").format(path=checkpoint.path), problem)
                return checkpoint, []
        kept = ", ".join(str(c.step) for c in checkpoints)
        raise UserError(
            _("there is no checkpoint of step {step} in {path}").format(step=step, path=directory.path),
            _("these are kept: {kept}").format(kept=kept),
        )
    config, notes = directory.read_config(), [*directory.config_notes]
    # always_save_checkpoint=False says: what overfitted is not wanted.
    if config is not None and not config.always_save_checkpoint:
        best = best_checkpoint(checkpoints)
        problem = damage(best, weights_only=weights_only) if best is not None else None
        if best is not None and problem is None:
            return best, notes
        if best is not None:
            notes.append(
                _("{path}, the best, is damaged ({problem}): the newest is used").format(
                    path=best.path, problem=problem
                )
            )
    found, damaged = newest_intact(checkpoints, weights_only=weights_only)
    return found, notes + passed_over(found, damaged)


def weights_of_checkpoint(checkpoint: Checkpoint) -> Weights:
    if missing := [name for name in NEEDED if name not in checkpoint.state]:
        raise UserError(
            _("{path} is damaged").format(path=checkpoint.path),
            _("its state.json lacks: {names}").format(names=", ".join(missing)),
        )
    shape = shape_from(checkpoint.state["arch"], checkpoint.state["shape"], checkpoint.path)
    tensors = checkpoint.model_tensors()
    with torch.device("meta"):  # before any memory is asked for
        check_weights(model_class(shape)(shape), tensors)  # type: ignore[call-arg]
    return Weights(
        shape,
        tensors,
        _("{run}, step {step:,}, {parameters:.2f}M parameters").format(
            run=checkpoint.path.parent.parent,
            step=checkpoint.step,
            parameters=shape.parameters / 1e6,
        ),
        dataset=checkpoint.state.get("dataset"),
        tokenizer_facts=checkpoint.state.get("tokenizer"),
    )


def weights_of_nanogpt(path: Path) -> Weights:
    found = read_nanogpt_checkpoint(path)
    return Weights(
        found.shape,
        found.tensors,
        _("nanoGPT's {path}, step {step:,}, {parameters:.2f}M parameters").format(
            path=path, step=found.step, parameters=found.shape.parameters / 1e6
        ),
        dataset=found.config.get("dataset"),
        nanogpt=found,
    )


def weights_of_nanochat(path: Path, step: int | None = None) -> Weights:
    found = read_nanochat_checkpoint(path, step)
    return Weights(
        found.shape,
        found.tensors,
        _("nanochat's {path}, {parameters:.2f}M parameters").format(
            path=found.path, parameters=found.shape.parameters / 1e6
        ),
        guess_gpt2_tokens=False,  # nanochat always learns its own
    )


def weights_from(init_from: str) -> Weights:
    """`gpt2-xl`, a Hugging Face folder, a checkpoint of nanoGPT or nanochat, or another run's folder."""
    path = Path(init_from)
    if init_from in PRETRAINED:
        path = pretrained_folder(init_from)
    elif not path.exists():
        raise UserError(
            _("there is nothing at {init_from} to start from").format(init_from=init_from),
            hint=_("check the path given as init_from"),
        )
    elif path.is_file():
        return weights_of_nanochat(path) if is_nanochat_file(path) else weights_of_nanogpt(path)
    elif not (path / "config.json").is_file() or (path / "checkpoints").is_dir() or nanochat_steps(path):
        return weights_of_run(init_from, None)
    shape, tensors = read_huggingface_folder(path)
    return Weights(
        shape,
        tensors,
        _("{init_from}, {parameters:.2f}M parameters").format(
            init_from=init_from, parameters=shape.parameters / 1e6
        ),
        guess_gpt2_tokens=isinstance(shape, GPT2Shape) or shape.vocab_size in _GPT2_VOCABULARIES,
    )


def no_checkpoint(directory: RunDirectory) -> UserError:
    if not directory.path.exists():
        hint = directory.other_runs() or _("train one first: onecard train config/demo.py")
        return UserError(_("there is no run folder {path}").format(path=directory.path), hint=hint)
    if nanochat_steps(directory.path):
        return UserError(
            _("{path} holds checkpoints of nanochat, and no run of onecard").format(path=directory.path),
            hint=_("to begin a run with these weights: --init_from={path}/ --out_dir=FOLDER").format(
                path=directory.path
            ),
        )
    return UserError(
        _("there is no checkpoint in {path}").format(path=directory.path),
        _("the run has not reached its first evaluation, or this is not a run folder"),
        "\n".join(
            filter(
                None,
                (
                    directory.other_runs(),
                    _("to train it: onecard train CONFIG.py --out_dir={path}").format(path=directory.path),
                ),
            )
        ),
    )


def tokenizer_of(weights: Weights) -> Tokenizer:
    """The tokenizer a model was trained with: saved with it, else its dataset's, else GPT-2's."""
    if weights.tokenizer_facts:
        return from_facts(dict(weights.tokenizer_facts))
    if weights.dataset:
        found = load_tokenizer(data_dir(weights.dataset))
        if found is not None:
            return found
    if not weights.guess_gpt2_tokens:
        raise UserError(
            _("the tokenizer of {description} is not known").format(description=weights.description),
            _(
                "its {vocab_size:,} tokens are not GPT-2's, and no file that onecard reads says what they "
                "mean\n(nanochat's tokenizer.pkl is a pickle: loading it could run any program)"
            ).format(vocab_size=weights.shape.vocab_size),
            _(
                "train these weights further with tokens that onecard knows, and sample from that run:\n"
                "onecard prepare FILES --name NAME --train-tokenizer {vocab_size}\n"
                "onecard train --init_from=PATH --dataset=NAME (new tokens take their time to be learned)"
            ).format(vocab_size=weights.shape.vocab_size),
        )
    if weights.shape.vocab_size < GPT2_VOCABULARY:
        raise UserError(
            _("the tokenizer of {description} is not known").format(description=weights.description),
            _(
                "its vocabulary of {vocab_size:,} is not GPT-2's, and there is no data/{dataset}/meta.pkl or "
                "meta.json here"
            ).format(vocab_size=weights.shape.vocab_size, dataset=weights.dataset or "NAME"),
            _("run this where the data folder is, or copy its meta.pkl"),
        )
    return make_tokenizer("gpt2")


def load_for_sampling(config: SampleConfig) -> LoadedModel:
    device = resolve_device(config.device)
    weights = (
        weights_of_run(config.out_dir, config.step)
        if config.init_from == "resume"
        else weights_from(config.init_from)
    )
    tokenizer = tokenizer_of(weights)
    dtype, note = choose_dtype(config.dtype, device)
    notes = [*config.notes, *weights.notes, *([note] if note else [])]
    if config.step is not None and config.init_from != "resume":
        notes.append(_("step is not used with init_from={init_from}").format(init_from=config.init_from))
    model = weights.build().to(device=device, dtype=torch_dtype(dtype)).eval()
    return LoadedModel(model, tokenizer, weights.description, device, tuple(notes))
