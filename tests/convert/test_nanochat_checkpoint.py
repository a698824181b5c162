"""nanochat's own checkpoints, in the layout its checkpoint manager writes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.arch.shapes import Nanochat2026Shape, NanochatShape
from onecard.convert.nanochat import nanochat_steps, read_nanochat_checkpoint
from onecard.errors import UserError
from onecard.model.nanochat import Nanochat
from onecard.model.nanochat_2026 import Nanochat2026
from onecard.run.load import load_weights

SHAPE = NanochatShape(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=12)
CONFIG = {"sequence_len": 12, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 16}
TOKENS = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(5))


def their_tensors(vocab_size: int = 64) -> dict[str, Tensor]:
    """As nanochat's state_dict has them: the embedding in bf16, no buffers."""
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * 0.3

    tensors = {"transformer.wte.weight": random(vocab_size, 16).bfloat16()}
    for layer in ("transformer.h.0", "transformer.h.1"):
        for part in ("c_q", "c_k", "c_v", "c_proj"):
            tensors[f"{layer}.attn.{part}.weight"] = random(16, 16)
        tensors[f"{layer}.mlp.c_fc.weight"] = random(64, 16)
        tensors[f"{layer}.mlp.c_proj.weight"] = random(16, 64)
    return {**tensors, "lm_head.weight": random(vocab_size, 16)}


def write(
    folder: Path, step: int, tensors: object, config: object = CONFIG, prefix: str = "", **meta: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    if isinstance(tensors, dict):
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    torch.save(tensors, folder / f"model_{step:06d}.pt")
    content = {"step": step, "val_bpb": 1.1, "model_config": config, "user_config": {"depth": 2}, **meta}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(content, indent=2))
    return folder / f"model_{step:06d}.pt"


def plain_logits(tensors: dict[str, Tensor]) -> Tensor:
    """Written out layer by layer and head by head, with complex numbers for the rotation."""

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],))

    def placed(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :4], x[..., 4:])
        angle = torch.outer(torch.arange(12.0), 10000.0 ** (-torch.arange(4) / 4))
        turned = pairs * torch.polar(torch.ones(12, 4), -angle)
        return norm(torch.cat((turned.real, turned.imag), -1))

    t = {name: tensor.float() for name, tensor in tensors.items()}
    x = norm(t["transformer.wte.weight"][TOKENS])
    later = torch.ones(12, 12).triu(1).bool()
    for layer in ("transformer.h.0", "transformer.h.1"):
        q, k, v = (norm(x) @ t[f"{layer}.attn.{part}.weight"].T for part in ("c_q", "c_k", "c_v"))
        mixed = []
        for head in (slice(0, 8), slice(8, 16)):
            scores = placed(q[..., head]) @ placed(k[..., head]).mT / 8**0.5
            mixed.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[..., head])
        x = x + torch.cat(mixed, -1) @ t[f"{layer}.attn.c_proj.weight"].T
        hidden = (norm(x) @ t[f"{layer}.mlp.c_fc.weight"].T).clamp(min=0) ** 2
        x = x + hidden @ t[f"{layer}.mlp.c_proj.weight"].T
    return 15 * torch.tanh(norm(x) @ t["lm_head.weight"].T / 15)


def our_logits(shape: NanochatShape, tensors: dict[str, Tensor]) -> Tensor:
    model = Nanochat(shape)
    model.load_state_dict(tensors)
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_it_computes_what_nanochat_computes(tmp_path: Path, prefix: str) -> None:
    tensors = their_tensors()
    read = read_nanochat_checkpoint(write(tmp_path, 650, tensors, prefix=prefix))
    assert (read.shape, read.step) == (SHAPE, 650)
    assert {tensor.dtype for tensor in read.tensors.values()} == {torch.float32}
    expected = plain_logits(tensors)
    assert expected.std() > 0.5, "too small to show a mistake"
    torch.testing.assert_close(our_logits(read.shape, read.tensors), expected, atol=1e-5, rtol=0)


def test_transformers_computes_the_same_from_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from onecard.convert.huggingface import write_huggingface_folder

    read = read_nanochat_checkpoint(write(tmp_path, 650, their_tensors()))
    write_huggingface_folder(tmp_path / "hf", read.shape, read.tensors, n_vocab=None, eot=None)
    model = transformers.NanoChatForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
    torch.testing.assert_close(our_logits(read.shape, read.tensors), logits, atol=1e-5, rtol=0)


def test_padded_rows_are_cut_off(tmp_path: Path) -> None:
    """December 2025: 50 tokens in matrices of 64 rows, and logits of 50."""
    tensors = their_tensors()
    read = read_nanochat_checkpoint(write(tmp_path, 1, tensors, {**CONFIG, "vocab_size": 50}))
    assert read.shape == replace(SHAPE, vocab_size=50)
    expected = plain_logits(tensors)[..., :50]
    torch.testing.assert_close(our_logits(read.shape, read.tensors), expected, atol=1e-5, rtol=0)
    unpadded = write(tmp_path, 2, their_tensors(50), {**CONFIG, "vocab_size": 50})  # October 2025
    assert read_nanochat_checkpoint(unpadded).shape == read.shape


