"""nanochat's models from wherever they are kept: to start from, to sample, to hand on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from onecard.arch.shapes import NanochatShape
from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.convert.huggingface import write_huggingface_folder
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.errors import UserError
from onecard.model.nanochat import Nanochat
from onecard.run.export import export_run
from onecard.run.load import Weights, load_for_sampling, tokenizer_of, weights_from, weights_of_run
from onecard.train.loop import train

SHAPE = NanochatShape(n_layer=1, n_head=2, n_embd=16, vocab_size=320, block_size=16)
TUNING = [
    "--dataset=text", "--init_from=./theirs", "--block_size=16", "--batch_size=4", "--bias=True",
    "--gradient_accumulation_steps=1", "--max_iters=20", "--eval_interval=10", "--eval_iters=2",
    "--device=cpu", "--no-compile", "--decay_lr=False", "--learning_rate=1e-2", "--sample_tokens=0",
]  # fmt: skip


def write_checkpoint(folder: Path, step: int, shape: NanochatShape = SHAPE) -> None:
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, tensor in Nanochat.initialised(shape, seed=step).named_parameters():
        for kind, part in zip("qkv", tensor.chunk(3), strict=True) if "c_attn" in name else (("", tensor),):
            tensors[name.replace("c_attn", f"c_{kind}")] = part.clone()
    torch.save(tensors, folder / f"model_{step:06d}.pt")
    sizes = shape.to_json()
    sizes |= {"sequence_len": sizes.pop("block_size"), "n_kv_head": shape.n_head}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": sizes}))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of nanochat with two steps, and a run that trained the newer one on."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text("import os\n\n\ndef run():\n    return os.name\n" * 300)
        prepare(["text.txt"], PrepareOptions(tokenizer="byte"), progress=False)
        write_checkpoint(Path("theirs"), 20)
        write_checkpoint(Path("theirs"), 650)
        train(load_config(RunConfig, TUNING))
    return folder


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def head(weights: Weights) -> torch.Tensor:
    return weights.tensors["lm_head.weight"]


def test_checkpoints_of_nanochat_are_found(workplace: Path) -> None:
    newest = weights_from("./theirs")
    assert newest.shape == SHAPE and "model_000650.pt" in newest.description
    assert torch.equal(head(newest), head(weights_of_run("theirs", None)))
    older = weights_from("./theirs/model_000020.pt")
    assert torch.equal(head(older), head(weights_of_run("theirs", 20)))
    assert not torch.equal(head(older), head(newest))
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        weights_of_run("theirs", 7)
    # Files of another program beside them, as in repositories that hold both forms.
    Path("theirs/config.json").write_text("{}")
    assert "model_000650.pt" in weights_from("./theirs").description


def test_a_run_that_began_with_one_is_trained_sampled_and_exported(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = weights_of_run("out", None)
    assert run.shape == SHAPE and "step 20" in run.description
    assert "bias is False in the checkpoint; True is not used" in Path("out/events.jsonl").read_text()
    loaded = load_for_sampling(load_config(SampleConfig, ["--device=cpu"]))
    assert loaded.tokenizer.name == "byte"

    assert main(["export", "out", "hf"]) == 0
    assert "Hugging Face nanochat" in capsys.readouterr().out
    back = weights_from("./hf")
    assert back.shape == NanochatShape(1, 2, 16, 257, 16)  # bytes and their end; the other rows are left out
    for name, tensor in run.tensors.items():
        outer = name in ("transformer.wte.weight", "lm_head.weight")
        assert torch.equal(back.tensors[name], tensor[:257] if outer else tensor), name

    with pytest.raises(UserError, match="is no GPT-2") as raised:
        export_run("out", "ckpt.pt", step=None, to="nanogpt")
    assert "nanochat-2025" in raised.value.why
    assert not Path("ckpt.pt").exists()


def test_a_checkpoint_of_nanochat_becomes_a_hugging_face_folder(workplace: Path) -> None:
    exported = export_run("theirs", "hf", step=20, to="huggingface")
    assert "Hugging Face nanochat; without a tokenizer" in exported.written
    assert exported.next.endswith("AutoModelForCausalLM.from_pretrained('hf')")
    back, original = weights_from("./hf"), weights_of_run("theirs", 20)
    assert back.shape == SHAPE
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in original.tensors.items())


def test_what_its_tokens_mean_is_not_guessed(workplace: Path) -> None:
    """nanochat learns a tokenizer of its own, so a vocabulary of GPT-2's size or more says nothing."""
    write_checkpoint(Path("large"), 1, NanochatShape(1, 1, 2, 65536, 4))
    export_run("large", "large-hf", step=None, to="huggingface")
    assert weights_from("./large-hf").shape.vocab_size == 65536
    for arguments in (["--out_dir=large"], ["--init_from=./large"], ["--init_from=./large-hf"]):
        with pytest.raises(UserError, match=r"the tokenizer of .* is not known") as raised:
            load_for_sampling(load_config(SampleConfig, ["--device=cpu", *arguments]))
        assert "65,536 tokens are not GPT-2's" in raised.value.why
        assert "--train-tokenizer 65536" in raised.value.hint and "--dataset=NAME" in raised.value.hint


def test_gpt2s_tokens_are_recognised_by_their_number_in_a_folder_of_transformers(workplace: Path) -> None:
    shape = NanochatShape(1, 1, 2, 50304, 4)
    tensors = dict(Nanochat.initialised(shape, 0).named_parameters())
    write_huggingface_folder(Path("padded"), shape, tensors, n_vocab=None, eot=None)
    assert weights_from("./padded").guess_gpt2_tokens
    assert tokenizer_of(weights_from("./padded")).n_vocab == 50257


def test_it_is_no_run_to_be_continued(workplace: Path) -> None:
    with pytest.raises(UserError, match="theirs holds checkpoints of nanochat") as raised:
        train(load_config(RunConfig, [*TUNING, "--out_dir=theirs", "--init_from=resume"]))
    assert "--init_from=theirs/" in raised.value.hint
    with pytest.raises(UserError, match="no run of onecard"):
        export_run("theirs", "ckpt.pt", step=None, to="nanogpt")


def test_dropout_is_refused(workplace: Path) -> None:
    with pytest.raises(UserError, match="nanochat-2025 has no dropout"):
        train(load_config(RunConfig, [*TUNING, "--dropout=0.1", "--out_dir=other"]))
