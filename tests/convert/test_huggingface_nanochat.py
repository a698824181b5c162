"""nanochat folders of transformers: both programs compute the same, in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from onecard.arch.shapes import NanochatShape
from onecard.convert.huggingface import read_huggingface_folder, write_huggingface_folder
from onecard.errors import UserError
from onecard.model.layers import RMS_EPSILON
from onecard.model.nanochat import Nanochat

transformers = pytest.importorskip("transformers")

SHAPE = NanochatShape(n_layer=2, n_head=2, n_embd=16, vocab_size=40, block_size=12)
TOKENS = torch.randint(0, 37, (3, 12), generator=torch.Generator().manual_seed(5))


def our_model(shape: Any, tensors: dict[str, Tensor]) -> Nanochat:
    assert isinstance(shape, NanochatShape)
    model = Nanochat(shape)
    model.load_state_dict(tensors)
    return model


def random_tensors(shape: NanochatShape) -> dict[str, Tensor]:
    """Larger than at initialisation, where projections are zero and hide most mistakes."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(parameter.shape, generator=generator) * 0.3
        for name, parameter in Nanochat(shape).named_parameters()
    }


def their_model(**settings: Any) -> Any:
    sizes = {
        "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 64,
        "vocab_size": 40, "max_position_embeddings": 12,
    }  # fmt: skip
    tokens = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": None}
    config = transformers.NanoChatConfig(**{**sizes, **tokens, **settings})
    model = transformers.NanoChatForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def their_folder(tmp_path: Path, **settings: Any) -> Path:
    their_model(**settings).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def edit_config(folder: Path, **changes: Any) -> Path:
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def their_gradients_by_our_names(model: Any) -> dict[str, Tensor]:
    """Written out, and not by the converter's own table."""
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = {"transformer.wte.weight": theirs["model.embed_tokens.weight"]}
    for i in range(SHAPE.n_layer):
        there, here = f"model.layers.{i}", f"transformer.h.{i}"
        qkv = [theirs[f"{there}.self_attn.{kind}_proj.weight"] for kind in "qkv"]
        ours[f"{here}.attn.c_attn.weight"] = torch.cat(qkv)
        ours[f"{here}.attn.c_proj.weight"] = theirs[f"{there}.self_attn.o_proj.weight"]
        ours[f"{here}.mlp.c_fc.weight"] = theirs[f"{there}.mlp.fc1.weight"]
        ours[f"{here}.mlp.c_proj.weight"] = theirs[f"{there}.mlp.fc2.weight"]
    return {**ours, "lm_head.weight": theirs["lm_head.weight"]}


@pytest.mark.parametrize("n_vocab", [None, 37])
def test_transformers_computes_what_we_compute(tmp_path: Path, n_vocab: int | None) -> None:
    tensors = random_tensors(SHAPE)
    write_huggingface_folder(tmp_path / "ours", SHAPE, tensors, n_vocab=n_vocab, eot=1)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert type(theirs).__name__ == "NanoChatForCausalLM"
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        our_logits = our_model(SHAPE, tensors)(TOKENS)
        their_logits = theirs.eval()(TOKENS).logits
    assert their_logits.shape[-1] == (n_vocab or 40)
    torch.testing.assert_close(their_logits, our_logits[..., :n_vocab], atol=1e-5, rtol=0)
    assert their_logits.std() > 0.5, "too small to show a mistake"
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 1
    assert theirs.config.pad_token_id is None and theirs.dtype == torch.float32


@pytest.mark.parametrize(("epsilon", "close"), [(RMS_EPSILON, 1e-5), (1e-6, 1e-4)])
def test_we_compute_what_transformers_computes(tmp_path: Path, epsilon: float, close: float) -> None:
    theirs = their_model(rms_norm_eps=epsilon)
    theirs.save_pretrained(tmp_path / "theirs")
    shape, tensors = read_huggingface_folder(tmp_path / "theirs")
    assert shape == SHAPE
    with torch.no_grad():
        our_logits, their_logits = our_model(shape, tensors)(TOKENS), theirs(TOKENS).logits
    torch.testing.assert_close(our_logits, their_logits, atol=close, rtol=0)


