"""GPT-2 folders of Hugging Face transformers, in and out, and OpenAI's weights from the Hub.

transformers keeps GPT-2's linear weights transposed (its Conv1D, in × out) and always has biases.
Otherwise the tensors and their names are those of nanoGPT, and so of our model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.convert.reading import (
    EMBEDDING,
    HEAD,
    checked_tensors,
    first_bytes,
    first_line,
    is_mask_buffer,
    load_without_executing,
    named_tensors,
    parameter_shapes,
    replacing,
    same_values,
    sizes_in,
)
from onecard.errors import UserError, missing_package
from onecard.files import flush_to_disk
from onecard.shapes import GPT2Shape

PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_GELU_TANH = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
_NORM_EPSILON = 1e-5

# What transformers assumes where config.json is silent.
_DEFAULT_SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}


def read_huggingface_folder(path: Path) -> tuple[GPT2Shape, dict[str, Tensor]]:
    """Shape and fp32 tensors of a GPT-2 as transformers' save_pretrained (or our export) left it."""
    config = _read_config(path)
    found = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
        for name, tensor in _stored_tensors(path)
        if not is_mask_buffer(f".{name}")
    }
    shape = _shape_of(config, n_tensors=len(found), where=path / "config.json")
    head = found.pop(HEAD, None)
    stored_shapes = {
        name: size[::-1] if name.endswith(_CONV1D) else size for name, size in parameter_shapes(shape).items()
    }
    stored = checked_tensors(found, stored_shapes, path)
    _check_tied(head, stored[EMBEDDING], bool(config.get("tie_word_embeddings", True)), path)
    tensors = {name: _transposed(name, tensor) for name, tensor in stored.items()}
    biases = [name for name in tensors if name.endswith(".bias")]
    # Zero biases alone do not mean a model without them: they could be learnt from here on. Only our
    # own mark says so, and it outlives a fine-tuning with transformers that has moved the biases.
    own_mark = config.get("onecard")
    without_bias = isinstance(own_mark, dict) and own_mark.get("bias") is False
    if without_bias and not any(tensors[name].count_nonzero() for name in biases):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in biases}
        shape = replace(shape, bias=False)
    return shape, tensors


