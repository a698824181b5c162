"""Export of a run's model to other programs: Hugging Face folders and nanoGPT's ckpt.pt."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from onecard.arch.shapes import GPT2_VOCABULARY, GPT2Shape, Nanochat2026Shape, Shape
from onecard.convert.huggingface import write_huggingface_folder
from onecard.convert.nanogpt import NanoGPTCheckpoint, write_nanogpt_checkpoint
from onecard.errors import UserError
from onecard.language import _
from onecard.optim.moments import MOMENTS, read_moment
from onecard.run.directory import RunDirectory
from onecard.run.load import checkpoint_of_run, tokenizer_of, weights_of_checkpoint, weights_of_run
from onecard.run.stored import Checkpoint


class Exported(NamedTuple):
    """What to show a person: what was written, and how to load it in the other program."""

    written: str
    next: str


def export_run(
    out_dir: str, target: str, *, step: int | None, to: str, note: Callable[[str], None] = lambda text: None
) -> Exported:
    """Write the model; `note` gets what was found damaged."""
    write = _to_nanogpt if to == "nanogpt" else _to_huggingface
    return write(out_dir, target, step, note)


def _to_nanogpt(out_dir: str, target: str, step: int | None, note: Callable[[str], None]) -> Exported:
    if Path(target).exists():
        raise UserError(
            _("{target} is there already").format(target=target),
            hint=_("name a file that does not exist yet"),
        )
    checkpoint, notes = checkpoint_of_run(RunDirectory(out_dir), step, weights_only=False)
    for text in notes:
        note(text)
    theirs = _for_nanogpt(checkpoint)
    write_nanogpt_checkpoint(Path(target), theirs)
    written = _("step {step:,} of {out_dir} written to {target}; nanoGPT resumes from it").format(
        step=checkpoint.step, out_dir=out_dir, target=target
    )
    if not theirs.moments:
        written = _(
            "step {step:,} of {out_dir} written to {target}; nanoGPT resumes from it, with new moments: its "
            "AdamW has no use for Muon's"
        ).format(step=checkpoint.step, out_dir=out_dir, target=target)
    folder, name = Path(target).absolute().parent, Path(target).name
    command = f"python sample.py --out_dir={shlex.quote(str(folder))}"
    if name == "ckpt.pt":
        return Exported(written, _("next, in nanoGPT's folder: {command}").format(command=command))
    renamed = _(
        "nanoGPT looks for the name ckpt.pt: rename {name}, then in nanoGPT's folder: {command}"
    ).format(name=name, command=command)
    return Exported(written, renamed)


def _to_huggingface(out_dir: str, target: str, step: int | None, note: Callable[[str], None]) -> Exported:
    weights = weights_of_run(out_dir, step)
    for text in weights.notes:
        note(text)
    if isinstance(weights.shape, Nanochat2026Shape):
        raise UserError(
            _("{out_dir} cannot be written for Hugging Face").format(out_dir=out_dir),
            _("transformers has nanochat's architecture of October 2025, not that of 2026"),
            _(
                "onecard samples from it without an export; a model trained with --generation=2025 can be "
                "exported"
            ),
        )
    try:
        tokenizer = tokenizer_of(weights)
        n_vocab, eot = tokenizer.n_vocab, tokenizer.eot
    except UserError:
        n_vocab, eot = None, None  # weights alone are still worth having
    write_huggingface_folder(Path(target), weights.shape, weights.tensors, n_vocab=n_vocab, eot=eot)
    kind = "GPT-2" if isinstance(weights.shape, GPT2Shape) else "nanochat"
    load = f"AutoModelForCausalLM.from_pretrained({target!r})"
    written = _(
        "{description}, written to {target} as a Hugging Face {kind}; without a tokenizer, which "
        "transformers has not"
    ).format(description=weights.description, target=target, kind=kind)
    if n_vocab == GPT2_VOCABULARY:
        written = _(
            "{description}, written to {target} as a Hugging Face {kind}; its tokenizer is "
            "AutoTokenizer.from_pretrained('gpt2')"
        ).format(description=weights.description, target=target, kind=kind)
    return Exported(written, _("next, in Python with transformers: {load}").format(load=load))


def _for_nanogpt(checkpoint: Checkpoint) -> NanoGPTCheckpoint:
    weights = weights_of_checkpoint(checkpoint)
    saved = checkpoint.optimizer_tensors()
    by_adamw = all(f"{moment}.{name}" in saved for name in weights.tensors for moment in MOMENTS)
    return NanoGPTCheckpoint(
        shape=_gpt2(weights.shape, checkpoint.path),
        tensors={name: tensor.float() for name, tensor in weights.tensors.items()},
        moments={
            name: (read_moment(name, "exp_avg", saved), read_moment(name, "exp_avg_sq", saved))
            for name in weights.tensors
        }
        if by_adamw
        else {},
        optimizer_step=int(saved["steps"]),
        step=checkpoint.step,
        best_val_loss=checkpoint.state["position"]["best_val_loss"],
        config=checkpoint.state["config"],
    )


def _gpt2(shape: Shape, where: object) -> GPT2Shape:
    if not isinstance(shape, GPT2Shape):
        raise UserError(
            _("{where} is no GPT-2").format(where=where),
            _("its architecture is {arch}, which nanoGPT does not have").format(arch=shape.arch),
            _("for Hugging Face: onecard export RUN FOLDER") if shape.arch == "nanochat-2025" else "",
        )
    return shape
