from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import MemoryTokens
from safetensors import safe_open

from onecard.arch.shapes import GPT2Shape
from onecard.config.run import RunConfig
from onecard.data.batches import Sequences
from onecard.data.prefetch import Micro, Prefetcher
from onecard.model.gpt2 import GPT2
from onecard.optim.rules import adamw_for_all
from onecard.optim.schedule import StepRates, learning_rate
from onecard.run.load import load_weights
from onecard.train.step import LossScale, StepOptions, Stepper

SHAPE = GPT2Shape(n_layer=2, n_head=2, n_embd=32, vocab_size=61, block_size=16, bias=True)
FIXTURE = Path(__file__).parent.parent / "fixtures" / "nanogpt" / "hundred_steps.safetensors"


def make_stepper(dropout: float = 0.0, grad_clip: float = 1.0, dtype: str = "float64") -> Stepper:
    model = GPT2.initialised(SHAPE, 3)
    return Stepper(
        model, device="cpu", dtype=dtype, options=StepOptions(dropout=dropout, grad_clip=grad_clip)
    )


def gradients_of_one_step(micro_batch: int, dropout: float) -> tuple[float, dict[str, torch.Tensor]]:
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    stepper = make_stepper(dropout)
    loss = 0.0
    with Prefetcher(sequences, sequences.start(), step_sequences=16, micro_batch=micro_batch) as batches:
        for micro in batches.next_step().micros:
            loss += stepper.backward(micro, 16 * SHAPE.block_size).item()
    return loss, {n: total.clone() for n, total in stepper.optimizer.accumulators.items()}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("micro_batch", [8, 5, 3, 1])
def test_how_a_step_is_split_changes_neither_loss_nor_gradients(micro_batch: int, dropout: float) -> None:
    whole_loss, whole = gradients_of_one_step(16, dropout)
    loss, split = gradients_of_one_step(micro_batch, dropout)
    assert loss == pytest.approx(whole_loss, rel=1e-9)
    assert whole.keys() == split.keys() == dict(make_stepper().model.named_parameters()).keys()
    for name, gradient in whole.items():
        error = (split[name] - gradient).norm() / gradient.norm()
        assert error.item() < 1e-9, name


def test_dropout_changes_the_loss_and_another_sequence_gets_another_mask() -> None:
    plain, _ = gradients_of_one_step(16, 0.0)
    dropped, _ = gradients_of_one_step(16, 0.2)
    assert dropped != pytest.approx(plain, rel=1e-6)
    stepper = make_stepper(0.2)
    x_BT = torch.arange(16)[None]
    losses = {stepper.backward(Micro(x_BT, x_BT, torch.tensor([key])), 16).item() for key in (1, 2, 3, 1)}
    assert len(losses) == 3


def test_a_step_that_is_stopped_midway_has_not_happened() -> None:
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    stepper = make_stepper(dtype="float32")
    before = {n: p.detach().clone() for n, p in stepper.model.named_parameters()}
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    with Prefetcher(sequences, sequences.start(), step_sequences=16, micro_batch=4) as batches:
        assert stepper.run(batches.next_step().micros, StepRates(1e-3), stop=stop) is None
    assert asked == 3
    assert all(torch.equal(p, before[n]) for n, p in stepper.model.named_parameters())
    assert not any(total.any() for total in stepper.optimizer.accumulators.values())
    assert stepper.optimizer.steps == 0


def test_the_reported_loss_is_the_mean_over_tokens_and_the_norm_is_before_clipping() -> None:
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    unclipped, clipped = make_stepper(grad_clip=0.0, dtype="float32"), make_stepper(dtype="float32")
    results = []
    for stepper in (unclipped, clipped):
        with Prefetcher(sequences, sequences.start(), step_sequences=16, micro_batch=5) as batches:
            results.append(stepper.run(batches.next_step().micros, StepRates(1e-3)))
    assert results[0] is not None
    assert results[1] is not None
    expected, gradients = gradients_of_one_step(16, 0.0)
    assert results[0].loss.item() == pytest.approx(expected, rel=1e-5)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert results[0].grad_norm.item() == pytest.approx(norm, rel=1e-4)
    assert results[1].grad_norm.item() == pytest.approx(norm, rel=1e-4)


def test_bfloat16_computes_in_bfloat16_and_keeps_fp32_weights_and_gradients() -> None:
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    stepper = make_stepper(dtype="bfloat16")
    with Prefetcher(sequences, sequences.start(), step_sequences=16, micro_batch=16) as batches:
        loss = sum(stepper.backward(m, 16 * SHAPE.block_size).item() for m in batches.next_step().micros)
    exact, gradients = gradients_of_one_step(16, 0.0)
    assert loss == pytest.approx(exact, rel=2e-3)
    assert loss != exact
    for name, parameter in stepper.model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if parameter.dim() == 2 else torch.float32)
        assert stepper.optimizer.export_weights()[name].dtype == torch.float32
        total = stepper.optimizer.accumulators[name]
        assert total.dtype == torch.float32
        error = (total.double() - gradients[name]).norm() / gradients[name].norm()
        assert error.item() < 0.05, name


