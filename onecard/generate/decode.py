"""Text generated token by token: with a cache while the context fits the model, recomputed beyond it.

Each sample can be reproduced. Shapes: B samples generated together, T tokens of context, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onecard.errors import UserError
from onecard.language import _
from onecard.model.decoder import Decoder
from onecard.model.layers import LayerCache

# Probabilities become whole numbers of this unit: sums of integers are exact and the same on every
# device. Fine enough that what is lost (below 1e-14) is never chosen anyway, coarse enough that the
# largest vocabulary sums without overflow.
_WEIGHT_UNIT = 2.0**48
_UNIFORMS_AT_ONCE = 256
_NOT_FINITE = -1


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the model's distribution.

    Applied in this order: temperature, the top_k likeliest, then of those the fewest that together
    reach probability top_p.
    """

    temperature: float  # 0 takes the likeliest token, always
    top_k: int | None  # None or 0: all
    top_p: float  # 1: all
    seed: int


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt: list[int],
    *,
    samples: int,
    max_new_tokens: int,
    sampling: Sampling,
    n_vocab: int,
    first_sample: int = 0,
) -> Iterator[Tensor]:
    """Continue one prompt `samples` times; every step yields the next token of each, (B,) int64 on the CPU.

    The context is the last block_size tokens, at positions from 0, as in nanoGPT. Row r is sample
    number first_sample + r, and its chance depends on that number and the seed alone: it comes out
    the same in a batch of any size, up to rounding of the logits. Ids from n_vocab on (padding of
    the embedding) are never chosen.
    """
    assert prompt, "an empty prompt predicts nothing"
    was_training = model.training
    model.eval()
    try:
        block_size = model.shape.block_size
        device = model.lm_head.weight.device
        # The last token is never read by the model, so it needs no place in the cache.
        capacity = min(block_size, len(prompt) + max_new_tokens - 1)
        uniforms = _Uniforms(sampling.seed, first_sample, samples, device)
        for step in range(max_new_tokens):
            if step == 0:
                context_BT = torch.tensor([prompt[-block_size:]], device=device)
                logits_BV, cache = _read_prompt(model, context_BT, samples, capacity)
                context_BT = context_BT.expand(samples, -1)
            elif context_BT.shape[1] <= block_size:
                logits_BV = model.next_logits(context_BT[:, -1:], cache)
            else:
                # Every token moved to another position embedding: nothing in the cache is valid.
                context_BT = context_BT[:, -block_size:]
                for layer in cache:
                    layer.length = 0
                logits_BV = model.next_logits(context_BT, cache)
            next_B = _choose(logits_BV[:, :n_vocab], sampling, uniforms)
            context_BT = torch.cat((context_BT, next_B[:, None]), dim=1)
            # The one wait for the device per token; the check for NaN travels with it.
            next_cpu_B = next_B.cpu()
            if (next_cpu_B == _NOT_FINITE).any():
                raise _not_finite(step)
            yield next_cpu_B
    finally:
        model.train(was_training)


def _read_prompt(
    model: Decoder, prompt_1T: Tensor, samples: int, capacity: int
) -> tuple[Tensor, list[LayerCache]]:
    """Logits after the prompt and a cache holding it, for all samples: read once, then copied."""
    if samples == 1:
        cache = model.new_cache(1, capacity)
        return model.next_logits(prompt_1T, cache), cache
    prompt_cache = model.new_cache(1, prompt_1T.shape[1])
    logits_1V = model.next_logits(prompt_1T, prompt_cache)
    cache = model.new_cache(samples, capacity)
    for layer, prompt_layer in zip(cache, prompt_cache, strict=True):
        layer.take(prompt_layer)
    return logits_1V.expand(samples, -1), cache


