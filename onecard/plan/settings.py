"""What memory pressure may change about a run, and nothing else: tokens per step are sacred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecard.config import RunConfig
from onecard.shapes import Shape

RECOMPUTE = ("none", "mlp", "block")
OFFLOAD = ("none", "optimizer", "gradients")

# In bf16 twice as many bytes: 412 MB at GPT-2's vocabulary (see the logbook).
_DEFAULT_CHUNK_LOGITS = 4096 * 50304


def default_chunk(vocab_size: int) -> int:
    """Rows of the loss at a time: enough to keep the matmuls efficient, whatever the vocabulary."""
    return max(128, _DEFAULT_CHUNK_LOGITS // vocab_size // 128 * 128)


@dataclass(frozen=True)
class Setting:
    """How a step is carried out; every combination computes the same step (low bits aside)."""

    micro_batch: int
    loss_chunk: int
    recompute: str = "none"
    offload: str = "none"
    master_weights: str = "fp32"
    optim_states: str = "fp32"
    compile: bool = True
    cuda_graphs: bool | None = False  # None: where it keeps the host busy, and there is room

    @property
    def may_record(self) -> bool:
        """By itself only what is compiled: what is not has been asked for to look into."""
        wanted = self.compile if self.cuda_graphs is None else self.cuda_graphs
        return wanted and self.offload != "gradients"  # whose totals come and go

    @property
    def exact(self) -> bool:
        """fp32 masters and states, as nanoGPT trains."""
        return self.master_weights == "fp32" and self.optim_states == "fp32"

    def words(self, sequences: int | None = None) -> str:
        """As flags of `onecard train`; with the sequences of a step, such that it stays the same step.

        A step that is no whole number of micro-batches cannot be said in flags: how it is split is then left
        to the trainer, which finds it by itself.
        """
        said = [f"--batch_size={self.micro_batch}"]
        if sequences is not None:
            said.append(f"--gradient_accumulation_steps={sequences // self.micro_batch}")
            if sequences % self.micro_batch:
                said = []
        usual = {"recompute": "none", "offload": "none", "master_weights": "fp32", "optim_states": "fp32"}
        said += [
            f"--{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value
        ]
        if not self.compile:
            said.append("--compile=False")
        return " ".join(said)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


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
