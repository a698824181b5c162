"""Loading without executing, checking, whole files: what all readers and writers of checkpoints share."""

from __future__ import annotations

import contextlib
import pickle
import re
import reprlib
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.arch.shapes import LARGEST, Shape
from onecard.convert.archive import TooLargeError, check_archive, check_legacy
from onecard.errors import UserError, first_line
from onecard.files import flush_to_disk, load_json, open_plain, remove_any, temporary_beside
from onecard.language import _
from onecard.model.registry import model_class

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"

_SHORT = 60  # characters, of a value in a message


def load_without_executing(path: Path) -> Any:
    """What torch.save wrote, if it is tensors and plain values; never runs what a pickle asks for."""
    if not path.is_file():
        raise UserError(_("there is no file {path}").format(path=path))
    start = first_bytes(path)
    zipped = start.startswith(b"PK")
    if zipped and not zipfile.is_zipfile(path):
        # A zip archive keeps its table of contents at the end.
        raise UserError(
            _("{path} is incomplete").format(path=path),
            _("the end of the file is missing: the copy or the program that wrote it was interrupted"),
            _("copy it again, or go back to an older checkpoint"),
        )
    if not zipped and not start.startswith(b"\x80"):
        raise UserError(
            _("{path} is not a checkpoint").format(path=path),
            _("it does not begin like a file that torch.save wrote"),
        )
    try:
        (check_archive if zipped else check_legacy)(path)
        # The format before PyTorch 1.6 (OpenAI's first uploads) is not a zip and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        raise UserError(
            _("{path} holds more than tensors and plain values, and was not loaded").format(path=path),
            _("it asks for '{name}'; unpickling that could run any program, so onecard does not").format(
                name=wanted[1]
            )
            if wanted
            else _("it asks for something else, or is damaged; unpickling it could run any program"),
            _(
                "if you trust its author, load it where it was made, replace everything in it that is not a\n"
                "tensor, number, string, list or dict, and torch.save it again"
            ),
        ) from error
    except TooLargeError as error:
        raise UserError(
            _("{path} was not loaded: it would take far more memory than its size").format(path=path),
            _("{error}; files of models never do that").format(error=error),
            _("delete it if you do not know where it comes from"),
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(
            _("{path} cannot be read").format(path=path),
            _("the file is damaged: {error}").format(error=first_line(error)),
        ) from error


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the order of named_parameters(), which nanoGPT's model shares with ours."""
    with torch.device("meta"):
        model = model_class(shape)(shape)  # type: ignore[call-arg]  # an architecture brings its own parts
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def named_tensors(value: object, where: Path | str) -> dict[str, Tensor]:
    if not isinstance(value, Mapping):
        raise UserError(
            _("{where} holds no model").format(where=where),
            _("expected tensors by name, found {kind}").format(kind=type(value).__name__),
        )
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(
                _("{name} in {where} is not a tensor").format(name=repr(name), where=where),
                _("it is of type {kind}").format(kind=type(tensor).__name__),
            )
    return dict(value)


def read_settings(path: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file that lies next to weights; `hint` is for where it is missing."""
    if not path.is_file():
        raise UserError(_("there is no file {path}").format(path=path), hint=hint)
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        raise UserError(_("cannot read {path}").format(path=path), first_line(error)) from error
    if not isinstance(content, dict):
        raise UserError(_("cannot read {path}").format(path=path), _("it is JSON, but not an object"))
    return content


def shown(value: object) -> str:
    """A value out of a file, as a message shows it: of any size and depth, and cheap."""
    return reprlib.repr(value)


def unquoted(value: object) -> str:
    """The same, for text without its quotes."""
    return value if isinstance(value, str) and len(value) <= _SHORT else shown(value)


def only(name: str, value: object, wanted: object) -> str:
    """A setting that onecard computes with one value alone."""
    return _("{name} = {value} (only {wanted})").format(name=name, value=unquoted(value), wanted=str(wanted))


def unsupported_settings(settings: list[str]) -> str:
    return "\n".join([_("these settings change the numbers and are not supported:"), *settings])


def plain_name(name: str) -> str:
    """Without what torch.compile (anywhere in the name) and DDP (in front) put there."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def is_mask_buffer(name: str) -> bool:
    """Causal masks that older versions stored with the weights (`c_attn.bias` is not one)."""
    return name.endswith((".attn.bias", ".attn.masked_bias"))


def checked_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: Path | str
) -> dict[str, Tensor]:
    """The expected tensors in the expected order, as fp32; anything missing, left over or odd is named."""
    for name in expected:
        if name not in found:
            raise UserError(
                _("{where} lacks the tensor '{name}'").format(where=where, name=name),
                _("its settings promise it"),
            )
    for name, tensor in found.items():
        if name not in expected:
            raise UserError(
                _("{where} holds the tensor '{name}', which this model does not have").format(
                    where=where, name=name
                ),
                _(
                    "the weights and their settings do not belong together, or it is a variant that onecard "
                    "does not know"
                ),
            )
        if tuple(tensor.shape) != expected[name]:
            raise UserError(
                _("the tensor '{name}' in {where} has the wrong shape").format(name=name, where=where),
                _("it is {found}; its settings promise {wanted}").format(
                    found=_times(tensor.shape), wanted=_times(expected[name])
                ),
            )
        if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_meta:
            raise UserError(
                _("the tensor '{name}' in {where} does not hold plain floating-point numbers").format(
                    name=name, where=where
                ),
                _("it is a tensor of type {dtype} and layout {layout}").format(
                    dtype=tensor.dtype, layout=tensor.layout
                ),
                _("use the weights before quantization"),
            )
    _refuse_shared_storage(found.values(), where)
    return {name: found[name].detach().to(torch.float32) for name in expected}


def _refuse_shared_storage(tensors: Collection[Tensor], where: Path | str) -> None:
    """A view can be of any size, whatever lies behind it: in fp32 each would have memory of its own."""
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors) > sum(stored.values()):
        raise UserError(
            _("{where} promises more numbers than it holds").format(where=where),
            _("several of its tensors are made of the same ones"),
        )


