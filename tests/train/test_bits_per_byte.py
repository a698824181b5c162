"""Bits per byte: nats of the text over ln 2 and the bytes of that text. End-of-text is in neither."""

from __future__ import annotations

import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.arch.shapes import GPT2Shape
from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.data.batches import FixedBlocks, fixed_blocks
from onecard.data.bins import TokenFile
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from onecard.data.train_bpe import TrainedBpe
from onecard.model import loss as loss_module
from onecard.model.gpt2 import GPT2
from onecard.run.metrics import bits_per_byte_line, read_metrics
from onecard.run.stored import list_checkpoints
from onecard.train import target_text as target_text_module
from onecard.train.evaluate import SetLoss, evaluate
from onecard.train.loop import train
from onecard.train.position import Position
from onecard.train.start import open_run
from onecard.train.target_text import TargetText

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 🙂\n"


def model_of(vocab_size: int) -> GPT2:
    """In float64, with weights large enough that every token has a loss of its own."""
    shape = GPT2Shape(n_layer=1, n_head=2, n_embd=16, vocab_size=vocab_size, block_size=16, bias=False)
    model = GPT2.initialised(shape, 0).double()
    for parameter in model.parameters():
        parameter.data.mul_(8)
    return model


def blocks_of(ids: list[int], folder: Path) -> FixedBlocks:
    np.array(ids, np.uint16).tofile(folder / "val.bin")
    return fixed_blocks(TokenFile.open(folder / "val.bin"), 16, 10_000, seed=1)


def measured(model: GPT2, blocks: FixedBlocks, tokenizer: Tokenizer, micro_batch: int = 3) -> SetLoss:
    text = TargetText(tokenizer, blocks, model.shape.vocab_size)
    found = evaluate(model, blocks, micro_batch=micro_batch, device="cpu", text=text)
    assert found is not None
    return found


def losses_and_targets(model: GPT2, blocks: FixedBlocks) -> tuple[Tensor, Tensor]:
    """Of every target by itself, by torch's own cross-entropy."""
    x = torch.from_numpy(blocks.gather(0, len(blocks)))
    targets_N = x[:, 1:].flatten()
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), targets_N, reduction="none"), targets_N


def by_hand(model: GPT2, blocks: FixedBlocks, tokenizer: Tokenizer, special: set[int]) -> float:
    """The definition word for word, with bytes from decoding each target."""
    nats, n_bytes = 0.0, 0
    for loss, target in zip(*(x.tolist() for x in losses_and_targets(model, blocks)), strict=True):
        if target not in special:
            nats += loss
            n_bytes += len(tokenizer.decode_bytes([target]))
    return nats / (math.log(2) * n_bytes)


# ---------------------------------------------------------------- the figure


def test_of_bytes_it_is_the_loss_in_bits(tmp_path: Path) -> None:
    tokenizer, model = ByteTokenizer(), model_of(257)
    found = measured(model, blocks_of(tokenizer.encode(TEXT * 20), tmp_path), tokenizer)
    assert found.bits_per_byte == found.nats_per_token / math.log(2)


def test_a_model_that_knows_nothing_needs_eight_bits_a_byte_and_a_little(tmp_path: Path) -> None:
    tokenizer, model = ByteTokenizer(), model_of(257)
    for parameter in model.parameters():
        parameter.data.zero_()
    ids = [*tokenizer.encode(TEXT * 5), 256] * 4
    assert measured(model, blocks_of(ids, tmp_path), tokenizer).bits_per_byte == pytest.approx(math.log2(257))


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_end_of_text_counts_neither_as_nats_nor_as_bytes(tmp_path: Path, micro_batch: int) -> None:
    tokenizer, model = ByteTokenizer(), model_of(257)
    blocks = blocks_of([*tokenizer.encode(TEXT), 256] * 20, tmp_path)
    losses_N, targets_N = losses_and_targets(model, blocks)
    assert (targets_N == 256).sum() == 19  # the last block ends before the last one
    found = measured(model, blocks, tokenizer, micro_batch)
    text_losses = losses_N[targets_N != 256]
    assert found.bits_per_byte == pytest.approx(text_losses.mean().item() / math.log(2), rel=1e-12)
    # The loss in nats is over all tokens, as without.
    assert found.nats_per_token == pytest.approx(losses_N.mean().item(), rel=1e-12)
    assert found.bits_per_byte != pytest.approx(found.nats_per_token / math.log(2), rel=1e-4)


