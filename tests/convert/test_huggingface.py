"""GPT-2 folders of transformers: both programs compute the same, in both directions."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onecard.arch.shapes import GPT2Shape
from onecard.convert import huggingface
from onecard.convert.huggingface import pretrained_folder, read_huggingface_folder, write_huggingface_folder
from onecard.errors import UserError
from onecard.model.gpt2 import GPT2

transformers = pytest.importorskip("transformers")

SHAPE = GPT2Shape(n_layer=2, n_head=2, n_embd=16, vocab_size=40, block_size=12, bias=True)
TOKENS = torch.randint(0, 37, (3, 12), generator=torch.Generator().manual_seed(5))


def our_model(shape: GPT2Shape, tensors: dict[str, Tensor]) -> GPT2:
    model = GPT2(shape)
    model.load_state_dict({**tensors, "lm_head.weight": tensors["transformer.wte.weight"]})
    return model


def randomise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Larger than at initialisation, so that a wrong activation, transpose or bias shows."""
    with torch.no_grad():
        tensor.normal_(1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.3, generator=generator)


def random_tensors(shape: GPT2Shape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    model = GPT2(shape)
    for name, parameter in model.named_parameters():
        randomise(name, parameter, generator)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def their_model(**settings: Any) -> Any:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 12}
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, **settings)).eval()
    generator = torch.Generator().manual_seed(12)
    for name, parameter in model.named_parameters():
        randomise(name, parameter, generator)
    return model


