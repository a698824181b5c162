"""Host memory that the driver keeps in place for a CUDA card."""

from __future__ import annotations

import pytest
import torch

from onecard.errors import UserError
from onecard.optim.offload import _Registration

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def test_memory_that_cannot_be_pinned_disturbs_nothing_after_it() -> None:
    """The setting that needed it is given up; the next one computes on the same card."""
    tensor = torch.empty(2**26, dtype=torch.uint8)
    kept = _Registration(tensor)
    with pytest.raises(UserError, match="could not be pinned"):
        _Registration(tensor)  # the same pages once more
    assert (torch.ones(8, device="cuda") + 1).sum().item() == 16
    assert (torch.randn(64, 64, device="cuda") @ torch.eye(64, device="cuda")).isfinite().all()
    del kept
    assert _Registration(tensor)._address == tensor.data_ptr(), "given back, and free to be taken again"