def test_the_loss_in_nats_is_the_same_number_with_and_without(tmp_path: Path) -> None:
    tokenizer, model = ByteTokenizer(), model_of(257).float()
    blocks = blocks_of([*tokenizer.encode(TEXT), 256] * 20, tmp_path)
    without = evaluate(model, blocks, micro_batch=3, device="cpu")
    assert without is not None
    assert measured(model, blocks, tokenizer).nats_per_token == without.nats_per_token


def test_a_character_counts_with_its_bytes(tmp_path: Path) -> None:
    tokenizer = CharTokenizer.of_text(TEXT)
    model = model_of(tokenizer.n_vocab)
    ids = tokenizer.encode(TEXT * 20)
    blocks = blocks_of(ids, tmp_path)
    found = measured(model, blocks, tokenizer)
    assert found.bits_per_byte == pytest.approx(by_hand(model, blocks, tokenizer, set()), rel=1e-12)
    # All targets but the first token: 76 bytes for 68 characters.
    n_targets = len(blocks) * 16
    n_bytes = sum(len(character.encode()) for character in (TEXT * 20)[1 : n_targets + 1])
    assert found.bits_per_byte == pytest.approx(found.nats_per_token / math.log(2) * n_targets / n_bytes)


def learned_bpe() -> TrainedBpe:
    """Three merges: "ä" whole, "äm", and 🙂's first two bytes, half a character."""
    a, b = "ä".encode()
    c, d = "🙂".encode()[:2]
    return TrainedBpe(np.array([[a, b], [256, ord("m")], [c, d]]))


def test_tokens_of_several_bytes_and_half_characters(tmp_path: Path) -> None:
    tokenizer = learned_bpe()
    assert tokenizer.encode("äm🙂") == [257, 258, *"🙂".encode()[2:]]
    model = model_of(320)  # padded far beyond its 268 ids
    special = set(range(259, 320))
    # Two of the special tokens, and an id that only the padding has.
    blocks = blocks_of(
        [*tokenizer.encode(TEXT), tokenizer.eot, *tokenizer.encode("ämä"), 267, 300] * 20, tmp_path
    )
    found = measured(model, blocks, tokenizer)
    assert found.bits_per_byte == pytest.approx(by_hand(model, blocks, tokenizer, special), rel=1e-12)


def test_nothing_but_special_tokens_has_no_bits_per_byte(tmp_path: Path) -> None:
    found = measured(model_of(257), blocks_of([256] * 100, tmp_path), ByteTokenizer())
    assert found.bits_per_byte is None
    assert found.nats_per_token > 0


def test_many_special_targets_are_looked_at_in_parts(tmp_path: Path) -> None:
    """More than a chunk of them in one micro-batch."""
    tokenizer, model = ByteTokenizer(), model_of(257)
    blocks = blocks_of([65, 256, 256] * 300, tmp_path)
    found = measured(model, blocks, tokenizer, micro_batch=64)
    assert found.bits_per_byte == pytest.approx(by_hand(model, blocks, tokenizer, {256}), rel=1e-12)


def test_a_compiled_loss_is_not_compiled_for_every_number_of_special_targets(tmp_path: Path) -> None:
    model, shapes = model_of(257), set()

    def compiled(logits_CV: Tensor, *rest: Any) -> Tensor:
        shapes.add(logits_CV.shape)
        return loss_module.chunk_loss_(logits_CV, *rest)

    model._parts = model._parts._replace(chunk_loss=compiled)
    blocks = blocks_of([*ByteTokenizer().encode(TEXT), 256, 256] * 30, tmp_path)
    measured(model, blocks, ByteTokenizer(), micro_batch=1)
    assert shapes == {(16, 257)}


