"""The bill of Hugging Face's Trainer against measured runs and against what its models keep."""

from __future__ import annotations

from typing import Any

import pytest
from measured_trainers import name_of, rows, shape_of, trainer_of

from onecard.arch.shapes import GPT2Shape
from onecard.plan.others.bills import bill_of_trainer, is_confirmed
from onecard.plan.others.huggingface_step import HuggingFaceGPT2, HuggingFaceLlama, LlamaShape

MEASURED = rows("huggingface")


def test_rows_are_there() -> None:
    assert len(MEASURED) == 7
    assert {row["job"]["checkpointing"] for row in MEASURED} == {True, False}


@pytest.mark.parametrize("row", MEASURED, ids=name_of)
def test_measured_run(row: dict[str, Any]) -> None:
    job, peaks = row["job"], row["peaks"]
    for moment, steps in (("first", 1), ("steady", 3)):
        heap = trainer_of(job).run(steps, job["accumulation"])
        assert heap.peak_allocated == pytest.approx(peaks[moment]["allocated"], rel=0.005)
        assert heap.peak_reserved == pytest.approx(peaks[moment]["reserved"], rel=0.02)


def test_what_no_card_has_confirmed_is_marked() -> None:
    for row in MEASURED:
        assert is_confirmed("huggingface", shape_of(row["job"]), row["job"]["batch"], "bfloat16")
    assert not bill_of_trainer("huggingface", LlamaShape(2, 4, 128, 384, 512, 64), 1).confirmed


def test_checkpointing_and_dropout_as_they_are_known_to_be() -> None:
    gpt2 = GPT2Shape(12, 12, 768, 50257, 1024, bias=True)
    plain = bill_of_trainer("huggingface", gpt2, 8)
    checkpointed = bill_of_trainer("huggingface", gpt2, 8, checkpointing=True)
    assert checkpointed.allocated < 0.6 * plain.allocated
    without = bill_of_trainer("huggingface", gpt2, 8, dropout=0.0)
    masks = {line.name: line.bytes for line in plain.lines}["dropout masks"]
    assert masks == 25 * 8 * 1024 * 768
    assert plain.allocated - without.allocated == pytest.approx(masks, rel=0.05)


# Sizes, and whether the model is Llama's.
SAVED: list[tuple[bool, dict[str, int]]] = [
    (False, {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 96, "block_size": 24, "batch": 2}),
    (False, {"n_layer": 1, "n_head": 4, "n_embd": 64, "vocab_size": 301, "block_size": 40, "batch": 1}),
    (True, {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 96, "block_size": 24, "batch": 2,
            "inner": 88}),
    (True, {"n_layer": 3, "n_head": 4, "n_embd": 128, "vocab_size": 257, "block_size": 56, "batch": 3,
            "inner": 256}),
]  # fmt: skip


@pytest.mark.parametrize(("is_llama", "sizes"), SAVED)
def test_what_is_kept_for_backward_is_what_its_models_keep(is_llama: bool, sizes: dict[str, int]) -> None:
    """In float32 on a CPU, under saved_tensors_hooks, each storage once."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    common = {"vocab_size": sizes["vocab_size"], "attn_implementation": "sdpa", "use_cache": False}
    if is_llama:
        config = transformers.LlamaConfig(
            max_position_embeddings=sizes["block_size"], hidden_size=sizes["n_embd"],
            num_hidden_layers=sizes["n_layer"], num_attention_heads=sizes["n_head"],
            intermediate_size=sizes["inner"], **common,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_positions=sizes["block_size"], n_embd=sizes["n_embd"], n_layer=sizes["n_layer"],
            n_head=sizes["n_head"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
            eos_token_id=0, **common,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, sizes["vocab_size"], (sizes["batch"], sizes["block_size"]))
    there = [*model.parameters(), *model.buffers(), tokens]
    apart = {tensor.untyped_storage().data_ptr() for tensor in there}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens)["loss"]
    counted = sum(storage.nbytes() for storage in kept.values())
    del loss
    names = {name: value for name, value in sizes.items() if name != "batch"}
    if is_llama:
        step: Any = HuggingFaceLlama(LlamaShape(**names), sizes["batch"], dtype="float32")
    else:
        step = HuggingFaceGPT2(GPT2Shape(**names, bias=True), sizes["batch"], dtype="float32", dropout=False)
    step.load()
    assert step.kept_bytes() == counted