def _choose(logits_BV: Tensor, sampling: Sampling, uniforms: _Uniforms) -> Tensor:
    """The next token of every row; _NOT_FINITE for a row whose logits are not all finite numbers."""
    if sampling.temperature == 0:
        next_B = logits_BV.argmax(-1)
    else:
        next_B = chosen(token_weights(logits_BV, sampling), uniforms.take())
    return torch.where(logits_BV.isfinite().all(-1), next_B, _NOT_FINITE)


def token_weights(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The filtered distribution as whole numbers (int64), proportional to probability.

    Ties at the k-th place all stay, as in nanoGPT; ties at the edge of top_p go to the lower id.
    """
    # The maximum goes first: a tiny temperature must not overflow.
    relative_BV = logits_BV.double()
    relative_BV = relative_BV - relative_BV.amax(-1, keepdim=True)
    if sampling.top_k and sampling.top_k < relative_BV.shape[-1]:
        least_B1 = relative_BV.topk(sampling.top_k).values[:, -1:]
        relative_BV = relative_BV.masked_fill(relative_BV < least_B1, -torch.inf)
    probability_BV = (relative_BV / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        sorted_BV, ids_BV = probability_BV.sort(dim=-1, descending=True, stable=True)
        # A token is superfluous when those before it have already reached top_p; the first never is.
        superfluous_BV = torch.zeros_like(sorted_BV, dtype=torch.bool)
        superfluous_BV[:, 1:] = sorted_BV.cumsum(-1)[:, :-1] >= sampling.top_p
        superfluous_BV = superfluous_BV.scatter(-1, ids_BV, superfluous_BV)
        probability_BV = probability_BV.masked_fill(superfluous_BV, 0.0)
    return (probability_BV * _WEIGHT_UNIT).long()


def chosen(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One token per row by inverse CDF: uniform u in [0, 1) takes the token at fraction u of the weight.

    Tokens stand in the order of their ids, not by likelihood: a rounding difference in the logits
    then moves boundaries a little, where near-ties changing rank would exchange whole tokens.
    """
    upto_BV = weights_BV.cumsum(-1)
    total_B = upto_BV[:, -1]
    target_B = (uniform_B * total_B).long().clamp(max=total_B - 1)
    # The first token whose running sum is above the target, so one of weight > 0.
    return torch.searchsorted(upto_BV, target_B[:, None], right=True)[:, 0]


class _Uniforms:
    """A stream of uniform numbers in [0, 1) for every sample, each from a generator of its own."""

    def __init__(self, seed: int, first_sample: int, samples: int, device: torch.device) -> None:
        self._generators = [
            torch.Generator().manual_seed(stream_seed(seed, sample))
            for sample in range(first_sample, first_sample + samples)
        ]
        self._device = device
        self._left: list[Tensor] = []

    def take(self) -> Tensor:
        """The next number of every stream, (B,)."""
        if not self._left:
            chunk_BC = torch.stack(
                [torch.rand(_UNIFORMS_AT_ONCE, generator=g, dtype=torch.float64) for g in self._generators]
            )
            self._left = list(chunk_BC.to(self._device).unbind(1))[::-1]
        return self._left.pop()


def stream_seed(seed: int, sample: int) -> int:
    """The generator seed of one sample: different for all samples of one seed, unrelated between seeds.

    32 bits, because torch's CPU generator reads no more; both steps are one to one on 32 bits, so
    that no two samples of a seed can meet.
    """
    return _mix32(_mix32(seed & 0xFFFFFFFF) ^ (sample & 0xFFFFFFFF))


def _mix32(value: int) -> int:
    """A one-to-one scrambling of 32 bits (MurmurHash3's finaliser; the offset keeps 0 from mapping to 0)."""
    value = (value + 0x9E3779B9) & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return value ^ (value >> 16)


def _not_finite(step: int) -> UserError:
    return UserError(
        _("the model's predictions are not numbers, so no token can be chosen"),
        _(
            "its logits are NaN or infinite after {step:,} new tokens: the run that made it diverged, or "
            "float16 overflowed"
        ).format(step=step),
        _("sample from an earlier checkpoint with --step=N, or compute with --dtype=float32"),
    )
