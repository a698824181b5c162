from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from onecard.data.batches import Sequences
from onecard.data.bins import TokenFile
from onecard.data.prefetch import Prefetcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def test_pinned_copies_arrive_whole(tmp_path: Path) -> None:
    """Copies run behind the host's back: what arrives must be what was read, step after step."""
    np.random.default_rng(0).integers(0, 50_000, 200_000).astype("<u2").tofile(tmp_path / "train.bin")
    sequences = Sequences(TokenFile.open(tmp_path / "train.bin"), 256, seed=1)
    expected_BL, _, expected_state = sequences.take(sequences.start(), 24 * 50)
    arrived = []
    with Prefetcher(
        sequences, sequences.start(), step_sequences=24, micro_batch=7, device="cuda"
    ) as prefetcher:
        for _ in range(50):
            micros, state = prefetcher.next_step()
            for micro in micros:
                assert micro.x.is_cuda
                arrived.append(torch.cat([micro.x, micro.y[:, -1:]], dim=1))
    assert state == expected_state
    assert np.array_equal(torch.cat(arrived).cpu().numpy(), expected_BL)