def test_the_bytes_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, model, calls = blocks_of(ByteTokenizer().encode(TEXT * 9), tmp_path), model_of(257), []
    real = target_text_module.count_targets
    monkeypatch.setattr(target_text_module, "count_targets", lambda *a: calls.append(1) or real(*a))
    text = TargetText(ByteTokenizer(), blocks, 257)
    assert calls == []
    for _ in range(3):
        evaluate(model, blocks, micro_batch=3, device="cpu", text=text)
    assert calls == [1]


# ---------------------------------------------------------------- in a run


TINY = [
    "--dataset=text", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4",
    "--gradient_accumulation_steps=1", "--learning_rate=1e-2", "--min_lr=1e-3", "--warmup_iters=2",
    "--max_iters=10", "--lr_decay_iters=10", "--eval_interval=5", "--eval_iters=20", "--device=cpu",
    "--no-compile", "--sample_tokens=0", "--out_dir=out",
]  # fmt: skip


def config(*more: str) -> RunConfig:
    return load_config(RunConfig, [*TINY, *more])


def evaluations(out_dir: str = "out") -> list[dict[str, Any]]:
    return [line for line in read_metrics(Path(out_dir) / "metrics.jsonl") if "val_loss" in line]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Short documents of bytes, so that end-of-text is a target often."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{number}: {TEXT}"}) for number in range(300)]
    Path("text.jsonl").write_text("\n".join(lines) + "\n")
    prepare(["text.jsonl"], PrepareOptions(tokenizer="byte", val_fraction=0.3), progress=False)
    return tmp_path


def bits_of_newest_checkpoint() -> dict[str, float]:
    """By hand, from the weights on disk."""
    run = open_run(config("--eval_only", "--init_from=resume"))
    found = {}
    for split, blocks in run.evaluation.items():
        losses_N, targets_N = losses_and_targets(run.model, blocks)
        assert (targets_N == 256).any()
        found[split] = losses_N[targets_N != 256].double().mean().item() / math.log(2)
    return found


def test_it_stands_wherever_the_loss_stands(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = train(config())
    shown, rows = capsys.readouterr().err, evaluations()
    expected = bits_of_newest_checkpoint()
    assert rows[-1]["val_bpb"] == pytest.approx(expected["val"], rel=1e-5)
    assert rows[-1]["train_bpb"] == pytest.approx(expected["train"], rel=1e-5)
    first, last = rows[0]["val_bpb"], rows[-1]["val_bpb"]
    assert (summary.values["val_bpb"], summary.values["train_bpb"]) == (last, rows[-1]["train_bpb"])
    assert last < first - 0.5
    for row in rows:
        nanogpt = f"step {row['step']}: train loss {row['train_loss']:.4f}, val loss {row['val_loss']:.4f}"
        assert f"{nanogpt}, val bpb {row['val_bpb']:.4f}\n" in shown
        # In log.txt nanoGPT's line stays as it is, and nanochat's follows.
        assert (
            f"{nanogpt}\n{bits_per_byte_line(row['step'], row['val_bpb'])}\n"
            in Path("out/log.txt").read_text()
        )
    text = summary.text()
    assert "validation loss in nats per token (bits per byte):" in text
    assert re.search(rf"every token alike +{math.log(257):.4f} \({math.log2(257):.3f}\)", text)
    assert re.search(rf"before training +[\d.]+ \({first:.3f}\)", text)
    assert re.search(rf"this model, now +[\d.]+ \({last:.3f}\)", text)


def test_the_line_is_nanochats() -> None:
    assert bits_per_byte_line(500, 1.28) == "Step 00500 | Validation bpb: 1.280000"


def test_guessing_by_frequency_is_over_text_too(texts: Path) -> None:
    summary = train(config("--max_iters=1"))
    run = open_run(config("--eval_only", "--init_from=resume"))
    seen = np.bincount(run.sequences.tokens.read(0, len(run.sequences.tokens)), minlength=320) + 1  # type: ignore[attr-defined]
    targets = run.evaluation["val"].gather(0, 10_000)[:, 1:].ravel()
    bits = -np.log2(seen / seen.sum())[targets[targets != 256]].mean()
    assert re.search(rf"frequency alone +[\d.]+ \({bits:.3f}\)", summary.text())


def test_a_continued_run_goes_on_with_the_same_figures(texts: Path) -> None:
    whole = train(config("--out_dir=straight"))
    train(config("--max_iters=5"))
    Path("more.jsonl").write_text(json.dumps({"text": "something else. " * 2000}) + "\n")
    prepare(
        ["text.jsonl", "more.jsonl"],
        PrepareOptions(name="text", tokenizer="byte", val_fraction=0.3),
        progress=False,
    )
    continued = train(config("--init_from=resume"))
    bits = ("train_bpb", "val_bpb", "first_val_bpb")
    assert [continued.values[name] for name in bits] == [whole.values[name] for name in bits]
    assert continued.values["first_val_bpb"] == evaluations()[0]["val_bpb"]
    assert [row["val_bpb"] for row in evaluations()] == [row["val_bpb"] for row in evaluations("straight")]


def test_a_run_from_before_bits_per_byte_is_continued(texts: Path) -> None:
    real = Position.to_json
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Position, "to_json", lambda self: {k: v for k, v in real(self).items() if k != "first_val_bpb"}
        )
        train(config("--max_iters=5"))
    assert "bpb" not in str(list_checkpoints(Path("out/checkpoints"))[-1].state["position"])
    summary = train(config("--init_from=resume"))
    assert summary.values["first_val_bpb"] is None
    assert re.search(r"before training +[\d.]+\n", summary.text())
    assert re.search(r"this model, now +[\d.]+ \([\d.]+\)", summary.text())


