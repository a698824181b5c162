"""What all architectures share: tokens to loss through layers, decoding, weights and accumulators by name.

Modules hold the weights and their names; what a layer computes is in the architecture's block module.
Autograd does not reach the weights: the trainer gives every weight a gradient accumulator
(`use_accumulators`), to which the backward pass adds.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onecard.arch.layout import default_chunk
from onecard.model.attention import usual_kernel
from onecard.model.compiling import limit_recompiling
from onecard.model.dropout import DropoutKeys, keys_for_layers
from onecard.model.layers import LayerCache
from onecard.model.loss import LossOptions, chunk_loss_, linear_cross_entropy
from onecard.model.loss_kernel import with_kernel
from onecard.model.recompute import Layer, run_layer

# cuDNN's is left out: it builds a plan for every new length, and in decoding every length is new.
_DECODING_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Rows of the second loss in loss_sums: few, so that the uncompiled loss needs little memory.
_APART_CHUNK = 128

# Weights of a layer, or their accumulators: a NamedTuple of the architecture.
Tensors = Any
D = TypeVar("D", bound="Decoder")


class Parts(NamedTuple):
    """The functions a step is made of, plain or compiled."""

    block_forward: Callable[..., tuple[Tensor, ...]]
    block_backward: Callable[..., Tensor]
    norm_forward: Callable[..., tuple[Tensor, ...]]
    norm_backward: Callable[..., Tensor | tuple[Tensor, ...]]
    chunk_loss: Callable[..., Tensor]


class LayerHooks(Protocol):
    """Called before and after the backward pass adds to a layer's accumulators."""

    def begin(self, layer: int) -> None: ...
    def end(self, layer: int) -> None: ...