def same_values(one: Tensor, other: Tensor) -> bool:
    # Tied tensors share storage: nothing to compare, and NaNs do not count as a difference.
    tied = one.shape == other.shape and one.dtype == other.dtype and one.data_ptr() == other.data_ptr()
    return tied or torch.equal(one.to(torch.float32), other)


def sizes_in(
    settings: Mapping[str, Any], names: Mapping[str, str], n_tensors: int, where: Path
) -> dict[str, int]:
    """The sizes of a model by our names, if a model with that many tensors can have them.

    names: what the settings call them, by our names.
    """

    def wrong(why: str) -> UserError:
        return UserError(_("the model settings in {where} are incomplete or wrong").format(where=where), why)

    sizes: dict[str, int] = {}
    for ours, name in names.items():
        value = sizes[ours] = settings.get(name, 0)
        if type(value) is not int or value < 1:
            raise wrong(
                _("{name} is {value}").format(name=name, value=shown(value))
                if name in settings
                else _("{name} is missing").format(name=name)
            )
    for ours, name in names.items():
        if sizes[ours] > LARGEST[ours]:
            raise wrong(
                _("{name} is {value}, more than any model's").format(name=name, value=shown(sizes[ours]))
            )
    width, heads = names["n_embd"], names["n_head"]
    if sizes["n_embd"] % sizes["n_head"]:
        raise wrong(
            _("{width} {n} is not a multiple of {heads} {m}").format(
                width=width, n=sizes["n_embd"], heads=heads, m=sizes["n_head"]
            )
        )
    if sizes["n_layer"] > n_tensors:  # before a model of that many layers is laid out
        raise wrong(
            _("{name} is {n}, but there are only {n_tensors} tensors").format(
                name=names["n_layer"], n=sizes["n_layer"], n_tensors=n_tensors
            )
        )
    return sizes


def first_bytes(path: Path) -> bytes:
    """How the file begins; one that Git LFS has yet to fetch is refused."""
    try:
        with open_plain(path) as file:
            start = file.read(32)
    except OSError as error:
        raise UserError(_("cannot read {path}").format(path=path), error.strerror or str(error)) from error
    if start.startswith(b"version https://git-lfs"):
        raise UserError(
            _("{path} is only a pointer to the real file").format(path=path),
            _("it was cloned without Git LFS"),
            f"git -C {path.parent} lfs pull",
        )
    return start


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path next to the target to write to; it takes the target's place when all went well."""
    target = target.resolve()
    unfinished = temporary_beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield unfinished
            unfinished.replace(target)
        except BaseException:
            remove_any(unfinished)
            raise
        flush_to_disk(target.parent)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as RuntimeError
        raise UserError(_("cannot write {target}").format(target=target), first_line(error)) from error


def _times(size: tuple[int, ...]) -> str:
    return " × ".join(map(str, size)) or _("a single number")
