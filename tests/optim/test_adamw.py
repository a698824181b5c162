from __future__ import annotations

import pytest
import torch

from onecard.errors import UserError
from onecard.model.gpt2 import GPT2
from onecard.optim.adamw import build_adamw, export_state, import_state
from onecard.shapes import GPT2Shape

SHAPE = GPT2Shape(n_layer=1, n_head=2, n_embd=16, vocab_size=31, block_size=8, bias=True)


def trained(steps: int) -> tuple[GPT2, torch.optim.AdamW]:
    model = GPT2.initialised(SHAPE, 0)
    optimizer = build_adamw(model, learning_rate=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        take_step(model, optimizer, step)
    return model, optimizer


def take_step(model: GPT2, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(step))
    (model.loss_sum(x[:, :-1], x[:, 1:]) / 16).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_matrices_and_embeddings_decay_and_nothing_else_does() -> None:
    model, optimizer = trained(0)
    decayed, plain = optimizer.param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0.0
    assert all(names[id(p)].endswith("weight") and "ln_" not in names[id(p)] for p in decayed["params"])
    assert all("ln_" in names[id(p)] or names[id(p)].endswith("bias") for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_exported_moments_continue_exactly() -> None:
    model, optimizer = trained(3)
    saved_weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    saved = {k: v.clone() for k, v in export_state(model, optimizer).items()}
    take_step(model, optimizer, 3)

    other, fresh = trained(0)
    for name, parameter in other.named_parameters():
        parameter.data.copy_(saved_weights[name])
    import_state(other, fresh, saved)
    take_step(other, fresh, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_importing_copies_so_that_the_file_and_the_optimizer_do_not_share_memory() -> None:
    model, optimizer = trained(2)
    saved = {k: v.clone() for k, v in export_state(model, optimizer).items()}
    other, fresh = trained(0)
    import_state(other, fresh, saved)
    before = {k: v.clone() for k, v in saved.items()}
    take_step(other, fresh, 2)
    assert all(torch.equal(saved[k], before[k]) for k in saved)


def test_moments_of_another_shape_are_refused_by_name() -> None:
    model, optimizer = trained(1)
    saved = export_state(model, optimizer)
    saved["exp_avg.transformer.wte.weight"] = torch.zeros(3, 3)
    with pytest.raises(UserError, match=r"transformer\.wte\.weight"):
        import_state(*trained(0), saved)
