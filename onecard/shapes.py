"""Parameters by part and FLOPs per token of every architecture. No torch: plan counts with it too."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class GPT2Shape:
    """What determines the tensors of a GPT-2 as nanoGPT builds it (head tied to the embedding)."""

    arch: ClassVar[str] = "gpt2"

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    block_size: int
    bias: bool
    # nanoGPT computes GELU exactly; OpenAI's weights were trained with the tanh approximation.
    gelu_tanh: bool = False

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def parameters_by_part(self) -> dict[str, int]:
        width, bias = self.n_embd, int(self.bias)
        attention = 4 * width * width + bias * 4 * width  # c_attn is 3 width × width, c_proj width × width
        mlp = 8 * width * width + bias * 5 * width  # up to 4 width and back
        norm = width + bias * width
        return {
            "token embedding (tied head)": self.vocab_size * width,
            "position embedding": self.block_size * width,
            "attention": self.n_layer * attention,
            "mlp": self.n_layer * mlp,
            "layer norms": (2 * self.n_layer + 1) * norm,
        }

    @property
    def parameters(self) -> int:
        return sum(self.parameters_by_part().values())

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token: 6N + 12·L·H·Q·T (PaLM, appendix B), N without position embeddings.

        6N is forward (2N) and backward (4N) of every matmul, the tied head among them; the second
        term is attention's scores and mix over T tokens, not halved for the causal mask. The same
        formula as nanoGPT and PaLM, so that MFU compares.
        """
        n = self.parameters - self.block_size * self.n_embd
        return 6 * n + 12 * self.n_layer * self.n_head * self.head_dim * self.block_size


def heads_for(width: int) -> int:
    """Heads of 128 channels, or of as few more as divide the width into even numbers."""
    return next((n for n in range(-(-width // 128), 0, -1) if width % (2 * n) == 0), 1)


@dataclass(frozen=True)
class NanochatShape:
    """What determines the tensors of nanochat's architecture of October 2025.

    RMS norms without weights, rotary positions, normed queries and keys, ReLU squared, no biases, a head
    of its own behind a soft cap.
    """

    arch: ClassVar[str] = "nanochat-2025"

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    block_size: int

    @classmethod
    def of_depth(cls, depth: int, vocab_size: int, block_size: int) -> NanochatShape:
        """nanochat's one dial: 64 wide per layer, heads of 128."""
        width = 64 * depth
        return cls(depth, heads_for(width), width, vocab_size, block_size)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def parameters_by_part(self) -> dict[str, int]:
        width = self.n_embd
        return {
            "token embedding": self.vocab_size * width,
            "head": self.vocab_size * width,
            "attention": self.n_layer * 4 * width * width,
            "mlp": self.n_layer * 8 * width * width,
        }

    @property
    def parameters(self) -> int:
        return sum(self.parameters_by_part().values())

    @property
    def flops_per_token(self) -> int:
        """6N + 12·L·H·Q·T as for GPT-2, N without the token embedding, which is looked up."""
        n = self.parameters - self.vocab_size * self.n_embd
        return 6 * n + 12 * self.n_layer * self.n_head * self.head_dim * self.block_size


SHAPES: dict[str, Any] = {shape.arch: shape for shape in (GPT2Shape, NanochatShape)}
