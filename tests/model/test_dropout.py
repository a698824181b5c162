from __future__ import annotations

import pytest
import torch

from onecard.model.dropout import DropoutKeys, keep_mask


def keys(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_sequence_has_the_same_mask_in_every_batch() -> None:
    together = keep_mask(keys(11, 22, 33), (7, 5), 0.3, site=4)
    for row, key in enumerate((11, 22, 33)):
        assert torch.equal(together[row], keep_mask(keys(key), (7, 5), 0.3, site=4)[0])


def test_every_layer_has_masks_of_its_own() -> None:
    dropout = DropoutKeys(keys(1, 2, 3), 0.5)
    layers = [dropout, *dropout.for_layers(12)]
    masks = torch.stack([keep_mask(x.keys_B, (4_000,), 0.5, site=1).double() for x in layers]).flatten(0, 1)
    signs = masks * 2 - 1
    assert (
        signs @ signs.T / 4_000 - torch.eye(len(signs), dtype=torch.float64)
    ).abs().max() < 0.08  # 5 sigma


@pytest.mark.parametrize("probability", [0.05, 0.2, 0.5, 0.9])
def test_the_share_kept_is_one_minus_the_probability(probability: float) -> None:
    kept = keep_mask(torch.arange(-8, 8, dtype=torch.int32), (50_000,), probability, site=1).double()
    # Five standard deviations of a binomial.
    margin = 5 * (probability * (1 - probability) / 50_000) ** 0.5
    assert (kept.mean(1) - (1 - probability)).abs().max() < margin


def test_masks_of_sequences_sites_and_neighbouring_elements_are_uncorrelated() -> None:
    rows = torch.cat([keep_mask(torch.arange(6, dtype=torch.int32), (200_000,), 0.5, s) for s in (1, 2, 3)])
    signs = rows.double() * 2 - 1
    off_diagonal = (signs @ signs.T / signs.shape[1]) - torch.eye(len(signs), dtype=torch.float64)
    assert off_diagonal.abs().max() < 0.012  # 5 sigma of 200,000 coin flips
    for lag in (1, 2, 64, 768, 1024):
        assert (signs[:, :-lag] * signs[:, lag:]).mean(1).abs().max() < 0.012


def test_what_stays_is_scaled_so_that_the_mean_is_kept() -> None:
    x = torch.ones(4, 20_000, dtype=torch.float64)
    dropped = DropoutKeys(keys(1, 2, 3, 4), 0.25).apply(x, site=9)
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(dropped.mean().item() - 1) < 0.01


@pytest.mark.slow
def test_compiled_masks_are_the_eager_masks() -> None:
    compiled = torch.compile(keep_mask, dynamic=False)
    many = torch.arange(5, dtype=torch.int32) * 400_000_007
    assert torch.equal(compiled(many, (3, 1001), 0.37, 5), keep_mask(many, (3, 1001), 0.37, 5))
