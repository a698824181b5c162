"""Parameters by part and FLOPs per token of every architecture. No torch: plan counts with it too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, ClassVar, Protocol

from onecard.errors import UserError
from onecard.language import _


class Shape(Protocol):
    """What every architecture's shape offers."""

    @property
    def arch(self) -> str: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def layer_kinds(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def flops_per_token(self) -> int: ...
    def parameters_by_part(self) -> dict[str, int]: ...
    def to_json(self) -> dict[str, Any]: ...
    def with_block_size(self, block_size: int) -> Shape: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class GPT2Shape:
    """What determines the tensors of a GPT-2 as nanoGPT builds it (head tied to the embedding)."""

    arch: ClassVar[str] = "gpt2"
    layer_kinds: ClassVar[int] = 1

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

    def with_block_size(self, block_size: int) -> GPT2Shape:
        return replace(self, block_size=block_size)

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


# GPT-2's tokens, and what nanoGPT pads them to: a multiple of 64 suits the matmuls.
GPT2_VOCABULARY, GPT2_PADDED_VOCABULARY = 50257, 50304

# OpenAI's models, which init_from names.
PRETRAINED = {
    name: GPT2Shape(layers, heads, width, GPT2_VOCABULARY, block_size=1024, bias=True, gelu_tanh=True)
    for name, layers, heads, width in (
        ("gpt2", 12, 12, 768), ("gpt2-medium", 24, 16, 1024), ("gpt2-large", 36, 20, 1280),
        ("gpt2-xl", 48, 25, 1600),
    )
}  # fmt: skip


def heads_for(width: int) -> int:
    """Number of heads: of 128 channels, or of the next larger even number that divides the width."""
    return next((n for n in range(-(-width // 128), 0, -1) if width % (2 * n) == 0), 1)


def nearest(start: int, most: int, works: Callable[[int], bool]) -> int:
    """The closest whole number to `start`, 1 to `most` (the smaller one of a tie), for which works(n)."""
    distance = 0
    while True:
        for candidate in (start - distance, start + distance):
            if 1 <= candidate <= most and works(candidate):
                return candidate
        distance += 1


@dataclass(frozen=True)
class NanochatShape:
    """What determines the tensors of nanochat's architecture of October 2025.

    RMS norms without weights, rotary positions, normed queries and keys, ReLU squared, no biases, an untied
    head behind a soft cap.
    """

    arch: ClassVar[str] = "nanochat-2025"
    layer_kinds: ClassVar[int] = 1

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

    def with_block_size(self, block_size: int) -> NanochatShape:
        return replace(self, block_size=block_size)

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


@dataclass(frozen=True)
class Nanochat2026Shape:
    """What determines the tensors of nanochat's architecture of 2026.

    NanochatShape's, and: most layers see a window of the past only, alternate layers add an embedding of
    the token to its values, and a few numbers mix what layers pass on (model/nanochat_2026.py).
    """

    arch: ClassVar[str] = "nanochat-2026"

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    block_size: int
    window_pattern: str = "SSSL"  # short or long, layer by layer, repeated
    value_embeddings: bool = True  # False: to compare with models of as many parameters
    window_block: int = 0  # short windows are a quarter of this block size; 0: of block_size

    # Channels of the residual stream that a gate reads: of a value embedding, of the token before.
    value_gate_channels: ClassVar[int] = 12
    smear_gate_channels: ClassVar[int] = 24

    def __post_init__(self) -> None:
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise UserError(
                _("window_pattern is '{pattern}'").format(pattern=self.window_pattern),
                _("it says layer by layer how far attention reaches: S a quarter of block_size, L all of it"),
                _("nanochat's is SSSL"),
            )
        if self.n_embd < self.smear_gate_channels:
            raise UserError(
                f"n_embd is {self.n_embd}",
                _("this architecture reads a gate from the first {n} channels").format(
                    n=self.smear_gate_channels
                ),
                _("{flag} or more").format(flag=f"--n_embd={self.smear_gate_channels}"),
            )

    @classmethod
    def of_depth(cls, depth: int, vocab_size: int, block_size: int) -> Nanochat2026Shape:
        """nanochat's one dial: 64 wide per layer, rounded up to whole heads of 128."""
        n_head = -(-64 * depth // 128)
        return cls(depth, n_head, 128 * n_head, vocab_size, block_size)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def windows(self) -> tuple[int, ...]:
        """How many tokens before its own a query sees, by layer. The last layer's window is always long."""
        short = -(-(self.window_block or self.block_size) // (4 * 128)) * 128  # whole tiles of the kernels
        reach = {"S": min(short, self.block_size), "L": self.block_size}
        pattern = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.n_layer - 1)]
        return tuple(reach[letter] for letter in [*pattern, "L"])

    @property
    def layers_with_value_embedding(self) -> tuple[int, ...]:
        """Every other layer, the last one among them."""
        if not self.value_embeddings:
            return ()
        return tuple(range((self.n_layer - 1) % 2, self.n_layer, 2))

    @property
    def layer_kinds(self) -> int:
        """How many kinds of layers are compiled. They differ in window and value embedding; several layers
        are at least two kinds, because the last norm takes the outputs of two."""
        with_values = set(self.layers_with_value_embedding)
        kinds = {(window, number in with_values) for number, window in enumerate(self.windows)}
        return max(len(kinds), min(2, self.n_layer))

    @property
    def middle_layer(self) -> int:
        """The layer whose output is subtracted from the last layer's."""
        return self.n_layer // 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def with_block_size(self, block_size: int) -> Nanochat2026Shape:
        """Another block size with the windows the weights were trained with."""
        if block_size == self.block_size:
            return self
        return replace(self, block_size=block_size, window_block=self.window_block or self.block_size)

    def parameters_by_part(self) -> dict[str, int]:
        width, with_values = self.n_embd, len(self.layers_with_value_embedding)
        return {
            "token embedding": self.vocab_size * width,
            "head": self.vocab_size * width,
            "value embeddings": with_values * self.vocab_size * width,
            "attention": self.n_layer * 4 * width * width,
            "mlp": self.n_layer * 8 * width * width,
            "gates": with_values * self.n_head * self.value_gate_channels + self.smear_gate_channels,
            "scalars": 2 * self.n_layer + 2,  # two numbers per layer, one for smearing, one for backing out
        }

    @property
    def parameters(self) -> int:
        return sum(self.parameters_by_part().values())

    @property
    def flops_per_token(self) -> int:
        """6N + 12·H·Q·window of every layer, N the matrices: embeddings are looked up, scalars multiply."""
        parts = self.parameters_by_part()
        n = sum(parts[name] for name in ("head", "attention", "mlp", "gates"))
        return 6 * n + 12 * self.n_head * self.head_dim * sum(self.windows)


# The largest a size may be, of knobs and of what is read: far above any model that one card can hold, and
# small enough to lay one out.
LARGEST = {"n_layer": 1024, "n_head": 1024, "n_embd": 2**16, "vocab_size": 2**24, "block_size": 2**20}
_LONGEST_PATTERN = 1024

SHAPES: dict[str, Any] = {shape.arch: shape for shape in (GPT2Shape, NanochatShape, Nanochat2026Shape)}


def shape_from(arch: object, values: object, where: object) -> Shape:
    """The shape that was saved with a model; UserError where no model can have it."""
    if not isinstance(arch, str) or arch not in SHAPES:
        raise UserError(
            _("{where} holds a model of an architecture this version does not know: {arch}").format(
                where=where, arch=repr(str(arch)[:40])
            ),
            _("known are {names}").format(names=", ".join(SHAPES)),
            _("use the version of onecard that wrote it, or a newer one"),
        )
    expected = {field.name: field for field in fields(SHAPES[arch])}
    found = values if isinstance(values, dict) else {}
    needed = {name for name, field in expected.items() if field.default is MISSING}
    wrong = [name for name in sorted(needed) if name not in found]
    wrong += [str(name)[:40] for name in found if name not in expected or not _is_possible(name, found[name])]
    if not wrong and found["n_embd"] % found["n_head"]:
        wrong = ["n_head"]
    if wrong:
        raise UserError(
            _("{path} is damaged").format(path=where),
            _("no model has the sizes it names: {names}").format(names=", ".join(wrong[:6])),
        )
    shape: Shape = SHAPES[arch](**found)
    return shape


def _is_possible(name: str, value: object) -> bool:
    if name in LARGEST:
        return type(value) is int and 1 <= value <= LARGEST[name]
    if name == "window_pattern":
        return isinstance(value, str) and len(value) <= _LONGEST_PATTERN
    if name == "window_block":
        return type(value) is int and 0 <= value <= LARGEST["block_size"]
    return isinstance(value, bool)