def test_on_other_data_what_it_began_with_is_measured_anew(texts: Path) -> None:
    train(config("--max_iters=5"))
    prepare(["text.jsonl"], PrepareOptions(name="other", tokenizer="byte", val_fraction=0.2), progress=False)
    summary = train(config("--init_from=resume", "--dataset=other"))
    assert summary.values["first_val_bpb"] == evaluations()[-2]["val_bpb"] != evaluations()[0]["val_bpb"]


def test_tokens_nobody_can_read_have_none(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = train(config("--dataset=tiny", "--vocab_size=61"))
    assert (summary.values["val_bpb"], summary.values["train_bpb"]) == (None, None)
    assert evaluations()[0]["val_bpb"] is None
    assert "bpb" not in capsys.readouterr().err + Path("out/log.txt").read_text()
    assert "bits per byte" not in summary.text()


def test_an_assumed_tokenizer_is_not_enough(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nanoGPT's bins are GPT-2's as a rule; a figure is not made of a rule."""
    monkeypatch.setattr("onecard.train.start.make_tokenizer", lambda name: ByteTokenizer())
    run = open_run(config("--dataset=tiny", "--vocab_size=50304", "--sample_tokens=10"))
    assert run.tokenizer is not None
    assert run.text == {}


def test_nanogpts_character_table_is_enough(workplace: Path) -> None:
    import pickle

    characters = "ä🙂" + "".join(map(chr, range(33, 92)))
    table = {"itos": dict(enumerate(characters)), "stoi": {c: n for n, c in enumerate(characters)}}
    (workplace / "data" / "tiny" / "meta.pkl").write_bytes(pickle.dumps(table))
    values = train(config("--dataset=tiny", "--max_iters=1")).values
    targets = open_run(config("--dataset=tiny", "--eval_only")).evaluation["val"].gather(0, 10_000)[:, 1:]
    n_bytes = sum(len(characters[n].encode()) for n in targets.ravel().tolist())
    assert n_bytes > targets.size
    assert values["val_bpb"] == pytest.approx(values["val_loss"] * targets.size / n_bytes / math.log(2))


def test_eval_only_and_programs_get_it(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert main(["train", *TINY, "--json", "--eval_only", "--init_from=resume"]) == 0
    captured = capsys.readouterr()
    only = json.loads(captured.out)
    assert (only["val_bpb"], only["train_bpb"]) == (trained["val_bpb"], trained["train_bpb"])
    assert f", val bpb {only['val_bpb']:.4f}\n" in captured.err


def test_wandb_gets_it(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=logged.append, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    train(config("--wandb_log=True"))
    assert [(x["val/bpb"], x["train/bpb"]) for x in logged if "val/bpb" in x] == [
        (row["val_bpb"], row["train_bpb"]) for row in evaluations()
    ]