def their_folder(tmp_path: Path, **settings: Any) -> Path:
    folder = tmp_path / "theirs"
    their_model(**settings).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Names are given with __ for the dots."""
    tensors = load_file(folder / "model.safetensors")
    tensors.update(
        {name.replace("__", "."): tensor for name, tensor in changes.items() if tensor is not None}
    )
    for name in (name.replace("__", ".") for name, tensor in changes.items() if tensor is None):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_equal_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu_tanh", [True, False])
@pytest.mark.parametrize("n_vocab", [None, 37])
def test_transformers_computes_what_we_compute(
    tmp_path: Path, bias: bool, gelu_tanh: bool, n_vocab: int | None
) -> None:
    shape = replace(SHAPE, bias=bias, gelu_tanh=gelu_tanh)
    tensors = random_tensors(shape)
    write_huggingface_folder(tmp_path / "ours", shape, tensors, n_vocab=n_vocab, eot=1)
    theirs, loading = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        our_logits = our_model(shape, tensors)(TOKENS)
        their_logits = theirs.eval()(TOKENS).logits
        other_gelu = our_model(replace(shape, gelu_tanh=not gelu_tanh), tensors)(TOKENS)
    assert their_logits.shape[-1] == (n_vocab or 40)
    torch.testing.assert_close(their_logits, our_logits[..., :n_vocab], atol=1e-4, rtol=0)
    assert (our_logits - other_gelu).abs().max() > 5e-4, "this test could not tell the activations apart"
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 1
    assert theirs.dtype == torch.float32


@pytest.mark.parametrize(
    ("activation", "gelu_tanh"), [("gelu_new", True), ("gelu_pytorch_tanh", True), ("gelu", False)]
)
def test_we_compute_what_transformers_computes(tmp_path: Path, activation: str, gelu_tanh: bool) -> None:
    theirs = their_model(activation_function=activation)
    theirs.save_pretrained(tmp_path / "theirs")
    shape, tensors = read_huggingface_folder(tmp_path / "theirs")
    assert shape == replace(SHAPE, gelu_tanh=gelu_tanh)
    with torch.no_grad():
        our_logits, their_logits = our_model(shape, tensors)(TOKENS), theirs(TOKENS).logits
    torch.testing.assert_close(our_logits, their_logits, atol=1e-4, rtol=0)


def test_loss_and_gradients_agree(tmp_path: Path) -> None:
    theirs = their_model()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = our_model(*read_huggingface_folder(tmp_path / "theirs"))
    their_loss = theirs(TOKENS, labels=TOKENS).loss
    count = TOKENS[:, 1:].numel()
    our_gradients = {name: torch.zeros_like(parameter) for name, parameter in ours.named_parameters()}
    ours.use_accumulators(our_gradients)
    our_loss = ours.loss_sum(TOKENS[:, :-1], TOKENS[:, 1:], scale=torch.tensor(1 / count)) / count
    assert our_loss.item() == pytest.approx(their_loss.item(), abs=1e-5)
    their_loss.backward()
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, gradient in our_gradients.items():
        expected = their_gradients[name]
        assert expected is not None and expected.abs().max() > 1e-6
        expected = expected.t() if ".c_" in name and expected.dim() == 2 else expected
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu_tanh", [True, False])
def test_round_trip_is_exact(tmp_path: Path, bias: bool, gelu_tanh: bool) -> None:
    shape = replace(SHAPE, bias=bias, gelu_tanh=gelu_tanh)
    tensors = random_tensors(shape)
    write_huggingface_folder(tmp_path / "new" / "folder", shape, tensors, n_vocab=None, eot=None)
    read_shape, read_tensors = read_huggingface_folder(tmp_path / "new" / "folder")
    assert read_shape == shape
    assert_equal_tensors(read_tensors, tensors)


def test_zero_biases_of_others_stay(tmp_path: Path) -> None:
    folder = their_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(folder, **{name.replace(".", "__"): 0 * tensors[name] for name in tensors if "bias" in name})
    assert read_huggingface_folder(folder)[0].bias


def test_biases_learnt_after_our_export_are_kept(tmp_path: Path) -> None:
    shape = replace(SHAPE, bias=False)
    write_huggingface_folder(tmp_path / "ours", shape, random_tensors(shape), n_vocab=None, eot=None)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        model.transformer.ln_f.bias[3] = 1e-3
    model.save_pretrained(tmp_path / "tuned")
    read_shape, tensors = read_huggingface_folder(tmp_path / "tuned")
    assert read_shape.bias and tensors["transformer.ln_f.bias"].count_nonzero() == 1


def test_other_forms_of_the_same_weights(tmp_path: Path) -> None:
    model = their_model()
    model.save_pretrained(tmp_path / "whole")
    expected_shape, expected = read_huggingface_folder(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    masks = {
        f"transformer.h.{i}.attn.{kind}": torch.ones(2, 2) for i in (0, 1) for kind in ("bias", "masked_bias")
    }
    forms = {
        "no prefix": {n.removeprefix("transformer."): t for n, t in {**stored, **masks}.items()},
        "masks": {**stored, **masks},
        "head stored too": {**stored, "lm_head.weight": stored["transformer.wte.weight"].clone()},
    }
    for form, tensors in forms.items():
        for file in ("model.safetensors", "pytorch_model.bin", "legacy pytorch_model.bin"):
            folder = tmp_path / f"{form} {file}"
            folder.mkdir()
            (folder / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
            if file == "model.safetensors":
                save_file(tensors, folder / file)
            else:
                zipped = not file.startswith("legacy")
                torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
            shape, read = read_huggingface_folder(folder)
            assert shape == expected_shape
            assert_equal_tensors(read, expected)


def test_sharded_folder(tmp_path: Path) -> None:
    model = their_model()
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    _, whole = read_huggingface_folder(tmp_path / "whole")
    assert_equal_tensors(read_huggingface_folder(tmp_path / "shards")[1], whole)

    shard = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        read_huggingface_folder(tmp_path / "shards")
    index = tmp_path / "shards" / "model.safetensors.index.json"
    for weight_map in ({"x": "../whole/model.safetensors"}, {"x": 3}, {}, None):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match="cannot read") as raised:
            read_huggingface_folder(tmp_path / "shards")
        assert "weight_map" in raised.value.why


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(SHAPE)
    write_huggingface_folder(tmp_path / "half", SHAPE, tensors, n_vocab=None, eot=None, dtype=dtype)
    _, read = read_huggingface_folder(tmp_path / "half")
    assert_equal_tensors(read, {name: tensor.to(dtype).float() for name, tensor in tensors.items()})
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "half").dtype == dtype


def test_a_config_that_leaves_defaults_out(tmp_path: Path) -> None:
    folder = their_folder(tmp_path)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 12}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    assert read_huggingface_folder(folder)[0] == replace(SHAPE, gelu_tanh=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": None}, "unknown type"),
        ({"activation_function": "relu"}, "activation_function = relu"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_inner": 32}, "n_inner = 32"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06"),
        ({"n_head": 3}, "not a multiple"),
        ({"n_layer": "two"}, "n_layer is 'two'"),
        ({"n_layer": 10**9}, "n_layer is 1000000000"),
        ({"n_layer": 3}, "lacks the tensor 'transformer.h.2.ln_1.weight'"),
        ({"n_layer": 1}, "holds the tensor 'transformer.h.1."),
        ({"n_positions": 13}, "'transformer.wpe.weight'"),
        ({"n_embd": 32}, "has the wrong shape"),
        ({"tie_word_embeddings": False}, "no output head"),
        ({"onecard": {"bias": "nonsense"}}, "not what export writes"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as raised:
        read_huggingface_folder(edit_config(their_folder(tmp_path), **changes))
    assert said in str(raised.value)


def test_harmless_settings_are_ignored(tmp_path: Path) -> None:
    changes = {"reorder_and_upcast_attn": True, "n_inner": 64, "resid_pdrop": 0.5}
    assert read_huggingface_folder(edit_config(their_folder(tmp_path), **changes))[0].bias


def test_a_head_of_its_own_is_refused_and_an_equal_one_is_not(tmp_path: Path) -> None:
    folder = edit_config(their_folder(tmp_path), tie_word_embeddings=False)
    embedding = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    edit_tensors(folder, lm_head__weight=embedding.clone())
    read_huggingface_folder(folder)
    edit_tensors(folder, lm_head__weight=embedding + 1)
    with pytest.raises(UserError, match="output head of its own"):
        read_huggingface_folder(folder)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = their_folder(tmp_path)
    edit_tensors(folder, transformer__h__0__mlp__c_fc__weight=torch.ones(64, 16))  # not transposed
    with pytest.raises(UserError, match="c_fc") as raised:
        read_huggingface_folder(folder)
    assert "64 × 16" in raised.value.why and "16 × 64" in raised.value.why
    edit_tensors(folder, transformer__h__0__mlp__c_fc__weight=torch.ones(16, 64, dtype=torch.int8))
    with pytest.raises(UserError, match="floating-point"):
        read_huggingface_folder(folder)
    edit_tensors(folder, transformer__h__0__mlp__c_fc__weight=None)
    with pytest.raises(UserError, match="lacks the tensor"):
        read_huggingface_folder(folder)


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        read_huggingface_folder(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no file .*config\.json"):
        read_huggingface_folder(tmp_path)
    folder = their_folder(tmp_path)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        read_huggingface_folder(folder)
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="pointer"):
        read_huggingface_folder(folder)
    weights.unlink()
    with pytest.raises(UserError, match="no weights"):
        read_huggingface_folder(folder)
    for text in ("{", "[1]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match="cannot read"):
            read_huggingface_folder(folder)


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("owned",)


def test_a_malicious_pickle_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = their_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": _Malicious()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="more than tensors"):
        read_huggingface_folder(folder)
    assert not (tmp_path / "owned").exists()


def test_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()  # an empty folder may be there
    write_huggingface_folder(tmp_path / "ours", SHAPE, random_tensors(SHAPE), n_vocab=37, eot=None)
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == names
    assert list(tmp_path.iterdir()) == [tmp_path / "ours"]
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["tie_word_embeddings"] is True
    assert (config["n_positions"], config["n_ctx"], config["vocab_size"]) == (12, 12, 37)
    assert config["eos_token_id"] is None and config["torch_dtype"] == "float32"
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").config.eos_token_id is None


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_says_who_may_read_what_is_written(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_huggingface_folder(tmp_path / "ours", SHAPE, random_tensors(SHAPE), n_vocab=37, eot=None)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ours").iterdir()}
    assert modes == dict.fromkeys(["config.json", "generation_config.json", "model.safetensors"], mode)
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o777 & ~umask


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    leftover = tmp_path / f".ours.{ended.pid}-0a1b2c3d.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    write_huggingface_folder(tmp_path / "ours", SHAPE, random_tensors(SHAPE), n_vocab=37, eot=None)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_writing_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors(SHAPE)

    def write(name: str, n_vocab: int | None = None, eot: int | None = None) -> None:
        write_huggingface_folder(tmp_path / name, SHAPE, tensors, n_vocab=n_vocab, eot=eot)

    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for name, said in (("used", "not empty"), ("file", "exists already")):
        with pytest.raises(UserError, match=said):
            write(name)
    with pytest.raises(UserError, match="cannot export 41"):
        write("new", n_vocab=41)
    with pytest.raises(UserError, match="end-of-text token 38"):
        write("new", n_vocab=37, eot=38)

    def disk_full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "_sync_file", disk_full)
    with pytest.raises(UserError, match="cannot write") as raised:
        write("new")
    assert "No space left" in raised.value.why
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "used"]


def test_pretrained_weights_come_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, file: str) -> str:
        asked.append((repo, file))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert pretrained_folder("gpt2-xl") == tmp_path
    assert asked == [("openai-community/gpt2-xl", file) for file in ("config.json", "model.safetensors")]


def test_pretrained_weights_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="gpt3") as raised:
        pretrained_folder("gpt3")
    assert "gpt2-medium" in raised.value.why

    def no_network(repo: str, file: str) -> str:
        raise ConnectionError("name resolution failed\nand more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", no_network)
    with pytest.raises(UserError, match="cannot get the weights of gpt2 ") as raised:
        pretrained_folder("gpt2")
    assert raised.value.why == "name resolution failed"
    assert "--init_from=./folder" in raised.value.hint

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="huggingface_hub") as raised:
        pretrained_folder("gpt2")
    assert "[train]" in raised.value.hint
