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
from onecard.language import N_, _

_Reader = Callable[[dict[str, Any], dict[str, Tensor], Path], tuple[Shape, dict[str, Tensor]]]
_READERS: dict[str, _Reader] = {"gpt2": read_gpt2, "nanochat": read_nanochat}  # by model_type
_WRITTEN_BY = N_("give a folder that transformers' save_pretrained or onecard's export wrote")


def read_huggingface_folder(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Shape and fp32 tensors of a model as transformers' save_pretrained (or our export) left it."""
    if not path.is_dir():
        raise UserError(_("there is no folder {path}").format(path=path))
    config = read_settings(path / "config.json", _(_WRITTEN_BY))
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise UserError(
            _("{path} holds a model of type {kind}").format(path=path, kind=shown(model_type))
            if model_type
            else _("{path} holds a model of unknown type").format(path=path),
            _("onecard reads GPT-2 and nanochat models from such folders (model_type 'gpt2' or 'nanochat')"),
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
            _("cannot export {n_vocab:,} tokens").format(n_vocab=n_vocab),
            _("the model has a vocabulary of {vocab_size:,}").format(vocab_size=shape.vocab_size),
        )
    if eot is not None and not 0 <= eot < n_vocab:
        raise UserError(
            _("the end-of-text token {eot} is not one of the {n_vocab} exported tokens").format(
                eot=eot, n_vocab=n_vocab
            )
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            _("{path} exists already and is not empty").format(path=path)
            if path.is_dir()
            else _("{path} exists already").format(path=path),
            _("nothing is overwritten"),
            _("give the name of a new folder, or remove what is there"),
        )
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise missing_package("safetensors", "train", _("exporting")) from error
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
            _("there are no pretrained weights '{name}'").format(name=name),
            _("OpenAI published {names}").format(names=", ".join(PRETRAINED)),
            _("to start from a folder in Hugging Face format: --init_from=./folder"),
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise missing_package(
            "huggingface_hub", "train", _("downloading the weights of {name}").format(name=name)
        ) from error
    try:
        files = [
            Path(hf_hub_download(f"openai-community/{name}", file))
            for file in ("config.json", "model.safetensors")
        ]
    except Exception as error:  # which HTTP library's errors come through depends on the Hub client's version
        raise UserError(
            _("cannot get the weights of {name} from the Hugging Face Hub").format(name=name),
            first_line(error),
            _(
                "check the network, or copy config.json and model.safetensors of openai-community/{name}\n"
                "into a folder on a machine that reaches the Hub, and use that folder: --init_from=./folder\n"
                "(the environment variable HF_ENDPOINT names a mirror)"
            ).format(name=name),
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
        _("{folder} has no weights").format(folder=folder),
        _("there is neither model.safetensors nor pytorch_model.bin, whole or in parts"),
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_settings(index, _(_WRITTEN_BY)).get("weight_map")
    found = list(weight_map.values()) if isinstance(weight_map, dict) else []
    names = {name for name in found if isinstance(name, str)}
    # A name that leads elsewhere would have us read a file the user did not hand over.
    if not names or not all(isinstance(name, str) for name in found) or not all(map(_is_plain, names)):
        raise UserError(
            _("cannot read {path}").format(path=index),
            _("its 'weight_map' does not name files in this folder"),
        )
    for name in sorted(names):
        if not (index.parent / name).is_file():
            raise UserError(
                _("there is no file {path}").format(path=index.parent / name),
                _("{name} lists it").format(name=index.name),
                _("copy the folder again"),
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
        raise missing_package("safetensors", "train", _("reading {file}").format(file=file)) from error
    first_bytes(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tensors.get_tensor(name)
    except Exception as error:  # the library's own error type derives from Exception only
        raise UserError(
            _("{path} cannot be read").format(path=file),
            _("the file is incomplete or damaged: {error}").format(error=first_line(error)),
            _("copy it again"),
        ) from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
