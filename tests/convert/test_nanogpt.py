"""nanoGPT's checkpoints: one that nanoGPT wrote loads and continues; bad ones are refused by name."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onecard.arch.shapes import GPT2Shape
from onecard.convert.nanogpt import NanoGPTCheckpoint, read_nanogpt_checkpoint, write_nanogpt_checkpoint
from onecard.errors import UserError
from onecard.model.gpt2 import GPT2

FIXTURE = Path(__file__).parents[1] / "fixtures" / "nanogpt"
EXPECTED: dict[str, Any] = json.loads((FIXTURE / "expected.json").read_text())
TINY = GPT2Shape(n_layer=2, n_head=2, n_embd=8, vocab_size=11, block_size=6, bias=True)


def model_with(shape: GPT2Shape, tensors: dict[str, Tensor]) -> GPT2:
    model = GPT2(shape)
    left = model.load_state_dict({**tensors, "lm_head.weight": tensors["transformer.wte.weight"]})
    assert not left.missing_keys and not left.unexpected_keys
    return model


def random_tensors(shape: GPT2Shape, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        parameters = dict(GPT2(shape).named_parameters())
    return {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in parameters.items()}


def random_checkpoint(shape: GPT2Shape) -> NanoGPTCheckpoint:
    first, second = random_tensors(shape, seed=1), random_tensors(shape, seed=2)
    return NanoGPTCheckpoint(
        shape=shape,
        tensors=random_tensors(shape),
        moments={name: (first[name], second[name].square()) for name in first},
        optimizer_step=7,
        step=9,
        best_val_loss=1.25,
        config={"learning_rate": 1e-3, "weight_decay": 0.2, "dropout": 0.1, "device": "cpu"},
    )


def read_changed(tmp_path: Path, **changes: Any) -> NanoGPTCheckpoint:
    """The fixture as it is read with some entries replaced (or, with ..., removed)."""
    saved = torch.load(FIXTURE / "ckpt.pt", weights_only=True)
    saved.update(changes)
    torch.save({key: value for key, value in saved.items() if value is not ...}, tmp_path / "ckpt.pt")
    return read_nanogpt_checkpoint(tmp_path / "ckpt.pt")


def fixture_part(part: str) -> Any:
    return torch.load(FIXTURE / "ckpt.pt", weights_only=True)[part]


def assert_same(one: NanoGPTCheckpoint, other: NanoGPTCheckpoint) -> None:
    assert one.shape == other.shape
    assert list(one.tensors) == list(other.tensors) and list(one.moments) == list(other.moments)
    for name in one.tensors:
        assert torch.equal(one.tensors[name], other.tensors[name]), name
    for name in one.moments:
        assert all(map(torch.equal, one.moments[name], other.moments[name])), name
    rest = ("optimizer_step", "step", "best_val_loss", "config")
    assert [getattr(one, name) for name in rest] == [getattr(other, name) for name in rest]


def adamw_of(model: GPT2) -> torch.optim.AdamW:
    """With nanoGPT's two groups."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def backward_into_grads(model: GPT2, tokens: Tensor) -> Tensor:
    """Mean loss; its gradients become the parameters' own, for torch's optimizer to find."""
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    model.use_accumulators(totals)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss = model.loss_sum(inputs, targets, scale=torch.tensor(1 / targets.numel()))
    for name, parameter in model.named_parameters():
        parameter.grad = totals[name]
    return loss / targets.numel()


