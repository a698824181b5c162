"""How fast nanoGPT's own trainer is, by the same roofline: what differs is how many bytes it moves.

It casts every weight in every micro-batch, keeps the residual stream in fp32, and its logits exist whole, in
bf16 and fp32. The figures are fitted to its measured speeds on an H200 (n_embd 384 to 768, compiled and not).
"""

from __future__ import annotations

from onecard.arch.layout import Setting
from onecard.arch.shapes import GPT2Shape
from onecard.plan.rates import Rates
from onecard.plan.speed import StepTime, micro_batch_parts

# Bytes moved per token and channel of a layer, per logit, and per parameter: compiled, and not.
_REST = {True: 120.0, False: 312.0}
_LOGITS = {True: 27.0, False: 50.0}
_WEIGHTS = 17.0
_UPDATE = 44.0  # AdamW, fused: gradients, weights and both moments, and clearing
# torch.save writes fp32 weights and AdamW's two averages, once, where evaluations have been done.
CHECKPOINT_BYTES_PER_PARAMETER, CHECKPOINT_PASSES = 12, 1
_LAUNCHES = {True: 28, False: 85}  # of a layer: a whole compiled model has fewer
_OTHERS = 85


def nanogpt_step_time(
    shape: GPT2Shape, micro_batch: int, sequences: int, rates: Rates, *, compiled: bool,
    dtype: str = "bfloat16",
) -> StepTime:  # fmt: skip
    setting = Setting(micro_batch, micro_batch * shape.block_size, cuda_graphs=True)
    micros = max(1, sequences // micro_batch)
    matmuls, attention, rest, loss = micro_batch_parts(
        shape, setting, dtype, rates, micro_batch, rest_bytes=_REST[compiled], logit_bytes=_LOGITS[compiled]
    )
    rest += _WEIGHTS * shape.parameters / rates.bandwidth
    on_card = matmuls + attention + rest + loss
    host = (_LAUNCHES[compiled] * shape.n_layer + _OTHERS) * rates.launch
    waiting = max(0.0, host - on_card)
    update = _UPDATE * shape.parameters / rates.bandwidth
    parts = [micros * part for part in (matmuls, attention, rest, loss, waiting)]
    tokens = micros * micro_batch * shape.block_size
    return StepTime.of(parts, update, on_card + waiting, tokens, shape.flops_per_token, rates.peak)