def test_a_hundred_steps_give_nanogpts_own_losses() -> None:
    """Weights, batches and losses were noted from nanoGPT's train.py (benchmarks/parity_nanogpt.py)."""
    with safe_open(FIXTURE, "pt") as file:
        settings = json.loads(file.metadata()["settings"])
        recorded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    config = RunConfig(**settings)
    model = GPT2(GPT2Shape(config.n_layer, config.n_head, config.n_embd, 64, config.block_size, config.bias))
    load_weights(
        model, {k.removeprefix("weights."): v for k, v in recorded.items() if k.startswith("weights.")}
    )
    stepper = Stepper(
        model,
        device="cpu",
        dtype="float32",
        rules=adamw_for_all((config.beta1, config.beta2), config.weight_decay),
        options=StepOptions(grad_clip=config.grad_clip),
    )
    x, y = recorded["x"].long(), recorded["y"].long()
    accumulation = config.gradient_accumulation_steps
    ids = torch.zeros(config.batch_size, dtype=torch.int64)
    for step, expected in enumerate(recorded["loss"].tolist()):
        batches = range(step * accumulation, (step + 1) * accumulation)
        loss = sum(stepper.backward(Micro(x[i], y[i], ids), config.tokens_per_step).item() for i in batches)
        assert loss == pytest.approx(expected, abs=2e-5), f"step {step}"
        stepper.update(StepRates(learning_rate(step, config)))
    assert len(recorded["loss"]) == 100
    assert recorded["loss"][-1] < 2.0 < 4.0 < recorded["loss"][0]


def test_the_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps() -> None:
    scale = LossScale(enabled=True)
    assert not scale.survives(torch.tensor(float("inf")))
    assert not scale.survives(torch.tensor(float("nan")))
    assert scale.value == 65536 / 4
    for _ in range(1999):
        assert scale.survives(torch.tensor(1.0))
    assert scale.value == 65536 / 4
    again = LossScale(enabled=True)
    again.restore(scale.to_json())
    for each in (scale, again):
        assert each.survives(torch.tensor(1.0))
        assert each.value == 65536 / 2
    off = LossScale(enabled=False)
    assert off.survives(torch.tensor(float("nan")))  # the loop sees such a loss and ends the run
    assert (off.value, off.to_json()) == (1.0, {})


def test_a_gradient_that_overflows_is_left_out_and_the_next_one_is_right() -> None:
    """fp16's way, in fp32: the scale must cancel in norm and update, and an infinite step must not count."""
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    plain, scaled = make_stepper(dtype="float32"), make_stepper(dtype="float32")
    scaled.loss_scale = LossScale(enabled=True)
    with Prefetcher(sequences, sequences.start(), step_sequences=8, micro_batch=4) as batches:
        micros = list(batches.next_step().micros)
    before = {n: t.clone() for n, t in scaled.optimizer.export_weights().items()}
    next(iter(scaled.optimizer.accumulators.values())).fill_(float("inf"))
    scaled.update(StepRates(1e-3))
    assert all(torch.equal(t, before[n]) for n, t in scaled.optimizer.export_weights().items())
    assert scaled.optimizer.steps == 0
    assert scaled.loss_scale.value == 32768
    for stepper in (plain, scaled):
        for micro in micros:
            stepper.backward(micro, 8 * SHAPE.block_size)
    assert scaled.update(StepRates(1e-3)).item() == pytest.approx(
        plain.update(StepRates(1e-3)).item(), rel=1e-5
    )
    for name, weights in plain.optimizer.export_weights().items():
        torch.testing.assert_close(scaled.optimizer.export_weights()[name], weights, atol=1e-6, rtol=1e-5)


def test_a_step_that_failed_midway_can_be_tried_again() -> None:
    sequences = Sequences(MemoryTokens(3000), SHAPE.block_size, seed=7)
    stepper, undisturbed = make_stepper(), make_stepper()

    def fail(done: int, total: int) -> None:
        if done == 2:
            raise torch.OutOfMemoryError("not enough")

    with (
        Prefetcher(sequences, sequences.start(), step_sequences=16, micro_batch=4) as batches,
        pytest.raises(torch.OutOfMemoryError),
    ):
        stepper.run(batches.next_step().micros, StepRates(1e-3), on_micro=fail)
    norms = []
    for each in (stepper, undisturbed):
        with Prefetcher(sequences, sequences.start(), step_sequences=16, micro_batch=4) as batches:
            result = each.run(batches.next_step().micros, StepRates(1e-3))
        assert result is not None
        norms.append(result.grad_norm.item())
    assert norms[0] == norms[1]