def continued_losses(model: GPT2, moments: dict[str, tuple[Tensor, Tensor]], step: int) -> list[float]:
    """Five steps as nanoGPT makes them, from these moments."""
    parameters, optimizer = dict(model.named_parameters()), adamw_of(model)
    for name, (exp_avg, exp_avg_sq) in moments.items():
        optimizer.state[parameters[name]] = {
            "step": torch.tensor(float(step)),
            "exp_avg": exp_avg.clone(),
            "exp_avg_sq": exp_avg_sq.clone(),
        }
    losses = []
    for batch, lr in zip(EXPECTED["batches"], EXPECTED["learning_rates"], strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = backward_into_grads(model, torch.tensor(batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def test_everything_in_nanogpts_own_checkpoint_is_read() -> None:
    checkpoint = read_nanogpt_checkpoint(FIXTURE / "ckpt.pt")
    assert checkpoint.shape == GPT2Shape(
        n_layer=2, n_head=2, n_embd=16, vocab_size=21, block_size=16, bias=False, gelu_tanh=False
    )
    assert checkpoint.step == checkpoint.optimizer_step == 30
    assert checkpoint.best_val_loss == pytest.approx(2.0554, abs=1e-4)
    assert checkpoint.config["warmup_iters"] == 4 and checkpoint.config["dtype"] == "float32"
    assert "lm_head.weight" not in checkpoint.tensors
    assert list(checkpoint.moments) == list(checkpoint.tensors)


def test_its_logits_are_nanogpts() -> None:
    checkpoint = read_nanogpt_checkpoint(FIXTURE / "ckpt.pt")
    model = model_with(checkpoint.shape, checkpoint.tensors)
    with torch.no_grad():
        logits_BTV = model(torch.tensor([EXPECTED["tokens"]]))
    torch.testing.assert_close(
        logits_BTV[0, -2:], torch.tensor(EXPECTED["logits_of_last_two_positions"]), atol=1e-5, rtol=0
    )


def test_it_continues_as_nanogpt_does() -> None:
    checkpoint = read_nanogpt_checkpoint(FIXTURE / "ckpt.pt")
    model = model_with(checkpoint.shape, checkpoint.tensors)
    losses = continued_losses(model, checkpoint.moments, checkpoint.optimizer_step)
    assert losses == pytest.approx(EXPECTED["losses"], abs=1e-5)
    # The comparison would notice lost moments.
    fresh = continued_losses(model_with(checkpoint.shape, checkpoint.tensors), {}, 0)
    assert fresh != pytest.approx(EXPECTED["losses"], abs=1e-3)


def test_it_comes_back_unchanged(tmp_path: Path) -> None:
    checkpoint = read_nanogpt_checkpoint(FIXTURE / "ckpt.pt")
    write_nanogpt_checkpoint(tmp_path / "ckpt.pt", checkpoint)
    assert_same(read_nanogpt_checkpoint(tmp_path / "ckpt.pt"), checkpoint)
    # nanoGPT indexes these entries, and torch.optim these keys.
    ours, theirs = torch.load(tmp_path / "ckpt.pt", weights_only=True), torch.load(FIXTURE / "ckpt.pt")
    assert set(ours) == {*theirs, "onecard"}
    assert ours["model_args"] == theirs["model_args"]
    assert set(ours["model"]) == set(theirs["model"])
    for our_group, their_group in zip(*(x["optimizer"]["param_groups"] for x in (ours, theirs)), strict=True):
        assert their_group["params"] == our_group["params"]
        assert their_group["weight_decay"] == our_group["weight_decay"]
        assert their_group["betas"] == our_group["betas"]
    assert (tmp_path / "ckpt.pt").stat().st_size < 1.05 * (FIXTURE / "ckpt.pt").stat().st_size


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gelu_tanh", [False, True])
def test_round_trip_is_exact(tmp_path: Path, bias: bool, gelu_tanh: bool) -> None:
    checkpoint = random_checkpoint(replace(TINY, bias=bias, gelu_tanh=gelu_tanh))
    write_nanogpt_checkpoint(tmp_path / "new folder" / "ckpt.pt", checkpoint)
    assert_same(read_nanogpt_checkpoint(tmp_path / "new folder" / "ckpt.pt"), checkpoint)


def test_without_optimizer_or_evaluation(tmp_path: Path) -> None:
    checkpoint = NanoGPTCheckpoint(TINY, random_tensors(TINY))
    write_nanogpt_checkpoint(tmp_path / "ckpt.pt", checkpoint)
    assert_same(read_nanogpt_checkpoint(tmp_path / "ckpt.pt"), checkpoint)
    # nanoGPT compares its next loss with this number.
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["best_val_loss"] == 1e9


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchs_adamw_goes_on_from_what_is_written(tmp_path: Path, device: str) -> None:
    checkpoint = random_checkpoint(TINY)
    checkpoint.config["device"] = device
    write_nanogpt_checkpoint(tmp_path / "ckpt.pt", checkpoint)
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)["optimizer"]
    model = model_with(TINY, checkpoint.tensors)
    parameters, optimizer = dict(model.named_parameters()), adamw_of(model)
    optimizer.load_state_dict(saved)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert [group["fused"] for group in optimizer.param_groups] == [True if device == "cuda" else None] * 2
    backward_into_grads(model, torch.tensor([[1, 2, 3]]))
    optimizer.step()
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        assert state["step"].item() == 8, name  # one more than was written: no counter is shared
        assert state["exp_avg"].shape == parameter.shape


def test_slices_are_written_without_the_tensor_they_are_cut_from(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    tensors["transformer.wpe.weight"] = torch.randn(100_000, TINY.n_embd)[: TINY.block_size]
    write_nanogpt_checkpoint(tmp_path / "ckpt.pt", NanoGPTCheckpoint(TINY, tensors))
    assert (tmp_path / "ckpt.pt").stat().st_size < 100_000


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ckpt.pt"
    checkpoint = random_checkpoint(TINY)
    write_nanogpt_checkpoint(path, checkpoint)

    def disk_full(saved: object, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(UserError, match="cannot write") as raised:
        write_nanogpt_checkpoint(path, random_checkpoint(TINY))
    assert "No space left" in raised.value.why
    assert_same(read_nanogpt_checkpoint(path), checkpoint)
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_may_be_replaced_while_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    write_nanogpt_checkpoint(path, random_checkpoint(TINY))
    read = read_nanogpt_checkpoint(path)
    write_nanogpt_checkpoint(path, read)
    assert_same(read, random_checkpoint(TINY))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_compile_and_ddp_are_stripped(tmp_path: Path, prefix: str) -> None:
    model = {prefix + name: tensor for name, tensor in fixture_part("model").items()}
    read = read_changed(tmp_path, model=model)
    assert_same(read, read_nanogpt_checkpoint(FIXTURE / "ckpt.pt"))


def test_mask_buffers_are_dropped_and_a_separate_but_equal_head_is_fine(tmp_path: Path) -> None:
    model = fixture_part("model")
    model["lm_head.weight"] = model["lm_head.weight"].clone()
    for layer in range(2):
        model[f"transformer.h.{layer}.attn.bias"] = torch.ones(16, 16).tril().view(1, 1, 16, 16)
    read = read_changed(tmp_path, model=model)
    assert_same(read, read_nanogpt_checkpoint(FIXTURE / "ckpt.pt"))


def test_a_diverged_checkpoint_is_read(tmp_path: Path) -> None:
    model = fixture_part("model")
    model["lm_head.weight"][0, 0] = float("nan")  # tied: both have it, and nan differs from itself
    read = read_changed(tmp_path, model=model, best_val_loss=torch.tensor(float("nan")))
    assert read.tensors["transformer.wte.weight"].isnan().sum() == 1
    assert read.best_val_loss is None


def test_only_the_essentials(tmp_path: Path) -> None:
    read = read_changed(tmp_path, optimizer=..., iter_num=..., best_val_loss=..., config=...)
    assert_same(read, NanoGPTCheckpoint(read.shape, read.tensors))


def test_config_keeps_plain_values_only(tmp_path: Path) -> None:
    config = {"lr": 0.1, "name": "x", "on": True, "none": None, "list": [1], "tensor": torch.ones(1), 3: 4}
    read = read_changed(tmp_path, config=config)
    assert read.config == {"lr": 0.1, "name": "x", "on": True, "none": None}


def test_bf16_weights_become_fp32(tmp_path: Path) -> None:
    model = {name: tensor.bfloat16() for name, tensor in fixture_part("model").items()}
    read = read_changed(tmp_path, model=model)
    assert {tensor.dtype for tensor in read.tensors.values()} == {torch.float32}


def test_checkpoints_of_january_2023_have_biases_and_tanh_gelu(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    checkpoint = random_checkpoint(TINY)
    write_nanogpt_checkpoint(path, checkpoint)
    saved = torch.load(path, weights_only=True)
    del saved["model_args"]["bias"], saved["onecard"]
    torch.save(saved, path)
    shape = read_nanogpt_checkpoint(path).shape
    assert shape.bias and shape.gelu_tanh


@pytest.mark.parametrize("bias", [False, True])
def test_optimizer_groups_from_before_may_2023(tmp_path: Path, bias: bool) -> None:
    """Then, only linear weights were decayed, and names were numbered in alphabetical order."""
    shape = GPT2Shape(n_layer=11, n_head=2, n_embd=4, vocab_size=9, block_size=5, bias=bias)
    checkpoint = random_checkpoint(shape)
    path = tmp_path / "ckpt.pt"
    write_nanogpt_checkpoint(path, checkpoint)
    saved = torch.load(path, weights_only=True)
    linear = sorted(n for n in checkpoint.tensors if ".c_" in n and n.endswith("weight"))
    others = sorted(set(checkpoint.tensors) - set(linear))
    names = linear + others
    first, second = saved["optimizer"]["param_groups"]
    first["params"], second["params"] = list(range(len(linear))), list(range(len(linear), len(names)))
    saved["optimizer"]["state"] = {
        # PyTorch 1.x counted steps in plain numbers.
        number: {"step": 7, "exp_avg": checkpoint.moments[n][0], "exp_avg_sq": checkpoint.moments[n][1]}
        for number, n in enumerate(names)
    }
    del saved["onecard"]
    torch.save(saved, path)
    read = read_nanogpt_checkpoint(path)
    assert read.shape.gelu_tanh and read.optimizer_step == 7
    for name, moments in checkpoint.moments.items():
        assert all(map(torch.equal, read.moments[name], moments)), name


class _Malicious:
    """Unpickling this without restrictions creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo owned > {self.marker}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_checkpoint_is_not_executed(tmp_path: Path, zipped: bool) -> None:
    marker, path = tmp_path / "owned", tmp_path / "ckpt.pt"
    payload = {"model": {}, "model_args": {}, "config": _Malicious(marker)}
    if zipped:
        torch.save(payload, path)
    else:
        path.write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(UserError, match="more than tensors") as raised:
        read_nanogpt_checkpoint(path)
    assert not marker.exists()
    assert raised.value.why and raised.value.hint
    if zipped:
        assert "system" in raised.value.why
        torch.load(path, weights_only=False)  # the trap was real
        assert marker.exists()


def test_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "ckpt.pt", tmp_path):
        with pytest.raises(UserError, match="no file"):
            read_nanogpt_checkpoint(path)


CONTENT = (FIXTURE / "ckpt.pt").read_bytes()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (CONTENT[:2000], "incomplete"),
        (CONTENT[:50_000], "incomplete"),
        (CONTENT[:-30], "incomplete"),
        (b"PK\x05\x06" + bytes(18), ""),
        (b"\x80", ""),
        (b"\x80\x02rubbish", ""),
        (b"", "not a checkpoint"),
        (b"some text", "not a checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "lfs pull"),
    ],
)
def test_damaged_and_other_files(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "ckpt.pt").write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_nanogpt_checkpoint(tmp_path / "ckpt.pt")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"model": {}}, "it lacks: model_args"),
        ({"model_args": {}}, "it lacks: model\n"),
        (OrderedDict(a=torch.ones(1)), "not a checkpoint of nanoGPT"),
        ([1, 2], "not a checkpoint of nanoGPT"),
        ({"model": [1], "model_args": {}}, "holds no model"),
    ],
)
def test_missing_entries_are_named(tmp_path: Path, saved: Any, said: str) -> None:
    torch.save(saved, tmp_path / "ckpt.pt")
    with pytest.raises(UserError) as raised:
        read_nanogpt_checkpoint(tmp_path / "ckpt.pt")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_embd": 18}, "'transformer.wte.weight' in"),
        ({"block_size": 32}, "'transformer.wpe.weight' in"),
        ({"vocab_size": 22}, "'transformer.wte.weight' in"),
        ({"n_layer": 3}, "lacks the tensor 'transformer.h.2.ln_1.weight'"),
        ({"n_layer": 1}, "holds the tensor 'transformer.h.1."),
        ({"bias": True}, "lacks the tensor 'transformer.h.0.ln_1.bias'"),
        ({"n_layer": 10**9}, "n_layer is 1000000000"),
        ({"n_head": 3}, "not a multiple of n_head 3"),
        ({"n_head": 0}, "n_head is 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"n_layer": "2"}, "n_layer is '2'"),
        (["not a dict"], "not a checkpoint of nanoGPT"),
        ({"bias": ..., "n_head": ...}, "n_head is missing"),
    ],
)
def test_model_args_that_do_not_fit_the_tensors(tmp_path: Path, change: Any, said: str) -> None:
    args = change
    if isinstance(change, dict):
        args = {key: v for key, v in {**fixture_part("model_args"), **change}.items() if v is not ...}
    with pytest.raises(UserError) as raised:
        read_changed(tmp_path, model_args=args)
    assert said in str(raised.value)


def test_an_untied_head_is_refused(tmp_path: Path) -> None:
    model = fixture_part("model")
    model["lm_head.weight"] = model["lm_head.weight"] + 1
    with pytest.raises(UserError, match="output head of its own"):
        read_changed(tmp_path, model=model)


@pytest.mark.parametrize(
    "value",
    [3.0, torch.zeros(16, dtype=torch.int8), torch.zeros(16).to_sparse(), torch.zeros(16, device="meta")],
)
def test_odd_tensors_are_named(tmp_path: Path, value: object) -> None:
    model = {**fixture_part("model"), "transformer.ln_f.weight": value}
    with pytest.raises(UserError) as raised:
        read_changed(tmp_path, model=model)
    assert "transformer.ln_f.weight" in str(raised.value)


OTHER_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "not a dict": lambda saved: [1],
    "state is a list": lambda saved: {**saved, "state": [1, 2]},
    "other groups": lambda saved: saved["param_groups"][0]["params"].pop(),
    "odd numbering": lambda saved: saved["param_groups"][0].update(params=[[n] for n in range(10)]),
    "sgd": lambda saved: saved["state"].update({3: {"momentum_buffer": torch.ones(1)}}),
    "a parameter without state": lambda saved: saved["state"].pop(3),
    "unequal steps": lambda saved: saved["state"][3].update(step=torch.tensor(1.0)),
    "step is no number": lambda saved: [entry.update(step=torch.nan) for entry in saved["state"].values()],
}


@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_another_optimizer_is_refused(tmp_path: Path, kind: str) -> None:
    optimizer = fixture_part("optimizer")
    changed = OTHER_OPTIMIZERS[kind](optimizer)
    replaced = kind in ("not a dict", "state is a list")
    with pytest.raises(UserError, match="not that of nanoGPT's AdamW") as raised:
        read_changed(tmp_path, optimizer=changed if replaced else optimizer)
    assert raised.value.why and "'optimizer'" in raised.value.hint


def test_moments_of_the_wrong_shape_are_named(tmp_path: Path) -> None:
    optimizer = fixture_part("optimizer")
    optimizer["state"][1]["exp_avg"] = torch.ones(2, 2)
    with pytest.raises(UserError, match=r"'transformer\.wpe\.weight' in the optimizer state"):
        read_changed(tmp_path, optimizer=optimizer)
