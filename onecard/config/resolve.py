"""What follows from a config, the same for every verb."""

from __future__ import annotations

from onecard.arch.layout import Setting, default_chunk
from onecard.arch.shapes import Shape
from onecard.config.run import RunConfig


def setting_of(config: RunConfig, shape: Shape) -> Setting:
    """What a run with this config does if nothing changes it."""
    return Setting(
        micro_batch=config.batch_size,
        loss_chunk=config.loss_chunk or default_chunk(shape.vocab_size),
        recompute=config.recompute or "none",
        offload=config.offload or "none",
        master_weights=config.master_weights or "fp32",
        optim_states=config.optim_states or "fp32",
        compile=config.compile,
        cuda_graphs=config.cuda_graphs,
    )
