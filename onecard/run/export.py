"""A run's model for other programs: Hugging Face folders and nanoGPT's ckpt.pt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from onecard.arch.shapes import GPT2_VOCABULARY, GPT2Shape, Nanochat2026Shape, Shape
from onecard.convert.huggingface import write_huggingface_folder
from onecard.convert.nanogpt import NanoGPTCheckpoint, write_nanogpt_checkpoint
from onecard.errors import UserError
from onecard.optim.moments import MOMENTS, read_moment
from onecard.run.directory import RunDirectory
from onecard.run.load import checkpoint_of_run, tokenizer_of, weights_of_checkpoint, weights_of_run
from onecard.run.stored import Checkpoint


def export_run(
    out_dir: str, target: str, *, step: int | None, to: str, note: Callable[[str], None] = lambda text: None
) -> str:
    """Write the model and return what to tell the user; `note` gets what was found damaged."""
    if to == "nanogpt":
        if Path(target).exists():
            raise UserError(f"{target} is there already", hint="name a file that does not exist yet")
        checkpoint, notes = checkpoint_of_run(RunDirectory(out_dir), step, weights_only=False)
        for text in notes:
            note(text)
        theirs = _for_nanogpt(checkpoint)
        write_nanogpt_checkpoint(Path(target), theirs)
        told = f"step {checkpoint.step:,} of {out_dir} written to {target}; nanoGPT resumes from it"
        return told if theirs.moments else f"{told}, with new moments: its AdamW has no use for Muon's"
    weights = weights_of_run(out_dir, step)
    for text in weights.notes:
        note(text)
    if isinstance(weights.shape, Nanochat2026Shape):
        raise UserError(
            f"{out_dir} cannot be written for Hugging Face",
            "transformers has nanochat's architecture of October 2025, not that of 2026",
            "onecard samples from it as it is; train with --generation=2025 for a model that goes there",
        )
    try:
        tokenizer = tokenizer_of(weights)
        n_vocab, eot = tokenizer.n_vocab, tokenizer.eot
    except UserError:
        n_vocab, eot = None, None  # weights alone are still worth having
    write_huggingface_folder(Path(target), weights.shape, weights.tensors, n_vocab=n_vocab, eot=eot)
    kind = "GPT-2" if isinstance(weights.shape, GPT2Shape) else "nanochat"
    told = f"{weights.description}, written to {target} as a Hugging Face {kind}"
    if n_vocab == GPT2_VOCABULARY:
        return f"{told}; its tokenizer is AutoTokenizer.from_pretrained('gpt2')"
    return f"{told}; without a tokenizer, which transformers has not"


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
            f"{where} is no GPT-2",
            f"its architecture is {shape.arch}, which nanoGPT has not",
            "for Hugging Face: onecard export RUN FOLDER" if shape.arch == "nanochat-2025" else "",
        )
    return shape
