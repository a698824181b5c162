"""GPT-2 as transformers keeps it.

Its linear weights lie transposed there (its Conv1D, in × out) and it always has biases. Otherwise the
tensors and their names are those of nanoGPT, and so of our model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.arch.shapes import GPT2_VOCABULARY, GPT2Shape
from onecard.convert.reading import (
    EMBEDDING,
    HEAD,
    checked_tensors,
    is_mask_buffer,
    only,
    parameter_shapes,
    same_values,
    sizes_in,
    unquoted,
    unsupported_settings,
)
from onecard.errors import UserError
from onecard.language import _

_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_GELU_TANH = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
_NORM_EPSILON = 1e-5

_SIZES = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
}
# What transformers assumes where config.json is silent.
_DEFAULT_SIZES = {
    "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": GPT2_VOCABULARY, "n_positions": 1024,
}  # fmt: skip


def read_gpt2(
    config: dict[str, Any], stored: dict[str, Tensor], folder: Path
) -> tuple[GPT2Shape, dict[str, Tensor]]:
    """Shape and fp32 tensors, from config.json and what the weight files hold."""
    found = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
        for name, tensor in stored.items()
        if not is_mask_buffer(f".{name}")
    }
    shape = _shape_of(config, n_tensors=len(found), where=folder / "config.json")
    head = found.pop(HEAD, None)
    stored_shapes = {
        name: size[::-1] if name.endswith(_CONV1D) else size for name, size in parameter_shapes(shape).items()
    }
    checked = checked_tensors(found, stored_shapes, folder)
    _check_tied(head, checked[EMBEDDING], bool(config.get("tie_word_embeddings", True)), folder)
    tensors = {name: _transposed(name, tensor) for name, tensor in checked.items()}
    biases = [name for name in tensors if name.endswith(".bias")]
    # Zero biases alone do not mean a model without them: they could be learnt from here on. Only our
    # own mark says so, and it outlives a fine-tuning with transformers that has moved the biases.
    own_mark = config.get("onecard")
    if isinstance(own_mark, dict) and not isinstance(own_mark.get("bias"), bool):
        where = folder / "config.json"
        raise UserError(
            _("{path} is damaged").format(path=where), _("its entry 'onecard' is not what export writes")
        )
    without_bias = isinstance(own_mark, dict) and not own_mark["bias"]
    if without_bias and not any(tensors[name].count_nonzero() for name in biases):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in biases}
        shape = replace(shape, bias=False)
    return shape, tensors


def stored_gpt2(
    shape: GPT2Shape, tensors: dict[str, Tensor], n_vocab: int, eot: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What goes into config.json and the weight file: the reverse of read_gpt2."""
    stored = {}
    for name, size in parameter_shapes(replace(shape, bias=True)).items():
        tensor = tensors[name] if name in tensors else torch.zeros(size)
        stored[name] = _transposed(name, tensor[:n_vocab] if name == EMBEDDING else tensor)
    return _config_of(shape, n_vocab, eot), stored


def _shape_of(config: dict[str, Any], n_tensors: int, where: Path) -> GPT2Shape:
    sizes = sizes_in({**_DEFAULT_SIZES, **config}, _SIZES, n_tensors, where)
    activation = config.get("activation_function", "gelu_new")
    unsupported = []
    if not isinstance(activation, str) or activation not in _GELU_TANH:
        unsupported.append(f"activation_function = {unquoted(activation)}")
    if not config.get("scale_attn_weights", True):
        unsupported.append("scale_attn_weights = false")
    unsupported += [
        f"{switch} = true"
        for switch in ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
        if config.get(switch, False)
    ]
    if config.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        value = unquoted(config["n_inner"])
        unsupported.append(
            _("n_inner = {value} (only 4 × n_embd = {n})").format(value=value, n=4 * sizes["n_embd"])
        )
    if config.get("layer_norm_epsilon", _NORM_EPSILON) != _NORM_EPSILON:
        unsupported.append(only("layer_norm_epsilon", config["layer_norm_epsilon"], _NORM_EPSILON))
    if unsupported:
        raise UserError(
            _("{where} describes a GPT-2 that onecard cannot compute").format(where=where),
            unsupported_settings(unsupported),
        )
    return GPT2Shape(**sizes, bias=True, gelu_tanh=_GELU_TANH[activation])


def _check_tied(head: Tensor | None, embedding: Tensor, tied: bool, where: Path) -> None:
    if head is None and not tied:
        raise UserError(
            _("{where} has no output head").format(where=where),
            _("tie_word_embeddings is false, but there is no '{head}' among the tensors").format(head=HEAD),
        )
    if head is not None and not same_values(head, embedding):
        raise UserError(
            _("{path} has an output head of its own").format(path=where),
            _("'{one}' differs from '{other}'; onecard's GPT-2 uses one tensor for both").format(
                one=HEAD, other=EMBEDDING
            ),
        )


def _transposed(name: str, tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if name.endswith(_CONV1D) else tensor


def _config_of(shape: GPT2Shape, n_vocab: int, eot: int | None) -> dict[str, Any]:
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
        "onecard": {"bias": shape.bias},
    }
