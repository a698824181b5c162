"""What nanoGPT's own trainer needs on a GPU, line by line: why a present run dies.

The bill is not a fitted formula. nanogpt_step.py plays nanoGPT's training step through, tensor by tensor, on
the allocator of caching_allocator.py; the bill is what was alive at the highest point. Structure is: which
tensors exist, in which precision and how long (model.py, train.py, autocast's lists, the compiler's choice
of what to keep), and the allocator's rules. No number is fitted, but two choices among possible structures
were made because the measured peaks decide for them: the order of the driver's addresses (see there), and
that the compiled backward holds its zeros to its end. The compiler's order of kernels where the peak is at
the end of backward (wide models, few tokens) has not been measured. Not modelled: CUDA's own 0.5 to 0.8 GiB
outside PyTorch, a desktop, other versions of the compiler, its padding of a vocabulary that is no multiple
of 8, attention other than flash attention, its padding of heads that are no multiple of 8 wide.

Measured runs that it is held against are in peers.toml and benchmarks/results/*peers*. float16 differs from
bfloat16 by a gradient scaler alone, which is nothing to speak of.

train.py begins with an evaluation. It needs less than training, the same logits without saved activations and
gradients; but where even that is not there, it is what fails, before any training. And training finds what it
has left in the allocator's cache, so that more or less is reserved than without it (41M, 16×1024, not
compiled: 16.7 GiB without, 19.2 with it, as measured).

What is reserved follows from which tensor finds which free block, so it can jump by a copy of the logits
between two neighbouring settings, in the bill as on a card.
"""

from __future__ import annotations

from functools import lru_cache

from onecard.arch.shapes import GPT2Shape
from onecard.plan.others.nanogpt_compiled import CompiledStep
from onecard.plan.others.nanogpt_eager import EagerStep
from onecard.plan.others.nanogpt_step import Step
from onecard.plan.others.trainer import TrainerBill, played

DTYPES = ("bfloat16", "float16", "float32")


@lru_cache(maxsize=64)  # a step is played tensor by tensor: what is asked again is not played again
def nanogpt_bill(
    shape: GPT2Shape, batch_size: int, *, dtype: str = "bfloat16", compiled: bool = True,
    dropout: float = 0.0, gradient_accumulation_steps: int = 40, evaluates: bool = True,
) -> TrainerBill:  # fmt: skip
    """The bill for train.py's settings of these names. With one micro-batch a step forward has no gradients.

    bfloat16 by default: train.py's own choice on every card that has it. `evaluates`: before the first step,
    as train.py does; without, its step alone.
    """
    kind = CompiledStep if compiled else EagerStep

    def step(limit: float) -> Step:
        return kind(shape, batch_size, half=dtype != "float32", dropout=dropout > 0, limit=limit)

    return played(step, gradient_accumulation_steps, evaluates=evaluates)
