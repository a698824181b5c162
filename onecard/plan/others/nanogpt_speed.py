"""How fast nanoGPT's own trainer is, by the same roofline: what differs is how many bytes it moves.

It casts every weight in every micro-batch, keeps the residual stream in fp32, and its logits exist whole, in
bf16 and fp32. Its host launches kernel after kernel, compiled too, and waits for the loss at the end of each
step. The figures are fitted to its measured speeds on an H200 (6 to 48 layers, n_embd 128 to 1600, blocks of
256 to 2048, 1,024 to 16,384 tokens a micro-batch, compiled and not; benchmarks/results/*peers*).

With dropout its fused attention takes twice as long, whatever the probability; compiled, the masks of the
two sums with the residual stream are written and read.
"""

from __future__ import annotations

from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2Shape
from onecard.plan.rates import Rates
from onecard.plan.speed import StepTime, micro_batch_parts

# Bytes moved per token and channel of a layer, per logit, and per parameter: compiled, and not.
_REST = {True: 162.0, False: 240.0}
_LOGITS = {True: 18.0, False: 50.0}
_WEIGHTS = 17.0
_UPDATE = 44.0  # AdamW, fused: gradients, weights and both moments, and clearing
_DROPPING_ATTENTION = 2.0  # times as long
_MASKS = {True: 20.0, False: 0.0}  # bytes per token and channel of a layer; eager: too little to be measured
# torch.save writes fp32 weights and AdamW's two averages, once, where evaluations have been done.
CHECKPOINT_BYTES_PER_PARAMETER, CHECKPOINT_PASSES = 12, 1
# In launches of a small kernel: a layer of a micro-batch, all else of it, and a layer's update.
_LAUNCHES = {True: 97, False: 185}
_OTHERS, _UPDATE_LAUNCHES = 60, 50


def nanogpt_step_time(
    shape: GPT2Shape, micro_batch: int, sequences: int, rates: Rates, *, compiled: bool,
    dtype: str = "bfloat16", dropout: float = 0.0,
) -> StepTime:  # fmt: skip
    setting = Setting(micro_batch, micro_batch * shape.block_size, cuda_graphs=True)
    micros = max(1, sequences // micro_batch)
    matmuls, attention, rest, loss = micro_batch_parts(
        shape, setting, dtype, rates, micro_batch, rest_bytes=_REST[compiled], logit_bytes=_LOGITS[compiled]
    )
    rest += _WEIGHTS * shape.parameters / rates.bandwidth
    dropping = 0.0
    if dropout:
        values = shape.n_layer * shape.n_embd * micro_batch * shape.block_size
        masks = _MASKS[compiled] * values / rates.bandwidth
        dropping = masks + (_DROPPING_ATTENTION - 1) * attention
        rest, attention = rest + masks, _DROPPING_ATTENTION * attention
    on_card = matmuls + attention + rest + loss
    host = (_LAUNCHES[compiled] * shape.n_layer + _OTHERS) * rates.launch
    waiting = max(0.0, host - on_card)
    update_launches = _UPDATE_LAUNCHES * shape.n_layer * rates.launch
    update = _UPDATE * shape.parameters / rates.bandwidth
    # Where it waits for the host anyway, the update's launches are not hidden by kernels before them either.
    if waiting:
        update = max(update, update_launches)
    parts = [micros * part for part in (matmuls, attention, rest, loss, waiting)]
    tokens = micros * micro_batch * shape.block_size
    return StepTime.of(
        parts, update, on_card + waiting, tokens, shape.flops_per_token, rates.peak,
        micros * host + update_launches, micros * dropping,
    )  # fmt: skip