@dataclass(frozen=True)
class LayerRun:
    """One layer in one micro-batch, as run_layer takes it."""

    parts: Parts
    spec: Any
    number: int
    weights: Tensors
    accumulators: Tensors | None
    inputs: Any  # of its functions, besides x: dropout's keys, rotary angles, what all layers share
    noise_key: Tensor | None
    hooks: LayerHooks | None

    def forward(self, x_BTD: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        assert not others, "a layer's other inputs are in `inputs`"
        return self.parts.block_forward(x_BTD, self.weights, self.spec, self.inputs)

    def backward(self, dout_BTD: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        assert self.accumulators is not None
        if self.hooks is not None:
            self.hooks.begin(self.number)
        dx_BTD = self.parts.block_backward(
            dout_BTD, saved, self.weights, self.accumulators, self.spec, self.inputs, self.noise_key
        )
        if self.hooks is not None:
            self.hooks.end(self.number)
        return dx_BTD


@dataclass(frozen=True)
class NormRun:
    """The last norm, as run_layer takes it: it saves its inputs. `weights` are empty where it has none."""

    parts: Parts
    weights: tuple[Tensor | None, ...]
    accumulators: tuple[Tensor | None, ...]
    dtype: torch.dtype

    def forward(self, x_BTD: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return self.parts.norm_forward(x_BTD, *others, self.dtype, *self.weights)

    def backward(self, dn_BTD: Tensor, saved: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return self.parts.norm_backward(dn_BTD, *saved, *self.weights, *self.accumulators)


class Decoder(nn.Module):
    """A language model that predicts the next token. Subclasses are architectures."""

    lm_head: nn.Linear
    transformer: Any
    saved_fields: Mapping[str, int]  # by the setting of `recompute`
    loss_options = LossOptions()
    head_name = "lm_head.weight"  # the parameter that the head's gradient belongs to
    middle_layer: int | None = None  # the layer whose output the last norm takes too

    def __init__(self, shape: Any, parts: Parts) -> None:
        super().__init__()
        self.shape = shape
        self.recompute, self.loss_chunk = "none", default_chunk(shape.vocab_size)
        self.attention_kernel: str | None = None  # of attention.py; None: one that works everywhere
        self.compiled = False
        self._parts = parts
        self._accumulators: dict[str, Tensor] = {}
        self._layer_weights: list[Tensors] = []
        self._layer_accumulators: list[Tensors] = []
        self._hooks: LayerHooks | None = None

    # --- what an architecture defines
    @property
    @abstractmethod
    def spec(self) -> Any:
        """What is constant in all layers, and compiled in."""

    def layer_specs(self) -> list[Any]:
        """`spec` of every layer. Layers may be of several kinds; each kind is compiled once."""
        return [self.spec] * self.shape.n_layer

    def one_of_each_kind(self) -> list[int]:
        """Layers that together use every compiled function, the last norm's included."""
        specs = self.layer_specs()
        found = [number for number, spec in enumerate(specs) if spec not in specs[:number]]
        # A norm of two layers' outputs is compiled again where they are not the same tensor.
        return [0, 1] if len(found) == 1 < len(specs) and self.middle_layer is not None else found

    def _place(self, name: str) -> tuple[int, str] | None:
        """The parameter's layer and its name within that layer; None where it belongs to none."""
        if not name.startswith("transformer.h."):
            return None
        _, _, layer, within = name.split(".", 3)
        return int(layer), within

    @abstractmethod
    def _block_tensors(self, by_name: Mapping[str, Tensor]) -> Tensors:
        """A layer's tensors in the order its functions take them, from names within the layer."""

    @abstractmethod
    def _initialise(self, name: str, data: Tensor, seed: int) -> None:
        """Fill one parameter with its fresh values."""

    @abstractmethod
    def _begin(self, tokens_BT: Tensor, first_position: int, dropout: DropoutKeys | None) -> Tensor:
        """The residual stream that enters the first layer."""

    @abstractmethod
    def _begin_backward(
        self, tokens_BT: Tensor, dx_BTD: Tensor, layer_inputs: list[Any], dropout: DropoutKeys | None
    ) -> None:
        """Add the gradients of the weights in `_begin` and `_layer_inputs` to their accumulators."""

    def _begin_decoding(self, tokens_BT: Tensor, cache: list[LayerCache]) -> Tensor:
        """`_begin` of tokens that follow those in the cache."""
        return self._begin(tokens_BT, cache[0].length, None)

    @abstractmethod
    def _layer_inputs(
        self, tokens_BT: Tensor, x_BTD: Tensor, first_position: int, dropout: DropoutKeys | None
    ) -> list[Any]:
        """What every layer's functions take besides x; `x_BTD` is what enters the first layer."""

    @abstractmethod
    def use_block_size(self, block_size: int) -> None:
        """Train and sample with sequences of another length than the weights were trained with."""

    @abstractmethod
    def _last_norm(self) -> Layer: ...

    @abstractmethod
    def _decode_layer(
        self, x_BTD: Tensor, weights: Tensors, spec: Any, inputs: Any, cache: LayerCache
    ) -> Tensor: ...

    # --- weights and accumulators
    @classmethod
    def uninitialised(cls: type[D], shape: Any) -> D:
        """A model on the CPU with undefined values, for callers that fill every tensor themselves."""
        with torch.device("meta"):
            model = cls(shape)  # type: ignore[call-arg]  # a subclass brings its own parts
        model.to_empty(device="cpu")
        model._tie()  # to_empty unties
        return model

    @classmethod
    def initialised(cls: type[D], shape: Any, seed: int, matrices: torch.dtype = torch.float32) -> D:
        """Fresh weights. Each tensor has a generator of its own, seeded by its name, on the CPU: the same
        seed gives the same weights on every device and whatever else the model contains. Matrices are
        rounded to the dtype `matrices` one by one, so that a large model never exists in fp32."""
        model = cls.uninitialised(shape)
        for name, parameter in model.named_parameters():
            model._initialise(name, parameter.data, seed)
            if parameter.dim() >= 2:
                parameter.data = parameter.data.to(matrices)
        return model

    def _tie(self) -> None:
        """Make shared weights shared again."""

    def use_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these tensors from now on (by parameter name, without a tied head)."""
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        self._tie()
        self._layer_weights = []

    def use_accumulators(self, accumulators: Mapping[str, Tensor], hooks: LayerHooks | None = None) -> None:
        """Add gradients to these tensors from now on."""
        self._hooks = hooks
        self._accumulators = dict(accumulators)
        self._layer_accumulators = self._by_layer(accumulators)

    def forget_accumulators(self) -> None:
        """Add gradients nowhere until `use_accumulators` says where."""
        self._hooks, self._accumulators, self._layer_accumulators = None, {}, []

    def _by_layer(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        of_layer: list[dict[str, Tensor]] = [{} for _ in range(self.shape.n_layer)]
        for name, tensor in tensors.items():
            place = self._place(name)
            if place is not None:
                of_layer[place[0]][place[1]] = tensor
        return [self._block_tensors(by_name) for by_name in of_layer]

    def layer_matrices(self) -> set[str]:
        """Names of the matrices inside layers: their accumulators may be bf16."""
        return {
            name
            for name, parameter in self.named_parameters()
            if name.startswith("transformer.h.") and parameter.dim() == 2
        }

    def _layers(self) -> list[Tensors]:
        """Every layer's weights, collected once: a walk over the modules takes as long as a small layer."""
        if not self._layer_weights:
            self._layer_weights = self._by_layer(dict(self.named_parameters()))
        return self._layer_weights

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._layer_weights = []  # .to() and the like may replace the tensors
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile the parts: layers of a kind share one compilation, so that start-up stays short."""
        import torch._dynamo

        limit_recompiling(kinds=len(set(self.layer_specs())))

        def compiled(function: Any) -> Any:
            return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)

        parts = Parts(*map(compiled, self._parts))
        self._parts = parts._replace(chunk_loss=with_kernel(compiled(chunk_loss_)))
        self.compiled = True

    def kernel(self) -> str:
        """The attention kernel to compute with."""
        head = self.lm_head.weight
        return self.attention_kernel or usual_kernel(self.shape.head_dim, head.dtype, head.device)

    # --- tokens in, loss or logits out
    def loss_sum(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        dropout: DropoutKeys | None = None,
        *,
        scale: Tensor | None = None,
        noise_key: Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Summed loss of all targets that are not loss.IGNORE.

        With a `scale` (0-dim), the gradients of scale × loss are added to the accumulators. `noise_key`
        (0-dim int32) decides how accumulators in bf16 are rounded. With `layers` only these are computed: the
        loss then means nothing, but one layer of each kind has every kernel compiled.
        """
        training = scale is not None
        with torch.set_grad_enabled(training):
            x_BTD = self._begin(tokens_BT, 0, dropout).requires_grad_(training)
            layer_inputs = self._layer_inputs(tokens_BT, x_BTD, 0, dropout)
            n_BTD = self._through_layers(x_BTD, layer_inputs, noise_key, layers)
            loss = linear_cross_entropy(
                n_BTD.flatten(0, 1), self.lm_head.weight, targets_BT.flatten(),
                chunk=self.loss_chunk, scale=scale, options=self.loss_options,
                chunk_loss=self._parts.chunk_loss, head_accumulator_VD=self._accumulators.get(self.head_name),
            )  # fmt: skip
            del n_BTD  # the backward pass does not need it
            if training:
                loss.backward()  # type: ignore[no-untyped-call]
                assert x_BTD.grad is not None
                self._begin_backward(tokens_BT, x_BTD.grad, layer_inputs, dropout)
        return loss.detach()

    @torch.no_grad()
    def loss_sums(self, tokens_BT: Tensor, targets_BT: Tensor, apart_R: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss of all targets, as in loss_sum, and of the targets at `apart_R` of all B×T.

        The layers run once; only the head computes the rows apart a second time.
        """
        x_ND, targets_N = self.hidden(tokens_BT).flatten(0, 1), targets_BT.flatten()
        head_VD = self.lm_head.weight
        total = linear_cross_entropy(
            x_ND, head_VD, targets_N,
            chunk=self.loss_chunk, options=self.loss_options, chunk_loss=self._parts.chunk_loss,
        )  # fmt: skip
        # Not the compiled loss: it would be compiled again for every number of rows.
        apart = linear_cross_entropy(
            x_ND[apart_R], head_VD, targets_N[apart_R],
            chunk=min(self.loss_chunk, _APART_CHUNK), options=self.loss_options,
        )  # fmt: skip
        return total, apart

    def _through_layers(
        self,
        x_BTD: Tensor,
        layer_inputs: list[Any],
        noise_key: Tensor | None,
        only: Sequence[int] | None = None,
    ) -> Tensor:
        """From the embedding to the normalised last hidden state."""
        n_layer, middle_layer = self.shape.n_layer, self.middle_layer
        if only is not None and middle_layer is not None:
            # The norm still takes two inputs. They are the same tensor where a full pass has it so.
            middle_layer = only[-1 if middle_layer == n_layer - 1 else 0]
        nothing: list[None] = [None] * n_layer
        accumulators = self._layer_accumulators if torch.is_grad_enabled() else nothing
        # Every layer has a key of its own for its rounding, for the same reason as in dropout.
        noise = nothing if noise_key is None else keys_for_layers(noise_key[None], n_layer)[:, 0]
        layers = list(zip(self.layer_specs(), self._layers(), accumulators, layer_inputs, noise, strict=True))
        middle: tuple[Tensor, ...] = ()
        for number in range(n_layer) if only is None else only:
            spec, weights, added_to, inputs, key = layers[number]
            layer = LayerRun(self._parts, spec, number, weights, added_to, inputs, key, self._hooks)
            x_BTD = run_layer(x_BTD, layer, self.saved_fields[self.recompute])
            if number == middle_layer:
                middle = (x_BTD,)
        return run_layer(x_BTD, self._last_norm(), 1, *middle)

    @torch.no_grad()
    def hidden(self, tokens_BT: Tensor, dropout: DropoutKeys | None = None) -> Tensor:
        """The normalised last hidden state."""
        x_BTD = self._begin(tokens_BT, 0, dropout)
        return self._through_layers(x_BTD, self._layer_inputs(tokens_BT, x_BTD, 0, dropout), None)

    @torch.no_grad()
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of every position."""
        return self._capped(F.linear(self.hidden(tokens_BT), self.lm_head.weight))

    def new_cache(self, batch: int, capacity: int) -> list[LayerCache]:
        """Room for `capacity` tokens."""
        head = self.lm_head.weight
        size = (batch, self.shape.n_head, capacity, self.shape.head_dim)
        return [LayerCache(size, head.device, head.dtype) for _ in range(self.shape.n_layer)]

    @torch.no_grad()
    def next_logits(self, tokens_BT: Tensor, cache: list[LayerCache]) -> Tensor:
        """Logits (B, V) after the last of these tokens; the cache holds what came before them."""
        position = cache[0].length
        x_BTD = self._begin_decoding(tokens_BT, cache)
        layer_inputs = self._layer_inputs(tokens_BT, x_BTD, position, None)
        layers = zip(self._layers(), self.layer_specs(), layer_inputs, cache, strict=True)
        middle: tuple[Tensor, ...] = ()
        with sdpa_kernel(_DECODING_BACKENDS):
            for number, layer in enumerate(layers):
                x_BTD = self._decode_layer(x_BTD, *layer)
                if number == self.middle_layer:
                    middle = (x_BTD[:, -1:],)
        last_B1D = self._last_norm().forward(x_BTD[:, -1:], *middle)[0]
        return self._capped(F.linear(last_B1D[:, 0], self.lm_head.weight))

    def _capped(self, logits: Tensor) -> Tensor:
        softcap = self.loss_options.softcap
        return softcap * torch.tanh(logits.float() / softcap) if softcap else logits


def seed_of(seed: int, name: str) -> int:
    """A generator's seed for one tensor."""
    # Not hash(): it is salted per process.
    value = seed
    for byte in name.encode():
        value = (value * 1_000_003 + byte) % (2**61 - 1)
    return value