def test_loss_and_gradients_agree(tmp_path: Path) -> None:
    theirs = their_model(rms_norm_eps=RMS_EPSILON)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = our_model(*read_huggingface_folder(tmp_path / "theirs"))
    x_BT, y_BT = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()
    totals = {name: torch.zeros_like(parameter) for name, parameter in ours.named_parameters()}
    ours.use_accumulators(totals)
    our_loss = ours.loss_sum(x_BT, y_BT, scale=torch.tensor(1 / y_BT.numel())) / y_BT.numel()
    their_loss = F.cross_entropy(theirs(x_BT).logits.flatten(0, 1), y_BT.flatten())
    their_loss.backward()
    assert our_loss.item() == pytest.approx(their_loss.item(), abs=1e-5)
    expected = their_gradients_by_our_names(theirs)
    assert set(expected) == set(totals)
    for name, gradient in totals.items():
        assert (gradient - expected[name]).norm() < 1e-5 * expected[name].norm(), name


def test_round_trip_is_exact(tmp_path: Path) -> None:
    tensors = random_tensors(SHAPE)
    write_huggingface_folder(tmp_path / "ours", SHAPE, tensors, n_vocab=None, eot=None)
    shape, read = read_huggingface_folder(tmp_path / "ours")
    assert shape == SHAPE and list(read) == list(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)

    model = transformers.NanoChatForCausalLM.from_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    again_shape, again = read_huggingface_folder(tmp_path / "theirs")
    assert again_shape == SHAPE and all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_padding_of_the_vocabulary_is_left_out_of_both_its_matrices(tmp_path: Path) -> None:
    tensors = random_tensors(SHAPE)
    write_huggingface_folder(tmp_path / "ours", SHAPE, tensors, n_vocab=37, eot=None)
    shape, read = read_huggingface_folder(tmp_path / "ours")
    assert shape == replace(SHAPE, vocab_size=37)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        assert torch.equal(read[name], tensors[name][:37])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(SHAPE)
    write_huggingface_folder(tmp_path / "half", SHAPE, tensors, n_vocab=None, eot=None, dtype=dtype)
    _, read = read_huggingface_folder(tmp_path / "half")
    assert all(torch.equal(read[name], tensors[name].to(dtype).float()) for name in tensors)
    assert transformers.NanoChatForCausalLM.from_pretrained(tmp_path / "half").dtype == dtype


def test_settings_of_transformers_before_version_5_are_read(tmp_path: Path) -> None:
    folder = their_folder(tmp_path)
    edit_config(folder, rope_parameters=None, rope_theta=10000.0, rope_scaling=None)
    assert read_huggingface_folder(folder)[0] == SHAPE
    with pytest.raises(UserError, match="cannot compute") as raised:
        read_huggingface_folder(edit_config(folder, rope_theta=100000.0))
    assert "rope_theta = 100000.0" in raised.value.why


def test_a_config_that_leaves_defaults_out(tmp_path: Path) -> None:
    folder = their_folder(tmp_path)
    kept = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
    config = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": 40, "max_position_embeddings": 12}
    (folder / "config.json").write_text(json.dumps({**{name: config[name] for name in kept}, **sizes}))
    assert read_huggingface_folder(folder)[0] == SHAPE
    loaded = transformers.NanoChatForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        ours = our_model(*read_huggingface_folder(folder))(TOKENS)
        torch.testing.assert_close(ours, loaded(TOKENS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "silu"}, "hidden_act = silu (only relu2)"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping = None (only 15.0)"),
        ({"final_logit_softcapping": 30}, "final_logit_softcapping = 30"),
        ({"intermediate_size": 48}, "intermediate_size = 48 (only 64)"),
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1"),
        ({"head_dim": 4}, "head_dim = 4"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05 (only up to 1e-06)"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = small"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta = 500000.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type = linear"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = linear"),
        ({"rope_parameters": [1]}, "rope_parameters = [1]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, "heads of 1 channels"),
        ({"num_attention_heads": 3}, "hidden_size 16 is not a multiple of num_attention_heads 3"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"max_position_embeddings": 10**19}, "more than any model's"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'model.layers.2.self_attn.q_proj.weight'"),
        ({"num_hidden_layers": 1}, "holds the tensor 'model.layers.1."),
        ({"vocab_size": 39}, "has the wrong shape"),
        ({"model_type": ["nanochat"]}, "model of type"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as raised:
        read_huggingface_folder(edit_config(their_folder(tmp_path), **changes))
    assert said in str(raised.value)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = their_folder(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    stored = load_file(folder / "model.safetensors")
    for wrong, said in ((torch.ones(8, 16), "wrong shape"), (torch.ones(16, 16).int(), "floating-point")):
        save_file({**stored, name: wrong}, folder / "model.safetensors")
        with pytest.raises(UserError, match=said) as raised:
            read_huggingface_folder(folder)
        assert name in raised.value.what
    del stored["lm_head.weight"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks the tensor 'lm_head\.weight'"):
        read_huggingface_folder(folder)