def test_the_newest_step_of_a_folder_unless_another_is_named(tmp_path: Path) -> None:
    for step in (900, 1_000_000, 20):
        write(tmp_path, step, {**their_tensors(), "lm_head.weight": torch.full((64, 16), float(step))})
    (tmp_path / "optim_000900.pt").write_bytes(b"")
    (tmp_path / "model_best.pt").write_bytes(b"")
    assert list(nanochat_steps(tmp_path)) == [20, 900, 1_000_000]
    assert read_nanochat_checkpoint(tmp_path).step == 1_000_000
    read = read_nanochat_checkpoint(tmp_path, 900)
    assert read.step == 900 and read.tensors["lm_head.weight"][0, 0] == 900
    with pytest.raises(UserError, match="no checkpoint of step 7") as raised:
        read_nanochat_checkpoint(tmp_path, 7)
    assert "20, 900, 1000000" in raised.value.why


def test_a_folder_without_any(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of nanochat"):
        read_nanochat_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_kv_head": 1}, "n_kv_head"),
        ({"n_layer": 3}, "lacks the tensor 'transformer.h.2.attn.c_q.weight'"),
        ({"n_layer": 1}, "holds the tensor 'transformer.h.1."),
        ({"n_layer": 10**9}, "n_layer is 1000000000"),
        ({"n_head": 3, "n_kv_head": 3}, "not a multiple of n_head 3"),
        ({"n_head": 16, "n_kv_head": 16}, "must be even"),
        ({"n_embd": 32}, "wrong shape"),
        ({"vocab_size": 65}, "'transformer.wte.weight' in"),
        ({"vocab_size": "64"}, "vocab_size is '64'"),
        ({"sequence_len": ...}, "sequence_len is missing"),
        ({"window_pattern": "SSSL"}, "reads a gate from the first 24 channels"),
        ({"window_pattern": "SXL"}, "window_pattern is 'SXL'"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not ...}
    with pytest.raises(UserError) as raised:
        read_nanochat_checkpoint(write(tmp_path, 1, their_tensors(), config))
    assert said in str(raised.value)


@pytest.mark.parametrize("value_embeddings", [True, False])
def test_the_generation_of_2026(tmp_path: Path, value_embeddings: bool) -> None:
    """Under nanochat's names, rows padded to 64, embeddings in bf16: the same logits as before."""
    shape = Nanochat2026Shape(3, 2, 32, 60, 16, "SL", value_embeddings)
    model = Nanochat2026.initialised(shape, 3)
    theirs: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
        value = parameter.data.clone()
        if "wte" in name or "value_embeds" in name:
            parameter.data.copy_(value.bfloat16())
            value = value.bfloat16()
        if len(value) == shape.vocab_size:
            value = torch.cat((value, torch.full((4, shape.n_embd), 7.0, dtype=value.dtype)))
        parts = value.chunk(3) if "c_attn" in name else [value]
        names = ("c_q", "c_k", "c_v") if "c_attn" in name else ("c_attn",)
        theirs |= {name.replace("c_attn", part): v.clone() for part, v in zip(names, parts, strict=True)}
    config = {"n_layer": 3, "n_head": 2, "n_kv_head": 2, "n_embd": 32, "vocab_size": 60, "sequence_len": 16,
              "window_pattern": "SL"}  # fmt: skip
    found = read_nanochat_checkpoint(write(tmp_path, 1, theirs, config, prefix="_orig_mod."))
    assert found.shape == shape
    again = Nanochat2026.uninitialised(shape)
    load_weights(again, found.tensors)
    tokens = torch.arange(16)[None]
    assert torch.equal(again(tokens), model(tokens))


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    path, meta = write(tmp_path, 1, their_tensors()), tmp_path / "meta_000001.json"
    for content in ("{", "[1]", "\udc80"):
        meta.write_text(content, errors="surrogateescape")
        with pytest.raises(UserError, match="cannot read"):
            read_nanochat_checkpoint(path)
    for content in ("{}", '{"model_config": [1]}'):
        meta.write_text(content)
        with pytest.raises(UserError, match="does not describe a model of nanochat"):
            read_nanochat_checkpoint(path)
    meta.unlink()
    with pytest.raises(UserError, match=r"no file .*meta_000001\.json") as raised:
        read_nanochat_checkpoint(path)
    assert "model_000001.pt" in raised.value.hint


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([1], "holds no model"),
        ({"a": 1}, "'a' in"),
        ({}, "n_layer is 2, but there are only 0 tensors"),
        ({**their_tensors(), "extra.weight": torch.ones(1)}, "holds the tensor 'extra.weight'"),
        ({**their_tensors(), "transformer.h.0.attn.c_k.weight": torch.ones(8, 16)}, "8 × 16"),
        ({**their_tensors(), "lm_head.weight": torch.ones(64, 16, dtype=torch.int8)}, "floating-point"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: object, said: str) -> None:
    with pytest.raises(UserError) as raised:
        read_nanochat_checkpoint(write(tmp_path, 1, tensors))
    assert said in str(raised.value)


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("owned",)


def test_a_malicious_checkpoint_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, 1, {**their_tensors(), "lm_head.weight": _Malicious()})
    with pytest.raises(UserError, match="more than tensors"):
        read_nanochat_checkpoint(path)
    assert not Path("owned").exists()


def test_a_damaged_file(tmp_path: Path) -> None:
    path = write(tmp_path, 1, their_tensors())
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match="incomplete"):
        read_nanochat_checkpoint(path)
