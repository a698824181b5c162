"""Head and loss together: from the last hidden state to a sum of negative log-likelihoods.

The sum (not the mean) is what a step needs: micro-batches of different sizes then add up to exactly
the loss of the whole step, each token weighing the same.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE = -1  # targets with this id carry no loss, as in nanoGPT


def linear_cross_entropy_sum(x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(x @ head.T)[target], in fp32 (or the input's own, if wider)."""
    logits_NV = F.linear(x_BTD.flatten(0, 1), head_VD)
    # autocast already runs cross_entropy in fp32; outside autocast half inputs need the cast.
    logits_NV = logits_NV.float() if logits_NV.element_size() < 4 else logits_NV
    return F.cross_entropy(logits_NV, targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")
