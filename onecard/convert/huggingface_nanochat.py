"""nanochat of October 2025 as transformers keeps it (NanoChatForCausalLM, model_type 'nanochat')."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from onecard.arch.shapes import GPT2_PADDED_VOCABULARY, NanochatShape
from onecard.convert.packing import packed, packing_of, shapes_there, taken_apart
from onecard.convert.reading import (
    EMBEDDING,
    HEAD,
    checked_tensors,
    only,
    parameter_shapes,
    sizes_in,
    unquoted,
    unsupported_settings,
)
from onecard.errors import UserError
from onecard.language import _
from onecard.model.layers import RMS_EPSILON

_SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
}
# What transformers assumes where config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "hidden_size": 768,
    "vocab_size": GPT2_PADDED_VOCABULARY,
    "max_position_embeddings": 2048,
    "intermediate_size": 8192,
    "hidden_act": "relu2",
    "final_logit_softcapping": 15.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_SOFTCAP, _ROTARY_BASE = 15.0, 10_000.0

# nanochat names no epsilon, so torch's norm adds fp32's own, 1.19e-7 (RMS_EPSILON); that is what we compute
# and what we write. transformers assumes 1e-6, and so do the folders made from nanochat's checkpoints. What
# is normed has a mean square near 1 or above, where the two differ by 4e-7 of the value or less: taken for
# the same.
_LARGEST_EPSILON = 1e-6

_PARTS = {
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.c_fc": ("mlp.fc1",),
    "mlp.c_proj": ("mlp.fc2",),
}


def read_nanochat(
    config: dict[str, Any], stored: dict[str, Tensor], folder: Path
) -> tuple[NanochatShape, dict[str, Tensor]]:
    """Shape and fp32 tensors, from config.json and what the weight files hold."""
    shape = _shape_of(config, n_tensors=len(stored), where=folder / "config.json")
    shapes = parameter_shapes(shape)
    packing = packing_of(shapes, _their_names)
    return shape, packed(checked_tensors(stored, shapes_there(shapes, packing), folder), packing)


def stored_nanochat(
    shape: NanochatShape, tensors: dict[str, Tensor], n_vocab: int, eot: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What goes into config.json and the weight file: the reverse of read_nanochat."""
    cropped = {name: t[:n_vocab] if name in (EMBEDDING, HEAD) else t for name, t in tensors.items()}
    return _config_of(shape, n_vocab, eot), taken_apart(cropped, packing_of(tensors, _their_names))


def _their_names(name: str) -> tuple[str, ...]:
    if name == HEAD:
        return (HEAD,)
    if name == EMBEDDING:
        return ("model.embed_tokens.weight",)
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return tuple(f"model.layers.{layer}.{theirs}.weight" for theirs in _PARTS[part])


def _shape_of(config: dict[str, Any], n_tensors: int, where: Path) -> NanochatShape:
    values = {**_DEFAULTS, **config}
    sizes = sizes_in(values, _SIZES, n_tensors, where)
    width, heads = sizes["n_embd"], sizes["n_head"]
    unsupported = [
        only(name, values[name], wanted)
        for name, wanted in (
            ("intermediate_size", 4 * width),
            ("hidden_act", "relu2"),
            ("final_logit_softcapping", _SOFTCAP),
        )
        if values[name] != wanted
    ]
    unsupported += [f"{name} = true" for name in ("attention_bias", "tie_word_embeddings") if values[name]]
    epsilon = values["rms_norm_eps"]
    if not isinstance(epsilon, int | float) or not 0 < epsilon <= _LARGEST_EPSILON:
        unsupported.append(
            _("rms_norm_eps = {value} (only up to {largest})").format(
                value=unquoted(epsilon), largest=str(_LARGEST_EPSILON)
            )
        )
    if values.get("num_key_value_heads") not in (None, heads):
        unsupported.append(only("num_key_value_heads", values["num_key_value_heads"], "num_attention_heads"))
    if values.get("head_dim") not in (None, width // heads):
        unsupported.append(only("head_dim", values["head_dim"], "hidden_size / num_attention_heads"))
    if width // heads % 2:
        unsupported.append(
            _("heads of {n} channels (rotary positions need an even number)").format(n=width // heads)
        )
    unsupported += _rotary_problems(config)
    if unsupported:
        raise UserError(
            _("{where} describes a nanochat that onecard cannot compute").format(where=where),
            unsupported_settings(unsupported),
        )
    return NanochatShape(**sizes)


def _rotary_problems(config: dict[str, Any]) -> list[str]:
    # Before version 5 transformers kept the base with the other settings, and the rest in rope_scaling.
    rotary = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rotary, dict):
        return [f"rope_parameters = {unquoted(rotary)}"]
    usual = {"rope_type": rotary.get("type", "default"), "rope_theta": _ROTARY_BASE}
    values = {**usual, "partial_rotary_factor": 1.0, **config, **rotary}
    return [
        only(name, values[name], wanted)
        for name, wanted in (
            ("rope_type", "default"),
            ("rope_theta", _ROTARY_BASE),
            ("partial_rotary_factor", 1.0),
        )
        if values[name] != wanted
    ]


def _config_of(shape: NanochatShape, n_vocab: int, eot: int | None) -> dict[str, Any]:
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head,
        "hidden_size": shape.n_embd,
        "intermediate_size": 4 * shape.n_embd,
        "max_position_embeddings": shape.block_size,
        "vocab_size": n_vocab,
        "hidden_act": "relu2",
        "rms_norm_eps": RMS_EPSILON,
        "final_logit_softcapping": _SOFTCAP,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROTARY_BASE},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": eot,
        "eos_token_id": eot,
        # transformers would otherwise take token 1 for padding and never train its embedding.
        "pad_token_id": None,
    }
