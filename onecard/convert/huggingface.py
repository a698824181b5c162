"""Model folders of Hugging Face transformers, in and out, and OpenAI's weights from the Hub.

What a folder is made of is here; what GPT-2 and nanochat look like in one is in huggingface_gpt2.py and
huggingface_nanochat.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.arch.shapes import PRETRAINED, GPT2Shape, NanochatShape, Shape
from onecard.convert.huggingface_gpt2 import read_gpt2, stored_gpt2
from onecard.convert.huggingface_nanochat import read_nanochat, stored_nanochat
from onecard.convert.reading import (
    first_bytes,
    load_without_executing,
    named_tensors,
    parameter_shapes,
    read_settings,
    replacing,
    shown,
)
from onecard.errors import UserError, first_line, missing_package
from onecard.files import flush_to_disk

_Reader = Callable[[dict[str, Any], dict[str, Tensor], Path], tuple[Shape, dict[str, Tensor]]]
_READERS: dict[str, _Reader] = {"gpt2": read_gpt2, "nanochat": read_nanochat}  # by model_type
_WRITTEN_BY = "give a folder that transformers' save_pretrained or onecard's export wrote"


def read_huggingface_folder(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Shape and fp32 tensors of a model as transformers' save_pretrained (or our export) left it."""
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    config = read_settings(path / "config.json", _WRITTEN_BY)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        kind = f"a model of type {shown(model_type)}" if model_type else "a model of unknown type"
        raise UserError(
            f"{path} holds {kind}",
            "onecard reads GPT-2 and nanochat models from such folders (model_type 'gpt2' or 'nanochat')",
        )
    return _READERS[model_type](config, dict(_stored_tensors(path)), path)


def write_huggingface_folder(
    path: Path,
    shape: Shape,
    tensors: dict[str, Tensor],
    *,
    n_vocab: int | None,
    eot: int | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a folder that transformers loads as a model of its own; all of it appears at once, or nothing.

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
    if isinstance(shape, NanochatShape):
        config, stored = stored_nanochat(shape, tensors, n_vocab, eot)
    else:
        assert isinstance(shape, GPT2Shape), f"{shape.arch} has no place in transformers"
        config, stored = stored_gpt2(shape, tensors, n_vocab, eot)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in stored.items()}
    with replacing(path) as unfinished:
        unfinished.mkdir()
        save_file(stored, unfinished / "model.safetensors", metadata={"format": "pt"})
        _write_json(unfinished / "config.json", config)
        ends = {} if eot is None else {"bos_token_id": eot, "eos_token_id": eot}
        _write_json(unfinished / "generation_config.json", ends)
        # The library's own writer lets nobody else read what it writes, whatever the umask says.
        (unfinished / "model.safetensors").chmod((unfinished / "config.json").stat().st_mode)
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
    weight_map = read_settings(index, _WRITTEN_BY).get("weight_map")
    found = list(weight_map.values()) if isinstance(weight_map, dict) else []
    names = {name for name in found if isinstance(name, str)}
    # A name that leads elsewhere would have us read a file the user did not hand over.
    if not names or not all(isinstance(name, str) for name in found) or not all(map(_is_plain, names)):
        raise UserError(f"cannot read {index}", "its 'weight_map' does not name files in this folder")
    for name in sorted(names):
        if not (index.parent / name).is_file():
            raise UserError(
                f"there is no file {index.parent / name}", f"{index.name} lists it", "copy the folder again"
            )
    return [index.parent / name for name in sorted(names)]


def _is_plain(name: str) -> bool:
    return name == Path(name).name and "\0" not in name


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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