def write_huggingface_folder(
    path: Path,
    shape: GPT2Shape,
    tensors: dict[str, Tensor],
    *,
    n_vocab: int | None,
    eot: int | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a folder that transformers loads as GPT2LMHeadModel; all of it appears at once, or nothing.

    n_vocab: how many tokens the tokenizer has; rows that only pad the vocabulary are left out.
    eot: the end-of-text token, at which generation stops.
    """
    assert set(tensors) == set(parameter_shapes(shape))
    n_vocab = shape.vocab_size if n_vocab is None else n_vocab
    if not 0 < n_vocab <= shape.vocab_size:
        raise UserError(
            f"cannot export {n_vocab} tokens",
            f"the model has a vocabulary of {shape.vocab_size}",
            "check n_vocab",
        )
    if eot is not None and not 0 <= eot < n_vocab:
        raise UserError(f"the end-of-text token {eot} is not one of the {n_vocab} exported tokens")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"{path} exists already" + (" and is not empty" if path.is_dir() else ""),
            "nothing is overwritten",
            "give the name of a new folder, or remove this one",
        )
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise missing_package("safetensors", "train", "exporting") from error
    stored = {}
    for name, size in parameter_shapes(replace(shape, bias=True)).items():
        tensor = tensors[name].detach().cpu() if name in tensors else torch.zeros(size)
        if name == EMBEDDING:
            tensor = tensor[:n_vocab]
        stored[name] = _transposed(name, tensor).to(dtype).contiguous()
    with replacing(path) as unfinished:
        unfinished.mkdir()
        save_file(stored, unfinished / "model.safetensors", metadata={"format": "pt"})
        _write_json(unfinished / "config.json", _config_of(shape, n_vocab, eot, dtype))
        ends = {} if eot is None else {"bos_token_id": eot, "eos_token_id": eot}
        _write_json(unfinished / "generation_config.json", ends)
        for file in unfinished.iterdir():
            _sync_file(file)
        flush_to_disk(unfinished)
        if path.exists():
            path.rmdir()  # empty, as checked; only POSIX would let the rename replace it


def pretrained_folder(name: str) -> Path:
    """The folder with OpenAI's weights, from the Hub or its cache; HF_ENDPOINT and HF_HUB_OFFLINE count."""
    if name not in PRETRAINED:
        raise UserError(
            f"there are no pretrained weights '{name}'",
            "OpenAI published " + ", ".join(PRETRAINED),
            "to start from a folder in Hugging Face format: --init_from=./folder",
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise missing_package("huggingface_hub", "train", f"downloading the weights of {name}") from error
    try:
        files = [
            Path(hf_hub_download(f"openai-community/{name}", file))
            for file in ("config.json", "model.safetensors")
        ]
    except Exception as error:  # which HTTP library's errors come through depends on the Hub client's version
        raise UserError(
            f"cannot get the weights of {name} from the Hugging Face Hub",
            first_line(error),
            f"check the network, or copy config.json and model.safetensors of openai-community/{name}\n"
            "into a folder from a machine that reaches it, and use that: --init_from=./folder\n"
            "(a mirror is named by the environment variable HF_ENDPOINT)",
        ) from error
    return files[-1].parent


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    config = _read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type != "gpt2":
        kind = f"a model of type '{model_type}'" if model_type else "a model of unknown type"
        raise UserError(
            f"{folder} holds {kind}", "onecard reads GPT-2 models from such folders (model_type 'gpt2')"
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(
            f"there is no file {path}",
            hint="give a folder that transformers' save_pretrained or onecard's export wrote",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}", first_line(error)) from error
    if not isinstance(content, dict):
        raise UserError(f"cannot read {path}", "it is JSON, but not an object")
    return content


def _shape_of(config: dict[str, Any], n_tensors: int, where: Path) -> GPT2Shape:
    sizes = sizes_in({**_DEFAULT_SIZES, **config}, _DEFAULT_SIZES, n_tensors, where)
    activation = config.get("activation_function", "gelu_new")
    unsupported = []
    if activation not in _GELU_TANH:
        unsupported.append(f"activation_function = {activation}")
    if not config.get("scale_attn_weights", True):
        unsupported.append("scale_attn_weights = false")
    unsupported += [
        f"{switch} = true"
        for switch in ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
        if config.get(switch, False)
    ]
    if config.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        unsupported.append(f"n_inner = {config['n_inner']} (only 4 × n_embd = {4 * sizes['n_embd']})")
    if config.get("layer_norm_epsilon", _NORM_EPSILON) != _NORM_EPSILON:
        unsupported.append(f"layer_norm_epsilon = {config['layer_norm_epsilon']} (only {_NORM_EPSILON})")
    if unsupported:
        raise UserError(
            f"{where} describes a GPT-2 that onecard cannot compute",
            "these settings change the numbers and are not supported:\n" + "\n".join(unsupported),
        )
    sizes["block_size"] = sizes.pop("n_positions")
    return GPT2Shape(**sizes, bias=True, gelu_tanh=_GELU_TANH[activation])


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as they lie in the folder's files, in whichever of the four forms they came."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            files = [folder / whole]
        elif index.is_file():
            files = _shards(index)
        else:
            continue
        for file in files:
            yield from _tensors_in(file)
        return
    raise UserError(
        f"{folder} has no weights",
        "there is neither model.safetensors nor pytorch_model.bin, whole or in parts",
    )


def _shards(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    # A name that leads elsewhere would have us read a file the user did not hand over.
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise UserError(f"cannot read {index}", "its 'weight_map' does not name files in this folder")
    for name in sorted(names):
        if not (index.parent / name).is_file():
            raise UserError(
                f"there is no file {index.parent / name}", f"{index.name} lists it", "copy the folder again"
            )
    return [index.parent / name for name in sorted(names)]


def _tensors_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix != ".safetensors":
        yield from named_tensors(load_without_executing(file), file).items()
        return
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise missing_package("safetensors", "train", f"reading {file}") from error
    first_bytes(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tensors.get_tensor(name)
    except Exception as error:  # the library's own error type derives from Exception only
        raise UserError(
            f"{file} cannot be read",
            f"the file is incomplete or damaged: {first_line(error)}",
            "copy it again",
        ) from error


def _check_tied(head: Tensor | None, embedding: Tensor, tied: bool, where: Path) -> None:
    if head is None and not tied:
        raise UserError(
            f"{where} has no output head",
            f"tie_word_embeddings is false, but there is no '{HEAD}' among the tensors",
        )
    if head is not None and not same_values(head, embedding):
        raise UserError(
            f"{where} has an output head of its own",
            f"'{HEAD}' differs from '{EMBEDDING}'; onecard's GPT-2 uses one tensor for both",
        )


def _transposed(name: str, tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if name.endswith(_CONV1D) else tensor


def _config_of(shape: GPT2Shape, n_vocab: int, eot: int | None, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new" if shape.gelu_tanh else "gelu",
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_inner": None,
        "n_positions": shape.block_size,
        "n_ctx": shape.block_size,
        "vocab_size": n_vocab,
        "layer_norm_epsilon": _NORM_EPSILON,
        "scale_attn_weights": True,
        # transformers would otherwise fine-tune with its default of 0.1.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "onecard": {"bias": shape.bias},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
