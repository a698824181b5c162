from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.errors import UserError
from onecard.run.directory import RunDirectory
from onecard.run.export import export_run
from onecard.run.load import checkpoint_of_run, load_for_sampling, load_weights, weights_from, weights_of_run
from onecard.run.stored import list_checkpoints
from onecard.train.loop import train

FIXTURE = Path(__file__).parent.parent / "fixtures" / "nanogpt" / "ckpt.pt"
SMALL = [
    "--dataset=text", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4",
    "--gradient_accumulation_steps=1", "--max_iters=30", "--eval_interval=10", "--eval_iters=2",
    "--device=cpu", "--no-compile", "--decay_lr=False",
    "--learning_rate=1e-2", "--sample_tokens=0", "--bias=True",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text("import os\n\n\ndef run():\n    return os.name\n" * 300)
        prepare(["text.txt"], PrepareOptions(tokenizer="byte"), progress=False)
        train(load_config(RunConfig, SMALL))
    return folder


@pytest.fixture
def run_folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def sampling(*arguments: str) -> SampleConfig:
    return load_config(SampleConfig, ["--device=cpu", *arguments])


def test_a_run_is_loaded_with_its_own_tokenizer_even_without_its_data(run_folder: Path) -> None:
    shutil.rmtree("data")
    loaded = load_for_sampling(sampling())
    assert loaded.tokenizer.name == "byte"
    assert "out, step 30" in loaded.description
    assert not loaded.model.training


def test_a_step_can_be_chosen_and_a_missing_one_names_those_there_are(run_folder: Path) -> None:
    kept = [c.step for c in list_checkpoints(Path("out/checkpoints"))]
    assert f"step {kept[0]}" in weights_of_run("out", kept[0]).description
    with pytest.raises(UserError, match="no checkpoint of step 7") as error:
        weights_of_run("out", 7)
    assert "30" in error.value.why


def test_a_run_that_wants_its_best_is_sampled_at_its_best(run_folder: Path) -> None:
    for checkpoint, loss in zip(list_checkpoints(Path("out/checkpoints")), (1.0, 2.0), strict=False):
        rewrite_val_loss(checkpoint.path, loss)
    assert "step 30" in weights_of_run("out", None).description
    directory = RunDirectory("out")
    config = directory.read_config()
    assert config is not None
    directory.write_config(dataclasses.replace(config, always_save_checkpoint=False))
    assert "step 20" in weights_of_run("out", None).description


def rewrite_val_loss(folder: Path, loss: float) -> None:
    rewrite_state(folder, val_loss=loss)


def rewrite_state(folder: Path, **changes: Any) -> None:
    """With a manifest that agrees."""
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, **changes}))
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_goes_to_hugging_face_and_nanogpt_and_back(run_folder: Path) -> None:
    original = weights_of_run("out", None)
    assert "Hugging Face" in export_run("out", "hf", step=None, to="huggingface").written
    back = weights_from("./hf")
    assert back.shape.vocab_size == 257  # the rows that only pad are not exported
    for name, tensor in original.tensors.items():
        assert torch.equal(back.tensors[name], tensor[:257] if name == "transformer.wte.weight" else tensor)

    exported = export_run("out", "theirs/ckpt.pt", step=None, to="nanogpt")
    assert f"python sample.py --out_dir={Path('theirs').absolute()}" in exported.next
    again = weights_from("theirs/ckpt.pt")
    assert again.shape == original.shape
    assert again.nanogpt is not None
    assert again.nanogpt.step == 30
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in original.tensors.items())
    saved = list_checkpoints(Path("out/checkpoints"))[-1].optimizer_tensors()
    exp_avg, _ = again.nanogpt.moments["transformer.wpe.weight"]
    assert torch.equal(exp_avg, saved["exp_avg.transformer.wpe.weight"])


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_says_who_may_read_whatever_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """By prepare, train and export: a folder that a group shares is of use to it."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(umask)
    try:
        Path("text.txt").write_text(" ".join(f"word{number * 7919}" for number in range(5000)))
        prepare(["text.txt"], PrepareOptions(tokenizer="bpe", train_tokenizer=512), progress=False)
        train(load_config(RunConfig, [*SMALL, "--max_iters=1"]))
        export_run("out", "hf", step=None, to="huggingface")
        export_run("out", "theirs/ckpt.pt", step=None, to="nanogpt")
    finally:
        os.umask(before)
    written = {path.relative_to(tmp_path): path.stat().st_mode for path in tmp_path.rglob("*")}
    assert {"model.safetensors", "ckpt.pt", "tokenizer.json", "train.bin"} <= {path.name for path in written}
    odd = [
        f"{path} {mode:o}" for path, mode in written.items()
        if stat.S_IMODE(mode) != (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask
    ]  # fmt: skip
    assert odd == []


def test_a_run_that_learned_by_muon_goes_to_nanogpt_without_its_moments(run_folder: Path) -> None:
    train(load_config(RunConfig, [*SMALL, "--optimizer=muon", "--out_dir=muon", "--max_iters=1"]))
    assert "new moments" in export_run("muon", "muon.pt", step=None, to="nanogpt").written
    again, original = weights_from("./muon.pt"), weights_of_run("muon", None)
    assert again.nanogpt is not None and again.nanogpt.moments == {}
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in original.tensors.items())


def test_training_starts_from_another_runs_weights(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(load_config(RunConfig, [*SMALL, "--init_from=./out", "--out_dir=tuned", "--max_iters=1"]))
    assert "from out, step 30" in capsys.readouterr().err
    assert summary.values["step"] == 1
    assert summary.values["first_val_loss"] < 3.5  # a fresh model would begin near 5.7


def test_a_nanogpt_folder_is_sampled_with_its_meta(run_folder: Path) -> None:
    import pickle

    Path("theirs").mkdir()
    shutil.copy(FIXTURE, "theirs/ckpt.pt")
    with pytest.raises(UserError, match="tokenizer of nanoGPT"):
        load_for_sampling(sampling("--out_dir=theirs"))
    characters = "abcdefghijklmnopqrst\n"
    Path("data/tiny").mkdir()
    meta = {
        "vocab_size": 21,
        "stoi": {c: i for i, c in enumerate(characters)},
        "itos": dict(enumerate(characters)),
    }
    Path("data/tiny/meta.pkl").write_bytes(pickle.dumps(meta))
    loaded = load_for_sampling(sampling("--out_dir=theirs"))
    assert loaded.tokenizer.name == "char"
    assert loaded.model.shape.vocab_size == 21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out_dir=nowhere"], "no run folder"),
        (["--out_dir=data"], "no checkpoint in data"),
        (["--init_from=./nowhere"], "nothing at"),
        (["--init_from=text.txt/"], "nothing at|ckpt|checkpoint"),
    ],
)
def test_nothing_to_sample_from_is_a_clear_error(
    run_folder: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_for_sampling(sampling(*arguments))


def test_weights_of_another_architecture_are_refused_by_name(run_folder: Path) -> None:
    weights = weights_of_run("out", None)
    model = weights.build()
    with pytest.raises(UserError, match="do not belong") as error:
        load_weights(model, {k: v for k, v in weights.tensors.items() if "ln_f" not in k})
    assert "ln_f" in error.value.why
    with pytest.raises(UserError, match="does not fit"):
        load_weights(model, {k: v[:3] for k, v in weights.tensors.items()})


def test_a_name_that_ends_in_pt_is_nanogpts(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from onecard.cli import main

    assert main(["export", "out", "theirs.pt"]) == 0
    assert "nanoGPT resumes from it" in capsys.readouterr().out
    assert weights_from("./theirs.pt").nanogpt is not None
    assert main(["export", "out", "folder.pt", "--to", "huggingface"]) == 0
    assert Path("folder.pt", "model.safetensors").is_file(), "said outright"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("always", [True, False])
def test_an_older_checkpoint_is_never_used_in_silence(
    run_folder: Path, always: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory("out")
    config = directory.read_config()
    assert config is not None
    directory.write_config(dataclasses.replace(config, always_save_checkpoint=always))
    best = checkpoint_of_run(directory, None)[0]
    flip(best.path / "model.safetensors")
    why = "the content of model.safetensors has changed"
    for command in (
        ["sample", "--out_dir=out", "--device=cpu", "--num_samples=1", "--max_new_tokens=1"],
        ["export", "out", "hf"],
        ["export", "out", "ckpt.pt"],
    ):
        assert main(command) == 0
        said = capsys.readouterr().err
        assert why in said and "is used" in said
    assert main(["sample", "--out_dir=out", f"--step={best.step}", "--device=cpu"]) == 2
    assert why in capsys.readouterr().err


def test_no_optimizer_moments_are_exported_unverified(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = list_checkpoints(Path("out/checkpoints"))[-1]
    flip(newest.path / "optimizer.safetensors")
    assert main(["export", "out", "ckpt.pt"]) == 0
    assert "the content of optimizer.safetensors has changed" in capsys.readouterr().err
    assert torch.load("ckpt.pt", weights_only=True)["iter_num"] < newest.step
    # To sample, moments are not read.
    assert f"step {newest.step}" in weights_of_run("out", None).description
    assert weights_of_run("out", None).notes == ()


@pytest.mark.parametrize("harm", ["flip", "manifest"])
def test_where_no_checkpoint_is_intact_none_is_used(
    run_folder: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(FIXTURE, "out/ckpt.pt")  # nor another one that happens to lie there
    for checkpoint in list_checkpoints(Path("out/checkpoints")):
        if harm == "flip":
            flip(checkpoint.path / "model.safetensors")
        else:
            (checkpoint.path / "manifest.json").unlink()
    for command in (["sample", "--out_dir=out"], ["export", "out", "hf"], ["train", "--out_dir=out"]):
        assert main(command) != 0
        assert "no checkpoint of this run is intact" in capsys.readouterr().err


GPT2, NANOCHAT = (
    {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 320, "block_size": 16, "bias": True},
    {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 320, "block_size": 16},
)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("gpt2", {"n_layer": 10**9}),
        ("gpt2", {"n_layer": 1024}),
        ("gpt2", {"n_embd": 2**16, "vocab_size": 2**24, "n_head": 1}),
        ("gpt2", {"block_size": 10**12}),
        ("gpt2", {"n_layer": True}),
        ("gpt2", {"n_layer": "2"}),
        ("gpt2", {"n_head": 0}),
        ("gpt2", {"n_head": 3}),
        ("gpt2", {"bias": 1}),
        ("gpt2", {"another": 1}),
        ("gpt2", {"vocab_size": 1e30}),
        ("nanochat-2025", {"block_size": 10**9}),
        ("nanochat-2026", {"window_pattern": "S" * 10**7}),
        ("nanochat-2026", {"window_block": -1}),
        (["gpt2"], {}),
    ],
)
def test_a_shape_that_no_model_has_is_refused_before_memory_is_taken(
    run_folder: Path, arch: Any, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {**(GPT2 if arch == "gpt2" else NANOCHAT), **changes}
    for checkpoint in Path("out/checkpoints").glob("step-*"):
        rewrite_state(checkpoint, arch=arch, shape=shape)
    for words in (
        ["sample", "--device=cpu"], ["export", "out", "there"], ["export", "out", "there.pt"],
        ["train", "--init_from=./out", "--out_dir=new", "--device=cpu"], ["train", "--out_dir=out"],
    ):  # fmt: skip
        capsys.readouterr()
        assert main(words) == 2, words
        said = capsys.readouterr().err
        assert "error: " in said, words
        assert len(said) < 2000
